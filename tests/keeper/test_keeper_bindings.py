"""The logs of bindings stay flat, and behind nobody's back."""

from __future__ import annotations

from keeper_world import KEYS, World, run

from tidemill.base.marks import Mark, State, derive
from tidemill.keeper.bindings_upkeep import BindingsUpkeep
from tidemill.keeper.jobs import Budget
from tidemill.metastore.catalogue import TopicRow
from tidemill.metastore.rows.pipelines import PipelineRow
from tidemill.shards.front import Binding
from tidemill.shards.open import open_remap
from tidemill.shards.remap import LogRemap

SOURCE = "topic/clicks"


async def mint_for(world: World, remap: LogRemap, seconds: int) -> None:
    """A binding every half second, of one table that moves."""
    for _ in range(seconds * 2):
        world.clock.advance(500)
        latest = await remap.latest()
        offset = latest.offsets["t"][0] + 1 if latest is not None else 0
        await remap.mint(Binding(world.clock.now_ms(), {"t": (offset,)}))


async def look(world: World, upkeep: BindingsUpkeep) -> None:
    for tended in upkeep._tended.values():
        tended.next_s = 0.0
    await upkeep.run(Budget(world.clock, 1))


def test_an_hour_of_bindings_is_as_long_as_the_history_and_no_longer() -> None:
    async def scenario() -> None:
        world = World()
        world.rows.listed["topic"] = [TopicRow("clicks", "t", 1)]
        remap = await open_remap(world.consensus(), world.clock, world.rand, SOURCE)
        upkeep = BindingsUpkeep(world.grounds, world.tracker)
        most = 0
        for _ in range(60):
            await mint_for(world, remap, 60)
            await look(world, upkeep)
            head = await world.consensus().log_head(f"remap/{SOURCE}")
            most = max(most, head.next - head.start)
        assert most <= 2 * 60 + 64 + 1, "the history, and the whole record that it rests on"

    run(scenario())


def test_a_table_that_was_made_and_has_not_begun_keeps_the_bindings_that_its_first_step_ends_at() -> None:
    async def scenario() -> None:
        world = World()
        world.rows.listed["topic"] = [TopicRow("clicks", "t", 1)]
        world.rows.listed["pipeline"] = [PipelineRow("p", {"new": "topic:clicks"})]
        upkeep = BindingsUpkeep(world.grounds, world.tracker)
        remap = await open_remap(world.consensus(), world.clock, world.rand, SOURCE)
        await world.open("new")
        for _ in range(30):
            await mint_for(world, remap, 60)
            await look(world, upkeep)
        fresh = await open_remap(world.consensus(), world.clock, world.rand, SOURCE)
        assert len(await fresh.after(0)) == 30 * 120

    run(scenario())


def test_a_pipeline_that_stands_keeps_its_bindings_and_so_does_what_a_restore_would_bring_back() -> None:
    async def scenario() -> None:
        world = World()
        world.rows.listed["topic"] = [TopicRow("clicks", "t", 1)]
        world.rows.listed["pipeline"] = [PipelineRow("p", {"t": "topic:clicks", "new": "topic:clicks"})]
        upkeep = BindingsUpkeep(world.grounds, world.tracker)
        remap = await open_remap(world.consensus(), world.clock, world.rand, SOURCE)
        shard = await world.open("t")
        await mint_for(world, remap, 90)
        await world.write(shard, KEYS)
        for _ in range(30):  # the pipeline stands
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

    run(scenario())


def test_f726_who_keeps_bindings_for_long_is_told_with_how_many_and_how_they_are_let_go() -> None:
    async def scenario() -> None:
        world = World()
        world.rows.listed["topic"] = [TopicRow("clicks", "t", 1)]
        world.rows.listed["pipeline"] = [PipelineRow("p", {"t": "topic:clicks", "new": "topic:clicks"})]
        upkeep = BindingsUpkeep(world.grounds, world.tracker)
        remap = await open_remap(world.consensus(), world.clock, world.rand, SOURCE)
        shard = await world.open("t")
        await mint_for(world, remap, 90)
        await world.write(shard, KEYS)
        stood_ms = world.clock.now_ms()

        async def told(minutes: int) -> Mark | None:
            for _ in range(minutes):
                await mint_for(world, remap, 60)
                await world.tend()
                await look(world, upkeep)
            return world.tracker.mark(f"keeper:bindings:{SOURCE}")

        assert await told(50) is None, "as long as the process is shown as blind"
        mark = await told(20)
        assert mark is not None and (mark.position, mark.held_by) == (stood_ms, "pipeline:p")
        assert "8,4" in mark.reason and "tidemill pipeline delete p" in mark.reason, mark.reason
        later_ms = world.clock.now_ms() + 10_000
        assert derive(mark, "node:n", later_ms, later_ms).state is State.STUCK

        hold = await world.open("t")  # the pipeline goes on, and a reader stays where it was
        await hold.hold("export", stood_ms, 86_400_000)
        await world.write(shard, KEYS)
        mark = await told(1)
        assert mark is not None and mark.held_by == "shard:t" and "shard describe t" in mark.reason

        world.rows.listed["pipeline"] = []
        assert await told(1) is None
        head = await world.consensus().log_head(f"remap/{SOURCE}")
        assert head.next - head.start <= 3 * 60 + 65

    run(scenario())


def test_an_idle_source_is_asked_ever_more_seldom() -> None:
    async def scenario() -> None:
        world = World()
        world.rows.listed["topic"] = [TopicRow("clicks", "t", 1)]
        remap = await open_remap(world.consensus(), world.clock, world.rand, SOURCE)
        await mint_for(world, remap, 5)
        upkeep = BindingsUpkeep(world.grounds, world.tracker)
        looks = 0
        for _ in range(360):
            world.clock.advance(10_000)
            before = upkeep._tended[SOURCE].next_s if SOURCE in upkeep._tended else -1.0
            await upkeep.run(Budget(world.clock, 1))
            looks += upkeep._tended[SOURCE].next_s != before
        assert looks <= 12, "an hour"

    run(scenario())
