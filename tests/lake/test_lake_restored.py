"""A cluster restored from its bucket publishes its tables again, and nothing of the earlier publications stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.lake.readers import ForeignReader
from support.lake.world import contents, rows_of
from support.metastore.checkpoint_world import World, persisted
from tidemill.consensus.memory import MemoryConsensus
from tidemill.lake.pointer import load_table
from tidemill.lake.publish import table_publisher
from tidemill.lake.publish.stored import LakeStores
from tidemill.lake.publish.table_publisher import TablePublisher, delete_unknown
from tidemill.lake.settings import PREFIX, LakeSettings
from tidemill.lake.vectors.part_columns import PartColumns
from tidemill.maintenance.restore.restore import Restorer
from tidemill.objects.factory import open_objects
from tidemill.shards.handle import LogShard
from tidemill.shards.registry import open_shard

pytestmark = [pytest.mark.lake, pytest.mark.processes]


def stores_of(world: World, consensus: Any, bucket: Path) -> LakeStores:
    return LakeStores(consensus, world.objects, world.clock, world.rand, LakeSettings(f"file://{bucket}"))


def publisher_of(stores: LakeStores, shard: LogShard) -> TablePublisher:
    return TablePublisher(stores, PartColumns(stores.objects), shard)


async def append(world: World, rows: int) -> None:
    """Append `rows` rows at the time of a new binding. Many of them are a part in an object, few are inline."""
    await world.produce()
    await world.follow(world.table, (await world.bind()).time_ms + 1, rows=rows)


async def test_the_first_publication_after_a_restore_is_exact_and_the_sweep_deletes_the_earlier_ones(
    open_reader: Callable[[str], ForeignReader], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = open_reader("duckdb")
    bucket = tmp_path / "objects"
    world = World(real=True)
    world.objects = await open_objects(f"file://{bucket}", world.clock, world.rand)
    world.topics = world.open_topics()
    async with world:
        before = publisher_of(stores_of(world, world.consensus, bucket), world.table)
        await append(world, 50_000)
        await before.publish((await world.table.frontiers())[1] - 1)
        await persisted(world)
        kept = (await world.table.frontiers())[1]
        rows = await contents(world.table, kept - 1)
        await append(world, 40_000)  # the checkpoint does not have it
        lost = await before.publish((await world.table.frontiers())[1] - 1)
        assert rows_of(reader.read((await load_table(world.consensus, world.objects, "table")).location)) != rows

        consensus = MemoryConsensus(world.clock)
        await Restorer(consensus, world.objects, world.clock, world.rand).run()
        table = await open_shard(consensus, world.objects, world.clock, world.rand, "table")
        assert (await table.frontiers())[1] == kept
        assert any(part.object_key for batch in table.state.batches for part in batch.parts)
        stores = stores_of(world, consensus, bucket)
        after = publisher_of(stores, table)
        again = await after.publish(kept - 1)
        location = (await load_table(consensus, world.objects, "table")).location
        assert rows_of(reader.read(location)) == rows
        assert again.metadata.table_uuid != lost.metadata.table_uuid, "a client must not continue its earlier history"

        monkeypatch.setattr(table_publisher, "ORPHAN_MS", -1000)
        assert await delete_unknown(stores, frozenset({table.state.shard_id})) > 0
        left = {meta.key async for meta in world.objects.list(PREFIX)}
        assert lost.pointer.metadata not in left
        assert rows_of(reader.read(location)) == rows
        named = await after._named_objects(await after.load())
        assert left == {key for key in named if key.startswith(PREFIX)}
        await table.aclose()
