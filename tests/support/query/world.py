"""Clusters to read, filled through the front of shards: on a directory and SQLite, in memory, on S3 (moto's server)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

import tidemill
from support.waiting import DEADLINE_S
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.consensus.memory import MemoryConsensus
from tidemill.maintenance.shards.upkeep import collect_garbage
from tidemill.objects.memory import MemoryObjects
from tidemill.objects.retrying import RetryingObjects
from tidemill.shards.api import DIFF, TIME, Column, ShardSchema
from tidemill.shards.compaction import compaction
from tidemill.spark.settings import StoreUrls
from tidemill.spark.stores import Stores

ORDERS = ShardSchema((Column("id", "int64"), Column("status", "string"), Column("total", "decimal(12,2)")), ("id",))
Row = tuple[int, str | None, int]
"""id, status, diff; the total is ten times the id."""


class World:
    """`cluster` is what is tested; the other methods write, in the same process, with handles of their own."""

    def __init__(self, cluster: tidemill.Cluster) -> None:
        self.cluster = cluster
        self.portal: BlockingPortal = cluster._portal
        self.stores: Stores = cluster._stores

    def append(self, upper: int, rows: Sequence[Row], name: str = "orders", schema: ShardSchema = ORDERS) -> None:
        """Moves the table's upper to `upper`; the rows' time is one before it."""

        async def run() -> None:
            shard = await self.stores.shard(name, schema)
            lower = (await shard.frontiers())[1]
            parts = [await shard.write_part(updates(rows, upper - 1))] if rows else []
            await shard.compare_and_append(lower, upper, parts, "")
            await shard.aclose()

        self.portal.call(run())

    def merge(self, since: int, name: str = "orders") -> None:
        """Merge as the maintenance job does, immediately: history ends at `since`, and replaced parts without a
        hold are deleted.
        """

        async def run() -> None:
            shard = await self.stores.shard(name)
            await shard.downgrade_since("keeper", 1, since)
            while (done := await compaction.compact_once(shard, self.stores.objects, Rand())) is not None:
                assert done.shown
            await collect_garbage(shard, self.stores.objects, SystemClock(), after_ms=-1, persisted=1 << 60)
            await shard.aclose()

        self.portal.call(run())

    def holds(self, name: str = "orders") -> list[str]:
        async def run() -> list[str]:
            shard = await self.stores.shard(name)
            found = [h.reader.partition("/")[0] for h in shard.state.holds if h.expires_ms]
            await shard.aclose()
            return found

        return self.portal.call(run())


def updates(rows: Sequence[Row], time: int) -> pa.Table:
    ids, status, diffs = zip(*rows, strict=True)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "status": pa.array(status, pa.string()),
            "total": pa.array([i * 10 for i in ids], pa.int64()).cast(pa.decimal128(21, 2)).cast(pa.decimal128(12, 2)),
            TIME: pa.array([time] * len(ids), pa.int64()),
            DIFF: pa.array(diffs, pa.int64()),
        }
    )


def rows_of(table: pa.Table) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(row.values()) for row in table.to_pylist())


def in_directory(directory: Path, new_bucket: Callable[[], str]) -> tidemill.Cluster:
    config = directory / "tidemill.toml"
    config.write_text(f'[node]\ndata = "{directory}/data"\n')
    make_consensus(f"sqlite://{directory}/data/consensus.db")
    return tidemill.connect(config)


def in_memory(directory: Path, new_bucket: Callable[[], str]) -> tidemill.Cluster:
    objects = RetryingObjects(MemoryObjects(SystemClock()), SystemClock(), Rand(), store="memory")
    stores = Stores(StoreUrls("memory:", "memory:"), objects, MemoryConsensus(SystemClock()), SystemClock(), Rand())
    return tidemill.Cluster(BlockingPortal(), stores)


def on_s3(directory: Path, new_bucket: Callable[[], str]) -> tidemill.Cluster:
    make_consensus(f"sqlite://{directory}/consensus.db")
    return tidemill.connect(objects=new_bucket(), consensus=f"sqlite://{directory}/consensus.db")


def make_consensus(url: str) -> None:
    """Create the cluster as the first node does; connecting does not create one."""
    from tidemill.consensus.factory import open_consensus

    async def run() -> None:
        await (await open_consensus(url, SystemClock(), Rand())).aclose()

    with BlockingPortal() as portal:
        portal.call(run())


BACKENDS = {"directory": in_directory, "memory": in_memory, "s3": on_s3}


def filled(world: World) -> None:
    """300 orders, merged; then one changed, one gone, one new. Uppers 10, 20, 30."""
    world.append(10, [(i, "open", 1) for i in range(150)])
    world.append(20, [(i, "open", 1) for i in range(150, 300)])
    world.merge(19)
    world.append(30, [(7, "open", -1), (7, "paid", 1), (8, "open", -1), (300, None, 1)])


async def until_let_go(world: World) -> list[str]:
    """Return the holds, once those that were released without waiting are gone."""
    import asyncio

    async with asyncio.timeout(DEADLINE_S):
        while True:
            shard = await world.stores.shard("orders")
            found = [h.reader for h in shard.state.holds if h.expires_ms]
            await shard.aclose()
            if not found:
                return found
            await asyncio.sleep(0.01)
