"""Readers of the chaos lane: one at read_committed that follows throughout, and two libraries that read
everything at the end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import confluent_kafka as ck

from chaos_judge import Place, Stored
from chaos_thread import Worker

READ_S = 240.0


def ends_of(addresses: str, places: Sequence[Place]) -> dict[Place, int]:
    """Return the ends of the partitions, including uncommitted records."""
    consumer = ck.Consumer(
        {"bootstrap.servers": addresses, "group.id": "judge", "isolation.level": "read_uncommitted", "log_level": 0}
    )
    try:
        return {place: consumer.get_watermark_offsets(ck.TopicPartition(*place), timeout=30)[1] for place in places}
    finally:
        consumer.close()


def read_with_librdkafka(addresses: str, places: Sequence[Place]) -> dict[Place, list[Stored]]:
    """Return all committed records present now, once their transactions are decided. Raises TimeoutError."""
    ends = ends_of(addresses, places)
    consumer = ck.Consumer(
        {
            "bootstrap.servers": addresses,
            "group.id": "judge",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
            "log_level": 0,
        }
    )
    found: dict[Place, list[Stored]] = {place: [] for place in places}
    consumer.assign([ck.TopicPartition(*place, 0) for place in places])
    left, until_s = {place for place, end in ends.items() if end}, time.monotonic() + READ_S
    try:
        while left:
            if time.monotonic() > until_s:
                raise TimeoutError(f"not read to the end: {sorted(left)}")
            for message in consumer.consume(1_000, 0.5):
                place = message.topic(), message.partition()
                error = message.error()
                if error is None:
                    found[place].append(Stored(message.offset(), message.value().decode()))
                elif error.code() == ck.KafkaError._PARTITION_EOF and message.offset() >= ends[place]:
                    left.discard(place)
    finally:
        consumer.close()
    return found


def read_with_kafka_python(addresses: str, places: Sequence[Place]) -> dict[Place, list[Stored]]:
    """The same. Raises TimeoutError."""
    from kafka.structs import TopicPartition

    from kafka import KafkaConsumer

    consumer = KafkaConsumer(
        bootstrap_servers=addresses.split(","), enable_auto_commit=False, isolation_level="read_committed"
    )
    found: dict[Place, list[Stored]] = {place: [] for place in places}
    asked = [TopicPartition(*place) for place in places]
    consumer.assign(asked)
    ends = ends_of(addresses, places)
    for place in asked:
        consumer.seek(place, 0)
    until_s = time.monotonic() + READ_S
    try:
        while any(consumer.position(place) < ends[place.topic, place.partition] for place in asked):
            if time.monotonic() > until_s:
                raise TimeoutError("kafka-python does not come to the end")
            for place, messages in consumer.poll(timeout_ms=500).items():
                found[place.topic, place.partition] += [Stored(m.offset, m.value.decode()) for m in messages]
    finally:
        consumer.close()
    return found


class CommittedReader(Worker):
    """Follows a topic at read_committed from its start, all the while."""

    def __init__(self, addresses: str, topic: str, partitions: int) -> None:
        super().__init__("reader")
        self.seen: dict[Place, list[Stored]] = {(topic, partition): [] for partition in range(partitions)}
        self._consumer = ck.Consumer(
            {
                "bootstrap.servers": addresses,
                "group.id": "reader",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "auto.offset.reset": "error",
                "socket.timeout.ms": 3_000,
                "reconnect.backoff.max.ms": 200,
                "log_level": 0,
            }
        )
        self._consumer.assign([ck.TopicPartition(topic, partition, 0) for partition in range(partitions)])

    @property
    def count(self) -> int:
        return sum(map(len, self.seen.values()))

    def progress(self) -> str:
        return f"{self.count} seen"

    def _run(self) -> None:
        while not self._stop.is_set():
            for message in self._consumer.consume(500, 0.3):
                if message.error() is not None:
                    self.failed.append(str(message.error()))
                    continue
                place = message.topic(), message.partition()
                self.seen[place].append(Stored(message.offset(), message.value().decode()))
        self._consumer.close()
