"""Topics in Protobuf and JSON Schema: the tables of JSON topics, what is null, and dead letters with a reason."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, message_factory, timestamp_pb2, type_pb2, wrappers_pb2
from google.protobuf.descriptor_pool import DescriptorPool
from hypothesis import given, settings
from hypothesis import strategies as st

from support.spark.formats import Row, as_json, decode, framed, protobuf, protobuf_schema
from tidemill.spark.formats.schemas.writer_schema import KnownSchemas, ReferencedSchema, WriterSchema

Field = descriptor_pb2.FieldDescriptorProto
DDL = (
    "id string, n long, small int, at timestamp, ok boolean, ratio double, narrow float, raw binary, kind string,"
    " big decimal(20,0), price decimal(8,2)"
)
SCALARS = {
    "n": Field.TYPE_SINT64, "small": Field.TYPE_INT32, "ok": Field.TYPE_BOOL, "ratio": Field.TYPE_DOUBLE,
    "narrow": Field.TYPE_FLOAT, "raw": Field.TYPE_BYTES, "big": Field.TYPE_FIXED64, "price": Field.TYPE_STRING,
}  # fmt: skip


def click_file() -> Any:
    """message Click with optional fields; a nested message Inner; and a message Other."""
    file = descriptor_pb2.FileDescriptorProto(name="click.proto", package="shop", syntax="proto3")
    file.dependency.extend(["google/protobuf/timestamp.proto", "google/protobuf/wrappers.proto"])
    kind = file.enum_type.add(name="Kind")
    for number, name in enumerate(("none", "buy", "look")):
        kind.value.add(name=name, number=number)
    click = file.message_type.add(name="Click")
    click.field.add(name="id", number=1, type=Field.TYPE_STRING, label=1)

    def optional(name: str, number: int, **more: Any) -> None:
        click.field.add(
            name=name, number=number, label=1, proto3_optional=True, oneof_index=len(click.oneof_decl), **more
        )
        click.oneof_decl.add(name=f"_{name}")

    for number, (name, type_) in enumerate(SCALARS.items(), 2):
        optional(name, number, type=type_)
    optional("kind", 20, type=Field.TYPE_ENUM, type_name=".shop.Kind")
    click.field.add(name="at", number=21, type=11, label=1, type_name=".google.protobuf.Timestamp")
    click.field.add(name="wrapped", number=22, type=11, label=1, type_name=".google.protobuf.Int64Value")
    click.field.add(name="tags", number=23, type=Field.TYPE_STRING, label=3)
    click.field.add(name="plain", number=24, type=Field.TYPE_INT32, label=1)
    click.field.add(name="inner", number=25, type=11, label=1, type_name=".shop.Click.Inner")
    click.nested_type.add(name="Inner").field.add(name="id", number=1, type=Field.TYPE_STRING, label=1)
    file.message_type.add(name="Other").field.add(name="id", number=1, type=Field.TYPE_STRING, label=1)
    return file


FILE = click_file()
KNOWN = KnownSchemas(
    [protobuf_schema(FILE), WriterSchema(8, "PROTOBUF", "", b"\xff"), WriterSchema(9, "AVRO", '"int"')]
)


def message_class(name: str, *files: Any) -> Any:
    pool = DescriptorPool()
    for known in (timestamp_pb2, wrappers_pb2):
        copied = descriptor_pb2.FileDescriptorProto()
        known.DESCRIPTOR.CopyToProto(copied)
        pool.Add(copied)
    for file in files or (FILE,):
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


Click, Inner, Other = (message_class(name) for name in ("shop.Click", "shop.Click.Inner", "shop.Other"))


def click(row: Row) -> Any:
    row = {name: value for name, value in row.items() if value is not None}
    at, price = row.pop("at", None), row.pop("price", None)
    found = Click(**row, **({"price": str(price)} if price is not None else {}))
    if at is not None:
        found.at.FromDatetime(at)
    return found


def maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


ROWS = st.fixed_dictionaries(
    {
        "id": st.text(max_size=4),
        "n": maybe(st.integers(-(2**63), 2**63 - 1)),
        "small": maybe(st.integers(-(2**31), 2**31 - 1)),
        "at": maybe(st.datetimes(datetime.datetime(1, 1, 2), datetime.datetime(9999, 12, 30))),
        "ok": maybe(st.booleans()),
        "ratio": maybe(st.floats(allow_nan=False, allow_infinity=False)),
        "narrow": maybe(st.floats(allow_nan=False, allow_infinity=False, width=32)),
        "raw": maybe(st.binary(max_size=5)),
        "kind": maybe(st.sampled_from(["buy", "look"])),
        "big": maybe(st.integers(0, 2**64 - 1)),
        "price": maybe(st.decimals(-999999, 999999, places=2)),
    }
)


@settings(max_examples=15, deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=4))
def test_a_protobuf_topic_and_a_json_schema_topic_give_the_table_of_the_json_topic(rows: list[Row]) -> None:
    plain = [(b"k", as_json(row)) for row in rows]
    expected = decode(plain, schema=DDL)
    assert decode([(b"k", protobuf(click(row))) for row in rows], KNOWN, schema=DDL, format="protobuf") == expected
    with_frames = [(b"k", framed(5, value)) for _, value in plain]
    assert decode(with_frames, schema=DDL, format="json_schema") == expected
    assert len(expected[0]) == len(rows)


def test_a_field_that_is_not_set_is_null_only_if_it_has_presence() -> None:
    declared = "id string, plain int, wrapped long, tags json, inner json, absent string, n long"
    full = Click(id="b", plain=0, tags=["x"])
    full.wrapped.value = 0
    full.inner.id = "i"
    found, dead = decode([(None, protobuf(Click(id="a"))), (None, protobuf(full))], KNOWN, schema=declared,
        format="protobuf")  # fmt: skip
    assert not dead
    assert [[row[name] for name in ("plain", "wrapped", "tags", "inner", "absent", "n")] for row in found] == [
        [0, None, "[]", None, None, None], [0, 0, '["x"]', '{"id":"i"}', None, None]
    ]  # fmt: skip


def test_the_indexes_of_a_record_choose_the_message() -> None:
    found, dead = decode(
        [
            (None, protobuf(Inner(id="i"), path=(0, 0))), (None, protobuf(Other(id="o"), path=(1,))),
            (None, protobuf(Click(id="c"))), (None, protobuf(Click(id="c"), path=(0,))),
        ],
        KNOWN, schema="id string", format="protobuf",
    )  # fmt: skip
    assert [row["id"] for row in found] == ["i", "o", "c", "c"] and not dead


def test_an_imported_file_is_read_with_its_reference() -> None:
    outer = descriptor_pb2.FileDescriptorProto(name="order.proto", package="shop", syntax="proto3")
    outer.dependency.append("click.proto")
    order = outer.message_type.add(name="Order")
    order.field.add(name="id", number=1, type=Field.TYPE_STRING, label=1)
    order.field.add(name="click", number=2, type=11, label=1, type_name=".shop.Click")
    value = message_class("shop.Order", FILE, outer)(id="o")
    value.click.id = "c"
    named = ReferencedSchema("click.proto", "", FILE.SerializeToString())
    lookup = KnownSchemas([protobuf_schema(outer, references=(named,)), protobuf_schema(outer, 6)])
    (row,), (reason,) = decode(
        [(None, protobuf(value)), (None, protobuf(value, 6))], lookup, schema="id string, click json", format="protobuf"
    )
    assert json.loads(row["click"]) == {"id": "c"} and "schema 6 cannot be read" in reason


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"{}", "not framed"),
        (framed(8, b"\0"), "schema 8 cannot be read"),
        (framed(9, b"\0"), "schema 9 is AVRO"),
        (framed(7, b"\0\x0a\x05ab"), "not a message of its schema"),
        (framed(7, b"\0\x0a\x01\xff"), "not a message of its schema"),
        (framed(7, b""), "the record ends early"),
        (framed(7, b"\x02\x12"), "schema 7 has no message [9]"),
        (framed(7, b"\x01"), "not a number of message indexes: -1"),
        (framed(7, b"\x02\x01"), "not a message index: -1"),
        (protobuf(Click(id="a", small=2**31 - 1, kind=99)), "the enum has no constant 99"),
        (protobuf(Click(id="a", n=2**40)), "column=n"),
    ],
)
def test_a_record_that_is_not_of_its_schema_is_a_dead_letter(value: bytes, reason: str) -> None:
    good = protobuf(Click(id="g"))
    found, dead = decode(
        [(None, good), (b"x", value), (None, good)], KNOWN, schema="id string, n int, kind string", format="protobuf"
    )
    assert [row["id"] for row in found] == ["g", "g"]
    assert len(dead) == 1 and reason in dead[0]


def test_a_message_that_can_never_be_a_row_says_so_and_a_deletion_finds_its_key() -> None:
    found, dead = decode(
        [(None, protobuf(Click(id="a"))), (protobuf(Other(id="k"), path=(1,)), None), (b"x", None)],
        KNOWN, schema="id string, at string", format="protobuf",
    )  # fmt: skip
    assert [(row["id"], row["_live"]) for row in found] == [("k", False), ("x", False)]
    assert dead == ["column=at: schema 7 has micros, which is never string"]


def test_a_timestamp_finer_than_its_column_and_dates_and_decimals_of_google() -> None:
    from google.type import date_pb2, decimal_pb2

    file = descriptor_pb2.FileDescriptorProto(name="g.proto", syntax="proto3")
    file.dependency.extend(["google/type/date.proto", "google/type/decimal.proto", "google/protobuf/timestamp.proto"])
    kind = file.message_type.add(name="G")
    for number, (name, type_) in enumerate(
        [("day", "google.type.Date"), ("price", "google.type.Decimal"), ("at", "google.protobuf.Timestamp")], 1
    ):
        kind.field.add(name=name, number=number, type=11, label=1, type_name=f".{type_}")
    kind.field.add(name="id", number=9, type=Field.TYPE_INT32, label=1)
    pool = DescriptorPool()
    for one in (date_pb2, decimal_pb2, timestamp_pb2, type_pb2):
        for needed in (*one.DESCRIPTOR.dependencies, one.DESCRIPTOR):
            copied = descriptor_pb2.FileDescriptorProto()
            needed.CopyToProto(copied)
            pool.Add(copied)
    pool.Add(file)
    make = message_factory.GetMessageClass(pool.FindMessageTypeByName("G"))
    values = [make(id=1), make(id=2), make(id=3)]
    values[0].day.year, values[0].day.month, values[0].day.day = 2026, 1, 2
    values[0].price.value = "1.50"
    values[1].at.nanos = 1
    values[2].day.year = 2026
    found, dead = decode(
        [(None, protobuf(one)) for one in values], KnownSchemas([protobuf_schema(file)]),
        schema="id int, day date, price decimal(5,2), at timestamp", format="protobuf",
    )  # fmt: skip
    assert [(row["id"], row["day"], row["price"]) for row in found] == [(1, datetime.date(2026, 1, 2), Decimal("1.50"))]
    assert "finer than a microsecond" in dead[0] and len(dead) == 2


@pytest.mark.parametrize("value", [b"", b"\0\0\0\0\5", b'{"id":"x"}', framed(5, b"[")])
def test_a_json_schema_record_without_a_frame_or_an_object_is_a_dead_letter(value: bytes) -> None:
    good = framed(5, b'{"id":"g"}')
    found, dead = decode(
        [(None, good), (None, value), (framed(5, b'"d"'), None), (b"e", None), (framed(5, b'{"id":"f"}'), None)],
        schema="id string", format="json_schema",
    )  # fmt: skip
    assert [(row["id"], row["_live"]) for row in found] == [("g", True), ("d", False), ("e", False), ("f", False)]
    assert len(dead) == 1
