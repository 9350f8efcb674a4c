"""Upkeep of shards over time: since advances, the stored bytes stay near the live bytes, and no holder loses a row."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest

from support.maintenance.world import KEYS, World, contents
from tidemill.base.errors import CorruptError, MissingError, UnavailableError
from tidemill.base.status.status import StageState, derive_status
from tidemill.maintenance.scheduler import Retention, StepBudget
from tidemill.maintenance.shards.drop import drop_shard
from tidemill.shards.api import Column, HistoryLostError, staged_key
from tidemill.shards.handle import LogShard
from tidemill.shards.parts.schema_evolution import SchemaChanges
from tidemill.shards.read.holds import hold_during
from tidemill.shards.state.checkpoint import assemble_state, decode_header, encode_header
from tidemill.shards.state.restore import restore_shard
from tidemill.shards.state.state import check_invariants
from tidemill.shards.state.stream_registers import (
    STREAM_REGISTERS,
    count_queries,
    is_restored,
    stream_register,
)


async def test_ten_minutes_of_updates_leave_twice_what_lives_and_the_window() -> None:
    """100 keys of 300 random bytes, all updated once a second: 61 kB a second, 30 kB live, 36 MB in all."""
    world = World()
    shard = await world.open()
    most, written_bytes = 0, 0
    for second in range(600):
        world.clock.advance(1000)
        await world.write(shard, KEYS)
        written_bytes += shard.state.batches[-1].parts[0].size_bytes
        if second % 5 == 4:
            await world.tend()
            await shard.frontiers()
            if second > 300:
                most = max(most, sum(world.stored().values()))
    since, upper = await shard.frontiers()
    now_ms = world.clock.now_ms()
    assert 60_000 <= now_ms - since <= 60_000 + 15_000 + 5_000
    check_invariants(shard.state)
    assert len(shard.state.batches) < 60
    for as_of in (since, (since + upper) // 2, upper - 1):
        assert contents(await shard.snapshot(as_of)) == world.at(as_of)
    live_bytes = len(KEYS) * 300
    rate = written_bytes / 600
    window_s = 60 + 15 + 120 + 5
    # One level of merges may have rewritten the data of the window before it was deleted.
    assert most <= 2 * live_bytes + 2 * rate * window_s, (most, live_bytes, rate)
    # The cluster is idle for a while, so that the window passes over the last write.
    await world.tend_for(300)
    await shard.frontiers()
    assert sum(world.stored().values()) <= 2 * live_bytes + 64_000
    assert contents(await shard.snapshot(upper - 1)) == world.at(upper - 1)
    version = world.upkeep._tended[shard.shard_id].shard.state.version
    await world.tend_for(600)
    assert world.upkeep._tended[shard.shard_id].shard.state.version == version, "an idle shard costs no write"


@pytest.mark.parametrize("ahead_ms", [86_400_000, 2_300_000_000_000], ids=["a day", "in 2099"])
async def test_f727_a_clock_that_was_ahead_for_a_moment_does_not_stop_retention_and_collection(ahead_ms: int) -> None:
    """Each later write follows a millisecond after the one before, so an hour of updates is a fraction of the history
    by its times. A merge and a sweep of that moment have the wrong time, too."""
    world = World()
    shard = await world.open()
    for _ in range(60):
        world.clock.advance(5000)
        await world.write(shard, KEYS[:30])
        await world.tend()
    world.clock.jump(ahead_ms)
    await world.write(shard, KEYS[:30])
    for _ in range(3):
        await world.tend()
    await shard.advance_sweep(world.clock.now_ms() - 6 * 3_600_000)
    world.clock.jump(-ahead_ms)
    most, written_bytes, uppers = 0, 0, {}
    for number in range(720):
        world.clock.advance(5000)
        await world.write(shard, KEYS[:30])
        written_bytes += shard.state.batches[-1].parts[0].size_bytes
        uppers[number] = shard.state.upper
        await world.tend()
        await shard.frontiers()
        assert number < 12 or shard.state.since <= uppers[number - 12] - 1, "the history stays readable for a minute"
        if number > 60:
            most = max(most, sum(world.stored().values()))
    check_invariants(shard.state)
    assert shard.state.upper > world.clock.now_ms() + ahead_ms - 3_700_000
    assert sum(len(garbage.objects) for garbage in shard.state.garbage) < 100
    window_s = 60 + 15 + 120 + 5
    assert most <= 2 * 30 * 300 + 2 * written_bytes / 3600 * window_s
    as_of = shard.state.upper - 1
    assert contents(await shard.snapshot(as_of)) == world.at(as_of)
    mark = world.tracker.mark("keeper:shards:t")
    assert mark is not None and "ahead of the clock" in mark.reason
    later_ms = world.clock.now_ms() + 3_600_000
    assert derive_status(mark, "node:n", later_ms, later_ms).state is StageState.WAITING
    world.clock.advance(ahead_ms)  # real time catches up
    await world.write(shard, KEYS[:30])
    await world.tend()
    assert world.tracker.mark("keeper:shards:t") is None


async def replaced(world: World) -> None:
    """Write for twenty minutes, in which everything is merged repeatedly."""
    shard = await world.open()
    for _ in range(120):
        world.clock.advance(10_000)
        await world.write(shard, KEYS)
        await world.tend()


@asynccontextmanager
async def no_hold(*_: object, **__: object):  # type: ignore[no-untyped-def]
    yield


@pytest.mark.parametrize("held", [True, False])
async def test_what_a_reader_chose_under_its_hold_stays_readable_and_without_it_history_is_lost(held: bool) -> None:
    world = World()
    shard = await world.open()
    for _ in range(5):
        world.clock.advance(1000)
        await world.write(shard, KEYS)
    await world.tend()
    as_of = shard.state.upper - 1
    model = world.at(as_of)
    taking = hold_during if held else no_hold
    async with taking(shard, "verify/1", as_of, ttl_ms=10**9):
        chosen = await shard.batches_until(as_of)
        await replaced(world)
        if held:
            assert contents(await shard.snapshot(as_of)) == model
            found = await shard.reader.read_batches(chosen, 0, as_of + 1)
            assert found.num_rows == 900
        else:
            with pytest.raises(HistoryLostError, match="merged and deleted"):
                await shard.read_batch(chosen[0], 0, as_of + 1)
            with pytest.raises(HistoryLostError):
                await shard.snapshot(as_of)
    await world.tend_for(200)
    with pytest.raises(HistoryLostError):
        await shard.snapshot(as_of)
    assert not {part.object_key for batch in chosen for part in batch.parts} & world.stored().keys()


async def test_a_hold_whose_owner_died_lapses() -> None:
    world = World()
    shard = await world.open()
    world.clock.advance(1000)
    await world.write(shard, KEYS)
    await shard.set_hold("dead/1", shard.state.upper - 1, 300_000)
    since = shard.state.upper - 1
    await replaced(world)
    await shard.frontiers()
    assert shard.state.since > since + 600_000
    assert [hold.reader for hold in shard.state.holds] == ["retention"]


async def test_nothing_goes_before_a_restore_can_do_without_it() -> None:
    world = World(Retention(history_s=1, collect_after_s=1))
    shard = await world.open()
    await world.tend()
    for _ in range(40):
        world.clock.advance(10_000)
        await world.write(shard, KEYS)
        await world.tend(persisted=False)
    await shard.frontiers()
    kept = {key for garbage in shard.state.garbage for key in garbage.objects}
    assert len(kept) > 30 and kept < world.stored().keys()
    await world.tend()
    await shard.frontiers()
    assert not kept & world.stored().keys()
    named = {part.object_key for batch in shard.state.batches for part in batch.parts if part.object_key}
    assert named <= world.stored().keys()


async def test_a_collection_that_was_cut_off_is_done_again() -> None:
    world = World(Retention(history_s=1, collect_after_s=1))
    shard = await world.open()
    for _ in range(12):
        world.clock.advance(1000)
        await world.write(shard, KEYS)
    await world.tend()
    tended = world.upkeep._tended[shard.shard_id].shard
    world.clock.advance(10_000)

    async def dies(version: int) -> None:
        raise RuntimeError("killed between the deletion and its record")

    collected, tended.mark_collected = tended.mark_collected, dies  # type: ignore[method-assign]
    await world.tend()
    assert "killed" in world.tracker.failure("keeper:shards:t").error  # type: ignore[union-attr]
    assert world.upkeep._tended == {}, "the handle may be what is broken"
    await world.tend()
    await world.tend()
    await shard.frontiers()
    assert shard.state.garbage == ()
    assert world.tracker.failure("keeper:shards:t") is None
    assert contents(await shard.snapshot(shard.state.upper - 1)) == world.at(shard.state.upper - 1)
    del collected


async def test_f702_a_shard_that_cannot_be_read_stops_its_own_upkeep_only() -> None:
    world = World(Retention(history_s=1, collect_after_s=1))
    good, bad = await world.open("good"), await world.open("bad")
    world.clock.advance(1000)
    await world.consensus().append(f"shard/{bad.shard_id}", 0, 1, [b"\x07garbage"], "n")
    for _ in range(20):
        world.clock.advance(10_000)
        await world.write(good, KEYS)
        await world.tend()
    failure = world.tracker.failure("keeper:shards:bad")
    assert failure is not None and failure.parked and "unknown kind" in failure.error
    await good.frontiers()
    assert good.state.since > 0 and len(good.state.batches) < 10
    assert world.tracker.failure("keeper:shards:good") is None


@pytest.mark.parametrize("needed", [False, True])
async def test_parts_without_a_column_are_rewritten_only_if_a_reader_needs_it_in_the_files(needed: bool) -> None:
    world = World(oldest_version=lambda schema: schema.version if needed else 0)
    shard = await world.open()
    await world.write(shard, range(500), 100)
    (before,) = shard.state.batches
    await world.tend()
    assert world.upkeep.facts()["merges"] == 0
    await shard.evolve(SchemaChanges(add=(Column("tags", "array<string>", "{}"),)))
    await world.tend()
    await shard.frontiers()
    (after,) = shard.state.batches
    assert (after.schema_version, world.upkeep.facts()["merges"]) == ((2, 1) if needed else (1, 0))
    assert (after.lower, after.upper) == (before.lower, before.upper)
    await world.tend()
    assert world.upkeep.facts()["merges"] == int(needed), "one merge is enough"


async def test_f331_a_damaged_part_stops_the_merges_of_its_table_only_and_its_mark_names_the_object() -> None:
    world = World(Retention(history_s=1, collect_after_s=1))
    good, bad = await world.open("good"), await world.open("bad")
    world.clock.advance(1000)
    await world.write(bad, KEYS)
    (part,) = bad.state.batches[-1].parts
    data = bytearray(await world.objects.get(part.object_key))
    data[len(data) // 3] ^= 1
    await world.objects.delete(part.object_key)
    await world.objects.put(part.object_key, bytes(data))
    for _ in range(20):
        world.clock.advance(10_000)
        await world.write(good, KEYS)
        await world.write(bad, range(200, 300))
        await world.tend()
    failure = world.tracker.failure("keeper:shards:bad")
    assert failure is not None and part.object_key in failure.error and "damaged" in failure.error
    with pytest.raises(CorruptError, match=part.object_key):
        await bad.snapshot(bad.state.upper - 1)
    await good.frontiers()
    assert len(good.state.batches) < 10 and world.tracker.failure("keeper:shards:good") is None


# orphans ------------------------------------------------------------------------------------------------


async def test_orphans_go_by_age_and_a_writer_that_was_paused_meanwhile_writes_its_part_again() -> None:
    world = World(Retention(orphans_after_s=3600))
    shard = await world.open()
    world.clock.advance(1000)
    await world.write(shard, KEYS)
    paused = await world.open()
    part = await paused.write_part(world.change(range(100, 200), world.clock.now_ms() + 1))
    assert part.object_key
    await world.orphans.run(StepBudget(world.clock, 1))
    assert part.object_key in world.stored()
    world.clock.advance(3_700_000)
    young = await shard.write_part(world.change(range(200, 300), world.clock.now_ms()))
    await world.orphans.run(StepBudget(world.clock, 1))
    assert part.object_key not in world.stored() and young.object_key in world.stored()
    _, upper = await paused.frontiers()
    with pytest.raises(UnavailableError, match="too old"):
        await paused.compare_and_append(upper, upper + 10, [part], "")
    assert (await shard.snapshot(upper - 1)).num_rows == len(KEYS)
    await shard.compare_and_append(upper, world.clock.now_ms() + 1, [young], "")


async def test_what_was_staged_for_a_write_that_came_to_nothing_goes_by_age_and_not_before() -> None:
    world = World(Retention(orphans_after_s=3600))
    world.clock.advance(1000)
    staged = staged_key("job", world.clock.now_ms(), "1")
    await world.objects.put(staged, b"x")
    for _ in range(5):  # a job may take long, and its shard may not exist yet
        world.clock.advance(600_000)
        await world.orphans.run(StepBudget(world.clock, 1))
        assert staged in world.stored()
    world.clock.advance(700_000)
    await world.orphans.run(StepBudget(world.clock, 1))
    assert staged not in world.stored()


async def test_an_object_without_a_time_in_its_key_is_kept_however_old_it_is_and_counted() -> None:
    world = World(Retention(orphans_after_s=3600))
    shard = await world.open()
    old = f"shards/{shard.shard_id}/0000-of-a-writer-of-an-older-version"
    await world.objects.put(old, b"x")
    for _ in range(3):
        world.clock.advance(30 * 86_400_000)
        await world.orphans.run(StepBudget(world.clock, 1))
    assert old in world.stored()
    assert world.orphans.facts()["kept_unstamped"] == 1
    world.rows.versions.clear()
    await drop_shard(world.consensus(), world.objects, _NoPipelines(world), world.clock, world.rand, "t")  # type: ignore[arg-type]
    for _ in range(2):
        await world.orphans.run(StepBudget(world.clock, 1))
        world.clock.advance(200_000)
    assert not world.stored(), "it goes with its shard"
    assert world.orphans.facts()["kept_unstamped"] == 0


@pytest.mark.parametrize("jump_ms", [86_400_000, -86_400_000])
async def test_a_wall_clock_that_is_set_neither_shortens_nor_lengthens_the_wait_for_a_dropped_shard(
    jump_ms: int,
) -> None:
    world = World()
    shard = await world.open()
    world.clock.advance(1000)
    await world.write(shard, KEYS)
    await drop_shard(world.consensus(), world.objects, _NoPipelines(world), world.clock, world.rand, "t")  # type: ignore[arg-type]
    await world.orphans.run(StepBudget(world.clock, 1))
    world.clock.jump(jump_ms)
    world.clock.advance(100_000)
    await world.orphans.run(StepBudget(world.clock, 1))
    assert world.stored()
    world.clock.advance(21_000)
    await world.orphans.run(StepBudget(world.clock, 1))
    assert not world.stored()


async def test_m4405_objects_of_a_dropped_shard_go_when_no_row_mentions_it() -> None:
    world = World()
    shard, other = await world.open(), await world.open("other")
    for each in (shard, other):
        world.clock.advance(1000)
        world.live.clear()
        await world.write(each, KEYS)
    await world.tend()
    world.rows.versions["t"] = (shard.shard_id, 5)
    await drop_shard(world.consensus(), world.objects, _NoPipelines(world), world.clock, world.rand, "t")  # type: ignore[arg-type]
    for _ in range(3):
        await world.orphans.run(StepBudget(world.clock, 1))
        world.clock.advance(200_000)
    assert world.stored(f"shards/{shard.shard_id}/"), "a row of the checkpoint still speaks of it"
    del world.rows.versions["t"]
    await world.orphans.run(StepBudget(world.clock, 1))
    assert world.stored(f"shards/{shard.shard_id}/"), "not before the collection's delay"
    world.clock.advance(200_000)
    await world.orphans.run(StepBudget(world.clock, 1))
    assert not world.stored(f"shards/{shard.shard_id}/")
    assert world.stored(f"shards/{other.shard_id}/")
    with pytest.raises(MissingError):
        await shard.frontiers()


class _NoPipelines:
    def __init__(self, world: World) -> None:
        self._world = world

    async def rows(self, family: object) -> list[object]:
        return []


async def test_an_object_that_is_lost_is_no_forgotten_history() -> None:
    world = World()
    shard = await world.open()
    world.clock.advance(1000)
    await world.write(shard, KEYS)
    await world.objects.delete(next(iter(world.stored())))
    with pytest.raises(CorruptError, match="is missing"):
        await shard.snapshot(shard.state.upper - 1)


async def restored_elsewhere(world: World, shard: LogShard) -> tuple[World, LogShard]:
    """The shard as its checkpoint has it, in empty consensus over the same bucket."""
    restored = assemble_state(decode_header(encode_header(shard.state)), shard.state.batches)
    fresh = World()
    fresh.clock.advance(world.clock.now_ms() - fresh.clock.now_ms())
    fresh.objects._objects, fresh.objects._keys = world.objects._objects, world.objects._keys
    await restore_shard(fresh.consensus(), fresh.rand, restored, "attempt")
    return fresh, await fresh.open()


async def test_a_checkpoint_row_does_not_grow_with_what_waits_for_deletion() -> None:
    """A row that did not fit would block the checkpoint, and the blocked checkpoint would block the deletion
    permanently.
    """
    world = World()
    shard = await world.open()
    await world.tend()
    for _ in range(60):
        world.clock.advance(5_000)
        await world.write(shard, KEYS)
        await world.tend(persisted=False)
    await shard.frontiers()
    waiting = [key for garbage in shard.state.garbage for key in garbage.objects]
    assert len(waiting) > 60
    assert len(encode_header(shard.state)) < 1000
    # A restored shard has another id: the objects of the old one belong to no shard and are deleted as orphans.
    fresh, again = await restored_elsewhere(world, shard)
    assert again.state.garbage == () and again.shard_id != shard.shard_id
    for _ in range(2):
        await fresh.orphans.run(StepBudget(fresh.clock, 1))
        fresh.clock.advance(200_000)
    assert not set(waiting) & fresh.stored().keys()
    assert contents(await again.snapshot(again.state.upper - 1)) == world.at(again.state.upper - 1)


async def test_a_restored_shard_is_tended_though_its_keeper_s_lease_begins_at_the_first_term_again() -> None:
    world = World()
    shard = await world.open()
    for term in (1, 57):
        for _ in range(20):
            world.clock.advance(10_000)
            await world.write(shard, KEYS)
            await world.upkeep.run(StepBudget(world.clock, term))
    await shard.frontiers()
    assert {hold.epoch for hold in shard.state.holds} == {57}
    fresh, again = await restored_elsewhere(world, shard)
    for _ in range(20):
        fresh.clock.advance(10_000)
        await fresh.write(again, KEYS)
        await fresh.upkeep.run(StepBudget(fresh.clock, 1))
    await again.frontiers()
    assert again.state.since > shard.state.since + 100_000
    assert fresh.upkeep.facts()["failing"] == 0


async def test_registers_of_streaming_queries_go_with_their_table_and_a_restore_marks_its_tables() -> None:
    world = World()
    shard, consensus = await world.open(), world.consensus()
    await world.write(shard, KEYS)
    kept, gone = stream_register(shard.shard_id, "query"), stream_register("dropped", "query")
    for key in (kept, gone):
        await consensus.cas(key, 0, b"", "n")
    await world.orphans.run(StepBudget(world.clock, 1))
    assert [key for key, _ in await consensus.scan(STREAM_REGISTERS)] == [kept]
    assert world.orphans.facts()["stream_queries"] == 1 and not await is_restored(consensus, shard.shard_id)
    fresh, again = await restored_elsewhere(world, shard)
    assert await is_restored(fresh.consensus(), again.shard_id)
    assert await count_queries(fresh.consensus(), again.shard_id) == 0
