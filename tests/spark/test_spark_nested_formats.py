"""Nested columns of topics in Avro, Protobuf and JSON Schema give the table of the JSON topic."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given, settings
from hypothesis import strategies as st

from support.spark.formats import Row, avro, avro_schema, decode, framed, protobuf, protobuf_schema
from tidemill.base.errors import InvalidError
from tidemill.spark.formats.record_format import declare_topic
from tidemill.spark.formats.schemas.writer_schema import KnownSchemas

DDL = """id bigint, tags array<string>, m map<string, double>,
         who struct<name: string, at: timestamp, price: decimal(6,2), kinds: array<string>,
                    deep: array<struct<x: int>>>"""
LEAF = {
    "type": "record",
    "name": "Leaf",
    "fields": [{"name": "x", "type": ["null", "int"]}, {"name": "y", "type": "long"}],
}
WHO = {
    "type": "record", "name": "Who",
    "fields": [
        {"name": "name", "type": ["null", "string"]},
        {"name": "at", "type": ["null", {"type": "long", "logicalType": "timestamp-micros"}]},
        {"name": "price", "type": ["null", {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2}]},
        {"name": "kinds", "type": {"type": "array", "items": {"type": "enum", "name": "K", "symbols": ["A", "B"]}}},
        {"name": "deep", "type": ["null", {"type": "array", "items": ["null", LEAF]}]},
    ],
}  # fmt: skip
AVRO = {
    "type": "record", "name": "Row",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "tags", "type": ["null", {"type": "array", "items": ["null", "string"]}]},
        {"name": "m", "type": ["null", {"type": "map", "values": ["null", "double"]}]},
        {"name": "who", "type": ["null", WHO]},
    ],
}  # fmt: skip

TEXTS = st.text(max_size=3)
MOMENTS = st.datetimes(datetime.datetime(1, 1, 2), datetime.datetime(9999, 12, 30)).map(
    lambda at: at.replace(tzinfo=datetime.UTC)
)
PRICES = st.integers(-999_999, 999_999).map(lambda n: Decimal(n).scaleb(-2))
LEAVES = st.fixed_dictionaries({"x": st.none() | st.integers(-5, 5), "y": st.just(3)})
WHOS = st.fixed_dictionaries(
    {
        "name": st.none() | TEXTS, "at": st.none() | MOMENTS, "price": st.none() | PRICES,
        "kinds": st.lists(st.sampled_from("AB"), max_size=2),
        "deep": st.none() | st.lists(st.none() | LEAVES, max_size=2),
    }
)  # fmt: skip
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "tags": st.none() | st.lists(st.none() | TEXTS, max_size=3),
            "m": st.none()
            | st.dictionaries(TEXTS, st.none() | st.floats(allow_nan=False, allow_infinity=False), max_size=3),
            "who": st.none() | WHOS,
        }
    ),
    min_size=1,
    max_size=4,
)


def text(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime.datetime) else str(value)


def as_json(row: Row) -> bytes:
    return json.dumps(row, default=text).encode()


@settings(deadline=None, max_examples=40)
@given(found=ROWS)
def test_an_avro_topic_and_a_json_schema_topic_give_the_table_of_the_json_topic(found: list[Row]) -> None:
    rows = [{"id": at, **row} for at, row in enumerate(found)]
    wanted, none = decode([(None, as_json(row)) for row in rows], schema=DDL)
    assert none == [] and len(wanted) == len(rows)
    schemas = KnownSchemas([avro_schema(AVRO)])
    assert decode([(None, avro(AVRO, row)) for row in rows], schemas, schema=DDL, format="avro") == (wanted, [])
    with_frames = [(None, framed(7, as_json(row))) for row in rows]
    assert decode(with_frames, schema=DDL, format="json_schema") == (wanted, [])


@pytest.mark.parametrize(
    ("ddl", "said"),
    [
        ("id bigint, tags array<bigint>", "column=tags: schema 7 has array, which is never array<int64>"),
        ("id bigint, tags map<string, string>", "column=tags: schema 7 has array, which is never map<string,string>"),
        ("id bigint, m map<int, double>", "column=m: schema 7 has map, which is never map<int32,float64>"),
        ("id bigint, id2 int, who struct<at: date>", "column=who: schema 7 has record"),
    ],
)
def test_types_that_never_fit_are_named(ddl: str, said: str) -> None:
    row = {"id": 1, "tags": ["a"], "m": {}, "who": None}
    rows, (reason,) = decode([(None, avro(AVRO, row))], KnownSchemas([avro_schema(AVRO)]), schema=ddl, format="avro")
    assert rows == [] and said in reason


def test_a_key_that_an_avro_map_has_twice_is_a_dead_letter() -> None:
    schema = {"type": "record", "name": "R", "fields": [
        {"name": "id", "type": "long"}, {"name": "m", "type": {"type": "map", "values": "long"}}]}  # fmt: skip
    twice = framed(7, b"\x02" + b"\x04" + b"\x02a\x02" + b"\x02a\x04" + b"\x00")
    good = avro(schema, {"id": 2, "m": {"b": 1, "a": 2}})
    rows, (reason,) = decode(
        [(None, twice), (None, good)], KnownSchemas([avro_schema(schema)]), schema="id bigint, m map<string, int>",
        format="avro",
    )  # fmt: skip
    assert "a map has a key twice: key='a'" in reason and [row["m"] for row in rows] == [[("a", 2), ("b", 1)]]


def test_a_recursive_avro_type_is_read_as_deep_as_the_column_goes() -> None:
    tree = {"type": "record", "name": "T", "fields": [
        {"name": "id", "type": "long"}, {"name": "kids", "type": {"type": "array", "items": "T"}}]}  # fmt: skip
    value = {"id": 1, "kids": [{"id": 2, "kids": [{"id": 3, "kids": []}]}]}
    ddl = "id bigint, kids array<struct<id: bigint, kids: array<struct<id: int>>>>"
    (row,), dead = decode([(None, avro(tree, value))], KnownSchemas([avro_schema(tree)]), schema=ddl, format="avro")
    assert dead == [] and row["kids"] == [{"id": 2, "kids": [{"id": 3}]}]


def message_file() -> FileDescriptorProto:
    """Return `Row` with a repeated text, a map, and a message with an enum, a timestamp and repeated messages."""
    f = FileDescriptorProto(
        name="rows.proto", package="p", syntax="proto3", dependency=["google/protobuf/timestamp.proto"]
    )
    leaf = f.message_type.add(name="Leaf")
    leaf.field.add(name="x", number=1, type=5, label=1)
    who = f.message_type.add(name="Who")
    who.field.add(name="name", number=1, type=9, label=1)
    who.field.add(name="at", number=2, type=11, label=1, type_name=".google.protobuf.Timestamp")
    who.field.add(name="kinds", number=3, type=14, label=3, type_name=".p.K")
    who.field.add(name="deep", number=4, type=11, label=3, type_name=".p.Leaf")
    f.enum_type.add(name="K").value.add(name="A", number=0)
    f.enum_type[0].value.add(name="B", number=1)
    row = f.message_type.add(name="Row")
    row.field.add(name="id", number=1, type=3, label=1)
    row.field.add(name="tags", number=2, type=9, label=3)
    row.field.add(name="m", number=3, type=11, label=3, type_name=".p.Row.MEntry")
    row.field.add(name="who", number=4, type=11, label=1, type_name=".p.Who")
    row.field.add(name="n", number=5, type=11, label=3, type_name=".p.Row.NEntry")
    for name, key in (("MEntry", 9), ("NEntry", 5)):
        entry: DescriptorProto = row.nested_type.add(name=name)
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, type=key, label=1)
        if key == 9:
            entry.field.add(name="value", number=2, type=1, label=1)
        else:
            entry.field.add(name="value", number=2, type=11, label=1, type_name=".p.Leaf")
    return f


def test_a_protobuf_topic_has_nested_columns() -> None:
    from google.protobuf import timestamp_pb2

    file, pool = message_file(), DescriptorPool()
    pool.AddSerializedFile(timestamp_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    message = GetMessageClass(pool.FindMessageTypeByName("p.Row"))
    full = message(
        id=1, tags=["a", ""], m={"b": 1.5, "a": 0.0}, who={"name": "x", "kinds": [1, 0], "deep": [{"x": 4}, {}]}
    )
    full.who.at.FromMicroseconds(1_500_000)
    full.n[7].x, full.n[-1].x = 5, 6
    ddl = """id bigint, tags array<string>, m map<string, double>, n map<bigint, struct<x: int>>,
             who struct<name: string, at: timestamp, kinds: array<string>, deep: array<struct<x: int, z: string>>>"""
    # Message 2 of the file, after Leaf and Who.
    found = [(None, protobuf(one, path=(2,))) for one in (full, message(id=2))]
    (one, two), dead = decode(found, KnownSchemas([protobuf_schema(file)]), schema=ddl, format="protobuf")
    assert dead == []
    assert one["tags"] == ["a", ""] and one["m"] == [("a", 0.0), ("b", 1.5)]
    assert one["n"] == [(-1, {"x": 6}), (7, {"x": 5})]
    assert one["who"]["deep"] == [{"x": 4, "z": None}, {"x": 0, "z": None}]
    assert (one["who"]["kinds"], one["who"]["at"].microsecond) == (["B", "A"], 500_000)
    assert (two["tags"], two["m"], two["n"], two["who"]) == ([], [], [], None)
    rows, (reason,) = decode(
        found[:1], KnownSchemas([protobuf_schema(file)]), schema="id bigint, tags array<int>", format="protobuf"
    )
    assert rows == [] and "has array, which is never array<int32>" in reason


def test_change_events_have_no_nested_columns() -> None:
    with pytest.raises(InvalidError, match="not read from change events: topic=t column=a") as refused:
        declare_topic("t", "id", "id bigint, a array<int>", {"envelope": "debezium"})
    assert "json" in refused.value.fix
