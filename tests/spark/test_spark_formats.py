"""Topics in Avro, Protobuf and JSON Schema: the same tables as JSON topics, and dead letters with a reason."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.spark.formats import Row, as_json, avro, avro_schema, decode, framed
from tidemill.spark.formats.schemas.writer_schema import (
    KnownSchemas,
    MissingSchemasError,
    ReferencedSchema,
    WriterSchema,
)

DDL = (
    "id string, n long, small int, price decimal(8,2), at timestamp, local timestamp_ntz, day date, ok boolean,"
    " ratio double, narrow float, raw binary, kind string"
)
AVRO: dict[str, Any] = {
    "type": "record",
    "name": "Click",
    "namespace": "shop",
    "fields": [
        {"name": "kind", "type": ["null", {"type": "enum", "name": "Kind", "symbols": ["buy", "look"]}]},
        {"name": "id", "type": "string"},
        {"name": "n", "type": ["long", "null"]},
        {"name": "unknown", "type": {"type": "record", "name": "Inner", "fields": [{"name": "x", "type": "bytes"}]}},
        {"name": "small", "type": ["null", "int"]},
        {"name": "price", "type": ["null", {"type": "bytes", "logicalType": "decimal", "precision": 8, "scale": 2}]},
        {"name": "at", "type": ["null", {"type": "long", "logicalType": "timestamp-micros"}]},
        {"name": "local", "type": ["null", {"type": "long", "logicalType": "local-timestamp-micros"}]},
        {"name": "day", "type": ["null", {"type": "int", "logicalType": "date"}]},
        {"name": "ok", "type": ["null", "boolean"]},
        {"name": "ratio", "type": ["null", "double"]},
        {"name": "narrow", "type": ["null", "float"]},
        {"name": "raw", "type": ["null", "bytes"]},
    ],
}
KNOWN = KnownSchemas([avro_schema(AVRO)])


def maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


EARLY, LATE = datetime.datetime(1, 1, 2), datetime.datetime(9999, 12, 30)
ROWS = st.fixed_dictionaries(
    {
        "id": st.text(max_size=4),
        "n": maybe(st.integers(-(2**63), 2**63 - 1)),
        "small": maybe(st.integers(-(2**31), 2**31 - 1)),
        "price": maybe(st.decimals(-999999, 999999, places=2)),
        "at": maybe(st.datetimes(EARLY, LATE, timezones=st.just(datetime.UTC))),
        "local": maybe(st.datetimes(EARLY, LATE)),
        "day": maybe(st.dates()),
        "ok": maybe(st.booleans()),
        "ratio": maybe(st.floats(allow_nan=False, allow_infinity=False)),
        "narrow": maybe(st.floats(allow_nan=False, allow_infinity=False, width=32)),
        "raw": maybe(st.binary(max_size=5)),
        "kind": maybe(st.sampled_from(["buy", "look"])),
    }
)


def enough(rows: list[Row], wide: bool) -> list[Row]:
    """Few rows are read one by one, many by columns."""
    return rows * 40 if wide else rows


@settings(max_examples=15, deadline=None)
@given(st.lists(ROWS, min_size=2, max_size=4), st.booleans())
def test_an_avro_topic_gives_the_table_of_the_json_topic(rows: list[Row], wide: bool) -> None:
    rows = enough(rows, wide)
    as_avro = [(b"k", avro(AVRO, {**row, "unknown": {"x": b"..."}})) for row in rows]
    expected = decode([(b"k", as_json(row)) for row in rows], schema=DDL)
    assert decode(as_avro, KNOWN, schema=DDL, format="avro") == expected
    assert len(expected[0]) == len(rows), "every row is representable"


def test_a_field_is_found_by_its_name_and_one_that_a_writer_lacks_is_null() -> None:
    older = {
        "type": "record",
        "name": "Click",
        "fields": [{"name": "n", "type": "int"}, {"name": "id", "type": "string"}],
    }
    lookup = KnownSchemas([avro_schema(older, 1), avro_schema(AVRO, 2)])
    full = {"id": "b", "n": 6, "kind": "buy", "unknown": {"x": b""}}
    found, dead = decode(
        [(None, avro(older, {"id": "a", "n": 5}, 1)), (None, avro(AVRO, full, 2))],
        lookup, schema="id string, n long, kind string", format="avro",
    )  # fmt: skip
    assert [(r["id"], r["n"], r["kind"]) for r in found] == [("a", 5, None), ("b", 6, "buy")] and not dead


def test_a_union_in_any_order_an_alias_of_a_named_type_and_a_referenced_schema_are_read() -> None:
    money = {"type": "record", "name": "Money", "namespace": "shop", "fields": [{"name": "cents", "type": "long"}]}
    order = {
        "type": "record", "name": "Order", "namespace": "shop",
        "fields": [
            {"name": "id", "type": ["int", "long", "null"]},
            {"name": "tags", "type": {"type": "array", "items": ["null", "string"]}},
            {"name": "paid", "type": ["Money", "null"]},
            {"name": "more", "type": {"type": "map", "values": {"type": "int", "logicalType": "date"}}},
        ],
    }  # fmt: skip
    schema = WriterSchema(7, "AVRO", json.dumps(order), b"", (ReferencedSchema("shop.Money", json.dumps(money)),))
    value = {"id": 5, "tags": ["x", None], "paid": {"cents": 250}, "more": {"due": datetime.date(2026, 1, 2)}}
    data = framed(7, avro({**order, "fields": [
        *order["fields"][:2], {"name": "paid", "type": [money, "null"]}, order["fields"][3]]}, value)[5:])  # fmt: skip
    (row,), dead = decode(
        [(None, data)], KnownSchemas([schema]), schema="id long, tags json, paid json, more json", format="avro"
    )
    assert not dead and (row["id"], row["tags"]) == (5, '["x",null]')
    assert (json.loads(row["paid"]), json.loads(row["more"])) == ({"cents": 250}, {"due": "2026-01-02"})


GOOD = avro(AVRO, {"id": "g", "unknown": {"x": b""}, "n": 1, "small": 2, "kind": "buy"})
TREE = {"type": "record", "name": "N", "fields": [{"name": "id", "type": ["null", "N"]}]}
FREE = {"type": "record", "name": "F", "fields": [{"name": "id", "type": {"type": "array", "items": "null"}}]}


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b'{"id":"a"}', "not framed"),
        (b"\0\0\0", "not framed"),
        (b"", "not framed"),
        (framed(99, GOOD[5:]), "the registry has no schema 99"),
        (framed(8, GOOD[5:]), "schema 8 is JSON"),
        (framed(6, b""), "schema 6 cannot be read: not an Avro schema"),
        (GOOD[:-1], "the record ends early"),
        (GOOD[:6], "the record ends early"),
        (framed(7, b""), "the record ends early"),
        (GOOD + b"x", "1 bytes follow the record"),
        (framed(7, b"\xff" * 30), "exceeds 64 bits"),
        (framed(7, b"\x04"), "not a branch of the union: 2"),
        (framed(7, b"\x00\x02\xff" + GOOD[9:]), "utf-8"),
        (framed(3, b"\x02" * 100_000 + b"\0"), "nested deeper than 100 levels"),
        (framed(4, b"\xfe\xff\xff\xff\x0f\0"), "more items than it has bytes"),
        (avro({"type": "record", "name": "R", "fields": [{"name": "n", "type": "long"}]}, {"n": 1}, 5), "key column"),
        (avro("long", 1, 2), "schema 2 is no record"),
        (avro(AVRO, {"id": "a", "unknown": {"x": b""}, "price": Decimal("999999.99")}), ""),
    ],
)  # fmt: skip
def test_a_record_that_is_not_of_its_schema_is_a_dead_letter_and_the_others_go_on(
    value: bytes, reason: str, wide: bool
) -> None:
    lookup = KnownSchemas([
        avro_schema(AVRO), avro_schema(TREE, 3), avro_schema(FREE, 4), avro_schema("long", 2),
        avro_schema({"type": "record", "name": "R", "fields": [{"name": "n", "type": "long"}]}, 5),
        WriterSchema(6, "AVRO", "{"), WriterSchema(8, "JSON", "{}"), WriterSchema(99),
    ])  # fmt: skip
    others = [(None, GOOD)] * (70 if wide else 1)
    declared = "id string, n long" if value[4:5] not in (b"\3", b"\4") else "id json, n long"
    if declared == "id json, n long":
        others = []
    found, dead = decode([*others, (b"x", value), *others], lookup, schema=declared, format="avro")
    if not reason:
        assert not dead
        return
    assert [row["id"] for row in found] == ["g"] * 2 * len(others)
    assert len(dead) == 1 and reason in dead[0]


@pytest.mark.parametrize(
    ("writes", "value", "declared", "expected"),
    [
        ("string", "x", "long", None),
        ("double", 0.5, "decimal(5,2)", None),
        ("boolean", True, "int", None),
        ("bytes", b"x", "string", None),
        ("string", "eA==", "binary", None),
        ({"type": "long", "logicalType": "timestamp-micros"}, 0, "timestamp_ntz", None),
        ({"type": "long", "logicalType": "local-timestamp-micros"}, 0, "timestamp", None),
        ({"type": "array", "items": "int"}, [1], "string", None),
        ("int", 5, "double", 5.0),
        ("int", 5, "decimal(5,2)", Decimal("5.00")),
        ("long", 1_700_000_000_123, "timestamp", datetime.datetime(2023, 11, 14, 22, 13, 20, 123000, datetime.UTC)),
        ("string", "2026-01-02", "date", datetime.date(2026, 1, 2)),
        ("string", "1.5", "decimal(5,2)", Decimal("1.50")),
        ("string", '{"a": [1]}', "json", '{"a": [1]}'),
        ({"type": "int", "logicalType": "date"}, 20, "int", 20),
        ({"type": "long", "logicalType": "time-micros"}, 3_600_500_000, "string", "01:00:00.5"),
        ({"type": "string", "logicalType": "uuid"}, "f81d4fae-7dec-11d0-a765-00a0c91e6bf6", "string",
         "f81d4fae-7dec-11d0-a765-00a0c91e6bf6"),
        ({"type": "fixed", "name": "U", "size": 16, "logicalType": "uuid"}, b"\1" * 16, "string",
         "01010101-0101-0101-0101-010101010101"),
        ({"type": "long", "logicalType": "timestamp-nanos"}, 1_000, "timestamp",
         datetime.datetime(1970, 1, 1, 0, 0, 0, 1, datetime.UTC)),
        ("null", None, "int", None),
    ],
)  # fmt: skip
def test_pairs_of_types_that_can_and_that_cannot_be_converted(
    writes: Any, value: Any, declared: str, expected: Any
) -> None:
    schema = {"type": "record", "name": "R", "fields": [{"name": "id", "type": "int"}, {"name": "v", "type": writes}]}
    bare = json.loads(json.dumps(schema).replace('"logicalType"', '"was"'))  # fastavro would convert the raw value
    for count in (1, 70):
        rows = [(None, avro(bare, {"id": 1, "v": value}))] * count
        lookup = KnownSchemas([avro_schema(schema)])
        found, dead = decode(rows, lookup, schema=f"id int, v {declared}", format="avro")
        if expected is None and writes != "null":
            assert not found and len(dead) == count
            assert "column=v: schema 7 has" in dead[0] and "which is never" in dead[0]
        else:
            assert [row["v"] for row in found] == [expected] * count and not dead


@pytest.mark.parametrize(
    ("writes", "value", "declared", "reason"),
    [
        ("long", 2**31, "int", "column=v"),
        (
            {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 3},
            b"\1",
            "decimal(5,2)",
            "decimal(5,2)",
        ),
        ("double", 1e300, "float", "beyond a float32"),
        ({"type": "long", "logicalType": "timestamp-nanos"}, 1, "timestamp", "finer than a microsecond"),
        ({"type": "long", "logicalType": "timestamp-micros"}, 2**62, "timestamp", "years 1 and 9999"),
        ({"type": "int", "logicalType": "date"}, 2**30, "date", "years 1 and 9999"),
        ("string", "tomorrow", "date", "column=v"),
        ("string", "{", "json", "column=v"),
    ],
)
def test_a_value_that_its_column_cannot_hold_is_a_dead_letter_of_its_record_alone(
    writes: Any, value: Any, declared: str, reason: str
) -> None:
    schema = {"type": "record", "name": "R", "fields": [
        {"name": "id", "type": "int"}, {"name": "v", "type": ["null", writes]}]}  # fmt: skip
    bare = json.loads(json.dumps(schema).replace('"logicalType"', '"was"'))
    for count in (1, 70):
        good = [(None, avro(bare, {"id": n, "v": None})) for n in range(count)]
        rows = [*good, (None, avro(bare, {"id": -1, "v": value})), *good]
        found, dead = decode(rows, KnownSchemas([avro_schema(schema)]), schema=f"id int, v {declared}", format="avro")
        assert [row["id"] for row in found] == [*range(count)] * 2
        assert len(dead) == 1 and reason in dead[0]


def test_the_key_of_a_deletion_is_text_json_or_a_framed_value() -> None:
    key = {"type": "record", "name": "K", "fields": [{"name": "b", "type": "string"}, {"name": "a", "type": "int"}]}
    lookup = KnownSchemas([avro_schema(key, 1), avro_schema("string", 2)])
    found, dead = decode(
        [(avro(key, {"a": 5, "b": "x"}, 1), None), (b'{"a":6,"b":"y"}', None), (b"z", None), (None, None)],
        lookup, key="a, b", schema="a int, b string, v long", format="avro",
    )  # fmt: skip
    assert [(r["a"], r["b"], r["_live"]) for r in found] == [(5, "x", False), (6, "y", False)] and len(dead) == 2
    found, dead = decode([(avro("string", "x", 2), None), (b"y", None)], lookup, schema="id string", format="avro")
    assert [(r["id"], r["_live"]) for r in found] == [("x", False), ("y", False)] and not dead


def test_a_schema_that_is_not_known_here_is_asked_for_before_anything_is_decoded() -> None:
    with pytest.raises(MissingSchemasError) as raised:
        decode([(None, GOOD), (None, framed(9, b""))], KnownSchemas(), schema="id string", format="avro")
    assert raised.value.ids == {7, 9}


@settings(max_examples=15, deadline=None)
@given(st.lists(maybe(st.decimals(-(10**16) + 1, 10**16 - 1, places=2)), min_size=1, max_size=5), st.integers(0, 3))
def test_decimals_of_any_width_are_exact(values: list[Decimal | None], padding: int) -> None:
    """A writer may use more bytes than a number needs; a table has fewer digits than a number may have."""
    decimal = {"type": "bytes", "logicalType": "decimal", "precision": 30, "scale": 2}
    fields = [{"name": "id", "type": "int"}, {"name": "v", "type": ["null", decimal]}]
    schema = {"type": "record", "name": "R", "fields": fields}
    bare = json.loads(json.dumps(schema).replace('"logicalType"', '"was"'))

    def unscaled(value: Decimal | None) -> bytes | None:
        if value is None:
            return None
        number = int(value * 100)
        return number.to_bytes((number + (number < 0)).bit_length() // 8 + 1 + padding, "big", signed=True)

    rows = [(None, avro(bare, {"id": 1, "v": unscaled(value)})) for value in values] * 20
    found, dead = decode(rows, KnownSchemas([avro_schema(schema)]), schema="id int, v decimal(18,2)", format="avro")
    assert [row["v"] for row in found] == values * 20 and not dead
    found, dead = decode(rows, KnownSchemas([avro_schema(schema)]), schema="id int, v decimal(9,2)", format="avro")
    fits = [value is None or abs(value) < 10**7 for value in values * 20]
    assert [row["v"] for row in found] == [v for v, fit in zip(values * 20, fits, strict=True) if fit]
    assert len(dead) == fits.count(False)
