"""Requests of members to a group of the classic protocol, answered as Kafka 4 does. Pure.

`now` is monotonic milliseconds. Answers that must wait are put into `ClassicGroup.outbox` later, under their waiter.
`ClassicGroup.unstored` is set when the group must be made durable: the caller then writes it between `begin_store` and
`complete_store`.

Sources: KIP-62 (rebalance timeout), KIP-134 (first delay), KIP-345 and KIP-814 (static members), KIP-394 (ids first),
KIP-559 (protocol checked at sync).
"""

from __future__ import annotations

from typing import NamedTuple

from tidemill.kafka import error_codes
from tidemill.kafka.groups.classic.rebalance import (
    begin_rebalance,
    complete_if_joined,
    drop_assignment,
    join_answer,
    remove_member,
    send_assignments,
    sync_answer,
)
from tidemill.kafka.groups.classic.state import (
    Answer,
    ClassicGroup,
    ClassicMember,
    JoinAnswer,
    JoinRequest,
    Phase,
    SyncAnswer,
    SyncRequest,
    Waiter,
    error_answer_for,
    metadata_bytes,
)


class ClassicWrite(NamedTuple):
    """Assignment and answers that wait for one write."""

    assigning: dict[str, bytes] | None
    later: list[tuple[Waiter, Answer]]


NEW_MEMBER_MS = 300_000
"""Time for which a new member that waits for a rebalance is retained, although its connection may be lost (Kafka's
limit).
"""


def join(group: ClassicGroup, now: int, ask: JoinRequest, waiter: Waiter) -> None:
    code = _join_error(group, ask)
    known = ask.member_id in group.members
    if code:
        group.queue_answer(waiter, JoinAnswer(code, ask.member_id))
    elif ask.member_id in group.expected and ask.instance_id is None:
        del group.expected[ask.member_id]
        _add_member(group, now, ask, ask.member_id, waiter)
    elif ask.member_id:
        code = group.member_error(ask.member_id, ask.instance_id)
        if code or not known:
            group.queue_answer(waiter, JoinAnswer(code or error_codes.UNKNOWN_MEMBER_ID, ask.member_id))
        else:
            _rejoin(group, now, ask, waiter)
    elif ask.instance_id is not None and ask.instance_id in group.instances:
        _replace_static_member(group, now, ask, waiter)
    elif ask.instance_id is None and ask.knows_first:
        group.expected[ask.new_id] = now + ask.session_ms
        group.queue_answer(waiter, JoinAnswer(error_codes.MEMBER_ID_REQUIRED, ask.new_id))
    else:
        _add_member(group, now, ask, ask.new_id, waiter)


def _join_error(group: ClassicGroup, ask: JoinRequest) -> int:
    limits = group.limits
    if not limits.session_ms_min <= ask.session_ms <= limits.session_ms_max:
        return error_codes.INVALID_SESSION_TIMEOUT
    if not group.supports(ask.protocol_type, ask.protocols):
        return error_codes.INCONSISTENT_GROUP_PROTOCOL
    size = metadata_bytes(ask.protocols)
    before = group.members.get(ask.member_id)
    if before is None and ask.instance_id is not None:
        before = group.members.get(group.instances.get(ask.instance_id, ""))
    room = limits.bytes - group.size_bytes + (before.size_bytes if before is not None else 0)
    crowd = len(group.members) + len(group.expected)
    is_one_more = before is None and ask.member_id not in group.expected
    if size > limits.member_bytes or size > room or (is_one_more and crowd >= limits.members):
        return error_codes.GROUP_MAX_SIZE_REACHED
    return 0


def _add_member(group: ClassicGroup, now: int, ask: JoinRequest, member_id: str, waiter: Waiter) -> None:
    if not group.members:
        group.protocol_type = ask.protocol_type
    group.members[member_id] = ClassicMember(
        member_id,
        ask.instance_id,
        ask.client_id,
        ask.client_host,
        ask.session_ms,
        ask.rebalance_ms,
        ask.protocols,
        until_ms=now + NEW_MEMBER_MS,
        joining=waiter,
        is_new=True,
    )
    if ask.instance_id is not None:
        group.instances[ask.instance_id] = member_id
    if not group.leader:
        group.leader = member_id
    group.arrived = True
    _continue_rebalance(group, now)


def _continue_rebalance(group: ClassicGroup, now: int) -> None:
    if group.phase is Phase.PREPARING:
        complete_if_joined(group, now)
    else:
        begin_rebalance(group, now)


def _rejoin(group: ClassicGroup, now: int, ask: JoinRequest, waiter: Waiter) -> None:
    member = group.members[ask.member_id]
    # The member may not have received its answer. A leader that joins a stable group wants a new generation.
    is_answered = group.phase is Phase.COMPLETING or (group.phase is Phase.STABLE and member.member_id != group.leader)
    if is_answered and member.protocols == ask.protocols:
        member.until_ms = now + ask.session_ms
        group.queue_answer(waiter, join_answer(group, member.member_id))
        return
    _update_member(member, ask)
    _wait_to_join(group, member, waiter)
    _continue_rebalance(group, now)


def _update_member(member: ClassicMember, ask: JoinRequest) -> None:
    member.protocols = ask.protocols
    member.session_ms, member.rebalance_ms = ask.session_ms, ask.rebalance_ms
    member.client_id, member.client_host = ask.client_id, ask.client_host


def _wait_to_join(group: ClassicGroup, member: ClassicMember, waiter: Waiter) -> None:
    """Let the member wait for the join. Its earlier request over another connection gets an error."""
    group.queue_answer(member.joining, JoinAnswer(error_codes.REBALANCE_IN_PROGRESS, member.member_id))
    member.joining = waiter


def _replace_static_member(group: ClassicGroup, now: int, ask: JoinRequest, waiter: Waiter) -> None:
    """Replace a static member that returns under a new id. The old id is fenced (KIP-345)."""
    assert ask.instance_id is not None
    old_id, new_id = group.instances[ask.instance_id], ask.new_id
    member = group.members.pop(old_id)
    group.queue_answer(member.joining, JoinAnswer(error_codes.FENCED_INSTANCE_ID, old_id))
    group.queue_answer(member.syncing, SyncAnswer(error_codes.FENCED_INSTANCE_ID))
    member.joining = member.syncing = None
    member.member_id = new_id
    _update_member(member, ask)
    member.until_ms = now + ask.session_ms
    group.members[new_id] = member
    group.instances[ask.instance_id] = new_id
    if old_id in group.unsynced:
        group.unsynced.remove(old_id)
        group.unsynced.add(new_id)
    led, leader = old_id == group.leader, group.leader
    if led:
        group.leader = new_id
    if group.phase is Phase.STABLE and group.elected_protocol() == group.protocol:
        # As in Kafka: no rebalance, even if other properties of the member changed, once it is durable that the old id
        # is fenced.
        skips = led and ask.may_skip
        answer = JoinAnswer(
            0,
            new_id,
            group.generation,
            group.protocol_type,
            group.protocol,
            group.leader if ask.may_skip else leader,
            skips,
            group.members_for_leader() if skips else (),
        )
        group.later.append((waiter, answer))
        group.unstored = True
        return
    member.joining = waiter
    _continue_rebalance(group, now)


def sync(group: ClassicGroup, now: int, ask: SyncRequest, waiter: Waiter) -> None:
    code = _sync_error(group, ask)
    if code:
        group.queue_answer(waiter, SyncAnswer(code))
        return
    member = group.members[ask.member_id]
    group.unsynced.discard(ask.member_id)
    member.until_ms = now + member.session_ms
    if group.phase is Phase.STABLE:
        group.queue_answer(waiter, sync_answer(group, ask.member_id))
        return
    if ask.member_id == group.leader and group.assigning is None:
        assigning = {m: data for m, data in ask.assignments if m in group.members}
        whole = sum(metadata_bytes(m.protocols) for m in group.members.values()) + sum(map(len, assigning.values()))
        longest = max(map(len, assigning.values()), default=0)
        if whole > group.limits.bytes or longest > group.limits.member_bytes:
            group.queue_answer(waiter, SyncAnswer(error_codes.GROUP_MAX_SIZE_REACHED))
            return
        group.assigning = assigning
        group.unstored = True
    group.queue_answer(member.syncing, SyncAnswer(error_codes.REBALANCE_IN_PROGRESS))
    member.syncing = waiter


def _sync_error(group: ClassicGroup, ask: SyncRequest) -> int:
    code = group.member_error(ask.member_id, ask.instance_id)
    if code:
        return code
    if ask.generation != group.generation:
        return error_codes.ILLEGAL_GENERATION
    if group.phase is Phase.PREPARING:
        return error_codes.REBALANCE_IN_PROGRESS
    for asked, own in ((ask.protocol_type, group.protocol_type), (ask.protocol, group.protocol)):
        if asked is not None and asked != own:
            return error_codes.INCONSISTENT_GROUP_PROTOCOL
    return 0


def begin_store(group: ClassicGroup) -> ClassicWrite:
    """Begin to write the group in its current state, and return what waits for exactly this write."""
    group.unstored = False
    later, group.later = group.later, []
    return ClassicWrite(group.assigning, later)


def complete_store(group: ClassicGroup, now: int, storing: ClassicWrite, code: int) -> None:
    """Answer the waiting requests after a write that `begin_store` began; `code` is 0 or the error of the write.

    An assignment is dropped if its generation has ended in the meantime.
    """
    for waiter, answer in storing.later:
        group.queue_answer(waiter, error_answer_for(answer, code) if code else answer)
    if storing.assigning is None or storing.assigning is not group.assigning:
        return
    if code:
        drop_assignment(group, code)
        begin_rebalance(group, now)
    else:
        send_assignments(group, now)


def heartbeat(group: ClassicGroup, now: int, member_id: str, instance_id: str | None, generation: int) -> int:
    code = group.member_error(member_id, instance_id)
    if code:
        return code
    if generation != group.generation:
        return error_codes.ILLEGAL_GENERATION
    member = group.members[member_id]
    member.until_ms = max(member.until_ms, now + member.session_ms)
    return error_codes.REBALANCE_IN_PROGRESS if group.phase is Phase.PREPARING else 0


def leave_group(group: ClassicGroup, now: int, member_id: str, instance_id: str | None) -> int:
    """Remove a member. A static member may be named by its instance alone, as administrators do."""
    if not member_id and instance_id is not None:
        member_id = group.instances.get(instance_id, "")
    if member_id in group.expected:
        del group.expected[member_id]
        complete_if_joined(group, now)
        return 0
    code = group.member_error(member_id, instance_id)
    if not code:
        remove_member(group, now, member_id)
    return code


def commit_error(
    group: ClassicGroup,
    now: int,
    member_id: str,
    instance_id: str | None,
    generation: int,
    *,
    in_transaction: bool = False,
) -> int:
    """Return the code if a client with these properties may not commit offsets, else 0.

    Without member and generation it may commit only to a group without members, or in a transaction: before KIP-447
    producers did not know them.
    """
    if generation < 0 and not member_id and instance_id is None:
        return error_codes.UNKNOWN_MEMBER_ID if group.members and not in_transaction else 0
    if generation < 0 and not group.members:
        return 0
    code = group.member_error(member_id, instance_id)
    if code:
        return code
    if generation != group.generation:
        return error_codes.ILLEGAL_GENERATION
    if group.phase is Phase.COMPLETING and not in_transaction:
        return error_codes.REBALANCE_IN_PROGRESS
    member = group.members[member_id]
    member.until_ms = max(member.until_ms, now + member.session_ms)
    return 0


def release(group: ClassicGroup, code: int) -> None:
    """Stop coordinating the group on this node.

    All waiting requests get `code`, so that their clients look up the coordinator.
    """
    group.phase = Phase.DEAD
    group.assigning = None  # a write that ends later does not continue a generation here
    for member in group.members.values():
        group.queue_answer(member.joining, JoinAnswer(code, member.member_id))
        group.queue_answer(member.syncing, SyncAnswer(code))
        member.joining = member.syncing = None
    for waiter, answer in group.later:
        group.queue_answer(waiter, error_answer_for(answer, code))
    group.later = []
