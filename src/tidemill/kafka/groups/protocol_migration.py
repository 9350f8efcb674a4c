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
from tidemill.kafka.groups import classic_members, classic_rebalance, consumer_reconciliation
from tidemill.kafka.groups.classic_state import (
    Answer,
    BeatAnswer,
    Group,
    Join,
    JoinAnswer,
    Member,
    Phase,
    SyncAnswer,
    failed,
)
from tidemill.kafka.groups.consumer_state import Classic, Consumer, ConsumerGroup, TopicSnapshot, places
from tidemill.kafka.groups.subscriptions import CONSUMER, assignment_of, subscription_of
from tidemill.kafka.schema.primitives import MalformedFrameError


def upgraded(group: Group, now: int, seen: TopicSnapshot) -> ConsumerGroup | BeatAnswer:
    """Return the same members in the consumer protocol, or the answer to the joining member. `group` is unchanged."""
    if not group.limits.upgrades:
        return _refused("online upgrades are disabled (group.consumer.migration.policy)")
    if group.protocol_type != CONSUMER:
        return _refused(f"its members are not consumers but of the type {group.protocol_type!r}")
    if group.phase is not Phase.STABLE or group.unstored:
        return BeatAnswer(
            error_codes.COORDINATOR_LOAD_IN_PROGRESS, "Its members of the classic protocol are rebalancing."
        )
    made = ConsumerGroup(group.name, group.limits)
    made.epoch = made.target_epoch = group.generation
    made.outbox, made.unstored = list(group.outbox), True
    for member in group.members.values():
        try:
            found = _consumer(group, member, seen)
        except MalformedFrameError:
            return _refused("the metadata of a member is not that of a consumer")
        if found is None:
            return _refused("its assignor stores its own data in assignments")
        for place in places(found.held):
            if made.owners.setdefault(place, found.member_id) != found.member_id:
                return _refused("its assignor gave a partition to two members")
        made.members[found.member_id] = found
        made.changed.add(found.member_id)
        if found.instance_id is not None:
            made.instances[found.instance_id] = found.member_id
    for consumer in made.members.values():
        _keep_owned(made, now, consumer, seen)
    return made


def _keep_owned(group: ConsumerGroup, now: int, member: Consumer, seen: TopicSnapshot) -> None:
    """Retain partitions that the member owned and that are assigned to no member: it may not have revoked them yet."""
    assert member.classic is not None
    owned = classic_members.by_id(subscription_of(member.classic.protocols[0][1]).owned, seen)
    for place in places(owned):
        if place not in group.owners:
            group.owners[place] = member.member_id
            topic, partition = place
            for kept in (member.held, member.revoking):
                kept[topic] = kept.get(topic, frozenset()) | {partition}
            member.revoke_until_ms = now + member.rebalance_ms


def _refused(why: str) -> BeatAnswer:
    return BeatAnswer(error_codes.GROUP_ID_NOT_FOUND, f"The group cannot become one of the consumer protocol: {why}.")


def _consumer(group: Group, member: Member, seen: TopicSnapshot) -> Consumer | None:
    """Return the member in the consumer protocol.

    Return None if its assignment has data of its assignor, which would be lost. Raises MalformedFrameError.
    """
    assigned, user_data = assignment_of(member.assignment)
    # The elected protocol comes first, because the member's answers use it.
    others = tuple(each for each in member.protocols if each[0] != group.protocol)
    protocols = ((group.protocol, member.metadata(group.protocol)), *others)
    subscription = subscription_of(protocols[0][1])
    # librdkafka's cooperative-sticky returns to each member the data that the member sent.
    if user_data not in (b"", subscription.user_data):
        return None
    held = dict(classic_members.by_id(assigned, seen))
    return Consumer(
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
        classic=Classic(member.session_ms, protocols),
    )


def settled(group: ConsumerGroup, now: int) -> ConsumerGroup | Group:
    """Return the group in the protocol that its members speak."""
    return downgraded(group, now) if group.limits.downgrades and group.is_all_classic else group


def goes_back_with(group: ConsumerGroup, ask: Join) -> bool:
    """Return whether the joining member replaces the last member of the consumer protocol."""
    known = group.instances.get(ask.instance_id or "")
    if known is None or ask.member_id or group.speaks_classic(known) or not group.limits.downgrades:
        return False
    others = [member for member in group.members.values() if member.member_id != known]
    is_last = bool(others) and all(member.classic is not None for member in others)
    return is_last and not classic_members.refusal(group, ask)


def downgraded_without(group: ConsumerGroup, now: int, ask: Join) -> Group:
    """Remove the last member of the consumer protocol, which `goes_back_with` found to be replaced, and downgrade the
    group.
    """
    consumer_reconciliation.remove(group, group.members[group.instances[ask.instance_id or ""]])
    return downgraded(group, now)


def downgraded(group: ConsumerGroup, now: int) -> Group:
    """Return the same members, which are all of the classic protocol, in a classic group that rebalances.

    Requests that waited for a write of the old group wait for one of the new group. `group` must not be used any more.
    """
    made = Group(group.name, group.limits)
    made.protocol_type, made.generation = CONSUMER, group.target_epoch
    for member in group.members.values():
        assert member.classic is not None
        made.members[member.member_id] = Member(
            member.member_id,
            member.instance_id,
            member.client_id,
            member.client_host,
            member.classic.session_ms,
            member.rebalance_ms,
            member.classic.protocols,
            classic_members.assignment(group, member),
            max(member.until_ms, now + member.classic.session_ms),
        )
    made.instances = dict(group.instances)
    made.leader = next(iter(made.members))
    made.later, group.waiting = [(waiter, _still_true(said)) for waiter, said in group.waiting], []
    made.outbox, group.outbox = list(group.outbox), []
    made.unstored = True
    owes_a_rebalance(made, now)
    return made


def owes_a_rebalance(group: Group, now: int) -> None:
    """Begin a rebalance that is durable as members without a protocol."""
    group.phase, group.protocol = Phase.STABLE, ""
    classic_rebalance.rebalance(group, now)


def _still_true(said: Answer) -> Answer:
    """Replace the answer if it reports a generation that has ended."""
    return failed(said, error_codes.REBALANCE_IN_PROGRESS) if isinstance(said, JoinAnswer | SyncAnswer) else said
