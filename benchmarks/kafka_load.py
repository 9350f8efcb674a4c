"""Load and checks that `produce.py` and `consume.py` share."""

from __future__ import annotations

import os
import platform
import time
from typing import Any

import confluent_kafka as ck
import msgspec

PARTITIONS = 4
GB = 1e9
MOCK_BYTES_PER_PARTITION = 5 << 20
"""librdkafka's mock keeps at most this much of a partition."""


class Rate(msgspec.Struct):
    """One measured run. cpu_s_per_gb is the broker process's; latencies are of acknowledgements."""

    name: str
    records: int
    seconds: float
    mb_per_s: float
    records_per_s: float
    cpu_s_per_gb: float
    peak_mb: float
    verified: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0


def machine() -> str:
    load = os.getloadavg()[0]
    return f"{platform.machine()} {os.cpu_count()} cores, load {load:.1f}, CPython {platform.python_version()}"


def producer(address: str, batch_bytes: int, linger_ms: float = 20) -> ck.Producer:
    return ck.Producer(
        {
            "bootstrap.servers": address,
            "enable.idempotence": True,
            "acks": "all",
            "linger.ms": linger_ms,
            "batch.size": batch_bytes,
            "batch.num.messages": 1_000_000,
            "queue.buffering.max.messages": 2_000_000,
            "queue.buffering.max.kbytes": 256 << 10,
            "log_level": 0,
        }
    )


def send(client: ck.Producer, topic: str, first: int, count: int, record_bytes: int) -> float:
    """Produce records `first` … `first + count − 1`, each starting with its number; seconds until all are acked."""
    padding = bytes(range(256)) * (record_bytes // 256 + 1)
    padding = padding[: record_bytes - 8]
    began = time.perf_counter()
    for number in range(first, first + count):
        value = number.to_bytes(8, "big") + padding
        while True:
            try:
                client.produce(topic, value, partition=number % PARTITIONS)
                break
            except BufferError:
                client.poll(0.01)
        if not number & 1023:
            client.poll(0)
    left = client.flush(120)
    seconds = time.perf_counter() - began
    if left:
        raise RuntimeError(f"not acknowledged: records={left}")
    return seconds


def consumer(address: str) -> ck.Consumer:
    return ck.Consumer(
        {
            "bootstrap.servers": address,
            "group.id": "benchmark",
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 100,
            "queued.max.messages.kbytes": 262_144,
            "log_level": 0,
        }
    )


def ends(client: ck.Consumer, topic: str) -> dict[int, tuple[int, int]]:
    return {p: client.get_watermark_offsets(ck.TopicPartition(topic, p), timeout=20) for p in range(PARTITIONS)}


def read(client: ck.Consumer, topic: str, passes: int = 1) -> tuple[int, int, float, dict[int, list[Any]]]:
    """Read the topic from its start `passes` times: (records, bytes, seconds, the first pass's messages)."""
    spans = ends(client, topic)
    wanted = sum(high - low for low, high in spans.values())
    records = total = 0
    first: dict[int, list[Any]] = {p: [] for p in range(PARTITIONS)}
    began = time.perf_counter()
    for turn in range(passes):
        client.assign([ck.TopicPartition(topic, p, low) for p, (low, _) in spans.items()])
        seen = 0
        deadline = time.perf_counter() + 60
        while seen < wanted and time.perf_counter() < deadline:
            messages = client.consume(10_000, 0.5)
            seen += len(messages)
            for message in messages:
                total += len(message)
                if turn == 0:
                    first[message.partition()].append(message)
        records += seen
    return records, total, time.perf_counter() - began, first


def verify(messages: dict[int, list[Any]], count: int, record_bytes: int) -> int:
    """Every record once, in order, whole: the number verified, or RuntimeError."""
    for partition, found in messages.items():
        numbers = [int.from_bytes(m.value()[:8], "big") for m in found]
        if numbers != list(range(partition, count, PARTITIONS)):
            raise RuntimeError(f"records differ: partition={partition} found={len(numbers)}")
        if any(len(m) != record_bytes for m in found):
            raise RuntimeError(f"a record changed its size: partition={partition}")
    return sum(map(len, messages.values()))


def ack_latencies_ms(address: str, topic: str, seconds: float, per_second: int, record_bytes: int) -> list[float]:
    """Sorted times from produce() to the delivery report at a steady rate, linger 0, one record at a time."""
    client = producer(address, 1_000_000, linger_ms=0)
    for partition in range(PARTITIONS):
        client.produce(topic, bytes(record_bytes), partition=partition)
    client.flush(30)
    found: list[float] = []
    count = max(int(seconds * per_second), 20)
    began = time.perf_counter()
    for number in range(count):
        due = began + number / per_second
        while (left := due - time.perf_counter()) > 0:
            client.poll(left)
        sent = time.perf_counter()
        client.produce(
            topic,
            bytes(record_bytes),
            partition=number % PARTITIONS,
            on_delivery=lambda _error, _message, sent=sent: found.append((time.perf_counter() - sent) * 1000),
        )
        client.poll(0)
    client.flush(30)
    return sorted(found)


def percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def show(rates: list[Rate]) -> None:
    titles = f"{'MB/s':>8}{'records/s':>12}{'CPU-s/GB':>10}{'peak MB':>9}{'p50 ms':>8}{'p99 ms':>8}{'verified':>10}"
    print(f"{'broker':<22}{titles}")
    for r in rates:
        print(
            f"{r.name:<22}{r.mb_per_s:>8.0f}{r.records_per_s:>12,.0f}{r.cpu_s_per_gb:>10.2f}{r.peak_mb:>9.0f}"
            f"{r.p50_ms:>8.2f}{r.p99_ms:>8.2f}{r.verified:>10,}"
        )
