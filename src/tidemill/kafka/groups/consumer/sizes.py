"""Size of a group of the consumer protocol in the metastore. Pure.

    bytes of members + PLACE_BYTES · partitions that are held, subscribed to or both  ≤  GROUP_BYTES_MAX

A group is written in one batch, in the worst case with all of its members. A partition is held by one member and in the
target of one, so the left side limits every state between the current assignment and the target. A subscription that
adds topics and exceeds the limit is rejected before it changes anything. A subscription without new topics is accepted:
topics without room are left out. Topics that a member holds and still wants are never left out, and `_reserve_bytes`
keeps room for members that join later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from tidemill.base.limits import METASTORE_BATCH_BYTES
from tidemill.kafka.groups.consumer.state import ConsumerGroup, ConsumerGroupMember, Topic, TopicSnapshot
from tidemill.metastore.rows.groups import PARTITION_BYTES, TOPIC_BYTES

PLACE_BYTES: Final = 2 * (TOPIC_BYTES + PARTITION_BYTES)
"""Bytes of a partition, at most: one member may hold it while it is in the target of another."""
MEMBER_BYTES: Final = 256
"""Bytes of a member without its texts, at most."""
GROUP_BYTES_MAX: Final = METASTORE_BATCH_BYTES - (64 << 10)
"""Limit of the members' rows; the rest is for the head row."""
RESERVE_SHARE: Final = 8
"""Share of GROUP_BYTES_MAX, as 1 / share, that topics leave to members that join later."""


def room_for_partitions(group: ConsumerGroup, members: Iterable[ConsumerGroupMember]) -> int:
    """Return how many partitions a group of these members has room for; negative if the members need too much."""
    headers: dict[frozenset[str], int] = {}
    return (GROUP_BYTES_MAX - sum(_member_bytes(group, member, headers) for member in members)) // PLACE_BYTES


def room_for_topics(group: ConsumerGroup, members: Iterable[ConsumerGroupMember]) -> int:
    """Return the part of `room_for_partitions` that topics may take which no member holds yet."""
    members = list(members)
    return room_for_partitions(group, members) - _reserve_bytes(group, members) // PLACE_BYTES


def _reserve_bytes(group: ConsumerGroup, members: Iterable[ConsumerGroupMember]) -> int:
    further_bytes = group.limits.bytes - sum(member.subscription_bytes for member in members)
    return min(GROUP_BYTES_MAX // RESERVE_SHARE, max(0, further_bytes))


def _member_bytes(group: ConsumerGroup, member: ConsumerGroupMember, headers: dict[frozenset[str], int]) -> int:
    """`headers`: bytes in front of the names of a subscription, which the members of a group often share."""
    texts = (member.instance_id, member.rack_id, member.client_id, member.client_host, member.assignor)
    keys_bytes = 2 * (len(group.name.encode()) + len(member.member_id.encode()))
    if (headers_bytes := headers.get(member.topics)) is None:
        headers_bytes = sum(map(_header_bytes, map(len, map(str.encode, member.topics))))
        headers[member.topics] = headers_bytes
    names_bytes = member.subscription_bytes + headers_bytes
    return MEMBER_BYTES + keys_bytes + names_bytes + sum(len((text or "").encode()) for text in texts)


def _header_bytes(text_bytes: int) -> int:
    """Return the bytes in front of a text of a row, as MessagePack encodes it."""
    return 1 if text_bytes < 1 << 5 else 2 if text_bytes < 1 << 8 else 3 if text_bytes < 1 << 16 else 5


def _held_counts(members: Iterable[ConsumerGroupMember]) -> Counter[str]:
    """Return topic id → number of partitions that the members hold."""
    counts: Counter[str] = Counter()
    for member in members:
        for topic_id, partitions in member.held.items():
            counts[topic_id] += len(partitions)
    return counts


def excess_partitions(
    group: ConsumerGroup, before: ConsumerGroupMember | None, after: ConsumerGroupMember, seen: TopicSnapshot
) -> int:
    """Return how many partitions too many the group would have once `after` replaces a member; at most 0 if it fits.

    `before` is None for a new member. A subscription without new topics is too large only if the held partitions
    exceed the room.
    """
    if before is not None and after.topics <= before.topics and after.pattern in ("", before.pattern):
        return 0
    members = [*(member for member in group.members.values() if member is not before), after]
    held = _held_counts(members)
    # The first member of an empty group continues with the subscription of members that left or were fenced.
    is_restart = not group.members and group.epoch > 0
    if is_restart or not _existing(
        _subscribed_names([after], seen) - _subscribed_names(group.members.values(), seen), seen
    ):
        return held.total() - room_for_partitions(group, members)
    topics = _existing(_subscribed_names(members, seen), seen).values()
    unheld = sum(max(0, topic.partitions - held[topic.topic_id]) for topic in topics)
    return held.total() + unheld - room_for_topics(group, members)


def _subscribed_names(members: Iterable[ConsumerGroupMember], seen: TopicSnapshot) -> frozenset[str]:
    subscribed = {(member.topics, member.pattern) for member in members}
    matches = [seen.matching(pattern) for pattern in {pattern for _, pattern in subscribed if pattern}]
    return frozenset().union(*(topics for topics, _ in subscribed), *matches)


def _existing(names: Iterable[str], seen: TopicSnapshot) -> dict[str, Topic]:
    return {name: topic for name in names if (topic := seen.topic(name)) is not None}


def fitting_topics(group: ConsumerGroup, found: Mapping[str, Topic]) -> dict[str, Topic]:
    """Return the topics for which the group has room: taken topics first, then those first in order.

    A topic of which a member that wants it has partitions is always there; without room for its further partitions, it
    has none of them. Partitions that move are taken also while no member holds them: their room is not given to others.
    """
    taken = _taken_partitions(group, found)
    held = Counter({topic_id: len(partitions) for topic_id, partitions in taken.items()})
    room = room_for_topics(group, group.members.values()) - held.total()
    unheld = {name: max(0, topic.partitions - held[topic.topic_id]) for name, topic in found.items()}
    if sum(unheld.values()) <= room:
        return dict(found)
    room = max(0, room)
    ends = _wanted_ends(group, found)
    kept: dict[str, Topic] = {}
    for name in sorted(found, key=lambda name: (name not in ends, name)):
        if unheld[name] <= room:
            room -= unheld[name]
            kept[name] = found[name]
        elif name in ends:
            kept[name] = Topic(found[name].topic_id, min(ends[name], found[name].partitions))
    return {name: kept[name] for name in found if name in kept}


def _taken_partitions(group: ConsumerGroup, found: Mapping[str, Topic]) -> dict[str, set[int]]:
    """Return topic id → partitions that a member holds, or that are assigned to a subscriber."""
    taken: dict[str, set[int]] = {}
    for member in group.members.values():
        for topic_id, partitions in member.held.items():
            taken.setdefault(topic_id, set()).update(partitions)
    for _, topic_id, partitions in _wanted(group, found):
        taken.setdefault(topic_id, set()).update(partitions)
    return taken


def _wanted_ends(group: ConsumerGroup, found: Mapping[str, Topic]) -> dict[str, int]:
    """Return the topics of which a subscriber has partitions, each with the end of the range of these."""
    ends: dict[str, int] = {}
    for name, _, partitions in _wanted(group, found):
        ends[name] = max(ends.get(name, 0), max(partitions) + 1)
    return ends


def _wanted(group: ConsumerGroup, found: Mapping[str, Topic]) -> Iterator[tuple[str, str, frozenset[int]]]:
    """Return the name, the id and the partitions of each topic that a subscriber holds or is assigned."""
    names = {topic.topic_id: name for name, topic in found.items()}
    for member in group.members.values():
        matches = group.matches.get(member.pattern, frozenset())
        for topic_id, partitions in (*member.held.items(), *member.target.items()):
            name = names.get(topic_id)
            if partitions and name is not None and (name in member.topics or name in matches):
                yield name, topic_id, partitions
