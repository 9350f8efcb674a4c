"""Consumer groups with real clients in separate processes: they join, leave and die, and together read every record."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import ConsumerGroupState
from confluent_kafka.admin import AdminClient

from support.kafka.groups.members import CLIENTS, PARTITIONS, PATIENT, SETTINGS, Member, produce, shared
from support.kafka.harness import Cluster, RealBroker
from support.waiting import DEADLINE_S, eventually
from tidemill.kafka.groups.consumer.state import ConsumerGroup


@pytest.fixture
def members() -> Iterator[list[Member]]:
    made: list[Member] = []
    yield made
    for member in made:
        member.end()


@pytest.fixture
def node() -> Iterator[RealBroker]:
    broker = RealBroker(settings=SETTINGS)
    yield broker
    broker.close()


@pytest.mark.parametrize(("client", "strategy"), CLIENTS)
def test_f230_consumers_join_leave_and_die_and_every_record_is_read(
    node: RealBroker, members: list[Member], client: str, strategy: str
) -> None:
    node.create_topic("t", PARTITIONS)

    def join() -> Member:
        member = Member(client, strategy, node.address, "g", "t")
        members.append(member)
        return member

    def read(count: int) -> None:
        everything = {(n % PARTITIONS, n // PARTITIONS) for n in range(count)}
        eventually(lambda: {place for member in members for place in member.got} >= everything)

    first = join()
    eventually(lambda: shared(first))
    produce(node.address, "t", 0, 80)
    read(80)
    second = join()
    eventually(lambda: shared(first, second))
    produce(node.address, "t", 80, 80)
    read(160)
    third = join()
    eventually(lambda: shared(first, second, third))
    first.leave()
    eventually(lambda: shared(second, third))
    second.kill()
    eventually(lambda: shared(third))
    produce(node.address, "t", 160, 80)
    read(240)
    # Members commit offsets before they report records, so none is reported twice, not even after the kill.
    places = [place for member in members for place in member.got]
    assert len(places) == len(set(places))
    third.leave()
    admin = AdminClient({"bootstrap.servers": node.address})
    empty = eventually(lambda: _state(admin, "g") is ConsumerGroupState.EMPTY or None)
    assert empty
    assert admin.delete_consumer_groups(["g"])["g"].result(DEADLINE_S) is None
    assert "g" not in {group.group_id for group in admin.list_consumer_groups().result(DEADLINE_S).valid}


def _state(admin: AdminClient, group: str) -> Any:
    return admin.describe_consumer_groups([group])[group].result(DEADLINE_S).state


def _generation(node: Any, name: str) -> int:
    """Return the generation of a classic group, or the epoch of a group of the consumer protocol."""
    led = node.server._groups.loaded_group(name)
    assert led is not None
    group = led.group
    return group.epoch if isinstance(group, ConsumerGroup) else group.generation


@pytest.mark.parametrize("strategy", ["cooperative", "consumer"])
def test_a_coordinator_that_dies_costs_no_rebalance(members: list[Member], strategy: str) -> None:
    cluster = Cluster("n1", "n2", settings=PATIENT)
    try:
        cluster.portal.call(cluster.nodes[0].catalogue.create_topic("t", PARTITIONS))
        # A group whose coordinator is the first node.
        group = next(
            name
            for name in map("g{}".format, range(100))
            if cluster.nodes[0].server._groups._is_own(name)  # type: ignore[union-attr]
        )
        for _ in range(2):
            members.append(Member("confluent", strategy, cluster.addresses, group, "t", patient=True))
        eventually(lambda: shared(*members))
        produce(cluster.addresses, "t", 0, 40)
        eventually(lambda: len({p for m in members for p in m.got}) == 40)
        before = [member.assigned for member in members]
        generation = _generation(cluster.nodes[0], group)
        cluster.stop(cluster.nodes[0])
        produce(cluster.addresses, "t", 40, 40)
        eventually(lambda: len({p for m in members for p in m.got}) == 80)
        assert [member.assigned for member in members] == before
        assert _generation(cluster.nodes[1], group) == generation, "nobody was assigned anything anew"
        assert len([p for m in members for p in m.got]) == 80, "offsets moved with the group"
    finally:
        cluster.close()


@pytest.mark.parametrize("strategy", ["cooperative", "consumer"])
def test_a_static_member_that_comes_back_in_time_causes_no_rebalance(members: list[Member], strategy: str) -> None:
    node = RealBroker(settings=PATIENT)
    try:
        node.create_topic("t", PARTITIONS)
        for instance in ("a", "b"):
            members.append(Member("confluent", strategy, node.address, "g", "t", instance, patient=True))
        eventually(lambda: shared(*members))
        held, kept, generation = members[0].assigned, members[1].assigned, _generation(node, "g")
        if strategy == "consumer":
            # ^it announces its return; otherwise its instance stays taken until the session expires
            members[0].leave()
        else:
            members[0].kill()
        members.append(Member("confluent", strategy, node.address, "g", "t", "a", patient=True))
        eventually(lambda: members[2].assigned == held)
        assert members[1].assigned == kept
        # The number of callbacks is not checked: a callback of a finished rebalance may arrive after it.
        assert _generation(node, "g") == generation
    finally:
        node.close()


def test_a_pattern_follows_the_topics_that_come_and_its_members_share_them(
    node: RealBroker, members: list[Member]
) -> None:
    node.create_topic("t-1", PARTITIONS)
    for _ in range(2):
        members.append(Member("confluent", "consumer", node.address, "g", "^t-[0-9]$"))
    eventually(lambda: shared(*members))
    node.create_topic("t-2", PARTITIONS)
    node.create_topic("t-10", PARTITIONS)
    for topic in ("t-1", "t-2", "t-10"):
        produce(node.address, topic, 0, 40)
    eventually(lambda: len([place for member in members for place in member.got]) == 80)
    assert {topic for member in members for topic in member.topics} == {"t-1", "t-2"}


def test_groups_and_offsets_outlive_every_node(members: list[Member], tmp_path: Path) -> None:
    broker = RealBroker(f"file://{tmp_path}/objects", f"sqlite://{tmp_path}/consensus.db", PATIENT)
    try:
        broker.create_topic("t", PARTITIONS)
        member = Member("confluent", "eager", broker.address, "g", "t", patient=True)
        members.append(member)
        produce(broker.address, "t", 0, 40)
        eventually(lambda: len(member.got) == 40)
        before = member.assignments
        broker.restart()
        produce(broker.address, "t", 40, 40)
        eventually(lambda: len(member.got) == 80)
        assert member.assignments == before
    finally:
        broker.close()
