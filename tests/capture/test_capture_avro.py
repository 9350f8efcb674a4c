"""Change events in Avro: their contents equal those in JSON, under schemas that grow with the table."""

from __future__ import annotations

import io
import json
import math
import random
import struct
from typing import Any

import fastavro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.base.pgtypes.debezium import value_form
from tidemill.capture.changes import Column, Relation, Row
from tidemill.capture.encode.avro_schemas import field_names, key_kinds, schemas_of
from tidemill.capture.encode.debezium_avro import AvroEncoder
from tidemill.capture.encode.debezium_json import OPS, EventEncoder, EventSource, EventTail

TYPES: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "id": (20, -1, ("1", "-9223372036854775808", "9223372036854775807")),
    "f key": (701, -1, ("-0", "1e-300", "NaN", "2.5")),
    "small": (21, -1, ("-32768", "7")),
    "n": (23, -1, ("2147483647", "-1", "0")),
    "o": (26, -1, ("4294967295",)),
    "r": (700, -1, ("0.1", "NaN", "-Infinity", "3.4028235e+38", "-0", "16777217")),
    "d": (701, -1, ("0.1", "Infinity", "1.7976931348623157e+308")),
    "b": (16, -1, ("t", "f")),
    "num": (1700, 786438, ("1.50", "NaN", "-0.01")),
    "day": (1082, -1, ("2026-11-23", "0044-03-15 BC", "infinity", "-infinity")),
    "t": (1083, -1, ("10:00:00.5", "24:00:00")),
    "t3": (1083, 3, ("10:00:00.5", "23:59:59.999")),
    "s": (1114, -1, ("2026-11-23 10:00:00.123456", "infinity", "-infinity", "0044-03-15 01:02:03 BC")),
    "s3": (1114, 3, ("1969-12-31 23:59:59.999", "infinity")),
    "z": (1184, -1, ("2026-11-23 10:00:00.5+00", "infinity", "0044-03-15 01:02:03+00 BC")),
    "raw": (17, -1, ("\\x", "\\x00ff")),
    "größe": (25, -1, ("", "x" * 300, 'ä "q" \\ \n 😀')),
    "gr  e": (25, -1, ("second",)),
    "1st": (3802, -1, ('{"a": [1, "ü"]}',)),
}
RELATION = Relation(
    7, "pub lic", "t",
    tuple(
        Column(name, oid, mod, "", {"f key": 0, "id": 1}.get(name, -1)) for name, (oid, mod, _) in TYPES.items()
    ),
)  # fmt: skip
TOPIC = "shop.pub_x20lic.t"
KEY, VALUE = (fastavro.parse_schema(json.loads(text)) for text in schemas_of(TOPIC, RELATION.columns))
NAMES = dict(zip(TYPES, field_names(list(TYPES)), strict=True))
JSON, AVRO = (
    EventEncoder(RELATION, EventSource("shop", "d b")),
    AvroEncoder(RELATION, EventSource("shop", "d b", ((5, 70_000),))),
)


def read(data: bytes, schema: Any, schema_id: int) -> Any:
    assert data[:5] == struct.pack(">bI", 0, schema_id)
    stream = io.BytesIO(data[5:])
    found = fastavro.schemaless_reader(stream, schema)
    assert not stream.read()
    return found


def said(data: bytes) -> Any:
    """Parse JSON with -0 as a float."""
    return json.loads(data, parse_int=lambda text: -0.0 if text == "-0" else int(text))


def avro_of(row: dict[str, Any] | None) -> Any:
    """Convert a row of the JSON form into the Avro form: other names, floats that JSON cannot express, and `real`
    values rounded to four bytes.
    """
    if row is None:
        return None
    out = {}
    for name, value in row.items():
        oid = TYPES[name][0]
        if value is not None and value_form(oid, -1) == "float":
            value = float(value)
            if oid == 700 and math.isfinite(value):
                (value,) = struct.unpack("<f", struct.pack("<f", value))
        out[NAMES[name]] = value
    return out


@settings(max_examples=30)
@given(st.integers(0, 1 << 32), st.sampled_from(["insert", "update", "delete", "truncate", "copy"]))
def test_an_event_in_avro_says_what_the_one_in_json_says(seed: int, op: str) -> None:
    rand = random.Random(seed)

    def row() -> Row:
        return {
            name: None if name not in ("id", "f key") and rand.random() < 0.2 else rand.choice(values)
            for name, (_, _, values) in TYPES.items()
        }

    old = row() if op in ("update", "delete") else None
    new = row() if op in ("insert", "update", "copy") else None
    xid = None if op == "copy" else rand.choice([7, 2**40])
    lsn, ordinal, time_ms = (
        rand.choice([0, 50, 2**62]),
        rand.choice([0, 9, 10**12]),
        rand.choice([1, 1_795_428_000_123]),
    )

    def value(encoder: EventEncoder | AvroEncoder) -> bytes:
        tail: EventTail = encoder.encode_tail(lsn, xid, time_ms)
        made = tail.encode(ordinal, OPS.get(op, b"r"))
        assert len(made) == tail.size_bytes + len(str(ordinal))
        return encoder.encode_head(old, new) + made

    expected = said(value(JSON))
    expected |= {"before": avro_of(expected["before"]), "after": avro_of(expected["after"])}
    assert repr(read(value(AVRO), VALUE, 70_000)) == repr(expected)
    if new is not None:
        key = avro_of(said(JSON.key(new)))
        found = read(AVRO.key(new), KEY, 5)
        assert repr(found) == repr(key) and list(found) == ["f_key", "id"]


def test_names_that_avro_does_not_take_are_other_ones_and_stay_apart() -> None:
    assert field_names(["größe", "gr  e", "gr__e", "1st", "", "gr__e_2"]) == [
        "gr__e", "gr__e_2", "gr__e_3", "_1st", "_", "gr__e_2_2",
    ]  # fmt: skip
    envelope = json.loads(schemas_of("shop.a-b.1c", RELATION.columns)[1])
    assert (envelope["namespace"], envelope["name"]) == ("shop.a_b._1c", "Envelope")
    fields = {field["name"]: field for field in envelope["fields"][0]["type"][1]["fields"]}
    assert fields["_1st"]["doc"] == "1st" and "doc" not in fields["n"]


def test_types_mean_what_debezium_says_they_mean() -> None:
    fields = {
        f["name"]: f["type"]
        for f in json.loads(schemas_of(TOPIC, RELATION.columns)[1])["fields"][0]["type"][1]["fields"]
    }
    meant = {name: kind[1].get("connect.name", "").removeprefix("io.debezium.")
             for name, kind in fields.items() if isinstance(kind, list) and isinstance(kind[1], dict)}  # fmt: skip
    assert meant == {
        "small": "", "day": "time.Date", "t": "time.MicroTime", "t3": "time.Time", "s": "time.MicroTimestamp",
        "s3": "time.Timestamp", "z": "time.ZonedTimestamp", "_1st": "data.Json",
    }  # fmt: skip
    assert (fields["id"], fields["f_key"], fields["n"], fields["r"]) == (
        "long", "double", ["null", "int"], ["null", "float"],
    )  # fmt: skip


@pytest.mark.parametrize(("oid", "other"), [(23, True), (20, False), (25, True)])
def test_k1_a_wider_number_in_the_key_is_another_key(oid: int, other: bool) -> None:
    was = [Column("id", 20, -1, "", 0), Column("v", 23, -1, "", -1)]
    now = [Column("id", oid, -1, "", 0), Column("v", 20, -1, "", -1)]
    assert (key_kinds(was) != key_kinds(now)) == other
