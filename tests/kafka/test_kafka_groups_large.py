"""Groups of the consumer protocol with thousands of topics: their rows, their limits and the cost of a target."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any
from uuid import UUID

import confluent_kafka as ck
import msgspec
import pytest

from support.kafka.groups.moved import LIMITS, World
from support.kafka.groups.world import See, stored_members
from support.kafka.harness import RealBroker
from support.waiting import eventually
from tidemill.base.config.listeners import KafkaSection
from tidemill.base.limits import METASTORE_BATCH_BYTES, METASTORE_VALUE_BYTES
from tidemill.kafka import KafkaSettings, error_codes
from tidemill.kafka.groups import group_records
from tidemill.kafka.groups.classic.state import GroupLimits, HeartbeatAnswer
from tidemill.kafka.groups.consumer import requests, sizes
from tidemill.kafka.groups.consumer.state import ConsumerGroup, ConsumerGroupMember, HeartbeatRequest, Topic
from tidemill.kafka.groups.group_records import Rows, member_rows, restore_group
from tidemill.kafka.groups.group_runner import GroupRunner
from tidemill.kafka.groups.topic_patterns import TopicView
from tidemill.metastore.rows import GROUP_MEMBERS, GROUP_PARTITIONS, GROUPS
from tidemill.metastore.rows.groups import (
    ConsumerMember,
    GroupMemberRow,
    GroupPartitionsRow,
    GroupRow,
    partition_rows,
    with_partitions,
)
from tidemill.metastore.rows.key_encoding import Column, Kind
from tidemill.metastore.rows.row_family import Family


class Topics(See):
    """Many topics; every pattern matches those whose names begin with it."""

    def __init__(self, count: int, partitions: int = 1, prefix: str = "t") -> None:
        names = (f"{prefix}{n:05}" for n in range(count))
        super().__init__({name: Topic(str(UUID(int=(n << 64) + 1)), partitions) for n, name in enumerate(names)})

    def matching(self, pattern: str) -> frozenset[str]:
        return frozenset(name for name in self.topics if name.startswith(pattern))


def joins(member_id: str, pattern: str = "t") -> HeartbeatRequest:
    return HeartbeatRequest(member_id, 0, rebalance_ms=1_000, pattern=pattern, owned={})


def lines_executed(work: Callable[[], Any]) -> int:
    """Run the work and return how many lines of the consumer protocol's modules it executed, comprehensions included.

    A line of a loop or a comprehension counts once for each item, so the number grows like the running time.
    """
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if "groups/consumer/" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


async def revoked(led: GroupRunner, member_id: str, epoch: int, seen: See) -> HeartbeatAnswer:
    """Let a member revoke what it must, and return its answer with the next epoch."""
    asked = await led.consumer_heartbeat(HeartbeatRequest(member_id, epoch), seen)
    return await led.consumer_heartbeat(HeartbeatRequest(member_id, epoch, owned=asked.assignment), seen)


async def test_two_members_of_2500_topics_each_and_then_one_of_all() -> None:
    async with World() as world:
        seen, led = Topics(5_000), await world.node().get("g")
        first = await led.consumer_heartbeat(joins("m1"), seen)
        assert first.error == 0 and len(first.assignment or ()) == 5_000
        assert (await led.consumer_heartbeat(joins("m2"), seen)).error == 0
        assert (await revoked(led, "m1", 1, seen)).epoch == 2
        second = await led.consumer_heartbeat(HeartbeatRequest("m2", 2), seen)
        assert second.error == 0 and len(second.assignment or ()) == 2_500
        led = await world.node().get("g")
        assert isinstance(led.group, ConsumerGroup)
        assert [len(member.held) for member in led.group.members.values()] == [2_500, 2_500]
        assert (await led.consumer_heartbeat(HeartbeatRequest("m1", -1), seen)).error == 0
        alone = await led.consumer_heartbeat(HeartbeatRequest("m2", 2), seen)
        assert alone.error == 0 and len(alone.assignment or ()) == 5_000
        assert {row.member_id for row in await world.metastore.rows(GROUP_PARTITIONS, "g")} == {"m2"}


async def test_a_member_has_as_many_topics_as_a_cluster_may_and_leaves_no_rows() -> None:
    async with World() as world:
        seen, led = Topics(20_000), await world.node().get("g")
        joined = await led.consumer_heartbeat(joins("m1"), seen)
        assert joined.error == 0 and len(joined.assignment or ()) == 20_000
        led = await world.node().get("g")
        assert isinstance(led.group, ConsumerGroup)
        member = led.group.members["m1"]
        assert member.held == member.target == joined.assignment and not member.revoking
        left = await led.consumer_heartbeat(HeartbeatRequest("m1", 1, pattern="t0000"), seen)
        assert left.error == 0 and len(left.assignment or ()) == 10
        assert len(await world.metastore.rows(GROUP_PARTITIONS, "g")) > 1, "it holds them until it has revoked them"
        owned = left.assignment
        assert (await led.consumer_heartbeat(HeartbeatRequest("m1", 1, owned=owned), seen)).epoch == 2
        assert not await world.metastore.rows(GROUP_PARTITIONS, "g"), "its own row has room for them now"
        assert (await led.consumer_heartbeat(HeartbeatRequest("m1", -1), seen)).error == 0
        assert not await world.metastore.rows(GROUP_MEMBERS, "g")
        assert not await world.metastore.rows(GROUP_PARTITIONS, "g")


def test_partitions_in_every_state_survive_their_rows_and_no_row_is_too_large() -> None:
    ids = [str(UUID(int=(n << 100) + n)) for n in range(20_000)]
    held = {topic: frozenset({0, 1}) for topic in ids} | {"no uuid": frozenset(range(100_000))}
    revoking = {topic: frozenset({1}) for topic in ids[::3]}
    target = {topic: frozenset({0, 2}) for topic in ids[::2]} | {
        "x" * 16: frozenset({5}),
        ids[0].upper(): frozenset({1}),
    }
    rows = partition_rows("g", "m", held, revoking, target)
    assert [row.number for row in rows] == list(range(len(rows)))
    stored = [GROUP_PARTITIONS.encode(row) for row in rows]
    assert max(len(value) for _, value in stored) < METASTORE_VALUE_BYTES
    read = [GROUP_PARTITIONS.decode(key, value) for key, value in stored]
    (member,) = with_partitions([GroupMemberRow("g", "m", consumer=ConsumerMember(partition_rows=len(read)))], read)
    assert member.consumer is not None
    for wanted, found in ((held, member.consumer.held), (revoking, member.consumer.revoking)):
        assert {topic: frozenset(partitions) for topic, partitions in found.items()} == wanted
    assert {topic: frozenset(partitions) for topic, partitions in member.consumer.target.items()} == target


def test_a_topic_that_is_held_and_wanted_needs_its_id_and_six_bytes() -> None:
    held = {str(UUID(int=(n << 64) + 1)): frozenset({0}) for n in range(1_000)}
    rows = partition_rows("g", "m", held, {}, held)
    assert len(rows) == 1
    assert len(GROUP_PARTITIONS.encode(rows[0])[1]) < 1_000 * (16 + 6) + 16


@pytest.mark.parametrize("stale", ["other", "m"])
def test_a_member_whose_row_counts_no_rows_of_partitions_has_those_of_its_own_row(stale: str) -> None:
    old = GroupMemberRow("g", "m", consumer=ConsumerMember(held={"t": (1,)}, target={"t": (1,)}))
    assert with_partitions([old], [GroupPartitionsRow("g", stale, 0, ((bytes(16), 1, (7,)),))]) == [old]


class OldConsumerMember(msgspec.Struct, frozen=True, array_like=True):
    """`ConsumerMember` of a version that does not know rows of partitions."""

    epoch: int = 0
    previous: int = -1
    rack_id: str | None = None
    topics: tuple[str, ...] = ()
    pattern: str = ""
    assignor: str | None = None
    held: dict[str, tuple[int, ...]] = {}
    revoking: dict[str, tuple[int, ...]] = {}
    target: dict[str, tuple[int, ...]] = {}
    away: bool = False


class OldGroupMemberRow(msgspec.Struct, frozen=True):
    group: str
    member_id: str
    instance_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    session_ms: int = 0
    rebalance_ms: int = 0
    protocols: tuple[tuple[str, bytes], ...] = ()
    assignment: bytes = b""
    consumer: OldConsumerMember | None = None


OLD_MEMBERS = Family(
    GROUP_MEMBERS.tag, "member", OldGroupMemberRow, Column("group", Kind.TEXT), Column("member_id", Kind.TEXT)
)


async def test_a_node_of_an_older_version_reads_members_of_1000_topics_and_writes_rows_that_are_read() -> None:
    async with World() as world:
        seen, led = Topics(2_000), await world.node().get("g")
        for member in ("m1", "m2"):
            assert (await led.consumer_heartbeat(joins(member), seen)).error == 0
        assert await world.metastore.rows(GROUP_PARTITIONS, "g"), "one member had all topics"
        assert (await revoked(led, "m1", 1, seen)).epoch == 2
        assert len((await led.consumer_heartbeat(HeartbeatRequest("m2", 2), seen)).assignment or ()) == 1_000
        assert not await world.metastore.rows(GROUP_PARTITIONS, "g")
        old = await world.metastore.rows(OLD_MEMBERS, "g")
        assert [len(row.consumer.held) for row in old if row.consumer] == [1_000, 1_000]
        assert [len(row.consumer.target) for row in old if row.consumer] == [1_000, 1_000]


async def test_rows_of_partitions_that_an_older_version_left_behind_have_no_meaning_and_are_deleted() -> None:
    async with World() as world:
        seen, led = Topics(2_000), await world.node().get("g")
        assert (await led.consumer_heartbeat(joins("m1"), seen)).error == 0
        assert await world.metastore.rows(GROUP_PARTITIONS, "g")
        consumer = OldConsumerMember(2, 1, pattern="t0000", held={"t": (1,)}, target={"t": (1,)})
        row = OldGroupMemberRow("g", "m1", rebalance_ms=9, consumer=consumer)
        head = await world.metastore.get(GROUPS, "g")
        assert head is not None
        heads = GROUPS.encode(msgspec.structs.replace(head, owner="old", generation=2, target_epoch=2))
        await world.metastore.commit([heads, OLD_MEMBERS.encode(row)])
        led = await world.node().get("g")
        assert isinstance(led.group, ConsumerGroup)
        member = led.group.members["m1"]
        assert member.held == member.target == {"t": frozenset({1})} and led.group.owners == {("t", 1): "m1"}
        assert (await led.consumer_heartbeat(HeartbeatRequest("m1", 2), seen)).error == 0
        assert not await world.metastore.rows(GROUP_PARTITIONS, "g")


def test_a_batch_without_room_for_partitions_in_the_rows_of_members_has_them_in_rows_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = ConsumerGroup("g", LIMITS)
    for member_id in ("m1", "m2"):
        requests.heartbeat(group, 0, joins(member_id), Topics(500))
    rows, stored = member_rows(group, {}, frozenset({"m1", "m2"}))
    assert stored == {"m1": 0, "m2": 0}
    monkeypatch.setattr(group_records, "GROUP_BYTES_MAX", 30_000)
    fewer, stored = member_rows(group, stored, frozenset({"m1", "m2"}))
    assert stored == {"m1": 1, "m2": 1}
    assert sum(len(key) + len(value) for key, value in fewer) < 30_000
    assert restored(rows).owners == restored(fewer).owners == group.owners


def restored(rows: Rows) -> ConsumerGroup:
    group = restore_group(GroupRow("g", "consumer"), stored_members(dict(rows)), LIMITS, 0)
    assert isinstance(group, ConsumerGroup)
    return group


def test_two_members_that_hold_one_partition_can_leave() -> None:
    held = ConsumerMember(1, held={"t": (1,)}, target={"t": (1,)})
    members = [GroupMemberRow("g", member_id, consumer=held) for member_id in ("m1", "m2")]
    group = restore_group(GroupRow("g", "consumer", generation=1, target_epoch=1), members, LIMITS, 0)
    assert isinstance(group, ConsumerGroup)
    for left in ("m1", "m2"):
        assert group.owners == {("t", 1): "m2"}
        assert requests.heartbeat(group, 0, HeartbeatRequest(left, -1), Topics(0)).error == 0
    assert not group.owners and not group.members


async def test_f232_a_subscription_of_more_than_one_write_can_hold_is_rejected_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sizes, "GROUP_BYTES_MAX", 50_000)
    async with World() as world:
        seen, led = Topics(2_000), await world.node().get("g")
        assert len((await led.consumer_heartbeat(joins("m1", "t000"), seen)).assignment or ()) == 100
        for ask in (joins("m2"), HeartbeatRequest("m1", 1, pattern="t")):
            refused = await led.consumer_heartbeat(ask, seen)
            assert (
                refused.error == error_codes.GROUP_MAX_SIZE_REACHED and "more than fit in one write" in refused.message
            )
            assert list(led.group.members) == ["m1"] and not led.group.unstored
        assert (await led.consumer_heartbeat(HeartbeatRequest("m1", 1), seen)).error == 0, "the group goes on"
        assert (await led.consumer_heartbeat(joins("m2", "t001"), seen)).error == 0, "and takes what fits"


def test_a_thousand_members_of_the_same_400_topics_join_and_fit_into_one_write() -> None:
    """Regression: members that the documented limits permit were rejected, because each topic name counted too much."""
    names = [f"t{n:04}" for n in range(400)]
    seen = See({name: Topic(str(UUID(int=(n << 64) + 1)), 1) for n, name in enumerate(names)})
    group = ConsumerGroup("orders", GroupLimits())
    for n in range(1_000):
        asked = HeartbeatRequest(
            str(UUID(int=n)), 0, rebalance_ms=300_000, topics=frozenset(names), owned={}, client_id="consumer-orders-1",
            client_host="/10.0.0.1",
        )  # fmt: skip
        if n in (0, 998, 999):  # a join takes time for each member
            assert requests.heartbeat(group, 0, asked, seen).error == 0
        else:
            group.members[asked.member_id] = msgspec.structs.replace(
                next(iter(group.members.values())), member_id=asked.member_id, held={}, revoking={}, target={}
            )
    rows, _ = member_rows(group, {}, frozenset(group.members))
    assert sum(len(key) + len(value) for key, value in rows) < sizes.GROUP_BYTES_MAX < METASTORE_BATCH_BYTES
    assert sum(len(member.target) for member in group.members.values()) == 400


@pytest.mark.parametrize("name_bytes", [1, 31, 32, 249, 255, 256, 65_535, 65_536])
def test_no_member_needs_more_bytes_than_the_limit_counts(name_bytes: int) -> None:
    group = ConsumerGroup("g" * 200, GroupLimits())
    names = frozenset("é" * (name_bytes // 2 - 1) + f"{n:0{2 + name_bytes % 2}}"[:name_bytes] for n in range(10))
    texts = {"instance_id": "i" * 255, "rack_id": "r" * 255, "client_id": "c" * 255, "client_host": "/" + "1" * 40}
    member = ConsumerGroupMember("m" * 255, **texts, topics=names, pattern="p" * 1_000, assignor="uniform")
    member.rebalance_ms = member.epoch = member.previous = (1 << 31) - 1
    group.members[member.member_id] = member
    ((key, value),), _ = member_rows(group, {}, frozenset(group.members))
    counted_bytes = sizes.GROUP_BYTES_MAX - sizes.PLACE_BYTES * sizes.room_for_partitions(group, [member])
    assert len(key) + len(value) <= counted_bytes < len(key) + len(value) + 1_000


def test_topics_that_are_created_beyond_the_room_of_a_group_are_left_out_until_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sizes, "GROUP_BYTES_MAX", 10_000)
    seen = Topics(100)
    group = ConsumerGroup("g", LIMITS)
    assert len(requests.heartbeat(group, 0, joins("m1"), seen).assignment or ()) == 100
    fits = sizes.room_for_topics(group, group.members.values())
    for n in range(300):
        seen.change(f"a{n:03}" if n % 2 else f"t1{n:04}", Topic(str(UUID(int=n + 2)), 1))
    answer = requests.heartbeat(group, 0, HeartbeatRequest("m1", 1), seen)
    assert len(answer.assignment or ()) == fits and group.topics_left_out == 250 - fits
    assert set(group.topics or ()) >= {f"t{n:05}" for n in range(100)}, "what is assigned stays"


@pytest.mark.parametrize("patterns", [("t",), ("t", "t00"), ("t", "t00", "t01", "t000")], ids=len)
def test_the_work_of_a_join_does_not_grow_with_members_times_topics(patterns: tuple[str, ...]) -> None:
    seen = Topics(1_500)
    work: dict[int, int] = {}
    group = ConsumerGroup("g", LIMITS)
    for count in range(61):
        ask = joins(f"m{count:02}", patterns[count % len(patterns)])
        work[count] = lines_executed(lambda ask=ask: requests.heartbeat(group, 0, ask, seen))  # type: ignore[misc]
    assert sum(len(member.target) for member in group.members.values()) == 1_500
    few, many = (max(work[count] for count in counts) for counts in (range(4, 12), range(52, 60)))
    assert many < 1.5 * few, "five times as many members"
    assert many < 100 * 1_500, "less than two lines for each topic of each member"


def test_the_rights_of_a_client_to_a_topic_are_checked_once_however_many_patterns_match_it() -> None:
    names = [f"t{n}" for n in range(10)]
    asked: list[str] = []

    def may(topic: str) -> bool:
        asked.append(topic)
        return topic != "t3"

    view = TopicView(None, {f"t{n}?": frozenset(names[: n + 1]) for n in range(10)}, may, lambda names: names)  # type: ignore[arg-type]
    assert [len(view.matching(f"t{n}?")) for n in range(10)] == [1, 2, 3, 3, 4, 5, 6, 7, 8, 9]
    assert sorted(asked) == names


def test_two_librdkafka_consumers_read_4000_topics_and_then_one_of_them_reads_all() -> None:
    broker = RealBroker(settings=KafkaSettings(KafkaSection(group_consumer_heartbeat_interval_ms=500)))
    consumers: list[ck.Consumer] = []
    try:
        for n in range(4_000):
            broker.create_topic(f"t{n:05}", 1)
        for _ in range(2):
            config = {"bootstrap.servers": broker.address, "group.id": "g", "group.protocol": "consumer"}
            consumers.append(ck.Consumer(config | {"enable.auto.commit": False}))
            consumers[-1].subscribe(["^t.*"])

        def assigned() -> list[int]:
            for each in consumers:
                message = each.poll(0.1)
                assert message is None or message.error() is None or message.error().retriable()
            return [len(each.assignment()) for each in consumers]

        eventually(lambda: assigned() == [2_000, 2_000], within_s=60)
        consumers.pop(0).close()
        eventually(lambda: assigned() == [4_000], within_s=60)
    finally:
        for each in consumers:
            each.close()
        broker.close()
