"""Merges of L1 extents: many small extents become few, readers see no difference, and the replaced objects are
collected.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.maintenance.l1_world import L1World
from tidemill.base.errors import UnknownOutcomeError
from tidemill.maintenance.scheduler import StepBudget
from tidemill.metastore.rows import L1_EXTENTS, L1_OBJECTS


async def test_small_extents_become_one_and_their_objects_go() -> None:
    async with L1World() as world:
        await world.fill(9)
        before = await world.everything()
        assert len(await world.metastore.rows(L1_EXTENTS)) == 18
        while await world.levels.run(StepBudget(world.clock, 1)):
            pass
        extents = await world.metastore.rows(L1_EXTENTS)
        assert [(e.partition, e.base_offset, e.last_offset) for e in extents] == [(0, 0, 17), (1, 0, 17)]
        assert await world.everything() == before
        assert await world.problems() == []
        await world.collect()
        objects = await world.metastore.rows(L1_OBJECTS)
        assert len(objects) == 1 and await world.stored() == [objects[0].object_id]
        assert await world.everything() == before
        facts = world.levels.facts()
        assert (facts["objects"], facts["merged_extents"], facts["left_out"]) == (1, 18, 0)


async def test_nothing_is_rewritten_that_did_not_grow() -> None:
    async with L1World() as world:
        await world.fill(7)
        for _ in range(3):
            assert not await world.levels.run(StepBudget(world.clock, 1))
        assert world.levels.facts()["objects"] == 0
        await world.fill(1)
        assert await world.levels.run(StepBudget(world.clock, 1))
        assert not await world.levels.run(StepBudget(world.clock, 1))
        assert world.levels.facts()["objects"] == 1


async def test_a_partition_that_lost_its_start_meanwhile_is_left_out() -> None:
    async with L1World() as world:
        await world.fill(8)
        real = world.levels._rows.register

        async def register(topic_id: str, object_id: str) -> None:
            await world.rows.set_start(topic_id, 1, 5)
            await real(topic_id, object_id)

        world.levels._rows.register = register  # type: ignore[method-assign]
        assert not await world.levels.run(StepBudget(world.clock, 1))
        assert world.levels.facts()["left_out"] == 1
        spans = [(e.partition, e.base_offset, e.last_offset) for e in await world.metastore.rows(L1_EXTENTS)]
        assert spans == [(0, 0, 15), *[(1, at, at + 1) for at in range(4, 16, 2)]]
        [merged] = [row for row in await world.metastore.rows(L1_OBJECTS) if row.removed_bytes < row.total_bytes][-1:]
        assert merged.removed_bytes > 0


async def test_two_nodes_that_level_at_once_replace_each_extent_once() -> None:
    async with L1World() as world:
        await world.fill(8)
        before = await world.everything()
        await asyncio.gather(*(each.run(StepBudget(world.clock, 1)) for each in (world.levels, world.other_levels)))
        assert len(await world.metastore.rows(L1_EXTENTS)) == 2
        assert await world.everything() == before and await world.problems() == []
        await world.collect()
        assert len(await world.stored()) == 1


@pytest.mark.parametrize("landed", [True, False])
async def test_a_replacement_whose_answer_was_lost_takes_place_once(landed: bool) -> None:
    async with L1World() as world:
        await world.fill(8)
        before = await world.everything()
        real, lost = world.metastore.commit, 0

        async def commit(rows: Any, *, expects: Any = ()) -> int:
            nonlocal lost
            if len(rows) > 3 and not lost:
                lost += 1
                if landed:
                    await real(rows, expects=dict(expects))
                raise UnknownOutcomeError("the answer was lost.")
            return await real(rows, expects=dict(expects))

        world.metastore.commit = commit  # type: ignore[method-assign]
        await world.levels.run(StepBudget(world.clock, 1))
        assert lost == 1 and len(await world.metastore.rows(L1_EXTENTS)) == 2
        assert await world.everything() == before and await world.problems() == []
