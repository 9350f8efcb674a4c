"""Consumer groups: their members, committed offsets and configs. Rows of a group are in one domain, except its configs.

offset     30 | group text | topic_id text | partition u32        (layouts: rows.key_encoding, rows.row_family)
           offset, leader_epoch, metadata, commit_ms, expire_ms
group      31 | group text
           kind, owner, protocol_type, protocol, generation, leader, members, since_ms, target_epoch, topics_digest
member     32 | group text | member_id text
           instance_id, client_id, client_host, session_ms, rebalance_ms, protocols, assignment, consumer
group config    0D | "" | group text
                config

Invariant (fenced coordinator): rows of a group are written only with the expected seqno of its head row (`group`). A
coordinator that takes over the group changes that row first, which fences every earlier coordinator.

Offsets are keyed by topic id, so a re-created topic does not inherit the offsets of the old one. Configs belong to the
administrator, so a group without members may have some. A group without configs has no config row.
"""

from __future__ import annotations

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
    """State of a member of the consumer protocol (`kafka.groups.consumer.state.ConsumerGroupMember`). held, revoking,
    target: topic id → partitions."""

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


class GroupConfigRow(msgspec.Struct, frozen=True):
    """Configs of one group. config: name → value, in Kafka's names and notation."""

    group: str
    config: dict[str, str] = {}


GROUP_CONFIGS = Family(0x0D, "group config", GroupConfigRow, Column("group", Kind.TEXT), own_entity=False)
