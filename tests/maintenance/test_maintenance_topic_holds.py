"""Retention of topic records for pipelines that have not read them yet."""

from __future__ import annotations

from typing import Any

from support.maintenance.world import World
from tidemill.maintenance.checkpoint.restore_horizon import RestoreHorizon
from tidemill.maintenance.topics.pipeline_holds import PipelineHolds
from tidemill.metastore.catalogue import CaptureTableRow, PipelineRow, TopicRow
from tidemill.shards.api import Binding
from tidemill.shards.registry import open_remap

TOPIC = TopicRow("clicks", "id-1", 2)


class Pipelines:
    def __init__(self, *rows: PipelineRow) -> None:
        self.rows = rows

    async def list(self, kind: type) -> list[PipelineRow]:
        return list(self.rows)

    async def all_tables(self) -> list[CaptureTableRow]:
        return [CaptureTableRow("shop", "public.t", "shop.public.t"), CaptureTableRow("shop", "public.u", "other")]


def holds(world: World, *rows: PipelineRow) -> PipelineHolds:
    catalogue: Any = Pipelines(*rows)
    return PipelineHolds(world.consensus(), catalogue, RestoreHorizon(world.context.metastore), world.clock, world.rand)


async def test_the_table_that_is_furthest_behind_holds_the_topic() -> None:
    world = World()
    pipelines = (
        PipelineRow("p", {"fast": "topic:clicks", "other": "topic:else", "joined": "derived"}),
        PipelineRow("q", {"slow": "topic:clicks"}),
    )
    hold = holds(world, *pipelines)
    assert await hold(TOPIC) is None  # no table yet
    fast, slow = await world.open("fast"), await world.open("slow")
    assert await hold(TOPIC) is None  # tables without any time
    world.rows.versions |= {"fast": (fast.shard_id, 1), "slow": (slow.shard_id, 1)}
    remap = await open_remap(world.consensus(), world.clock, world.rand, "topic/clicks")
    for time_ms, offsets in ((100, (1, 2)), (200, (5, 2)), (300, (9, 9))):
        await remap.mint(Binding(time_ms, {"id-1": offsets}, source_time_ms=time_ms))
    await fast.compare_and_append(fast.state.upper, 301, [], "")
    assert await hold(TOPIC) is None
    await slow.compare_and_append(slow.state.upper, 200, [], "")
    assert await hold(TOPIC) == {0: 1, 1: 2}
    await slow.compare_and_append(slow.state.upper, 250, [], "")
    assert await hold(TOPIC) == {0: 5, 1: 2}
    # A restore from the newest manifest would read on from there.
    world.rows.uppers["slow"] = 101
    assert await holds(world, *pipelines)(TOPIC) == {0: 1, 1: 2}
    world.rows.uppers["slow"] = 0
    assert await holds(world, *pipelines)(TOPIC) is None
    world.rows.uppers.clear()
    # A topic re-created under the name: nothing of it has been read.
    assert await hold(TopicRow("clicks", "id-2", 1)) == {0: 0}


async def test_a_topic_that_no_pipeline_reads_is_held_by_nobody() -> None:
    world = World()
    assert await holds(world, PipelineRow("p", {"t": "topic:else"}))(TOPIC) == {}


async def test_t8_a_captured_tables_topic_is_held_by_its_captures_oldest_binding_and_by_the_pipelines_behind_it() -> (
    None
):
    """A future pipeline begins with that binding and finds the contents of the tables at every time since."""
    world = World()
    topic = TopicRow("shop.public.t", "id-1", 2, "capture")
    hold = holds(world, PipelineRow("p", {"other": "capture:shop:public.u"}))
    assert await hold(topic) is None  # nothing is bound
    remap = await open_remap(world.consensus(), world.clock, world.rand, "capture/shop")
    await remap.mint(Binding(100, {"id-1": (4,)}, lsn=1))
    await remap.mint(Binding(200, {"id-1": (9, 9)}, lsn=2))
    assert await hold(topic) == {0: 4, 1: 0}
    for n in range(100):
        await remap.mint(Binding(300 + n, {"id-1": (10 + n, 20)}, lsn=3 + n))
    assert await remap.truncate_before(390) and await remap.oldest_ms() == 362
    assert await hold(topic) == {0: 72, 1: 20}
    slow = await world.open("slow")
    behind = holds(world, PipelineRow("q", {"slow": "capture:shop:public.t"}))
    assert await behind(topic) is None  # the table has read nothing
    world.rows.versions |= {"slow": (slow.shard_id, 1)}
    await slow.compare_and_append(slow.state.upper, 366, [], "")
    assert await behind(topic) == {0: 72, 1: 20}
    assert await hold(TopicRow("gone", "id-2", 1, "capture")) is None
