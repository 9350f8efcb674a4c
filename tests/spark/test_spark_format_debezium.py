"""Topics of Debezium's connectors: events after its documented examples, in JSON and in Avro."""

from __future__ import annotations

import base64
import datetime
import json
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.spark.formats import Row, avro, avro_schema, decode, framed, records_of
from support.spark.sinks import topic_sink
from tidemill.base.errors import InvalidError
from tidemill.spark import Pipeline
from tidemill.spark.formats.record_format import declare_topic
from tidemill.spark.formats.schemas.writer_schema import NO_SCHEMAS, KnownSchemas
from tidemill.spark.formats.topic_decoder import TopicDecoder
from tidemill.spark.merge.commands import Truncate

MYSQL_SOURCE = {
    "version": "3.2.0.Final", "connector": "mysql", "name": "mysql-server-1", "ts_ms": 1465581029000,
    "snapshot": "false", "db": "inventory", "sequence": None, "table": "customers", "server_id": 223344, "gtid": None,
    "file": "mysql-bin.000003", "pos": 484, "row": 0, "thread": 7, "query": None,
}  # fmt: skip
POSTGRES_SOURCE = {
    "version": "3.2.0.Final", "connector": "postgresql", "name": "PostgreSQL_server", "ts_ms": 1559033904863,
    "snapshot": "false", "db": "postgres", "sequence": '["24023119","24023128"]', "schema": "public",
    "table": "customers", "txId": 556, "lsn": 24023128, "xmin": None,
}  # fmt: skip
SQLSERVER_SOURCE = {
    "version": "3.2.0.Final", "connector": "sqlserver", "name": "server1", "ts_ms": 1559729468470, "snapshot": "false",
    "db": "testDB", "sequence": None, "schema": "dbo", "table": "customers", "change_lsn": "00000027:00000758:0003",
    "commit_lsn": "00000027:00000758:0005", "event_serial_no": 1,
}  # fmt: skip
CUSTOMERS = "id int, first_name string, last_name string, email string"
ANNE = {"id": 1004, "first_name": "Anne", "last_name": "Kretchmar", "email": "annek@noanswer.org"}


def event(op: str, before: Row | None, after: Row | None, source: Row = MYSQL_SOURCE) -> Row:
    return {"before": before, "after": after, "source": source, "op": op, "ts_ms": 1465581029523, "transaction": None}


def as_bytes(value: Any) -> bytes | None:
    return value if value is None or isinstance(value, bytes) else json.dumps(value).encode()


def read(
    *events: tuple[Any, Any], schema: str = CUSTOMERS, key: str = "id", **more: Any
) -> tuple[list[Row], list[str]]:
    return decode([(as_bytes(k), as_bytes(v)) for k, v in events], schema=schema, key=key, envelope="debezium", **more)


def wrapped(event: Any, fields: Sequence[Row], key: bool = False) -> Row:
    """The event with the schema that Kafka Connect's JSON converter adds. `fields`: of the row."""
    if key:
        return {"schema": {"type": "struct", "fields": fields, "optional": False, "name": "s.Key"}, "payload": event}
    row = {"type": "struct", "fields": fields, "optional": True, "name": "mysql-server-1.inventory.customers.Value"}
    described = [{**row, "field": "before"}, {**row, "field": "after"}, {"type": "string", "field": "op"}]
    return {"schema": {"type": "struct", "fields": described, "name": "s.Envelope"}, "payload": event}


def described(name: str, kind: str, logical: str = "", **more: Any) -> Row:
    return {"type": kind, "optional": True, "field": name, **({"name": logical} if logical else {}), **more}


CUSTOMER_FIELDS = [described("id", "int32"), *(described(n, "string") for n in ("first_name", "last_name", "email"))]


@pytest.mark.parametrize("with_schema", [False, True])
@pytest.mark.parametrize("source", [MYSQL_SOURCE, POSTGRES_SOURCE, SQLSERVER_SOURCE])
def test_a_row_is_created_updated_and_deleted(source: Row, with_schema: bool) -> None:
    marie = {**ANNE, "first_name": "Anne Marie"}
    before = ANNE if source is not POSTGRES_SOURCE else None  # PostgreSQL sends it only with REPLICA IDENTITY FULL
    old = marie if source is not POSTGRES_SOURCE else {"id": 1004, "first_name": None, "last_name": None, "email": None}
    found = [
        event("r", None, {**ANNE, "id": 1}, source), event("c", None, ANNE, source), event("u", before, marie, source),
        event("d", old, None, source),
    ]  # fmt: skip
    keys: list[Any] = [{"id": 1}, {"id": 1004}, {"id": 1004}, {"id": 1004}]
    if with_schema:
        found = [wrapped(one, CUSTOMER_FIELDS) for one in found]
        keys = [wrapped(one, CUSTOMER_FIELDS[:1], key=True) for one in keys]
    rows, dead = read(*zip(keys, found, strict=True), (keys[3], None))
    assert not dead
    assert [(row["id"], row["first_name"], row["_live"], row["_order"]) for row in rows] == [
        (1, "Anne", True, 10), (1004, "Anne", True, 11), (1004, "Anne Marie", True, 12), (1004, None, False, 13),
        (1004, None, False, 14),
    ]  # fmt: skip


def test_a_deletion_without_the_row_before_has_the_key_of_the_record() -> None:
    rows, dead = read(({"id": 5}, event("d", None, None)), (None, event("d", None, None)), (None, None))
    assert [(row["id"], row["_live"]) for row in rows] == [(5, False)]
    assert dead == ["a deletion without a key"] * 2


def test_a_changed_primary_key_is_a_deletion_a_tombstone_and_a_creation() -> None:
    rows, dead = read(
        ({"id": 1004}, event("d", ANNE, None)),
        ({"id": 1004}, None),
        ({"id": 2004}, event("c", None, {**ANNE, "id": 2004})),
    )
    assert [(row["id"], row["_live"]) for row in rows] == [(1004, False), (1004, False), (2004, True)] and not dead


def test_an_update_that_changes_a_key_which_is_not_the_connectors_removes_the_former_row() -> None:
    rows, dead = read(
        ({"id": 1004}, event("c", None, ANNE)),
        ({"id": 1004}, event("u", ANNE, {**ANNE, "email": "new"})),
        ({"id": 1004}, event("u", {**ANNE, "email": "new"}, {**ANNE, "email": "new", "last_name": "x"})),
        key="email",
    )
    assert [(row["email"], row["_live"], row["_order"]) for row in rows] == [
        ("annek@noanswer.org", True, 10), ("annek@noanswer.org", False, 11), ("new", True, 11), ("new", True, 12)
    ]  # fmt: skip
    assert not dead


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"ts_ms": 1}, "not a change event of a row: it has no op"),
        ({"source": MYSQL_SOURCE, "databaseName": "inventory", "ddl": "CREATE TABLE x"}, "it has no op"),
        ({"status": "BEGIN", "id": "571", "event_count": None}, "it has no op"),
        ({"schema": None, "payload": {"ts_ms": 1}}, "it has no op"),
        (event("m", None, None), "unknown op 'm'"),
        (event("c", None, None), "after is null"),
        (event("c", None, {"id": None}), "key column"),
        (event("c", None, {**ANNE, "id": "x"}), "id"),
        ({**event("c", None, ANNE), "op": 5}, "Expected `str`"),
        ({**event("c", None, ANNE), "after": [1]}, "Expected `object`"),
        ({"schema": 5, "payload": event("c", None, ANNE)}, "the record's schema cannot be read"),
        (b"{", "truncated"),
        (b"", "truncated"),
    ],
)
def test_anything_but_a_change_of_a_row_is_a_dead_letter_and_its_key_is_absent(value: Any, reason: str) -> None:
    good = event("c", None, ANNE)
    rows, dead = read(({"id": 1}, good), (b"x", value), ({"id": 1}, good))
    assert [row["_order"] for row in rows if row["_live"]] == [10, 12]
    assert len(dead) == 1 and reason in dead[0]
    if reason == "key column":
        return  # the row contradicts the record's key
    rows, dead = read(({"id": 1004}, good), ({"id": 1004}, value))
    assert (1004, False, 11) in [(row["id"], row["_live"], row["_order"]) for row in rows]
    assert len(dead) == 1 and reason in dead[0]


DAY = (datetime.date(2026, 1, 2) - datetime.date(1970, 1, 1)).days
US = 1_767_323_045_678_901
AT = datetime.datetime(2026, 1, 2, 3, 4, 5, 678901)
AT_MS = AT.replace(microsecond=678000)
UTC = datetime.UTC
CONNECT, DEBEZIUM = "org.apache.kafka.connect.data", "io.debezium.time"
VARIABLE = "io.debezium.data.VariableScaleDecimal"
PRICE = {"parameters": {"scale": "2", "connect.decimal.precision": "8"}}


@pytest.mark.parametrize(
    ("field", "value", "declared", "expected"),
    [
        (described("v", "int32", f"{DEBEZIUM}.Date"), DAY, "date", datetime.date(2026, 1, 2)),
        (described("v", "int32", f"{CONNECT}.Date"), DAY, "date", datetime.date(2026, 1, 2)),
        (described("v", "int64", f"{DEBEZIUM}.Timestamp"), US // 1000, "timestamp_ntz", AT_MS),
        (described("v", "int64", f"{DEBEZIUM}.MicroTimestamp"), US, "timestamp_ntz", AT),
        (described("v", "int64", f"{DEBEZIUM}.NanoTimestamp"), US * 1000, "timestamp_ntz", AT),
        (described("v", "int64", f"{DEBEZIUM}.MicroTimestamp"), US, "bigint", US),
        (described("v", "int64", f"{CONNECT}.Timestamp"), US // 1000, "timestamp_ntz", AT_MS),
        (described("v", "int64", f"{CONNECT}.Timestamp"), US // 1000, "timestamp", AT_MS.replace(tzinfo=UTC)),
        (described("v", "string", f"{DEBEZIUM}.ZonedTimestamp"), "2026-01-02T05:04:05.678901+02:00", "timestamp",
         AT.replace(tzinfo=UTC)),
        (described("v", "string", f"{DEBEZIUM}.IsoDate"), "2026-01-02Z", "date", datetime.date(2026, 1, 2)),
        (described("v", "string", f"{DEBEZIUM}.IsoTimestamp"), "2026-01-02T03:04:05.678901Z", "timestamp_ntz", AT),
        (described("v", "int32", f"{DEBEZIUM}.Time"), 3_600_500, "string", "01:00:00.5"),
        (described("v", "int64", f"{DEBEZIUM}.MicroTime"), 3_600_500_000, "string", "01:00:00.5"),
        (described("v", "int64", f"{DEBEZIUM}.NanoTime"), 3_600_500_000_000, "string", "01:00:00.5"),
        (described("v", "int32", f"{DEBEZIUM}.Year"), 2026, "int", 2026),
        (described("v", "bytes", f"{CONNECT}.Decimal", **PRICE), base64.b64encode(b"\x04\xd2").decode(), "decimal(8,2)",
         Decimal("12.34")),
        (described("v", "struct", VARIABLE), {"scale": 3, "value": "BNI="}, "decimal(8,3)",
         Decimal("1.234")),
        (described("v", "string"), "12.34", "decimal(8,2)", Decimal("12.34")),
        (described("v", "double"), 12.34, "decimal(8,2)", Decimal("12.34")),
        (described("v", "bytes"), "AAE=", "binary", b"\0\1"),
        (described("v", "int16"), 1, "boolean", True),
        (described("v", "boolean"), False, "boolean", False),
        (described("v", "string", "io.debezium.data.Json"), '{"a": 1}', "json", '{"a": 1}'),
        (described("v", "string", "io.debezium.data.Uuid"), "6e8e", "string", "6e8e"),
        (described("v", "array", items={"type": "int32"}), [1, 2], "json", "[1, 2]"),
        (described("v", "double"), 1, "double", 1.0),
        (described("v", "float"), 0.5, "float", 0.5),
        (described("v", "int64"), 7, "double", 7.0),
        (described("v", "int64", f"{DEBEZIUM}.MicroTimestamp"), US, "timestamp", None),
        (described("v", "string"), "x", "int", None),
        (described("v", "bytes"), "AAE=", "string", None),
    ],
)  # fmt: skip
def test_a_value_is_read_by_the_name_of_its_schema(field: Row, value: Any, declared: str, expected: Any) -> None:
    fields = [described("id", "int32"), field]
    values = [wrapped(event("c", None, {"id": 1, "v": one}), fields) for one in (value, None)]
    rows, dead = read(*((None, one) for one in values), schema=f"id int, v {declared}")
    if expected is None:
        assert not any(row["_live"] for row in rows) and {row["id"] for row in rows} == {1}
        assert len(dead) == 2 and "column=v: the record's schema has" in dead[0]
        assert "which is never" in dead[0]
    else:
        assert not dead and [row["v"] for row in rows] == [expected, None]


@pytest.mark.parametrize(
    ("value", "declared", "expected"),
    [
        (DAY, "date", datetime.date(2026, 1, 2)),
        ("2026-01-02Z", "date", datetime.date(2026, 1, 2)),
        ("2026-01-02T03:04:05.678901Z", "timestamp", AT.replace(tzinfo=UTC)),
        ("2026-01-02T03:04:05.678901", "timestamp_ntz", AT),
        (US, "timestamp", "milliseconds, microseconds or nanoseconds"),
        (US, "timestamp_ntz", "milliseconds, microseconds or nanoseconds"),
        (US, "bigint", US),
        ("12.34", "decimal(8,2)", Decimal("12.34")),
        (12.34, "decimal(8,2)", Decimal("12.34")),
        ({"scale": 2, "value": "BNI="}, "decimal(8,2)", Decimal("12.34")),
        ("1234", "decimal(8,2)", "digits or base64"),
        ("BNI=", "decimal(8,2)", "not the text of a decimal"),
        ("123", "decimal(8,2)", Decimal(123)),
        ("AAE=", "binary", b"\0\1"),
        ("deadbeef", "binary", "hexadecimal or base64"),
        ("abc", "binary", "not bytes in base64"),
        (1, "boolean", True),
        (2, "boolean", "not a boolean"),
        ("NaN", "double", "nan"),
        (0.5, "float", 0.5),
        ('{"a": 1}', "json", '{"a": 1}'),
        ({"a": [1]}, "json", '{"a": [1]}'),
        ("{", "json", "column=v"),
        (5, "string", "column=v"),
        ("x", "string", "x"),
        ("2147483648", "int", "column=v"),
        (2147483648, "int", "column=v"),
    ],
)
def test_without_a_schema_only_what_is_unambiguous_is_read(value: Any, declared: str, expected: Any) -> None:
    text = json.dumps(event("c", None, {"id": 1, "v": "%"})).replace('"%"', json.dumps(value))
    null = event("c", None, {"id": 2, "v": None})
    rows, dead = read((None, text.encode()), (None, null), schema=f"id int, v {declared}")
    if isinstance(expected, str) and expected not in ("nan", "x", '{"a": 1}', '{"a": [1]}'):
        assert [(row["id"], row["_live"]) for row in rows] == [(1, False), (2, True)]
        assert len(dead) == 1 and expected in dead[0]
    else:
        got = rows[0]["v"]
        assert not dead and (got == expected or str(got) == expected) and rows[1]["v"] is None


# Avro -----------------------------------------------------------------------------------------------------


def connect(kind: str, name: str, **more: Any) -> Row:
    return {"type": kind, "connect.version": 1, "connect.name": name, **more}


ORDERS = (
    "id bigint, day date, at timestamp_ntz, sent timestamp, price decimal(8,2), note string, ok boolean, raw binary,"
    " clock string"
)
VALUE: Row = {
    "type": "record", "name": "Value", "fields": [
        {"name": "id", "type": "long"},
        {"name": "day", "type": ["null", connect("int", f"{DEBEZIUM}.Date")], "default": None},
        {"name": "at", "type": ["null", connect("long", f"{DEBEZIUM}.MicroTimestamp")], "default": None},
        {"name": "sent", "type": ["null", connect("string", f"{DEBEZIUM}.ZonedTimestamp")], "default": None},
        {"name": "price", "type": ["null", connect("bytes", f"{CONNECT}.Decimal", scale=2, precision=8,
            logicalType="decimal")], "default": None},
        {"name": "note", "type": ["null", "string"], "default": None},
        {"name": "ok", "type": ["null", {"type": "int", "connect.type": "int16"}], "default": None},
        {"name": "raw", "type": ["null", "bytes"], "default": None},
        {"name": "clock", "type": ["null", connect("long", f"{DEBEZIUM}.MicroTime")], "default": None},
    ],
}  # fmt: skip
ENVELOPE: Row = {
    "type": "record", "name": "Envelope", "namespace": "shop.public.orders", "fields": [
        {"name": "before", "type": ["null", VALUE], "default": None},
        {"name": "after", "type": ["null", "Value"], "default": None},
        {"name": "source", "type": {"type": "record", "name": "Source", "fields": [
            {"name": "version", "type": "string"}, {"name": "lsn", "type": ["null", "long"]}]}},
        {"name": "op", "type": "string"},
        {"name": "ts_ms", "type": ["null", "long"], "default": None},
    ],
}  # fmt: skip
KEY: Row = {
    "type": "record",
    "name": "Key",
    "namespace": "shop.public.orders",
    "fields": [{"name": "id", "type": "long"}],
}
LOOKUP = KnownSchemas([avro_schema(ENVELOPE, 7), avro_schema(KEY, 6), avro_schema("string", 5)])
FIELDS = [
    described("id", "int64"), described("day", "int32", f"{DEBEZIUM}.Date"),
    described("at", "int64", f"{DEBEZIUM}.MicroTimestamp"), described("sent", "string", f"{DEBEZIUM}.ZonedTimestamp"),
    described("price", "bytes", f"{CONNECT}.Decimal", **PRICE), described("note", "string"), described("ok", "int16"),
    described("raw", "bytes"), described("clock", "int64", f"{DEBEZIUM}.MicroTime"),
]  # fmt: skip


def avro_event(op: str, before: Row | None, after: Row | None) -> bytes:
    source = {"version": "3.2.0.Final", "lsn": 5}
    return avro(ENVELOPE, {"before": before, "after": after, "source": source, "op": op, "ts_ms": None})


def json_event(op: str, before: Row | None, after: Row | None) -> bytes:
    def plain(row: Row | None) -> Row | None:
        if row is None:
            return None
        price = row["price"]
        unscaled = None if price is None else int(price * 100).to_bytes(8, "big", signed=True)
        coded = {"price": unscaled, "raw": row["raw"]}
        return row | {n: None if v is None else base64.b64encode(v).decode() for n, v in coded.items()}

    return json.dumps(wrapped(event(op, plain(before), plain(after)), FIELDS)).encode()


def maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


ROW = st.fixed_dictionaries(
    {
        "id": st.integers(0, 3),
        "day": maybe(st.integers(-700_000, 2_900_000)),
        "at": maybe(st.integers(-(10**16), 10**16)),
        "sent": maybe(st.just("2026-01-02T03:04:05.5Z")),
        "price": maybe(st.decimals(-999999, 999999, places=2)),
        "note": maybe(st.text(max_size=3)),
        "ok": maybe(st.integers(0, 1)),
        "raw": maybe(st.binary(max_size=3)),
        "clock": maybe(st.integers(0, 86_399_999_999)),
    }
)
EVENTS = st.lists(st.tuples(st.sampled_from("crud"), ROW, ROW), min_size=1, max_size=5)


@settings(max_examples=15, deadline=None)
@given(EVENTS, st.booleans())
def test_events_in_avro_give_the_table_of_events_in_json(found: list[tuple[str, Row, Row]], wide: bool) -> None:
    found = found * 30 if wide else found
    rows = [(op, old if op in "ud" else None, None if op == "d" else new) for op, old, new in found]
    as_avro: list[tuple[Any, Any]] = [(avro(KEY, {"id": 1}, 6), avro_event(*one)) for one in rows]
    as_json = [({"id": 1}, json_event(*one)) for one in rows]
    as_avro += [(avro(KEY, {"id": 2}, 6), None), (None, None)]
    as_json += [({"id": 2}, None), (None, None)]  # type: ignore[list-item]
    expected = read(*as_json, schema=ORDERS)
    assert read(*as_avro, schema=ORDERS, format="avro", schemas=LOOKUP) == expected
    assert expected[1] == ["a deletion without a key"]
    assert sum(row["_live"] for row in expected[0]) == sum(op != "d" for op, _, _ in rows)
    framed_json = [(as_bytes(k), None if v is None else framed(9, v)) for k, v in as_json]
    assert read(*framed_json, schema=ORDERS, format="json_schema") == expected


@pytest.mark.parametrize("wide", [False, True])
def test_what_is_no_event_in_avro_is_a_dead_letter(wide: bool) -> None:
    good = avro_event("c", None, {"id": 1})
    others = [(None, good)] * (70 if wide else 1)
    bad = [
        (good[:-1], "the record ends early"), (avro_event("x", None, None), "unknown op 'x'"),
        (avro_event("u", None, None), "after is null"), (avro(KEY, {"id": 1}, 6), "it has no op"),
        (avro("string", "x", 5), "schema 5 is no record"), (b"{}", "not framed"),
        (framed(99, b""), "the registry has no schema 99"),
    ]  # fmt: skip
    lookup = KnownSchemas([*LOOKUP.find([5, 6, 7]).values(), avro_schema("", 99).__class__(99)])
    rows, dead = read(*others, *((None, value) for value, _ in bad), *others, schema="id bigint", format="avro",
        schemas=lookup)  # fmt: skip
    assert [row["id"] for row in rows] == [1] * 2 * len(others) and len(dead) == len(bad)
    for value, _ in bad:
        rows, _ = read((avro(KEY, {"id": 3}, 6), value), schema="id bigint", format="avro", schemas=lookup)
        assert [(row["id"], row["_live"]) for row in rows] == [(3, False)]
    for _, reason in bad:
        assert any(reason in one for one in dead), (reason, dead)


# truncations and values that are not sent -------------------------------------------------------------------


def test_a_truncation_deletes_every_row_of_a_topic_with_one_partition_and_stops_a_table_of_several() -> None:
    table, form = declare_topic("t", "id", CUSTOMERS, {"envelope": "debezium"})
    records = records_of(
        [(as_bytes({"id": 1}), as_bytes(event("c", None, ANNE))), (None, as_bytes(event("t", None, None)))]
    )
    commands, dead, stop = TopicDecoder(table, form, 1).decode(records, NO_SCHEMAS)
    assert commands.truncates == (Truncate(1100, 1, 11),) and not dead.num_rows and stop is None
    commands, dead, stop = TopicDecoder(table, form, 2).decode(records, NO_SCHEMAS)
    assert stop is not None and (stop.time_ms, stop.offset, commands.truncates, dead.num_rows) == (1100, 11, (), 0)
    assert "truncated" in stop.reason and "topic=t partition=1 offset=11" in stop.reason and stop.fix


def produce(harbour: Any, topic: Any, time_ms: int, *events: tuple[Any, Any]) -> None:
    harbour.produce(topic, list(events))
    harbour.mint("topic/orders", time_ms, topic)


@pytest.mark.parametrize("form", ["json", "avro"])
def test_a_table_follows_inserts_updates_truncations_and_values_that_are_not_sent(
    form: str, harbour: Any, tmp_path: Path
) -> None:
    topic = harbour.create_topic("orders")
    declared = {"key": "id", "schema": "id bigint, note string, ok boolean", "envelope": "debezium", "format": form}
    sink = topic_sink(harbour, tmp_path / "s", "orders", **declared)
    table = sink.seats.tables[0]
    if form == "avro":
        table.schemas._cache.known.update(LOOKUP.find([6, 7]))

    def row(op: str, **after: Any) -> tuple[Any, Any]:
        if form == "avro":
            return avro(KEY, {"id": after["id"]}, 6), avro_event(op, None, after)
        return {"id": after["id"]}, event(op, None, after)

    unsent = "__debezium_unavailable_value"
    produce(harbour, topic, 1000, row("r", id=1, note="long", ok=0), row("r", id=2, note="b", ok=1))
    produce(harbour, topic, 2000, row("u", id=1, note=unsent, ok=1), row("u", id=9, note=unsent, ok=1))
    sink.process(sink.latest())
    assert not sink.seats.failed
    expected = [{"id": 1, "note": "long", "ok": True}, {"id": 2, "note": "b", "ok": True}]
    assert harbour.contents("orders") == expected
    (letter,) = harbour.contents("p.dead_letters")
    assert "the previous row, which has the values of note, is missing" in letter["reason"]
    end = (None, avro_event("t", None, None) if form == "avro" else event("t", None, None))
    produce(harbour, topic, 3000, row("c", id=3, note="c", ok=1), end, row("c", id=4, note="d", ok=0))
    sink.process(sink.latest())
    assert not sink.seats.failed and [r["id"] for r in harbour.contents("orders")] == [4]


def test_the_table_of_a_truncated_topic_with_several_partitions_stops_before_the_truncation(
    harbour: Any, tmp_path: Path
) -> None:
    topic = harbour.create_topic("orders", 2)
    sink = topic_sink(harbour, tmp_path / "s", "orders", key="id", schema="id bigint", envelope="debezium")
    produce(harbour, topic, 1000, ({"id": 1}, event("c", None, {"id": 1})))
    produce(harbour, topic, 2000, ({"id": 2}, event("c", None, {"id": 2})), (None, event("t", None, None)))
    sink.process(sink.latest())
    assert "the source table was truncated" in str(sink.seats.failed["orders"])
    assert harbour.upper("orders") == 2000 and harbour.contents("orders") == [{"id": 1}]


def test_events_in_protobuf_are_refused() -> None:
    with pytest.raises(InvalidError, match="format=protobuf envelope=debezium"):
        Pipeline("p").topic("t", key="id", schema="id int", format="protobuf", envelope="debezium")
