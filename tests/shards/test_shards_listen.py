"""Snapshots and listeners with a compaction in between; rows outside the bounds of their batch are never shown."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pyarrow as pa
import pytest

from support.shards.world import World, append, contents_of, tuples, updates
from tidemill.base.errors import ClosedError, CorruptError, MissingError, UnavailableError
from tidemill.shards import handle as handle_module
from tidemill.shards.api import Batch, Delta, Part
from tidemill.shards.compaction import compaction
from tidemill.shards.compaction.compaction import FAN_IN, choose_run, compact_once
from tidemill.shards.handle import LogShard
from tidemill.shards.state.state import check_invariants


async def gather(shard: LogShard, lower: int, upper: int) -> list[Delta]:
    """Return the deltas of a listener from `lower` until it has reached `upper`."""
    out = []
    async with aclosing(shard.listen(lower)) as deltas:
        async for delta in deltas:
            out.append(delta)
            if delta.upper >= upper:
                return out
    return out


async def churn(shard: LogShard, count: int, start: int = 0) -> list[tuple[int, str, int, int]]:
    """Append `count` batches that overwrite three keys in turn."""
    rows: list[tuple[int, str, int, int]] = []
    for at in range(start, start + count):
        key = at % 3
        new = [(key, f"v{at}", at, 1)]
        if at >= 3:
            new.insert(0, (key, f"v{at - 3}", at, -1))
        await append(shard, at, at + 1, new)
        rows += new
    return rows


async def test_listen_yields_every_update_once_and_progress() -> None:
    shard = await World().open()
    rows = await churn(shard, 12)
    await append(shard, 12, 20, [])
    deltas = await gather(shard, 0, 20)
    assert [(d.lower, d.upper) for d in deltas] == [(i, i + 1) for i in range(12)] + [(12, 20)]
    assert tuples(pa.concat_tables([d.rows for d in deltas])) == sorted(rows, key=repr)
    late = await gather(shard, 7, 20)
    assert tuples(pa.concat_tables([d.rows for d in late])) == sorted((r for r in rows if r[2] >= 7), key=repr)


async def test_a_listener_wakes_for_another_writers_append() -> None:
    world = World()
    backend = world.consensus()
    reader, writer = await world.open(consensus=backend), await world.open(consensus=backend)
    listener = reader.listen(0)
    waiting = asyncio.ensure_future(anext(listener))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await append(writer, 0, 3, [(1, "a", 2, 1)])
    delta = await asyncio.wait_for(waiting, 2)
    assert (delta.lower, delta.upper, tuples(delta.rows)) == (0, 3, [(1, "a", 2, 1)])
    assert await reader.wait_upper(2, 5) == 3
    assert await reader.wait_upper(3, 0.05) == 3


async def test_m4403_regression_listen_compaction() -> None:
    """A merged batch holds rows from before the listener's frontier: they are not seen twice."""
    world = World()
    shard, other = await world.open(), await world.open()
    rows = await churn(shard, FAN_IN * 2)
    seen = []
    async with aclosing(shard.listen(0)) as deltas:
        for _ in range(FAN_IN // 2):
            seen.append((await anext(deltas)).rows)
        await other.downgrade_since("compactor", 1, FAN_IN // 2 - 1)
        done = await compact_once(other, world.objects, world.rand)
        assert done is not None and done.shown and done.batches == FAN_IN * 2
        assert len(other.state.batches) == 1
        rows += await churn(shard, 3, start=FAN_IN * 2)
        async for delta in deltas:
            seen.append(delta.rows)
            if delta.upper == FAN_IN * 2 + 3:
                break
    assert tuples(pa.concat_tables(seen)) == sorted(rows, key=repr)


async def test_compaction_keeps_contents_at_every_readable_time() -> None:
    world = World()
    shard = await world.open()
    await churn(shard, 40)
    before = {t: contents_of(await shard.snapshot(t)) for t in range(25, 40)}
    await shard.downgrade_since("compactor", 1, 25)
    rows = shard.state.rows
    while (done := await compact_once(shard, world.objects, world.rand)) is not None:
        assert done.shown
    check_invariants(shard.state)
    assert len(shard.state.batches) == 1 and shard.state.rows < rows
    fresh = await world.open()
    assert {t: contents_of(await fresh.snapshot(t)) for t in range(25, 40)} == before


async def test_m4405_a_closed_shard_is_still_compacted_and_its_history_still_moves_up() -> None:
    world = World()
    shard = await world.open()
    await churn(shard, FAN_IN * 2)
    newest = contents_of(await shard.snapshot(FAN_IN * 2 - 1))
    await shard.close()
    assert await shard.downgrade_since("keeper", 1, 10**6) == FAN_IN * 2 - 1, "the newest time stays readable"
    done = await compact_once(shard, world.objects, world.rand)
    assert done is not None and done.shown and done.rows_out == 3
    assert len(shard.state.batches) == 1 and shard.state.closed
    assert contents_of(await (await world.open()).snapshot(FAN_IN * 2 - 1)) == newest
    with pytest.raises(ClosedError):
        await append(shard, FAN_IN * 2, FAN_IN * 2 + 1, [])


async def test_compaction_that_lost_its_batches_changes_nothing() -> None:
    world = World()
    one, two = await world.open(writer="one"), await world.open(writer="two")
    await churn(one, FAN_IN)
    done = await asyncio.gather(
        compact_once(one, world.objects, world.rand), compact_once(two, world.objects, world.rand)
    )
    assert sorted(d.shown for d in done if d) == [False, True]
    assert len((await world.open()).state.batches) == 1
    assert contents_of(await two.snapshot(FAN_IN - 1)).total() == 3


@pytest.mark.parametrize("collected", [True, False])
async def test_compaction_whose_input_goes_while_it_reads_has_lost_if_it_was_merged_and_else_says_so(
    monkeypatch: pytest.MonkeyPatch, collected: bool
) -> None:
    monkeypatch.setattr(handle_module, "INLINE_PART_BYTES", 0)
    world = World()
    slow, quick = await world.open(writer="slow"), await world.open(writer="quick")
    await churn(slow, FAN_IN)
    await slow.frontiers()
    slow.reader._limit_bytes = 0
    get, before = world.objects.get, [m.key async for m in world.objects.list("shards/")]

    async def after_the_other(key: str, start: int = 0, end: int | None = None) -> bytes:
        monkeypatch.setattr(world.objects, "get", get)
        if collected:
            done = await compact_once(quick, world.objects, world.rand)
            assert done is not None and done.shown
        for each in before:
            await world.objects.delete(each)
        return await get(key, start, end)

    monkeypatch.setattr(world.objects, "get", after_the_other)
    if not collected:
        with pytest.raises(MissingError):
            await compact_once(slow, world.objects, world.rand)
        return
    done = await compact_once(slow, world.objects, world.rand)
    assert done is not None and not done.shown
    assert len(slow.state.batches) == 1
    assert contents_of(await slow.snapshot(FAN_IN - 1)).total() == 3


def test_idle_ticks_do_not_unseat_a_merge() -> None:
    busy = Batch(0, 1, (Part(1, 10, inline=b"x"),))
    batches = [Batch(i, i + 1, busy.parts) for i in range(FAN_IN)]
    assert choose_run(batches) == (0, FAN_IN)
    assert choose_run([*batches, Batch(FAN_IN, FAN_IN + 5, ())]) == (0, FAN_IN)
    assert choose_run(batches[1:]) == (0, 0)


def test_parts_of_old_schema_versions_are_rewritten_after_all_other_merges() -> None:
    """Neighbours together up to the limit of a merge, a larger batch alone, and only what has parts."""
    small, large, new = (Part(1, size, object_key="k") for size in (10, compaction.RUN_BYTES + 1, 10))
    batches = [
        Batch(0, 1, (new,), schema_version=3),
        Batch(1, 2, (large,), schema_version=2),
        Batch(2, 3, (small,), schema_version=1),
        Batch(3, 4, (), schema_version=1),
        Batch(4, 5, (small,), schema_version=2),
        Batch(5, 6, (new,), schema_version=3),
    ]
    assert choose_run(batches) == choose_run(batches, oldest_version=1) == (0, 0)
    assert choose_run(batches, oldest_version=2) == (2, 3)
    assert choose_run(batches, oldest_version=3) == (1, 2)
    assert choose_run(batches[2:], oldest_version=3) == (0, 1)
    assert choose_run(batches[4:], oldest_version=3) == (0, 1)
    many = [Batch(i, i + 1, (small,), schema_version=1) for i in range(3)]
    assert choose_run(many, oldest_version=2) == (0, 3)
    assert choose_run([*many] * FAN_IN, oldest_version=2) == (0, 3 * FAN_IN)


async def test_m4404_truncate_rows_outside_registered_bounds_never_show() -> None:
    """Rows @0, @1, @2 registered as [1, 2): only the one @1, for snapshots, listeners and after compaction."""
    world = World()
    shard = await world.open()
    part = await shard.write_part(updates([(0, "r", 0, 1), (1, "r", 1, 1), (2, "r", 2, 1)]))
    await append(shard, 0, 1, [])
    await shard.compare_and_append(1, 2, [part], "")
    await append(shard, 2, 5, [])
    await append(shard, 5, 9, [])
    assert contents_of(await shard.snapshot(8)) == {(1, "r"): 1}
    deltas = await gather(shard, 0, 9)
    assert [tuples(d.rows) for d in deltas if d.rows.num_rows] == [[(1, "r", 1, 1)]]
    for at in range(9, 9 + FAN_IN):
        await append(shard, at, at + 1, [(at, "x", at, 1)])
    assert (await compact_once(shard, world.objects, world.rand)) is not None
    assert contents_of(await shard.snapshot(8)) == {(1, "r"): 1}


async def test_snapshot_waits_for_its_time_or_says_that_it_is_not_final() -> None:
    world = World()
    backend = world.consensus()
    shard = await world.open(consensus=backend)
    with pytest.raises(UnavailableError, match="not final"):
        await shard.snapshot(5, timeout_s=0.05)
    waiting = asyncio.ensure_future(shard.snapshot(5))
    await asyncio.sleep(0.02)
    await append(shard, 0, 6, [(1, "a", 5, 1)])
    assert contents_of(await asyncio.wait_for(waiting, 2)) == {(1, "a"): 1}


async def test_a_retraction_of_what_was_never_there_is_corrupt() -> None:
    shard = await World().open()
    await append(shard, 0, 6, [(1, "a", 5, -1)])
    with pytest.raises(CorruptError, match="k=1"):
        await shard.snapshot(5)
