"""The classic protocol without clock, network or store: one rule per test, and random orders of the
members' requests.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings

from tidemill.kafka import error_codes
from tidemill.kafka.groups.classic import rebalance
from tidemill.kafka.groups.classic import requests as classic
from tidemill.kafka.groups.classic.state import (
    ClassicGroup,
    GroupLimits,
    JoinAnswer,
    JoinRequest,
    Phase,
    SyncAnswer,
    SyncRequest,
)

LIMITS = GroupLimits(members=4, member_bytes=1_000, bytes=3_000, initial_delay_ms=0, session_ms_min=10)
SESSION, REBALANCE = 10_000, 30_000


class World:
    """A group, its time, and the answers by waiter."""

    def __init__(self, **limits: Any) -> None:
        self.group = ClassicGroup(
            "g", GroupLimits(**{**{f: getattr(LIMITS, f) for f in LIMITS.__struct_fields__}, **limits})
        )
        self.now = 1_000
        self.waiters = 0
        self.answers: dict[int, JoinAnswer | SyncAnswer] = {}
        self.writes = 0

    def join(self, member: str = "", **more: Any) -> int:
        self.waiters += 1
        values: dict[str, Any] = {
            "member_id": member,
            "new_id": f"m{self.waiters}",
            "instance_id": None,
            "client_id": "c",
            "client_host": "/h",
            "session_ms": SESSION,
            "rebalance_ms": REBALANCE,
            "protocol_type": "consumer",
            "protocols": (("range", b"r"), ("sticky", b"s")),
        }
        classic.join(self.group, self.now, JoinRequest(**{**values, **more}), self.waiters)
        return self.settle(self.waiters)

    def sync(self, member: str, generation: int, assignments: dict[str, bytes] | None = None, **more: Any) -> int:
        self.waiters += 1
        ask = SyncRequest(
            member, more.pop("instance_id", None), generation, assignments=tuple((assignments or {}).items()), **more
        )
        classic.sync(self.group, self.now, ask, self.waiters)
        return self.settle(self.waiters)

    def settle(self, waiter: int = 0) -> int:
        outbox, self.group.outbox = self.group.outbox, []
        for who, answer in outbox:
            assert isinstance(who, int)
            assert who not in self.answers, "answered twice"
            self.answers[who] = answer
        return waiter

    def store(self, code: int = 0) -> None:
        while self.group.unstored:
            storing = classic.begin_store(self.group)
            self.writes += 1
            classic.complete_store(self.group, self.now, storing, code)
            self.settle()
            code = 0

    def later(self, ms: int) -> None:
        self.now += ms
        rebalance.tick(self.group, self.now)
        self.settle()

    def leave(self, member: str, instance_id: str | None = None) -> int:
        code = classic.leave_group(self.group, self.now, member, instance_id)
        self.settle()
        return code

    def joined(self, waiter: int) -> JoinAnswer:
        answer = self.answers[waiter]
        assert isinstance(answer, JoinAnswer)
        return answer

    def synced(self, waiter: int) -> SyncAnswer:
        answer = self.answers[waiter]
        assert isinstance(answer, SyncAnswer)
        return answer

    def stable(self, count: int) -> list[str]:
        """Join that many members with the assignment b"<id>"; the leader comes first."""
        members = [self.joined(self.join()).member_id]
        for _ in range(count - 1):
            waiting = self.join()
            rejoining = [self.join(m) for m in members]
            assert {self.joined(w).error for w in (waiting, *rejoining)} == {0}
            members.append(self.joined(waiting).member_id)
        generation = self.group.generation
        waiting = [self.sync(m, generation, {m: m.encode() for m in members}) for m in members]
        self.store()
        assert [self.synced(w).assignment for w in waiting] == [m.encode() for m in members]
        assert self.group.phase is Phase.STABLE
        return members


def test_a_client_that_can_is_told_its_id_before_it_joins() -> None:
    world = World()
    first = world.joined(world.join(knows_first=True))
    assert (first.error, bool(first.member_id), world.group.members) == (error_codes.MEMBER_ID_REQUIRED, True, {})
    again = world.joined(world.join(first.member_id))
    assert (again.error, again.member_id, again.generation, again.leader) == (0, first.member_id, 1, first.member_id)
    lost = world.joined(world.join(knows_first=True))
    world.later(SESSION)
    assert world.joined(world.join(lost.member_id)).error == error_codes.UNKNOWN_MEMBER_ID


def test_an_id_that_was_given_out_is_waited_for_before_a_generation_is_made() -> None:
    world = World()
    (leader,) = world.stable(1)
    expected = world.joined(world.join(knows_first=True)).member_id
    rejoining = world.join(leader)
    assert rejoining not in world.answers
    joining = world.join(expected)
    assert {world.joined(w).generation for w in (rejoining, joining)} == {2}


def test_the_first_members_of_an_empty_group_are_gathered() -> None:
    world = World(initial_delay_ms=3_000)
    waiting = [world.join()]
    world.later(2_000)
    waiting.append(world.join())
    world.later(1_000)
    assert not world.answers, "somebody came, so it is put off"
    world.later(3_000)
    assert [world.joined(w).generation for w in waiting] == [1, 1]
    assert sum(len(world.joined(w).members) for w in waiting) == 2, "the leader alone is told who is there"


def test_who_has_not_joined_again_in_time_is_left_behind() -> None:
    world = World()
    slow, fast = world.stable(2)
    joining = world.join()
    assert classic.heartbeat(world.group, world.now, fast, None, 2) == error_codes.REBALANCE_IN_PROGRESS
    waiting = world.join(fast)
    for _ in range(int(REBALANCE / 5_000)):
        world.later(5_000)
        classic.heartbeat(world.group, world.now, slow, None, 2)
    assert world.joined(waiting).generation == world.joined(joining).generation == 3
    assert slow not in world.group.members
    assert classic.heartbeat(world.group, world.now, slow, None, 2) == error_codes.UNKNOWN_MEMBER_ID


def test_who_is_not_heard_of_is_evicted_and_who_is_stays() -> None:
    world = World()
    quiet, heard = world.stable(2)
    world.later(SESSION - 1)
    assert classic.heartbeat(world.group, world.now, heard, None, 2) == 0
    world.later(1)
    assert list(world.group.members) == [heard]
    assert world.group.phase is Phase.PREPARING
    assert quiet not in world.group.members
    assert rebalance.next_due_ms(world.group) is not None


def test_an_assignment_is_told_only_once_it_is_durable() -> None:
    world = World()
    leader = world.joined(world.join()).member_id
    waiting = world.sync(leader, 1, {leader: b"all"})
    storing = classic.begin_store(world.group)
    assert waiting not in world.answers
    classic.complete_store(world.group, world.now, storing, error_codes.COORDINATOR_NOT_AVAILABLE)
    world.settle()
    assert world.synced(waiting).error == error_codes.COORDINATOR_NOT_AVAILABLE
    assert world.group.phase is Phase.PREPARING
    again = world.joined(world.join(leader))
    waiting = world.sync(leader, again.generation, {leader: b"all"})
    world.store()
    assert world.synced(waiting).assignment == b"all"


def test_an_assignment_whose_generation_ended_while_it_was_written_is_nobodys() -> None:
    world = World()
    leader = world.joined(world.join()).member_id
    waiting = world.sync(leader, 1, {leader: b"old"})
    storing = classic.begin_store(world.group)
    world.join()
    assert world.synced(waiting).error == error_codes.REBALANCE_IN_PROGRESS
    world.join(leader)
    waiting = world.sync(leader, 2, {leader: b"new"})
    classic.complete_store(world.group, world.now, storing, 0)
    world.settle()
    assert waiting not in world.answers, "what was written is the other one"
    world.store()
    assert world.synced(waiting).assignment == b"new"


def test_f233_a_member_that_joins_but_never_syncs_is_left_behind() -> None:
    world = World()
    joining = world.join()
    leader = world.joined(joining).member_id
    world.later(REBALANCE)
    assert leader not in world.group.members
    assert world.group.phase is Phase.EMPTY


def test_requests_of_another_generation_member_or_protocol_are_refused() -> None:
    world = World()
    (leader,) = world.stable(1)
    for generation, member, more, code in (
        (0, leader, {}, error_codes.ILLEGAL_GENERATION),
        (2, leader, {}, error_codes.ILLEGAL_GENERATION),
        (1, "stranger", {}, error_codes.UNKNOWN_MEMBER_ID),
        (1, leader, {"protocol": "sticky"}, error_codes.INCONSISTENT_GROUP_PROTOCOL),
        (1, leader, {"protocol_type": "connect"}, error_codes.INCONSISTENT_GROUP_PROTOCOL),
        (1, leader, {"instance_id": "i"}, error_codes.UNKNOWN_MEMBER_ID),
    ):
        assert world.synced(world.sync(member, generation, **more)).error == code
    assert world.joined(world.join(protocols=(("other", b""),))).error == error_codes.INCONSISTENT_GROUP_PROTOCOL
    assert world.joined(world.join(protocol_type="connect")).error == error_codes.INCONSISTENT_GROUP_PROTOCOL
    assert world.joined(world.join(protocols=())).error == error_codes.INCONSISTENT_GROUP_PROTOCOL
    assert world.joined(world.join(session_ms=1)).error == error_codes.INVALID_SESSION_TIMEOUT
    assert world.group.phase is Phase.STABLE


def test_commits_are_taken_from_members_or_from_anybody_while_nobody_is_there() -> None:
    world = World()

    def commit(member: str, generation: int) -> int:
        return classic.commit_error(world.group, world.now, member, None, generation)

    assert commit("", -1) == 0
    (leader,) = world.stable(1)
    assert commit("", -1) == error_codes.UNKNOWN_MEMBER_ID
    assert commit("stranger", 1) == error_codes.UNKNOWN_MEMBER_ID
    assert commit(leader, 0) == error_codes.ILLEGAL_GENERATION
    assert commit(leader, 1) == 0
    world.join()
    assert commit(leader, 1) == 0, "what it read before it joins again"
    world.join(leader)
    assert commit(leader, 2) == error_codes.REBALANCE_IN_PROGRESS


def test_commits_within_a_transaction_name_member_and_generation_or_neither() -> None:
    world = World()

    def commit(member: str, generation: int) -> int:
        return classic.commit_error(world.group, world.now, member, None, generation, in_transaction=True)

    (leader,) = world.stable(1)
    assert commit("", -1) == 0, "producers before KIP-447 know neither"
    assert commit("", 1) == error_codes.UNKNOWN_MEMBER_ID
    assert commit("stranger", 1) == error_codes.UNKNOWN_MEMBER_ID
    assert commit(leader, 0) == error_codes.ILLEGAL_GENERATION
    assert commit(leader, 1) == 0
    world.join()
    world.join(leader)
    assert world.group.phase is Phase.COMPLETING
    assert commit(leader, 2) == 0, "the transaction is of records that it had read before"


def test_a_static_member_comes_back_under_a_new_id_without_a_rebalance_and_fences_the_old_one() -> None:
    world = World()
    first = world.joined(world.join(instance_id="i")).member_id
    world.sync(first, 1, {first: b"mine"}, instance_id="i")
    world.store()
    writes = world.writes
    waiting = world.join(instance_id="i", may_skip=True)
    assert waiting not in world.answers, "not before it is durable"
    world.store()
    back = world.joined(waiting)
    assert (back.error, back.generation, back.skip_assignment, back.leader) == (0, 1, True, back.member_id)
    assert world.writes == writes + 1
    assert world.synced(world.sync(back.member_id, 1, instance_id="i")).assignment == b"mine"
    assert classic.heartbeat(world.group, world.now, first, "i", 1) == error_codes.FENCED_INSTANCE_ID
    assert world.joined(world.join(first, instance_id="i")).error == error_codes.FENCED_INSTANCE_ID
    old_client = world.join(instance_id="i")
    world.store()
    assert world.joined(old_client).leader != world.joined(old_client).member_id, "it would assign otherwise"
    assert world.leave("", "i") == 0
    assert not world.group.members


def test_a_static_member_that_has_not_joined_again_stays_in_the_next_generation() -> None:
    world = World()
    static = world.joined(world.join(instance_id="i")).member_id
    world.sync(static, 1, {static: b"x"}, instance_id="i")
    world.store()
    joining = world.join(session_ms=1_000_000, rebalance_ms=5_000)
    world.group.members[static].session_ms = 1_000_000
    classic.heartbeat(world.group, world.now, static, "i", 1)
    world.later(REBALANCE)
    answer = world.joined(joining)
    assert (answer.error, answer.leader) == (0, answer.member_id), "who has joined leads"
    assert {m for m, _, _ in answer.members} == {static, answer.member_id}


def test_the_bounds_of_a_group_refuse_and_change_nothing() -> None:
    world = World()
    world.stable(4)
    assert world.joined(world.join()).error == error_codes.GROUP_MAX_SIZE_REACHED
    assert world.group.phase is Phase.STABLE
    world = World()
    assert world.joined(world.join(protocols=(("range", b"x" * 1_001),))).error == error_codes.GROUP_MAX_SIZE_REACHED
    leader = world.joined(world.join()).member_id
    assert world.synced(world.sync(leader, 1, {leader: b"x" * 1_001})).error == error_codes.GROUP_MAX_SIZE_REACHED
    assert not world.group.unstored


def test_the_protocol_that_most_like_best_is_chosen_of_those_that_all_speak() -> None:
    world = World()
    both, first = (("a", b""), ("b", b"")), world.join(protocols=(("b", b""), ("c", b"")))
    leader = world.joined(first).member_id
    second = world.join(protocols=both)
    world.join(leader, protocols=(("b", b""), ("c", b"")))
    assert world.joined(second).protocol == "b"


OPS = st.lists(
    st.tuples(
        st.sampled_from(("join", "new", "static", "sync", "beat", "leave", "wait", "store", "fail", "commit")),
        st.integers(0, 3),
        st.integers(0, 20_000),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(OPS, st.booleans(), st.sampled_from((0, 3_000)))
def test_whatever_members_do_each_is_answered_once_and_a_generation_is_one(
    ops: list[tuple[str, int, int]], first: bool, delay: int
) -> None:
    world = World(initial_delay_ms=delay)
    known: list[str] = []
    asked: dict[int, str] = {}

    def learn() -> None:
        for waiter in list(asked):
            answer = world.answers.get(waiter)
            if isinstance(answer, JoinAnswer) and answer.member_id and answer.member_id not in known:
                known.append(answer.member_id)

    for op, which, ms in ops:
        member = known[-1 - which % len(known)] if known else "nobody"
        generation = world.group.generation - (which == 3)
        if op == "join":
            asked[world.join(member)] = member
        elif op == "new":
            asked[world.join(knows_first=first)] = ""
        elif op == "static":
            asked[world.join(instance_id=f"i{which}", may_skip=first)] = f"i{which}"
        elif op == "sync":
            members = list(world.group.members)
            asked[world.sync(member, generation, {m: f"{m}@{generation}".encode() for m in members})] = member
        elif op == "beat":
            classic.heartbeat(world.group, world.now, member, None, generation)
        elif op == "commit":
            classic.commit_error(world.group, world.now, member, None, generation)
        elif op == "leave":
            world.leave(member)
        elif op == "wait":
            world.later(ms)
        else:
            world.store(error_codes.COORDINATOR_NOT_AVAILABLE if op == "fail" else 0)
        learn()
        group = world.group
        assert len(group.members) + len(group.expected) <= group.limits.members
        assert not group.members or group.leader in group.members
        assert set(group.instances.values()) <= group.members.keys()
        assert (group.phase is Phase.EMPTY) <= (not group.members)
        assert group.phase is not Phase.STABLE or all(m.joining is None for m in group.members.values())
    protocols: dict[int, set[str | None]] = defaultdict(set)
    for waiter in asked:
        answer = world.answers.get(waiter)
        if isinstance(answer, JoinAnswer) and not answer.error and answer.members:
            protocols[answer.generation].add(answer.protocol)
        if isinstance(answer, SyncAnswer) and answer.assignment:
            assert not answer.error
    assert all(len(names) == 1 for names in protocols.values())
    # Every wait ends, even if all clients stay silent from now on.
    for _ in range(40):
        world.store()
        due = rebalance.next_due_ms(world.group)
        if due is None:
            break
        world.later(max(0, due - world.now))
    assert asked.keys() <= world.answers.keys()
    assert not world.group.members and world.group.phase is Phase.EMPTY
