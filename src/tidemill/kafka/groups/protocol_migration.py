"""Online migration of a group between the protocols while it has members (KIP-848, "Online migration"). Pure.

    classic, stable ──first member of the consumer protocol joins──► consumer, with members of both
    consumer        ──its last member of the consumer protocol is gone──► classic, rebalancing

Invariant (upgrade from a stable group): a group is upgraded only while its generation is stable and durable. Only then
do its assignments state which partitions its members hold, so that exclusive ownership continues.

Invariant (downgrade to the newest epoch): after a downgrade the generation is the newest epoch that any member
received, so commits of up-to-date members are accepted on the way into the rebalance. The pending rebalance is durable
with it.

Invariant (owned partitions are respected): a partition that a member owned when it joined the generation, and that is
not in its assignment, still belongs to the member, which may not have seen its assignment yet. It becomes free once the
member has joined again without it.
"""

from __future__ import annotations

from tidemill.kafka import error_codes
from tidemill.kafka.groups.classic import rebalance
from tidemill.kafka.groups.classic.state import (
    Answer,
    ClassicGroup,
    ClassicMember,
    HeartbeatAnswer,
    JoinAnswer,
    JoinRequest,
    Phase,
    SyncAnswer,
    error_answer_for,
)
from tidemill.kafka.groups.consumer import classic_members, reconciliation
from tidemill.kafka.groups.consumer.state import (
    ClassicSubscription,
    ConsumerGroup,
    ConsumerGroupMember,
    TopicSnapshot,
    iterate_places,
)
from tidemill.kafka.groups.subscriptions import CONSUMER, decode_assignment, decode_subscription
from tidemill.kafka.schema.primitives import MalformedFrameError


def upgrade(group: ClassicGroup, now: int, seen: TopicSnapshot) -> ConsumerGroup | HeartbeatAnswer:
    """Return the same members in the consumer protocol, or the answer to the joining member. `group` is unchanged."""
    if not group.limits.upgrades:
        return _upgrade_rejection("online upgrades are disabled (group.consumer.migration.policy)")
    if group.protocol_type != CONSUMER:
        return _upgrade_rejection(f"its members are not consumers but of the type {group.protocol_type!r}")
    if group.phase is not Phase.STABLE or group.unstored:
        return HeartbeatAnswer(
            error_codes.COORDINATOR_LOAD_IN_PROGRESS, "Its members of the classic protocol are rebalancing."
        )
    made = ConsumerGroup(group.name, group.limits)
    made.epoch = made.target_epoch = group.generation
    made.outbox, made.unstored = list(group.outbox), True
    for member in group.members.values():
        try:
            found = _convert_member(group, member, seen)
        except MalformedFrameError:
            return _upgrade_rejection("the metadata of a member is not that of a consumer")
        if found is None:
            return _upgrade_rejection("its assignor stores its own data in assignments")
        for place in iterate_places(found.held):
            if made.owners.setdefault(place, found.member_id) != found.member_id:
                return _upgrade_rejection("its assignor gave a partition to two members")
        made.members[found.member_id] = found
        made.changed.add(found.member_id)
        if found.instance_id is not None:
            made.instances[found.instance_id] = found.member_id
    for consumer in made.members.values():
        _retain_owned(made, now, consumer, seen)
    return made


def _retain_owned(group: ConsumerGroup, now: int, member: ConsumerGroupMember, seen: TopicSnapshot) -> None:
    """Retain partitions that the member owned and that are assigned to no member: it may not have revoked them yet."""
    assert member.classic is not None
    owned = classic_members.by_topic_id(decode_subscription(member.classic.protocols[0][1]).owned, seen)
    for place in iterate_places(owned):
        if place not in group.owners:
            group.owners[place] = member.member_id
            topic, partition = place
            for kept in (member.held, member.revoking):
                kept[topic] = kept.get(topic, frozenset()) | {partition}
            member.revoke_until_ms = now + member.rebalance_ms


def _upgrade_rejection(why: str) -> HeartbeatAnswer:
    return HeartbeatAnswer(
        error_codes.GROUP_ID_NOT_FOUND, f"The group cannot become one of the consumer protocol: {why}."
    )


def _convert_member(group: ClassicGroup, member: ClassicMember, seen: TopicSnapshot) -> ConsumerGroupMember | None:
    """Return the member in the consumer protocol.

    Return None if its assignment has data of its assignor, which would be lost. Raises MalformedFrameError.
    """
    assigned, user_data = decode_assignment(member.assignment)
    # The elected protocol comes first, because the member's answers use it.
    others = tuple(each for each in member.protocols if each[0] != group.protocol)
    protocols = ((group.protocol, member.metadata(group.protocol)), *others)
    subscription = decode_subscription(protocols[0][1])
    # librdkafka's cooperative-sticky returns to each member the data that the member sent.
    if user_data not in (b"", subscription.user_data):
        return None
    held = dict(classic_members.by_topic_id(assigned, seen))
    return ConsumerGroupMember(
        member.member_id,
        member.instance_id,
        subscription.rack_id,
        member.client_id,
        member.client_host,
        member.rebalance_ms,
        subscription.topics,
        epoch=group.generation,
        held=held,
        target=dict(held),
        until_ms=member.until_ms,
        classic=ClassicSubscription(member.session_ms, protocols),
    )


def downgrade_if_classic(group: ConsumerGroup, now: int) -> ConsumerGroup | ClassicGroup:
    """Return the group in the protocol that its members speak."""
    return downgrade(group, now) if group.limits.downgrades and group.is_all_classic else group


def is_last_consumer_replaced(group: ConsumerGroup, ask: JoinRequest) -> bool:
    """Return whether the joining member replaces the last member of the consumer protocol."""
    known = group.instances.get(ask.instance_id or "")
    if known is None or ask.member_id or group.speaks_classic(known) or not group.limits.downgrades:
        return False
    others = [member for member in group.members.values() if member.member_id != known]
    is_last = bool(others) and all(member.classic is not None for member in others)
    return is_last and not classic_members.join_error(group, ask)


def downgrade_by_replacement(group: ConsumerGroup, now: int, ask: JoinRequest) -> ClassicGroup:
    """Remove the last member of the consumer protocol, which `is_last_consumer_replaced` found to be replaced, and
    downgrade the group.
    """
    reconciliation.remove_member(group, group.members[group.instances[ask.instance_id or ""]])
    return downgrade(group, now)


def downgrade(group: ConsumerGroup, now: int) -> ClassicGroup:
    """Return the same members, which are all of the classic protocol, in a classic group that rebalances.

    Requests that waited for a write of the old group wait for one of the new group. `group` must not be used any more.
    """
    made = ClassicGroup(group.name, group.limits)
    made.protocol_type, made.generation = CONSUMER, group.target_epoch
    for member in group.members.values():
        assert member.classic is not None
        made.members[member.member_id] = ClassicMember(
            member.member_id,
            member.instance_id,
            member.client_id,
            member.client_host,
            member.classic.session_ms,
            member.rebalance_ms,
            member.classic.protocols,
            classic_members.encode_member_assignment(group, member),
            max(member.until_ms, now + member.classic.session_ms),
        )
    made.instances = dict(group.instances)
    made.leader = next(iter(made.members))
    made.later, group.waiting = [(waiter, _outdated_answer(said)) for waiter, said in group.waiting], []
    made.outbox, group.outbox = list(group.outbox), []
    made.unstored = True
    begin_durable_rebalance(made, now)
    return made


def begin_durable_rebalance(group: ClassicGroup, now: int) -> None:
    """Begin a rebalance that is durable as members without a protocol."""
    group.phase, group.protocol = Phase.STABLE, ""
    rebalance.begin_rebalance(group, now)


def _outdated_answer(said: Answer) -> Answer:
    """Replace the answer if it reports a generation that has ended."""
    return (
        error_answer_for(said, error_codes.REBALANCE_IN_PROGRESS) if isinstance(said, JoinAnswer | SyncAnswer) else said
    )
