"""The cases of confluent-kafka-python's own integration tests: one case here for each of theirs, under the same name.

The original tests are in no source distribution, so these were written from the behaviour that they check. Waits that
depend on a broker's shortest session are shorter here, since this broker's is. docs/reference/kafka.md counts the
cases.
"""

from __future__ import annotations

import struct
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    Consumer,
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    ConsumerGroupType,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    DeletedRecords,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)

from support.kafka.harness import RealBroker
from support.kafka.security import add, confluent, gate
from tidemill.base.config.listeners import KafkaSection
from tidemill.kafka import KafkaSettings

SETTINGS = KafkaSettings(
    KafkaSection(
        group_initial_rebalance_delay_ms=0,
        group_min_session_timeout_ms=1_000,
        group_consumer_min_heartbeat_interval_ms=500,
    )
)
WAIT_S = 30.0
Allow, Deny = AclPermissionType.ALLOW, AclPermissionType.DENY
Literal, Prefixed = ResourcePatternType.LITERAL, ResourcePatternType.PREFIXED
HEADERS = [("same", "one"), ("same", "two"), ("Jämtland", "Härjedalen"), ("none", None), ("empty", ""),
           ("binary", struct.pack("hhl", 10, 20, 30))]  # fmt: skip


class Suite:
    """A broker with authorization, as in the original suite, and clients of `root`, who has all rights."""

    def __init__(self) -> None:
        self.broker = RealBroker(settings=SETTINGS, gate=gate(), super_users=("User:root",))
        for user in ("root", "alice"):
            add(self.broker, user)
        self.admin = AdminClient(self.config())

    def config(self, user: str = "root", **more: Any) -> dict[str, Any]:
        return {**confluent(self.broker, None, "PLAIN"), "sasl.username": user, **named(more)}

    def topic(self, prefix: str, partitions: int = 1, config: dict[str, str] | None = None, **how: Any) -> str:
        name = f"{prefix}-{uuid.uuid4()}"
        made = self.admin.create_topics([NewTopic(name, partitions, 1, config=config or {})], **how)
        made[name].result(WAIT_S)
        return name

    def producer(self, **more: Any) -> Producer:
        return Producer(self.config(**more))

    def consumer(self, **more: Any) -> Consumer:
        return Consumer(self.config(**{"group.id": str(uuid.uuid4()), "auto.offset.reset": "earliest", **more}))

    def seed(self, topic: str, values: Sequence[bytes] = tuple(b"v%d" % i for i in range(100))) -> None:
        producer = self.producer()
        for value in values:
            producer.produce(topic, value)
        assert producer.flush(WAIT_S) == 0


def named(config: dict[str, Any]) -> dict[str, Any]:
    return {key.replace("__", "."): value for key, value in config.items()}


@pytest.fixture(scope="module")
def suite() -> Iterator[Suite]:
    made = Suite()
    yield made
    made.broker.close()


def done(futures: dict[Any, Future[Any]]) -> list[Any]:
    return [future.result(WAIT_S) for future in futures.values()]


def polled(consumer: Consumer, within_s: float = WAIT_S) -> Message:
    message = consumer.poll(within_s)
    assert message is not None and message.error() is None, message and message.error()
    return message


def read(consumer: Consumer, count: int) -> list[Message]:
    return [polled(consumer) for _ in range(count)]


def all_of(consumer: Consumer) -> int:
    """Read records up to the end of every partition of the topic."""
    count, ended = 0, set()
    while not ended or len(ended) < len(consumer.assignment()):
        message = consumer.poll(WAIT_S)
        assert message is not None
        if message.error() is None:
            count += 1
        else:
            assert message.error().code() == KafkaError._PARTITION_EOF
            ended.add((message.topic(), message.partition()))
    return count


# admin ----------------------------------------------------------------------------------------------------------------
def test_basic_operations(suite: Suite) -> None:
    admin, config = suite.admin, {"compression.type": "gzip"}
    with_more = suite.topic("basic", 2, config, validate_only=True)
    assert with_more not in admin.list_topics(timeout=WAIT_S).topics
    topic = suite.topic("basic", 2, config)
    for found in (admin.list_topics(timeout=WAIT_S), admin.list_topics(topic, timeout=WAIT_S)):
        assert len(found.topics[topic].partitions) == 2
    done(admin.create_partitions([NewPartitions(topic, 5)]))
    assert len(admin.list_topics(timeout=WAIT_S).topics[topic].partitions) == 5

    producer = suite.producer()
    producer.produce(topic, "Hello Python!", headers=HEADERS)
    producer.produce(topic, key="a key and headers", headers=HEADERS)
    assert producer.flush(WAIT_S) == 0
    groups = [f"basic-1-{topic}", f"basic-2-{topic}"]
    for group in groups:
        consumer = suite.consumer(group__id=group, enable__auto__commit=False)
        consumer.subscribe([topic])
        for message in read(consumer, 2):
            assert dict(message.headers()) == {key: value if value is None or isinstance(value, bytes) else
                                               value.encode() for key, value in HEADERS}  # fmt: skip
            consumer.commit(message, asynchronous=False)
        consumer.close()
        assert group in {each.id for each in admin.list_groups(group, timeout=WAIT_S)}
    assert set(groups) <= {each.id for each in admin.list_groups(timeout=WAIT_S)}
    listed = admin.list_consumer_groups().result(WAIT_S)
    assert set(groups) <= {each.group_id for each in listed.valid} and not listed.errors
    stable = admin.list_consumer_groups(states={ConsumerGroupState.STABLE}).result(WAIT_S)
    assert not set(groups) & {each.group_id for each in stable.valid}
    classic = admin.list_consumer_groups(types={ConsumerGroupType.CLASSIC}).result(WAIT_S)
    assert {each.type for each in classic.valid} == {ConsumerGroupType.CLASSIC}
    _offsets(admin, topic, groups[0])
    _configs(admin, topic, config)
    _acls(admin, topic)
    for (deleted,) in (done(admin.delete_consumer_groups([group])) for group in groups):
        assert deleted is None
    assert not set(groups) & {each.group_id for each in admin.list_consumer_groups().result(WAIT_S).valid}
    done(admin.delete_topics([topic]))
    assert topic not in admin.list_topics(timeout=WAIT_S).topics


def _offsets(admin: AdminClient, topic: str, group: str) -> None:
    """List the committed offsets of a group, all and by partition, and alter them."""
    (found,) = done(admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)]))
    assert found.group_id == group and {each.topic for each in found.topic_partitions} == {topic}
    assert any(each.offset > 0 for each in found.topic_partitions)
    zero = [TopicPartition(topic, each.partition, 0) for each in found.topic_partitions]
    (altered,) = done(admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(group, zero)]))
    assert [each.offset for each in altered.topic_partitions] == [0] * len(zero)
    asked = [TopicPartition(topic, each.partition) for each in zero]
    (found,) = done(admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group, asked)]))
    assert [each.offset for each in found.topic_partitions] == [0] * len(zero)


def _configs(admin: AdminClient, topic: str, config: dict[str, str]) -> None:
    resource = ConfigResource(ResourceType.TOPIC, topic)

    def are(wanted: dict[str, str]) -> bool:
        (found,) = done(admin.describe_configs([resource]))
        return {name: found[name].value for name in wanted} == wanted

    assert are(config)
    changed = {"file.delete.delay.ms": "12345", "compression.type": "snappy"}
    for name, value in changed.items():
        resource.set_config(name, value)
    done(admin.alter_configs([resource]))
    assert are(changed)


def _acls(admin: AdminClient, topic: str) -> None:
    group = f"acls-{topic}"
    one = AclBinding(ResourceType.TOPIC, topic, Literal, "User:test-1", "*", AclOperation.READ, Allow)
    two = AclBinding(ResourceType.TOPIC, topic, Prefixed, "User:test-2", "*", AclOperation.WRITE, Deny)
    three = AclBinding(ResourceType.GROUP, group, Prefixed, "User:test-2", "*", AclOperation.ALL, Allow)
    done(admin.create_acls([one, two, three]))
    of_all = _filter(ResourceType.ANY, ResourcePatternType.ANY)
    assert sorted(admin.describe_acls(of_all).result(WAIT_S)) == sorted([one, two, three])
    prefixed = _filter(ResourceType.ANY, Prefixed)
    assert sorted(admin.delete_acls([prefixed])[prefixed].result(WAIT_S)) == sorted([two, three])
    topics, groups = (_filter(kind, ResourcePatternType.ANY) for kind in (ResourceType.TOPIC, ResourceType.GROUP))
    deleted = admin.delete_acls([topics, groups])
    assert (deleted[topics].result(WAIT_S), deleted[groups].result(WAIT_S)) == ([one], [])
    assert admin.describe_acls(of_all).result(WAIT_S) == []


def _filter(kind: ResourceType, pattern: ResourcePatternType, name: str | None = None) -> AclBindingFilter:
    return AclBindingFilter(kind, name, pattern, None, None, AclOperation.ANY, AclPermissionType.ANY)


def test_delete_records(suite: Suite) -> None:
    topic = suite.topic("deleted")
    suite.seed(topic, [b"1", b"2", b"3"])
    earliest = {TopicPartition(topic, 0): OffsetSpec.earliest()}
    assert [each.offset for each in done(suite.admin.list_offsets(earliest))] == [0]
    # Both requests are sent before either is answered.
    deleting = suite.admin.delete_records([TopicPartition(topic, 0, 2)])
    listing = suite.admin.list_offsets(earliest)
    (deleted,) = done(deleting)
    assert isinstance(deleted, DeletedRecords) and deleted.low_watermark == 2
    assert [each.offset for each in done(listing)] == [2]
    done(suite.admin.delete_topics([topic]))


def test_describe_operations(suite: Suite) -> None:
    """The original describes operations of a user without rules. Here the user may perform the operations that a rule
    allows, and no others.
    """
    topic, group = suite.topic("described"), f"described-{uuid.uuid4()}"
    suite.seed(topic, [b"1", b"2"])
    consumer = suite.consumer(group__id=group, enable__auto__commit=False)
    consumer.subscribe([topic])
    for message in read(consumer, 2):
        consumer.commit(message, asynchronous=False)
    consumer.close()
    alice = AdminClient(suite.config("alice"))

    def operations(describe: Callable[..., Any], *asked: Any) -> Any:
        def reported(**how: Any) -> Any:
            found = describe(*asked, request_timeout=WAIT_S, **how)
            return (next(iter(found.values())) if isinstance(found, dict) else found).result(WAIT_S)

        assert reported(include_authorized_operations=False).authorized_operations is None
        return reported(include_authorized_operations=True)

    for kind, name, denied, describe, asked in (
        (ResourceType.BROKER, "kafka-cluster", AclOperation.ALTER_CONFIGS, alice.describe_cluster, ()),
        (ResourceType.TOPIC, topic, AclOperation.DELETE, alice.describe_topics, (TopicCollection([topic]),)),
        (ResourceType.GROUP, group, AclOperation.DELETE, alice.describe_consumer_groups, ([group],)),
    ):
        rule = AclBinding(kind, name, Literal, "User:alice", "*", AclOperation.ALL, Allow)
        done(suite.admin.create_acls([rule]))
        assert {denied, AclOperation.DESCRIBE} <= set(operations(describe, *asked).authorized_operations)
        but = AclBinding(kind, name, Literal, "User:alice", "*", denied, Deny)
        done(suite.admin.create_acls([but]))
        found = operations(describe, *asked)
        assert denied not in found.authorized_operations and AclOperation.DESCRIBE in found.authorized_operations
        if kind is ResourceType.BROKER:
            assert isinstance(found.cluster_id, str) and found.nodes and found.controller is not None
        elif kind is ResourceType.TOPIC:
            assert (found.name, found.is_internal, len(found.partitions)) == (topic, False, 1)
            (partition,) = found.partitions
            assert (partition.id, len(partition.replicas), len(partition.isr)) == (0, 1, 1)
            assert partition.leader is not None
        else:
            assert (found.group_id, found.is_simple_consumer_group) == (group, False)
            assert found.state is ConsumerGroupState.EMPTY
        done(suite.admin.delete_acls([_filter(kind, ResourcePatternType.ANY, name)]))
    done(suite.admin.delete_consumer_groups([group]))
    done(suite.admin.delete_topics([topic]))


def test_describe_consumer_groups_compatability(suite: Suite) -> None:
    """Groups of both protocols in one request, each of its type."""
    topic = suite.topic("both")
    types = {"classic": ConsumerGroupType.CLASSIC, "consumer": ConsumerGroupType.CONSUMER}
    suite.seed(topic, [b"1"])
    groups = {f"{protocol}-{n}-{topic}": protocol for protocol in types for n in (1, 2)}
    consumers = []
    for group, protocol in groups.items():
        consumer = suite.consumer(group__id=group, client__id=f"client-of-{group}", group__protocol=protocol)
        consumer.subscribe([topic])
        polled(consumer)
        consumers.append(consumer)
    for asked in ([g for g, p in groups.items() if p == "consumer"], [g for g, p in groups.items() if p == "classic"],
                  list(groups)):  # fmt: skip
        for found in done(suite.admin.describe_consumer_groups(asked)):
            assert found.group_id in asked and found.is_simple_consumer_group is False
            assert (found.state, found.type) == (ConsumerGroupState.STABLE, types[groups[found.group_id]])
            (member,) = found.members
            assert member.client_id == f"client-of-{found.group_id}"
            assert member.assignment.topic_partitions == [TopicPartition(topic, 0)]
    for consumer in consumers:
        consumer.close()


def test_incremental_alter_configs(suite: Suite) -> None:
    """Alter configs of topics and of a group; the values described as set are the ones that were set."""
    admin = suite.admin
    Set, Delete = AlterConfigOpType.SET, AlterConfigOpType.DELETE
    one, two = (suite.topic("altered", 2, {"compression.type": "gzip"}) for _ in range(2))

    def altered(kind: ResourceType, name: str, *changes: tuple[str, str | None, AlterConfigOpType]) -> list[str]:
        entries = [ConfigEntry(key, value, incremental_operation=op) for key, value, op in changes]
        resource = ConfigResource(kind, name, incremental_configs=entries)
        assert done(admin.incremental_alter_configs([resource])) == [None]
        (found,) = done(admin.describe_configs([resource]))
        return sorted(str(entry) for entry in found.values() if not entry.is_default)

    append = ("cleanup.policy", "compact", AlterConfigOpType.APPEND)
    assert altered(ResourceType.TOPIC, one, append, ("retention.ms", "10000", Set)) == [
        'cleanup.policy="delete,compact"', 'compression.type="gzip"', 'retention.ms="10000"',
    ]  # fmt: skip
    subtract = ("cleanup.policy", "delete", AlterConfigOpType.SUBTRACT)
    assert altered(ResourceType.TOPIC, two, subtract, ("retention.ms", "5000", Set)) == [
        'cleanup.policy=""', 'compression.type="gzip"', 'retention.ms="5000"',
    ]  # fmt: skip
    delete = ("compression.type", None, Delete)
    assert altered(ResourceType.TOPIC, two, delete, ("retention.ms", "10000", Set)) == [
        'cleanup.policy=""', 'retention.ms="10000"',
    ]  # fmt: skip
    session = "consumer.session.timeout.ms"
    assert altered(ResourceType.GROUP, "test-group", (session, "50000", Set)) == [f'{session}="50000"']
    assert altered(ResourceType.GROUP, "test-group", (session, None, Delete)) == []


def test_list_offsets(suite: Suite) -> None:
    topic, base_ms = suite.topic("listed"), 1_000_000_000
    producer = suite.producer()
    for after_ms in (100, 400, 200):
        producer.produce(topic, b"v", timestamp=base_ms + after_ms)
    assert producer.flush(WAIT_S) == 0
    for how in (
        {}, {"isolation_level": IsolationLevel.READ_UNCOMMITTED}, {"request_timeout": 30},
        {"isolation_level": IsolationLevel.READ_COMMITTED, "request_timeout": 30},
    ):  # fmt: skip
        for spec, offset in (
            (OffsetSpec.earliest(), 0), (OffsetSpec.latest(), 3), (OffsetSpec.max_timestamp(), 1),
            (OffsetSpec.for_timestamp(base_ms + 150), 1),
        ):  # fmt: skip
            (found,) = done(suite.admin.list_offsets({TopicPartition(topic, 0): spec}, **how))
            assert found.offset == offset
    done(suite.admin.delete_topics([topic]))


def test_user_scram_credentials(suite: Suite) -> None:
    admin, user, short, long = suite.admin, "nobody-yet", ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512
    info = ScramCredentialInfo(short, 10_000)

    def is_missing() -> bool:
        with pytest.raises(KafkaException) as raised:
            done(admin.describe_user_scram_credentials([user]))
        return bool(raised.value.args[0].code() == KafkaError.RESOURCE_NOT_FOUND)

    assert is_missing()
    done(admin.alter_user_scram_credentials([UserScramCredentialUpsertion(user, info, b"password", b"salt")]))
    done(admin.alter_user_scram_credentials([UserScramCredentialUpsertion(user, info, b"password", b"salt")]))
    other = ScramCredentialInfo(long, 10_000)
    done(admin.alter_user_scram_credentials([UserScramCredentialUpsertion(user, other, b"password")]))
    done(admin.alter_user_scram_credentials([UserScramCredentialDeletion(user, long)]))
    everybody = [admin.describe_user_scram_credentials().result(WAIT_S),
                 admin.describe_user_scram_credentials(None).result(WAIT_S)]  # fmt: skip
    (own,) = done(admin.describe_user_scram_credentials([user]))
    for found in (own, *(each[user] for each in everybody)):
        assert [(each.mechanism, each.iterations) for each in found.scram_credential_infos] == [(short, 10_000)]
    done(admin.alter_user_scram_credentials([UserScramCredentialDeletion(user, short)]))
    assert is_missing()


# consumer -------------------------------------------------------------------------------------------------------------
def test_consume_error(suite: Suite) -> None:
    topic = suite.topic("error")
    suite.seed(topic, [b"a"])
    consumer = suite.consumer(enable__partition__eof=True)
    consumer.assign([TopicPartition(topic, 0, OFFSET_END)])
    message = consumer.poll(WAIT_S)
    assert message is not None and message.error().code() == KafkaError._PARTITION_EOF
    consumer.close()


def _failed_to_join(suite: Suite, **more: Any) -> tuple[Consumer, Message]:
    """Return a consumer whose session timeout is below the broker's minimum, and the error that it got."""
    topic = suite.topic("short")
    suite.seed(topic, [b"a"])
    consumer = suite.consumer(session__timeout__ms=100, **more)
    consumer.subscribe([topic])
    message = consumer.poll(WAIT_S)
    assert message is not None and message.error().code() == KafkaError.INVALID_SESSION_TIMEOUT
    return consumer, message


def test_consume_error_commit(suite: Suite) -> None:
    consumer, message = _failed_to_join(suite)
    with pytest.raises(KafkaException) as raised:
        consumer.commit(message)
    assert raised.value.args[0].code() == KafkaError._INVALID_ARG
    consumer.close()


def test_consume_error_store_offsets(suite: Suite) -> None:
    consumer, message = _failed_to_join(suite, enable__auto__offset__store=True, enable__auto__commit=False)
    with pytest.raises(KafkaException) as raised:
        consumer.store_offsets(message)
    assert raised.value.args[0].code() == KafkaError._INVALID_ARG
    consumer.close()


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_consumer_memberid(suite: Suite, protocol: str) -> None:
    topic = suite.topic("memberid")
    suite.seed(topic, [b"memberid"])
    consumer = suite.consumer(group__protocol=protocol)
    before = consumer.memberid()
    assert before is None if protocol == "classic" else before
    consumer.subscribe([topic])
    assert polled(consumer).value() == b"memberid"
    after = consumer.memberid()
    assert after and (protocol == "classic" or after == before)
    consumer.close()
    with pytest.raises(RuntimeError, match="Consumer closed"):
        consumer.memberid()


@pytest.mark.parametrize("assignor", ["roundrobin", "range", "cooperative-sticky"])
def test_consumer_upgrade_downgrade(suite: Suite, assignor: str) -> None:
    """A consumer of the other protocol joins and leaves: the group changes its protocol each time."""
    topic, partitions = suite.topic("upgraded", 10), 10
    config = {"group.id": topic, "heartbeat.interval.ms": 500}
    often = ConfigEntry("consumer.heartbeat.interval.ms", "500", incremental_operation=AlterConfigOpType.SET)
    done(
        suite.admin.incremental_alter_configs([ConfigResource(ResourceType.GROUP, topic, incremental_configs=[often])])
    )
    classic = suite.consumer(**config, group__protocol="classic", partition__assignment__strategy=assignor)
    classic.subscribe([topic])
    consumers = [classic]

    def all_share(protocol: ConsumerGroupType) -> None:
        deadline = time.monotonic() + WAIT_S
        while [len(each.assignment()) for each in consumers] != [partitions // len(consumers)] * len(consumers):
            assert time.monotonic() < deadline, [each.assignment() for each in consumers]
            assert not any(each.poll(0.1) for each in consumers)
        assert len({place for each in consumers for place in each.assignment()}) == partitions
        (found,) = done(suite.admin.describe_consumer_groups([topic]))
        assert found.type is protocol
        suite.seed(topic)
        read: set[tuple[int, int]] = set()
        while len(read) < 100:
            assert time.monotonic() < deadline, len(read)
            for message in filter(None, (each.poll(0.1) for each in consumers)):
                place = (message.partition(), message.offset())
                assert message.error() is None and place not in read
                read.add(place)

    all_share(ConsumerGroupType.CLASSIC)
    modern = suite.consumer(group__id=topic, group__protocol="consumer")
    modern.subscribe([topic])
    consumers.append(modern)
    all_share(ConsumerGroupType.CONSUMER)
    consumers.pop().close()
    all_share(ConsumerGroupType.CLASSIC)
    classic.close()


def test_consumer_topicpartition_metadata(suite: Suite) -> None:
    topic = suite.topic("metadata")
    consumer = suite.consumer()
    for metadata in (None, "hello world", "नमस्ते दुनिया", ""):
        place = TopicPartition(topic, 0, 1) if metadata is None else TopicPartition(topic, 0, 1, metadata)
        consumer.commit(offsets=[place], asynchronous=False)
        (found,) = consumer.committed([TopicPartition(topic, 0)], timeout=WAIT_S)
        assert (found.offset, found.metadata) == (1, metadata)
    with pytest.raises(ValueError, match="embedded null character"):
        consumer.commit(offsets=[TopicPartition(topic, 0, 1, "xyz\x00abc")], asynchronous=False)
    consumer.close()


COOPERATIVE = {
    "partition.assignment.strategy": "cooperative-sticky", "enable.auto.commit": False, "heartbeat.interval.ms": 300,
    "session.timeout.ms": 4_000, "max.poll.interval.ms": 4_000, "auto.offset.reset": "earliest",
}  # fmt: skip
POLL_TOO_LATE_S = 7.0
"""The client checks every half second whether `max.poll.interval.ms` has expired, so a poll soon after it may still be
in time.
"""


def _polls_too_late(consumer: Consumer) -> None:
    time.sleep(POLL_TOO_LATE_S)
    message = consumer.poll(WAIT_S)
    assert message is not None and message.error().code() == KafkaError._MAX_POLL_EXCEEDED


def test_cooperative_rebalance_1(suite: Suite) -> None:
    """Another topic is one more assignment. A consumer that polls too late loses all partitions and gets them again."""
    one, two = suite.topic("one"), suite.topic("two")
    reported: list[tuple[str, int]] = []
    by = {f"on_{what}": (lambda _, partitions, what=what: reported.append((what, len(partitions))))
          for what in ("assign", "revoke", "lost")}  # fmt: skip
    consumer = suite.consumer(**COOPERATIVE)
    suite.seed(one, [b"a"])
    suite.seed(two, [b"b"])  # before the first poll: a message between two polls may take long
    consumer.subscribe([one], **by)
    assert polled(consumer).value() == b"a"
    consumer.subscribe([one, two], **by)
    assert polled(consumer).value() == b"b"
    assert reported == [("assign", 1), ("assign", 1)]
    _polls_too_late(consumer)
    polled(consumer)
    assert reported == [("assign", 1), ("assign", 1), ("lost", 2), ("assign", 2)]
    consumer.close()


def test_cooperative_rebalance_2(suite: Suite) -> None:
    """A client without a handler for lost partitions gets them as revoked."""
    topic = suite.topic("one")
    reported: list[str] = []
    consumer = suite.consumer(**COOPERATIVE)
    suite.seed(topic, [b"a"])
    consumer.subscribe(
        [topic], on_assign=lambda *_: reported.append("assign"), on_revoke=lambda *_: reported.append("revoke")
    )
    assert polled(consumer).value() == b"a"
    assert reported == ["assign"]
    _polls_too_late(consumer)
    assert reported == ["assign"]
    polled(consumer)
    assert reported == ["assign", "revoke", "assign"]
    consumer.close()


def test_incremental_assign(suite: Suite) -> None:
    one, two = suite.topic("one"), suite.topic("two")
    for topic in (one, two):
        suite.seed(topic, [b"first"])
    consumer = suite.consumer(enable__auto__commit=False, auto__offset__reset="error")

    def is_next(topic: str, offset: int) -> bool:
        message = polled(consumer)
        return (message.topic(), message.partition(), message.offset()) == (topic, 0, offset)

    def refused(change: Callable[[list[TopicPartition]], None]) -> int:
        with pytest.raises(KafkaException) as raised:
            change([TopicPartition(one, 0, OFFSET_BEGINNING)])
        return int(raised.value.args[0].code())

    consumer.incremental_assign([TopicPartition(one, 0, OFFSET_BEGINNING)])
    message = polled(consumer)
    assert (message.topic(), message.offset()) == (one, 0)
    consumer.commit(message, asynchronous=False)
    assert refused(consumer.incremental_assign) == KafkaError._CONFLICT
    consumer.incremental_assign([TopicPartition(two, 0, OFFSET_BEGINNING)])
    assert is_next(two, 0)
    consumer.incremental_unassign([TopicPartition(one, 0)])
    suite.seed(one, [b"second"])
    suite.seed(two, [b"second"])
    assert is_next(two, 1)
    consumer.incremental_assign([TopicPartition(one, 0)])
    assert is_next(one, 1), "where it had committed"
    consumer.incremental_unassign([TopicPartition(one, 0)])
    assert refused(consumer.incremental_unassign) == KafkaError._INVALID_ARG
    consumer.unassign()
    consumer.close()


# producer -------------------------------------------------------------------------------------------------------------
def transacted(producer: Producer, topic: str, count: int) -> None:
    producer.begin_transaction()
    for number in range(count):
        producer.produce(topic, b"v%d" % number)
    assert producer.flush(WAIT_S) == 0


def committed(suite: Suite, topic: str) -> int:
    consumer = suite.consumer(enable__auto__commit=False, enable__partition__eof=True)
    consumer.subscribe([topic])
    count = all_of(consumer)
    consumer.close()
    return count


@pytest.fixture
def producer(suite: Suite) -> Producer:
    made = suite.producer(transactional__id=f"id-{uuid.uuid4()}")
    made.init_transactions(WAIT_S)
    return made


def test_commit_transaction(suite: Suite, producer: Producer) -> None:
    topic = suite.topic("output")
    transacted(producer, topic, 100)
    producer.commit_transaction(WAIT_S)
    assert committed(suite, topic) == 100


def test_abort_transaction(suite: Suite, producer: Producer) -> None:
    topic = suite.topic("output")
    transacted(producer, topic, 100)
    producer.abort_transaction(WAIT_S)
    assert committed(suite, topic) == 0


def test_abort_retry_commit_transaction(suite: Suite, producer: Producer) -> None:
    topic = suite.topic("output")
    transacted(producer, topic, 100)
    producer.abort_transaction(WAIT_S)
    transacted(producer, topic, 25)
    producer.commit_transaction(WAIT_S)
    assert committed(suite, topic) == 25


def test_send_offsets_committed_transaction(suite: Suite) -> None:
    input_topic, output_topic = suite.topic("input"), suite.topic("output")
    transactional_id = f"id-{uuid.uuid4()}"
    producer = suite.producer(transactional__id=transactional_id)
    suite.seed(input_topic)
    consumer = suite.consumer(enable__auto__commit=False, enable__partition__eof=True)
    consumer.subscribe([input_topic])
    assert all_of(consumer) == 100
    producer.init_transactions(WAIT_S)
    transacted(producer, output_topic, 100)
    producer.send_offsets_to_transaction(
        consumer.position(consumer.assignment()), consumer.consumer_group_metadata(), WAIT_S
    )
    producer.commit_transaction(WAIT_S)
    # The next producer with this id finds the offsets of the last transaction.
    suite.producer(transactional__id=transactional_id).init_transactions(WAIT_S)
    assert [each.offset for each in consumer.committed(consumer.assignment(), WAIT_S)] == [100]
    consumer.close()
