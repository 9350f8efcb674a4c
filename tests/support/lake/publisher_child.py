"""A process that appends to a table and publishes it until it is killed: `publisher_child.py DIRECTORY SEED`.

Prints the time of each publication that was acknowledged.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pyarrow as pa

from tidemill.base.clock import Rand, SystemClock
from tidemill.consensus.factory import open_consensus
from tidemill.lake.publish.stored import LakeStores
from tidemill.lake.publish.table_publisher import TablePublisher
from tidemill.lake.settings import LakeSettings
from tidemill.lake.vectors.part_columns import PartColumns
from tidemill.objects.factory import open_objects
from tidemill.shards.api import DIFF, TIME, Column, ShardSchema
from tidemill.shards.compaction.compaction import compact_once
from tidemill.shards.registry import open_shard

SCHEMA = ShardSchema((Column("id", "int64"), Column("version", "int64"), Column("note", "string")), ("id",))
KEYS = 3000
MERGE_EVERY = 5


def consensus_url(directory: Path) -> str:
    return f"sqlite:///{directory}/consensus.db"


def updates(time_ms: int, changed: range, live: dict[int, int]) -> pa.Table:
    """Return the updates that give the keys of `changed` version `time_ms`; every seventh of them is deleted."""
    gone = [(key, live.pop(key), -1) for key in changed if key in live]
    come = [(key, time_ms, 1) for key in changed if key % 7 or time_ms % 2]
    live.update((key, version) for key, version, _ in come)
    keys, versions, diffs = zip(*gone, *come, strict=True)
    notes = [f"{key}-{version}" * 3 for key, version in zip(keys, versions, strict=True)]
    return pa.table(
        {"id": keys, "version": versions, "note": notes, TIME: [time_ms] * len(keys), DIFF: diffs},
        schema=pa.schema(
            [("id", pa.int64()), ("version", pa.int64()), ("note", pa.string()), (TIME, pa.int64()), (DIFF, pa.int64())]
        ),
    )


async def main(directory: Path, seed: int) -> None:
    clock, rand = SystemClock(), Rand()
    consensus = await open_consensus(consensus_url(directory), clock, rand)
    objects = await open_objects(f"file://{directory}/objects", clock, rand)
    shard = await open_shard(consensus, objects, clock, rand, "t", SCHEMA)
    stores = LakeStores(consensus, objects, clock, rand, LakeSettings(f"file://{directory}/objects"))
    publisher = TablePublisher(stores, PartColumns(objects), shard)
    choose = Rand(seed)
    while True:
        since, upper = await shard.frontiers()
        rows = await shard.snapshot(upper - 1) if upper else None
        live = dict(zip(*(rows.column(name).to_pylist() for name in ("id", "version")), strict=True)) if rows else {}
        first = choose.below(KEYS) if upper else 0
        part = await shard.write_part(updates(upper, range(first, min(KEYS, first + 900) if upper else KEYS), live))
        await shard.compare_and_append(upper, upper + 1, [part], "")
        if upper % MERGE_EVERY == 0:
            await shard.downgrade_since("test", 1, max(since, upper - 1))
            await compact_once(shard, objects, rand)
        await publisher.publish(upper)
        print(upper, flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
