"""A capture after a restore: it resumes if its slot is not ahead, and starts over if it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import copy, deepcopy
from typing import Any

import pytest
from msgspec.structs import replace

from support.capture.world import World
from support.waiting import until
from tidemill.base.lsn import Lsn
from tidemill.consensus.memory import MemoryConsensus, MemoryState
from tidemill.metastore.catalogue import CaptureTableRow, Catalogue
from tidemill.metastore.factory import create_metastore

pytestmark = pytest.mark.postgres


@asynccontextmanager
async def world_with_table(dsn: str) -> AsyncIterator[World]:
    async with World(dsn) as world:
        await world.sql("CREATE TABLE a (id int PRIMARY KEY, v int)")
        yield world


def saved(world: World) -> MemoryState:
    """Return the state that a checkpoint at this moment would restore."""
    state = copy(world.consensus.state)
    state.waiters = {}
    return deepcopy(state)


async def restore(world: World, state: MemoryState) -> None:
    """Reset the world to an earlier consensus, with its capture marked as a restore marks it."""
    await world.topics.aclose()
    await world.metastore.aclose()
    state.leases = {name: lease for name, lease in state.leases.items() if name.startswith("metastore/")}
    world.consensus = MemoryConsensus(world.clock, state)
    for lease in await world.consensus.leases("metastore/"):
        await world.consensus.release(lease.name, lease.holder, lease.term)
    world.metastore = create_metastore(world.consensus, world.objects, world.clock, world.rand)
    world.catalogue = Catalogue(world.metastore, world.clock, world.rand)
    world.topics = world.new_topics()
    marked = replace(await world.row(), restored=True, snapshot_done=False)
    await world.catalogue.put(marked)


async def contents(world: World) -> dict[str, dict[str, Any]]:
    return {f'{{"id":{i}}}': {"id": i, "v": v} for i, v in await world.select("SELECT id, v FROM a")}


async def idle(world: World) -> None:
    """Wait until a binding covers everything up to the slot's confirmed LSN."""

    async def covered() -> bool:
        latest = await world.remap().latest()
        return latest is not None and latest.lsn >= await world.confirmed() - 1

    await until(covered, "an idle binding is minted")


async def test_a_slot_that_is_not_ahead_goes_on_without_a_new_snapshot(postgres_dsn: str) -> None:
    async with world_with_table(postgres_dsn) as world:
        await world.sql("INSERT INTO a SELECT g, g FROM generate_series(1, 50) g")
        async with world.capture():
            await world.sql("INSERT INTO a VALUES (100, 100)")
            await world.caught_up()
            await idle(world)
        await restore(world, saved(world))
        await world.sql("INSERT INTO a VALUES (101, 101)", "DELETE FROM a WHERE id = 7")
        async with world.capture():
            await world.caught_up()
            row = await world.row()
            assert (row.generation, row.restored, row.snapshot_done) == (1, False, True)
            assert await world.folded("a") == await contents(world)
            assert len(await world.records("a")) == 50 + 1 + 2


async def test_idle_wal_that_is_not_bound_is_not_confirmed_so_that_a_restore_goes_on(postgres_dsn: str) -> None:
    """WAL without a captured change is bound at intervals, and confirmed only then. However the capture ends, a restore
    does not find the slot ahead of the bindings, and assumes no lost changes.
    """
    async with world_with_table(postgres_dsn) as world:
        await world.sql("CREATE TABLE other (id int)", "INSERT INTO a SELECT g, g FROM generate_series(1, 50) g")
        async with world.capture(tables=("a",), idle_binding_ms=600_000) as capture:
            await world.caught_up()
            await world.sql("INSERT INTO other SELECT g FROM generate_series(1, 100) g")
            end = await world.wal_end()
            await until(lambda: Lsn.parse(str(capture.facts()["received_lsn"])).value >= end, "idle WAL is received")
            confirmed, latest = await world.confirmed(), await world.remap().latest()
            assert latest is not None and confirmed <= latest.lsn + 1
            state = saved(world)
        await restore(world, state)
        async with world.capture(tables=("a",)):
            await world.caught_up()
            assert (await world.row()).generation == 1
            assert await world.folded("a") == await contents(world)


async def test_a_slot_ahead_of_what_was_restored_starts_over(postgres_dsn: str) -> None:
    async with world_with_table(postgres_dsn) as world:
        await world.sql("INSERT INTO a SELECT g, g FROM generate_series(1, 50) g")
        async with world.capture():
            await world.sql("INSERT INTO a VALUES (100, 100)")
            await world.caught_up()
            state = saved(world)
            old_topic = await world.topic_id("a")
            await world.sql("INSERT INTO a VALUES (200, 200)", "DELETE FROM a WHERE id = 7", "UPDATE a SET v = 0")
            binding = await world.caught_up()
            await until(lambda: _confirmed(world, binding.lsn), "the slot is confirmed beyond what was saved")
        await restore(world, state)
        bound = await world.remap().latest()
        assert bound is not None
        async with world.capture():
            after = await world.caught_up()
            row = await world.row()
            assert (row.generation, row.restored, row.snapshot_done) == (2, False, True)
            assert await world.topic_id("a") != old_topic
            assert await world.folded("a") == await contents(world)
            assert after.lsn > bound.lsn and after.time_ms > bound.time_ms


async def _confirmed(world: World, lsn: int) -> bool:
    return await world.confirmed() > lsn


async def test_a_capture_whose_slot_is_gone_after_a_restore_starts_over(postgres_dsn: str) -> None:
    async with world_with_table(postgres_dsn) as world:
        await world.sql("INSERT INTO a VALUES (1, 1)")
        async with world.capture():
            await world.caught_up()
        state = saved(world)
        await until(world.slot_dropped, "the slot is dropped")
        await restore(world, state)
        async with world.capture():
            await world.caught_up()
            assert (await world.row()).generation == 2
            assert await world.folded("a") == await contents(world)


async def test_a_table_whose_snapshot_did_not_come_back_whole_is_copied_again_alone(postgres_dsn: str) -> None:
    async with world_with_table(postgres_dsn) as world:
        await world.sql("CREATE TABLE b (id int PRIMARY KEY, v int)", "INSERT INTO a VALUES (1, 1)")
        await world.sql("INSERT INTO b VALUES (1, 1)")
        async with world.capture():
            await world.caught_up()
            await idle(world)
        b = await world.topic_id("b")
        a = await world.topic_id("a")
        await restore(world, saved(world))

        def short(row: CaptureTableRow | None) -> CaptureTableRow:
            assert row is not None
            return replace(row, snapshot=None)

        await world.catalogue.change_table(world.name, "public.a", short)

        async def copied_again() -> bool:
            return await world.topic_id("a") != a

        async with world.capture():
            await until(copied_again, "the short table gets another topic")
            await world.flowing("a")
            await world.caught_up()
            assert await world.topic_id("b") == b
            assert await world.folded("a") == await contents(world)


async def test_a_restore_that_dies_between_comparing_and_copying_starts_over_all_the_same(postgres_dsn: str) -> None:
    async with world_with_table(postgres_dsn) as world:
        await world.sql("INSERT INTO a SELECT g, g FROM generate_series(1, 20000) g")
        async with world.capture():
            await world.caught_up()
        state = saved(world)
        await until(world.slot_dropped, "the slot is dropped")
        await restore(world, state)
        capture = world.new_capture()
        task = asyncio.ensure_future(capture.run())
        await until(lambda: int(capture.facts().get("snapshot_rows", 0)) > 0, "rows are copied")  # type: ignore[call-overload]
        await capture.aclose()
        await asyncio.gather(task, return_exceptions=True)
        async with world.capture():
            await world.caught_up()
            assert await world.folded("a") == await contents(world)
