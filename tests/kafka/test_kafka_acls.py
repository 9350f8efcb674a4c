"""ACLs at the endpoint: the operation that each API checks, the names that no error reveals, and the admin clients that
write rules.
"""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Iterator
from typing import Any

import confluent_kafka as ck
import pytest
import structlog
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)
from kafka.errors import GroupAuthorizationFailedError
from kio.index import load_request_schema

from kafka import KafkaConsumer, TopicPartition
from support.kafka.harness import FakeBroker, RealBroker
from support.kafka.raw import RawClient, batch, code, decode, encode, example, fetch_body, fields, nested, produce_body
from support.kafka.security import PASSWORD, add, allow, as_user, confluent, gate
from support.kafka.session_reader import Fetcher, body_of
from support.waiting import eventually
from tidemill.kafka import error_codes
from tidemill.kafka.api import required_operations
from tidemill.kafka.handlers import APIS
from tidemill.security.acls import CLUSTER_NAME, AclRule, Operation, Pattern, Permission, Resource

DENIALS = {29, 30, 31, 53}
LISTS = {16, 66}
"""APIs that are always answered, limited to the visible resources."""


@pytest.fixture(scope="module")
def shared() -> Iterator[FakeBroker]:
    broker = FakeBroker(gate=gate(), super_users=("User:root",))
    for user in ("root", "alice"):
        add(broker, user)
    broker.create_topic("secret", 1)
    yield broker
    broker.close()


def test_every_api_names_what_it_asks_for() -> None:
    assert set(APIS) <= set(required_operations.CHECKS), (
        "say in kafka/api/required_operations.py what the new API asks for; support/kafka/raw.py needs a request of it"
    )


@pytest.mark.parametrize("key", sorted(APIS.keys() - {17, 18, 36, 60}))
def test_f246_who_may_nothing_is_refused_by_every_api(shared: FakeBroker, key: int) -> None:
    """The newest and the oldest version of each API return the same error for existing and for missing resources."""
    api = APIS[key]
    exists = f"t{key}"
    row = shared.create_topic(exists, 1)
    for version in sorted({api.min_version, api.max_version}):
        answers = []
        for name, topic_id in ((exists, uuid.UUID(row.topic_id)), (f"n{key}", uuid.uuid4())):
            with as_user(shared, "alice") as client:
                answer = client.ask(key, version, example(key, version, name, topic_id))
                assert "secret" not in str(answer), "whoever may see nothing is told of nothing that was not named"
                assert "error_message=''" not in str(answer), "Java would say that instead of what the code means"
                answers.append(code(answer))
        if key in LISTS:
            assert set(answers) == {0}
        elif key in (0, 1) and version >= 13:
            assert answers[0] == 29 and answers[1] in (error_codes.UNKNOWN_TOPIC_ID, error_codes.NOT_LEADER_OR_FOLLOWER)
        elif key in (3, 20) and version >= {3: 10, 20: 6}[key]:
            assert answers[0] in DENIALS
        else:
            assert answers[0] == answers[1] and answers[0] in DENIALS, answers


@pytest.mark.parametrize("key", sorted(APIS.keys() - {17, 18, 36}))
def test_a_super_user_is_refused_nothing(shared: FakeBroker, key: int) -> None:
    version = APIS[key].max_version
    row = shared.create_topic(f"s{key}", 1)
    with as_user(shared, "root") as client:
        client.ask(3, 1, b"\xff\xff\xff\xff")
        assert code(client.ask(key, version, example(key, version, f"s{key}", uuid.UUID(row.topic_id)))) not in DENIALS


@pytest.mark.parametrize("host", ["127.0.0.1", "::ffff:127.0.0.1"])
def test_a_rule_for_a_host_counts_also_where_one_socket_listens_for_both_kinds_of_addresses(host: str) -> None:
    broker = FakeBroker(gate=gate(), super_users=("User:root",), host="::")
    try:
        add(broker, "alice")
        broker.create_topic("t", 1)
        allow(broker, "alice", Operation.DESCRIBE, Resource.TOPIC, "t")
        with as_user(broker, "alice") as client:
            assert [int(t.error_code) for t in ask_metadata(client, ["t"]).topics] == [0]
            allow(broker, "alice", Operation.DESCRIBE, Resource.TOPIC, "t", permission=Permission.DENY, host=host)
            assert [int(t.error_code) for t in ask_metadata(client, ["t"]).topics] == [29]
    finally:
        broker.close()


def ask_metadata(client: RawClient, topics: list[str] | None, *, create: bool = False, version: int = 9) -> Any:
    schema = load_request_schema(3, version)
    asked = None if topics is None else tuple(fields(nested(schema, "topics"), name=name) for name in topics)
    body = fields(
        schema,
        topics=asked,
        allow_auto_topic_creation=create,
        include_cluster_authorized_operations=True,
        include_topic_authorized_operations=True,
    )
    return client.ask(3, version, encode(body))


def test_metadata_hides_what_may_not_be_described(shared: FakeBroker) -> None:
    shared.create_topic("seen-1", 1)
    shared.create_topic("hidden-1", 1)
    undo = allow(shared, "alice", Operation.READ, Resource.TOPIC, "seen", Pattern.PREFIXED)
    with as_user(shared, "alice") as client:
        everything = ask_metadata(client, None)
        assert [topic.name for topic in everything.topics] == ["seen-1"]
        named = {
            t.name: int(t.error_code) for t in ask_metadata(client, ["seen-1", "hidden-1", "absent", "seen-2"]).topics
        }
        assert named == {"seen-1": 0, "seen-2": 3, "hidden-1": 29, "absent": 29}
        operations = ask_metadata(client, ["seen-1"]).topics[0].topic_authorized_operations
        assert operations == 1 << Operation.READ | 1 << Operation.DESCRIBE
        assert everything.cluster_authorized_operations == 0
        created = ask_metadata(client, ["seen-3"], create=True).topics[0]
        assert int(created.error_code) == 29, "READ does not create"
    undo()
    with as_user(shared, "alice") as client:
        assert ask_metadata(client, None).topics == ()


def test_pages_of_all_topics_name_nothing_that_may_not_be_described(shared: FakeBroker) -> None:
    for name in ("page-a", "page-b-hidden", "page-c", "page-d-hidden"):
        shared.create_topic(name, 1)
    undo = [allow(shared, "alice", Operation.DESCRIBE, Resource.TOPIC, name) for name in ("page-a", "page-c")]
    schema = load_request_schema(75, 0)
    pages, cursor = [], None
    with as_user(shared, "alice") as client:
        while not pages or cursor is not None:
            at = None if cursor is None else fields(nested(schema, "cursor"), **cursor)
            body = fields(schema, topics=(), response_partition_limit=1, cursor=at)
            answer = client.ask(75, 0, encode(body))
            named = answer.next_cursor and answer.next_cursor.topic_name
            cursor = named and {"topic_name": named, "partition_index": answer.next_cursor.partition_index}
            pages.append(([topic.name for topic in answer.topics], named))
    assert pages == [(["page-a"], "page-c"), (["page-c"], None)]
    for each in undo:
        each()


def test_a_described_transaction_names_only_topics_that_may_be_described(shared: FakeBroker) -> None:
    names = ("of-transaction-seen", "of-transaction-hidden")
    for name in names:
        shared.create_topic(name, 1)
    undo = [
        allow(shared, "alice", Operation.DESCRIBE, Resource.TRANSACTIONAL_ID, "tx-described"),
        allow(shared, "alice", Operation.DESCRIBE, Resource.TOPIC, names[0]),
    ]
    init, add_partitions, describe = (load_request_schema(key, version) for key, version in ((22, 1), (24, 3), (65, 0)))
    minute = datetime.timedelta(minutes=1)
    asked = encode(fields(describe, transactional_ids=("tx-described",)))
    with as_user(shared, "root") as root, as_user(shared, "alice") as client:
        made = root.ask(22, 1, encode(fields(init, transactional_id="tx-described", transaction_timeout=minute)))
        topics = tuple(fields(nested(add_partitions, "v3_and_below_topics"), name=n, partitions=(0,)) for n in names)
        body = fields(
            add_partitions,
            v3_and_below_transactional_id="tx-described",
            v3_and_below_producer_id=made.producer_id,
            v3_and_below_producer_epoch=made.producer_epoch,
            v3_and_below_topics=topics,
        )
        assert code(root.ask(24, 3, encode(body))) == 0
        for asker, seen in ((root, set(names)), (client, {names[0]})):
            [found] = asker.ask(65, 0, asked).transaction_states
            assert (int(found.error_code), found.transaction_state) == (0, "Ongoing")
            assert {each.topic for each in found.topics} == seen
    for each in undo:
        each()


def test_of_several_topics_those_that_are_allowed_are_worked_on(shared: FakeBroker) -> None:
    shared.create_topic("mine", 1)
    shared.create_topic("theirs", 1)
    undo = [allow(shared, "alice", op, Resource.TOPIC, "mine") for op in (Operation.WRITE, Operation.READ)]
    with as_user(shared, "alice") as client:
        ask_metadata(client, ["mine"])
        schema = load_request_schema(2, 1)
        partition = fields(nested(nested(schema, "topics"), "partitions"), partition_index=0, timestamp=-1)
        topics = tuple(
            fields(nested(schema, "topics"), name=name, partitions=(partition,)) for name in ("theirs", "mine", "none")
        )
        answer = client.ask(2, 1, encode(fields(schema, replica_id=-1, topics=topics)))
        found = {topic.name: int(topic.partitions[0].error_code) for topic in answer.topics}
        assert found == {"mine": 0, "theirs": 29, "none": 29}
        for name, expected in (("mine", 0), ("theirs", 29), ("none", 29)):
            produced = client.ask(0, 8, produce_body(name, [(0, batch([b"v"]))]))
            assert int(produced.responses[0].partition_responses[0].error_code) == expected
            fetched = client.ask(1, 4, fetch_body(name, 0, 0, max_wait_ms=0))
            assert code(fetched) == expected
    for each in undo:
        each()


def test_a_denial_wins_over_what_is_allowed_and_both_are_told(shared: FakeBroker) -> None:
    shared.create_topic("both", 1)
    undo = [
        allow(shared, "alice", Operation.ALL, Resource.TOPIC, "*"),
        allow(shared, "alice", Operation.WRITE, Resource.TOPIC, "both", permission=Permission.DENY),
    ]
    with structlog.testing.capture_logs() as logs, as_user(shared, "alice") as client:
        ask_metadata(client, ["both"])
        produced = client.ask(0, 8, produce_body("both", [(0, batch([b"v"]))]))
        assert int(produced.responses[0].partition_responses[0].error_code) == 29
        fetched = client.ask(1, 4, fetch_body("both", 0, 0, max_wait_ms=0))
        assert code(fetched) == 0
    [line] = [line for line in logs if line["event"] == "kafka.operation_denied"]
    assert (line["principal"], line["operation"], line["resource"], line["name"]) == (
        "User:alice", "WRITE", "TOPIC", "both"
    )  # fmt: skip
    for each in undo:
        each()


@pytest.mark.parametrize(("version", "epoch"), [(4, -1), (12, 0), (13, 0)])
def test_a_fetch_that_waits_returns_nothing_that_may_no_longer_be_read(
    shared: FakeBroker, version: int, epoch: int
) -> None:
    rows = [shared.create_topic(f"{name}-{version}", 1) for name in ("waits", "stays")]
    waits, stays = ((row.name, 0) for row in rows)
    forbid, undo = [allow(shared, "alice", Operation.READ, Resource.TOPIC, row.name) for row in rows]
    ids = {row.name: uuid.UUID(row.topic_id) for row in rows}
    with (
        as_user(shared, "root") as writer,
        as_user(shared, "alice") as client,
        Fetcher(shared.port, rows, version) as reader,
    ):
        ask_metadata(writer, None)
        body = body_of(version, ids, {waits: 0, stays: 0}, epoch=epoch, max_wait_ms=60_000)
        client.send(1, version, 7, body)
        eventually(lambda: shared.topics.fetching == 1)
        forbid()
        produced = writer.ask(0, 8, produce_body(waits[0], [(0, batch([b"v"]))]))
        assert int(produced.responses[0].partition_responses[0].error_code) == 0
        answer = reader.read(decode(1, version, client.receive()[1]))
        assert {place: (got.code, got.batches) for place, got in answer.reported.items()} == {
            waits: (error_codes.TOPIC_AUTHORIZATION_FAILED, ()), stays: (0, ())
        }  # fmt: skip
        assert (answer.session_id > 0) == (epoch == 0)
        if answer.session_id:
            forbid = allow(shared, "alice", Operation.READ, Resource.TOPIC, waits[0])
            more = body_of(version, ids, {}, session_id=answer.session_id, epoch=1)
            again = reader.read(client.ask(1, version, more))
            assert again.reported[waits].batches == ((0, 1),), "it is allowed again"
            forbid()
    undo()


@pytest.mark.parametrize("key", [8, 9])
def test_offsets_of_a_topic_that_this_node_learns_during_the_request_are_refused(shared: FakeBroker, key: int) -> None:
    undo = allow(shared, "alice", Operation.READ, Resource.GROUP, "g")
    with as_user(shared, "alice") as client:
        row = shared.create_topic(f"learnt-{key}", 1)
        body = example(key, 10, row.name, uuid.UUID(row.topic_id))
        assert [code(client.ask(key, 10, body)) for _ in range(2)] == [29, 29]
        undo_read = allow(shared, "alice", Operation.READ, Resource.TOPIC, row.name)
        assert code(client.ask(key, 10, body)) == 0
    undo_read()
    undo()


def test_an_idempotent_producer_needs_a_topic_that_it_may_write(shared: FakeBroker) -> None:
    body = encode(fields(load_request_schema(22, 1), transactional_id=None))
    with as_user(shared, "alice") as client:
        assert int(client.ask(22, 1, body).error_code) == error_codes.CLUSTER_AUTHORIZATION_FAILED
        undo = allow(shared, "alice", Operation.WRITE, Resource.TOPIC, "anything")
        assert int(client.ask(22, 1, body).error_code) == 0
        undo()
        undo = allow(shared, "alice", Operation.IDEMPOTENT_WRITE, Resource.CLUSTER, CLUSTER_NAME)
        assert int(client.ask(22, 1, body).error_code) == 0
        undo()


def test_without_an_authorizer_rules_are_refused_as_disabled(fake_broker: FakeBroker) -> None:
    with RawClient(fake_broker.port) as client:
        for key in (29, 30, 31):
            version = APIS[key].max_version
            assert (
                code(client.ask(key, version, example(key, version, "t", uuid.uuid4())))
                == error_codes.SECURITY_DISABLED
            )


ANY = AclBindingFilter(
    ResourceType.ANY, None, ResourcePatternType.ANY, None, None, AclOperation.ANY, AclPermissionType.ANY
)


def test_librdkafka_writes_describes_and_deletes_rules_and_lives_by_them() -> None:
    broker = RealBroker(gate=gate(), super_users=("User:root",))
    for user in ("root", "alice"):
        add(broker, user)
    root_config = {**confluent(broker, None, "SCRAM-SHA-256"), "sasl.username": "root"}
    root = AdminClient(root_config)
    root.create_topics([NewTopic("orders", 1, 1)])["orders"].result(20)

    def binding(kind: Any, name: str, operation: Any) -> Any:
        return AclBinding(
            kind, name, ResourcePatternType.LITERAL, "User:alice", "*", operation, AclPermissionType.ALLOW
        )

    mine = [
        binding(ResourceType.TOPIC, "orders", AclOperation.READ),
        binding(ResourceType.TOPIC, "orders", AclOperation.WRITE),
        binding(ResourceType.GROUP, "g", AclOperation.READ),
    ]
    config = confluent(broker, None, "SCRAM-SHA-512")
    refused: list[Any] = []
    before = ck.Producer({**config, "topic.metadata.refresh.interval.ms": 500})
    before.produce("orders", b"v", on_delivery=lambda error, _: refused.append(error))
    before.flush(20)
    assert refused[0].code() == ck.KafkaError.TOPIC_AUTHORIZATION_FAILED
    for future in root.create_acls(mine).values():
        future.result(20)
    assert set(root.describe_acls(ANY).result(20)) == set(mine)
    client = ck.Producer({**config, "enable.idempotence": True})
    client.produce("orders", b"v")
    assert client.flush(20) == 0
    reader = ck.Consumer({**config, "group.id": "g", "enable.auto.commit": False})
    reader.assign([ck.TopicPartition("orders", 0, 0)])
    assert eventually(lambda: reader.poll(0.5)).value() == b"v"
    reader.commit(offsets=[ck.TopicPartition("orders", 0, 1)], asynchronous=False)
    reader.close()
    other = KafkaConsumer(
        bootstrap_servers=broker.address,
        group_id="other",
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="PLAIN",
        sasl_plain_username="alice",
        sasl_plain_password=PASSWORD,
    )
    with pytest.raises(GroupAuthorizationFailedError):
        other.committed(TopicPartition("orders", 0))
    other.close()
    alice = AdminClient(config)
    with pytest.raises(ck.KafkaException) as cluster:
        alice.create_acls(mine)[mine[0]].result(20)
    assert cluster.value.args[0].code() == ck.KafkaError.CLUSTER_AUTHORIZATION_FAILED
    deleted = root.delete_acls([ANY])[ANY].result(20)
    assert set(deleted) == set(mine)
    assert root.describe_acls(ANY).result(20) == []
    broker.close()


def test_rules_written_elsewhere_count_within_seconds_and_outlive_a_restart() -> None:
    broker = RealBroker(gate=gate(), super_users=())
    add(broker, "alice")
    broker.create_topic("t", 1)
    from tidemill.security.acl_cache import AclCache

    other = AclCache(broker.metastore, broker.clock)
    broker.portal.call(other.add([AclRule(2, 3, "t", "User:alice", "*", int(Operation.READ), 3)]))
    config = confluent(broker, None, "PLAIN")
    eventually(lambda: list(AdminClient(config).list_topics(timeout=30).topics) == ["t"])
    broker.restart()
    assert list(AdminClient(confluent(broker, None, "PLAIN")).list_topics(timeout=30).topics) == ["t"]
    broker.close()


def test_a_transactional_producer_needs_its_id_its_topics_and_its_groups() -> None:
    broker = RealBroker(gate=gate(), super_users=())
    try:
        add(broker, "alice")
        broker.create_topic("t", 1)
        config = {**confluent(broker, None, "PLAIN"), "transactional.id": "tx-1", "log_level": 0}
        with pytest.raises(ck.KafkaException) as refused:
            ck.Producer(config).init_transactions(30)
        assert refused.value.args[0].code() == ck.KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
        allow(broker, "alice", Operation.WRITE, Resource.TRANSACTIONAL_ID, "tx-", Pattern.PREFIXED)
        allow(broker, "alice", Operation.DESCRIBE, Resource.TOPIC, "t")
        allow(broker, "alice", Operation.DESCRIBE, Resource.GROUP, "g")
        client = ck.Producer(config)
        client.init_transactions(30)
        group = ck.Consumer({**confluent(broker, None, "PLAIN"), "group.id": "g"}).consumer_group_metadata()
        offsets = [ck.TopicPartition("t", 0, 3)]
        errors_reported: list[Any] = []

        def attempt() -> int:
            """Return the error code of the transaction, or 0."""
            client.begin_transaction()
            try:
                client.produce("t", b"v", partition=0, on_delivery=lambda error, _: errors_reported.append(error))
                client.flush(30)
                client.send_offsets_to_transaction(offsets, group, 30)
                client.commit_transaction(30)
            except ck.KafkaException as error:
                client.abort_transaction(30)
                return int(error.args[0].code())
            return 0

        assert attempt() == ck.KafkaError.TOPIC_AUTHORIZATION_FAILED
        allow(broker, "alice", Operation.WRITE, Resource.TOPIC, "t")
        allow(broker, "alice", Operation.READ, Resource.TOPIC, "t")
        assert attempt() == ck.KafkaError.GROUP_AUTHORIZATION_FAILED
        allow(broker, "alice", Operation.READ, Resource.GROUP, "g")
        assert attempt() == 0
    finally:
        broker.close()
