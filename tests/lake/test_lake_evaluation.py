"""The rows that count, one publication after another, equal the sum of all updates at each time."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.shards.histories import histories
from support.shards.world import SCHEMA, Row, contents_of, summed, updates
from support.waiting import run
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import CorruptError, MissingError
from tidemill.lake.vectors.evaluation import Evaluation, View, evaluate, views_at
from tidemill.lake.vectors.part_columns import PartColumns
from tidemill.objects.memory import MemoryObjects
from tidemill.shards.api import DIFF, HASH, TIME, Batch, Part, ShardSchema
from tidemill.shards.parts.consolidate import merge_updates
from tidemill.shards.parts.parts import PartTarget, decode_part, store_part

KEYLESS = ShardSchema(SCHEMA.columns, ())


class Shelf:
    """Parts of one shard in memory, and its batches."""

    def __init__(self, schema: ShardSchema, seed: int = 1) -> None:
        self.schema = schema
        self.objects = MemoryObjects(SystemClock())
        self.rand = Rand(seed)
        self.batches: list[Batch] = []
        self.columns = PartColumns(self.objects)

    async def store(self, rows: pa.Table, *, inline: bool = False) -> Part:
        target = PartTarget("id", "w", 1, inline_bytes=1 << 14 if inline else 0)
        return await store_part(self.objects, self.schema, rows, target, self.rand)

    async def append(self, lower: int, upper: int, pieces: list[list[Row]], inline: bool = False) -> None:
        parts = [await self.store(updates(piece), inline=inline) for piece in pieces if piece]
        self.batches.append(Batch(lower, upper, tuple(parts), token=str(lower)))

    async def merge(self, start: int, end: int, since: int) -> None:
        """Merge the batches [start, end), as compaction does, into at most two parts."""
        run_ = self.batches[start:end]
        parts = [part for batch in run_ for part in batch.parts]
        tables = [await self.read(part) for part in parts]
        stored = []
        if tables:
            merged = merge_updates(self.schema, pa.concat_tables(tables), min(since, run_[-1].upper - 1))
            hashes = merged.column(HASH).to_numpy()
            half = int(np.searchsorted(hashes, hashes[len(hashes) // 2])) if len(hashes) else 0
            stored = [await self.store(p) for p in (merged.slice(0, half), merged.slice(half)) if p.num_rows]
        self.batches[start:end] = [Batch(run_[0].lower, run_[-1].upper, tuple(stored))]

    async def read(self, part: Part) -> pa.Table:
        data = await self.objects.get(part.object_key) if part.object_key else part.inline
        return decode_part(self.schema, data, part)

    async def contents(self, found: Evaluation) -> Counter[Any]:
        """Return the rows that count, as a reader of files and vectors would find them."""
        out = contents_of(found.copies.drop_columns([HASH]))
        for state in found.states.values():
            rows = await self.read(state.view.part)
            out += contents_of(rows.filter(pa.array(~state.mask())).select(["k", "v"]))
            assert state.counting == int((~state.mask()).sum())
        return out


@settings(max_examples=60, deadline=None)
@given(st.data(), st.booleans())
def test_what_counts_is_the_sum_of_all_updates_after_any_appends_and_merges(data: st.DataObject, keyed: bool) -> None:
    history = data.draw(histories(keyed))
    flat = [row for pieces in history for piece in pieces for row in piece]
    shelf = Shelf(SCHEMA if keyed else KEYLESS)

    async def scenario() -> None:
        before: Evaluation | None = None
        since = lower = 0
        for pieces in history:
            times = [row[2] for piece in pieces for row in piece]
            upper = max([lower, *times]) + 1
            await shelf.append(lower, upper, pieces, data.draw(st.booleans()))
            lower = upper
            for _ in range(data.draw(st.integers(0, 2))):
                if data.draw(st.booleans()):
                    since = data.draw(st.integers(since, upper - 1))
                    start = data.draw(st.integers(0, len(shelf.batches) - 1))
                    await shelf.merge(start, data.draw(st.integers(start + 1, len(shelf.batches))), since)
                time = data.draw(st.integers(since, upper - 1))
                views = views_at(shelf.batches, shelf.schema, time)
                found = await evaluate(shelf.columns, shelf.schema, views, before)
                assert await shelf.contents(found) == summed(flat, time)
                assert found.states == (await evaluate(shelf.columns, shelf.schema, views)).states
                before = found

    run(scenario())


@pytest.mark.parametrize(
    ("rows", "counting"),
    [
        ([(1, "a", 1, 1), (1, "a", 1, 1), (1, "a", 2, -1)], 1),
        ([(1, "a", 1, 2)], 0),
        ([(1, "a", 1, 3), (1, "a", 2, 1), (1, "a", 3, -1)], 1),
        ([(1, "a", 1, 1), (1, "a", 2, 2), (1, "a", 3, -3)], 0),
    ],
)
async def test_multiplicities_become_copies(rows: list[Row], counting: int) -> None:
    shelf = Shelf(KEYLESS)
    await shelf.append(0, 10, [rows])
    found = await evaluate(shelf.columns, KEYLESS, views_at(shelf.batches, KEYLESS, 9))
    assert [state.counting for state in found.states.values()] == [counting]
    assert await shelf.contents(found) == summed(rows, 9)


async def test_a_merge_that_cancels_updates_revives_the_row_before_them() -> None:
    shelf = Shelf(SCHEMA)
    await shelf.append(0, 2, [[(1, "a", 1, 1)]])
    await shelf.append(2, 4, [[(1, "a", 2, -1), (1, "b", 2, 1)]])
    await shelf.append(4, 6, [[(1, "b", 4, -1), (1, "a", 4, 1)]])
    before = await evaluate(shelf.columns, SCHEMA, views_at(shelf.batches, SCHEMA, 5))
    assert [state.counting for state in before.states.values()] == [0, 0, 1]
    await shelf.merge(1, 3, 5)
    found = await evaluate(shelf.columns, SCHEMA, views_at(shelf.batches, SCHEMA, 5), before)
    assert [state.counting for state in found.states.values()] == [1]


async def test_merged_insertions_that_a_later_part_retracts_do_not_count() -> None:
    shelf = Shelf(SCHEMA)
    await shelf.append(0, 2, [[(1, "a", 1, 1)]])
    await shelf.append(2, 4, [[(2, "a", 2, 1)]])
    await shelf.append(4, 6, [[(1, "a", 4, -1)]])
    before = await evaluate(shelf.columns, SCHEMA, views_at(shelf.batches, SCHEMA, 5))
    await shelf.merge(0, 2, 3)
    found = await evaluate(shelf.columns, SCHEMA, views_at(shelf.batches, SCHEMA, 5), before)
    assert await shelf.contents(found) == Counter({(2, "a"): 1})


async def test_only_what_changed_is_read_again() -> None:
    shelf = Shelf(SCHEMA)
    rows = [(k, "a" * 40, 1, 1) for k in range(60_000)]
    await shelf.append(0, 2, [rows])
    before = await evaluate(shelf.columns, SCHEMA, views_at(shelf.batches, SCHEMA, 1))
    await shelf.append(2, 4, [[(7, "a" * 40, 2, -1), (7, "b", 2, 1)]])
    base = shelf.columns.fetched_bytes
    found = await evaluate(shelf.columns, SCHEMA, views_at(shelf.batches, SCHEMA, 3), before)
    part = shelf.batches[0].parts[0]
    assert part.size_bytes < 4 << 20 and found.rows == 60_000
    assert [state.dead for state in found.states.values()] == [1, 1]
    assert shelf.columns.fetched_bytes - base < 60_000 * 8 + 200_000, "the hashes of the large part, and the small one"
    base = shelf.columns.fetched_bytes
    await shelf.append(4, 6, [[(8, "a" * 40, 4, -1)]])
    found = await evaluate(shelf.columns, SCHEMA, views_at(shelf.batches, SCHEMA, 5), found)
    assert found.rows == 59_999
    assert shelf.columns.fetched_bytes - base <= shelf.batches[2].parts[0].size_bytes, "hashes stay in memory"


def held_bytes(found: Any, seen: set[int]) -> int:
    """Return the bytes of all texts and arrays that an object holds, each once."""
    if id(found) in seen:
        return 0
    seen.add(id(found))
    if isinstance(found, bytes):
        return len(found)
    if isinstance(found, np.ndarray):
        return int(found.nbytes)
    if isinstance(found, dict):
        inner = [*found.keys(), *found.values()]
    elif isinstance(found, msgspec.Struct):
        inner = [getattr(found, name) for name in found.__struct_fields__]
    else:
        inner = [*found] if isinstance(found, tuple) else [*getattr(found, "__dict__", {}).values()]
    return sum(held_bytes(each, seen) for each in inner)


async def test_all_that_is_cached_of_parts_is_counted_and_stays_below_the_limit() -> None:
    limit = 4 << 20
    shelf = Shelf(SCHEMA)
    columns = PartColumns(shelf.objects, cache_bytes=limit)
    rand = random.Random(1)
    most = 0
    for time in range(1, 241):
        count = 5 if time % 10 == 0 else 200
        rows: list[Row] = [(key, rand.randbytes(100).hex(), time, 1) for key in range(count)]
        part = await shelf.store(updates(rows), inline=count == 5)
        assert bool(part.inline) == (count == 5)
        await columns.summary(part)
        await columns.columns(part, [0], [HASH, TIME, DIFF])
        (found,) = await columns.rows(part, [0], SCHEMA)
        assert found.num_rows == count
        held = held_bytes(columns, {id(shelf.objects)})
        assert held <= columns.memory_bytes <= limit
        most = max(most, held)
    assert most > limit // 8, "the newest parts stay"
    columns.clear()
    assert columns.memory_bytes == 0 == held_bytes(columns, {id(shelf.objects)})


@pytest.mark.parametrize("cache_bytes", [0, 30_000])
async def test_what_was_dropped_is_read_again(cache_bytes: int) -> None:
    shelf = Shelf(SCHEMA)
    for time in range(2, 20, 2):
        rows: list[Row] = [(key, f"{time}{key}", time - 1, 1) for key in range(time * 10)]
        gone: list[Row] = [(key, f"{time - 2}{key}", time - 1, -1) for key in range((time - 2) * 10)]
        await shelf.append(time - 2, time, [rows, gone], inline=time == 10)
    views = views_at(shelf.batches, SCHEMA, 17)
    want = await evaluate(shelf.columns, SCHEMA, views)
    columns = PartColumns(shelf.objects, cache_bytes=cache_bytes)
    found = await evaluate(columns, SCHEMA, views)
    assert await shelf.contents(found) == await shelf.contents(want) and found.rows == 180
    assert columns.memory_bytes <= cache_bytes and columns.fetched_bytes > shelf.columns.fetched_bytes


async def test_earlier_parts_that_are_deleted_are_not_needed() -> None:
    shelf = Shelf(SCHEMA)
    await shelf.append(0, 2, [[(1, "a", 1, 1)]])
    await shelf.append(2, 4, [[(1, "a", 2, -1), (1, "b", 2, 1)]])
    before = await evaluate(shelf.columns, SCHEMA, views_at(shelf.batches, SCHEMA, 3))
    gone = [part.object_key for batch in shelf.batches for part in batch.parts]
    await shelf.merge(0, 2, 3)
    for key in gone:
        await shelf.objects.delete(key)
    shelf.columns = PartColumns(shelf.objects)
    found = await evaluate(shelf.columns, SCHEMA, views_at(shelf.batches, SCHEMA, 3), before)
    assert await shelf.contents(found) == Counter({(1, "b"): 1})
    await shelf.objects.delete(shelf.batches[0].parts[0].object_key)
    with pytest.raises(MissingError):
        await evaluate(PartColumns(shelf.objects), SCHEMA, views_at(shelf.batches, SCHEMA, 3), before)


async def test_a_retraction_of_an_absent_row_is_an_error() -> None:
    shelf = Shelf(SCHEMA)
    await shelf.append(0, 2, [[(1, "a", 1, -1)]])
    with pytest.raises(CorruptError, match="retracted more often"):
        await evaluate(shelf.columns, SCHEMA, views_at(shelf.batches, SCHEMA, 1))


async def test_a_wrong_vector_is_found_by_the_sum() -> None:
    """The vector of a part is swapped for that of an earlier time."""
    shelf = Shelf(SCHEMA)
    await shelf.append(0, 2, [[(1, "a", 1, 1), (2, "a", 1, 1)]])
    first = await evaluate(shelf.columns, SCHEMA, views_at(shelf.batches, SCHEMA, 1))
    await shelf.append(2, 4, [[(1, "a", 2, -1)]])
    second = await evaluate(shelf.columns, SCHEMA, views_at(shelf.batches, SCHEMA, 3), first)
    view = View(shelf.batches[0].parts[0], 0, 2)
    wrong = Evaluation({**second.states, view.id: first.states[view.id]}, second.copies)
    await shelf.append(4, 6, [[(3, "c", 4, 1)]])
    with pytest.raises(CorruptError, match="not the sum of all updates"):
        await evaluate(shelf.columns, SCHEMA, views_at(shelf.batches, SCHEMA, 5), wrong)
