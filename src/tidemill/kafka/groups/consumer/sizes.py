"""Size of a group of the consumer protocol in the metastore. Pure.

    bytes of members + PLACE_BYTES · (held partitions + partitions of subscribed topics)  ≤  GROUP_BYTES_MAX

A group is written in one batch, in the worst case with all of its members. A partition is held by one member and in the
target of one, so the left side limits every state between the current assignment and the target. A request that would
exceed it is rejected before it changes anything. Topics that are created later and do not fit are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tidemill.base.limits import METASTORE_BATCH_BYTES
from tidemill.kafka.groups.consumer.state import ConsumerGroup, ConsumerGroupMember, Topic, TopicSnapshot
from tidemill.metastore.rows.groups import PARTITION_BYTES, TOPIC_BYTES

PLACE_BYTES: Final = TOPIC_BYTES + PARTITION_BYTES
MEMBER_BYTES: Final = 256
"""Bytes of a member without its texts, at most."""
TEXT_BYTES: Final = 5
"""Bytes in front of a text, at most."""
GROUP_BYTES_MAX: Final = METASTORE_BATCH_BYTES - (64 << 10)
"""Limit of the members' rows; the rest is for the head row."""


def room_for_topics(group: ConsumerGroup, more_bytes: int = 0) -> int:
    """Return how many partitions the subscribed topics may have; `more_bytes` are those of a member that joins."""
    used_bytes = more_bytes + sum(_member_bytes(group, member) for member in group.members.values())
    return max(0, (GROUP_BYTES_MAX - used_bytes) // PLACE_BYTES - len(group.owners))


def _member_bytes(group: ConsumerGroup, member: ConsumerGroupMember) -> int:
    texts = (member.instance_id, member.rack_id, member.client_id, member.client_host, member.assignor)
    keys_bytes = 2 * (len(group.name.encode()) + len(member.member_id.encode()))
    names_bytes = member.subscription_bytes + TEXT_BYTES * len(member.topics)
    return MEMBER_BYTES + keys_bytes + names_bytes + sum(len((text or "").encode()) for text in texts)


def excess_partitions(
    group: ConsumerGroup, topics: frozenset[str], pattern: str, seen: TopicSnapshot, more_bytes: int
) -> int:
    """Return how many partitions too many the group would have with a subscription; at most 0 if it fits."""
    known = group.topics or {}
    names = topics | (seen.matching(pattern) if pattern else frozenset())
    added = sum(topic.partitions for name in names - known.keys() if (topic := seen.topic(name)) is not None)
    if not added:
        return 0
    return added + sum(topic.partitions for topic in known.values()) - room_for_topics(group, more_bytes)


def fitting_topics(group: ConsumerGroup, found: Mapping[str, Topic]) -> dict[str, Topic]:
    """Return the topics for which the group has room: assigned topics first, then those first in order."""
    room = room_for_topics(group)
    if sum(topic.partitions for topic in found.values()) <= room:
        return dict(found)
    assigned = {topic_id for member in group.members.values() for topic_id in member.target}
    kept: set[str] = set()
    for name in sorted(found, key=lambda name: (found[name].topic_id not in assigned, name)):
        if found[name].partitions <= room:
            room -= found[name].partitions
            kept.add(name)
    return {name: topic for name, topic in found.items() if name in kept}
