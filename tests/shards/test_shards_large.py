"""Columns with more text than one array holds, and texts that are far larger in memory than in storage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.shards.world import SCHEMA
from tidemill.cli.table import export
from tidemill.shards.api import DIFF, TIME, Batch, Part, ShardSchema
from tidemill.shards.parts import consolidate, parts
from tidemill.shards.parts.arrow_rows import combine_columns, cut_positions, row_sizes, rows_at, rows_equal
from tidemill.shards.parts.consolidate import merge_updates, sum_contents
from tidemill.shards.parts.parts import encode_part
from tidemill.shards.parts.row_hash import hash_rows
from tidemill.shards.parts.schema import part_schema, update_schema
from tidemill.shards.read.hash_ranges import cut_ranges, read_batch_ordered, read_range

MIB = 1 << 20
VALUES = st.sampled_from([None, "", "a", "bcd", "é" * 9, "x" * 40])

POOLS: list[Any] = []
"""Memory pools, kept alive because they must outlive their allocations."""


@contextmanager
def peak() -> Iterator[Any]:
    """Return a function that returns the peak of Arrow's memory since this call."""
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    POOLS.append(pool)
    pa.set_memory_pool(pool)
    try:
        yield pool.max_memory
    finally:
        pa.set_memory_pool(before)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(VALUES, max_size=6), max_size=5), st.data(), st.integers(1, 60))
def test_rows_in_several_chunks_are_those_that_arrow_takes(
    chunks: list[list[str | None]], data: st.DataObject, limit_bytes: int
) -> None:
    count = sum(map(len, chunks))
    at = np.array(data.draw(st.lists(st.integers(0, count - 1), max_size=20)) if count else [], dtype=np.int64)
    kinds = [pa.string(), pa.binary(), pa.float64()]
    numbers = [[None if v is None else float(len(v)) for v in chunk] for chunk in chunks]
    lists = [chunks, [[v if v is None else v.encode() for v in chunk] for chunk in chunks], numbers]
    columns = [
        # Cut from longer arrays, as what is read is.
        pa.chunked_array([pa.array([*chunk, chunk[0]], kind).slice(0, len(chunk)) for chunk in found if chunk], kind)
        for found, kind in zip(lists, kinds, strict=True)
    ]
    table = pa.table(columns, names=["s", "b", "f"])
    found = rows_at(table, at, limit_bytes)
    found.validate(full=True)
    assert found.schema == table.schema
    assert found.to_pylist() == table.take(pa.array(at)).to_pylist()
    viewed = len(at) > 0 and np.array_equal(at, np.arange(at[0], at[0] + len(at)))
    for chunk in () if viewed else found.column("s").chunks:
        sizes = row_sizes(pa.table([chunk], names=["s"])) - 4
        assert sizes.sum() <= limit_bytes or len(chunk) == 1


@given(st.lists(st.integers(0, 20), max_size=30), st.integers(1, 40), st.integers(1, 8))
def test_a_cut_is_as_long_as_both_limits_allow(sizes: list[int], limit_bytes: int, limit_rows: int) -> None:
    cuts = cut_positions(np.array(sizes, dtype=np.int64), limit_bytes, limit_rows)
    assert cuts[0] == 0 and cuts[-1] == len(sizes)
    for start, end in pairwise(cuts):
        fits = sum(sizes[start:end]) <= limit_bytes and end - start <= limit_rows
        assert fits or end - start == 1
        assert end == len(sizes) or end - start == limit_rows or sum(sizes[start : end + 1]) > limit_bytes


def large(schema: ShardSchema, keys: list[int], times: list[int], diffs: list[int]) -> pa.Table:
    """Return updates with more than 2 GiB of text but 32 MiB of memory: all chunks are the same one."""
    chunk = pa.array(["x" * MIB] * 32)
    chunks, rest = divmod(len(keys), len(chunk))
    assert rest == 0 and chunks * len(chunk) > 2048
    hashes = hash_rows(pa.table({"k": keys}), ["k"])
    columns = [pa.array(keys), pa.chunked_array([chunk] * chunks), *map(pa.array, (times, diffs, hashes))]
    return pa.table(columns, schema=part_schema(schema))


def test_more_text_than_one_array_holds_is_taken_compared_and_summed() -> None:
    # 2,304 rows: 1,150 keys come and go, four stay; keys in an order that is not that of their hashes.
    keys = [*range(1_150), *range(1_150), *range(2_000, 2_004)]
    updates = large(SCHEMA, keys, [1] * 1_150 + [2] * 1_150 + [3] * 4, [1] * 1_150 + [-1] * 1_150 + [1] * 4)
    with pytest.raises(pa.ArrowInvalid, match="overflow"):
        updates.take(pa.array([3, 1, 2303]))  # what was called here: when it no longer fails, ours may go
    with peak() as held:
        assert rows_at(updates, np.array([3, 1, 2303])).column("k").to_pylist() == [3, 1, 2_003]
        assert combine_columns(updates).num_rows == 2_304
        assert rows_equal(updates, np.array([7, 2301, 5]), updates, np.array([5, 2301, 7]), ["v"]).all()
        assert sorted(sum_contents(SCHEMA, updates).column("k").to_pylist()) == [2_000, 2_001, 2_002, 2_003]
        found = merge_updates(SCHEMA, updates, 9)
        assert sorted(found.column("k").to_pylist()) == [2_000, 2_001, 2_002, 2_003]
        assert set(found.column(TIME).to_pylist()) == {9} and set(found.column(DIFF).to_pylist()) == {1}
    assert held() < 300 * MIB


def test_a_text_that_many_rows_have_is_as_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row with a large multiplicity makes the contents larger than all updates."""
    unkeyed = ShardSchema(SCHEMA.columns, ())
    rows = pa.table([pa.array([1, 2]), pa.array(["x" * 1000, "y"]), pa.array([1, 1]), pa.array([5, 2])],
                    schema=update_schema(unkeyed))  # fmt: skip
    real = rows_at
    monkeypatch.setattr(consolidate, "rows_at", lambda table, at: real(table, at, 2_500))
    found = sum_contents(unkeyed, rows)
    assert sorted(found.column("k").to_pylist()) == [1] * 5 + [2] * 2


def test_rows_that_are_grouped_are_as_many_hashes_at_a_time_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    unkeyed = ShardSchema(SCHEMA.columns, ())
    numbers = np.arange(3_000)
    text = pa.array([f"text {n % 700}" for n in numbers])
    rows = pa.table([pa.array(numbers % 700), text, pa.array(np.ones(3_000, int)), pa.array(np.ones(3_000, int))],
                    schema=update_schema(unkeyed))  # fmt: skip
    whole, kept = sum_contents(unkeyed, rows), merge_updates(unkeyed, rows, 5)
    calls = []
    real = consolidate._sum_equal_rows
    monkeypatch.setattr(
        consolidate, "_sum_equal_rows", lambda table, names: calls.append(table.num_rows) or real(table, names)
    )
    monkeypatch.setattr(consolidate, "CHUNK_BYTES", 10_000)
    assert sum_contents(unkeyed, rows).equals(whole)
    assert merge_updates(unkeyed, rows, 5).equals(kept)
    assert len(calls) > 10 and max(calls) < 1_000


def compressible(rows: int, size: int) -> pa.Table:
    keys = np.arange(rows)
    text = pa.array(["x" * size]).take(pa.array(np.zeros(rows, dtype=np.int64)))
    return pa.table([pa.array(keys), text, pa.array(np.ones(rows, int)), pa.array(np.ones(rows, int))],
                    schema=update_schema(SCHEMA))  # fmt: skip


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_range_of_very_compressible_text_is_read_and_exported_in_little_memory(
    codec: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(parts, "ROW_GROUP_BYTES", MIB)
    encoded = encode_part(SCHEMA, compressible(10_000, 5_000), codec)
    data = encoded.data.to_pybytes()
    assert len(data) < MIB < 40 * MIB < 10_000 * 5_000
    part = Part(encoded.rows, len(data), 0, "", data, encoded.min_hash, encoded.max_hash)
    batches = [Batch(0, 10, (part,))]
    (chosen,) = cut_ranges(batches)
    with peak() as held:
        assert sum(table.num_rows for table in read_range(SCHEMA, chosen, 9, lambda part: part.inline)) == 10_000
        assert (
            sum(table.num_rows for table in read_batch_ordered(SCHEMA, batches[0], 9, lambda part: part.inline))
            == 10_000
        )
    assert held() < 12 * MIB
    with peak() as held:
        assert export._write_range(tmp_path / "out.parquet", SCHEMA, chosen, 9, lambda part: part.inline) == 10_000
    assert held() < 12 * MIB
