"""Load and checks that `produce.py`, `consume.py` and `steady.py` share."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import confluent_kafka as ck
import msgspec

PARTITIONS = 4
GB = 1e9
MB = 1e6
MOCK_BYTES_PER_PARTITION = 5 << 20
"""librdkafka's mock keeps at most this much of a partition."""

READ_S = 300.0


class Round(msgspec.Struct):
    """One broker's part of one round. CPU is that of all of the broker's processes."""

    mb_per_s: float
    records_per_s: float
    cpu_s_per_gb: float
    verified: int = 0


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


def value_of(record_bytes: int) -> bytes:
    """Return the bytes that follow the eight bytes of a record's number."""
    return (bytes(range(256)) * (record_bytes // 256 + 1))[: record_bytes - 8]


def send(
    client: ck.Producer, topics: Sequence[str], count: int, record_bytes: int, begun: Callable[[], None] | None = None
) -> float:
    """Produce records 0 … count − 1 over `topics` and their partitions in turn, each with its number in front; seconds
    until all are acknowledged. The first one of each partition goes ahead, so that topics are there, leaders known and
    the producer's id given before the time begins; `begun` is called then."""
    padding = value_of(record_bytes)
    places = [(topic, partition) for topic in topics for partition in range(PARTITIONS)]
    ahead = min(len(places), count)
    for number, (topic, partition) in enumerate(places[:ahead]):
        client.produce(topic, number.to_bytes(8, "big") + padding, partition=partition)
    _flushed(client)
    if begun is not None:
        begun()
    began = time.perf_counter()
    for number in range(ahead, count):
        value = number.to_bytes(8, "big") + padding
        topic, partition = places[number % len(places)]
        while True:
            try:
                client.produce(topic, value, partition=partition)
                break
            except BufferError:
                client.poll(0.01)
        if not number & 1023:
            client.poll(0)
    _flushed(client)
    return time.perf_counter() - began


def _flushed(client: ck.Producer) -> None:
    if left := client.flush(300):
        raise RuntimeError(f"not acknowledged: records={left}")


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


def read(address: str, topics: Sequence[str]) -> tuple[float, list[list[Any]]]:
    """Read all that the topics hold, from their starts, in one pass: seconds and the messages as they came. The time
    begins with the assignment, when the partitions' ends are known."""
    client = consumer(address)
    try:
        places = [ck.TopicPartition(topic, partition) for topic in topics for partition in range(PARTITIONS)]
        wanted = 0
        for place in places:
            low, high = client.get_watermark_offsets(place, timeout=20)
            place.offset, wanted = low, wanted + high - low
        chunks: list[list[Any]] = []
        began = time.perf_counter()
        client.assign(places)
        while wanted > 0 and time.perf_counter() < began + READ_S:
            messages = client.consume(10_000, 0.5)
            wanted -= len(messages)
            chunks.append(messages)
        return time.perf_counter() - began, chunks
    finally:
        client.close()


def verify(chunks: list[list[Any]], topics: Sequence[str], count: int, record_bytes: int, *, tail: bool = False) -> int:
    """Every record once, in order, whole: the number verified, or RuntimeError. `tail`: of a broker that forgets, the
    last ones of each partition."""
    padding = value_of(record_bytes)
    places = {place: first for first, place in enumerate((t, p) for t in topics for p in range(PARTITIONS))}
    following: dict[tuple[str, int], int] = {} if tail else {place: first for place, first in places.items()}
    verified = 0
    for messages in chunks:
        for message in messages:
            place = (message.topic(), message.partition())
            value = message.value()
            number = int.from_bytes(value[:8], "big")
            if number != following.setdefault(place, number) or value[8:] != padding:
                raise RuntimeError(f"a record differs: place={place} found={number} expected={following[place]}")
            following[place] = number + len(places)
        verified += len(messages)
    wrong = [
        place
        for place, first in places.items()
        if first < count and not count <= following.get(place, -1) < count + len(places)
    ]
    if wrong:
        raise RuntimeError(f"records are missing, or too many: places={wrong} verified={verified} of={count}")
    return verified


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


def shown(values: list[float]) -> str:
    """Median, least and most."""
    return f"{statistics.median(values):.3g} ({min(values):.3g}–{max(values):.3g})"


TITLES = ("broker", "MB/s", "to the limit", "k records/s", "CPU-s/GB", "verified")


def table(rounds: dict[str, list[Round]], limit: str) -> list[list[str]]:
    """A row a broker: medians (least–most); the ratio to the limit is taken within each round."""
    rows = []
    for name, found in rounds.items():
        ratios = [
            own.mb_per_s / its.mb_per_s for own, its in zip(found, rounds[limit], strict=True)
        ] if limit in rounds else []  # fmt: skip
        rows.append(
            [
                name,
                shown([one.mb_per_s for one in found]),
                shown(ratios) if ratios else "–",
                shown([one.records_per_s / 1000 for one in found]),
                shown([one.cpu_s_per_gb for one in found]),
                f"{sum(one.verified for one in found):,}",
            ]
        )
    return rows


def show(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print("| " + " | ".join(titles) + " |")
    print("|" + "---|" * len(titles))
    for row in rows:
        print("| " + " | ".join(row) + " |")


def sizes(text: str) -> list[int]:
    """`100,1024` or `64k,1000000`."""
    return [int(float(word[:-1]) * 1024) if word.endswith("k") else int(word) for word in text.split(",") if word]
