"""Extents of L1: the cost of storing and finding a month of thousands of partitions, and the size of a partition then.

    ./dev bench extents [--partitions 10000] [--extents 100] [--lookups 2000] [--dir DIR] [--json]

Method: rows as the reconciler writes them, one commit an object of 100 partitions, into the metastore on a directory
with its log in memory; then the metastore is flushed, closed and reopened. 100 extents a partition are a month of
4 KiB/s in objects of 32 MiB that 300 partitions share, or of 1 MiB/s in separate objects merged to a day's size.

    add         extents a second into the rows, with their flushes and merges
    by offset   the extent of an offset, any partition: cold (right after opening), then warm; reads: of files, each
    by time     the extent of a time, by bisection
    walk        all extents of a partition, one after another
    hot state   a partition's state with 100,000 batches: bytes in memory and of its roll-up, before and after its log
                says that they are in L1

Every extent that is found is compared with the one that was written.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from harbour import machine, percentile
from tidemill.base.clock import Rand, SystemClock
from tidemill.consensus.memory import MemoryConsensus, MemoryState
from tidemill.metastore.factory import NODE, create_metastore
from tidemill.metastore.lsm.compaction.executor import open_executor
from tidemill.metastore.lsm.database import Database
from tidemill.metastore.lsm.manifest import encode_manifest
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows.l1 import L1ExtentRow
from tidemill.objects.factory import open_objects
from tidemill.topics.l1.extent_store import ExtentStore
from tidemill.topics.l1.format import L1Region
from tidemill.topics.l1.row_transitions import AddRequest
from tidemill.topics.partition.state_machine.apply import apply
from tidemill.topics.partition.state_machine.codec import encode_state
from tidemill.topics.partition.state_machine.commands import Advance, PlaceBatches, Placeholder
from tidemill.topics.partition.state_machine.state import PartitionState

PER_TOPIC = 100
SPAN = 1_000
"""Offsets, and milliseconds, of an extent."""


def topic_of(partition: int) -> tuple[str, int]:
    return f"topic-{partition // PER_TOPIC:06d}", partition % PER_TOPIC


async def load(rows: ExtentStore, partitions: int, extents: int) -> float:
    """Seconds."""
    begun = time.perf_counter()
    for number in range(extents):
        base = number * SPAN
        for first in range(0, partitions, PER_TOPIC):
            count = min(PER_TOPIC, partitions - first)
            regions = tuple(
                L1Region(p, p << 10, 1 << 10, base, base + SPAN - 1, base + SPAN - 1, 8, (200 + p) << 10, 64)
                for p in range(count)
            )
            topic_id, name = topic_of(first)[0], f"{number:015d}-{first:032x}"
            await rows.register(topic_id, name)
            await rows.add(AddRequest(topic_id, name, 1 << 20, regions, {p: [(1, base)] for p in range(count)}))
    return time.perf_counter() - begun


async def looked_up(rows: ExtentStore, args: argparse.Namespace, *, by_time: bool = False) -> list[float]:
    """Milliseconds each."""
    source, took = random.Random(7), []
    for _ in range(args.lookups):
        topic_id, partition = topic_of(source.randrange(args.partitions))
        at = source.randrange(args.extents * SPAN)
        begun = time.perf_counter()
        found = (
            await rows.extent_for_time(topic_id, partition, at)
            if by_time
            else await first(rows, topic_id, partition, at)
        )
        took.append((time.perf_counter() - begun) * 1000)
        assert found is not None and found.base_offset == at // SPAN * SPAN, (topic_id, partition, at, found)
    return took


async def first(rows: ExtentStore, topic_id: str, partition: int, offset: int) -> L1ExtentRow | None:
    async for extent in rows.extents(topic_id, partition, offset, fresh=False):
        return extent
    return None


async def walked(rows: ExtentStore, args: argparse.Namespace) -> float:
    """Extents a second."""
    count, begun = 0, time.perf_counter()
    for partition in range(0, args.partitions, max(1, args.partitions // 20)):
        at = 0
        async for extent in rows.extents(*topic_of(partition), fresh=False):
            assert extent.base_offset == at
            at, count = extent.last_offset + 1, count + 1
        assert at == args.extents * SPAN
    return count / (time.perf_counter() - begun)


def hot_state(batches: int = 100_000) -> dict[str, int]:
    state = PartitionState()
    for number in range(batches // 1_000):
        base = number * 1_000
        placed = tuple(Placeholder(0, i * 100, 100, base + i, 1, -1, -1, -1, base + i) for i in range(1_000))
        apply(state, PlaceBatches(0, (f"l0/{number:020d}/writer-{number:012d}",), placed), state.applied, 1)
    before = weight(state), len(encode_state(state))
    apply(state, Advance(0, 0, "writer", 0, state.high_watermark), state.applied, 1)
    after = weight(state), len(encode_state(state))
    return {
        "hot_bytes": before[0], "hot_rollup_bytes": before[1], "moved_bytes": after[0], "moved_rollup_bytes": after[1],
    }  # fmt: skip


def weight(state: PartitionState) -> int:
    columns = (
        state.bases,
        state.objects,
        state.first_bytes,
        state.sizes,
        state.max_timestamps,
        state.highest_timestamps,
    )
    return sum(len(column) * column.itemsize for column in columns) + sum(map(len, state.object_keys))


async def led(metastore: Metastore) -> Database:
    """Return the database of one domain, once this process leads it."""
    async with asyncio.timeout(60):
        while metastore._opened is None or metastore._opened.domains[0]._leader is None:
            await asyncio.sleep(0.01)
    return metastore._opened.domains[0]._leader.database


def held(database: Database) -> dict[str, int]:
    stats, manifest = database.stats(), database.versions.manifest
    assert manifest is not None
    return {
        "levels": sum(level.files > 0 for level in stats.levels),
        "files": sum(level.files for level in stats.levels),
        "manifest_bytes": len(encode_manifest(manifest)),
        "cache_bytes": stats.cache_bytes,
        "memtable_bytes": stats.memtable_bytes,
    }


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


async def measure(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    clock, rand, state = SystemClock(), Rand(), MemoryState()
    objects = await open_objects(f"file://{directory}", clock, rand)
    merger = open_executor(objects, f"file://{directory}", NODE.options, clock)

    def opened() -> Metastore:
        consensus = MemoryConsensus(clock, state)
        return create_metastore(consensus, objects, clock, rand, settings=NODE, holder=rand.nonce(), merger=merger)

    metastore = opened()
    took_s = await load(ExtentStore(metastore, clock, rand), args.partitions, args.extents)
    await metastore.flush(300)
    found: dict[str, Any] = {
        "extents": args.partitions * args.extents,
        "add_per_s": args.partitions * args.extents / took_s,
        "write_amplification": (await led(metastore)).stats().write_amplification,
        "resident_after_load_bytes": resident_bytes(),
    }
    await metastore.aclose()
    metastore = opened()
    rows = ExtentStore(metastore, clock, rand)
    await rows.partition(*topic_of(0))
    database = await led(metastore)
    for name, by_time in (("cold", False), ("warm", False), ("time", True)):
        before = database.stats().object_reads
        took = await looked_up(rows, args, by_time=by_time)
        found |= {f"{name}_p50_ms": percentile(took, 0.5), f"{name}_p99_ms": percentile(took, 0.99)}
        found[f"{name}_reads"] = (database.stats().object_reads - before) / args.lookups
    found["walk_per_s"] = await walked(rows, args)
    found |= held(database)
    await metastore.aclose()
    await merger.aclose()
    await objects.aclose()
    found["stored_bytes"] = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    return found | hot_state()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partitions", type=int, default=10_000)
    parser.add_argument("--extents", type=int, default=100, help="of each partition")
    parser.add_argument("--lookups", type=int, default=2_000)
    parser.add_argument("--dir", default=None)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        found = asyncio.run(measure(args, Path(directory)))
    if args.json:
        print(json.dumps(found | {"machine": machine()}))
        return
    print(machine())
    for name, value in found.items():
        print(f"{name:20} {value:,.2f}" if isinstance(value, float) else f"{name:20} {value:,}")


if __name__ == "__main__":
    main()
