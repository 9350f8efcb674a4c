"""Rolling changes of a group's protocol (KIP-848) with real clients: every record is committed, and once."""

from __future__ import annotations

from collections.abc import Iterator

import confluent_kafka as ck
import msgspec
import pytest
from confluent_kafka import ConsumerGroupState, ConsumerGroupType
from confluent_kafka.admin import AdminClient, ConsumerGroupDescription

from support.kafka.groups.members import CLIENTS, PARTITIONS, PATIENT, SETTINGS, Member, committed, produce, shared
from support.kafka.harness import Cluster, RealBroker
from support.waiting import eventually

DEADLINE_S = 90
AT_ONCE = 40


class Group:
    """The members of a group, and the number of records produced for them."""

    def __init__(self, addresses: str, *, patient: bool = False) -> None:
        self._addresses = addresses
        self._patient = patient
        self._made: list[Member] = []
        self.live: list[Member] = []
        self._count = 0

    def close(self) -> None:
        for member in self._made:
            member.end()

    def join(self, client: str, strategy: str, instance: str = "") -> Member:
        member = Member(client, strategy, self._addresses, "g", "t", instance, patient=self._patient)
        self._made.append(member)
        self.live.append(member)
        return member

    def leave(self, member: Member) -> None:
        self.live.remove(member)
        member.leave()

    def produce(self) -> None:
        produce(self._addresses, "t", self._count, AT_ONCE)
        self._count += AT_ONCE

    def rests(self, kind: ConsumerGroupType) -> None:
        """Wait until every member has partitions, everything is committed, and the group has the expected type."""
        end = [self._count // PARTITIONS] * PARTITIONS
        eventually(lambda: shared(*self.live))
        eventually(lambda: committed(self._addresses, "g", "t") == end)
        admin = AdminClient({"bootstrap.servers": self._addresses})

        def stable() -> ConsumerGroupDescription | None:
            found = admin.describe_consumer_groups(["g"])["g"].result(DEADLINE_S)
            return found if found.state is ConsumerGroupState.STABLE else None

        found = eventually(stable)
        assert found is not None
        assert found.type is kind and len(found.members) == len(self.live)

    def reported(self) -> list[tuple[int, int]]:
        return [place for member in self._made for place in member.got]

    def all_reported_once(self) -> bool:
        """Wait until every record that was produced is reported, or its commit as one of unknown outcome: a report
        follows the commit through a pipe. Return whether none is reported twice."""

        def places() -> set[tuple[int, int]]:
            return {*self.reported(), *(place for member in self._made for place in member.unsure)}

        eventually(lambda: len(places()) == self._count)
        return len(self.reported()) == len(set(self.reported()))


@pytest.fixture
def group() -> Iterator[Group]:
    broker = RealBroker(settings=SETTINGS)
    broker.create_topic("t", PARTITIONS)
    made = Group(broker.address)
    yield made
    made.close()
    broker.close()


@pytest.mark.parametrize(("client", "strategy"), [each for each in CLIENTS if each[1] != "consumer"])
def test_a_rolling_upgrade_and_downgrade_commits_every_record_once(group: Group, client: str, strategy: str) -> None:
    old = [group.join(client, strategy) for _ in range(2)]
    group.produce()
    group.rests(ConsumerGroupType.CLASSIC)
    new = []
    for member in old:
        new.append(group.join("confluent", "consumer"))
        group.produce()
        group.rests(ConsumerGroupType.CONSUMER)
        group.leave(member)
        group.produce()
        group.rests(ConsumerGroupType.CONSUMER)
    for member, kind in zip(new, (ConsumerGroupType.CONSUMER, ConsumerGroupType.CLASSIC), strict=True):
        group.join(client, strategy)
        group.produce()
        group.rests(ConsumerGroupType.CONSUMER)
        group.leave(member)
        group.produce()
        group.rests(kind)
    # Members report only committed records, and no record is read a second time.
    assert len(group.reported()) == len(set(group.reported()))
    if client == "confluent":
        assert group.all_reported_once()


def test_static_members_are_replaced_one_by_one_under_their_instance(group: Group) -> None:
    instances = ("i0", "i1")
    members_of = {each: group.join("confluent", "cooperative", each) for each in instances}
    group.produce()
    group.rests(ConsumerGroupType.CLASSIC)
    for strategy, kinds in (
        ("consumer", (ConsumerGroupType.CONSUMER, ConsumerGroupType.CONSUMER)),
        ("cooperative", (ConsumerGroupType.CONSUMER, ConsumerGroupType.CLASSIC)),
    ):
        for instance, kind in zip(instances, kinds, strict=True):
            group.leave(members_of[instance])
            members_of[instance] = group.join("confluent", strategy, instance)
            group.produce()
            group.rests(kind)
    assert group.all_reported_once()


def test_members_that_die_leave_the_group_in_the_protocol_of_the_others(group: Group) -> None:
    old = group.join("confluent", "eager")
    new = group.join("confluent", "consumer")
    group.produce()
    group.rests(ConsumerGroupType.CONSUMER)
    group.live.remove(new)
    new.kill()
    group.produce()
    group.rests(ConsumerGroupType.CLASSIC)
    new = group.join("confluent", "consumer")
    group.produce()
    group.rests(ConsumerGroupType.CONSUMER)
    group.live.remove(old)
    old.kill()
    group.produce()
    group.rests(ConsumerGroupType.CONSUMER)
    assert len(group.reported()) == len(set(group.reported()))


def test_a_coordinator_that_dies_leaves_members_of_both_protocols_as_they_are() -> None:
    cluster = Cluster("n1", "n2", settings=PATIENT)
    group = Group(cluster.addresses, patient=True)
    try:
        cluster.portal.call(cluster.nodes[0].catalogue.create_topic("t", PARTITIONS))
        led_by = next(n for n in cluster.nodes if n.server._groups._is_own("g"))  # type: ignore[union-attr]
        group.join("confluent", "cooperative")
        group.produce()
        group.rests(ConsumerGroupType.CLASSIC)
        group.join("confluent", "consumer")
        group.produce()
        group.rests(ConsumerGroupType.CONSUMER)
        before = [member.assignments for member in group.live]
        cluster.stop(led_by)
        group.produce()
        group.rests(ConsumerGroupType.CONSUMER)
        assert [member.assignments for member in group.live] == before, "nobody was assigned anything anew"
        assert len(group.reported()) == len(set(group.reported()))
    finally:
        group.close()
        cluster.close()


def test_a_node_that_upgrades_nothing_says_so() -> None:
    section = SETTINGS.section.model_copy(update={"group_consumer_migration_policy": "disabled"})
    broker = RealBroker(settings=msgspec.structs.replace(SETTINGS, section=section))
    group = Group(broker.address)
    try:
        broker.create_topic("t", PARTITIONS)
        group.join("confluent", "cooperative")
        group.produce()
        group.rests(ConsumerGroupType.CLASSIC)
        refused = ck.Consumer(
            {"bootstrap.servers": broker.address, "group.id": "g", "group.protocol": "consumer"}
        )  # fmt: skip
        refused.subscribe(["t"])
        reported = eventually(lambda: (m := refused.poll(0.2)) is not None and m.error())
        assert reported.code() == ck.KafkaError._FATAL and "The group id does not exist" in reported.str()
        refused.close()
        group.produce()
        group.rests(ConsumerGroupType.CLASSIC)
    finally:
        group.close()
        broker.close()
