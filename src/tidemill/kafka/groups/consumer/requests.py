"""Requests of members to a group of the consumer protocol, answered as Kafka 4 does. Pure.

`now` is monotonic milliseconds. `ConsumerGroup.unstored` is set when the group must be made durable: the caller writes
it between `begin_store` and `complete_store`, and an answer is sent once everything before it is durable.

Sources: KIP-848; ConsumerGroupHeartbeatRequest.json of Kafka 4.1; KIP-1082 (ids of members from version 1 on).
"""

from __future__ import annotations

from typing import Final

import msgspec

from tidemill.kafka import error_codes
from tidemill.kafka.groups.classic.state import Answer, HeartbeatAnswer, Waiter, error_answer_for
from tidemill.kafka.groups.consumer import reconciliation
from tidemill.kafka.groups.consumer.assignors import ASSIGNORS
from tidemill.kafka.groups.consumer.sizes import excess_partitions
from tidemill.kafka.groups.consumer.state import (
    EPOCH_LEAVE,
    EPOCH_LEAVE_TEMPORARILY,
    ConsumerGroup,
    ConsumerGroupMember,
    ConsumerWrite,
    HeartbeatRequest,
    TopicSnapshot,
    is_subset,
)

ID_BYTES: Final = 255
"""Maximum bytes of a member id, an instance id and a rack id, because a row's key must have room for them."""


def heartbeat(group: ConsumerGroup, now: int, ask: HeartbeatRequest, seen: TopicSnapshot) -> HeartbeatAnswer:
    """Process one heartbeat of the consumer protocol. An error changes nothing."""
    refused = request_rejection(ask)
    if refused is not None:
        return refused
    if ask.epoch < 0:
        return _leave_group(group, now, ask)
    refused = _join_rejection(group, ask) if ask.epoch == 0 else _epoch_rejection(group, ask)
    if refused is None:
        refused = _size_rejection(group, ask, seen)
    if refused is not None:
        return refused
    if ask.epoch == 0:
        _reset_member(group, ask)
    member = group.members[ask.member_id]
    _update_member(group, member, ask)
    member.until_ms = now + group.limits.consumer_session_ms
    reconciliation.update_target(group, seen)
    changed = reconciliation.reconcile(group, now, member, ask.owned)
    if ask.epoch == 0:
        reconciliation.note_freed_room(group)  # it may have been revoking partitions when it joined again
    # A member that sends its full state, or an outdated epoch, may not have received its last answer.
    is_whole = ask.owned is not None and (ask.topics is not None or ask.pattern is not None)
    tells = changed or is_whole or ask.epoch != member.epoch
    return HeartbeatAnswer(0, "", member.member_id, member.epoch, member.assigned if tells else None)


def request_rejection(ask: HeartbeatRequest) -> HeartbeatAnswer | None:
    """Return the rejection of a request that no group would accept, or None."""
    message = _request_error(ask)
    if message:
        return HeartbeatAnswer(error_codes.INVALID_REQUEST, message)
    if ask.assignor is not None and ask.assignor not in ASSIGNORS:
        return HeartbeatAnswer(error_codes.UNSUPPORTED_ASSIGNOR, f"Use one of {', '.join(ASSIGNORS)}.")
    return None


def _request_error(ask: HeartbeatRequest) -> str:
    texts = (ask.member_id, ask.instance_id, ask.rack_id)
    if not ask.member_id:
        return "MemberId can't be empty."
    if ask.instance_id == "" or ask.rack_id == "":
        return "InstanceId and RackId can't be empty."
    if any(len(text.encode()) > ID_BYTES or "\x00" in text for text in texts if text is not None):
        return f"An id is longer than {ID_BYTES} bytes or contains a zero byte."
    if ask.epoch < EPOCH_LEAVE_TEMPORARILY:
        return "MemberEpoch is invalid."
    if ask.epoch == EPOCH_LEAVE_TEMPORARILY and ask.instance_id is None:
        return "InstanceId can't be null for a member that leaves temporarily."
    if ask.epoch == 0:
        if ask.rebalance_ms < 0:
            return "RebalanceTimeoutMs must be provided in first request."
        if ask.owned is None or ask.owned:
            return "TopicPartitions must be empty when (re-)joining."
        if ask.topics is None and ask.pattern is None:
            return "Either SubscribedTopicNames or SubscribedTopicRegex must be non-null when (re-)joining."
    return ""


def _join_rejection(group: ConsumerGroup, ask: HeartbeatRequest) -> HeartbeatAnswer | None:
    """Return the rejection of a joining member, or None.

    The member may also rejoin under its id, because it was fenced or did not receive an answer.
    """
    before = group.members.get(ask.member_id)
    if ask.instance_id is not None and ask.instance_id in group.instances:
        holder = group.members[group.instances[ask.instance_id]]
        # During a migration a static member changes the protocol without leaving first.
        if holder is not before and not holder.away and holder.classic is None:
            return HeartbeatAnswer(error_codes.UNRELEASED_INSTANCE_ID, "Another member has this instance id.")
        before = holder
    if before is None and len(group.members) >= group.limits.members:
        return HeartbeatAnswer(error_codes.GROUP_MAX_SIZE_REACHED, f"The group has {len(group.members)} members.")
    return None


def _size_rejection(group: ConsumerGroup, ask: HeartbeatRequest, seen: TopicSnapshot) -> HeartbeatAnswer | None:
    if ask.topics is None and ask.pattern is None:
        return None
    member = group.members.get(ask.member_id)
    if ask.epoch == 0 and ask.instance_id in group.instances:
        member = group.members[group.instances[ask.instance_id or ""]]
    after = _with_subscription(member, ask)
    size = after.subscription_bytes
    others = sum(each.subscription_bytes for each in group.members.values() if each is not member)
    if size > group.limits.member_bytes or size + others > group.limits.bytes:
        return HeartbeatAnswer(
            error_codes.GROUP_MAX_SIZE_REACHED, f"The subscription has {size} bytes and those of others {others} bytes."
        )
    excess = excess_partitions(group, member, after, seen)
    if excess > 0:
        return HeartbeatAnswer(
            error_codes.GROUP_MAX_SIZE_REACHED, f"The group would have {excess} partitions more than fit in one write."
        )
    return None


def _with_subscription(member: ConsumerGroupMember | None, ask: HeartbeatRequest) -> ConsumerGroupMember:
    """Return the member in its state after the request. A joining member holds nothing."""
    before = member or ConsumerGroupMember(ask.member_id)
    return msgspec.structs.replace(
        before,
        member_id=ask.member_id,
        instance_id=ask.instance_id or before.instance_id,
        rack_id=ask.rack_id or before.rack_id,
        client_id=ask.client_id,
        client_host=ask.client_host,
        topics=ask.topics if ask.topics is not None else before.topics,
        pattern=ask.pattern if ask.pattern is not None else before.pattern,
        assignor=ask.assignor or before.assignor,
        held=before.held if ask.epoch else {},
        classic=None,
    )


def _reset_member(group: ConsumerGroup, ask: HeartbeatRequest) -> None:
    """Add or reset a joining member.

    It begins without partitions: those that it held are free, and it gets its target again.
    """
    member = group.members.get(ask.member_id)
    if member is not None and member.instance_id != ask.instance_id:
        reconciliation.remove_member(group, member)
        member = None
    if member is None and ask.instance_id is not None and ask.instance_id in group.instances:
        # A static member returned in time: the other members see no change (KIP-848, "Static membership").
        member = group.members.pop(group.instances[ask.instance_id])
        reconciliation.free_partitions(group, member, member.held)
        group.changed.discard(member.member_id)
        member.member_id = ask.member_id
    is_new = member is None
    if member is None:
        member = ConsumerGroupMember(ask.member_id, ask.instance_id)
    reconciliation.free_partitions(group, member, member.held)
    member.revoking, member.away = {}, False
    member.classic, member.owes_until_ms = None, 0
    member.epoch, member.previous = 0, -1
    member.rack_id, member.assignor = ask.rack_id, ask.assignor
    group.members[ask.member_id] = member
    if ask.instance_id is not None:
        group.instances[ask.instance_id] = ask.member_id
    _mark_changed(group, member)
    if is_new:
        reconciliation.note_subscription_change(group)


def _update_member(group: ConsumerGroup, member: ConsumerGroupMember, ask: HeartbeatRequest) -> None:
    before = (member.rack_id, member.rebalance_ms, member.client_id, member.client_host)
    member.rack_id = ask.rack_id if ask.rack_id is not None else member.rack_id
    member.rebalance_ms = ask.rebalance_ms if ask.rebalance_ms >= 0 else member.rebalance_ms
    member.client_id, member.client_host = ask.client_id, ask.client_host
    if (member.rack_id, member.rebalance_ms, member.client_id, member.client_host) != before:
        _mark_changed(group, member)
    wanted = (member.topics, member.pattern, member.assignor)
    member.topics = ask.topics if ask.topics is not None else member.topics
    member.pattern = ask.pattern if ask.pattern is not None else member.pattern
    member.assignor = ask.assignor if ask.assignor is not None else member.assignor
    if (member.topics, member.pattern, member.assignor) != wanted:
        _mark_changed(group, member)
        reconciliation.note_subscription_change(group)


def _mark_changed(group: ConsumerGroup, member: ConsumerGroupMember) -> None:
    group.changed.add(member.member_id)
    group.unstored = True


def _epoch_rejection(group: ConsumerGroup, ask: HeartbeatRequest) -> HeartbeatAnswer | None:
    code = _consumer_error(group, ask)
    if code:
        return HeartbeatAnswer(code, "The member is not in the group.")
    member = group.members[ask.member_id]
    if not member.away:
        if ask.epoch == member.epoch:
            return None
        # The member may have missed its last answer; then it owns no partition outside its assignment.
        if ask.epoch == member.previous and ask.owned is not None and is_subset(ask.owned, member.assigned):
            return None
    return HeartbeatAnswer(
        error_codes.FENCED_MEMBER_EPOCH,
        f"The member's epoch is {ask.epoch}, but the group has {member.reported_epoch}: join again.",
    )


def member_error(group: ConsumerGroup, member_id: str, instance_id: str | None) -> int:
    """Return the error code if the ids do not identify a member, else 0."""
    if instance_id is not None:
        known = group.instances.get(instance_id)
        if known is None:
            return error_codes.UNKNOWN_MEMBER_ID
        if known != member_id:
            return error_codes.FENCED_INSTANCE_ID
    return 0 if member_id in group.members else error_codes.UNKNOWN_MEMBER_ID


def _consumer_error(group: ConsumerGroup, ask: HeartbeatRequest) -> int:
    return member_error(group, ask.member_id, ask.instance_id) or (
        error_codes.UNKNOWN_MEMBER_ID if group.speaks_classic(ask.member_id) else 0
    )


def _leave_group(group: ConsumerGroup, now: int, ask: HeartbeatRequest) -> HeartbeatAnswer:
    code = _consumer_error(group, ask)
    if code:
        return HeartbeatAnswer(code, "The member is not in the group.")
    member = group.members[ask.member_id]
    if ask.epoch == EPOCH_LEAVE:
        reconciliation.remove_member(group, member)
    else:
        member.away = True
        member.until_ms = now + group.limits.consumer_session_ms
        _mark_changed(group, member)
    return HeartbeatAnswer(0, "", ask.member_id, ask.epoch)


def commit_error(
    group: ConsumerGroup, member_id: str, instance_id: str | None, epoch: int, *, in_transaction: bool = False
) -> int:
    """Return the code if a client with these properties may not commit offsets or read them as a member, else 0.

    Any client may while the group has no members, or in a transaction whose producer does not know its consumer (before
    KIP-447).
    """
    if epoch < 0 and (not group.members or (in_transaction and not member_id and instance_id is None)):
        return 0
    code = member_error(group, member_id, instance_id)
    if code:
        return code
    member = group.members[member_id]
    if epoch == member.epoch and not member.away:
        return 0
    # Producers and members of the classic protocol know only the errors of that protocol.
    return (
        error_codes.ILLEGAL_GENERATION
        if in_transaction or member.classic is not None
        else error_codes.STALE_MEMBER_EPOCH
    )


def tick(group: ConsumerGroup, now: int) -> None:
    """Fence members that do not send a heartbeat, revoke, join or sync in time."""
    for member in _members_with_timeouts(group):
        if _deadline_ms(member) <= now:
            reconciliation.remove_member(group, member)


def next_due_ms(group: ConsumerGroup) -> int | None:
    """Return the earliest time at which `tick` has something to do; None if no member can time out."""
    return min(map(_deadline_ms, _members_with_timeouts(group)), default=None)


def _deadline_ms(member: ConsumerGroupMember) -> int:
    until = min(member.until_ms, member.revoke_until_ms) if member.revoking else member.until_ms
    return min(until, member.owes_until_ms) if member.owes_until_ms else until


def _members_with_timeouts(group: ConsumerGroup) -> list[ConsumerGroupMember]:
    """Return the members whose timeouts run.

    A member that waits for its answer cannot time out, however long the write takes.
    """
    waiting = {said.member_id for each in (group.waiting, group.in_flight or ()) for _, said in each}
    return [member for member in group.members.values() if member.member_id not in waiting]


def queue_answer(group: ConsumerGroup, waiter: Waiter, said: Answer) -> None:
    """Send an answer once everything that it reports is durable."""
    if group.unstored:
        group.waiting.append((waiter, said))
    elif group.in_flight is not None:
        group.in_flight.append((waiter, said))
    else:
        group.outbox.append((waiter, said))


def begin_store(group: ConsumerGroup) -> ConsumerWrite:
    """Begin to write the group in its current state, and return what waits for exactly this write."""
    group.unstored = False
    storing = ConsumerWrite(frozenset(group.changed), group.waiting)
    group.changed, group.waiting = set(), []
    group.in_flight = storing.waiting
    return storing


def complete_store(group: ConsumerGroup, now: int, storing: ConsumerWrite, code: int) -> None:
    """Answer the waiting requests after a write that `begin_store` began; `code` is 0 or the error of the write.

    After an error the caller must discard this group, because it was derived from state that is not durable.
    """
    if group.in_flight is storing.waiting:
        group.in_flight = None
    for waiter, said in storing.waiting:
        group.outbox.append((waiter, error_answer_for(said, code) if code else said))
        member = group.members.get(said.member_id)
        if member is not None:
            # The member's timeouts begin when it receives the answer.
            member.until_ms = max(member.until_ms, now + group.session_ms(member))
            if member.owes_until_ms:
                member.owes_until_ms = max(member.owes_until_ms, now + member.rebalance_ms)
            member.revoke_until_ms = max(member.revoke_until_ms, now + member.rebalance_ms)


def release(group: ConsumerGroup, code: int) -> None:
    """Stop coordinating the group on this node.

    All waiting requests get `code`, so that their clients look up the coordinator.
    """
    group.is_dead = True
    for waiting in (group.waiting, group.in_flight or []):
        group.outbox += [(waiter, error_answer_for(said, code)) for waiter, said in waiting]
    group.waiting, group.in_flight = [], None
