"""Which hashes a filter leaves: too many is slow, one too few would lose rows."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import EqualNullSafe, EqualTo, Filter, GreaterThan, In, IsNotNull, IsNull, Not

from tidemill.shards.front import Column, ShardSchema
from tidemill.shards.hashing import hash_rows
from tidemill.shards.keys import KEYS_MAX
from tidemill.shards.schema import contents_schema
from tidemill.spark.source.filters import wanted_hashes

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
        ("decimal(10,2)", Decimal("1.50")),
    ],
)
def test_equality_with_the_key_leaves_its_hash(kind: str, value: Any) -> None:
    schema = of(kind)
    for filter_ in (EqualTo(("k",), value), EqualNullSafe(("k",), value), In(("k",), (value, None))):
        assert wanted_hashes(schema, [filter_, IsNotNull(("k",))]) == hashes(schema, (value,))


def test_null_is_a_key_like_others() -> None:
    for filter_ in (IsNull(("k",)), EqualNullSafe(("k",), None)):
        assert wanted_hashes(of("int64"), [filter_]) == hashes(of("int64"), (None,))
    assert wanted_hashes(of("int64"), [EqualTo(("k",), None)]) == []


def test_every_column_of_a_key_must_be_named() -> None:
    both: list[Filter] = [In(("a",), (1, 2)), EqualTo(("b",), "x")]
    assert wanted_hashes(PAIR, both) == hashes(PAIR, ("x", 1), ("x", 2))
    assert wanted_hashes(PAIR, both[:1]) is None
    assert wanted_hashes(PAIR, [*both, EqualTo(("v",), "y")]) == wanted_hashes(PAIR, both)


@pytest.mark.parametrize(
    "filter_",
    [
        GreaterThan(("k",), 1),
        Not(EqualTo(("k",), 1)),
        EqualTo(("v",), "a"),
        EqualTo(("k", "inner"), 1),
        EqualTo(("k",), 1 << 70),
        EqualTo(("k",), "text"),
        EqualTo(("k",), datetime(2026, 1, 1)),
        In(("k",), tuple(range(KEYS_MAX + 1))),
    ],
)
def test_what_says_nothing_of_the_hash_leaves_all(filter_: Filter) -> None:
    assert wanted_hashes(of("int64"), [filter_]) is None


def test_without_a_key_every_row_may_pass() -> None:
    assert wanted_hashes(ShardSchema(PAIR.columns, ()), [EqualTo(("a",), 1)]) is None
