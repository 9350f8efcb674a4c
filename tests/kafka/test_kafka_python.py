"""kafka-python 3, unmodified, against the endpoint over the real topics room."""

from __future__ import annotations

from typing import Any

import pytest
from kafka.admin import NewTopic
from kafka.errors import TopicAlreadyExistsError

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from support.kafka.harness import RealBroker


def read(broker: RealBroker, partitions: list[TopicPartition], count: int, **config: Any) -> list[Any]:
    consumer = KafkaConsumer(
        bootstrap_servers=broker.address,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        consumer_timeout_ms=15_000,
        **config,
    )
    consumer.assign(partitions)
    consumer.seek_to_beginning(*partitions)
    found = []
    for message in consumer:
        found.append(message)
        if len(found) == count:
            break
    consumer.close()
    return found


@pytest.mark.parametrize("codec", [None, "gzip", "lz4"])
def test_produce_and_consume_with_the_codecs_it_has_libraries_for(broker: RealBroker, codec: str | None) -> None:
    broker.create_topic("python", 2)
    producer = KafkaProducer(
        bootstrap_servers=broker.address, acks="all", enable_idempotence=True, compression_type=codec, linger_ms=5
    )
    futures = [producer.send("python", key=str(i % 7).encode(), value=f"v{i}".encode() * 10) for i in range(500)]
    producer.flush(20)
    reports = [future.get(10) for future in futures]
    producer.close()
    found = read(broker, [TopicPartition("python", p) for p in range(2)], 500)
    assert sorted((m.partition, m.offset) for m in found) == sorted((r.partition, r.offset) for r in reports)
    by_place = {(m.partition, m.offset): (m.key, m.value) for m in found}
    for i, report in enumerate(reports):
        assert by_place[report.partition, report.offset] == (str(i % 7).encode(), f"v{i}".encode() * 10)


def test_headers_timestamps_and_seek(broker: RealBroker) -> None:
    broker.create_topic("headers", 1)
    producer = KafkaProducer(bootstrap_servers=broker.address)
    for i in range(20):
        producer.send("headers", value=str(i).encode(), headers=[("h", b"x")], timestamp_ms=1_700_000_000_000 + i)
    producer.flush(10)
    producer.close()
    place = TopicPartition("headers", 0)
    consumer = KafkaConsumer(bootstrap_servers=broker.address, enable_auto_commit=False, consumer_timeout_ms=10_000)
    consumer.assign([place])
    assert consumer.beginning_offsets([place]) == {place: 0}
    assert consumer.end_offsets([place]) == {place: 20}
    assert consumer.offsets_for_times({place: 1_700_000_000_011})[place].offset == 11
    consumer.seek(place, 15)
    first = next(consumer)
    assert (first.offset, first.value, first.headers, first.timestamp) == (
        15,
        b"15",
        [("h", b"x")],
        1_700_000_000_015,
    )
    consumer.close()


def test_the_admin_client(broker: RealBroker) -> None:
    admin = KafkaAdminClient(bootstrap_servers=broker.address)
    admin.create_topics([NewTopic("made", 3, 1)])
    with pytest.raises(TopicAlreadyExistsError):
        admin.create_topics([NewTopic("made", 3, 1)])
    assert "made" in admin.list_topics()
    assert len(admin.describe_topics(["made"])[0]["partitions"]) == 3
    assert len(admin.describe_cluster()["brokers"]) == 1
    admin.delete_topics(["made"])
    assert "made" not in admin.list_topics()
    admin.close()


def test_the_broker_is_taken_for_a_recent_kafka(broker: RealBroker) -> None:
    admin = KafkaAdminClient(bootstrap_servers=broker.address)
    assert admin._manager.broker_version >= (4, 0)
    admin.close()
