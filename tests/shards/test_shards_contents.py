"""Sums of updates and the format of parts: the vectorised answers equal a multiset counted one row at a time."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.shards.world import SCHEMA, Row, contents_of, summed, tuples, updates
from tidemill.base.errors import CorruptError, InvalidError
from tidemill.shards.api import HASH, Column, Part, ShardSchema
from tidemill.shards.parts import consolidate
from tidemill.shards.parts.parts import decode_part, encode_part
from tidemill.shards.parts.schema import arrow_type, canonical_type, check_schema, part_schema

KEYLESS = ShardSchema(SCHEMA.columns, ())
VALUES = st.sampled_from(["a", "b", "", None])
KEYS = st.sampled_from([None, 0, 1, 2, -5, 2**40])


@st.composite
def keyed_histories(draw: st.DrawFn) -> list[Row]:
    """Updates of a keyed shard: at each time a key may change to a value or vanish."""
    live: dict[int | None, str | None] = {}
    rows: list[Row] = []
    for time in range(draw(st.integers(0, 8))):
        for key in draw(st.lists(KEYS, unique=True, max_size=4)):
            if key in live:
                rows.append((key, live.pop(key), time, -1))
            if draw(st.booleans()):
                live[key] = draw(VALUES)
                rows.append((key, live[key], time, 1))
    return rows


@st.composite
def multiset_histories(draw: st.DrawFn) -> list[Row]:
    """Updates of a keyless shard: rows in any count, never below zero."""
    count: Counter[tuple[Any, ...]] = Counter()
    rows: list[Row] = []
    for time in range(draw(st.integers(0, 6))):
        for key, value, diff in draw(st.lists(st.tuples(KEYS, VALUES, st.integers(-2, 3)), max_size=5)):
            diff = max(diff, -count[(key, value)])
            if diff:
                count[(key, value)] += diff
                rows.append((key, value, time, diff))
    return rows


def stored(schema: ShardSchema, rows: list[Row]) -> pa.Table:
    """Return the rows as a reader sees them: one encoded part per time, in time order."""
    tables = []
    for time in sorted({r[2] for r in rows}):
        encoded = encode_part(schema, updates(r for r in rows if r[2] == time))
        tables.append(decode_part(schema, encoded.data, Part(encoded.rows, encoded.data.size)))
    return pa.concat_tables([part_schema(schema).empty_table(), *tables])


@settings(max_examples=150, deadline=None)
@given(keyed_histories(), st.randoms(use_true_random=False))
def test_keyed_contents_equal_the_model(rows: list[Row], shuffle: Any) -> None:
    table = stored(SCHEMA, rows)
    expected = summed(rows, 99)
    if table.num_rows:
        assert consolidate.newest_contents(SCHEMA, table) is not None
    assert contents_of(consolidate.sum_contents(SCHEMA, table)) == expected
    order = list(range(table.num_rows))
    shuffle.shuffle(order)
    assert contents_of(consolidate.sum_contents(SCHEMA, table.take(pa.array(order, pa.int64())))) == expected
    assert contents_of(consolidate.sum_contents(KEYLESS, table.drop_columns([HASH]))) == expected


@settings(max_examples=100, deadline=None)
@given(multiset_histories())
def test_keyless_contents_equal_the_model(rows: list[Row]) -> None:
    assert contents_of(consolidate.sum_contents(KEYLESS, stored(KEYLESS, rows))) == summed(rows, 99)


@settings(max_examples=100, deadline=None)
@given(multiset_histories(), st.integers(0, 6))
def test_merging_keeps_contents_at_every_time_from_since_on(rows: list[Row], since: int) -> None:
    merged = tuples(consolidate.merge_updates(KEYLESS, stored(KEYLESS, rows), since))
    for as_of in range(since, 8):
        assert summed(merged, as_of) == summed(rows, as_of)
    assert all(r[2] >= since for r in merged)
    assert [r for r in merged if r[2] > since] == sorted((r for r in rows if r[2] > since), key=repr)


def test_a_hash_shared_by_two_keys_takes_the_slow_path(monkeypatch: pytest.MonkeyPatch) -> None:
    table = updates([(1, "a", 0, 1), (2, "b", 0, 1), (1, "a", 1, -1), (3, "c", 1, 1)])
    table = table.append_column(HASH, pa.array([7, 7, 7, 7], pa.uint64()))
    assert consolidate.newest_contents(SCHEMA, table) is None
    assert contents_of(consolidate.sum_contents(SCHEMA, table)) == {(2, "b"): 1, (3, "c"): 1}


def test_parts_are_sorted_by_hash_time_and_diff_and_carry_their_range() -> None:
    rows: list[Row] = [(k, "v", t, d) for t in (3, 1, 2) for k in range(50) for d in (1, -1)]
    encoded = encode_part(SCHEMA, updates(rows))
    table = decode_part(SCHEMA, encoded.data, encoded.to_part())
    assert table.schema.equals(part_schema(SCHEMA))
    order = list(zip(*(table.column(n).to_pylist() for n in ("_hash", "_time", "_diff")), strict=True))
    assert order == sorted(order)
    assert (encoded.min_hash, encoded.max_hash) == (order[0][0], order[-1][0])
    assert tuples(table) == sorted(rows, key=repr)


def test_damaged_and_exchanged_parts_are_corrupt() -> None:
    encoded = encode_part(SCHEMA, updates([(1, "a", 1, 1)]))
    with pytest.raises(CorruptError, match="unreadable"):
        decode_part(SCHEMA, encoded.data.to_pybytes()[:-20], Part(1, 10, object_key="shards/x/y.parquet"))
    with pytest.raises(CorruptError, match="rows=1 want=2"):
        decode_part(SCHEMA, encoded.data, Part(2, 10))


def test_a_part_of_an_earlier_version_reads_with_what_it_lacks_filled_in() -> None:
    encoded = encode_part(SCHEMA, updates([(1, "a", 1, 1)]))
    part = Part(1, encoded.data.size)
    added = (Column("n", "decimal(5,2)", None, 2), Column("m", "int16", "7", 3))
    later = ShardSchema((*SCHEMA.columns, *added), ("k",), version=3)
    table = decode_part(later, encoded.data, part)
    assert table.schema.equals(part_schema(later))
    assert (table.column("n").to_pylist(), table.column("m").to_pylist()) == ([None], [7])
    with pytest.raises(CorruptError, match="lack a column: column=n"):
        decode_part(ShardSchema((*SCHEMA.columns, Column("n", "int16")), ("k",)), encoded.data, part)
    with pytest.raises(CorruptError, match="another type: column=k"):
        decode_part(ShardSchema((Column("k", "int32"), Column("v", "string")), ("k",)), encoded.data, part)


def test_rows_that_do_not_fit_are_refused_with_the_column() -> None:
    with pytest.raises(InvalidError, match="column=v"):
        encode_part(SCHEMA, updates([(1, "a", 1, 1)]).drop_columns(["v"]))
    with pytest.raises(InvalidError, match="column=k"):
        encode_part(SCHEMA, updates([(1, "a", 1, 1)]).set_column(0, "k", pa.array(["x"])))
    with pytest.raises(InvalidError, match="at least one row"):
        encode_part(SCHEMA, updates([]))
    small = ShardSchema((Column("k", "int16"), Column("v", "string")), ("k",))
    with pytest.raises(InvalidError, match="column=k"):
        encode_part(small, updates([(70_000, "a", 1, 1)]))


def test_type_strings_have_one_spelling_and_one_arrow_type() -> None:
    assert canonical_type("timestamp(us, UTC)") == "timestamp"
    assert arrow_type("json") == pa.string()
    assert arrow_type("timestamp") == pa.timestamp("us", tz="UTC")
    for bad in ("int8", "decimal(39,0)", "decimal(3,5)", "timestamp(ns)", ""):
        with pytest.raises(InvalidError):
            canonical_type(bad)
    with pytest.raises(InvalidError, match="reserved"):
        check_schema(ShardSchema((Column("_time", "int64"),), ()))
    with pytest.raises(InvalidError, match="key=z"):
        check_schema(ShardSchema((Column("a", "int64"),), ("z",)))


def test_every_type_survives_a_part() -> None:
    values: dict[str, list[Any]] = {
        "bool": [True, None],
        "int16": [-3, None],
        "int32": [2**31 - 1, None],
        "int64": [-(2**63), None],
        "float32": [1.5, None],
        "float64": [-0.0, None],
        "string": ["é", None],
        "json": ['{"a": 1}', None],
        "binary": [b"\x00\xff", None],
        "decimal(38,10)": [Decimal("-1234567890.0123456789"), None],
    }
    schema = ShardSchema(tuple(Column(f"c{i}", t) for i, t in enumerate(values)), ("c3",))
    table = pa.table({f"c{i}": pa.array(v, arrow_type(t)) for i, (t, v) in enumerate(values.items())})
    table = table.append_column("_time", pa.array([1, 1])).append_column("_diff", pa.array([1, 1]))
    encoded = encode_part(schema, table)
    back = consolidate.sum_contents(schema, decode_part(schema, encoded.data, Part(2, encoded.data.size)))
    assert sorted(map(repr, back.to_pylist())) == sorted(map(repr, table.select(back.column_names).to_pylist()))
