"""AlterConfigs, IncrementalAlterConfigs and DescribeConfigs, by raw requests and by clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from support.kafka.harness import FakeBroker, RealBroker
from support.kafka.raw import BROKER, TOPIC, alter, described
from tidemill.kafka import error_codes
from tidemill.metastore.catalogue import Catalogue, TopicRow
from tidemill.topics.config.alter import AlterOp

SET, DELETE, APPEND, SUBTRACT = AlterOp.SET, AlterOp.DELETE, AlterOp.APPEND, AlterOp.SUBTRACT
THROTTLED = "leader.replication.throttled.replicas"


def config_of(broker: FakeBroker | RealBroker, name: str = "t") -> dict[str, str]:
    row = broker.portal.call(broker.catalogue.get(TopicRow, name))
    assert row is not None
    return dict(row.config)


def test_configs_are_set_deleted_and_their_lists_grow_and_shrink(fake_broker: FakeBroker) -> None:
    fake_broker.create_topic("t", 1, config={"retention.ms": "5", "segment.ms": "9"})
    assert alter(fake_broker, [("retention.ms", SET, "77"), ("segment.ms", DELETE, None), (THROTTLED, SET, "0:1")]) == 0
    assert config_of(fake_broker) == {"retention.ms": "77", THROTTLED: "0:1"}
    assert alter(fake_broker, [(THROTTLED, APPEND, "0:1,1:1, 2:1")]) == 0
    assert config_of(fake_broker)[THROTTLED] == "0:1,1:1,2:1"
    assert alter(fake_broker, [(THROTTLED, SUBTRACT, "1:1,7:7")]) == 0
    assert config_of(fake_broker)[THROTTLED] == "0:1,2:1"
    assert alter(fake_broker, [("retention.ms", SET, "1")], validate_only=True) == 0
    assert config_of(fake_broker)["retention.ms"] == "77"
    assert alter(fake_broker, [("max.message.bytes", SET, "5000")], key=33, version=2) == 0
    assert config_of(fake_broker) == {"max.message.bytes": "5000"}, "the named ones are all there are"
    assert alter(fake_broker, []) == 0
    assert alter(fake_broker, [], key=33, version=0) == 0
    assert config_of(fake_broker) == {}


def test_deleting_a_config_that_is_not_set_changes_nothing_whatever_its_name(fake_broker: FakeBroker) -> None:
    """MirrorMaker 2 does this with every default of a source, which may be an older Kafka."""
    fake_broker.create_topic("t", 1, config={"segment.ms": "9"})
    deleted: list[tuple[str, int, str | None]] = [
        (name, DELETE, None)
        for name in ("message.format.version", "message.downconversion.enable", "no.such", "retention.ms")
    ]
    for validate_only in (True, False):
        assert alter(fake_broker, [("max.message.bytes", SET, "5000"), *deleted], validate_only=validate_only) == 0
    assert config_of(fake_broker) == {"segment.ms": "9", "max.message.bytes": "5000"}
    for name in ("1", ""):
        assert alter(fake_broker, deleted, kind=BROKER, name=name) == 0
        changes = [*deleted, ("num.partitions", SET, "9")]
        assert alter(fake_broker, changes, kind=BROKER, name=name) == error_codes.INVALID_REQUEST


REFUSED: list[tuple[list[tuple[str, int, str | None]], int]] = [
    ([("no.such", SET, "1")], error_codes.INVALID_CONFIG),
    ([("no.such", DELETE, None), ("no.such", SET, "1")], error_codes.INVALID_REQUEST),
    ([("no.such", DELETE, None), ("no.other", SET, "1")], error_codes.INVALID_CONFIG),
    ([("no.such", APPEND, "1")], error_codes.INVALID_CONFIG),
    ([("retention.ms", APPEND, "1")], error_codes.INVALID_CONFIG),
    ([("remote.storage.enable", SET, "true")], error_codes.INVALID_CONFIG),
    ([("compression.type", SET, "brotli")], error_codes.INVALID_CONFIG),
    ([("cleanup.policy", APPEND, "archive")], error_codes.INVALID_CONFIG),
    ([("segment.ms", SET, "7"), ("retention.ms", SET, "never")], error_codes.INVALID_CONFIG),
    ([("retention.ms", SET, None)], error_codes.INVALID_REQUEST),
    ([("retention.ms", 9, "1")], error_codes.INVALID_REQUEST),
    ([("retention.ms", SET, "1"), ("retention.ms", SET, "2")], error_codes.INVALID_REQUEST),
]


@pytest.mark.parametrize(("changes", "expected"), REFUSED, ids=str)
def test_what_may_not_be_set_is_refused_whole(
    fake_broker: FakeBroker, changes: list[tuple[str, int, str | None]], expected: int
) -> None:
    fake_broker.create_topic("t", 1, config={"retention.ms": "5"})
    for validate_only in (True, False):
        assert alter(fake_broker, changes, validate_only=validate_only) == expected
    assert config_of(fake_broker) == {"retention.ms": "5"}


def test_the_configs_of_a_captured_topic_stay_though_it_was_a_clients_when_it_was_checked(
    fake_broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    created = fake_broker.create_topic("t", 1)
    change = Catalogue.change_topic

    async def overtaken(catalogue: Catalogue, name: str, altered: Callable[[TopicRow], TopicRow]) -> TopicRow:
        await catalogue.delete_topic(created)  # through another node
        await catalogue.create_topic("t", 1, kind="capture")
        return await change(catalogue, name, altered)

    monkeypatch.setattr(Catalogue, "change_topic", overtaken)
    assert alter(fake_broker, [("retention.ms", SET, "1")]) == error_codes.POLICY_VIOLATION
    assert config_of(fake_broker) == {}


def test_resources_that_are_not_served_are_refused(fake_broker: FakeBroker) -> None:
    fake_broker.create_topic("t", 1)
    fake_broker.create_topic("captured", 1, kind="capture")
    change: list[tuple[str, int, str | None]] = [("retention.ms", SET, "1")]
    for key, version in ((33, 2), (44, 1)):
        for kind, name, expected in (
            (TOPIC, "nowhere", error_codes.UNKNOWN_TOPIC_OR_PARTITION),
            (TOPIC, "", error_codes.INVALID_REQUEST),
            (TOPIC, "captured", error_codes.POLICY_VIOLATION),
            (16, "x", error_codes.INVALID_REQUEST),
            (99, "x", error_codes.INVALID_REQUEST),
            (BROKER, "77", error_codes.INVALID_REQUEST),
            (BROKER, "1", error_codes.INVALID_CONFIG),
        ):
            assert alter(fake_broker, change, key=key, version=version, kind=kind, name=name) == expected, name
        assert alter(fake_broker, change, key=key, version=version, times=2) == error_codes.INVALID_REQUEST
        static: list[tuple[str, int, str | None]] = [("num.partitions", SET, "9")]
        for name in ("1", ""):
            got = alter(fake_broker, static, key=key, version=version, kind=BROKER, name=name)
            assert got == error_codes.INVALID_REQUEST
        assert alter(fake_broker, [], key=key, version=version, kind=BROKER, name="1") == 0
    assert config_of(fake_broker) == config_of(fake_broker, "captured") == {}


def test_a_config_that_is_older_than_the_checks_can_be_taken_away(fake_broker: FakeBroker) -> None:
    fake_broker.create_topic("t", 1, config={"gone.long.ago": "1", "remote.storage.enable": "true"})
    assert alter(fake_broker, [("retention.ms", SET, "5")]) == 0
    assert alter(fake_broker, [("gone.long.ago", DELETE, None)]) == 0
    assert config_of(fake_broker) == {"remote.storage.enable": "true", "retention.ms": "5"}
    shown = {c.name: c.value for c in described(fake_broker, TOPIC, "t").configs}
    assert (shown["remote.storage.enable"], shown["retention.ms"]) == ("false", "5")


def test_configs_are_described_with_sources_synonyms_types_and_what_they_mean(fake_broker: FakeBroker) -> None:
    fake_broker.create_topic("t", 1, config={"retention.ms": "5"})
    found = {c.name: c for c in described(fake_broker, TOPIC, "t", ("retention.ms", "segment.bytes", "none")).configs}
    assert set(found) == {"retention.ms", "segment.bytes"}
    own, default = found["retention.ms"], found["segment.bytes"]
    assert (own.value, int(own.config_source), int(own.config_type), own.read_only) == ("5", 1, 5, False)
    assert [(s.name, s.value, int(s.source)) for s in own.synonyms] == [
        ("retention.ms", "5", 1), ("log.retention.ms", "-1", 5)
    ]  # fmt: skip
    assert (default.value, int(default.config_source)) == (str(1 << 30), 5)
    assert "segment files" in default.documentation
    broker = described(fake_broker, BROKER, "1")
    values = {c.name: c for c in broker.configs}
    assert values["node.id"].value == "1" and values["num.partitions"].value == "4"
    assert "kafka.default_partitions" in values["num.partitions"].documentation
    assert all(c.read_only and c.synonyms for c in broker.configs)
    assert {"message.max.bytes", "log.retention.ms", "auto.create.topics.enable", "delete.topic.enable"} <= set(values)
    assert int(described(fake_broker, BROKER, "77").error_code) == error_codes.INVALID_REQUEST
    empty = described(fake_broker, BROKER, "")
    assert (int(empty.error_code), empty.configs) == (0, ())


def test_a_client_alters_a_live_topic_which_has_followed_when_that_is_answered(broker: RealBroker) -> None:
    admin = AdminClient({"bootstrap.servers": broker.address})
    broker.create_topic("t", 1)
    producer = Producer({"bootstrap.servers": broker.address, "message.max.bytes": 10_000_000})
    answers: list[Any] = []

    def send(size: int) -> Any:
        producer.produce("t", b"x" * size, on_delivery=lambda error, message: answers.append((error, message)))
        assert producer.flush(60) == 0
        return answers.pop()

    def change(name: str, value: str) -> None:
        entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, "t", incremental_configs=[entry])
        admin.incremental_alter_configs([resource])[resource].result(30)

    assert send(5000)[0] is None
    change("max.message.bytes", "2000")
    assert send(5000)[0] is not None
    change("message.timestamp.type", "LogAppendTime")
    error, message = send(10)
    assert error is None and message.timestamp()[0] == 2  # TIMESTAMP_LOG_APPEND_TIME
    with pytest.raises(KafkaException, match=r"remote\.storage\.enable"):
        change("remote.storage.enable", "true")
    change("compression.type", "zstd")
    assert send(1_000_000)[0] is None, "a million times the same is small enough as it is stored"
    assert config_of(broker)["message.timestamp.type"] == "LogAppendTime"
