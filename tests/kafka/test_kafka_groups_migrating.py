"""A group that changes its protocol while members are in it, without clock, network or store (KIP-848)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from support.kafka.groups.world import (
    ALL,
    COOPERATIVE,
    EAGER,
    LIMITS,
    PARTITIONS,
    REBALANCE_MS,
    SESSION_MS,
    TOPIC,
    ClassicMember,
    Member,
    ModernMember,
    World,
    settled,
    shared,
    subscription,
)
from tidemill.kafka import error_codes
from tidemill.kafka.groups import protocol_dispatch
from tidemill.kafka.groups.classic.state import (
    ClassicGroup,
    GroupLimits,
    HeartbeatAnswer,
    JoinRequest,
    Phase,
    SyncRequest,
)
from tidemill.kafka.groups.consumer.state import ConsumerGroup, HeartbeatRequest, iterate_places
from tidemill.kafka.groups.subscriptions import decode_assignment, decode_subscription, encode_assignment
from tidemill.kafka.schema.primitives import I32, MalformedFrameError


# one thing at a time -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("protocol", [EAGER, COOPERATIVE])
def test_a_group_goes_over_and_back_as_its_members_change_one_after_the_other(protocol: str) -> None:
    world = World()
    old: list[Member] = [ClassicMember(world, f"c{i}", protocol) for i in range(2)]
    settled(world, old)
    assert isinstance(world.group, ClassicGroup) and world.group.phase is Phase.STABLE and shared(old) == ALL
    new: list[Member] = [ModernMember(world, "m0")]
    settled(world, [*old, *new])
    assert isinstance(world.group, ConsumerGroup) and world.group.phase is Phase.STABLE
    assert shared([*old, *new]) == ALL and all(member.uses for member in (*old, *new))
    gone = old.pop()
    assert world.leave(gone.member_id) == 0  # type: ignore[attr-defined]
    new.append(ModernMember(world, "m1"))
    settled(world, [*old, *new])
    assert shared([*old, *new]) == ALL and all(member.uses for member in (*old, *new))
    for member in new:
        world.consumer_heartbeat("leaves", HeartbeatRequest(member.name, -1))
    world.settle()
    assert isinstance(world.answers["leaves"], HeartbeatAnswer) and world.answers["leaves"].error == 0
    assert isinstance(world.group, ClassicGroup) and world.group.phase is Phase.PREPARING
    settled(world, old)
    assert shared(old) == ALL


def test_what_a_cooperative_member_owns_is_given_to_nobody_before_it_has_joined_without_it() -> None:
    """CS1, across the protocols."""
    world = World()
    old, new = ClassicMember(world, "c", COOPERATIVE), ModernMember(world, "m")
    settled(world, [old])
    assert len(old.uses) == PARTITIONS
    while old.phase != "join" or len(old.uses) == PARTITIONS:
        for member in (old, new, new):
            member.step()
            world.settle()
            assert not old.uses & new.uses and not new.uses
    assert len(old.uses) == PARTITIONS // 2, "it was told, has let go, and not said so"
    settled(world, [old, new])
    assert shared([old, new]) == ALL


def test_who_is_up_to_date_commits_on_the_way_back_into_the_classic_protocol() -> None:
    world = World()
    old = ClassicMember(world, "c", COOPERATIVE)
    settled(world, [old])
    new = ModernMember(world, "m")
    settled(world, [old, new])
    generation, used = old.generation, old.uses
    world.consumer_heartbeat("leaves", HeartbeatRequest(new.member_id, -1))
    world.settle()
    assert isinstance(world.group, ClassicGroup) and world.group.generation == generation
    assert protocol_dispatch.commit_error(world.group, world.now, old.member_id, None, generation) == 0
    assert world.heartbeat(old.member_id, generation) == error_codes.REBALANCE_IN_PROGRESS
    settled(world, [old])
    assert used < old.uses and old.generation == generation + 1


def test_a_rebalance_that_is_owed_is_not_forgotten_with_its_coordinator() -> None:
    """MI2: otherwise the partitions of the last member of the consumer protocol would stay unassigned."""
    world = World()
    members = [ClassicMember(world, "c", EAGER), ModernMember(world, "m")]
    settled(world, members[:1])
    settled(world, list(members))
    world.consumer_heartbeat("leaves", HeartbeatRequest(members[1].name, -1))
    world.settle()
    world.take_over()
    assert isinstance(world.group, ClassicGroup) and world.group.phase is Phase.PREPARING
    settled(world, members[:1])
    assert shared(members[:1]) == ALL


def test_a_group_that_might_not_go_back_does_when_its_next_coordinator_allows_it() -> None:
    world = World(msgspec.structs.replace(LIMITS, downgrades=False))
    members = [ClassicMember(world, "c", EAGER), ModernMember(world, "m")]
    settled(world, members[:1])
    settled(world, list(members))
    world.consumer_heartbeat("leaves", HeartbeatRequest(members[1].name, -1))
    settled(world, members[:1])
    assert isinstance(world.group, ConsumerGroup) and shared(members[:1]) == ALL
    world.limits = LIMITS
    world.take_over()
    assert isinstance(world.group, ClassicGroup)
    settled(world, members[:1])
    assert world.group.phase is Phase.STABLE and shared(members[:1]) == ALL


def test_static_members_change_the_protocol_under_their_instance() -> None:
    world = World()
    old = ClassicMember(world, "c", EAGER, "i")
    stays = ClassicMember(world, "s", EAGER, "j")
    settled(world, [old, stays])
    new = ModernMember(world, "m", "i")
    settled(world, [stays, new])
    assert isinstance(world.group, ConsumerGroup) and set(world.group.instances) == {"i", "j"}
    assert world.heartbeat(old.member_id, old.generation, "i") == error_codes.FENCED_INSTANCE_ID
    assert shared([stays, new]) == ALL
    group = world.group
    for bad in ({"session_ms": 1}, {"protocol_type": "connect"}, {"protocols": ((EAGER, b""),)}):
        values: dict[str, Any] = {"session_ms": SESSION_MS, "protocol_type": "consumer",
                                  "protocols": ((EAGER, subscription()),), **bad}  # fmt: skip
        world.join("bad", JoinRequest("", "b.0", "i", "c", "/h", rebalance_ms=9, **values))
        assert world.answers.pop("bad").error and world.group is group and new.member_id in group.members
    back = ClassicMember(world, "b", EAGER, "i")
    settled(world, [stays, back])
    assert isinstance(world.group, ClassicGroup) and world.group.phase is Phase.STABLE
    assert set(world.group.members) == {stays.member_id, back.member_id} and shared([stays, back]) == ALL
    world.consumer_heartbeat("old", HeartbeatRequest(new.member_id, new.generation, "i"))
    assert (
        isinstance(world.answers["old"], HeartbeatAnswer)
        and world.answers["old"].error == error_codes.UNKNOWN_MEMBER_ID
    )


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"upgrades": False}, error_codes.GROUP_ID_NOT_FOUND),
        ({"protocol_type": "connect"}, error_codes.GROUP_ID_NOT_FOUND),
        ({"metadata": b"\x00"}, error_codes.GROUP_ID_NOT_FOUND),
        ({"assignment": encode_assignment(0, {TOPIC: [0]})[:-4] + I32.pack(1) + b"u"}, error_codes.GROUP_ID_NOT_FOUND),
        ({"assignment": b"\x00"}, error_codes.GROUP_ID_NOT_FOUND),
        ({"both": encode_assignment(0, {TOPIC: [0]})}, error_codes.GROUP_ID_NOT_FOUND),
        ({"unstored": True}, error_codes.COORDINATOR_LOAD_IN_PROGRESS),
        ({"phase": Phase.PREPARING}, error_codes.COORDINATOR_LOAD_IN_PROGRESS),
    ],
    ids=str,
)
def test_a_group_that_cannot_go_over_says_so_and_stays_as_it_is(changed: dict[str, Any], code: int) -> None:
    world = World(GroupLimits(initial_delay_ms=0, session_ms_min=10, upgrades=changed.get("upgrades", True)))
    members: list[Member] = [ClassicMember(world, f"c{i}", EAGER) for i in range(2)]
    settled(world, members)
    group = world.group
    assert isinstance(group, ClassicGroup)
    first = next(iter(group.members.values()))
    first.protocols = ((EAGER, changed.get("metadata", first.metadata(EAGER))),)
    first.assignment = changed.get("assignment", first.assignment)
    for member in group.members.values() if "both" in changed else ():
        member.assignment = changed["both"]
    group.protocol_type = changed.get("protocol_type", group.protocol_type)
    group.unstored = changed.get("unstored", False)
    group.phase = changed.get("phase", group.phase)
    world.consumer_heartbeat("w", HeartbeatRequest("m", 0, rebalance_ms=1, topics=frozenset({TOPIC}), owned={}))
    said = world.answers["w"]
    assert isinstance(said, HeartbeatAnswer) and said.error == code and said.message
    assert world.group is group and set(group.members) == {m.member_id for m in members}  # type: ignore[attr-defined]


def test_an_assignment_that_echoes_what_its_member_said_loses_nothing() -> None:
    world = World()
    settled(world, [ClassicMember(world, "c", EAGER)])
    (member,) = world.group.members.values()
    assert not isinstance(world.group, ConsumerGroup)
    said = subscription(version=0)[:-4] + I32.pack(1) + b"u"
    member.protocols = ((EAGER, said),)  # type: ignore[union-attr]
    member.assignment = encode_assignment(0, {TOPIC: [0, 1, 2, 3]})[:-4] + I32.pack(1) + b"u"  # type: ignore[union-attr]
    settled(world, [ModernMember(world, "m")], 2)
    assert isinstance(world.group, ConsumerGroup) and len(world.group.members) == 2


def test_what_is_no_request_of_a_classic_member_in_such_a_group_is_refused() -> None:
    world = World()
    old, new = ClassicMember(world, "c", EAGER), ModernMember(world, "m")
    settled(world, [old])
    settled(world, [old, new])
    group, generation = world.group, old.generation
    assert isinstance(group, ConsumerGroup)
    before = dict(world.rows)

    def join(member_id: str = "", instance: str | None = None, **more: Any) -> int:
        values: dict[str, Any] = {"session_ms": SESSION_MS, "protocol_type": "consumer",
                                  "protocols": ((EAGER, subscription()),), **more}  # fmt: skip
        world.join("j", JoinRequest(member_id, "new", instance, "c", "/h", rebalance_ms=9, knows_first=True, **values))
        return world.answers.pop("j").error

    assert join(session_ms=1) == error_codes.INVALID_SESSION_TIMEOUT
    assert join(protocol_type="connect") == error_codes.INCONSISTENT_GROUP_PROTOCOL
    assert join(protocols=()) == error_codes.INCONSISTENT_GROUP_PROTOCOL
    assert join(protocols=((COOPERATIVE, subscription()),)) == error_codes.INCONSISTENT_GROUP_PROTOCOL
    assert join(member_id="other", protocols=((EAGER, b"\x00"),)) == error_codes.INCONSISTENT_GROUP_PROTOCOL
    assert join(member_id="x" * 300) == error_codes.UNKNOWN_MEMBER_ID
    assert join(member_id="other", instance="nobody's") == error_codes.UNKNOWN_MEMBER_ID
    assert join(instance="i", session_ms=1) == error_codes.INVALID_SESSION_TIMEOUT
    assert join(member_id=new.member_id) == error_codes.UNKNOWN_MEMBER_ID, "it speaks the other protocol"
    assert (
        join(protocols=((EAGER, subscription(topic="x" * (200 << 10 >> 3))),) * 9) == error_codes.GROUP_MAX_SIZE_REACHED
    )
    assert join() == error_codes.MEMBER_ID_REQUIRED

    def sync(member_id: str, generation: int, **more: Any) -> int:
        world.sync("s", SyncRequest(member_id, None, generation, **more))
        return world.answers.pop("s").error

    assert sync("other", generation) == error_codes.UNKNOWN_MEMBER_ID
    assert sync(new.member_id, new.generation) == error_codes.UNKNOWN_MEMBER_ID
    assert sync(old.member_id, generation + 1) == error_codes.ILLEGAL_GENERATION
    assert sync(old.member_id, generation, protocol="sticky") == error_codes.INCONSISTENT_GROUP_PROTOCOL
    assert sync(old.member_id, generation, protocol_type="connect") == error_codes.INCONSISTENT_GROUP_PROTOCOL
    assert sync(old.member_id, generation) == 0
    assert world.heartbeat("other", generation) == error_codes.UNKNOWN_MEMBER_ID
    assert world.heartbeat(new.member_id, new.generation) == error_codes.UNKNOWN_MEMBER_ID
    assert world.heartbeat(old.member_id, generation - 1) == error_codes.ILLEGAL_GENERATION
    assert world.leave("other") == world.leave(new.member_id) == error_codes.UNKNOWN_MEMBER_ID
    assert protocol_dispatch.commit_error(group, 0, old.member_id, None, generation) == 0
    assert (
        protocol_dispatch.commit_error(group, 0, old.member_id, None, generation - 1) == error_codes.ILLEGAL_GENERATION
    )
    assert (
        protocol_dispatch.commit_error(group, 0, new.member_id, None, generation - 1) == error_codes.STALE_MEMBER_EPOCH
    )
    for epoch in (generation, -1):
        world.consumer_heartbeat("b", HeartbeatRequest(old.member_id, epoch))
        assert world.answers.pop("b").error == error_codes.UNKNOWN_MEMBER_ID, "it speaks the other protocol"
    assert world.rows == before and not group.unstored


def test_f235_a_classic_member_that_does_not_do_as_it_is_told_in_time_is_fenced() -> None:
    world = World()
    old, new = ClassicMember(world, "c", EAGER), ModernMember(world, "m")
    settled(world, [old])
    for _ in range(3):
        new.step()
        world.settle()
    assert world.heartbeat(old.member_id, old.generation) == error_codes.REBALANCE_IN_PROGRESS
    reported_at = world.now
    for _ in range(8):
        world.now += 100
        world.heartbeat(old.member_id, old.generation)
        world.tick()
        new.step()
        new.step()
        world.settle()
    assert world.now > reported_at + REBALANCE_MS and set(world.group.members) == {new.member_id}
    settled(world, [new])
    assert shared([new]) == ALL


def test_f235_a_fenced_member_that_joins_again_with_partitions_is_unknown_until_it_has_dropped_them() -> None:
    """Regression: the member joined again, and could commit offsets of partitions that another member had."""
    world = World()
    old, new = ClassicMember(world, "c", COOPERATIVE), ModernMember(world, "m")
    settled(world, [old], 8)
    for member in (new, new, old, old):
        member.step()
        world.settle()
    world.now += 66
    world.tick()
    for member in (new, new, old, old):
        member.step()
        world.settle()
    fenced = old.member_id
    world.now += REBALANCE_MS - 66
    world.tick()
    assert set(world.group.members) == {new.member_id}, "fenced, before the answer of its SyncGroup has arrived"
    for member in (new, new, old, old):
        member.step()
        world.settle()
    assert old.uses and old.uses < new.uses and old.phase == "join"
    old.step()
    assert not old.uses and old.member_id != fenced and set(world.group.members) == {new.member_id}
    settled(world, [old, new])
    assert shared([old, new]) == ALL


# what consumers write ------------------------------------------------------------------------------------------------
@given(st.dictionaries(st.text(max_size=20), st.sets(st.integers(0, 2**31 - 1), max_size=5), max_size=5), st.integers())
def test_an_assignment_reads_as_it_was_written(partitions: dict[str, set[int]], version: int) -> None:
    partitions = {topic.encode("utf-8", "replace").decode(): numbers for topic, numbers in partitions.items()}
    places_, user_data = decode_assignment(encode_assignment(version, partitions))
    assert sorted(places_) == sorted((topic, p) for topic, numbers in partitions.items() for p in numbers)
    assert user_data == b""


@pytest.mark.parametrize("version", range(4))
def test_subscriptions_of_every_version_are_read(version: int) -> None:
    found = decode_subscription(subscription(frozenset({1, 3}), version=version))
    assert (found.version, found.topics) == (version, {TOPIC})
    assert found.owned == (((TOPIC, 1), (TOPIC, 3)) if version else ()) and found.rack_id is None


@given(st.binary(max_size=60))
def test_whatever_is_no_subscription_or_assignment_is_a_bad_frame(data: bytes) -> None:
    for read in (decode_subscription, decode_assignment):
        try:
            read(data)  # type: ignore[operator]
        except MalformedFrameError:
            continue


# anything in any order -----------------------------------------------------------------------------------------------
class Groups(RuleBasedStateMachine):
    """Members of both protocols send requests, wait, lose answers, leave and die; writes take their time, coordinators
    die.
    """

    members = Bundle("members")

    @initialize(
        target=members,
        kinds=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=5),
        protocol=st.sampled_from((EAGER, COOPERATIVE)),
        rounds=st.sampled_from((0, 8, 30)),
    )
    def begin(self, kinds: list[tuple[bool, bool]], protocol: str, rounds: int) -> Any:
        self.world = World()
        self.made: list[Member] = []
        for i, (is_modern, is_static) in enumerate(kinds):
            instance = f"i{i}" if is_static else None
            self.made.append(
                ModernMember(self.world, f"m{i}", instance)
                if is_modern
                else ClassicMember(self.world, f"c{i}", protocol, instance)
            )
        self.protocol = protocol
        classic = [member for member in self.made if isinstance(member, ClassicMember)]
        settled(self.world, [*classic], rounds)
        return multiple(*range(len(kinds)))

    @rule(member=members, times=st.integers(1, 4))
    def step(self, member: int, times: int) -> None:
        for _ in range(times):
            self.made[member].step()

    @rule(times=st.integers(1, 6), without=st.sets(st.integers(0, 4)))
    def go_on(self, times: int, without: set[int]) -> None:
        for _ in range(times):
            for index, member in enumerate(self.made):
                if index not in without:
                    member.step()
                    self.world.settle()
            self.world.now += 5
            self.world.tick()

    @rule(order=st.lists(st.integers(0, 4), min_size=4, max_size=24))
    def interleave(self, order: list[int]) -> None:
        for index in order:
            self.made[index % len(self.made)].step()
            self.world.settle()
            self.nobody_uses_what_another_uses()

    @rule(member=members)
    def lose_the_answer(self, member: int) -> None:
        self.made[member].lose()

    @rule(member=members)
    def leave(self, member: int) -> None:
        self._go(self.made[member])

    def _go(self, member: Member) -> None:
        if isinstance(member, ClassicMember):
            if member.member_id and member.instance is None:
                self.world.leave(member.member_id)
                self.world.deliver(self.world.group)
        elif isinstance(member, ModernMember) and member.generation:
            self.world.consumer_heartbeat(
                object(), HeartbeatRequest(member.member_id, -2 if member.instance else -1, member.instance)
            )
        member.lose()

    @rule(member=members, politely=st.booleans())
    def change_the_protocol(self, member: int, politely: bool) -> None:
        """Upgrade or downgrade one member, as in a rolling restart; a static member keeps its instance id."""
        old = self.made[member]
        assert isinstance(old, ClassicMember | ModernMember)
        if politely:
            self._go(old)
        name = f"{old.name}'"
        self.made[member] = (
            ModernMember(self.world, name, old.instance)
            if isinstance(old, ClassicMember)
            else ClassicMember(self.world, name, self.protocol, old.instance)
        )

    @rule(ms=st.integers(1, 900))
    def wait(self, ms: int) -> None:
        self.world.now += ms
        self.world.tick()

    @rule()
    def begin_to_write(self) -> None:
        if self.world.writing is None and self.world.group.unstored:
            self.world.write()

    @rule()
    def end_of_the_write(self) -> None:
        self.world.written()

    @rule(landed=st.booleans())
    def another_coordinator(self, landed: bool) -> None:
        self.world.take_over(landed=landed)
        for member in self.made:
            if member.waits is not None:  # type: ignore[attr-defined]
                member.lose()

    @invariant()
    def nobody_uses_what_another_uses(self) -> None:
        if not hasattr(self, "world"):
            return
        used = Counter(
            partition
            for member in self.made
            if self.world.is_member(member.member_id, member.generation)  # type: ignore[attr-defined]
            for partition in member.uses
        )
        assert max(used.values(), default=0) <= 1, used
        group = self.world.group
        if isinstance(group, ConsumerGroup):
            held = {place: m.member_id for m in group.members.values() for place in iterate_places(m.held)}
            assert group.owners == held
            assert sum(len(ps) for m in group.members.values() for ps in m.held.values()) == len(held)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.settle()
        # Sessions of absent members expire; requests that were lost with a coordinator are sent again.
        for _ in range(30):
            settled(world, self.made, 10)
            self.nobody_uses_what_another_uses()
        if any(isinstance(member, ModernMember) for member in self.made):
            assert isinstance(world.group, ConsumerGroup)
        assert world.group.phase is Phase.STABLE, world.group.phase
        assert shared(self.made) == ALL
        assert len(world.group.members) == len(self.made)


def test_what_a_cooperative_member_has_not_let_go_of_yet_is_given_to_nobody_when_the_group_changes_its_protocol() -> (
    None
):
    """MI3, found by the model above: the answer is in flight, and until it arrives the member uses its old
    partitions.
    """
    groups = Groups()
    groups.begin(kinds=[(False, True), (False, False), (True, False)], protocol=COOPERATIVE, rounds=8)
    classic, _, modern = groups.made
    assert classic.waits is not None and len(classic.uses) == 4  # type: ignore[attr-defined]
    for _ in range(4):
        groups.interleave(order=[2, 2])
    assert modern.generation and not modern.uses, "all is somebody's"
    groups.interleave(order=[0] * 8 + [2] * 8)
    groups.teardown()


Groups.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestGroups = Groups.TestCase
