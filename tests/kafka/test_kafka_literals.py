"""Answers that clients take literally: topics that were deleted and re-created, ids, defaults, refusals."""

from __future__ import annotations

import dataclasses
import struct
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic, ResourceType
from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader

from support.kafka.harness import RealBroker
from support.kafka.raw import RawClient, decode, encode, example, fields, nested
from support.kafka.session_reader import Fetcher
from tidemill.kafka import error_codes, handlers
from tidemill.kafka.schema.codec_compiler import decode_request, encode_response
from tidemill.metastore.catalogue import TopicRow

HOUR_MS = 3_600_000


@pytest.fixture
def raw(shared: RealBroker) -> Iterator[RawClient]:
    with RawClient(shared.port) as client:
        yield client


def delete(broker: RealBroker, name: str) -> None:
    """Delete the topic as another node would, without invalidating this node's cache."""
    broker.portal.call(broker.catalogue.delete(TopicRow, name))
    broker.portal.call(broker.topics.refresh())


def list_offsets(client: RawClient, name: str, partition: int = 0) -> tuple[int, int]:
    schema = load_request_schema(2, 5)
    topic = nested(schema, "topics")
    asked = fields(nested(topic, "partitions"), partition_index=partition, timestamp=-1, current_leader_epoch=-1)
    body = encode(
        fields(schema, replica_id=-1, isolation_level=0, topics=(fields(topic, name=name, partitions=(asked,)),))
    )
    found = client.ask(2, 5, body).topics[0].partitions[0]
    return int(found.error_code), found.offset


def test_the_first_fetch_by_the_id_of_a_topic_that_was_created_again_is_unknown_topic_id(shared: RealBroker) -> None:
    row = shared.create_topic("again-by-id", 2)
    with Fetcher(shared.port, [row]) as reader:
        assert reader.fetch({("again-by-id", 0): 0}).reported["again-by-id", 0].code == error_codes.NONE
        delete(shared, "again-by-id")
        shared.create_topic("again-by-id", 2)
        assert reader.fetch({("again-by-id", 0): 0}).reported["again-by-id", 0].code == error_codes.UNKNOWN_TOPIC_ID


def test_the_first_answers_about_a_topic_that_does_not_exist_are_unknown_topic_or_partition(
    shared: RealBroker, raw: RawClient
) -> None:
    row = shared.create_topic("gone-by-name", 1)
    with Fetcher(shared.port, [row], version=12) as reader:
        assert reader.fetch({("gone-by-name", 0): 0}).reported["gone-by-name", 0].code == error_codes.NONE
        assert list_offsets(raw, "gone-by-name") == (error_codes.NONE, 0)
        delete(shared, "gone-by-name")
        reported = reader.fetch({("gone-by-name", 0): 0, ("never-there", 3): 0}).reported
        assert {each.code for each in reported.values()} == {error_codes.UNKNOWN_TOPIC_OR_PARTITION}
    assert list_offsets(raw, "gone-by-name") == (error_codes.UNKNOWN_TOPIC_OR_PARTITION, -1)
    assert list_offsets(raw, "never-there-either") == (error_codes.UNKNOWN_TOPIC_OR_PARTITION, -1)


def test_offsets_of_a_topic_that_was_created_again_are_those_of_the_new_one(shared: RealBroker, raw: RawClient) -> None:
    shared.create_topic("again-by-name", 1)
    produced = Producer({"bootstrap.servers": shared.address})
    produced.produce("again-by-name", b"v", partition=0)
    assert produced.flush(30) == 0
    assert list_offsets(raw, "again-by-name") == (error_codes.NONE, 1)
    delete(shared, "again-by-name")
    shared.create_topic("again-by-name", 1)
    assert list_offsets(raw, "again-by-name") == (error_codes.NONE, 0)


def test_the_first_answers_about_a_partition_that_does_not_exist_are_unknown_topic_or_partition(
    shared: RealBroker, raw: RawClient
) -> None:
    row = shared.create_topic("narrow", 2)
    with Fetcher(shared.port, [row]) as reader:
        assert reader.fetch({("narrow", 7): 0}).reported["narrow", 7].code == error_codes.UNKNOWN_TOPIC_OR_PARTITION
    assert list_offsets(raw, "narrow", 8) == (error_codes.UNKNOWN_TOPIC_OR_PARTITION, -1)


def test_a_cluster_has_an_id_of_its_own_and_a_client_of_another_cluster_is_sent_away(shared: RealBroker) -> None:
    admin = AdminClient({"bootstrap.servers": shared.address})
    cluster_id = admin.list_topics(timeout=30).cluster_id
    assert cluster_id == shared.portal.call(shared.metastore.cluster()).uuid
    assert admin.describe_cluster().result(30).cluster_id == cluster_id
    other = RealBroker()
    try:
        with RawClient(other.port) as client:
            assert versions_code(client, None, -1) == error_codes.NONE
            assert versions_code(client, cluster_id, 1) == error_codes.REBOOTSTRAP_REQUIRED
            own = other.portal.call(other.metastore.cluster()).uuid
            assert versions_code(client, own, 1) == error_codes.NONE
            assert versions_code(client, own, 2) == error_codes.REBOOTSTRAP_REQUIRED
            assert versions_code(client, own, -1) == error_codes.INVALID_REQUEST
            assert versions_code(client, None, 1) == error_codes.INVALID_REQUEST
    finally:
        other.close()


def versions_code(client: RawClient, cluster_id: str | None, node_id: int) -> int:
    """ApiVersions 5 (KIP-1242), whose response has the layout of version 4."""

    def compact(text: str) -> bytes:
        return bytes([len(text) + 1]) + text.encode()

    body = compact("x") + compact("1") + (b"\x00" if cluster_id is None else compact(cluster_id))
    client.sock.sendall(_frame(body + struct.pack(">i", node_id) + b"\x00"))
    _, data = client.receive()
    found = decode(18, 4, data)
    assert found.api_keys
    return int(found.error_code)


def _frame(body: bytes) -> bytes:
    head = struct.pack(">hhih", 18, 5, 7, 1) + b"r" + b"\x00"
    return struct.pack(">i", len(head) + len(body)) + head + body


def test_a_throttle_that_is_not_set_is_deleted_and_another_config_of_a_broker_is_refused(shared: RealBroker) -> None:
    """kafka-reassign-partitions does this to each broker after each reassignment."""
    admin = AdminClient({"bootstrap.servers": shared.address})

    def alter(name: str, value: str | None, operation: AlterConfigOpType) -> None:
        entry = ConfigEntry(name, value or "", incremental_operation=operation)
        resource = ConfigResource(ResourceType.BROKER, "1", incremental_configs=[entry])
        admin.incremental_alter_configs([resource])[resource].result(30)

    for name in ("leader.replication.throttled.rate", "follower.replication.throttled.rate"):
        alter(name, None, AlterConfigOpType.DELETE)
    with pytest.raises(KafkaException, match="no replication between brokers"):
        alter("leader.replication.throttled.rate", "1000", AlterConfigOpType.SET)
    alter("no.such", None, AlterConfigOpType.DELETE)
    with pytest.raises(KafkaException, match="unknown broker config"):
        alter("no.such", "1", AlterConfigOpType.SET)


def test_the_metadata_of_a_topic_without_a_name_are_an_invalid_topic(raw: RawClient) -> None:
    for version in (1, 9):
        asked = fields(nested(load_request_schema(3, version), "topics"), name="")
        may = {"allow_auto_topic_creation": False} if version > 3 else {}
        body = fields(load_request_schema(3, version), topics=(asked,), **may)
        (topic,) = raw.ask(3, version, encode(body)).topics
        assert int(topic.error_code) == error_codes.INVALID_TOPIC_EXCEPTION, version


def test_an_empty_list_of_configs_means_all_of_them(shared: RealBroker, raw: RawClient) -> None:
    shared.create_topic("configured", 1)
    resource = nested(load_request_schema(32, 4), "resources")

    def described(keys: tuple[str, ...] | None) -> list[str]:
        asked = fields(resource, resource_type=2, resource_name="configured", configuration_keys=keys)
        body = fields(
            load_request_schema(32, 4), resources=(asked,), include_synonyms=False, include_documentation=False
        )
        return [each.name for each in raw.ask(32, 4, encode(body)).results[0].configs]

    assert described(()) == described(None) != []
    assert described(("retention.ms",)) == ["retention.ms"]


def test_records_of_a_topic_that_is_only_compacted_are_not_deleted(shared: RealBroker) -> None:
    """`Partition.deleteRecordsOnLeader` refuses it: the newest record of a key would be gone."""
    admin = AdminClient({"bootstrap.servers": shared.address})
    producer = Producer({"bootstrap.servers": shared.address})
    for name, policy in (("only-compacted", "compact"), ("compacted-and-deleted", "compact,delete")):
        admin.create_topics([NewTopic(name, 1, config={"cleanup.policy": policy})])[name].result(30)
        producer.produce(name, b"v", b"k", partition=0)
        assert producer.flush(30) == 0
    place = TopicPartition("only-compacted", 0, -1)
    with pytest.raises(KafkaException) as refused:
        admin.delete_records([place])[place].result(30)
    assert refused.value.args[0].code() == error_codes.POLICY_VIOLATION
    place = TopicPartition("compacted-and-deleted", 0, -1)
    assert admin.delete_records([place])[place].result(30).low_watermark == 1


def test_a_quota_of_kafkas_that_is_not_set_is_removed(raw: RawClient) -> None:
    schema = load_request_schema(49, 1)
    entry = nested(schema, "entries")
    entity = fields(nested(entry, "entity"), entity_type="user", entity_name="u")

    def remove(key: str) -> int:
        op = fields(nested(entry, "ops"), key=key, value=0.0, remove=True)
        body = fields(schema, entries=(fields(entry, entity=(entity,), ops=(op,)),), validate_only=False)
        return int(raw.ask(49, 1, encode(body)).entries[0].error_code)

    assert remove("controller_mutation_rate") == error_codes.NONE
    assert remove("producer_byte_rate") == error_codes.NONE
    assert remove("no_such_rate") == error_codes.INVALID_REQUEST


@pytest.mark.parametrize("name", ["__consumer_offsets", "__transaction_state", "__cluster_metadata"])
def test_a_topic_with_the_name_of_an_internal_one_is_not_created(shared: RealBroker, name: str) -> None:
    admin = AdminClient({"bootstrap.servers": shared.address})
    with pytest.raises(KafkaException, match="reserved"):
        admin.create_topics([NewTopic(name, 1)])[name].result(30)
    assert name not in admin.list_topics(timeout=30).topics


def test_a_record_an_hour_ahead_of_now_is_refused_unless_its_topic_takes_it(shared: RealBroker) -> None:
    """message.timestamp.after.max.ms is one hour since Kafka 4.0 (KIP-937)."""
    admin = AdminClient({"bootstrap.servers": shared.address})
    far = {"message.timestamp.after.max.ms": str(30 * 24 * HOUR_MS)}
    created = admin.create_topics([NewTopic("near", 1), NewTopic("far", 1, config=far)])
    for future in created.values():
        future.result(30)
    resource = ConfigResource(ResourceType.TOPIC, "near")
    shown = admin.describe_configs([resource])[resource].result(30)
    assert shown["message.timestamp.after.max.ms"].value == str(HOUR_MS)

    def produce(topic: str, ahead_ms: int) -> Any:
        seen: list[Any] = []
        producer = Producer({"bootstrap.servers": shared.address})
        now_ms = shared.clock.now_ms()
        producer.produce(topic, b"v", timestamp=now_ms + ahead_ms, on_delivery=lambda error, _: seen.append(error))
        assert producer.flush(30) == 0
        return seen[0]

    assert produce("near", HOUR_MS // 2) is None
    assert produce("near", 2 * HOUR_MS).name() == "INVALID_TIMESTAMP"
    assert produce("far", 2 * HOUR_MS) is None


def test_every_refusal_has_a_text() -> None:
    """Every API and version with a field for the text sets it: librdkafka reads some of them without a null check."""
    texts = 0
    for module in vars(handlers).values():
        if not hasattr(module, "API") or not hasattr(module, "error_answer"):
            continue
        api = module.API
        for version in range(api.min_version, api.max_version + 1):
            if api.key in (17, 36):
                continue  # the mechanism defines their texts
            request = memoryview(example(api.key, version, "t", uuid.UUID(int=7)))
            refused = module.error_answer(decode_request(api.key, version, request, 0), error_codes.POLICY_VIOLATION)
            answer = decode_body(api.key, version, bytes(encode_response(api.key, version, refused)))
            texts += count_texts(answer, f"{api.name} {version}")
    assert texts > 20


def decode_body(key: int, version: int, data: bytes) -> Any:
    entity, size = entity_reader(load_response_schema(key, version))(memoryview(data), 0)
    assert size == len(data)
    return entity


def count_texts(entity: Any, where: str) -> int:
    """Count the refusals within `entity` that have a text; fail on one without."""
    if isinstance(entity, tuple):
        return sum(count_texts(each, where) for each in entity)
    if not dataclasses.is_dataclass(entity):
        return 0
    values = {field.name: getattr(entity, field.name) for field in dataclasses.fields(entity)}
    count = sum(count_texts(value, f"{where} {name}") for name, value in values.items())
    if values.get("error_code") and "error_message" in values:
        assert values["error_message"], where
        count += 1
    return count


def test_scram_credentials_that_cannot_be_read_are_refused_with_a_text(raw: RawClient, shared: RealBroker) -> None:
    """librdkafka's DescribeUserScramCredentials crashed when this text was null."""
    request = encode(fields(load_request_schema(50, 0), users=(nested(load_request_schema(50, 0), "users")(name="x"),)))
    found = raw.ask(50, 0, request)
    assert found.results[0].error_message
    admin = AdminClient({"bootstrap.servers": shared.address})
    with pytest.raises(KafkaException, match="credential"):
        admin.describe_user_scram_credentials(["x"])["x"].result(30)
