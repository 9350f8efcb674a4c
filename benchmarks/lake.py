"""`./dev bench lake`: the cost of publishing a table as an Iceberg table after a share of its keys changed.

A table of N keys in parts of a million rows, in a directory. Each round updates a random share of the keys in one
append, and publishes. CPU is that of the publication alone, of this process. Afterwards every published file is read
with its vector, and rows and a sum are compared with what was written.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from harbour import machine
from support.lake.world import LakeWorld
from tidemill.lake.publish.stored import Stored
from tidemill.shards.api import DIFF, TIME, Column, ShardSchema
from tidemill.shards.handle import LogShard

SCHEMA = ShardSchema((Column("id", "int64"), Column("amount", "int64"), Column("note", "string")), ("id",))
PART_ROWS = 1 << 20


def rows(ids: np.ndarray, amounts: np.ndarray, time_ms: int, diff: int) -> pa.Table:
    notes = pc.binary_join_element_wise("n", pc.utf8_lpad(pc.cast(pa.array(amounts), pa.string()), 40, "x"), "")
    fixed = {
        name: pa.array(np.full(len(ids), value, dtype=np.int64)) for name, value in ((TIME, time_ms), (DIFF, diff))
    }
    return pa.table({"id": pa.array(ids), "amount": pa.array(amounts), "note": notes, **fixed})


async def measure(count: int, shares: list[float], rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-lake-") as directory:
        world = LakeWorld(Path(directory))
        shard, amounts = await world.table(schema=SCHEMA), np.arange(count, dtype=np.int64)
        parts = []
        for start in range(0, count, PART_ROWS):
            ids = np.arange(start, min(count, start + PART_ROWS), dtype=np.int64)
            parts.append(await shard.write_part(rows(ids, amounts[ids], 1, 1)))
        await shard.compare_and_append(0, 2, parts, "")
        publisher, draw = await world.publisher(), np.random.default_rng(1)
        began = time.process_time()
        await world.publish(publisher)
        print(f"\n{count:,} keys; the first publication {time.process_time() - began:.3f} CPU s")
        print(f"{'changed':>8} {'CPU s, each round':>30} {'objects':>8} {'written':>10} {'read':>12}")
        for share in shares:
            shown = []
            for _ in range(rounds):
                await update(shard, amounts, draw.choice(count, int(count * share), replace=False))
                before = {meta.key async for meta in world.objects.list("lake/")}
                read, began = publisher._columns.fetched_bytes, time.process_time()
                stored = await world.publish(publisher)
                shown.append(time.process_time() - began)
                new = [meta.size_bytes async for meta in world.objects.list("lake/") if meta.key not in before]
                read = publisher._columns.fetched_bytes - read
            each = "  ".join(f"{one:.3f}" for one in shown)
            print(f"{share:>8.1%} {each:>30} {len(new):>8} {sum(new) >> 10:>7} kB {read >> 10:>9} kB")
        check(world, stored, amounts)
        print(f"verified: {count:,} rows and their sum, read from the published files and vectors")


async def update(shard: LogShard, amounts: np.ndarray, ids: np.ndarray) -> None:
    """Update the rows of these ids in one append."""
    _, upper = await shard.frontiers()
    old = rows(ids, amounts[ids], upper, -1)
    amounts[ids] += 1
    part = await shard.write_part(pa.concat_tables([old, rows(ids, amounts[ids], upper, 1)]))
    await shard.compare_and_append(upper, upper + 1, [part], "")


def check(world: LakeWorld, stored: Stored, amounts: np.ndarray) -> None:
    assert stored.evaluation is not None
    found = total = 0
    for state in stored.evaluation.states.values():
        path = world.settings.uri(state.view.part.object_key).removeprefix("file://")
        live = pq.read_table(path, columns=["amount"]).filter(pa.array(~state.mask()))
        found, total = found + live.num_rows, total + (pc.sum(live.column("amount")).as_py() or 0)
    assert (found, total) == (len(amounts), int(amounts.sum())), "the published rows are others"


def main() -> None:
    parser = argparse.ArgumentParser(prog="./dev bench lake", description=__doc__)
    parser.add_argument("--keys", type=int, nargs="*", default=[1_000_000, 10_000_000])
    parser.add_argument("--shares", type=float, nargs="*", default=[0.001, 0.01, 0.1])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(machine())
    for count in options.keys:
        asyncio.run(measure(count, options.shares, options.rounds))


if __name__ == "__main__":
    main()
