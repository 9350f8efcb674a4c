"""Producers and consumers of librdkafka."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import confluent_kafka as ck

from support.kafka.harness import RealBroker


def producer(broker: RealBroker, **config: Any) -> ck.Producer:
    return ck.Producer(
        {"bootstrap.servers": broker.address, "enable.idempotence": True, "acks": "all", "linger.ms": 5, **config}
    )


def consumer(broker: RealBroker, **config: Any) -> ck.Consumer:
    return ck.Consumer(
        {"bootstrap.servers": broker.address, "group.id": "readers", "enable.auto.commit": False, **config}
    )


def produce_all(client: ck.Producer, topic: str, records: list[tuple[bytes, bytes]]) -> dict[int, list[Any]]:
    """Partition → delivered messages in delivery order; every report must be a success with an offset."""
    delivered: dict[int, list[Any]] = defaultdict(list)
    failures: list[Any] = []

    def report(error: Any, message: Any) -> None:
        if error is not None:
            failures.append(error)
        else:
            delivered[message.partition()].append(message)

    for key, value in records:
        client.produce(topic, key=key, value=value, on_delivery=report)
        client.poll(0)
    assert client.flush(30) == 0
    assert failures == []
    return delivered


def read_all(client: ck.Consumer, topic: str, partitions: int, count: int) -> dict[int, list[Any]]:
    client.assign([ck.TopicPartition(topic, p, ck.OFFSET_BEGINNING) for p in range(partitions)])
    found: dict[int, list[Any]] = defaultdict(list)
    deadline = time.monotonic() + 30
    while sum(map(len, found.values())) < count and time.monotonic() < deadline:
        for message in client.consume(200, 0.05):
            assert message.error() is None
            found[message.partition()].append(message)
    return found
