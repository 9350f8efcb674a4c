"""Reconciliation of a group of the consumer protocol: from the partitions that members hold to their target. Pure.

    target changed ──► revoking: the member must revoke other members' partitions ──► revoked, or timed out
                   ──► its epoch is the target's; it gets each partition of its target once no other member holds it

Invariant (exclusive partitions): a partition is assigned to a member only while no member holds it, and is held until
its owner has reported the revocation, left, or was fenced. The held partitions are durable before any member is
informed (`ConsumerGroup.unstored`).

Invariant (growing epochs): the epochs of a group, of its target and of a member only increase.

Source: KIP-848, "Assignment" and "Member reconciliation".
"""

from __future__ import annotations

from tidemill.kafka.groups.consumer.assignors import ASSIGNORS, DEFAULT, Partitions
from tidemill.kafka.groups.consumer.sizes import fitting_topics
from tidemill.kafka.groups.consumer.state import (
    ConsumerGroup,
    ConsumerGroupMember,
    TopicSnapshot,
    digest_of,
    iterate_places,
    subtract_partitions,
)


def update_target(group: ConsumerGroup, seen: TopicSnapshot) -> None:
    """Begin a new epoch and compute its target if subscriptions or topics have changed."""
    if group.topics is None or group.seen_version != seen.version:
        group.matches = {pattern: seen.matching(pattern) for pattern in group.patterns()}
        first, *others = set(_subscribed_names(group).values()) or {frozenset[str]()}
        wanted = first.union(*others) if others else first  # one set is not copied: groups share it
        if group.topics is None or (group.found_version, group.found_names) != (seen.version, wanted):
            found = {name: topic for name in sorted(wanted) if (topic := seen.topic(name)) is not None}
            fitting = fitting_topics(group, found)
            if fitting != group.topics:
                group.topics, group.subscribed_ids = fitting, {}
                digest = digest_of(fitting)
                if digest != group.digest:
                    group.digest = digest
                    _next_epoch(group)
            group.topics_left_out = sum(fitting.get(name) != topic for name, topic in found.items())
            group.found_version, group.found_names = seen.version, None if group.topics_left_out else wanted
        group.seen_version = seen.version
    if group.target_epoch != group.epoch:
        _compute_target(group)


def _subscribed_names(group: ConsumerGroup) -> dict[tuple[frozenset[str], str], frozenset[str]]:
    """Return the topics' names of each different subscription (names, pattern)."""
    subscriptions = {(member.topics, member.pattern) for member in group.members.values()}
    return {each: group.subscribed_names(*each) for each in subscriptions}


def note_subscription_change(group: ConsumerGroup) -> None:
    """Begin a new epoch after a change of subscriptions."""
    group.seen_version = -1
    _next_epoch(group)


def _next_epoch(group: ConsumerGroup) -> None:
    """Begin a new epoch, unless the current one has no target yet: then it covers this change too."""
    if group.epoch == group.target_epoch:
        group.epoch += 1
    group.unstored = True


def _compute_target(group: ConsumerGroup) -> None:
    """Compute the target of the group's epoch."""
    topics = group.topics or {}
    members = sorted(group.members.values(), key=lambda member: member.sort_key)
    names = _subscribed_names(group)
    # Members of equal subscriptions get the same set, and a set stays the same object while its topics do.
    known, group.subscribed_ids = group.subscribed_ids, {}
    for each in names.values():
        if each not in group.subscribed_ids:
            found = known.get(each)
            if found is None:
                found = frozenset(topics[name].topic_id for name in each if name in topics)
            group.subscribed_ids[each] = found
    subscriptions = {member.member_id: group.subscribed_ids[names[member.topics, member.pattern]] for member in members}
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
    group: ConsumerGroup, now: int, member: ConsumerGroupMember, owned: Partitions | None, *, is_join: bool = False
) -> bool:
    """Take one step of a member's reconciliation, and return whether it has something new to report to the member.

    `owned` are the partitions that the member reports to own. `is_join` marks a JoinGroup, before which the member has
    revoked everything that it does not own, whether asked to or not.
    """
    before = (member.epoch, dict(member.held), dict(member.revoking))
    if member.revoking and owned is not None and _has_revoked(member.revoking, owned):
        free_partitions(group, member, member.revoking)
        member.revoking = {}
        note_freed_room(group)
    if not member.revoking:
        gone = subtract_partitions(member.held, member.target)
        if gone and is_join and owned is not None and _has_revoked(gone, owned):
            free_partitions(group, member, gone)
            gone = {}
            note_freed_room(group)
        if gone:
            member.revoking, member.revoke_until_ms = gone, now + member.rebalance_ms
        else:
            if member.epoch != group.target_epoch:
                member.previous, member.epoch = member.epoch, group.target_epoch
            _assign_free(group, member, subtract_partitions(member.target, member.held))
    if (member.epoch, member.held, member.revoking) == before:
        return False
    group.changed.add(member.member_id)
    group.unstored = True
    return True


def _has_revoked(revoking: Partitions, owned: Partitions) -> bool:
    return all(owned.get(topic, frozenset()).isdisjoint(gone) for topic, gone in revoking.items())


def _assign_free(group: ConsumerGroup, member: ConsumerGroupMember, wanted: Partitions) -> None:
    """Assign the wanted partitions that no member holds."""
    for topic, partitions in wanted.items():
        free = frozenset(partition for partition in partitions if (topic, partition) not in group.owners)
        if free:
            member.held[topic] = member.held.get(topic, frozenset()) | free
            group.owners.update(((topic, partition), member.member_id) for partition in free)


def free_partitions(group: ConsumerGroup, member: ConsumerGroupMember, these: Partitions) -> None:
    for place in iterate_places(these):
        # A durable state in which two members hold a partition must not end the group: it loses one holder at a time.
        if group.owners.get(place) == member.member_id:
            del group.owners[place]
    member.held = subtract_partitions(member.held, these)


def note_freed_room(group: ConsumerGroup) -> None:
    """Let the next heartbeat check whether topics that were left out have room now."""
    if group.topics_left_out:
        group.seen_version = -1


def remove_member(group: ConsumerGroup, member: ConsumerGroupMember) -> None:
    """Remove a member that left or timed out. Its partitions become free."""
    free_partitions(group, member, member.held)
    del group.members[member.member_id]
    group.changed.discard(member.member_id)
    if member.instance_id is not None and group.instances.get(member.instance_id) == member.member_id:
        del group.instances[member.instance_id]
    note_subscription_change(group)
