"""A member of a group of the chaos lane, in a separate process: it reads, commits, and prints the answers.

    python benchmarks/chaos_member.py CLIENT ASSIGNOR BOOTSTRAP GROUP TOPICS

ASSIGNOR is range or cooperative-sticky, or consumer for the protocol with assignment by the broker (KIP-848).

Lines of JSON on standard output: `{"got": [topic, partition, first, last]}`;
`{"reported": [began_s, ended_s, topic, partition, offset, found]}` for an acknowledged commit and, with `found`, for
the offset that a new owner requested. Times are of the machine's monotonic clock. SIGTERM: it leaves.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from typing import Any

from chaos_load import REQUEST_S
from chaos_thread import end_with_parent

SESSION_MS = 6_000
HEARTBEAT_MS = 500
ASK_S = 5.0
AT_ONCE = 500


class Leave:
    asked = False


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def say_got(topic: str, partition: int, offsets: Iterable[int]) -> None:
    """Consecutive offsets as one."""
    first = last = -1
    for offset in offsets:
        if offset != last + 1 or first < 0:
            if first >= 0:
                say(got=[topic, partition, first, last])
            first = offset
        last = offset
    if first >= 0:
        say(got=[topic, partition, first, last])


def called(group: str) -> str:
    """Return the name of the member in a group's description."""
    return f"{group}-{os.getpid()}"


def with_confluent(assignor: str, addresses: str, group: str, topics: list[str]) -> None:
    import confluent_kafka as ck

    own: dict[str, Any] = {"group.protocol": "consumer"}  # its broker assigns, and names the intervals
    if assignor != "consumer":
        own = {
            "partition.assignment.strategy": assignor,
            "session.timeout.ms": SESSION_MS,
            "heartbeat.interval.ms": HEARTBEAT_MS,
        }
    consumer = ck.Consumer(
        {
            "bootstrap.servers": addresses,
            "group.id": group,
            "client.id": called(group),
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "socket.timeout.ms": int(REQUEST_S * 1000),
            "reconnect.backoff.max.ms": 200,
            "log_level": 0,
            **own,
        }
    )
    new: set[tuple[str, int]] = set()
    owed: dict[tuple[str, int], int] = {}
    """Read and not committed yet: where the broker assigns, a member whose commit fails may keep what it has."""

    def gained(_: Any, partitions: Any) -> None:
        new.update((p.topic, p.partition) for p in partitions)

    def lost(_: Any, partitions: Any) -> None:
        gone = {(p.topic, p.partition) for p in partitions}
        new.difference_update(gone)
        for place in gone & owed.keys():
            del owed[place]

    consumer.subscribe(topics, on_assign=gained, on_revoke=lost, on_lost=lost)
    while not Leave.asked:
        messages = [m for m in consumer.consume(AT_ONCE, 0.2) if m.error() is None]
        if new:
            began_s = time.monotonic()
            try:
                found = consumer.committed([ck.TopicPartition(*place) for place in new], ASK_S)
            except ck.KafkaException:
                found = []
            for each in found:
                if each.error is None:
                    say(reported=[began_s, time.monotonic(), each.topic, each.partition, max(each.offset, -1), True])
                    new.discard((each.topic, each.partition))
        by_place: dict[tuple[str, int], list[int]] = {}
        for message in messages:
            by_place.setdefault((message.topic(), message.partition()), []).append(message.offset())
        for (topic, partition), offsets in by_place.items():
            say_got(topic, partition, offsets)
            owed[topic, partition] = offsets[-1] + 1
        if not owed:
            continue
        began_s = time.monotonic()
        wanted = [ck.TopicPartition(*place, offset) for place, offset in owed.items()]
        try:
            done = consumer.commit(offsets=wanted, asynchronous=False)
        except ck.KafkaException:
            continue  # without an answer, or of an earlier generation: the next owner reads it again
        for each in done:
            if each.error is None:
                say(reported=[began_s, time.monotonic(), each.topic, each.partition, each.offset, False])
                owed.pop((each.topic, each.partition), None)
    stood = {f"{p.topic}/{p.partition}": p.offset for p in consumer.position(consumer.assignment())}
    print(f"{called(group)} leaves, and stood at {stood}", file=sys.stderr)
    consumer.close()


def with_kafka_python(assignor: str, addresses: str, group: str, topics: list[str]) -> None:
    from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor
    from kafka.coordinator.assignors.range import RangePartitionAssignor
    from kafka.errors import KafkaError
    from kafka.structs import OffsetAndMetadata

    from kafka import ConsumerRebalanceListener, KafkaConsumer

    consumer = KafkaConsumer(
        bootstrap_servers=addresses.split(","),
        group_id=group,
        client_id=called(group),
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        session_timeout_ms=SESSION_MS,
        heartbeat_interval_ms=HEARTBEAT_MS,
        request_timeout_ms=2 * SESSION_MS,
        reconnect_backoff_max_ms=200,
        max_poll_records=AT_ONCE,
        partition_assignment_strategy=[RangePartitionAssignor if assignor == "range" else CooperativeStickyAssignor],
    )
    new: set[Any] = set()

    class Listener(ConsumerRebalanceListener):
        def on_partitions_assigned(self, assigned: Any) -> None:
            new.update(assigned)

        def on_partitions_revoked(self, revoked: Any) -> None:
            new.difference_update(revoked)

    consumer.subscribe(topics, listener=Listener())
    while not Leave.asked:
        try:
            polled = consumer.poll(timeout_ms=200)
        except KafkaError as error:
            # Of a node that has just gone, retriable by its own flag: an application polls again.
            if not error.retriable:
                raise
            continue
        for place in list(new):
            began_s = time.monotonic()
            try:
                found = consumer.committed(place)
            except KafkaError:
                continue
            offset = -1 if found is None else int(found)
            say(reported=[began_s, time.monotonic(), place.topic, place.partition, offset, True])
            new.discard(place)
        if not polled:
            continue
        for place, messages in polled.items():
            say_got(place.topic, place.partition, [m.offset for m in messages])
        began_s = time.monotonic()
        wanted = {place: OffsetAndMetadata(m[-1].offset + 1, "", -1) for place, m in polled.items()}
        try:
            consumer.commit(wanted)
        except KafkaError:
            continue
        for place, each in wanted.items():
            say(reported=[began_s, time.monotonic(), place.topic, place.partition, each.offset, False])
    consumer.close()


def with_aiokafka(assignor: str, addresses: str, group: str, topics: list[str]) -> None:
    from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener
    from aiokafka.coordinator.assignors.range import RangePartitionAssignor
    from aiokafka.errors import KafkaError

    new: set[Any] = set()

    class Listener(ConsumerRebalanceListener):
        def on_partitions_assigned(self, assigned: Any) -> None:
            new.update(assigned)

        def on_partitions_revoked(self, revoked: Any) -> None:
            new.clear()

    async def main() -> None:
        assert assignor == "range"  # it has no cooperative one
        consumer = AIOKafkaConsumer(
            bootstrap_servers=addresses,
            group_id=group,
            client_id=called(group),
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            session_timeout_ms=SESSION_MS,
            heartbeat_interval_ms=HEARTBEAT_MS,
            request_timeout_ms=2 * SESSION_MS,
            partition_assignment_strategy=[RangePartitionAssignor],
        )
        consumer.subscribe(topics, listener=Listener())
        await consumer.start()
        while not Leave.asked:
            polled = await consumer.getmany(timeout_ms=200, max_records=AT_ONCE)
            for place in list(new):
                began_s = time.monotonic()
                try:
                    async with asyncio.timeout(ASK_S):
                        offset = await consumer.committed(place)
                except (KafkaError, TimeoutError):
                    continue
                offset = -1 if offset is None else offset
                say(reported=[began_s, time.monotonic(), place.topic, place.partition, offset, True])
                new.discard(place)
            wanted = {}
            for place, messages in polled.items():
                say_got(place.topic, place.partition, [m.offset for m in messages])
                wanted[place] = messages[-1].offset + 1
            if not wanted:
                continue
            began_s = time.monotonic()
            try:
                await consumer.commit(wanted)
            except KafkaError:
                continue
            for place, offset in wanted.items():
                say(reported=[began_s, time.monotonic(), place.topic, place.partition, offset, False])
        await consumer.stop()

    asyncio.run(main())


CLIENTS = {"confluent": with_confluent, "kafka-python": with_kafka_python, "aiokafka": with_aiokafka}

if __name__ == "__main__":
    end_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: setattr(Leave, "asked", True))
    client, assignor, addresses, group, topics = sys.argv[1:]
    CLIENTS[client](assignor, addresses, group, topics.split(","))
