"""Produce: idempotent librdkafka into tidemill (directory + SQLite, and memory), beside its own C mock cluster.

    python benchmarks/produce.py [--records N] [--record-bytes B] [--batch-bytes B] [--seconds S] [--json]

Method: one Python client process, one broker process, 4 partitions, acks=all, linger 20 ms, no compression.
Throughput: N records as fast as the client can, timed until the last acknowledgement; then every record is
read back and checked (once, in order, whole; the mock keeps only 5 MiB a partition, so its records are not).
Latency: 100 records of 1 KiB a second for S seconds, linger 0. CPU is the broker process's, user and system.
The limit is librdkafka's mock: C, memory only, no log, the same client in the same run.
"""

from __future__ import annotations

import argparse
import json
import tempfile

import msgspec

from kafka_broker import Broker, running
from kafka_load import (
    GB,
    Rate,
    ack_latencies_ms,
    consumer,
    machine,
    percentile,
    producer,
    read,
    send,
    show,
    verify,
)

TOPIC = "produce"


def measure(name: str, broker: Broker, args: argparse.Namespace, *, check: bool) -> Rate:
    send(producer(broker.address, args.batch_bytes), "warm-up", 0, 2_000, 100)
    cpu_before = broker.cpu_s()
    seconds = send(producer(broker.address, args.batch_bytes), TOPIC, 0, args.records, args.record_bytes)
    cpu_s = broker.cpu_s() - cpu_before
    size = args.records * args.record_bytes
    rate = Rate(
        name,
        args.records,
        seconds,
        size / seconds / 1e6,
        args.records / seconds,
        cpu_s / (size / GB),
        broker.peak_mb(),
    )
    if check:
        reader = consumer(broker.address)
        rate.verified = verify(read(reader, TOPIC)[3], args.records, args.record_bytes)
        reader.close()
    latencies = ack_latencies_ms(broker.address, "latency", args.seconds, 100, 1024)
    rate.p50_ms, rate.p99_ms = percentile(latencies, 0.5), percentile(latencies, 0.99)
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=200_000)
    parser.add_argument("--record-bytes", type=int, default=1024)
    parser.add_argument("--batch-bytes", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rates = []
    with running("mock") as broker:
        rates.append(measure("mock (limit)", broker, args, check=False))
    with running("tidemill", "memory:", "memory:") as broker:
        rates.append(measure("tidemill memory", broker, args, check=True))
    with (
        tempfile.TemporaryDirectory(prefix="tidemill-bench-") as directory,
        running("tidemill", f"file://{directory}/objects", f"sqlite://{directory}/consensus.db") as broker,
    ):
        rates.append(measure("tidemill directory", broker, args, check=True))
    if args.json:
        print(json.dumps({"machine": machine(), "rates": msgspec.to_builtins(rates)}))
        return
    print(f"machine: {machine()}")
    print(f"{args.records:,} records of {args.record_bytes} B, batches of {args.batch_bytes:,} B, idempotent, acks=all")
    show(rates)
    for rate in rates[1:]:
        print(f"{rate.name}: {rate.mb_per_s / rates[0].mb_per_s:.2f} of the mock's throughput")


if __name__ == "__main__":
    main()
