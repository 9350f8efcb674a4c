"""Consumer groups: who is in them, and what they have committed. All rows of a group are in one domain.

offset     30 | group text | topic_id text | partition u32        (layouts: rows.keys, rows.family)
           offset, leader_epoch, metadata, commit_ms, expire_ms
group      31 | group text
           kind, owner, protocol_type, protocol, generation, leader, members, since_ms, target_epoch, topics_digest
member     32 | group text | member_id text
           instance_id, client_id, client_host, session_ms, rebalance_ms, protocols, assignment, consumer

G1  Rows of a group are written only with the seqno that its head row (`group`) has: whoever takes the group over
    changes that row first, and fences by it everybody who had it before.
G2  Offsets are keyed by topic id: a re-created topic starts without the old one's.
"""

from __future__ import annotations

import msgspec

from tidemill.metastore.rows.key_encoding import Column, Kind
from tidemill.metastore.rows.row_family import Family


class GroupOffsetRow(msgspec.Struct, frozen=True):
    """commit_ms: 0 where it was committed before this was kept. expire_ms: when it may go, 0 = as the cluster says."""

    group: str
    topic_id: str
    partition: int
    offset: int
    leader_epoch: int = -1
    metadata: str = ""
    commit_ms: int = 0
    expire_ms: int = 0


class GroupRow(msgspec.Struct, frozen=True):
    """
    kind         "classic" or "consumer": the protocol of its members, or of those that were in it last
    owner        the life of the node that coordinates it
    protocol_type, protocol, generation, leader    of the last generation whose assignment is durable; in the consumer
                 protocol the assignor and the group's epoch
    members      how many member rows there are
    since_ms     where `members` is 0: since when nobody is in it
    target_epoch, topics_digest    consumer protocol: the epoch of the members' targets, and the topics they are of
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
    """A member of the consumer protocol (`kafka.groups.consumer_state.Consumer`). held, revoking, target: topic id →
    partitions."""

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
    """protocols: (name, metadata), the favourite first. consumer: None in a group of the classic protocol; beside it
    protocols are those of a member that speaks the classic one in a group of the other."""

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
