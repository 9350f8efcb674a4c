"""The consumer protocol (KIP-848) without clock, network or store."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from support.kafka.groups.world import See, stored_counts, stored_members
from tidemill.kafka import error_codes
from tidemill.kafka.groups.classic.state import ClassicGroup, GroupLimits, HeartbeatAnswer, Phase
from tidemill.kafka.groups.consumer import requests as consumer
from tidemill.kafka.groups.consumer.assignors import Partitions
from tidemill.kafka.groups.consumer.state import (
    ConsumerGroup,
    HeartbeatRequest,
    Topic,
    iterate_places,
    subtract_partitions,
)
from tidemill.kafka.groups.group_records import StoredMembers, head_row, in_protocol, member_rows, restore_group
from tidemill.metastore.rows import GROUP_MEMBERS, GROUPS

LIMITS = GroupLimits(members=5, consumer_session_ms=1_000)
TOPICS = {"a": Topic("ta", 5), "b": Topic("tb", 3)}


class World:
    """A group and its durable rows."""

    def __init__(self, limits: GroupLimits = LIMITS) -> None:
        self.now = 0
        self.seen = See(TOPICS)
        self.group = ConsumerGroup("g", limits)
        self.rows: dict[bytes, bytes] = {}
        self.before = self.rows
        self.stored: StoredMembers = {}
        self.store()

    def ask(self, member_id: str, epoch: int, **more: Any) -> HeartbeatAnswer:
        """Send a heartbeat and complete its write immediately."""
        values: dict[str, Any] = {"client_id": "c", "client_host": "/h", **more}
        said = consumer.heartbeat(self.group, self.now, HeartbeatRequest(member_id, epoch, **values), self.seen)
        self.store()
        return said

    def join(self, member_id: str, topics: str = "a", **more: Any) -> HeartbeatAnswer:
        values: dict[str, Any] = {"topics": frozenset(topics), "owned": {}, "rebalance_ms": 500, **more}
        return self.ask(member_id, 0, **values)

    def write(self) -> consumer.ConsumerWrite:
        storing = consumer.begin_store(self.group)
        self.before = self.rows
        head = GROUPS.encode(head_row(self.group, "o", 0))
        rows, self.stored = member_rows(self.group, self.stored, storing.changed)
        self.rows = {k: v for k, v in {**self.rows, **dict([head, *rows])}.items() if v}
        return storing

    def store(self) -> None:
        consumer.complete_store(self.group, self.now, self.write(), 0)

    def take_over(self) -> None:
        key = GROUPS.key("g")
        head = GROUPS.decode(key, self.rows[key])
        members = stored_members(self.rows)
        group = restore_group(head, members, self.group.limits, self.now)
        assert isinstance(group, ConsumerGroup)
        assert head.members == len(members)
        self.group, self.stored = group, stored_counts(self.rows)


def of(*partitions: int, topic: str = "ta") -> Partitions:
    return {topic: frozenset(partitions)}


# one thing at a time -----------------------------------------------------------------------------------------


def test_a_second_member_is_given_what_the_first_has_let_go_of_and_not_before() -> None:
    world = World()
    first = world.join("m1")
    assert (first.error, first.epoch, first.assignment) == (0, 1, of(0, 1, 2, 3, 4))
    second = world.join("m2")
    assert (second.epoch, second.assignment) == (2, {}), "nothing is free yet"
    assert world.group.phase is Phase.RECONCILING
    reported = world.ask("m1", 1)
    assert (reported.epoch, reported.assignment) == (1, of(0, 1, 2))
    assert world.ask("m1", 1).assignment is None, "it was told"
    assert world.ask("m2", 2).assignment is None, "and has not let go"
    assert world.ask("m1", 1, owned=of(0, 1, 2)).epoch == 2
    assert world.ask("m2", 2).assignment == of(3, 4)
    assert world.group.phase is Phase.STABLE


def test_who_names_an_old_epoch_is_heard_once_if_it_owns_nothing_else() -> None:
    world = World()
    world.join("m1")
    world.join("m2")
    world.ask("m1", 1)
    assert world.ask("m1", 1, owned=of(0, 1, 2)).epoch == 2
    again = world.ask("m1", 1, owned=of(0, 1))
    assert (again.error, again.epoch, again.assignment) == (0, 2, of(0, 1, 2)), "its answer was lost"
    assert world.ask("m1", 1, owned=of(0, 4)).error == error_codes.FENCED_MEMBER_EPOCH
    assert world.ask("m1", 1).error == error_codes.FENCED_MEMBER_EPOCH
    assert world.ask("m1", 3).error == error_codes.FENCED_MEMBER_EPOCH
    assert world.ask("m9", 1).error == error_codes.UNKNOWN_MEMBER_ID
    back = world.join("m1")
    assert (back.epoch, back.assignment) == (2, of(0, 1, 2)), "nobody else notices"


def test_commits_name_the_epoch_of_their_member() -> None:
    world = World()
    refusal = consumer.commit_error
    assert refusal(world.group, "", None, -1) == 0, "anybody while nobody is here"
    world.join("m1", instance_id="i")
    assert refusal(world.group, "", None, -1) == error_codes.UNKNOWN_MEMBER_ID
    assert refusal(world.group, "m1", None, 1) == 0
    assert refusal(world.group, "m1", "i", 1) == 0
    assert refusal(world.group, "m1", "j", 1) == error_codes.UNKNOWN_MEMBER_ID
    assert refusal(world.group, "m2", "i", 1) == error_codes.FENCED_INSTANCE_ID
    assert refusal(world.group, "m1", None, 0) == error_codes.STALE_MEMBER_EPOCH
    assert refusal(world.group, "m1", None, 2) == error_codes.STALE_MEMBER_EPOCH
    assert refusal(world.group, "m1", None, 2, in_transaction=True) == error_codes.ILLEGAL_GENERATION
    assert refusal(world.group, "", None, -1, in_transaction=True) == 0, "producers of the time before KIP-447"
    world.ask("m1", -2, instance_id="i")
    assert refusal(world.group, "m1", None, 1) == error_codes.STALE_MEMBER_EPOCH


def test_a_static_member_that_comes_back_gets_what_it_had_and_nobody_else_notices() -> None:
    world = World()
    world.join("m1", instance_id="i")
    world.join("m2", instance_id="j")
    world.ask("m1", 1)
    world.ask("m1", 1, owned=of(0, 1, 2))
    world.ask("m2", 2)
    assert world.join("m3", instance_id="i").error == error_codes.UNRELEASED_INSTANCE_ID
    assert world.ask("m1", -2, instance_id="i").epoch == -2
    assert world.ask("m1", 2, instance_id="i").error == error_codes.FENCED_MEMBER_EPOCH
    back = world.join("m3", instance_id="i")
    assert (back.epoch, back.assignment) == (2, of(0, 1, 2))
    assert world.ask("m2", 2).assignment is None
    assert world.ask("m1", 2, instance_id="i").error == error_codes.FENCED_INSTANCE_ID
    assert world.ask("m3", -1, instance_id="i").error == 0
    assert "i" not in world.group.instances


def test_f234_who_is_not_heard_of_or_does_not_let_go_in_time_is_fenced() -> None:
    world = World()
    world.join("m1", rebalance_ms=300)
    world.now = 500
    world.join("m2")
    assert world.ask("m1", 1).assignment == of(0, 1, 2)
    world.now = 800
    assert consumer.next_due_ms(world.group) == 800
    consumer.tick(world.group, world.now)
    assert list(world.group.members) == ["m2"]
    assert world.ask("m1", 1).error == error_codes.UNKNOWN_MEMBER_ID
    assert world.ask("m2", 2).assignment == of(0, 1, 2, 3, 4)
    world.now = 1_800
    consumer.tick(world.group, world.now)
    world.store()
    assert world.group.phase is Phase.EMPTY and world.group.is_idle and not world.group.owners


def test_patterns_follow_the_topics_that_exist() -> None:
    world = World()
    reported = world.join("m1", topics="", pattern="ac")
    assert reported.assignment == of(0, 1, 2, 3, 4)
    world.seen.change("c", Topic("tc", 1))
    assert world.ask("m1", 1).assignment == of(0, 1, 2, 3, 4) | of(0, topic="tc")
    world.seen.change("a", None)
    assert world.ask("m1", 2).assignment == of(0, topic="tc")
    reported = world.ask("m1", 2, owned=of(0, topic="tc"))
    assert reported.epoch == 3
    assert world.ask("m1", 3, pattern="", topics=frozenset()).assignment == {}


def test_what_does_not_exist_is_no_error_and_is_given_when_it_does() -> None:
    world = World()
    assert world.join("m1", topics="z").assignment == {}
    world.seen.change("z", Topic("tz", 2))
    assert world.ask("m1", 1).assignment == of(0, 1, topic="tz")


def test_malformed_requests_change_nothing() -> None:
    world = World(GroupLimits(members=1, member_bytes=100, bytes=150))
    world.join("m1", instance_id="i")
    before = dict(world.rows)
    bad = error_codes.INVALID_REQUEST
    for code, answer in [
        (bad, world.join("")),
        (bad, world.join("x" * 300)),
        (bad, world.join("a\x00b")),
        (bad, world.join("m2", owned=of(1))),
        (bad, world.join("m2", owned=None)),
        (bad, world.join("m2", rebalance_ms=-1)),
        (bad, world.ask("m2", 0, owned={}, rebalance_ms=5)),
        (bad, world.join("m2", instance_id="")),
        (bad, world.join("m2", rack_id="")),
        (bad, world.ask("m1", -3)),
        (bad, world.ask("m1", -2)),
        (error_codes.UNSUPPORTED_ASSIGNOR, world.join("m2", assignor="cooperative-sticky")),
        (error_codes.GROUP_MAX_SIZE_REACHED, world.join("m2")),
        (error_codes.GROUP_MAX_SIZE_REACHED, world.ask("m1", 1, topics=frozenset({"t" * 101}))),
        (error_codes.UNKNOWN_MEMBER_ID, world.ask("m2", -1)),
        (error_codes.UNKNOWN_MEMBER_ID, world.ask("m1", 1, instance_id="other")),
    ]:
        assert answer.error == code, answer
        assert world.rows == before


def test_an_answer_waits_until_all_that_it_tells_of_is_durable() -> None:
    world = World()
    group, seen = world.group, world.seen

    def ask(waiter: str, **more: Any) -> None:
        values: dict[str, Any] = {"topics": frozenset("a"), "owned": {}, **more}
        consumer.queue_answer(
            group, waiter, consumer.heartbeat(group, 0, HeartbeatRequest("m1", more.pop("epoch", 0), **values), seen)
        )

    ask("first", rebalance_ms=5)
    storing = world.write()
    said = consumer.heartbeat(group, 0, HeartbeatRequest("m1", 1, topics=frozenset("a"), owned={}), seen)
    assert said.assignment == of(0, 1, 2, 3, 4) and not group.unstored, "the same again, by who lost the answer"
    consumer.queue_answer(group, "again", said)
    assert not group.outbox, "it is still being written"
    ask("joins anew", rebalance_ms=5)
    assert group.unstored
    consumer.complete_store(group, 0, storing, 0)
    assert [waiter for waiter, _ in group.outbox] == ["first", "again"]
    consumer.release(group, error_codes.NOT_COORDINATOR)
    assert [(waiter, said.error) for waiter, said in group.outbox][2:] == [("joins anew", error_codes.NOT_COORDINATOR)]


def test_who_waits_for_a_slow_write_is_not_late_and_its_times_begin_when_it_is_told() -> None:
    world = World()
    group, seen = world.group, world.seen
    world.join("m1")
    world.join("m2")
    storing = world.write()
    said = consumer.heartbeat(group, 0, HeartbeatRequest("m1", 1), seen)
    assert said.assignment == of(0, 1, 2)
    consumer.queue_answer(group, "w", said)
    assert consumer.next_due_ms(group) == LIMITS.consumer_session_ms, "m2 can be late"
    world.now = 10_000
    consumer.tick(group, world.now)
    assert list(group.members) == ["m1"] and consumer.next_due_ms(group) is None
    consumer.complete_store(group, world.now, storing, 0)
    world.store()
    assert consumer.next_due_ms(group) == 10_500, "500 ms to let go"


def test_epochs_go_on_where_a_group_changes_its_protocol() -> None:
    classic = ClassicGroup("g", LIMITS)
    classic.generation = 7
    group = in_protocol(classic, "consumer")
    assert isinstance(group, ConsumerGroup)
    said = consumer.heartbeat(
        group, 0, HeartbeatRequest("m", 0, rebalance_ms=1, topics=frozenset("a"), owned={}), See(TOPICS)
    )
    assert said.epoch == group.epoch > 7
    consumer.heartbeat(group, 0, HeartbeatRequest("m", -1), See(TOPICS))
    back = in_protocol(group, "classic")
    assert isinstance(back, ClassicGroup) and back.generation == group.epoch


# anything in any order ---------------------------------------------------------------------------------------


class Client:
    """A member: `reported` is its assignment, `uses` the partitions that it has and has not released."""

    def __init__(self, name: str, instance: str | None, topics: frozenset[str]) -> None:
        self.name = name
        self.instance = instance
        self.topics = topics
        self.epoch = 0
        self.reported: Partitions = {}
        self.uses: dict[str, frozenset[int]] = {}
        self.waits: object = None

    def forget(self) -> None:
        self.epoch, self.reported, self.uses, self.waits = 0, {}, {}, None


class Groups(RuleBasedStateMachine):
    """Members send requests, wait, lose answers, leave and die; writes take their time, and coordinators die before
    them.
    """

    clients = Bundle("clients")

    @initialize(
        target=clients,
        shapes=st.lists(st.tuples(st.booleans(), st.sampled_from(("a", "b", "ab"))), min_size=1, max_size=6),
    )
    def begin(self, shapes: list[tuple[bool, str]]) -> Any:
        self.world = World()
        self.epochs = (0, 0)
        self.made = [
            Client(f"m{i}", f"i{i % 2}" if static else None, frozenset(topics))
            for i, (static, topics) in enumerate(shapes)
        ]
        self.writing: list[consumer.ConsumerWrite] = []
        return multiple(*self.made)

    @rule(client=clients, whole=st.booleans())
    def ask(self, client: Client, whole: bool) -> None:
        if client.waits is not None:
            return
        joins = client.epoch == 0
        group = self.world.group
        ask = HeartbeatRequest(
            client.name, client.epoch, client.instance, rebalance_ms=700 if joins else -1,
            topics=client.topics if joins or whole else None, owned=dict(client.uses),
        )  # fmt: skip
        client.waits = waiter = (client, object())
        said = consumer.heartbeat(group, self.world.now, ask, self.world.seen)
        if said.error:
            self._tell(waiter, said)
        else:
            consumer.queue_answer(group, waiter, said)
            self._deliver()

    def _deliver(self) -> None:
        outbox, self.world.group.outbox = self.world.group.outbox, []
        for waiter, said in outbox:
            self._tell(waiter, said)

    def _tell(self, waiter: Any, said: HeartbeatAnswer) -> None:
        client: Client = waiter[0]
        if client.waits is not waiter:
            return
        client.waits = None
        if said.error:
            client.forget()
            return
        assert said.epoch >= client.epoch
        self._must_be_durable(client, said)
        client.epoch = said.epoch
        if said.assignment is not None:
            client.reported = said.assignment

    def _must_be_durable(self, client: Client, said: HeartbeatAnswer) -> None:
        """CG2: the answer relies only on durable rows, without the write in progress."""
        rows = self.world.before if self.writing else self.world.rows
        key = GROUP_MEMBERS.key("g", client.name)
        if client.name in self.world.group.members:
            assert key in rows, "nobody knows it"
            kept = {row.member_id: row.consumer for row in stored_members(rows)}[client.name]
            assert kept is not None and kept.epoch >= said.epoch
            held = {topic: frozenset(partitions) for topic, partitions in kept.held.items()}
            assert not subtract_partitions(said.assignment or {}, held)

    @rule(client=clients)
    def take_up(self, client: Client) -> None:
        client.uses = {topic: frozenset(partitions) for topic, partitions in client.reported.items()}

    @rule(client=clients)
    def lose_the_answer(self, client: Client) -> None:
        client.waits = None

    @rule(client=clients)
    def leave(self, client: Client) -> None:
        if client.epoch and client.waits is None:
            consumer.heartbeat(
                self.world.group, self.world.now, HeartbeatRequest(client.name, -1, client.instance), self.world.seen
            )
        client.forget()

    @rule(client=clients)
    def leave_for_a_while(self, client: Client) -> None:
        if client.epoch and client.waits is None and client.instance:
            ask = HeartbeatRequest(client.name, -2, client.instance)
            consumer.heartbeat(self.world.group, self.world.now, ask, self.world.seen)
            client.forget()

    @rule(client=clients)
    def die(self, client: Client) -> None:
        client.forget()
        client.name += "'"

    @rule(ms=st.integers(1, 900))
    def wait(self, ms: int) -> None:
        self.world.now += ms
        due = consumer.next_due_ms(self.world.group)
        if due is not None and due <= self.world.now:
            consumer.tick(self.world.group, self.world.now)

    @rule(clients=st.sets(st.integers(0, 5)))
    def all_is_well_for_a_while(self, clients: set[int]) -> None:
        self.end_of_the_write()
        for index, client in enumerate(self.made):
            if index in clients:
                client.waits = None
                self.ask(client, False)
                self.world.store()
                self._deliver()
                self.take_up(client)

    @rule()
    def begin_to_write(self) -> None:
        if not self.writing and self.world.group.unstored:
            self.writing.append(self.world.write())

    @rule()
    def end_of_the_write(self) -> None:
        if self.writing:
            consumer.complete_store(self.world.group, self.world.now, self.writing.pop(), 0)
            self._deliver()

    @rule(landed=st.booleans())
    def another_coordinator(self, landed: bool) -> None:
        """Waiting requests get no answer. Writes that were not durable did not happen, and the one in progress may not
        have.
        """
        if self.writing and not landed:
            self.world.rows = self.world.before
        self.writing.clear()
        self.world.take_over()

    @rule(name=st.sampled_from("abc"), partitions=st.integers(0, 7), again=st.booleans())
    def topics_change(self, name: str, partitions: int, again: bool) -> None:
        self.world.seen.change(name, Topic(f"t{name}{int(again)}", partitions) if partitions else None)

    @invariant()
    def nobody_holds_what_another_has(self) -> None:
        if not hasattr(self, "world"):
            return
        group = self.world.group
        held = Counter(place for member in group.members.values() for place in iterate_places(member.held))
        assert max(held.values(), default=0) <= 1
        assert group.owners == {p: m.member_id for m in group.members.values() for p in iterate_places(m.held)}
        assert all(not subtract_partitions(m.revoking, m.held) for m in group.members.values())
        used = Counter(p for c in self.made if self._is_member(c) for p in iterate_places(c.uses))
        assert max(used.values(), default=0) <= 1, used
        assert len(group.members) <= LIMITS.members

    def _is_member(self, client: Client) -> bool:
        """Return whether the group has the client as a member. A fenced client may not know about it yet, and can
        commit nothing.
        """
        member = self.world.group.members.get(client.name)
        return member is not None and client.epoch in (member.epoch, member.previous) and client.epoch > 0

    @invariant()
    def epochs_only_grow(self) -> None:
        if hasattr(self, "world"):
            key = GROUPS.key("g")
            head = GROUPS.decode(key, (self.world.before if self.writing else self.world.rows)[key])
            assert head.generation >= self.epochs[0] and head.target_epoch >= self.epochs[1]
            assert head.target_epoch <= head.generation
            self.epochs = (head.generation, head.target_epoch)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        if self.writing:
            consumer.complete_store(self.world.group, self.world.now, self.writing.pop(), 0)
        self.world.store()
        for _ in range(4):
            self.world.now += 600
            consumer.tick(self.world.group, self.world.now)
        for _ in range(12):
            for client in self.made:
                client.waits = None
                self.ask(client, False)
                self.world.store()
                self._deliver()
                self.take_up(client)
                self.nobody_holds_what_another_has()
            self.world.now += 10
        group = self.world.group
        if group.members:
            assert group.phase is Phase.STABLE
            wanted = {name for m in group.members.values() for name in m.topics} & self.world.seen.topics.keys()
            topics = [self.world.seen.topics[name] for name in wanted]
            assert set(group.owners) == {(t.topic_id, p) for t in topics for p in range(t.partitions)}
            live = [c for c in self.made if c.epoch]
            assert Counter(p for c in live for p in iterate_places(c.uses)) == Counter(group.owners.keys())


Groups.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestGroups = Groups.TestCase
