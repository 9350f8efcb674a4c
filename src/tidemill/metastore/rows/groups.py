"""Consumer groups: their members, committed offsets and configs. Rows of a group are in one domain, except its configs.

offset     30 | group text | topic_id text | partition u32        (layouts: rows.key_encoding, rows.row_family)
           offset, leader_epoch, metadata, commit_ms, expire_ms
group      31 | group text
           kind, owner, protocol_type, protocol, generation, leader, members, since_ms, target_epoch, topics_digest
member     32 | group text | member_id text
           instance_id, client_id, client_host, session_ms, rebalance_ms, protocols, assignment, consumer
partitions 33 | group text | member_id text | number u32
           topics: (topic id, states, partitions)…
group config    0D | "" | group text
                config

Invariant (fenced coordinator): rows of a group are written only with the expected seqno of its head row (`group`). A
coordinator that takes over the group changes that row first, which fences every earlier coordinator.

Invariant (whole member): the rows of a member (`member` and its `partitions`, numbered from 0) are replaced in one
batch. The partitions of a member are in its own row if that stays below MEMBER_ROW_BYTES, and else in rows of their
own, so a member may have any number of topics. The member's row has the number of those rows. Versions that do not know
them leave them behind when they write the member: rows that the member's row does not count have no meaning.

Offsets are keyed by topic id, so a re-created topic does not inherit the offsets of the old one. Configs belong to the
administrator, so a group without members may have some. A group without configs has no config row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Final

import msgspec

from tidemill.metastore.rows.key_encoding import Column, Kind
from tidemill.metastore.rows.row_family import Family


class GroupOffsetRow(msgspec.Struct, frozen=True):
    """Committed offset. commit_ms: 0 if committed by a version that did not store it. expire_ms: 0 = as the cluster's
    config says."""

    group: str
    topic_id: str
    partition: int
    offset: int
    leader_epoch: int = -1
    metadata: str = ""
    commit_ms: int = 0
    expire_ms: int = 0


class GroupRow(msgspec.Struct, frozen=True):
    """Head row of a group.

    kind         "classic" or "consumer": the protocol of its members, or of its last ones
    owner        incarnation of the node that coordinates it
    protocol_type, protocol, generation, leader    of the last generation whose assignment is durable; in the consumer
                 protocol the assignor and the group's epoch
    members      number of member rows
    since_ms     if `members` is 0: since when the group is empty
    target_epoch, topics_digest    consumer protocol: epoch of the members' targets, and digest of the topics they cover
    """

    group: str
    kind: str = "classic"
    owner: str = ""
    protocol_type: str = ""
    protocol: str = ""
    generation: int = 0
    leader: str = ""
    members: int = 0
    since_ms: int = 0
    target_epoch: int = 0
    topics_digest: str = ""


class ConsumerMember(msgspec.Struct, frozen=True, array_like=True):
    """State of a member of the consumer protocol (`kafka.groups.consumer.state.ConsumerGroupMember`).

    held, revoking, target    topic id → partitions
    partition_rows            number of rows that have these three instead; 0 = they are here (`with_partitions`)
    """

    epoch: int = 0
    previous: int = -1
    rack_id: str | None = None
    topics: tuple[str, ...] = ()
    pattern: str = ""
    assignor: str | None = None
    held: dict[str, tuple[int, ...]] = {}
    revoking: dict[str, tuple[int, ...]] = {}
    target: dict[str, tuple[int, ...]] = {}
    away: bool = False
    partition_rows: int = 0


class GroupMemberRow(msgspec.Struct, frozen=True):
    """Member of a group. protocols: (name, metadata), preferred first. consumer: None in a group of the classic
    protocol. If both are set, the member speaks the classic protocol in a consumer protocol group."""

    group: str
    member_id: str
    instance_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    session_ms: int = 0
    rebalance_ms: int = 0
    protocols: tuple[tuple[str, bytes], ...] = ()
    assignment: bytes = b""
    consumer: ConsumerMember | None = None


GROUP_OFFSETS = Family(
    0x30,
    "group offset",
    GroupOffsetRow,
    Column("group", Kind.TEXT),
    Column("topic_id", Kind.TEXT),
    Column("partition", Kind.U32),
)
GROUPS = Family(0x31, "group", GroupRow, Column("group", Kind.TEXT))
GROUP_MEMBERS = Family(0x32, "group member", GroupMemberRow, Column("group", Kind.TEXT), Column("member_id", Kind.TEXT))


TopicPartitions = tuple[bytes, int, tuple[int, ...]]
"""(topic id, states, partitions).

The id is the 16 bytes of its UUID, or 16 zero bytes and the text of any other id. States are the sum of HELD, REVOKING
and TARGET, for all these partitions.
"""
ID_BYTES: Final = 16
HELD: Final = 1
REVOKING: Final = 2
TARGET: Final = 4
STATES: Final = ("held", "revoking", "target")
"""Fields of a member by state: bit n is the nth."""
TOPIC_BYTES: Final = 24
PARTITION_BYTES: Final = 5
"""Bytes of a topic and of a partition in a row, at most."""
MEMBER_ROW_BYTES: Final = 100 << 10
"""Size of a member's row above which its partitions are in rows of their own: more than 1,000 topics."""
PARTITIONS_ROW_BYTES: Final = 128 << 10
"""Size at which a further row begins; far below METASTORE_VALUE_BYTES."""
ENTRY_PARTITIONS_MAX: Final = 10_000


class GroupPartitionsRow(msgspec.Struct, frozen=True):
    """Some of the partitions of a member of the consumer protocol. A topic may be in several rows."""

    group: str
    member_id: str
    number: int
    topics: tuple[TopicPartitions, ...] = ()


GROUP_PARTITIONS = Family(
    0x33,
    "group partitions",
    GroupPartitionsRow,
    Column("group", Kind.TEXT),
    Column("member_id", Kind.TEXT),
    Column("number", Kind.U32),
)

Partitions = Mapping[str, Set[int]]
_NONE: Final[Set[int]] = frozenset()


def partition_rows(
    group: str, member_id: str, held: Partitions, revoking: Partitions, target: Partitions
) -> list[GroupPartitionsRow]:
    """Return the rows of a member's partitions, as many as their size requires; none if it has no partitions."""
    rows: list[GroupPartitionsRow] = []
    some: list[TopicPartitions] = []
    size_bytes = 0
    for entry in _entries(held, revoking, target):
        size_bytes += TOPIC_BYTES + PARTITION_BYTES * len(entry[2])
        if some and size_bytes > PARTITIONS_ROW_BYTES:
            rows.append(GroupPartitionsRow(group, member_id, len(rows), tuple(some)))
            some, size_bytes = [], TOPIC_BYTES + PARTITION_BYTES * len(entry[2])
        some.append(entry)
    if some:
        rows.append(GroupPartitionsRow(group, member_id, len(rows), tuple(some)))
    return rows


def _entries(held: Partitions, revoking: Partitions, target: Partitions) -> Iterator[TopicPartitions]:
    for topic in {**held, **revoking, **target}:
        of_topic = (held.get(topic, _NONE), revoking.get(topic, _NONE), target.get(topic, _NONE))
        topic_id = _stored_id(topic)
        if not of_topic[1] and of_topic[0] == of_topic[2]:
            by_states = {HELD | TARGET: sorted(of_topic[0])}
        else:
            by_states = {}
            for partition in sorted(of_topic[0] | of_topic[1] | of_topic[2]):
                states = sum(1 << bit for bit, partitions in enumerate(of_topic) if partition in partitions)
                by_states.setdefault(states, []).append(partition)
        for states, partitions in by_states.items():
            for at in range(0, len(partitions), ENTRY_PARTITIONS_MAX):
                yield topic_id, states, tuple(partitions[at : at + ENTRY_PARTITIONS_MAX])


def with_partitions(members: Iterable[GroupMemberRow], rows: Iterable[GroupPartitionsRow]) -> list[GroupMemberRow]:
    """Return the members of a group with their partitions, whichever rows have them."""
    of_members: dict[str, list[GroupPartitionsRow]] = {}
    for row in rows:
        of_members.setdefault(row.member_id, []).append(row)
    return [_with_partitions(member, of_members.get(member.member_id, [])) for member in members]


def _with_partitions(member: GroupMemberRow, rows: list[GroupPartitionsRow]) -> GroupMemberRow:
    if member.consumer is None or not member.consumer.partition_rows or len(rows) != member.consumer.partition_rows:
        return member
    found: tuple[dict[str, tuple[int, ...]], ...] = ({}, {}, {})
    for row in rows:
        for topic_id, states, partitions in row.topics:
            topic = _text_id(topic_id)
            for bit, of_state in enumerate(found):
                if states >> bit & 1:
                    of_state[topic] = of_state.get(topic, ()) + partitions
    consumer = msgspec.structs.replace(member.consumer, **dict(zip(STATES, found, strict=True)))
    return msgspec.structs.replace(member, consumer=consumer)


def _stored_id(topic: str) -> bytes:
    try:
        short = bytes.fromhex(topic.replace("-", ""))
    except ValueError:
        short = b""
    return short if len(short) == ID_BYTES and _text_id(short) == topic else bytes(ID_BYTES) + topic.encode()


def _text_id(topic_id: bytes) -> str:
    if len(topic_id) != ID_BYTES:
        return topic_id[ID_BYTES:].decode()
    text = topic_id.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


class GroupConfigRow(msgspec.Struct, frozen=True):
    """Configs of one group. config: name → value, in Kafka's names and notation."""

    group: str
    config: dict[str, str] = {}


GROUP_CONFIGS = Family(0x0D, "group config", GroupConfigRow, Column("group", Kind.TEXT), own_entity=False)
