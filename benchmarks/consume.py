"""Consume: librdkafka reads topics from their start from tidemill as `tidemill up` runs it, and from other brokers.

    ./dev bench consume [--record-bytes 100,1024] [--batch-bytes 64k,1000000] [--brokers mock,memory,directory]
                        [--megabytes 96] [--readers 2] [--rounds 3] [--cold | --l1] [--json]

Method: all brokers run concurrently (`kafka_broker.py`). For each size of records and of batches each broker is filled
with as many topics of 4 partitions as hold `--megabytes` at 3.6 MB a partition, which the mock can keep and the cache
of a node holds; then the brokers take turns, round by round, beginning with another one each time. In a turn
`--readers` consumers, one after the other, assign all partitions at their starts and read them in one pass: 192 MB a
turn, each timed from the assignment to the last record. `--cold`: other topics of 160 MB are written first, so that the
records come from the store. `--l1`: tidemill moves topics into L1 (`storage.l1`), and reading begins when all of it is
there. Every record of every reader is compared (once, in order, whole). CPU is that of all processes of a broker while
it is read. The limit is librdkafka's mock: C, memory.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import urllib.request
from collections import defaultdict

import msgspec

from kafka_broker import NAMES, TIDEMILL, Broker, running
from kafka_load import GB, MB, PARTITIONS, TITLES, Round, machine, producer, read, send, show, sizes, table, verify

PARTITION_MB = 3.6
"""A topic's share of each partition: what the mock keeps of it at any size of batches."""
COLD_MB = 160
L1 = {"storage": {"l1": True, "l1_min_s": 0.5, "l1_max_s": 1.0}}
SETTLED_S = 3.0
"""Moves into L1 count as complete after this time without one: the rest is less than a batch per partition."""
MOVE_S = 300.0


def turn(broker: Broker, topics: list[str], count: int, record_bytes: int, readers: int) -> Round:
    """The records are compared after the last reader: only reading is timed."""
    cpu_s = broker.cpu_s()
    seconds, verified = 0.0, 0
    found = []
    for _ in range(readers):
        took_s, chunks = read(broker.address, topics)
        seconds += took_s
        found.append(chunks)
    cpu_s = broker.cpu_s() - cpu_s
    for chunks in found:
        verified += verify(chunks, topics, count, record_bytes)
    size = readers * count * record_bytes
    return Round(size / seconds / MB, readers * count / seconds, cpu_s / (size / GB), verified)


def moved_bytes(broker: Broker) -> int:
    """Return the bytes that the node reports as moved into L1."""
    host, _, port = broker.address.rpartition(":")
    with urllib.request.urlopen(f"http://{host}:{int(port) + 1}/api/status", timeout=30) as answer:
        facts = json.load(answer)["facts"]
    return sum(each["l1"]["moved_bytes"] for each in facts.values() if each.get("l1"))


def moved(broker: Broker, size: int) -> None:
    """Wait until at least `size` bytes are in L1 and no more arrive. Raises RuntimeError."""
    until_s = time.monotonic() + MOVE_S
    before, since_s = -1, time.monotonic()
    while before < size or time.monotonic() < since_s + SETTLED_S:
        if time.monotonic() > until_s:
            raise RuntimeError(f"not moved into L1 in time: broker={broker.name} moved_bytes={before} of={size}")
        time.sleep(0.5)
        now = moved_bytes(broker)
        if now != before:
            before, since_s = now, time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record-bytes", default="100,1024")
    parser.add_argument("--batch-bytes", default="64k,1000000")
    parser.add_argument("--brokers", default="mock,memory,directory", help=f"of {','.join(NAMES)}")
    parser.add_argument("--megabytes", type=float, default=96)
    parser.add_argument("--readers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--cold", action="store_true")
    where.add_argument("--l1", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    names = args.brokers.split(",")
    results = []
    if not args.json:
        each = args.megabytes * args.readers
        print(f"machine: {machine()}; {args.rounds} rounds of {each:g} MB: medians (least–most)")
    for record_bytes in sizes(args.record_bytes):
        for batch_bytes in sizes(args.batch_bytes):
            count = int(args.megabytes * MB / record_bytes)
            topics = [f"consume-{n}" for n in range(math.ceil(args.megabytes / (PARTITION_MB * PARTITIONS)))]
            rounds: dict[str, list[Round]] = defaultdict(list)
            with running(names, L1 if args.l1 else None) as brokers:
                for broker in brokers.values():
                    send(producer(broker.address, batch_bytes), topics, count, record_bytes)
                    if args.cold:
                        more = int(COLD_MB * MB / 1024)
                        send(producer(broker.address, 1_000_000), ["other"], more, 1024)
                    if args.l1 and broker.name in TIDEMILL:
                        moved(broker, count * record_bytes)
                order = list(brokers.values())
                for number in range(args.rounds):
                    for broker in order[number % len(order) :] + order[: number % len(order)]:
                        rounds[broker.name].append(turn(broker, topics, count, record_bytes, args.readers))
            in_order = {name: rounds[name] for name in names if name in rounds}
            results.append({"record_bytes": record_bytes, "batch_bytes": batch_bytes, "rounds": in_order})
            if not args.json:
                print(f"\n{record_bytes} B records, batches of {batch_bytes:,} B, {count:,} records a reader\n")
                show(TITLES, table(in_order, "mock"))
    if args.json:
        print(json.dumps({"machine": machine(), "cells": msgspec.to_builtins(results)}))


if __name__ == "__main__":
    main()
