"""A transactional producer, and the values that consumers see."""

from __future__ import annotations

from typing import Any

import confluent_kafka as ck

from support.waiting import eventually

DEADLINE_S = 60

QUIET = {"log_level": 0}


def producer(address: str, transactional_id: str, **more: Any) -> ck.Producer:
    client = ck.Producer({"bootstrap.servers": address, "transactional.id": transactional_id, **QUIET, **more})
    client.init_transactions(DEADLINE_S)
    return client


def shown(address: str, topic: str, partitions: int, *, committed: bool = True) -> list[bytes]:
    """Return all records that a consumer gets up to the end of each partition, sorted."""
    level = "read_committed" if committed else "read_uncommitted"
    client = ck.Consumer(
        {
            "bootstrap.servers": address,
            "group.id": "reader",
            "isolation.level": level,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            **QUIET,
        }
    )
    client.assign([ck.TopicPartition(topic, index, 0) for index in range(partitions)])
    values: list[bytes] = []
    ended: set[int] = set()

    def more() -> bool:
        for message in client.consume(1000, 0.2):
            if message.error() is None:
                values.append(message.value())
                ended.discard(message.partition())
            elif message.error().code() == ck.KafkaError._PARTITION_EOF:
                ended.add(message.partition())
        return len(ended) == partitions

    eventually(more)
    client.close()
    return sorted(values)
