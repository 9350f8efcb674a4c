"""Phases of a rebalance of the classic protocol. Pure: `now` is monotonic milliseconds.

    EMPTY ──join──► PREPARING ──all joined, or timeout──► COMPLETING ──assignment durable──► STABLE
      ▲                 │ ▲                                    │                               │
      └──no members─────┘ └────────a member rejoins, leaves, or its session times out──────────┘

A group that was empty waits briefly for more members before its first generation (KIP-134).
"""

from __future__ import annotations

from tidemill.kafka import error_codes
from tidemill.kafka.groups.classic.state import ClassicGroup, JoinAnswer, Phase, SyncAnswer


def begin_rebalance(group: ClassicGroup, now: int) -> None:
    """Begin a rebalance: all members must join again."""
    if group.phase is Phase.COMPLETING:
        drop_assignment(group, error_codes.REBALANCE_IN_PROGRESS)
    if group.phase is Phase.EMPTY:
        delay = group.limits.initial_delay_ms
        group.delay_left = max(0, longest_rebalance_ms(group) - delay)
        group.join_until = now + delay
        group.arrived = False
    else:
        group.delay_left = -1
        group.join_until = now + longest_rebalance_ms(group)
    group.phase = Phase.PREPARING
    complete_if_joined(group, now)


def longest_rebalance_ms(group: ClassicGroup) -> int:
    return max((member.rebalance_ms for member in group.members.values()), default=0)


def complete_if_joined(group: ClassicGroup, now: int) -> None:
    """Complete the join if no member is missing.

    While the first members gather, complete it only if the initial delay is zero.
    """
    if group.phase is not Phase.PREPARING:
        return
    if group.delay_left >= 0:
        if group.limits.initial_delay_ms == 0:
            complete_join(group, now)
    elif not group.expected and all(member.joining is not None for member in group.members.values()):
        complete_join(group, now)


def complete_join(group: ClassicGroup, now: int) -> None:
    """Begin the next generation with the joined members. Static members stay in it even if they have not joined."""
    for member in [m for m in group.members.values() if m.joining is None and m.instance_id is None]:
        drop_member(group, member.member_id)
    joined = [member for member in group.members.values() if member.joining is not None]
    if group.members and not joined:
        group.delay_left, group.join_until = -1, now + longest_rebalance_ms(group)
        return
    if joined and (group.leader not in group.members or group.members[group.leader].joining is None):
        group.leader = joined[0].member_id
    group.delay_left = -1
    group.generation += 1
    if not group.members:
        group.phase, group.protocol, group.leader = Phase.EMPTY, "", ""
        group.unstored = True
        return
    group.protocol = group.elected_protocol()
    group.phase = Phase.COMPLETING
    group.sync_until = now + longest_rebalance_ms(group)
    group.unsynced = set(group.members)
    for member in joined:
        waiter, member.joining, member.is_new = member.joining, None, False
        member.until_ms = now + member.session_ms
        group.queue_answer(waiter, join_answer(group, member.member_id))


def join_answer(group: ClassicGroup, member_id: str) -> JoinAnswer:
    """Return the answer to a JoinGroup of a member of the current generation."""
    leads = member_id == group.leader
    return JoinAnswer(
        0,
        member_id,
        group.generation,
        group.protocol_type,
        group.protocol,
        group.leader,
        members=group.members_for_leader() if leads else (),
    )


def send_assignments(group: ClassicGroup, now: int) -> None:
    """Send the durable assignment to all members that wait for it."""
    assigned, group.assigning = group.assigning or {}, None
    group.phase = Phase.STABLE
    for member in group.members.values():
        member.assignment = assigned.get(member.member_id, b"")
        if member.syncing is not None:
            waiter, member.syncing = member.syncing, None
            member.until_ms = now + member.session_ms
            group.queue_answer(waiter, sync_answer(group, member.member_id))


def sync_answer(group: ClassicGroup, member_id: str) -> SyncAnswer:
    return SyncAnswer(0, group.protocol_type, group.protocol, group.members[member_id].assignment)


def drop_assignment(group: ClassicGroup, code: int) -> None:
    """Drop the assignment and answer waiting members with `code`."""
    group.assigning = None
    for member in group.members.values():
        member.assignment = b""
        if member.syncing is not None:
            waiter, member.syncing = member.syncing, None
            group.queue_answer(waiter, SyncAnswer(code))


def drop_member(group: ClassicGroup, member_id: str) -> None:
    """Remove a member, without a rebalance."""
    member = group.members.pop(member_id)
    group.unsynced.discard(member_id)
    if member.instance_id is not None and group.instances.get(member.instance_id) == member_id:
        del group.instances[member.instance_id]
    group.queue_answer(member.joining, JoinAnswer(error_codes.UNKNOWN_MEMBER_ID, member_id))
    group.queue_answer(member.syncing, SyncAnswer(error_codes.UNKNOWN_MEMBER_ID))
    if group.leader == member_id:
        group.leader = next(iter(group.members), "")


def remove_member(group: ClassicGroup, now: int, member_id: str) -> None:
    """Remove a member that left or whose session timed out."""
    drop_member(group, member_id)
    if group.phase in (Phase.STABLE, Phase.COMPLETING):
        begin_rebalance(group, now)
    else:
        complete_if_joined(group, now)


def tick(group: ClassicGroup, now: int) -> None:
    """Perform everything that is due at `now`."""
    for member_id in [m for m, until in group.expected.items() if until <= now]:
        del group.expected[member_id]
        complete_if_joined(group, now)
    for member in list(group.members.values()):
        if member.until_ms <= now and _has_session_timeout(group, member.member_id):
            remove_member(group, now, member.member_id)
    if group.phase is Phase.PREPARING and group.join_until <= now:
        if group.delay_left > 0 and group.arrived:
            delay = min(group.limits.initial_delay_ms, group.delay_left)
            group.delay_left, group.join_until, group.arrived = group.delay_left - delay, now + delay, False
        else:
            complete_join(group, now)
    elif group.phase is Phase.COMPLETING and group.sync_until <= now and group.assigning is None:
        for member_id in sorted(group.unsynced):
            drop_member(group, member_id)
        begin_rebalance(group, now)


def _has_session_timeout(group: ClassicGroup, member_id: str) -> bool:
    """Return whether the session timeout applies to the member. The removal of one member may have removed others."""
    member = group.members.get(member_id)
    return member is not None and (member.is_new or (member.joining is None and member.syncing is None))


def next_due_ms(group: ClassicGroup) -> int | None:
    """Return the earliest time at which `tick` has something to do; None for a group without members."""
    times = list(group.expected.values())
    times += [m.until_ms for m in group.members.values() if _has_session_timeout(group, m.member_id)]
    if group.phase is Phase.PREPARING:
        times.append(group.join_until)
    elif group.phase is Phase.COMPLETING and group.assigning is None:
        times.append(group.sync_until)
    return min(times, default=None)
