"""Requests of members of the classic protocol to a group of the consumer protocol, answered as Kafka 4 does. Pure.

While members change the protocol one after the other (`protocol_migration`), classic members continue unchanged. Their
generation is their member epoch. A Heartbeat asks them to join again, a JoinGroup carries their owned partitions and
takes the reconciliation step that other members take with a heartbeat, and SyncGroup returns the partitions that they
may use. None of them is a leader.

    eager         revokes everything, joins owning nothing, gets every free partition of its target
    cooperative   joins with its owned partitions, syncs without those to revoke, revokes them, joins again

Source: KIP-848, "Online migration"; the answers of Kafka 4.1.
"""

from __future__ import annotations

from typing import Final

from tidemill.kafka import error_codes
from tidemill.kafka.groups.classic.state import JoinAnswer, JoinRequest, SyncAnswer, SyncRequest, metadata_bytes
from tidemill.kafka.groups.consumer import reconciliation
from tidemill.kafka.groups.consumer.assignors import Partitions
from tidemill.kafka.groups.consumer.requests import ID_BYTES, member_error
from tidemill.kafka.groups.consumer.sizes import excess_partitions
from tidemill.kafka.groups.consumer.state import (
    ClassicSubscription,
    ConsumerGroup,
    ConsumerGroupMember,
    TopicSnapshot,
    iterate_places,
    subtract_partitions,
)
from tidemill.kafka.groups.subscriptions import CONSUMER, Place, Subscription, decode_subscription, encode_assignment
from tidemill.kafka.schema.primitives import MalformedFrameError

NO_LEADER: Final = ""


def join(group: ConsumerGroup, now: int, ask: JoinRequest, seen: TopicSnapshot) -> JoinAnswer:
    """Join or rejoin a member. An error changes nothing."""
    code = join_error(group, ask)
    if code:
        return JoinAnswer(code, ask.member_id)
    if not ask.member_id and ask.instance_id is None and ask.knows_first:
        return JoinAnswer(error_codes.MEMBER_ID_REQUIRED, ask.new_id)
    subscription = decode_subscription(ask.protocols[0][1])
    before = _known_member(group, ask)
    after = ConsumerGroupMember(
        ask.member_id or ask.new_id,
        ask.instance_id,
        subscription.rack_id,
        ask.client_id,
        ask.client_host,
        topics=subscription.topics,
        held=before.held if before is not None else {},
        classic=ClassicSubscription(ask.session_ms, ask.protocols),
    )
    if excess_partitions(group, before, after, seen) > 0:
        return JoinAnswer(error_codes.GROUP_MAX_SIZE_REACHED, ask.member_id)
    member = _joining_member(group, ask)
    _update_member(group, member, ask, subscription)
    reconciliation.update_target(group, seen)
    reconciliation.reconcile(group, now, member, by_topic_id(subscription.owned, seen), is_join=True)
    member.until_ms, member.owes_until_ms = now + ask.session_ms, now + ask.rebalance_ms
    return JoinAnswer(0, member.member_id, member.epoch, CONSUMER, ask.protocols[0][0], NO_LEADER)


def _known_member(group: ConsumerGroup, ask: JoinRequest) -> ConsumerGroupMember | None:
    """Return the member that joins again; a static member may do so without its id."""
    return group.members.get(ask.member_id or group.instances.get(ask.instance_id or "", ""))


def join_error(group: ConsumerGroup, ask: JoinRequest) -> int:
    """Return the error code if the join is invalid, else 0."""
    limits = group.limits
    if not limits.session_ms_min <= ask.session_ms <= limits.session_ms_max:
        return error_codes.INVALID_SESSION_TIMEOUT
    if ask.protocol_type != CONSUMER or not _has_common_protocol(group, ask):
        return error_codes.INCONSISTENT_GROUP_PROTOCOL
    if len(ask.member_id.encode()) > ID_BYTES or "\x00" in ask.member_id:
        return error_codes.UNKNOWN_MEMBER_ID
    before = _known_member(group, ask)
    if ask.instance_id is not None and ask.member_id:
        code = member_error(group, ask.member_id, ask.instance_id)
        if code:
            return code
    if ask.member_id and before is not None and before.classic is None:
        return error_codes.UNKNOWN_MEMBER_ID
    # A fenced member still uses its former partitions, which may have another owner. Under a current generation it
    # could commit their offsets; UNKNOWN_MEMBER_ID makes its client drop them first.
    if ask.member_id and before is None and decode_subscription(ask.protocols[0][1]).owned:
        return error_codes.UNKNOWN_MEMBER_ID
    size = metadata_bytes(ask.protocols)
    others = sum(each.subscription_bytes for each in group.members.values() if each is not before)
    is_one_more = before is None and len(group.members) >= limits.members
    if is_one_more or size > limits.member_bytes or size + others > limits.bytes:
        return error_codes.GROUP_MAX_SIZE_REACHED
    return 0


def _has_common_protocol(group: ConsumerGroup, ask: JoinRequest) -> bool:
    """Return whether the request names a protocol that all other classic members speak.

    They use it among themselves again when the last member of the consumer protocol leaves.
    """
    names = {name for name, _ in ask.protocols}
    try:
        decode_subscription(ask.protocols[0][1] if ask.protocols else b"")
    except MalformedFrameError:
        return False
    for member in group.members.values():
        is_itself = member.member_id == ask.member_id or member.instance_id == (ask.instance_id or "")
        if member.classic is not None and not is_itself:
            names &= {name for name, _ in member.classic.protocols}
    return bool(names)


def _joining_member(group: ConsumerGroup, ask: JoinRequest) -> ConsumerGroupMember:
    """Return the joining member.

    A static member that returns continues with its state, whichever protocol it used. An unknown member, which owns
    nothing (`join_error`), is added under the id in the request.
    """
    known = group.instances.get(ask.instance_id or "")
    if known is not None and not ask.member_id:
        member = group.members.pop(known)
        group.changed.discard(known)
        member.member_id, member.away = ask.new_id, False
        group.owners.update(dict.fromkeys(iterate_places(member.held), ask.new_id))
    else:
        found = group.members.get(ask.member_id)
        member = found or ConsumerGroupMember(ask.member_id or ask.new_id, ask.instance_id)
        if found is None:
            reconciliation.note_subscription_change(group)
    group.members[member.member_id] = member
    if member.instance_id is not None:
        group.instances[member.instance_id] = member.member_id
    return member


def _update_member(
    group: ConsumerGroup, member: ConsumerGroupMember, ask: JoinRequest, subscription: Subscription
) -> None:
    member.client_id, member.client_host = ask.client_id, ask.client_host
    member.rebalance_ms, member.rack_id = ask.rebalance_ms, subscription.rack_id
    member.classic = ClassicSubscription(ask.session_ms, ask.protocols)
    if (member.topics, member.pattern, member.assignor) != (subscription.topics, "", None):
        member.topics, member.pattern, member.assignor = subscription.topics, "", None
        reconciliation.note_subscription_change(group)
    group.changed.add(member.member_id)
    group.unstored = True


def by_topic_id(named: tuple[Place, ...] | list[Place], seen: TopicSnapshot) -> Partitions:
    """Return the partitions by topic id, without topics that do not exist."""
    found: dict[str, frozenset[int]] = {}
    for name, partition in named:
        topic = seen.topic(name)
        if topic is not None and 0 <= partition < topic.partitions:
            found[topic.topic_id] = found.get(topic.topic_id, frozenset()) | {partition}
    return found


def sync(group: ConsumerGroup, now: int, ask: SyncRequest) -> SyncAnswer:
    code = _request_error(group, ask.member_id, ask.instance_id, ask.generation)
    if code:
        return SyncAnswer(code)
    member = group.members[ask.member_id]
    assert member.classic is not None
    protocol = member.classic.protocols[0][0]
    for asked, own in ((ask.protocol_type, CONSUMER), (ask.protocol, protocol)):
        if asked is not None and asked != own:
            return SyncAnswer(error_codes.INCONSISTENT_GROUP_PROTOCOL)
    # A member that must revoke partitions learns of them here; it gets the new epoch at its next JoinGroup.
    if group.topics is None or (group.epoch > member.epoch and not member.revoking):
        _set_rejoin_deadline(member, now)
        return SyncAnswer(error_codes.REBALANCE_IN_PROGRESS)
    member.until_ms, member.owes_until_ms = now + member.classic.session_ms, 0
    return SyncAnswer(0, CONSUMER, protocol, encode_member_assignment(group, member), member.member_id)


def encode_member_assignment(group: ConsumerGroup, member: ConsumerGroupMember) -> bytes:
    """Encode the partitions that the member may use, as its client reads them. Deleted topics are left out."""
    assert member.classic is not None
    names = {topic.topic_id: name for name, topic in (group.topics or {}).items()}
    assigned = {names[topic_id]: numbers for topic_id, numbers in member.assigned.items() if topic_id in names}
    return encode_assignment(decode_subscription(member.classic.protocols[0][1]).version, assigned)


def heartbeat(group: ConsumerGroup, now: int, member_id: str, instance_id: str | None, generation: int) -> int:
    code = _request_error(group, member_id, instance_id, generation)
    if code:
        return code
    member = group.members[member_id]
    member.until_ms = max(member.until_ms, now + group.session_ms(member))
    if member.epoch == group.epoch and not member.revoking and not _has_free_partitions(group, member):
        return 0
    _set_rejoin_deadline(member, now)
    return error_codes.REBALANCE_IN_PROGRESS


def _has_free_partitions(group: ConsumerGroup, member: ConsumerGroupMember) -> bool:
    """Return whether all missing partitions of the target are free.

    Waiting for all of them avoids one rejoin per partition.
    """
    missing = subtract_partitions(member.target, member.held)
    return bool(missing) and not any(place in group.owners for place in iterate_places(missing))


def _set_rejoin_deadline(member: ConsumerGroupMember, now: int) -> None:
    member.owes_until_ms = member.owes_until_ms or now + member.rebalance_ms


def _request_error(group: ConsumerGroup, member_id: str, instance_id: str | None, generation: int) -> int:
    code = member_error(group, member_id, instance_id)
    if code:
        return code
    if not group.speaks_classic(member_id):
        return error_codes.UNKNOWN_MEMBER_ID
    return error_codes.ILLEGAL_GENERATION if generation != group.members[member_id].epoch else 0


def leave_group(group: ConsumerGroup, member_id: str, instance_id: str | None) -> int:
    """Remove a member. A static member may be named by its instance alone, as administrators do."""
    if not member_id and instance_id is not None:
        member_id = group.instances.get(instance_id, "")
    code = member_error(group, member_id, instance_id)
    if code:
        return code
    if not group.speaks_classic(member_id):
        return error_codes.UNKNOWN_MEMBER_ID
    reconciliation.remove_member(group, group.members[member_id])
    return 0
