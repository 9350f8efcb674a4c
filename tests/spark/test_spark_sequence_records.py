"""`sequence_by` of `p.topic`: its declaration, and the sequence of each record."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.spark.formats import decode
from tidemill.base.errors import InvalidError
from tidemill.spark.formats.record_format import (
    PLAIN,
    declare_topic,
    decode_format,
    format_difference,
)
from tidemill.topics.batch import Record

SCHEMA = "id int, version long, name string, gone boolean"


def declared(**options: Any) -> Any:
    return declare_topic("t", options.pop("key", "id"), options.pop("schema", SCHEMA), options)  # type: ignore[arg-type]


def records(*values: Any) -> list[tuple[bytes, bytes | None]]:
    return [(b"1", None if v is None else json.dumps(v).encode()) for v in values]


def test_a_sequence_is_one_column_of_the_table_or_several() -> None:
    _, found = declared(sequence_by="version, name", sequence_keep_s=60)
    assert found.sequence_rule is not None
    assert (found.sequence_rule.columns, found.sequence_rule.keep_ms) == (("version", "name"), 60_000)
    _, found = declared(sequence_by=("at", "o"), include={"timestamp": "at", "offset": "o"})
    assert found.sequence_rule is not None and found.sequence_rule.keep_ms == 172_800_000
    assert found.record_sequence == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_by": "missing"}, "no such column: topic=t sequence_by=missing"),
        ({"sequence_by": "version", "except_columns": "version"}, "no such column: topic=t sequence_by=version"),
        ({"sequence_by": "id"}, "a key column orders no records"),
        ({"sequence_by": "version, version"}, "names a column twice"),
        ({"sequence_by": ""}, "names no column"),
        ({"sequence_keep_s": 5}, "names no column"),
        ({"sequence_by": "version", "sequence_keep_s": 0}, "out of range"),
        ({"sequence_by": "h", "include": {"headers": "h"}}, "have no order: topic=t sequence_by=h type=json"),
        ({"schema": "id int, _deleted_ms long", "sequence_by": "_deleted_ms"}, "reserved column name"),
    ],
)
def test_a_wrong_sequence_is_refused_with_its_column(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidError, match=message):
        declared(**options)


def test_a_changed_sequence_is_another_format() -> None:
    before, now = declared(sequence_by="version")[1].encode(), declared(sequence_by="version, name")[1].encode()
    assert format_difference(before, now) == "sequence_by: version became version, name"
    assert format_difference("", now) == "sequence_by: none became version, name"
    shorter = declared(sequence_by="version", sequence_keep_s=60)[1].encode()
    assert format_difference(before, shorter) == "sequence_keep_s: 172800.0 became 60.0"
    assert decode_format(now).sequence_by == ("version", "name") and PLAIN.encode() == ""


def test_a_record_without_a_sequence_is_a_dead_letter() -> None:
    rows, dead = decode(
        records({"id": 1, "version": 5, "name": "a"}, {"id": 1, "name": "b"}, {"id": 2, "version": 1, "gone": True},
                {"id": 3, "gone": True}, None),
        schema=SCHEMA, sequence_by="version", delete_when="gone", except_columns="gone",
    )  # fmt: skip
    assert [(r["id"], r["version"], r["_live"]) for r in rows] == [(1, 5, True), (2, 1, False)]
    assert dead[0] == dead[1] == "the sequence is null: column=version" and len(dead) == 3
    assert "a record without a value has no version; mark deletions with delete_when" in dead[2]


def test_metadata_of_kafka_gives_every_record_a_sequence() -> None:
    found = [
        Record(b"1", b'{"id":1,"version":1}', (), 50, 0),
        Record(b"1", None, (), 40, 0),
        Record(b"1", None, (), -1, 0),
    ]
    rows, dead = decode(found, schema=SCHEMA, sequence_by="at", include={"timestamp": "at"})
    assert [(r["at"].timestamp(), r["_live"]) for r in rows] == [(0.05, True), (0.04, False)]
    assert dead == [dead[0]] and dead[0].startswith("a deletion without a sequence")


def event(op: str, before: Any, after: Any) -> bytes:
    return json.dumps({"op": op, "before": before, "after": after}).encode()


def test_deletions_of_debezium_have_the_sequence_of_the_row_before() -> None:
    row, key = {"id": 1, "version": 5, "name": "a"}, b'{"id": 1}'
    moved = {"id": 2, "version": 6, "name": "a"}
    rows, dead = decode(
        [
            (key, event("c", None, row)),
            (key, event("d", row, None)),
            (key, None),  # the tombstone after a deletion
            (key, event("u", row, moved)),
            (key, event("d", {"id": 1}, None)),
            (key, event("d", None, None)),
            (key, event("u", row, {"id": 1, "version": "x"})),
        ],
        schema="id int, version long, name string", sequence_by="version", envelope="debezium",
    )  # fmt: skip
    shown = [(r["_order"] - 10, r["_live"], r["id"], r["version"]) for r in rows]
    assert shown == [(0, True, 1, 5), (1, False, 1, 5), (3, False, 1, 6), (3, True, 2, 6)]
    assert [reason.split(":")[0] for reason in dead] == ["a deletion without a sequence"] * 2 + ["column=version"]
    assert "REPLICA IDENTITY FULL" in dead[0]


def test_values_that_a_connector_did_not_send_make_a_dead_letter() -> None:
    unsent = {"id": 1, "version": 6, "name": "__debezium_unavailable_value"}
    rows, dead = decode(
        [(b"1", event("u", None, unsent))],
        schema="id int, version long, name string", sequence_by="version", envelope="debezium",
    )  # fmt: skip
    assert rows == [] and dead == [
        "values that the connector did not send cannot be filled in the order of sequence_by"
    ]
