"""Compaction of updates against Arrow's group-by over whole rows, for arbitrary rows, times and hashes."""

from __future__ import annotations

import math
from collections import Counter
from decimal import Decimal
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.shards.api import DIFF, HASH, TIME, Column, ShardSchema
from tidemill.shards.parts import consolidate
from tidemill.shards.parts.row_hash import hash_rows
from tidemill.shards.parts.schema import arrow_type, contents_schema, part_schema, update_schema

VALUES: dict[str, list[Any]] = {
    "bool": [True, False, None],
    "int16": [0, -3, None],
    "int32": [0, 2**31 - 1, None],
    "float32": [0.0, -0.0, math.nan, 1.5, None],
    "float64": [0.0, -0.0, math.nan, 1.5, None],
    "string": ["", "a", "é" * 30, None],
    "json": ['{"a": 1}', "1", None],
    "binary": [b"", b"\x00", b"\x00\xff", None],
    "date": [0, 1, None],
    "timestamp": [0, 1, None],
    "timestamp_ntz": [0, 1, None],
    "decimal(38,10)": [Decimal("0"), Decimal("-1234567890.0123456789"), None],
}
KEY_TYPES = ["int64", "string", "float64", "timestamp", "timestamp_ntz"]
VALUES["int64"] = [0, 1, -(2**63), None]


def table_of(schema: ShardSchema, rows: list[tuple[Any, ...]]) -> pa.Table:
    """Rows of columns…, time, diff."""
    fields = update_schema(schema)
    columns = [pa.array([row[at] for row in rows], pa.int64()) for at in (-2, -1)]
    listed = [[row[at] for row in rows] for at in range(len(schema.columns))]
    whole = {"date": pa.int32(), "timestamp": pa.int64(), "timestamp_ntz": pa.int64()}
    front = [
        pa.array(values, whole.get(c.type, arrow_type(c.type))).cast(arrow_type(c.type))
        for c, values in zip(schema.columns, listed, strict=True)
    ]
    return pa.Table.from_arrays([*front, *columns], schema=fields)


@st.composite
def schemas(draw: st.DrawFn) -> ShardSchema:
    keys = draw(st.lists(st.sampled_from(KEY_TYPES), min_size=1, max_size=2))
    others = draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=3))
    columns = tuple(Column(f"c{at}", kind) for at, kind in enumerate([*keys, *others]))
    return ShardSchema(columns, tuple(c.name for c in columns[: len(keys)]) if draw(st.integers(0, 4)) else ())


def row_of(draw: st.DrawFn, schema: ShardSchema) -> tuple[Any, ...]:
    return tuple(draw(st.sampled_from(VALUES[c.type])) for c in schema.columns)


@st.composite
def histories(draw: st.DrawFn, schema: ShardSchema) -> list[tuple[Any, ...]]:
    """Return histories, mostly like those of a shard: per key a row replaces the one before it. A run may begin
    anywhere, and some updates are ones that no writer makes."""
    live: dict[Any, tuple[Any, ...]] = {}
    rows = []
    for time in range(draw(st.integers(0, 8))):
        for _ in range(draw(st.integers(0, 3))):
            row = row_of(draw, schema)
            key = repr(row[: max(1, len(schema.key))])
            if key in live:
                rows.append((*live.pop(key), time, -1))
            if draw(st.integers(0, 3)):
                live[key] = row
                rows.append((*row, time, 1))
    rows = rows[draw(st.integers(0, 3)) :]
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        odd = draw(st.sampled_from(rows))[:-2] if rows and draw(st.booleans()) else row_of(draw, schema)
        rows.append((*odd, draw(st.integers(0, 8)), draw(st.integers(-2, 2))))
    return rows


def bits(value: Any) -> Any:
    return (math.copysign(1.0, value), repr(value)) if isinstance(value, float) else (type(value).__name__, value)


def listed(rows: pa.Table) -> Counter[Any]:
    """Return each update unchanged, with floats represented by their bits."""
    plain = [column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column for column in rows.columns]
    columns = [[bits(value) for value in column.to_pylist()] for column in plain]
    return Counter(zip(*columns, strict=True))


def by_grouping(schema: ShardSchema, updates: pa.Table, advance_to: int) -> pa.Table:
    """Compute the same by Arrow's group-by alone."""
    names = contents_schema(schema).names
    old = pc.less_equal(updates.column(TIME), advance_to)
    summed = updates.filter(old).group_by(names, use_threads=False).aggregate([(DIFF, "sum")])
    summed = summed.filter(pc.not_equal(summed.column(f"{DIFF}_sum"), 0))
    times = pa.array(np.full(summed.num_rows, advance_to))
    columns = [*(summed.column(name) for name in names), times, summed.column(f"{DIFF}_sum")]
    early = pa.Table.from_arrays(columns, schema=update_schema(schema))
    return pa.concat_tables([early, updates.filter(pc.invert(old)).select(early.column_names)])


def check(schema: ShardSchema, updates: pa.Table, advance_to: int) -> pa.Table:
    found = consolidate.merge_updates(schema, updates, advance_to)
    assert found.schema == part_schema(schema)
    hashes = found.column(HASH).to_numpy()
    assert (hashes[1:] >= hashes[:-1]).all()
    assert listed(found.drop_columns([HASH])) == listed(by_grouping(schema, updates, advance_to))
    return found


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_a_merge_is_the_sum_over_whole_rows_of_every_type(data: st.DataObject) -> None:
    schema = data.draw(schemas())
    rows = data.draw(histories(schema))
    whole = table_of(schema, rows)
    # In pieces, as parts are read; cut from longer arrays; and in any order of the pieces.
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    ends = [0, *cuts, len(rows)]
    pieces = [whole.slice(a, b - a) for a, b in pairwise(ends)]
    updates = pa.concat_tables(data.draw(st.permutations(pieces)))
    few = data.draw(st.sampled_from([None, 1, 2, 3]))
    if few is not None:  # keys that share hashes
        shared = hash_rows(updates, schema.key or [c.name for c in schema.columns]) % np.uint64(few)
        updates = updates.append_column(HASH, pa.array(shared, pa.uint64()))
    compared = data.draw(st.sampled_from([1, 2, consolidate.COMPARED_ROWS]))
    with mock.patch.object(consolidate, "COMPARED_ROWS", compared):
        first, second = sorted(data.draw(st.tuples(st.integers(0, 9), st.integers(0, 9))))
        once = check(schema, updates, first)
        again = check(schema, once, second)
    # Several merges, each of what the one before it left, come to what one of everything does.
    assert listed(again.drop_columns([HASH])) == listed(by_grouping(schema, updates, second))


SCHEMA = ShardSchema((Column("k", "int64"), Column("v", "float64")), ("k",))


@pytest.mark.parametrize(
    ("rows", "left"),
    [
        ([(1, 0.0, 0, 1), (1, 0.0, 1, -1), (1, 1.5, 1, 1)], [(1, 1.5, 9, 1)]),
        ([(1, 0.0, 0, -1), (1, 1.5, 0, 1), (1, 1.5, 1, -1), (1, 0.0, 1, 1)], []),
        ([(1, math.nan, 0, 1), (1, math.nan, 1, -1)], []),
        ([(None, None, 0, 1), (None, None, 1, -1)], []),
        ([(1, 0.0, 0, 1), (1, -0.0, 1, -1)], [(1, -0.0, 9, -1), (1, 0.0, 9, 1)]),
        ([(1, 0.0, 0, 1), (1, None, 1, -1)], [(1, None, 9, -1), (1, 0.0, 9, 1)]),
        ([(1, 1.5, 0, 1), (1, 1.5, 1, 1)], [(1, 1.5, 9, 2)]),
        ([(1, 1.5, 0, 3), (1, 1.5, 1, -2)], [(1, 1.5, 9, 1)]),
        ([(1, 1.5, 0, 0)], []),
        ([(1, 1.5, 0, -1), (1, 1.5, 1, 2)], [(1, 1.5, 9, 1)]),
        ([(1, 1.5, 9, 1), (1, 1.5, 10, -1)], [(1, 1.5, 9, 1), (1, 1.5, 10, -1)]),
    ],
)
def test_only_what_is_equal_bit_by_bit_cancels(rows: list[Any], left: list[Any]) -> None:
    found = check(SCHEMA, table_of(SCHEMA, rows), 9)
    assert listed(found.drop_columns([HASH])) == listed(table_of(SCHEMA, left))


def test_a_history_as_writers_make_it_is_summed_without_grouping_whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    live: dict[int, float] = {}
    rows: list[Any] = []
    for time in range(20):
        for key in range(time % 3, 50, 2):
            rows += [(key, live[key], time, -1)] if key in live else []
            live[key] = float(time)
            rows.append((key, live[key], time, 1))
    updates = table_of(SCHEMA, rows[3:])
    expected = check(SCHEMA, updates, 15)
    monkeypatch.setattr(consolidate, "_sum_groups", lambda *_: pytest.fail("whole rows were grouped"))
    assert consolidate.merge_updates(SCHEMA, updates, 15).equals(expected)
