"""Bounds of columns: they contain every value, in Iceberg's serialization."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.lake.format.bounds import TEXT_BYTES, Bounds, bounds_of
from tidemill.shards.api import DIFF, TIME, Column, ShardSchema
from tidemill.shards.parts.parts import encode_part
from tidemill.shards.parts.schema import arrow_type


def part_bounds(kind: str, values: list[Any], now: str = "") -> Bounds:
    """Bounds of a part whose key is one column of these values, under a schema in which its type is `now`."""
    schema = ShardSchema((Column("other", "string"), Column("k", kind)), ("k",))
    count = len(values)
    rows = pa.table(
        {
            "other": pa.nulls(count, pa.string()),
            "k": pa.array(values, arrow_type(kind)),
            TIME: pa.array([1] * count, pa.int64()),
            DIFF: pa.array([1] * count, pa.int64()),
        }
    )
    footer = pq.read_metadata(pa.BufferReader(encode_part(schema, rows).data))
    return bounds_of(ShardSchema((Column("other", "string"), Column("k", now or kind)), ("k",)), footer)


UTC = datetime.UTC


@pytest.mark.parametrize(
    ("kind", "values", "lower", "upper"),
    [
        ("bool", [True, False], "00", "01"),
        ("int16", [-2, 300], "feffffff", "2c010000"),
        ("int32", [-(2**31), 7], "00000080", "07000000"),
        ("int64", [-1, 2**40], "ffffffffffffffff", "0000000000010000"),
        ("date", [datetime.date(1969, 12, 31), datetime.date(1970, 1, 2)], "ffffffff", "01000000"),
        (
            "timestamp",
            [datetime.datetime(1970, 1, 1, tzinfo=UTC), datetime.datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)],
            "0000000000000000",
            "40420f0000000000",
        ),
        ("string", ["ß", "a"], "61", "c39f"),
        ("binary", [b"\xff", b"\x00\x01"], "0001", "ff"),
        ("decimal(12,2)", [Decimal("-1.28"), Decimal("1.28")], "80", "0080"),
        ("decimal(38,0)", [Decimal(-(10**38 - 1)), Decimal(0)], "b4c4b357a5793b85f675ddc000000001", "00"),
    ],
)
def test_bounds_are_serialized_as_the_specification_says(kind: str, values: list[Any], lower: str, upper: str) -> None:
    found = part_bounds(kind, values)
    assert (found.lower[5].hex(), found.upper[5].hex()) == (lower, upper)
    assert (found.values[5], found.nulls[5]) == (2, 0)
    assert 4 not in found.lower, "a column without statistics has no bounds"


def test_a_widened_column_has_bounds_of_its_present_type() -> None:
    assert part_bounds("int32", [1], "int64").lower[5].hex() == "0100000000000000"
    assert part_bounds("decimal(5,2)", [Decimal("1.00")], "decimal(20,2)").lower[5].hex() == "64"


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_floats_have_no_bounds(kind: str) -> None:
    assert part_bounds(kind, [1.0, float("nan")]) == Bounds({}, {}, {}, {})


def test_long_text_has_a_lower_bound_that_is_cut_between_characters() -> None:
    found = part_bounds("string", ["ä" * 40 + "x", "ä" * 40])
    assert found.lower[5] == ("ä" * 32).encode() and len(found.lower[5]) == TEXT_BYTES
    assert 5 not in found.upper
    assert part_bounds("string", ["x" + "ä" * 40]).lower[5] == ("x" + "ä" * 31).encode()


def test_a_column_of_nulls_has_counts_and_no_bounds() -> None:
    assert part_bounds("int64", [None, None]) == Bounds({}, {}, {5: 2}, {5: 2})


@given(st.lists(st.integers(-(10**18), 10**18), min_size=1, max_size=50))
def test_bounds_contain_every_value(values: list[int]) -> None:
    numbers = part_bounds("int64", values)
    low, high = (int.from_bytes(each[5], "little", signed=True) for each in (numbers.lower, numbers.upper))
    assert (low, high) == (min(values), max(values))
    decimals = part_bounds("decimal(20,2)", [Decimal(value) / 100 for value in values])
    assert int.from_bytes(decimals.lower[5], "big", signed=True) == min(values)
    assert int.from_bytes(decimals.upper[5], "big", signed=True) == max(values)


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=100), min_size=1, max_size=20))
def test_bounds_of_text_contain_every_text(values: list[str]) -> None:
    found = part_bounds("string", values)
    encoded = [value.encode() for value in values]
    if 5 in found.lower:
        assert found.lower[5] <= min(encoded)
        found.lower[5].decode()
    if 5 in found.upper:
        assert found.upper[5] >= max(encoded)
