"""Produce: idempotent librdkafka into tidemill as `tidemill up` runs it, and into other brokers (`kafka_broker.py`).

    ./dev bench produce [--record-bytes 100,1024] [--batch-bytes 64k,1000000] [--brokers mock,memory,directory]
                        [--megabytes 160] [--rounds 3] [--seconds 5] [--json]

Method: all brokers run concurrently, each in separate processes; one Python client. For each size of records and of
batches the brokers take turns, round by round, beginning with another one each time: at least 160 MB into a new topic
of 4 partitions, acks=all, linger 20 ms, no compression, timed from the acknowledgement of a first record in each
partition to the last one; ratios to the limit are taken within a round. After each turn every record is read back and
compared (once, in order, whole; of the mock the 5 MiB a partition that it keeps). Latency: records of 1 KiB at 100 a
second for `--seconds` in each round, linger 0. CPU is that of all processes of a broker, user and system. The limit is
librdkafka's mock: no log, no disk.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict

import msgspec

from kafka_broker import NAMES, PEERS, Broker, running
from kafka_load import (
    GB,
    MB,
    TITLES,
    Round,
    ack_latencies_ms,
    machine,
    percentile,
    producer,
    read,
    send,
    show,
    sizes,
    table,
    verify,
)

PEERS_TELL_S = 10.0


def turn(broker: Broker, topic: str, count: int, record_bytes: int, batch_bytes: int) -> Round:
    cpu_s = 0.0

    def begun() -> None:
        nonlocal cpu_s
        cpu_s = broker.cpu_s()

    seconds = send(producer(broker.address, batch_bytes), [topic], count, record_bytes, begun)
    cpu_s = broker.cpu_s() - cpu_s
    size = count * record_bytes
    verified = verified_in(broker, topic, count, record_bytes)
    return Round(size / seconds / MB, count / seconds, cpu_s / (size / GB), verified)


def verified_in(broker: Broker, topic: str, count: int, record_bytes: int) -> int:
    """Return the records that are read back.

    A peer may show acknowledged records late, so it is read repeatedly for a while. Missing records are reported, with
    result 0: Tansu on an S3 API returned three quarters to four fifths.
    """
    until_s = time.monotonic() + PEERS_TELL_S
    while True:
        chunks = read(broker.address, [topic])[1]
        try:
            return verify(chunks, [topic], count, record_bytes, tail=broker.name == "mock")
        except RuntimeError as error:
            if broker.name not in PEERS:
                raise RuntimeError(f"broker={broker.name}: {error}") from error
            if time.monotonic() > until_s:
                print(f"not whole: broker={broker.name}: {error}", file=sys.stderr)
                return 0
        time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record-bytes", default="100,1024")
    parser.add_argument("--batch-bytes", default="64k,1000000")
    parser.add_argument("--brokers", default="mock,memory,directory", help=f"of {','.join(NAMES)}")
    parser.add_argument("--megabytes", type=float, default=160, help="of a broker in a round; less only for a look")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of the latency in each round; 0: none")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    names = args.brokers.split(",")
    cells = [(record, batch) for record in sizes(args.record_bytes) for batch in sizes(args.batch_bytes)]
    results = []
    latencies: dict[str, list[float]] = defaultdict(list)
    if not args.json:
        print(f"machine: {machine()}; {args.rounds} rounds of {args.megabytes:g} MB: medians (least–most)")
    for record_bytes, batch_bytes in cells:
        count = int(args.megabytes * MB / record_bytes)
        rounds: dict[str, list[Round]] = defaultdict(list)
        with running(names) as brokers:
            for broker in brokers.values():
                send(producer(broker.address, batch_bytes), ["warm-up"], 20_000, 100)
            order = list(brokers.values())
            for number in range(args.rounds):
                for broker in order[number % len(order) :] + order[: number % len(order)]:
                    rounds[broker.name].append(
                        turn(broker, f"produce-{number}", count, record_bytes, batch_bytes)
                    )  # fmt: skip
                    if args.seconds and (record_bytes, batch_bytes) == cells[0]:
                        latencies[broker.name] += ack_latencies_ms(
                            broker.address, "latency", args.seconds, 100, 1024
                        )  # fmt: skip
        in_order = {name: rounds[name] for name in names if name in rounds}
        results.append({"record_bytes": record_bytes, "batch_bytes": batch_bytes, "rounds": in_order})
        if not args.json:
            print(f"\n{record_bytes} B records, batches of {batch_bytes:,} B, {count:,} records a round\n")
            show(TITLES, table(in_order, "mock"))
    if args.json:
        print(json.dumps({"machine": machine(), "cells": msgspec.to_builtins(results), "latencies_ms": latencies}))
    elif latencies:
        print("\nacknowledgement at 100 records of 1 KiB a second, ms\n")
        rows = [
            [name, *(f"{percentile(sorted(found), share):.2f}" for share in (0.5, 0.9, 0.99, 1)), f"{len(found):,}"]
            for name, found in latencies.items()
        ]
        show(("broker", "p50", "p90", "p99", "most", "records"), rows)


if __name__ == "__main__":
    main()
