"""Options of a topic: which columns the table has, metadata of Kafka, conditional deletions, and what is refused."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from support.spark.formats import as_json, decode
from support.spark.sinks import topic_sink
from tidemill.base.errors import InvalidError
from tidemill.metastore.catalogue import PipelineRow
from tidemill.spark import Pipeline
from tidemill.spark.check import check_file
from tidemill.spark.formats.record_format import PLAIN, decode_format, format_difference
from tidemill.spark.ingest.table_ownership import find_refused, row_without_refused
from tidemill.topics.batch import Record


def record(key: bytes | None, value: dict[str, Any] | None, *headers: tuple[str, bytes | None]) -> Record:
    return Record(key, None if value is None else as_json(value), headers, 1_700_000_000_123)


ROW = {"id": "a", "n": 1, "gone": None}


def test_metadata_of_kafka_becomes_columns_of_rows() -> None:
    found, dead = decode(
        [record(b"k", ROW, ("trace", b"x"), ("bytes", b"\xff"), ("none", None)), Record(None, as_json(ROW), (), -1)],
        schema="id string, n long",
        include={"timestamp": "sent at", "offset": "o", "partition": "p", "key": "k", "headers": "h"},
    )
    one, two = found
    assert not dead and one["sent at"] == datetime.datetime(2023, 11, 14, 22, 13, 20, 123000, datetime.UTC)
    assert (one["id"], one["n"], one["o"], one["p"], one["k"]) == ("a", 1, 10, 1, "k")
    assert one["h"] == '[{"key":"trace","value":"x"},{"key":"bytes","base64":"/w=="},{"key":"none","value":null}]'
    assert (two["sent at"], two["k"], two["o"], two["h"]) == (None, None, 11, "[]")
    (raw,), _ = decode([record(b"\xff", ROW)], schema="id string", include={"key": "the key binary"})
    assert raw["the key"] == b"\xff"


def test_a_key_that_is_no_text_makes_a_dead_letter_of_its_record_alone() -> None:
    rows = [record(b"k", ROW), record(b"\xff", ROW), record(b"l", ROW)] * 40
    found, dead = decode(rows, schema="id string", include={"key": "k"})
    assert [row["k"] for row in found] == ["k", "l"] * 40 and len(dead) == 40 and "column=k" in dead[0]


def test_the_key_of_the_record_can_be_the_key_of_the_table() -> None:
    found, dead = decode(
        [record(b"k", ROW), record(b"k", None), record(None, ROW), record(None, None)],
        schema="n long", key="k", include={"key": "k"},
    )  # fmt: skip
    assert [(row["k"], row["n"], row["_live"]) for row in found] == [("k", 1, True), ("k", None, False)]
    assert dead == ["a key column is null or absent"] * 2


def test_a_table_with_every_record_has_the_position_as_its_key() -> None:
    found, _ = decode(
        [record(b"k", ROW), record(b"k", ROW)],
        schema="id string",
        key="p, o",
        include={"offset": "o", "partition": "p"},
    )
    assert [(row["p"], row["o"], row["id"]) for row in found] == [(1, 10, "a"), (1, 11, "a")]


def test_a_record_deletes_its_key_if_the_condition_holds_also_by_a_column_that_the_table_lacks() -> None:
    rows = [
        {"id": "a", "n": 1, "gone": True},
        {"id": "b", "n": 2, "gone": None},
        {"id": "c", "n": 3},
        {"id": "d", "n": 4, "gone": False},
    ]
    found, dead = decode(
        [record(None, row) for row in rows], schema="id string, n long, gone boolean", except_columns="gone",
        delete_when="gone OR n = 4",
    )  # fmt: skip
    assert [(row["id"], row["n"], row["_live"]) for row in found] == [
        ("a", None, False), ("b", 2, True), ("c", 3, True), ("d", None, False)
    ]  # fmt: skip
    assert not dead and "gone" not in found[0]
    found, _ = decode([record(None, row) for row in rows], schema="id string, n long, gone boolean", columns="n, id")
    assert [list(row)[:2] for row in found] == [["id", "n"]] * 4


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"format": "xml"}, "unknown format of a topic: topic=clicks format='xml'"),
        ({"envelope": "canal"}, "unknown envelope of a topic: topic=clicks envelope='canal'"),
        ({"registry": "http://r"}, "this format needs no registry: topic=clicks format=json"),
        ({"format": "avro", "registry": "r:8081"}, "not the URL of a registry: topic=clicks"),
        ({"columns": "id", "except_columns": "n"}, "columns and except_columns exclude each other: topic=clicks"),
        ({"columns": "id, m"}, "the schema has no such column: topic=clicks columns=m"),
        ({"except_columns": "m"}, "the schema has no such column: topic=clicks except_columns=m"),
        ({"columns": "n"}, "key column"),
        ({"include": {"topic": "t"}}, "unknown metadata of a record: topic=clicks include=topic"),
        ({"include": "offset"}, "include maps no metadata to columns: topic=clicks include='offset'"),
        ({"include": {"offset": 5}}, "include maps no metadata to columns: topic=clicks include={'offset': 5}"),
        ({"include": {"offset": "o int"}}, "this metadata has another type: topic=clicks include=offset type=int32"),
        ({"include": {"offset": "n"}}, "the schema has a column of this name already: topic=clicks column=n"),
        ({"include": {"offset": "_time"}}, "reserved column name"),
        ({"delete_when": "gone"}, "the table has no such column: column=gone expression=[gone]"),
        ({"delete_when": 5}, "delete_when is no SQL text: topic=clicks delete_when=5"),
        ({"form": "avro"}, "unknown option of a topic: topic=clicks option=form"),
    ],
)
def test_a_wrong_option_is_refused_by_name_and_the_check_of_a_file_has_its_line(
    options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidError) as raised:
        Pipeline("p").topic("clicks", key="id", schema="id string, n long", **options)
    assert reason in str(raised.value) and raised.value.fix
    file = tmp_path / "p.py"
    declared = f"p.topic('clicks', key='id', schema='id string, n long', **{options!r})"
    file.write_text(f"def build(p):\n    p.table('clicks', {declared})\n")
    (problem,) = check_file(file, "p").problems
    assert problem.line == 2 and reason in problem.message and problem.fix


# the format of an existing table ------------------------------------------------------------------------


def encoded(**options: Any) -> str:
    found = Pipeline("p").topic("clicks", key="id", schema="id string, n long", **options).record_format
    text = found.encode()
    assert decode_format(text).encode() == text
    return text


def test_the_catalogue_has_the_format_without_the_password_of_a_registry() -> None:
    assert encoded() == "" and decode_format("") == PLAIN
    text = encoded(format="avro", registry="http://me:secret@registry:8081/")
    assert "secret" not in text and decode_format(text).registry == "http://registry:8081"


@pytest.mark.parametrize(
    ("before", "now", "difference"),
    [
        ({}, {"format": "avro"}, "format: json became avro"),
        ({"delete_when": "n = 1"}, {}, "delete_when: n = 1 became none"),
        ({"include": {"offset": "o"}}, {"include": {"timestamp": "t"}}, "include: offset is no longer o"),
        ({"format": "avro"}, {"format": "avro", "registry": "http://r"}, ""),
        ({}, {"include": {"offset": "o"}}, ""),
    ],
)
def test_a_table_whose_records_were_read_in_another_format_is_refused_until_it_is_dropped(
    before: dict[str, Any], now: dict[str, Any], difference: str
) -> None:
    assert format_difference(encoded(**before), encoded(**now)) == difference
    own, wanted, other = (
        PipelineRow(name, {"clicks": "topic:clicks"}, formats={"clicks": text} if text else {})
        for name, text in (("p", encoded(**before)), ("p", encoded(**now)), ("q", encoded(**before)))
    )
    found = find_refused(wanted, own, [own], {"clicks"})
    assert list(found) == (["clicks"] if difference else [])
    row = row_without_refused(wanted, own, found, {"clicks"})
    assert row.formats == (own.formats if difference else wanted.formats) and row.tables == wanted.tables
    assert not find_refused(wanted, own, [own], set()), "its shard was dropped"
    assert bool(find_refused(wanted, None, [other], set())) == bool(difference)
    if difference:
        assert difference in found["clicks"] and "tidemill table drop clicks --force" in found["clicks"]


def test_deletions_by_condition_and_columns_of_metadata_reach_the_table(harbour: Any, tmp_path: Path) -> None:
    topic = harbour.create_topic("clicks")
    sink = topic_sink(
        harbour, tmp_path / "s", "clicks", key="id", schema="id string, n long, op string", except_columns="op",
        delete_when="op = 'd'", include={"offset": "o"},
    )  # fmt: skip
    harbour.produce(topic, [(None, {"id": "a", "n": 1}), (None, {"id": "b", "n": 2}), (None, {"id": "a", "op": "d"})])
    harbour.mint("topic/clicks", 1000, topic)
    sink.process(sink.latest())
    assert not sink.seats.failed and harbour.contents("clicks") == [{"id": "b", "n": 2, "o": 1}]
