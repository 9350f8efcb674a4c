"""`./dev bench lake_hour`: what a table costs in the bucket while it is published for hours.

A table of N keys gets updates of random keys, ten appends a second. A publisher runs a round per `interval_s`, and the
steps of maintenance run every five seconds: since, merges, and the deletion of replaced objects. The clock is virtual,
so an hour of updates takes minutes. A line per twelfth of the time shows what is stored. After `keep_s` all columns are
flat, replaced parts after another hour. At the end all rows are read from the published files, and compared.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from harbour import machine
from lake import SCHEMA, check, rows
from support.lake.world import LakeWorld
from tidemill.base.status.status import StatusTracker
from tidemill.lake.publish.stored import Stored
from tidemill.lake.publisher import LakePublisher
from tidemill.maintenance.scheduler import Retention
from tidemill.maintenance.shards.upkeep import collect_garbage
from tidemill.metastore.rows.catalogue import PipelineRow
from tidemill.shards.compaction.compaction import compact_once
from tidemill.shards.handle import LogShard

APPENDS_PER_S = 10
UPKEEP_S = 5
LINES = 12
EVERY_COMMIT = 1 << 60


class Hours:
    """One table, its maintenance and its publisher. `amounts` has the amount of each key."""

    def __init__(self, world: LakeWorld, keys: int) -> None:
        self.world = world
        self.amounts = np.arange(keys, dtype=np.int64)
        self.draw = np.random.default_rng(1)
        self.publisher = LakePublisher(world.stores(), self.pipelines, StatusTracker())
        self.retention = Retention()
        self.publishing_cpu_s = self.merging_cpu_s = 0.0

    async def pipelines(self) -> Sequence[PipelineRow]:
        return []

    async def fill(self) -> LogShard:
        shard = await self.world.table(schema=SCHEMA)
        now_ms = self.world.clock.now_ms()
        ids = np.arange(len(self.amounts), dtype=np.int64)
        part = await shard.write_part(rows(ids, self.amounts, now_ms, 1))
        await shard.compare_and_append(0, now_ms + 1, [part], "")
        return shard

    async def update(self, shard: LogShard, count: int) -> None:
        now_ms, upper = self.world.clock.now_ms(), shard.state.upper
        ids = self.draw.choice(len(self.amounts), count, replace=False)
        old = rows(ids, self.amounts[ids], now_ms, -1)
        self.amounts[ids] += 1
        part = await shard.write_part(pa.concat_tables([old, rows(ids, self.amounts[ids], now_ms, 1)]))
        await shard.compare_and_append(upper, now_ms + 1, [part], "")

    async def maintain(self, shard: LogShard) -> None:
        world, retention, began = self.world, self.retention, time.process_time()
        await shard.downgrade_since("retention", 1, world.clock.now_ms() - retention.history_ms)
        while await compact_once(shard, world.objects, world.rand) is not None:
            pass
        after_ms = int(retention.collect_after_s * 1000)
        await collect_garbage(shard, world.objects, world.clock, after_ms=after_ms, persisted=EVERY_COMMIT)
        self.merging_cpu_s += time.process_time() - began

    async def publish(self) -> None:
        began = time.process_time()
        await self.publisher.round()
        self.publishing_cpu_s += time.process_time() - began

    async def stored(self) -> Stored:
        (table,) = self.publisher._tables.values()
        return await table.publisher.load()

    async def line(self, shard: LogShard, second: int) -> str:
        sizes: dict[str, list[int]] = {"lake/": [], "shards/": [], ".metadata.json": []}
        for prefix in ("lake/", "shards/"):
            async for meta in self.world.objects.list(prefix):
                sizes[prefix].append(meta.size_bytes)
                if meta.key.endswith(".metadata.json"):
                    sizes[".metadata.json"].append(meta.size_bytes)
        snapshots = len((await self.stored()).metadata.snapshots)
        parts = sum(len(batch.parts) for batch in shard.state.batches)
        return (
            f"{second / 60:>6.0f} {snapshots:>10} {max(sizes['.metadata.json']) / 1000:>13.0f}"
            f" {len(sizes['lake/']):>9} {sum(sizes['lake/']) / 1e6:>8.1f} {len(sizes['shards/']):>9}"
            f" {sum(sizes['shards/']) / 1e6:>8.1f} {parts:>6}"
            f" {self.publishing_cpu_s / second * 100:>10.2f} {self.merging_cpu_s / second * 100:>8.2f}"
        )


async def measure(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-lake-hour-") as directory:
        world = LakeWorld(Path(directory), keep_s=options.keep_s)
        hours = Hours(world, options.keys)
        shard = await hours.fill()
        await hours.publish()
        print(f"{options.keys:,} keys, {options.rate:,} updates a second, keep_s {options.keep_s:g}, virtual time")
        print(
            f"{'minute':>6} {'snapshots':>10} {'metadata, kB':>13} {'lake, n':>9} {'lake, MB':>8} {'parts, n':>9}"
            f" {'MB':>8} {'live':>6} {'publish, %':>10} {'merge, %':>8}"
        )
        seconds, interval_s = int(options.hours * 3600), int(world.settings.interval_s)
        for second in range(1, seconds + 1):
            for _ in range(APPENDS_PER_S):
                world.clock.advance(1000 // APPENDS_PER_S)
                await hours.update(shard, options.rate // APPENDS_PER_S)
            if second % UPKEEP_S == 0:
                await hours.maintain(shard)
            if second % interval_s == 0:
                await hours.publish()
            if second % (seconds // LINES) == 0:
                print(await hours.line(shard, second), flush=True)
        await hours.publish()
        print("publish, merge: CPU in % of a core")
        check(world, await hours.stored(), hours.amounts)
        print(f"verified: {options.keys:,} rows and their sum, read from the published files and vectors")


def main() -> None:
    parser = argparse.ArgumentParser(prog="./dev bench lake_hour", description=__doc__)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--rate", type=int, default=500, help="updates per second")
    parser.add_argument("--hours", type=float, default=4.0)
    parser.add_argument("--keep-s", type=float, default=3600.0, help="lake.keep_s")
    options = parser.parse_args()
    print(machine())
    asyncio.run(measure(options))


if __name__ == "__main__":
    main()
