"""confluent-kafka (librdkafka), unmodified, against the endpoint over the real topics room."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import confluent_kafka as ck
import pytest
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, OffsetSpec

from support.kafka.confluent import consumer, produce_all, producer, read_all
from support.kafka.harness import RealBroker
from support.waiting import eventually

CODECS = ["none", "gzip", "snappy", "lz4", "zstd"]


@pytest.mark.parametrize("codec", CODECS)
def test_an_idempotent_producer_and_an_assigned_consumer_agree_on_every_record(broker: RealBroker, codec: str) -> None:
    records = [(f"k{i % 17}".encode(), f"value {i} ".encode() * 20) for i in range(2000)]
    client = producer(broker, **{"compression.type": codec, "batch.num.messages": 100})
    delivered = produce_all(client, "harbour", records)
    reader = consumer(broker)
    found = read_all(reader, "harbour", 4, len(records))
    reader.close()
    assert {p: [m.offset() for m in ms] for p, ms in found.items()} == {
        p: list(range(len(ms))) for p, ms in delivered.items()
    }
    for partition, messages in found.items():
        sent = [(m.key(), m.value(), m.offset()) for m in delivered[partition]]
        assert [(m.key(), m.value(), m.offset()) for m in messages] == sent
    assert sorted((m.key(), m.value()) for ms in found.values() for m in ms) == sorted(records)


def test_order_per_key_is_the_order_of_production(broker: RealBroker) -> None:
    records = [(f"k{i % 5}".encode(), str(i).encode()) for i in range(3000)]
    produce_all(producer(broker, **{"batch.num.messages": 20}), "ordered", records)
    reader = consumer(broker)
    found = read_all(reader, "ordered", 4, 3000)
    reader.close()
    per_key: dict[bytes, list[int]] = defaultdict(list)
    for messages in found.values():
        for message in messages:
            per_key[message.key()].append(int(message.value()))
    assert {k: v == sorted(v) and len(v) == 600 for k, v in per_key.items()} == {
        f"k{i}".encode(): True for i in range(5)
    }


def test_acks_zero_and_one_arrive_too(broker: RealBroker) -> None:
    for acks in ("0", "1"):
        client = producer(broker, **{"enable.idempotence": False, "acks": acks})
        for i in range(50):
            client.produce(f"acks-{acks}", str(i).encode())
        assert client.flush(20) == 0
        reader = consumer(broker)
        assert sum(map(len, read_all(reader, f"acks-{acks}", 4, 50).values())) == 50
        reader.close()


def test_a_consumer_seeks_and_reads_from_there(broker: RealBroker) -> None:
    broker.create_topic("seek", 1)
    produce_all(producer(broker), "seek", [(b"k", str(i).encode()) for i in range(500)])
    reader = consumer(broker)
    reader.assign([ck.TopicPartition("seek", 0, 123)])
    first = eventually(lambda: reader.poll(0.5))
    assert (first.offset(), first.value()) == (123, b"123")
    reader.seek(ck.TopicPartition("seek", 0, 490))
    assert eventually(lambda: (m := reader.poll(0.5)) is not None and m.offset() == 490)
    reader.close()


def test_offsets_for_times_are_exact_to_the_record(broker: RealBroker) -> None:
    broker.create_topic("timed", 1)
    client = producer(broker, **{"compression.type": "lz4"})
    for i in range(300):
        client.produce("timed", str(i).encode(), timestamp=1_700_000_000_000 + i * 10)
    assert client.flush(20) == 0
    reader = consumer(broker)
    asked = [ck.TopicPartition("timed", 0, 1_700_000_000_000 + 1234)]
    assert reader.offsets_for_times(asked, timeout=30)[0].offset == 124
    late = [ck.TopicPartition("timed", 0, 1_800_000_000_000)]
    assert reader.offsets_for_times(late, timeout=30)[0].offset == ck.OFFSET_END
    assert reader.get_watermark_offsets(ck.TopicPartition("timed", 0), timeout=30) == (0, 300)
    reader.close()


def test_an_offset_out_of_range_is_told(broker: RealBroker) -> None:
    broker.create_topic("short", 1)
    produce_all(producer(broker), "short", [(b"k", b"v")])
    reader = consumer(broker, **{"auto.offset.reset": "error"})
    reader.assign([ck.TopicPartition("short", 0, 1000)])
    message = eventually(lambda: reader.poll(0.5))
    assert message.error().code() in (ck.KafkaError._AUTO_OFFSET_RESET, ck.KafkaError.OFFSET_OUT_OF_RANGE)
    reader.close()


WAIT_S = 30


def test_a_waiting_consumer_hears_of_a_record_at_once(broker: RealBroker) -> None:
    broker.create_topic("live", 1)
    reader = consumer(broker, **{"fetch.wait.max.ms": 1000 * WAIT_S})
    reader.assign([ck.TopicPartition("live", 0, 0)])
    assert reader.poll(1.0) is None
    client = producer(broker, **{"linger.ms": 0})
    produce_all(client, "live", [(b"warm", b"up")])
    eventually(lambda: reader.poll(0.5))
    began = time.monotonic()
    produce_all(client, "live", [(b"k", b"now")])
    assert eventually(lambda: reader.poll(0.5)).value() == b"now"
    assert time.monotonic() - began < WAIT_S
    reader.close()


def test_committed_offsets_survive_and_serve_an_assign_without_offsets(broker: RealBroker) -> None:
    broker.create_topic("kept", 2)
    produce_all(producer(broker), "kept", [(str(i).encode(), b"v") for i in range(100)])
    reader = consumer(broker)
    reader.assign([ck.TopicPartition("kept", 0)])
    committed = reader.commit(
        offsets=[ck.TopicPartition("kept", 0, 7), ck.TopicPartition("kept", 1, 3)], asynchronous=False
    )
    assert all(p.error is None for p in committed)
    reader.close()
    broker.restart()
    reader = consumer(broker)
    found = reader.committed([ck.TopicPartition("kept", 0), ck.TopicPartition("kept", 1)], timeout=30)
    assert [p.offset for p in found] == [7, 3]
    reader.assign([ck.TopicPartition("kept", 0)])
    assert eventually(lambda: reader.poll(0.5)).offset() == 7
    reader.close()


def test_topics_written_by_capture_can_be_read_but_not_produced_to(broker: RealBroker) -> None:
    broker.create_topic("orders", 1, kind="capture")
    errors: list[Any] = []
    client = producer(broker, **{"enable.idempotence": False})
    client.produce("orders", b"v", on_delivery=lambda error, _: errors.append(error))
    client.flush(10)
    assert errors[0].code() == ck.KafkaError.TOPIC_AUTHORIZATION_FAILED
    reader = consumer(broker)
    assert reader.get_watermark_offsets(ck.TopicPartition("orders", 0), timeout=30) == (0, 0)
    reader.close()


def test_a_large_batch_travels_whole(broker: RealBroker) -> None:
    value = bytes(range(256)) * 8000
    client = producer(broker, **{"message.max.bytes": 10_000_000})
    produce_all(client, "large", [(b"a", value), (b"a", value[::-1])])
    reader = consumer(broker)
    found = read_all(reader, "large", 4, 2)
    reader.close()
    assert [m.value() for ms in found.values() for m in ms] == [value, value[::-1]]


def test_the_admin_client_creates_describes_and_deletes(broker: RealBroker) -> None:
    admin = AdminClient({"bootstrap.servers": broker.address})
    created = admin.create_topics(
        [NewTopic("made", 3, 1, config={"retention.ms": "60000"}), NewTopic("bad name", 1, 1)]
    )
    created["made"].result(30)
    with pytest.raises(ck.KafkaException) as refused:
        created["bad name"].result(30)
    assert refused.value.args[0].code() == ck.KafkaError.TOPIC_EXCEPTION
    with pytest.raises(ck.KafkaException) as again:
        admin.create_topics([NewTopic("made", 3, 1)])["made"].result(30)
    assert again.value.args[0].code() == ck.KafkaError.TOPIC_ALREADY_EXISTS
    assert len(admin.list_topics("made", timeout=30).topics["made"].partitions) == 3
    resource = ConfigResource(ConfigResource.Type.TOPIC, "made")
    configs = admin.describe_configs([resource])[resource].result(30)
    assert configs["retention.ms"].value == "60000"
    assert configs["cleanup.policy"].value == "delete"
    latest = admin.list_offsets({ck.TopicPartition("made", 0): OffsetSpec.latest()})
    assert next(iter(latest.values())).result(30).offset == 0
    cluster = admin.describe_cluster().result(30)
    assert [node.port for node in cluster.nodes] == [broker.port]
    admin.delete_topics(["made"])["made"].result(30)
    assert "made" not in admin.list_topics(timeout=30).topics


def test_a_topic_made_anew_elsewhere_takes_the_next_record(broker: RealBroker) -> None:
    """The endpoint does not notice the deletion and re-creation: its cached row has the id of the deleted topic."""
    from tidemill.metastore.catalogue import TopicRow

    broker.create_topic("again", 1)
    client = producer(broker, **{"topic.metadata.refresh.fast.interval.ms": 50})
    produce_all(client, "again", [(b"k", b"old")])
    broker.portal.call(broker.catalogue.delete(TopicRow, "again"))
    broker.create_topic("again", 1)
    broker.portal.call(broker.topics.refresh())
    produce_all(producer(broker), "again", [(b"k", b"new")])
    reader = consumer(broker)
    found = read_all(reader, "again", 1, 1)
    reader.close()
    assert [(m.offset(), m.value()) for m in found[0]] == [(0, b"new")]


def test_an_unknown_topic_is_an_error_when_creation_is_off() -> None:
    from tidemill.base.config.listeners import KafkaSection
    from tidemill.kafka import KafkaSettings

    broker = RealBroker(settings=KafkaSettings(KafkaSection(auto_create_topics=False)))
    try:
        errors: list[Any] = []
        client = producer(broker, **{"message.timeout.ms": 3000})
        client.produce("nowhere", b"v", on_delivery=lambda error, _: errors.append(error))
        client.flush(10)
        assert errors and errors[0].code() in (ck.KafkaError._UNKNOWN_TOPIC, ck.KafkaError._MSG_TIMED_OUT)
        assert "nowhere" not in AdminClient({"bootstrap.servers": broker.address}).list_topics(timeout=30).topics
    finally:
        broker.close()
