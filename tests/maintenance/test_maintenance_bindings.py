"""Truncation of bindings: the logs stay short, and no binding that a reader needs is removed."""

from __future__ import annotations

from support.maintenance.world import KEYS, World
from tidemill.base.status.status import StageState, StageStatus, derive_status
from tidemill.maintenance.scheduler import Retention, StepBudget
from tidemill.maintenance.shards.bindings import BindingsUpkeep
from tidemill.metastore.catalogue import TopicRow
from tidemill.metastore.rows.catalogue import PipelineRow
from tidemill.shards.api import Binding
from tidemill.shards.bindings.minter import BindingMinter
from tidemill.shards.bindings.remap import WHOLE_RECORD_INTERVAL, LogRemap
from tidemill.shards.registry import open_remap

SOURCE = "topic/clicks"


async def mint_for(world: World, remap: LogRemap, seconds: int) -> None:
    """Mint a binding every half second, for one table that advances."""
    for _ in range(seconds * 2):
        world.clock.advance(500)
        latest = await remap.latest()
        offset = latest.offsets["t"][0] + 1 if latest is not None else 0
        await remap.mint(Binding(world.clock.now_ms(), {"t": (offset,)}))


async def source_of_pipeline(world: World, *tables: str) -> tuple[BindingsUpkeep, LogRemap]:
    """Create a topic with bindings, and a pipeline that feeds these tables from it."""
    world.rows.listed["topic"] = [TopicRow("clicks", "t", 1)]
    if tables:
        world.rows.listed["pipeline"] = [PipelineRow("p", dict.fromkeys(tables, "topic:clicks"))]
    remap = await open_remap(world.consensus(), world.clock, world.rand, SOURCE)
    return BindingsUpkeep(world.context, world.tracker), remap


async def look(world: World, upkeep: BindingsUpkeep) -> None:
    for tended in upkeep._tended.values():
        tended.next_s = 0.0
    await upkeep.run(StepBudget(world.clock, 1))


async def test_an_hour_of_bindings_is_as_long_as_the_history_and_no_longer() -> None:
    world = World()
    upkeep, remap = await source_of_pipeline(world)
    most = 0
    for _ in range(60):
        await mint_for(world, remap, 60)
        await look(world, upkeep)
        head = await world.consensus().log_head(f"remap/{SOURCE}")
        most = max(most, head.next - head.start)
    assert most <= 2 * 60 + 64 + 1, "the history, and the whole record that it rests on"


async def test_bindings_of_an_hour_after_a_clock_was_ahead_are_as_long_as_the_history_and_the_visits() -> None:
    world = World()
    upkeep, remap = await source_of_pipeline(world)
    await mint_for(world, remap, 60)
    world.clock.jump(86_400_000)
    await mint_for(world, remap, 1)
    world.clock.jump(-86_400_000)
    minter = BindingMinter(remap, world.clock, interval_ms=0)
    await minter.open()
    most = 0
    for number in range(7200):
        world.clock.advance(500)
        await minter.mint_missing({"t": (1000 + number,)}, 0)
        if number % 120 == 119:
            await look(world, upkeep)
            head = await world.consensus().log_head(f"remap/{SOURCE}")
            most = max(most, head.next - head.start)
    assert minter.latest is not None and minter.latest.time_ms > world.clock.now_ms() + 80_000_000
    assert most <= 2 * 120 + 64 + 1, "the history, what is minted between two visits, and the whole record below it"


async def test_a_table_that_was_made_and_has_not_begun_keeps_the_bindings_that_its_first_step_ends_at() -> None:
    world = World()
    upkeep, remap = await source_of_pipeline(world, "new")
    await world.open("new")
    for _ in range(30):
        await mint_for(world, remap, 60)
        await look(world, upkeep)
    fresh = await open_remap(world.consensus(), world.clock, world.rand, SOURCE)
    assert len(await fresh.after(0)) == 30 * 120


async def test_a_pipeline_that_stands_keeps_its_bindings_and_so_does_what_a_restore_would_bring_back() -> None:
    world = World()
    upkeep, remap = await source_of_pipeline(world, "t", "new")
    shard = await world.open("t")
    await mint_for(world, remap, 90)
    await world.write(shard, KEYS)
    for _ in range(30):  # the pipeline is stalled
        await mint_for(world, remap, 60)
        await world.tend()
        await look(world, upkeep)
    await shard.frontiers()
    stood = shard.state.since
    assert stood == shard.state.upper - 1
    assert upkeep.facts()["held_by"] == {SOURCE: "t"}
    fresh = await open_remap(world.consensus(), world.clock, world.rand, SOURCE)
    assert len(await fresh.after(stood)) == 30 * 120
    await world.write(shard, KEYS)  # it catches up
    world.clock.advance(120_000)
    await world.tend(persisted=False)
    await shard.frontiers()
    assert shard.state.since > world.rows.since["t"] == stood
    await look(world, upkeep)
    assert len(await fresh.after(stood)) == 30 * 120
    await world.tend()
    await look(world, upkeep)
    head = await world.consensus().log_head(f"remap/{SOURCE}")
    assert head.next - head.start <= 65
    assert await fresh.at(shard.state.since) == await remap.latest()


async def test_f726_who_keeps_bindings_for_long_is_told_with_how_many_and_how_they_are_let_go() -> None:
    world = World()
    upkeep, remap = await source_of_pipeline(world, "t", "new")
    shard = await world.open("t")
    await mint_for(world, remap, 90)
    await world.write(shard, KEYS)
    stood_ms = world.clock.now_ms()

    async def reported(minutes: int) -> StageStatus | None:
        for _ in range(minutes):
            await mint_for(world, remap, 60)
            await world.tend()
            await look(world, upkeep)
        return world.tracker.mark(f"keeper:bindings:{SOURCE}")

    assert await reported(50) is None, "as long as the process is shown as blind"
    mark = await reported(20)
    assert mark is not None and (mark.position, mark.held_by) == (stood_ms, "pipeline:p")
    assert "8,4" in mark.reason and "tidemill pipeline delete p" in mark.reason, mark.reason
    later_ms = world.clock.now_ms() + 10_000
    assert derive_status(mark, "node:n", later_ms, later_ms).state is StageState.STUCK

    # the pipeline continues, and a reader keeps its hold at the old time
    hold = await world.open("t")
    await hold.set_hold("export", stood_ms, 86_400_000)
    await world.write(shard, KEYS)
    mark = await reported(1)
    assert mark is not None and mark.held_by == "shard:t" and "table describe t" in mark.reason

    world.rows.listed["pipeline"] = []
    assert await reported(1) is None
    head = await world.consensus().log_head(f"remap/{SOURCE}")
    assert head.next - head.start <= 3 * 60 + 65


def reported_now(world: World) -> StageStatus | None:
    return world.tracker.mark(f"keeper:bindings:{SOURCE}")


async def mint_one(world: World, remap: LogRemap, after_s: int) -> None:
    """Mint one more binding, `after_s` seconds after the last one."""
    world.clock.advance(after_s * 1000)
    latest = await remap.latest()
    offset = latest.offsets["t"][0] + 1 if latest is not None else 0
    await remap.mint(Binding(world.clock.now_ms(), {"t": (offset,)}))


async def test_a_pipeline_that_works_is_not_told_however_long_the_history_is() -> None:
    world = World(Retention(history_s=8 * 3600.0))
    upkeep, remap = await source_of_pipeline(world, "t")
    shard = await world.open("t")
    for _ in range(24 * 12):
        await mint_one(world, remap, 300)
        await world.write(shard, [1, 2])
        await world.tend()
        await look(world, upkeep)
        assert reported_now(world) is None
    assert remap.length > 8 * 12, "the history is kept"


async def test_a_source_that_was_idle_and_then_is_not_is_kept_by_nobody() -> None:
    world = World()
    upkeep, remap = await source_of_pipeline(world, "t")
    shard = await world.open("t")
    await mint_for(world, remap, 90)
    await world.write(shard, KEYS)
    for _ in range(3):
        world.clock.advance(3_600_000)
        await world.tend()
        await look(world, upkeep)
    await mint_for(world, remap, 60)
    for _ in range(2):  # no maintenance of the shard since, and no newer manifest
        await look(world, upkeep)
        assert upkeep.facts()["held_by"] == {SOURCE: "t"}
        assert reported_now(world) is None


async def test_who_has_not_begun_and_what_no_manifest_was_seen_of_is_not_told() -> None:
    world = World()
    upkeep, remap = await source_of_pipeline(world, "t")
    for _ in range(100):
        await mint_one(world, remap, 600)
    shard = await world.open("t")
    await look(world, upkeep)
    assert upkeep.facts()["held_by"] == {SOURCE: "t"}
    assert reported_now(world) is None
    await world.write(shard, KEYS)
    await world.tend(persisted=False)
    await look(world, upkeep)
    assert upkeep.facts()["held_by"] == {SOURCE: "t"}
    assert reported_now(world) is None


async def test_a_pipeline_that_catches_up_is_not_stuck() -> None:
    world = World()
    upkeep, remap = await source_of_pipeline(world, "t")
    shard = await world.open("t")
    await mint_for(world, remap, 90)
    await world.write(shard, KEYS)
    await world.tend()
    await world.tend()

    async def state() -> StageState:
        await mint_for(world, remap, 100)
        await look(world, upkeep)
        mark, now_ms = reported_now(world), world.clock.now_ms()
        assert mark is not None and mark.held_by == "pipeline:p"
        return derive_status(mark, "node:n", now_ms, now_ms).state

    for _ in range(80):
        await mint_one(world, remap, 60)
    seen = [await state() for _ in range(5)]
    assert (seen[0], seen[-1]) == (StageState.MOVING, StageState.STUCK)
    for _ in range(5):
        time = shard.state.upper + 30_000
        part = await shard.write_part(world.change([1], time))
        await shard.compare_and_append(shard.state.upper, time + 1, [part], "")
        assert await state() is StageState.MOVING


async def test_an_idle_source_is_asked_ever_more_seldom() -> None:
    world = World()
    upkeep, remap = await source_of_pipeline(world)
    await mint_for(world, remap, 5)
    await upkeep.run(StepBudget(world.clock, 1))
    assert upkeep._tended == {}, "it has nothing to forget, and is not looked at before it changes"
    await mint_for(world, remap, 2 * WHOLE_RECORD_INTERVAL)
    looks = 0
    for _ in range(360):
        world.clock.advance(10_000)
        before = upkeep._tended[SOURCE].next_s if SOURCE in upkeep._tended else None
        await upkeep.run(StepBudget(world.clock, 1))
        looks += SOURCE in upkeep._tended and upkeep._tended[SOURCE].next_s != before
    assert 2 <= looks <= 12, "an hour"
