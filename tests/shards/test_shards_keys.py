"""Hashes that the values of a key can have: too many is slow, one too few would lose rows."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from tidemill.shards.api import Column, ShardSchema
from tidemill.shards.parts.key_hash import KEYS_MAX, key_hashes
from tidemill.shards.parts.row_hash import hash_rows
from tidemill.shards.parts.schema import contents_schema

PAIR = ShardSchema((Column("a", "int64"), Column("b", "string"), Column("v", "string")), ("b", "a"))


def of(kind: str) -> ShardSchema:
    return ShardSchema((Column("k", kind), Column("v", "string")), ("k",))


def hashes(schema: ShardSchema, *keys: tuple[Any, ...]) -> list[int]:
    types = [contents_schema(schema).field(name).type for name in schema.key]
    columns = [pa.array(c, t) for c, t in zip(zip(*keys, strict=True), types, strict=True)]
    return sorted(hash_rows(pa.table(columns, names=list(schema.key)), schema.key).tolist())


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("int64", 7),
        ("int16", -3),
        ("string", "ä"),
        ("binary", b"\x00"),
        ("bool", True),
        ("float64", -0.0),
        ("float64", float("nan")),
        ("date", date(2026, 1, 1)),
        ("timestamp", datetime(2026, 1, 1, tzinfo=UTC)),
        ("timestamp_ntz", datetime(2026, 1, 1)),
        ("decimal(10,2)", Decimal("1.50")),
        ("int64", None),
    ],
)
def test_a_value_of_the_key_leaves_its_hash(kind: str, value: Any) -> None:
    assert key_hashes(of(kind), {"k": [value], "v": ["said of another column"]}) == hashes(of(kind), (value,))


def test_every_column_of_a_key_must_be_named() -> None:
    both = {"a": [1, 2], "b": ["x"]}
    assert key_hashes(PAIR, both) == hashes(PAIR, ("x", 1), ("x", 2))
    assert key_hashes(PAIR, {"a": [1, 2]}) is None
    assert key_hashes(PAIR, {"a": [], "b": ["x"]}) == []


@pytest.mark.parametrize("values", [[1 << 70], ["text"], [datetime(2026, 1, 1)], list(range(KEYS_MAX + 1))])
def test_what_says_nothing_of_the_hash_leaves_all(values: list[Any]) -> None:
    assert key_hashes(of("int64"), {"k": values}) is None


def test_an_instant_says_nothing_of_the_date_of_a_key() -> None:
    evening = datetime(2025, 12, 31, 19, tzinfo=timezone(timedelta(hours=-5)))
    assert key_hashes(of("date"), {"k": [date(2026, 1, 1), evening]}) is None
    assert key_hashes(of("timestamp"), {"k": [evening]}) == hashes(of("timestamp"), (evening,))


def test_without_a_key_every_row_may_be_meant() -> None:
    assert key_hashes(ShardSchema(PAIR.columns, ()), {"a": [1]}) is None
