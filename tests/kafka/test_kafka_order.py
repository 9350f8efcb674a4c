"""Order without a producer id, per connection and partition, as every Kafka broker guarantees it: real clients with
default settings at full rate, and a real broker process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import confluent_kafka as ck
import pytest

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from support.kafka.processes import Process

COUNT = 40_000
PARTITIONS = 2


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    process = Process(tmp_path)
    yield process
    process.kill()


def stored(process: Process, topic: str, count: int) -> dict[int, list[int]]:
    consumer = KafkaConsumer(
        bootstrap_servers=process.address,
        enable_auto_commit=False,
        consumer_timeout_ms=20_000,
        auto_offset_reset="none",
    )
    places = [TopicPartition(topic, p) for p in range(PARTITIONS)]
    consumer.assign(places)
    consumer.seek_to_beginning(*places)
    found: dict[int, list[int]] = {p: [] for p in range(PARTITIONS)}
    for message in consumer:
        found[message.partition].append(int(message.value))
        if sum(map(len, found.values())) == count:
            break
    consumer.close()
    return found


def inversions(numbers: list[int]) -> int:
    return sum(a > b for a, b in itertools.pairwise(numbers))


def expected(count: int) -> dict[int, list[int]]:
    return {p: list(range(p, count, PARTITIONS)) for p in range(PARTITIONS)}


@pytest.mark.parametrize("batch", [None, 50], ids=["its own batches", "small batches"])
def test_librdkafka_at_its_defaults_keeps_its_order(process: Process, batch: int | None) -> None:
    """The defaults of `Producer({"bootstrap.servers": …})`: no idempotence, a million requests in flight, no linger."""
    config: dict[str, object] = {"bootstrap.servers": process.address, "log_level": 0}
    client = ck.Producer(config if batch is None else {**config, "batch.num.messages": batch})
    for number in range(COUNT):
        while True:
            try:
                client.produce("ordered", str(number), partition=number % PARTITIONS)
                break
            except BufferError:
                client.poll(0.01)
        client.poll(0)
    assert client.flush(60) == 0
    found = stored(process, "ordered", COUNT)
    assert {p: inversions(numbers) for p, numbers in found.items()} == dict.fromkeys(range(PARTITIONS), 0)
    assert found == expected(COUNT)


def test_kafka_python_without_idempotence_keeps_its_order(process: Process) -> None:
    count = COUNT // 4
    client = KafkaProducer(
        bootstrap_servers=process.address, enable_idempotence=False, acks=1, batch_size=2_000, linger_ms=0
    )
    futures = [client.send("python", str(number).encode(), partition=number % PARTITIONS) for number in range(count)]
    client.flush(60)
    assert all(future.succeeded() for future in futures)
    client.close()
    found = stored(process, "python", count)
    assert {p: inversions(numbers) for p, numbers in found.items()} == dict.fromkeys(range(PARTITIONS), 0)
    assert found == expected(count)
