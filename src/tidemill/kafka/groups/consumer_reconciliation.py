"""How a group of the consumer protocol gets from what its members have to what they should have. Pure.

    target moved ──► revoking: it is to let go of what others should have ──► it let go, or is removed at its time-out
                 ──► its epoch is the target's; it is given what it should have as soon as nobody else has it

CS1  A partition is given to a member only while nobody holds it, and is held until its holder has said that it let go,
     left, or was fenced. What members hold is durable before any of them is told (`ConsumerGroup.unstored`).
CS2  The epochs of a group, of its target and of a member only grow.

Source: KIP-848, "Assignment" and "Member reconciliation".
"""

from __future__ import annotations

from tidemill.kafka.groups.assignors import ASSIGNORS, DEFAULT, Partitions
from tidemill.kafka.groups.consumer_state import Consumer, ConsumerGroup, TopicSnapshot, digest_of, minus, places


def look(group: ConsumerGroup, seen: TopicSnapshot) -> None:
    """Subscriptions or topics may have changed: a new epoch, and a target for it."""
    if group.topics is None or group.seen_version != seen.version:
        group.matches = {pattern: seen.matching(pattern) for pattern in group.patterns()}
        wanted = set().union(*map(group.subscribed_names, group.members.values()))
        found = {name: topic for name in sorted(wanted) if (topic := seen.of(name)) is not None}
        group.seen_version = seen.version
        if found != group.topics:
            group.topics = found
            digest = digest_of(found)
            if digest != group.digest:
                group.digest = digest
                _next_epoch(group)
    if group.target_epoch != group.epoch:
        _aim(group)


def resubscribed(group: ConsumerGroup) -> None:
    """Who is subscribed to what has changed."""
    group.seen_version = -1
    _next_epoch(group)


def _next_epoch(group: ConsumerGroup) -> None:
    """One that has no target yet serves for all that changes until it has one."""
    if group.epoch == group.target_epoch:
        group.epoch += 1
    group.unstored = True


def _aim(group: ConsumerGroup) -> None:
    """The target of the group's epoch."""
    topics = group.topics or {}
    members = sorted(group.members.values(), key=lambda member: member.order)
    subscriptions = {
        member.member_id: frozenset(topics[name].topic_id for name in group.subscribed_names(member) if name in topics)
        for member in members
    }
    votes = [member.assignor for member in members if member.assignor]
    group.assignor = max(sorted(set(votes)), key=votes.count, default=DEFAULT)
    before = {member.member_id: member.target for member in members}
    target = ASSIGNORS[group.assignor](subscriptions, dict(topics.values()), before)
    for member in members:
        if member.target != target[member.member_id]:
            member.target = target[member.member_id]
            group.changed.add(member.member_id)
    group.target_epoch = group.epoch
    group.unstored = True


def reconcile(
    group: ConsumerGroup, now: int, member: Consumer, owned: Partitions | None, *, is_join: bool = False
) -> bool:
    """One heartbeat's step; `owned` is what the member says it has. Has anything changed that it is to be told?

    `is_join`: a JoinGroup, before which the member has let go of everything that it does not own, told or not.
    """
    before = (member.epoch, dict(member.held), dict(member.revoking))
    if member.revoking and owned is not None and _lets_go(member.revoking, owned):
        give_up(group, member, member.revoking)
        member.revoking = {}
    if not member.revoking:
        gone = minus(member.held, member.target)
        if gone and is_join and owned is not None and _lets_go(gone, owned):
            give_up(group, member, gone)
            gone = {}
        if gone:
            member.revoking, member.revoke_until_ms = gone, now + member.rebalance_ms
        else:
            if member.epoch != group.target_epoch:
                member.previous, member.epoch = member.epoch, group.target_epoch
            _give(group, member, minus(member.target, member.held))
    if (member.epoch, member.held, member.revoking) == before:
        return False
    group.changed.add(member.member_id)
    group.unstored = True
    return True


def _lets_go(revoking: Partitions, owned: Partitions) -> bool:
    return all(owned.get(topic, frozenset()).isdisjoint(gone) for topic, gone in revoking.items())


def _give(group: ConsumerGroup, member: Consumer, wanted: Partitions) -> None:
    """What of it nobody has (CS1)."""
    for topic, partitions in wanted.items():
        free = frozenset(partition for partition in partitions if (topic, partition) not in group.owners)
        if free:
            member.held[topic] = member.held.get(topic, frozenset()) | free
            group.owners.update(((topic, partition), member.member_id) for partition in free)


def give_up(group: ConsumerGroup, member: Consumer, these: Partitions) -> None:
    for place in places(these):
        del group.owners[place]
    member.held = minus(member.held, these)


def remove(group: ConsumerGroup, member: Consumer) -> None:
    """It left, or is not heard of any more: what it held is free."""
    give_up(group, member, member.held)
    del group.members[member.member_id]
    group.changed.discard(member.member_id)
    if member.instance_id is not None and group.instances.get(member.instance_id) == member.member_id:
        del group.instances[member.instance_id]
    resubscribed(group)
