"""Consume: librdkafka reads a topic from its start out of tidemill (directory + SQLite, and memory), beside its mock.

    python benchmarks/consume.py [--records N] [--record-bytes B] [--batch-bytes B] [--passes P] [--json]

Method: 4 partitions are filled first (idempotent, acks=all, uncompressed); then one Python consumer assigns all of
them at their start and reads to the end, P times, from the broker's cache where it fits; every record of the first
pass is checked (once, in order, whole). CPU is the broker process's while reading. The mock keeps 5 MiB a
partition, so it is filled with that much and read as often as it takes to move the same bytes.
"""

from __future__ import annotations

import argparse
import json
import tempfile

import msgspec

from kafka_broker import Broker, running
from kafka_load import (
    GB,
    MOCK_BYTES_PER_PARTITION,
    PARTITIONS,
    Rate,
    consumer,
    machine,
    producer,
    read,
    send,
    show,
    verify,
)

TOPIC = "consume"


def measure(name: str, broker: Broker, args: argparse.Namespace, records: int, passes: int, *, check: bool) -> Rate:
    send(producer(broker.address, args.batch_bytes), TOPIC, 0, records, args.record_bytes)
    client = consumer(broker.address)
    cpu_before = broker.cpu_s()
    count, size, seconds, first = read(client, TOPIC, passes)
    cpu_s = broker.cpu_s() - cpu_before
    client.close()
    verified = verify(first, records, args.record_bytes) if check else 0
    return Rate(
        name,
        count,
        seconds,
        size / seconds / 1e6,
        count / seconds,
        cpu_s / (size / GB),
        broker.peak_mb(),
        verified,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--record-bytes", type=int, default=1024)
    parser.add_argument("--batch-bytes", type=int, default=262_144)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rates = []
    kept = int(MOCK_BYTES_PER_PARTITION * PARTITIONS * 0.7) // args.record_bytes
    with running("mock") as broker:
        records = min(kept, args.records)
        passes = max(1, args.passes * args.records // records)
        rates.append(measure("mock (limit)", broker, args, records, passes, check=False))
    with running("tidemill", "memory:", "memory:") as broker:
        rates.append(measure("tidemill memory", broker, args, args.records, args.passes, check=True))
    with (
        tempfile.TemporaryDirectory(prefix="tidemill-bench-") as directory,
        running("tidemill", f"file://{directory}/objects", f"sqlite://{directory}/consensus.db") as broker,
    ):
        rates.append(measure("tidemill directory", broker, args, args.records, args.passes, check=True))
    if args.json:
        print(json.dumps({"machine": machine(), "rates": msgspec.to_builtins(rates)}))
        return
    print(f"machine: {machine()}")
    print(f"{args.records:,} records of {args.record_bytes} B, batches of {args.batch_bytes:,} B, {args.passes} passes")
    show(rates)
    for rate in rates[1:]:
        print(f"{rate.name}: {rate.mb_per_s / rates[0].mb_per_s:.2f} of the mock's throughput")


if __name__ == "__main__":
    main()
