"""CreatePartitions: refusals, and the visibility of new partitions to every node, client and pipeline."""

from __future__ import annotations

import struct
import time
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions
from kio.index import load_request_schema

from support.kafka.harness import Cluster, FakeBroker, RealBroker
from support.kafka.raw import ZERO, RawClient, batch, encode, nested, produce_body
from support.waiting import eventually
from tidemill.base.config.listeners import KafkaSection
from tidemill.kafka import KafkaSettings, error_codes
from tidemill.metastore.catalogue import TopicRow


def grow(
    broker: FakeBroker | RealBroker, name: str, count: int, lists: list[list[int]] | None = None, **more: Any
) -> tuple[int, str | None]:
    schema = load_request_schema(37, 3)
    element = nested(schema, "topics")
    assignments = lists and tuple(nested(element, "assignments")(broker_ids=tuple(ids)) for ids in lists)
    topics = (element(name=name, count=count, assignments=assignments),) * more.pop("times", 1)
    with RawClient(broker.port) as client:
        body = encode(schema(topics=topics, timeout=ZERO, validate_only=more.get("validate_only", False)))
        result = client.ask(37, 3, body).results[0]
        return int(result.error_code), result.error_message


REFUSALS: list[tuple[dict[str, Any], int]] = [
    ({"name": "nowhere", "count": 4}, error_codes.UNKNOWN_TOPIC_OR_PARTITION),
    ({"count": 2}, error_codes.INVALID_PARTITIONS),
    ({"count": 1}, error_codes.INVALID_PARTITIONS),
    ({"count": -1}, error_codes.INVALID_PARTITIONS),
    ({"count": 10_001}, error_codes.INVALID_PARTITIONS),
    ({"name": "captured", "count": 4}, error_codes.INVALID_PARTITIONS),
    ({"count": 3, "times": 2}, error_codes.INVALID_REQUEST),
    ({"count": 22}, error_codes.POLICY_VIOLATION),
    ({"count": 4, "lists": [[1]]}, error_codes.INVALID_REPLICA_ASSIGNMENT),
    ({"count": 4, "lists": [[1], []]}, error_codes.INVALID_REPLICA_ASSIGNMENT),
    ({"count": 4, "lists": [[1], [1, 1]]}, error_codes.INVALID_REPLICA_ASSIGNMENT),
    ({"count": 4, "lists": [[1], [77]]}, error_codes.INVALID_REPLICA_ASSIGNMENT),
]


@pytest.fixture(scope="module")
def small() -> Any:
    broker = FakeBroker(KafkaSettings(KafkaSection(partitions_max=21)))
    broker.create_topic("t", 2)
    broker.create_topic("captured", 2, kind="capture")
    yield broker
    broker.close()


@pytest.mark.parametrize(("asked", "expected"), REFUSALS, ids=str)
def test_a_growth_that_may_not_be_is_refused_by_name_and_changes_nothing(
    small: FakeBroker, asked: dict[str, Any], expected: int
) -> None:
    for validate_only in (True, False):
        code, message = grow(small, **({"name": "t"} | asked), validate_only=validate_only)
        assert (code, bool(message)) == (expected, True)
    rows = small.portal.call(small.catalogue.list(TopicRow))
    assert {row.name: row.partitions for row in rows} == {"t": 2, "captured": 2}


def test_a_growth_is_only_validated_when_asked_to(fake_broker: FakeBroker) -> None:
    fake_broker.create_topic("t", 2)
    for validate_only, after in ((True, 2), (False, 4)):
        assert grow(fake_broker, "t", 4, [[1], [1]], validate_only=validate_only) == (0, None)
        row = fake_broker.portal.call(fake_broker.catalogue.get(TopicRow, "t"))
        assert row is not None
        assert row.partitions == after


def test_a_partition_added_through_another_node_takes_the_next_record_in_its_order(fake_broker: FakeBroker) -> None:
    fake_broker.create_topic("t", 1)
    with RawClient(fake_broker.port) as client:
        client.ask(3, 1, b"\xff\xff\xff\xff")
        fake_broker.portal.call(fake_broker.catalogue.grow_topic("t", 3))
        parts: list[tuple[int, bytes | None]] = [(2, batch([b"new"])), (0, batch([b"old"])), (3, batch([b"none"]))]
        answer = client.ask(0, 3, produce_body("t", parts))
        codes = [int(p.error_code) for p in answer.responses[0].partition_responses]
        assert codes == [0, 0, error_codes.UNKNOWN_TOPIC_OR_PARTITION]


def test_clients_of_every_node_use_what_a_topic_gained_and_old_records_stay() -> None:
    cluster = Cluster("a", "b")
    try:
        admin = AdminClient({"bootstrap.servers": cluster.addresses})
        cluster.portal.call(cluster.nodes[0].catalogue.create_topic("grows", 2))
        producer = Producer({"bootstrap.servers": cluster.addresses, "topic.metadata.refresh.interval.ms": 200})
        for n in range(10):
            producer.produce("grows", str(n).encode(), partition=n % 2)
        assert producer.flush(60) == 0
        admin.create_partitions([NewPartitions("grows", 6)])["grows"].result(60)
        for node in cluster.nodes:
            with RawClient(node.port) as client:
                asked = struct.pack(">ih", 1, 5) + b"grows"
                assert len(client.ask(3, 1, asked).topics[0].partitions) == 6

        delivered: dict[int, int] = {}
        failures: list[Any] = []

        def reported(error: Any, message: Any) -> None:
            if error is not None:
                failures.append(error)
            else:
                delivered[message.partition()] = message.offset()

        deadline = time.monotonic() + 60
        while set(delivered) != set(range(6)):
            assert time.monotonic() < deadline, (delivered, failures)
            for partition in range(6):
                try:
                    producer.produce("grows", b"later", partition=partition, on_delivery=reported)
                # the producer's metadata is older, and it refreshes it
                except KafkaException as error:
                    failures.append(error)
            producer.flush(5)
        assert delivered[0] >= 5, "the records that were there stay where they are"

        consumer = Consumer({"bootstrap.servers": cluster.addresses, "group.id": "g", "auto.offset.reset": "earliest"})
        try:
            consumer.assign([TopicPartition("grows", p, 0) for p in range(6)])
            seen = set()
            while seen != set(range(6)):
                assert time.monotonic() < deadline + 60
                message = consumer.poll(1.0)
                if message is not None and message.error() is None:
                    seen.add(message.partition())
        finally:
            consumer.close()
    finally:
        cluster.close()


def test_a_configured_limit_counts_what_a_topic_has_once(fake_broker: FakeBroker) -> None:
    broker = FakeBroker(KafkaSettings(KafkaSection(partitions_max=6)))
    try:
        broker.create_topic("t", 4)
        assert grow(broker, "t", 7)[0] == error_codes.POLICY_VIOLATION
        eventually(lambda: grow(broker, "t", 6)[0] == 0)
    finally:
        broker.close()
