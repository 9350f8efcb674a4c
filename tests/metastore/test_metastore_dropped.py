"""The checkpoint's rows of a dropped shard, and of a shard that was re-created under its name."""

from __future__ import annotations

import pytest

from support.metastore.checkpoint_world import SCHEMA, Restored, World, family_rows, persisted, rows_of
from tidemill.base.errors import UnavailableError
from tidemill.consensus.memory import MemoryConsensus
from tidemill.maintenance.checkpoint.stages import ShardsStage, shard_unit_name
from tidemill.maintenance.restore.restore import Restorer
from tidemill.maintenance.shards.drop import drop_shard
from tidemill.metastore.rows import SHARD_BATCHES, SHARDS
from tidemill.shards.registry import open_shard, read_shards, tombstones_name


async def drop(world: World, name: str) -> None:
    await drop_shard(world.consensus, world.objects, world.metastore, world.clock, world.rand, name)


@pytest.mark.parametrize("restarted", [False, True])
async def test_rows_of_a_dropped_shard_go_with_it_and_those_of_the_next_one_replace_them(restarted: bool) -> None:
    async with World() as world:
        checkpointer = world.checkpointer()
        for _ in range(4):
            await world.step()
        await checkpointer.round()
        await drop(world, "derived")
        if restarted:
            checkpointer = world.checkpointer("n2")
        await checkpointer.round()
        rows = rows_of(world.shared[0])
        assert [row.name for row in family_rows(SHARDS, rows)] == ["table"]
        assert {row.name for row in family_rows(SHARD_BATCHES, rows)} == {"table"}
        await drop(world, "table")
        world.table = await open_shard(world.consensus, world.objects, world.clock, world.rand, "table", SCHEMA)
        upper = (await world.remap.latest()).time_ms + 1  # type: ignore[union-attr]
        await world.follow(world.table, upper, rows=3)
        if restarted:
            checkpointer = world.checkpointer("n3")
        await checkpointer.round()
        state = Restored(rows_of(world.shared[0])).shards["table"]
        assert (state.shard_id, state.upper, len(state.batches)) == (world.table.shard_id, upper, 1)


async def test_a_restore_does_not_bring_a_dropped_shard_back() -> None:
    async with World(1, real=True) as world:
        await persisted(world)
        await drop(world, "derived")
        await world.checkpointer("n2").round()
        await world.metastore.flush(30)
        fresh = MemoryConsensus(world.clock)
        done = await Restorer(fresh, world.objects, world.clock, world.rand).run()
        assert done.findings.clean, done.findings.broken
        assert [state.name for state in await read_shards(fresh)] == ["table"]


async def test_tombstones_are_checkpointed_before_their_table_and_dropped_with_it() -> None:
    """A table whose tombstones were older than itself would take late records for new ones (RFC 0013)."""
    async with World() as world:
        names = [tombstones_name("table", world.table.shard_id), tombstones_name("table", world.rand.uuid())]
        for name in names:
            await (await open_shard(world.consensus, world.objects, world.clock, world.rand, name, SCHEMA)).aclose()
        await world.step()
        stage = ShardsStage(world.consensus, world.metastore)
        await stage.load()
        units = list(await stage.gather())
        table, tombstones = shard_unit_name("table"), shard_unit_name(names[0])
        assert units.index(tombstones) < units.index(table)
        assert stage.late_things({"topic/clicks"}) >= {table} and tombstones not in stage.late_things({"topic/clicks"})
        stage.unreadable = {tombstones: UnavailableError("unreadable")}
        assert {table, tombstones} <= stage.late_things(set())
        await drop(world, "table")
        assert [state.name for state in await read_shards(world.consensus)] == ["derived"]
