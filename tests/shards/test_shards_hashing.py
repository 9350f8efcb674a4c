"""The row hash is a format: these values may never change."""

from __future__ import annotations

import struct
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.shards.parts.row_hash import bucket_of, hash_rows

MASK = (1 << 64) - 1


def mix(x: int) -> int:
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & MASK
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def lane(value: Any, kind: pa.DataType) -> int:
    """Hash one value by the documented rule."""
    if value is None:
        return 0x9E3779B97F4A7C15
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, bytes):
        acc = mix(len(value))
        for i in range(0, len(value), 8):
            acc = mix(acc ^ int.from_bytes(value[i : i + 8], "little"))
        return acc
    if isinstance(value, float):
        if value != value:
            return mix(0x7FF8000000000000)
        return mix(struct.unpack("<Q", struct.pack("<d", value + 0.0))[0])
    if isinstance(value, Decimal):
        number = int(value.scaleb(kind.scale)) & ((1 << 128) - 1)
        return mix((number & MASK) ^ mix(number >> 64))
    if isinstance(value, datetime):
        delta = value - datetime(1970, 1, 1, tzinfo=UTC)
        value = (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds
    elif isinstance(value, date):
        value = (value - date(1970, 1, 1)).days
    return mix(int(value) & MASK)


def reference(columns: list[tuple[list[Any], pa.DataType]]) -> list[int]:
    out = [0] * len(columns[0][0])
    for values, kind in columns:
        out = [mix((h * 0x9E3779B97F4A7C15 + lane(v, kind)) & MASK) for h, v in zip(out, values, strict=True)]
    return out


KINDS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.bool_(), st.booleans()),
    (pa.int16(), st.integers(-(2**15), 2**15 - 1)),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.float64(), st.floats()),
    (pa.float32(), st.floats(width=32)),
    (pa.string(), st.text(max_size=40)),
    (pa.binary(), st.binary(max_size=40)),
    (pa.date32(), st.dates()),
    (pa.timestamp("us", "UTC"), st.datetimes(timezones=st.just(UTC))),
    (pa.decimal128(20, 4), st.integers(-(10**20) + 1, 10**20 - 1).map(lambda n: Decimal(n).scaleb(-4))),
]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_vectorised_hash_equals_the_documented_rule(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    columns, arrays = [], {}
    for i in range(data.draw(st.integers(1, 3))):
        kind, values = data.draw(st.sampled_from(KINDS))
        drawn = data.draw(st.lists(st.none() | values, min_size=count, max_size=count))
        columns.append((drawn, kind))
        arrays[f"c{i}"] = pa.array(drawn, kind)
    table = pa.table(arrays)
    expected = reference(columns)
    assert [int(h) for h in hash_rows(table, list(arrays))] == expected
    # Slices and chunks are the same rows.
    cut = data.draw(st.integers(0, count))
    chunked = pa.concat_tables([table.slice(0, cut), table.slice(cut)])
    assert [int(h) for h in hash_rows(chunked, list(arrays))] == expected
    assert [int(h) for h in hash_rows(table.slice(cut), list(arrays))] == expected[cut:]


def test_golden_values_pin_the_format() -> None:
    table = pa.table(
        {
            "i": pa.array([0, 1, -1, None], pa.int64()),
            "s": pa.array(["", "tidemill", "ключ-key-0001", None]),
        }
    )
    assert [hex(int(h)) for h in hash_rows(table, ["i"])] == GOLDEN_I
    assert [hex(int(h)) for h in hash_rows(table, ["s"])] == GOLDEN_S
    assert [hex(int(h)) for h in hash_rows(table, ["i", "s"])] == GOLDEN_IS


def test_widened_integers_hash_alike() -> None:
    narrow = pa.table({"k": pa.array([1, -7, None], pa.int16())})
    wide = pa.table({"k": pa.array([1, -7, None], pa.int64())})
    assert hash_rows(narrow, ["k"]).tolist() == hash_rows(wide, ["k"]).tolist()


def test_buckets_are_contiguous_hash_ranges_and_all_used() -> None:
    hashes = hash_rows(pa.table({"k": pa.array(range(10_000))}), ["k"])
    hashes.sort()
    buckets = bucket_of(hashes, 7)
    assert (buckets[1:] >= buckets[:-1]).all()
    assert sorted(set(buckets.tolist())) == list(range(7))


GOLDEN_I = ["0x0", "0x7ab40e090f363a7d", "0x4bffd802ebfb15e4", "0xe220a8397b1dcdaf"]
GOLDEN_S = ["0x0", "0xdaa3b24b85594a25", "0xabaa7bb739dd9089", "0xe220a8397b1dcdaf"]
GOLDEN_IS = ["0x0", "0x967665a8d5060455", "0x456c2ac670062d44", "0x8630c2ba6daab072"]
