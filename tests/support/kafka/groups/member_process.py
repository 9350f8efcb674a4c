"""One consumer of a group in a separate process, which a test kills or stops: prints its assignments and reads.

usage: member_process.py CLIENT STRATEGY ADDRESSES GROUP TOPIC [INSTANCE]

STRATEGY `consumer` is the consumer protocol (KIP-848), in which a topic that begins with ^ is a pattern.
`SESSION_MS` in the environment: the session of a member of the classic protocol.
One JSON object a line: {"assigned": [partitions]} after every change, {"got": [partition, offset]} once the record's
offset is committed, or {"unsure": …} if the outcome is unknown. SIGTERM makes it leave.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

SESSION_MS = int(os.environ.get("SESSION_MS", "2000"))
HEARTBEAT_MS = 300


class Leave:
    asked = False


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def with_confluent(strategy: str, addresses: str, group: str, topic: str, instance: str) -> None:
    import confluent_kafka as ck

    config = {
        "bootstrap.servers": addresses,
        "group.id": group,
        "enable.auto.commit": False,
        "auto.offset.reset": "earliest",
        "topic.metadata.refresh.interval.ms": 500,
    }
    if strategy == "consumer":
        config |= {"group.protocol": "consumer"}
    else:
        config |= {
            "session.timeout.ms": SESSION_MS,
            "heartbeat.interval.ms": HEARTBEAT_MS,
            "partition.assignment.strategy": {"cooperative": "cooperative-sticky", "eager": "range"}[strategy],
        }
    consumer = ck.Consumer({**config, **({"group.instance.id": instance} if instance else {})})
    held: set[int] = set()

    def gained(_: Any, partitions: Any) -> None:
        held.update(p.partition for p in partitions)
        say(assigned=sorted(held))

    def lost(_: Any, partitions: Any) -> None:
        held.difference_update(p.partition for p in partitions)
        say(assigned=sorted(held))

    consumer.subscribe([topic], on_assign=gained, on_revoke=lost, on_lost=lost)
    while not Leave.asked:
        message = consumer.poll(0.1)
        if message is None or message.error():
            continue
        try:
            consumer.commit(message=message, asynchronous=False)
        except ck.KafkaException:
            say(unsure=[message.partition(), message.offset()])
            if message.partition() in held:
                # Read it again, while it is assigned to this member.
                consumer.seek(ck.TopicPartition(message.topic(), message.partition(), message.offset()))
            continue
        say(got=[message.partition(), message.offset()], topic=message.topic())
    consumer.close()


def with_kafka_python(strategy: str, addresses: str, group: str, topic: str, instance: str) -> None:
    from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor
    from kafka.coordinator.assignors.range import RangePartitionAssignor
    from kafka.errors import KafkaError

    from kafka import ConsumerRebalanceListener, KafkaConsumer

    consumer = KafkaConsumer(
        bootstrap_servers=addresses.split(","),
        group_id=group,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        session_timeout_ms=SESSION_MS,
        heartbeat_interval_ms=HEARTBEAT_MS,
        partition_assignment_strategy=[
            CooperativeStickyAssignor if strategy == "cooperative" else RangePartitionAssignor
        ],
        **({"group_instance_id": instance} if instance else {}),
    )

    class Listener(ConsumerRebalanceListener):
        def on_partitions_assigned(self, assigned: Any) -> None:
            say(assigned=sorted(p.partition for p in consumer.assignment()))

        def on_partitions_revoked(self, revoked: Any) -> None:
            left = {p.partition for p in consumer.assignment()} - {p.partition for p in revoked}
            say(assigned=sorted(left))

    consumer.subscribe([topic], listener=Listener())
    while not Leave.asked:
        # A poll that ends while its SyncGroup is under way drops the assignment (kafka-python 3.0.12): not a short one.
        for messages in consumer.poll(timeout_ms=2_000, max_records=20).values():
            try:
                consumer.commit()
            except KafkaError:
                continue
            for message in messages:
                say(got=[message.partition, message.offset])
    consumer.close()


def with_aiokafka(strategy: str, addresses: str, group: str, topic: str, instance: str) -> None:
    from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener
    from aiokafka.errors import KafkaError

    class Listener(ConsumerRebalanceListener):
        def on_partitions_assigned(self, assigned: Any) -> None:
            say(assigned=sorted(p.partition for p in assigned))

        def on_partitions_revoked(self, revoked: Any) -> None:
            say(assigned=[])

    async def main() -> None:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=addresses,
            group_id=group,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            session_timeout_ms=SESSION_MS,
            heartbeat_interval_ms=HEARTBEAT_MS,
            **({"group_instance_id": instance} if instance else {}),
        )
        consumer.subscribe([topic], listener=Listener())
        await consumer.start()
        while not Leave.asked:
            for place, messages in (await consumer.getmany(timeout_ms=100, max_records=20)).items():
                try:
                    await consumer.commit({place: messages[-1].offset + 1})
                except KafkaError:
                    continue
                for message in messages:
                    say(got=[message.partition, message.offset])
        await consumer.stop()

    asyncio.run(main())


CLIENTS = {"confluent": with_confluent, "kafka-python": with_kafka_python, "aiokafka": with_aiokafka}

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: setattr(Leave, "asked", True))
    client, *rest, instance = [*sys.argv[1:], ""][:6]
    CLIENTS[client](*rest, instance)  # type: ignore[arg-type]
