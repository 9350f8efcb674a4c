"""Produce and fetch through `topics` alone, without sockets: what the room itself costs, and its limit.

    python benchmarks/topics_inproc.py [--store memory|local] [--batch-bytes 65536] [--seconds 4]

Each of P partitions keeps one idempotent batch in flight, as librdkafka does; every batch is fetched back and
counted. The limit in the same run: the same batches through the object store and the log alone, one at a time per
upload slot.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import resource
import struct
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import crc32c

from tidemill.base.clock import Rand, SystemClock
from tidemill.consensus.factory import open_consensus
from tidemill.metastore.catalogue import Catalogue
from tidemill.metastore.factory import create_metastore
from tidemill.objects.factory import open_objects
from tidemill.topics.api import FetchRead
from tidemill.topics.batch import Record, encode_batch
from tidemill.topics.batch.header import add_sequence
from tidemill.topics.local_topics import LocalTopics

RECORD_BYTES = 1024
SEQUENCE = struct.Struct(">i")
CRC = struct.Struct(">I")


def template(batch_bytes: int) -> list[Record]:
    return [Record(None, os.urandom(RECORD_BYTES), (), 1)] * max(1, batch_bytes // RECORD_BYTES)


async def for_a_while(seconds: float, jobs: list[Callable[[int], Awaitable[object]]]) -> tuple[int, float, list[float]]:
    """Run every job over and over; (rounds in all, seconds, latencies in ms)."""
    clock = SystemClock()
    end = clock.monotonic_s() + seconds
    latencies: list[float] = []

    async def loop(job: Callable[[int], Awaitable[object]]) -> None:
        number = 0
        while clock.monotonic_s() < end:
            begun = clock.monotonic_s()
            await job(number)
            latencies.append((clock.monotonic_s() - begun) * 1000)
            number += 1

    begun = clock.monotonic_s()
    await asyncio.gather(*(loop(job) for job in jobs))
    return len(latencies), clock.monotonic_s() - begun, sorted(latencies)


async def main(store: str, batch_bytes: int, seconds: float, partitions: int, directory: Path) -> None:
    clock, rand = SystemClock(), Rand()
    local = store == "local"
    consensus = await open_consensus(f"sqlite:{directory / 'c.db'}" if local else "memory:", clock, rand)
    objects = await open_objects(str(directory / "objects") if local else "memory:", clock, rand)
    metastore = create_metastore(consensus, objects, clock, rand)
    catalogue = Catalogue(metastore, clock, rand)
    row = await catalogue.create_topic("bench", partitions)
    topics = LocalTopics(consensus, objects, catalogue, clock=clock, rand=rand)
    records = template(batch_bytes)
    count, size = len(records), len(encode_batch(records))

    def producer(partition: int) -> Callable[[int], Awaitable[object]]:
        batch = bytearray(encode_batch(records, producer_id=partition, producer_epoch=0, base_sequence=0))

        def send(number: int) -> Awaitable[object]:
            # One batch in flight, so the buffer is free again; the sequence is covered by the checksum.
            SEQUENCE.pack_into(batch, 53, add_sequence(0, number * count))
            CRC.pack_into(batch, 17, crc32c.crc32c(memoryview(batch)[21:]))
            return topics.produce_nowait(row.topic_id, partition, batch)

        return send

    async def bare(number: int) -> None:
        await objects.put(f"bare/{rand.nonce()}", b"x" * size)
        head = await consensus.log_head("bare")
        await consensus.append("bare", 0, head.next, [b"x" * 60], rand.nonce())

    cpu = resource.getrusage(resource.RUSAGE_SELF)
    rounds, took, latencies = await for_a_while(seconds, [producer(p) for p in range(partitions)])
    used = resource.getrusage(resource.RUSAGE_SELF)
    mb = rounds * size / 1e6
    cpu_s = used.ru_utime + used.ru_stime - cpu.ru_utime - cpu.ru_stime
    rate = mb / took

    fetched = 0
    begun = clock.monotonic_s()
    for partition in range(partitions):
        offset = 0
        while True:
            reads = [FetchRead(row.topic_id, partition, offset, 1 << 20)]
            (found,) = await topics.fetch(reads, max_wait_s=0, min_bytes=1, max_bytes=8 << 20)
            if not found.batches:
                break
            fetched += len(found.batches)
            offset += len(found.batches) * count
    read_s = clock.monotonic_s() - begun
    assert fetched == rounds, f"fetched {fetched} of {rounds}"

    bare_rounds, bare_took, bare_latencies = await for_a_while(min(seconds, 2.0), [bare])
    bare_rate = bare_rounds * size / 1e6 / bare_took
    print(f"machine: {platform.machine()} x{os.cpu_count()}, Python {platform.python_version()}")
    print(f"store={store} partitions={partitions} batch_bytes={size} records_per_batch={count}")
    print(
        f"produce: {rate:.0f} MB/s, {rounds / took:.0f} batches/s, {cpu_s / mb * 1000:.2f} CPU-s/GB, "
        f"ack p50 {latencies[len(latencies) // 2]:.2f} ms p99 {latencies[len(latencies) * 99 // 100]:.2f} ms"
    )
    print(f"fetch:   {mb / read_s:.0f} MB/s, every batch counted ({fetched})")
    print(
        f"limit:   one put and one append at a time: {bare_rate:.0f} MB/s, p50 "
        f"{bare_latencies[len(bare_latencies) // 2]:.2f} ms; produce is {rate / bare_rate:.2f}x of it"
    )
    await topics.aclose()
    await metastore.aclose()
    await consensus.aclose()
    await objects.aclose()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", choices=["memory", "local"], default="memory")
    parser.add_argument("--batch-bytes", type=int, default=65536)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--partitions", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(main(options.store, options.batch_bytes, options.seconds, options.partitions, Path(scratch)))
