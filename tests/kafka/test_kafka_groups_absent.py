"""Requests of members that their group does not have, ids of members that never joined, and a member's last request."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from kio.index import load_request_schema

from support.kafka.groups.consumer import SAME, SECOND, ask, beat
from support.kafka.harness import RealBroker
from support.kafka.raw import RawClient, encode, fields, nested
from support.waiting import eventually
from tidemill.base.config.listeners import KafkaSection
from tidemill.base.errors import UnavailableError
from tidemill.kafka import KafkaSettings, error_codes
from tidemill.kafka.groups import coordinator
from tidemill.kafka.handlers import k68_consumer_group_heartbeat

PROTOCOLS: dict[str, Any] = {"protocol_type": "consumer", "reason": None}


@pytest.fixture(scope="module")
def broker() -> Iterator[RealBroker]:
    section = KafkaSection(
        group_initial_rebalance_delay_ms=0, groups_max=5, group_consumer_session_timeout_ms=600_000,
        group_consumer_max_session_timeout_ms=600_000,
    )  # fmt: skip
    made = RealBroker(settings=KafkaSettings(section))
    made.create_topic("t", 3)
    yield made
    made.close()


@pytest.fixture
def client(broker: RealBroker) -> Iterator[RawClient]:
    with RawClient(broker.port) as made:
        yield made


def groups(client: RawClient) -> set[str]:
    return {group.group_id for group in ask(client, 16, 4, states_filter=()).groups}


def unload(broker: RealBroker, *names: str) -> None:
    async def end() -> None:
        for name in names:
            led = broker.server._groups and broker.server._groups.loaded_group(name)
            assert led
            led.end(error_codes.NOT_COORDINATOR)

    broker.portal.call(end())


def join(client: RawClient, group: str, member: str = "", instance: str | None = None) -> Any:
    protocol = nested(load_request_schema(11, 9), "protocols")(name="range", metadata=b"")
    return ask(
        client, 11, 9, group_id=group, session_timeout=30 * SECOND, rebalance_timeout=SECOND, member_id=member,
        group_instance_id=instance, protocols=(protocol,), **PROTOCOLS,
    )  # fmt: skip


def test_a_request_of_a_member_creates_no_group(broker: RealBroker, client: RawClient) -> None:
    unknown = error_codes.UNKNOWN_MEMBER_ID
    member = {"member_id": "m", "group_instance_id": None, "generation_id": 3}
    for n in range(10):  # more than the node may have
        name = f"ghost-{n}"
        assert int(ask(client, 12, 4, group_id=name, **member).error_code) == unknown
        asked = fields(
            nested(load_request_schema(13, 5), "members"), member_id="m", group_instance_id=None, reason=None
        )
        assert int(ask(client, 13, 5, group_id=name, members=(asked,)).error_code) == unknown
        synced = ask(
            client, 14, 5, group_id=name, **member, protocol_type="consumer", protocol_name="range", assignments=()
        )
        assert int(synced.error_code) == unknown
        for epoch in (3, -1):
            assert int(beat(client, name, "m", epoch).error_code) == unknown
        assert committed(client, name, "m", 3) == unknown
        assert [(int(each.error_code), each.topics) for each in fetched(client, name)] == [(0, ())]
    assert groups(client) == set()
    assert committed(client, "simple", "", -1) == error_codes.NONE, "a commit without a member creates the group"
    assert groups(client) == {"simple"}


def fetched(client: RawClient, group: str) -> Any:
    asked = nested(load_request_schema(9, 9), "groups")
    one = fields(asked, group_id=group, member_id="m", member_epoch=3, topics=None)
    return ask(client, 9, 9, require_stable=False, groups=(one,)).groups


def test_offsets_of_a_group_that_cannot_be_looked_up_are_to_be_fetched_again(
    broker: RealBroker, client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the answer was COORDINATOR_NOT_AVAILABLE, which some Java consumers do not retry here."""
    here = broker.server._groups
    assert here is not None

    async def unavailable(group: str) -> Any:
        raise UnavailableError("no metastore")

    monkeypatch.setattr(here.rows, "head", unavailable)
    assert [int(each.error_code) for each in fetched(client, "unread")] == [error_codes.COORDINATOR_LOAD_IN_PROGRESS]


def committed(client: RawClient, group: str, member: str, epoch: int) -> int:
    topic = nested(load_request_schema(8, 9), "topics")
    partition = fields(
        nested(topic, "partitions"), partition_index=0, committed_offset=1, committed_metadata="",
        committed_leader_epoch=-1,
    )  # fmt: skip
    answer = ask(
        client, 8, 9, group_id=group, member_id=member, generation_id_or_member_epoch=epoch, group_instance_id=None,
        topics=(fields(topic, name="t", partitions=(partition,)),),
    )  # fmt: skip
    return int(answer.topics[0].partitions[0].error_code)


def test_f232_members_join_again_on_a_node_whose_groups_have_no_room_and_others_are_to_retry(
    broker: RealBroker, client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a rebalance ended the consumers of the node, which do not retry GROUP_MAX_SIZE_REACHED."""
    member = join(client, "full", join(client, "full").member_id).member_id
    static = join(client, "static", instance="i1").member_id
    assert int(beat(client, "full-consumer", "m1", 0).error_code) == error_codes.NONE
    here = broker.server._groups
    assert here is not None
    monkeypatch.setattr(here, "_limits", here._limits._replace(bytes_max=0))
    here._count_again_s = 0.0
    for joined in (
        join(client, "full", member),
        join(client, "static", static, "i1"),
        join(client, "static", "", "i1"),
    ):
        assert int(joined.error_code) == error_codes.NONE
    assert int(beat(client, "full-consumer", "m1", 0).error_code) == error_codes.NONE
    for refused in (join(client, "full"), join(client, "static", "", "i2"), beat(client, "full-consumer", "m2", 0)):
        assert int(refused.error_code) == error_codes.COORDINATOR_NOT_AVAILABLE
    unload(broker, "full", "static", "full-consumer")


def test_an_id_that_no_client_joins_with_blocks_neither_the_other_protocol_nor_a_deletion(client: RawClient) -> None:
    """Kafka's `isEmptyClassicGroup` and `ClassicGroup.validateDeleteGroup` do not count pending members."""
    for name in ("taken-over", "deleted"):
        assert int(join(client, name).error_code) == error_codes.MEMBER_ID_REQUIRED
    assert int(ask(client, 42, 2, groups_names=("deleted",)).results[0].error_code) == error_codes.NONE
    assert int(beat(client, "taken-over", "m1", 0).error_code) == error_codes.NONE
    assert int(beat(client, "taken-over", "m1", -1).error_code) == error_codes.NONE


@pytest.mark.parametrize("names", [None, [f"orders.region-{n:03}.events-v1" for n in range(200)]], ids=["", "names"])
def test_a_member_that_leaves_and_closes_its_connection_at_once_has_left(
    broker: RealBroker, client: RawClient, monkeypatch: pytest.MonkeyPatch, names: list[str] | None
) -> None:
    """Java's consumers may repeat their topics when they leave. Regression: such a departure was abandoned."""
    assert int(beat(client, "left", "m1", 0).error_code) == error_codes.NONE
    view = k68_consumer_group_heartbeat.topics_view

    async def slow(*arguments: Any) -> Any:
        await asyncio.sleep(0.5)
        return await view(*arguments)

    monkeypatch.setattr(k68_consumer_group_heartbeat, "topics_view", slow)
    with RawClient(broker.port) as leaver:
        leaving = fields(
            load_request_schema(68, 1), group_id="left", member_id="m1", member_epoch=-1, rebalance_timeout=SAME,
            topic_partitions=None, subscribed_topic_names=None if names is None else tuple(names),
        )  # fmt: skip
        leaver.send(68, 1, 7, encode(leaving))

    def members() -> list[Any]:
        described = ask(client, 69, 1, group_ids=("left",), include_authorized_operations=False).groups
        return list(described[0].members)

    eventually(lambda: members() == [])


def test_a_heartbeat_of_a_client_that_is_gone_reports_nothing_in_place_of_a_later_one(
    broker: RealBroker, client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the partitions of a member that had left were assigned, and the answer that said so had no reader."""
    assert int(beat(client, "abandoned", "m1", 0).error_code) == error_codes.NONE
    joined = beat(client, "abandoned", "m2", 0)
    owned = nested(load_request_schema(68, 1), "topic_partitions")
    (topic_id,) = {topic.topic_id for topic in beat(client, "abandoned", "m1", 1).assignment.topic_partitions}
    assert int(joined.error_code) == error_codes.NONE
    kept = (owned(topic_id=topic_id, partitions=(0, 1)),)
    assert int(beat(client, "abandoned", "m1", 1, topic_partitions=kept).error_code) == error_codes.NONE
    assert int(beat(client, "abandoned", "m2", 2).error_code) == error_codes.NONE
    view, waits, ended = k68_consumer_group_heartbeat.topics_view, threading.Event(), threading.Event()

    async def slow(*arguments: Any) -> Any:
        if waits.is_set():
            return await view(*arguments)
        waits.set()
        try:
            await asyncio.sleep(1.0)
            return await view(*arguments)
        finally:
            ended.set()

    monkeypatch.setattr(k68_consumer_group_heartbeat, "topics_view", slow)
    with RawClient(broker.port) as gone:
        asked = fields(
            load_request_schema(68, 1), group_id="abandoned", member_id="m1", member_epoch=2, rebalance_timeout=SAME,
            topic_partitions=None,
        )  # fmt: skip
        gone.send(68, 1, 7, encode(asked))
        eventually(waits.is_set)
    assert int(beat(client, "abandoned", "m2", -1).error_code) == error_codes.NONE
    eventually(ended.is_set, "the heartbeat of the closed connection was abandoned, or would be processed")
    found = beat(client, "abandoned", "m1", 2)
    assert [list(each.partitions) for each in found.assignment.topic_partitions] == [[0, 1, 2]]


def test_while_a_group_is_loaded_sync_means_joining_again_and_a_heartbeat_succeeds(
    broker: RealBroker, client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`GroupCoordinator.doSyncGroup` and `handleHeartbeat`: the Java client retries COORDINATOR_LOAD_IN_PROGRESS of
    neither."""
    assert committed(client, "loaded", "", -1) == error_codes.NONE

    groups_here = broker.server._groups
    assert groups_here is not None

    unload(broker, "loaded")
    store = groups_here.rows
    take_over = store.take_over

    async def slow(group: str) -> Any:
        await asyncio.sleep(1)
        return await take_over(group)

    monkeypatch.setattr(store, "take_over", slow)
    head = store.head
    moved = [False]

    async def moving(group: str) -> Any:
        found = await head(group)
        moved[0] = True
        return found

    with monkeypatch.context() as patched:  # the group moves to another node while its row is read
        patched.setattr(store, "head", moving)
        patched.setattr(groups_here, "_is_own", lambda group: not moved[0])
        answer = ask(client, 12, 4, group_id="loaded", member_id="m", group_instance_id=None, generation_id=3)
        assert int(answer.error_code) == error_codes.NOT_COORDINATOR
    monkeypatch.setattr(coordinator, "OPENING_S", 0.05)
    member = {"group_id": "loaded", "member_id": "m", "group_instance_id": None, "generation_id": 3}
    synced = ask(client, 14, 5, **member, protocol_type="consumer", protocol_name="range", assignments=())
    assert int(synced.error_code) == error_codes.REBALANCE_IN_PROGRESS
    assert int(ask(client, 12, 4, **member).error_code) == error_codes.NONE
