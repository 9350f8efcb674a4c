"""The consumer protocol over the wire: admin APIs, refusals, and two protocols in one group in succession."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Iterator
from typing import Any

import confluent_kafka as ck
import pytest
from confluent_kafka import ConsumerGroupState, ConsumerGroupType
from confluent_kafka.admin import AdminClient
from kio.index import load_request_schema

from support.kafka.groups.consumer import ask, beat
from support.kafka.harness import RealBroker
from support.kafka.raw import RawClient, fields, nested
from support.waiting import eventually
from tidemill.base.config.listeners import KafkaSection
from tidemill.kafka import KafkaSettings, error_codes
from tidemill.kafka.transactions.coordinator import TransactionCoordinator

SETTINGS = KafkaSettings(
    KafkaSection(
        group_initial_rebalance_delay_ms=0,
        group_consumer_session_timeout_ms=60_000,
        group_consumer_heartbeat_interval_ms=200,
    )
)


@pytest.fixture(scope="module")
def broker() -> Iterator[RealBroker]:
    made = RealBroker(settings=SETTINGS)
    made.create_topic("t", 3)
    yield made
    made.close()


@pytest.fixture
def client(broker: RealBroker) -> Iterator[RawClient]:
    with RawClient(broker.port) as made:
        yield made


def has(answer: Any) -> dict[str, list[int]]:
    return {str(t.topic_id): list(t.partitions) for t in answer.assignment.topic_partitions}


def commit(client: RawClient, group: str, member: str, epoch: int, offset: int = 1, version: int = 9) -> int:
    schema = load_request_schema(8, version)
    topic = nested(schema, "topics")
    partition = fields(
        nested(topic, "partitions"), partition_index=0, committed_offset=offset, committed_metadata="",
        committed_leader_epoch=-1,
    )  # fmt: skip
    answer = ask(
        client, 8, version, group_id=group, member_id=member, generation_id_or_member_epoch=epoch,
        topics=(fields(topic, name="t", partitions=(partition,)),),
    )  # fmt: skip
    return int(answer.topics[0].partitions[0].error_code)


def fetched(client: RawClient, group: str, member: str | None, epoch: int) -> tuple[int, int]:
    """(error code, offset)"""
    schema = nested(load_request_schema(9, 9), "groups")
    asked = fields(
        schema, group_id=group, member_id=member, member_epoch=epoch,
        topics=(fields(nested(schema, "topics"), name="t", partition_indexes=(0,)),),
    )  # fmt: skip
    answer = ask(client, 9, 9, groups=(asked,), require_stable=False).groups[0]
    offsets = [p.committed_offset for t in answer.topics for p in t.partitions]
    return int(answer.error_code), offsets[0] if offsets else -1


def deleted(client: RawClient, group: str) -> int:
    """The error code of a deletion of the group's offset."""
    topic = nested(load_request_schema(47, 0), "topics")
    partitions = (nested(topic, "partitions")(partition_index=0),)
    answer = ask(client, 47, 0, group_id=group, topics=(fields(topic, name="t", partitions=partitions),))
    return int(answer.topics[0].partitions[0].error_code)


def test_two_members_share_a_topic_and_commit_with_their_epochs(broker: RealBroker, client: RawClient) -> None:
    first = beat(client, "share", "m1", 0)
    assert (int(first.error_code), first.member_epoch, list(has(first).values())) == (0, 1, [[0, 1, 2]])
    assert first.heartbeat_interval == datetime.timedelta(milliseconds=200)
    topic_id = next(iter(has(first)))
    second = beat(client, "share", "m2", 0)
    assert (second.member_epoch, has(second)) == (2, {})
    reported = beat(client, "share", "m1", 1)
    assert has(reported) == {topic_id: [0, 1]}
    owned = nested(load_request_schema(68, 1), "topic_partitions")(
        topic_id=reported.assignment.topic_partitions[0].topic_id, partitions=(0, 1)
    )
    assert beat(client, "share", "m1", 1, topic_partitions=(owned,)).member_epoch == 2
    assert has(beat(client, "share", "m2", 2)) == {topic_id: [2]}
    assert commit(client, "share", "m1", 1) == error_codes.STALE_MEMBER_EPOCH
    assert commit(client, "share", "m1", 2, 7) == 0
    assert commit(client, "share", "m1", 2, 9, version=8) == error_codes.UNSUPPORTED_VERSION
    assert commit(client, "share", "m3", 2) == error_codes.UNKNOWN_MEMBER_ID
    assert commit(client, "share", "", -1) == error_codes.UNKNOWN_MEMBER_ID
    assert fetched(client, "share", "m1", 2) == (0, 7)
    assert fetched(client, "share", None, -1) == (0, 7)
    assert fetched(client, "share", "m1", 1) == (error_codes.STALE_MEMBER_EPOCH, -1)
    assert fetched(client, "share", "m9", 1) == (error_codes.UNKNOWN_MEMBER_ID, -1)
    assert int(beat(client, "share", "m1", 9).error_code) == error_codes.FENCED_MEMBER_EPOCH

    described = ask(client, 69, 1, group_ids=("share", "nobody"), include_authorized_operations=False).groups
    assert [int(group.error_code) for group in described] == [0, error_codes.GROUP_ID_NOT_FOUND]
    group = described[0]
    assert (group.group_state, group.group_epoch, group.assignment_epoch, group.assignor_name) == (
        "Stable",
        2,
        2,
        "uniform",
    )
    shown = {m.member_id: [list(t.partitions) for t in m.assignment.topic_partitions] for m in group.members}
    assert shown == {"m1": [[0, 1]], "m2": [[2]]}
    assert {m.member_type for m in group.members} == {1}
    classic = ask(client, 15, 6, groups=("share",), include_authorized_operations=False).groups[0]
    assert (int(classic.error_code), classic.group_state) == (error_codes.GROUP_ID_NOT_FOUND, "Dead")
    assert int(ask(client, 42, 2, groups_names=("share",)).results[0].error_code) == error_codes.NON_EMPTY_GROUP
    assert deleted(client, "share") == error_codes.GROUP_SUBSCRIBED_TO_TOPIC


def test_offsets_of_a_topic_that_a_member_subscribes_to_during_their_deletion_stay(
    broker: RealBroker, client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert commit(client, "late", "", -1, 5) == 0
    released = TransactionCoordinator.drop_group_offsets

    def join() -> None:
        with RawClient(broker.port) as other:
            assert int(beat(other, "late", "m1", 0).error_code) == 0

    async def overtaken(coordinator: TransactionCoordinator, group: str, places: Any = None) -> None:
        await released(coordinator, group, places)
        await asyncio.to_thread(join)

    with monkeypatch.context() as patched:
        patched.setattr(TransactionCoordinator, "drop_group_offsets", overtaken)
        assert deleted(client, "late") == error_codes.COORDINATOR_NOT_AVAILABLE, "asked again, it is refused"
    assert deleted(client, "late") == error_codes.GROUP_SUBSCRIBED_TO_TOPIC
    assert fetched(client, "late", "m1", 1) == (0, 5)


def test_a_pattern_must_be_one_and_members_of_version_0_are_named_here(broker: RealBroker, client: RawClient) -> None:
    for pattern in ("(", "a)|(b", "(?=t)", "x" * 1_001):
        answer = beat(client, "patterns", "m1", 0, subscribed_topic_regex=pattern)
        assert int(answer.error_code) == error_codes.INVALID_REGULAR_EXPRESSION, pattern
    # A pattern is matched against the topics that the node knows, and this topic was just created outside the node.
    eventually(lambda: has(beat(client, "first look", "m1", 0, subscribed_topic_regex="t")))
    assert list(has(beat(client, "patterns", "m1", 0, subscribed_topic_regex="[s-t]")).values()) == [[0, 1, 2]]
    nothing = beat(client, "patterns", "m1", 1, subscribed_topic_regex="tt")
    assert has(nothing) == {}, "a pattern matches whole names"
    named = beat(client, "named", "", 0, version=0)
    assert named.member_id and list(has(named).values()) == [[0, 1, 2]]
    assert int(beat(client, "named", "", 0).error_code) == error_codes.INVALID_REQUEST
    assert int(beat(client, "", "m", 0).error_code) == error_codes.INVALID_GROUP_ID
    assert int(beat(client, "named", "m", 0, server_assignor="mine").error_code) == error_codes.UNSUPPORTED_ASSIGNOR


def consumer(broker: RealBroker, group: str, protocol: str) -> ck.Consumer:
    made = ck.Consumer(
        {
            "bootstrap.servers": broker.address,
            "group.id": group,
            "group.protocol": protocol,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    made.subscribe(["t"])
    return made


def test_a_group_goes_over_to_the_other_protocol_when_nobody_is_in_it_and_keeps_its_offsets(
    broker: RealBroker, client: RawClient
) -> None:
    producer = ck.Producer({"bootstrap.servers": broker.address})
    for number in range(3):
        producer.produce("t", b"v", partition=number)
    assert producer.flush(30) == 0
    admin = AdminClient({"bootstrap.servers": broker.address})
    for turn, protocol in enumerate(("classic", "consumer", "classic")):
        with_group = consumer(broker, "turns", protocol)
        eventually(lambda c=with_group: c.poll(0.1) is not None or c.assignment() or None)
        eventually(lambda c=with_group: (c.poll(0.05), c.assignment())[1] or None)
        with_group.commit(offsets=[ck.TopicPartition("t", 0, turn + 1)], asynchronous=False)
        if protocol == "classic":
            assert int(beat(client, "turns", "m", 3).error_code) == error_codes.UNKNOWN_MEMBER_ID
        listed = {g.group_id: g for g in admin.list_consumer_groups().result(20).valid}
        assert listed["turns"].type is ConsumerGroupType[protocol.upper()]
        shown = admin.describe_consumer_groups(["turns"])["turns"].result(20)
        assert shown.state is ConsumerGroupState.STABLE and len(shown.members) == 1
        with_group.close()
        assert fetched(client, "turns", None, -1) == (0, turn + 1)
    assert admin.delete_consumer_groups(["turns"])["turns"].result(20) is None
    assert fetched(client, "turns", None, -1) == (0, -1)


def test_the_feature_that_clients_look_for_is_finalized(broker: RealBroker, client: RawClient) -> None:
    answer = ask(client, 18, 3, client_software_name="x", client_software_version="1")
    assert ("group.version", 1) in [(f.name, f.max_version_level) for f in answer.finalized_features]
