"""The checkpoint removes the rows of bindings that the log truncated, and a restore remains readable."""

from __future__ import annotations

import pytest

from support.metastore.checkpoint_world import Restored, World, family_rows, persisted, rows_of
from tidemill.consensus.memory import MemoryConsensus
from tidemill.maintenance.restore.restore import Restorer
from tidemill.metastore.rows import BINDINGS
from tidemill.shards.api import Binding
from tidemill.shards.registry import open_remap


async def mint(world: World, count: int) -> None:
    for _ in range(count):
        latest = await world.remap.latest()
        time_ms = latest.time_ms + 1 if latest is not None else 1
        await world.remap.mint(Binding(time_ms, latest.offsets if latest is not None else {}))


@pytest.mark.parametrize("restarted", [False, True])
async def test_rows_of_forgotten_bindings_are_deleted(restarted: bool) -> None:
    async with World() as world:
        checkpointer = world.checkpointer()
        await world.step()
        for _ in range(4):
            await mint(world, 100)
            await checkpointer.round()
            latest = await world.remap.latest()
            assert latest is not None
            await world.remap.truncate_before(latest.time_ms - 20)
            if restarted:
                checkpointer = world.checkpointer("another")
            await checkpointer.round()
            rows = family_rows(BINDINGS, rows_of(world.shared[0]))
            head = await world.consensus.log_head("remap/topic/clicks")
            assert [row.log_position for row in rows] == list(range(head.start, head.next))
            restored = Restored(rows_of(world.shared[0])).bindings["topic/clicks"]
            assert restored == (await world.remap.after(-1))[-len(restored) :]
            assert len(restored) <= 100


async def test_a_source_forgotten_past_its_newest_row_begins_anew_in_the_rows() -> None:
    async with World() as world:
        checkpointer = world.checkpointer()
        await world.step()
        await checkpointer.round()
        await mint(world, 300)
        latest = await world.remap.latest()
        assert latest is not None
        await world.remap.truncate_before(latest.time_ms)
        await checkpointer.round()
        rows = family_rows(BINDINGS, rows_of(world.shared[0]))
        head = await world.consensus.log_head("remap/topic/clicks")
        assert head.start > 0
        assert [row.log_position for row in rows] == list(range(head.start, head.next))


async def test_restored_bindings_go_on_where_they_were_and_are_forgotten_again() -> None:
    async with World(1, real=True) as world:
        await persisted(world)
        await mint(world, 200)
        latest = await world.remap.latest()
        assert latest is not None
        await world.checkpointer("n2").round()
        await world.remap.truncate_before(latest.time_ms - 30)
        await world.checkpointer("n2").round()
        await world.metastore.flush(30)
        fresh = MemoryConsensus(world.clock)
        done = await Restorer(fresh, world.objects, world.clock, world.rand).run()
        assert done.findings.clean, done.findings.broken
        remap = await open_remap(fresh, world.clock, world.rand, "topic/clicks")
        assert await remap.latest() == latest
        assert await remap.after(latest.time_ms - 30) == await world.remap.after(latest.time_ms - 30)
        for n in range(1, 200):
            await remap.mint(Binding(latest.time_ms + n, latest.offsets))
        assert await remap.truncate_before(latest.time_ms + 150) > 100
        again = await open_remap(fresh, world.clock, world.rand, "topic/clicks")
        assert await again.at(latest.time_ms + 150) == await remap.at(latest.time_ms + 150)
