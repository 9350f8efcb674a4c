"""Codec of the consumers' metadata and assignments: subscribed topics and assigned partitions.

    subscription    version int16 | topics | user data | from version 1 on owned places | 2: generation int32
                    | 3: rack nullable text
    assignment      version int16 | places | user data
    topics          int32 count, each int16 length and UTF-8
    places          int32 count, each a topic and its partitions: int32 count, each int32
    user data       int32 length or −1, bytes: between the clients

Source: ConsumerProtocolSubscription.json and ConsumerProtocolAssignment.json of Kafka 4. Fields missing at the end are
empty, because some clients leave them out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from tidemill.kafka.groups.classic.state import ClassicGroup, Phase
from tidemill.kafka.groups.consumer.state import ConsumerGroup
from tidemill.kafka.schema.primitives import I16, I32, MalformedFrameError, read_i16, truncated_frame_error

CONSUMER: Final = "consumer"


VERSION_MAX: Final = 3

Place = tuple[str, int]
"""Topic name and partition."""


class Subscription(NamedTuple):
    version: int
    topics: frozenset[str]
    user_data: bytes
    owned: tuple[Place, ...]
    rack_id: str | None


def decode_subscription(metadata: bytes) -> Subscription:
    """Decode a subscription. Raises MalformedFrameError for invalid metadata."""
    view = memoryview(metadata)
    version, position = read_i16(view, 0)
    topics, position = _read_topics(view, position)
    user_data, position = _read_user_data(view, position)
    owned: list[Place] = []
    rack_id: str | None = None
    if version >= 1 and position < len(view):
        owned, position = _read_places(view, position)
    if version >= 3 and position + 4 < len(view):
        length, _ = read_i16(view, position + 4)
        rack_id = _read_text(view, position + 4)[0] if length > 0 else None
    return Subscription(version, frozenset(topics), user_data, tuple(owned), rack_id)


def subscribed_topics(metadata: bytes) -> frozenset[str]:
    """Return the subscribed topics. Raises MalformedFrameError for invalid metadata."""
    return decode_subscription(metadata).topics


def is_subscribed(group: ClassicGroup | ConsumerGroup, topic: str) -> bool:
    """Return whether any member is subscribed to the topic.

    True for every topic during a rebalance, and if metadata is unreadable.
    """
    if not group.members:
        return False
    if isinstance(group, ConsumerGroup):
        if group.topics is None and group.patterns():
            return True
        return any(topic in group.subscribed_names(each.topics, each.pattern) for each in group.members.values())
    if group.phase is not Phase.STABLE:
        return True
    try:
        return any(topic in subscribed_topics(member.metadata(group.protocol)) for member in group.members.values())
    except MalformedFrameError:
        return True


def assigned_topics(group: ClassicGroup) -> frozenset[str]:
    """Return the topics of the members' assignments; empty if these are unreadable."""
    try:
        return frozenset(topic for member in group.members.values() for topic, _ in assigned_places(member.assignment))
    except MalformedFrameError:
        return frozenset()


def assigned_places(assignment: bytes) -> list[Place]:
    """Return the partitions of an assignment. Raises MalformedFrameError if it is invalid."""
    return decode_assignment(assignment)[0]


def decode_assignment(assignment: bytes) -> tuple[list[Place], bytes]:
    """Return the partitions and the user data of an assignment; both are empty if it is. Raises MalformedFrameError."""
    if not assignment:
        return [], b""
    view = memoryview(assignment)
    _, position = read_i16(view, 0)
    places, position = _read_places(view, position)
    return places, _read_user_data(view, position)[0]


def encode_assignment(version: int, partitions: Mapping[str, Iterable[int]]) -> bytes:
    """Encode an assignment by topic names, in the version of the consumer's subscription."""
    parts = [I16.pack(min(max(version, 0), VERSION_MAX)), I32.pack(len(partitions))]
    for topic, numbers in sorted(partitions.items()):
        name, listed = topic.encode(), sorted(numbers)
        parts += [I16.pack(len(name)), name, I32.pack(len(listed)), *map(I32.pack, listed)]
    return b"".join((*parts, I32.pack(-1)))


def _read_topics(view: memoryview, position: int) -> tuple[list[str], int]:
    count, position = _read_i32(view, position)
    topics: list[str] = []
    for _ in range(count):
        topic, position = _read_text(view, position)
        topics.append(topic)
    return topics, position


def _read_places(view: memoryview, position: int) -> tuple[list[Place], int]:
    count, position = _read_i32(view, position)
    found: list[Place] = []
    for _ in range(count):
        topic, position = _read_text(view, position)
        partitions, position = _read_i32(view, position)
        for _ in range(partitions):
            partition, position = _read_i32(view, position)
            found.append((topic, partition))
    return found, position


def _read_text(view: memoryview, position: int) -> tuple[str, int]:
    length, position = read_i16(view, position)
    if length < 0 or position + length > len(view):
        raise truncated_frame_error("topic", position)
    return str(view[position : position + length], "utf-8", "replace"), position + length


def _read_user_data(view: memoryview, position: int) -> tuple[bytes, int]:
    if position == len(view):
        return b"", position
    length, position = _read_i32(view, position)
    if position + length > len(view):
        raise truncated_frame_error("user data", position)
    return bytes(view[position : position + max(0, length)]), position + max(0, length)


def _read_i32(view: memoryview, position: int) -> tuple[int, int]:
    if position + 4 > len(view):
        raise truncated_frame_error("int32", position)
    return I32.unpack_from(view, position)[0], position + 4
