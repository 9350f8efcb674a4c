"""One worker that reads, writes and commits in transactions, in a separate process that a test kills or stops.

usage: transforming_member.py CLIENT ADDRESSES GROUP SOURCE TARGET NAME

Every record of SOURCE goes to the same partition of TARGET, with the group's offsets in the same transaction. One JSON
object a line: {"assigned": [partitions]} after every change, {"did": count} after a commit, {"failed": why} otherwise.
SIGTERM makes it leave.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))  # the packages of tests

from support.kafka.groups.member_process import HEARTBEAT_MS, SESSION_MS, Leave, say

TRANSACTION_MS = 4_000
READING = {
    "enable_auto_commit": False,
    "auto_offset_reset": "earliest",
    "isolation_level": "read_committed",
    "session_timeout_ms": SESSION_MS,
    "heartbeat_interval_ms": HEARTBEAT_MS,
}
"""Options with the same name in kafka-python's and aiokafka's consumers."""
WAIT_S = 30
OVERDUE_S = 5
"""kafka-python drops a request whose node refuses the connection, and then waits for its answer without end."""


def with_confluent(addresses: str, group: str, source: str, target: str, name: str) -> None:
    import confluent_kafka as ck

    consumer = ck.Consumer(
        {
            "bootstrap.servers": addresses,
            "group.id": group,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "session.timeout.ms": SESSION_MS,
            "heartbeat.interval.ms": HEARTBEAT_MS,
            "partition.assignment.strategy": "cooperative-sticky",
        }
    )

    def reported(*_: Any) -> None:
        say(assigned=sorted(p.partition for p in consumer.assignment()))

    def once(producer: ck.Producer) -> None:
        found = [message for message in consumer.consume(10, 0.2) if not message.error()]
        if not found:
            return
        producer.begin_transaction()
        for message in found:
            producer.produce(target, message.value(), partition=message.partition())
        ends = {message.partition(): message.offset() + 1 for message in found}
        offsets = [ck.TopicPartition(source, partition, end) for partition, end in ends.items()]
        producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata(), WAIT_S)
        producer.commit_transaction(WAIT_S)
        say(did=len(found))

    def rewind() -> None:
        """Seek to the committed offsets of the partitions that are still assigned."""
        for place in consumer.committed(consumer.assignment(), WAIT_S):
            with contextlib.suppress(ck.KafkaException):  # revoked in the meantime
                consumer.seek(ck.TopicPartition(source, place.partition, max(0, place.offset)))

    consumer.subscribe([source], on_assign=reported, on_revoke=reported, on_lost=reported)
    while not Leave.asked:
        try:
            producer = ck.Producer(
                {
                    "bootstrap.servers": addresses,
                    "transactional.id": name,
                    "transaction.timeout.ms": TRANSACTION_MS,
                    "message.timeout.ms": TRANSACTION_MS,
                    "log_level": 0,
                }
            )
            producer.init_transactions(WAIT_S)
            while not Leave.asked:
                try:
                    once(producer)
                except ck.KafkaException as error:
                    say(failed=str(error))
                    if not error.args[0].txn_requires_abort():
                        raise
                    producer.abort_transaction(WAIT_S)
                    rewind()
        except ck.KafkaException as error:
            # Its outcome is known once the next producer of the id has begun.
            say(failed=str(error))
            with contextlib.suppress(ck.KafkaException):
                rewind()
    consumer.close()


def with_kafka_python(addresses: str, group: str, source: str, target: str, name: str) -> None:
    from kafka.errors import KafkaError, KafkaTimeoutError
    from kafka.structs import OffsetAndMetadata

    from kafka import ConsumerRebalanceListener, KafkaConsumer, KafkaProducer

    consumer = KafkaConsumer(bootstrap_servers=addresses.split(","), group_id=group, **READING)

    class Listener(ConsumerRebalanceListener):
        def on_partitions_assigned(self, assigned: Any) -> None:
            say(assigned=sorted(p.partition for p in consumer.assignment()))

        def on_partitions_revoked(self, revoked: Any) -> None:
            say(assigned=sorted(p.partition for p in consumer.assignment() - set(revoked)))

    def overdue(*_: Any) -> None:
        raise KafkaTimeoutError("no answer")

    signal.signal(signal.SIGALRM, overdue)

    def once(producer: KafkaProducer) -> None:
        found = consumer.poll(timeout_ms=200, max_records=10)
        if not found:
            return
        signal.alarm(OVERDUE_S)
        producer.begin_transaction()
        for place, messages in found.items():
            for message in messages:
                producer.send(target, message.value, partition=place.partition)
        offsets = {p: OffsetAndMetadata(messages[-1].offset + 1, "", -1) for p, messages in found.items()}
        producer.send_offsets_to_transaction(offsets, consumer.group_metadata())
        producer.commit_transaction()
        signal.alarm(0)
        say(did=sum(map(len, found.values())))

    def rewind() -> None:
        for place in consumer.assignment():
            consumer.seek(place, consumer.committed(place) or 0)

    consumer.subscribe([source], listener=Listener())
    while not Leave.asked:
        producer = KafkaProducer(
            bootstrap_servers=addresses.split(","),
            transactional_id=name,
            transaction_timeout_ms=TRANSACTION_MS,
            max_block_ms=OVERDUE_S * 1000,
        )
        try:
            producer.init_transactions()
            rewind()
            while not Leave.asked:
                try:
                    once(producer)
                except KafkaTimeoutError:
                    raise
                except KafkaError as error:
                    say(failed=repr(error))
                    signal.alarm(OVERDUE_S)
                    producer.abort_transaction()
                    signal.alarm(0)
                    rewind()
        except KafkaError as error:
            # Its outcome is known once the next producer of the id has begun.
            say(failed=repr(error))
        finally:
            signal.alarm(0)
            with contextlib.suppress(KafkaError):  # what it could not send in this second
                producer.close(timeout=1)
    consumer.close()


def with_aiokafka(addresses: str, group: str, source: str, target: str, name: str) -> None:
    """Run with one producer per partition, without a group generation, as before KIP-447: its id fences its
    predecessor.
    """
    from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener, TopicPartition
    from aiokafka.errors import KafkaError

    producers: dict[int, AIOKafkaProducer] = {}
    busy = asyncio.Lock()
    """A producer that is stopped within its commit never returns from it."""
    consumer: AIOKafkaConsumer

    async def forget(partition: int) -> None:
        with contextlib.suppress(KafkaError):
            await producers.pop(partition).stop()

    class Listener(ConsumerRebalanceListener):
        async def on_partitions_assigned(self, assigned: Any) -> None:
            say(assigned=sorted(p.partition for p in assigned))

        async def on_partitions_revoked(self, revoked: Any) -> None:
            async with busy:
                for partition in list(producers):
                    await forget(partition)
            say(assigned=[])

    async def producer_of(place: TopicPartition) -> AIOKafkaProducer | None:
        """Return the producer of a partition, or None if it was just created: its predecessor may have committed
        the fetched records.
        """
        if place.partition in producers:
            return producers[place.partition]
        producer = AIOKafkaProducer(
            bootstrap_servers=addresses,
            transactional_id=f"{group}-{place.partition}",
            transaction_timeout_ms=TRANSACTION_MS,
        )
        producers[place.partition] = producer
        await producer.start()
        consumer.seek(place, await consumer.committed(place) or 0)
        return None

    async def once(place: TopicPartition, messages: list[Any]) -> None:
        producer = await producer_of(place)
        if producer is None:
            return
        async with producer.transaction():
            for message in messages:
                await producer.send(target, message.value, partition=place.partition)
            await producer.send_offsets_to_transaction({place: messages[-1].offset + 1}, group)
        say(did=len(messages))

    async def main() -> None:
        nonlocal consumer
        consumer = AIOKafkaConsumer(bootstrap_servers=addresses, group_id=group, **READING)
        consumer.subscribe([source], listener=Listener())
        await consumer.start()
        while not Leave.asked:
            for place, messages in (await consumer.getmany(timeout_ms=200, max_records=10)).items():
                async with busy:
                    try:
                        await once(place, messages)
                    except KafkaError as error:
                        say(failed=repr(error))
                        await forget(place.partition)
        for partition in list(producers):
            await forget(partition)
        await consumer.stop()

    asyncio.run(main())


CLIENTS = {"confluent": with_confluent, "kafka-python": with_kafka_python, "aiokafka": with_aiokafka}

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: setattr(Leave, "asked", True))
    CLIENTS[sys.argv[1]](*sys.argv[2:])
