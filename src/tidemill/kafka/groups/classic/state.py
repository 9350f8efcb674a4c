"""State of one group of the classic protocol, its requests and answers, and the limits of all groups."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import msgspec

from tidemill.kafka import error_codes


class Phase(Enum):
    """Phases under the names of Kafka's tools: of the classic protocol, of the consumer protocol, and of both."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    ASSIGNING = "Assigning"
    RECONCILING = "Reconciling"
    STABLE = "Stable"
    DEAD = "Dead"


class GroupLimits(msgspec.Struct, frozen=True):
    """Limits of one group. Times are in ms."""

    members: int = 1_000
    member_bytes: int = 120 << 10
    """Limit of one member's metadata over all its protocols, and of its assignment."""
    bytes: int = 2 << 20
    """Limit of the whole group, which is stored in one batch."""
    initial_delay_ms: int = 3_000
    session_ms_min: int = 6_000
    session_ms_max: int = 1_800_000
    consumer_session_ms: int = 45_000
    """Session timeout of the consumer protocol, which members cannot choose; a group's configs can, within bounds."""
    consumer_heartbeat_ms: int = 5_000
    consumer_session_ms_bounds: tuple[int, int] = (45_000, 60_000)
    consumer_heartbeat_ms_bounds: tuple[int, int] = (5_000, 15_000)
    upgrades: bool = True
    downgrades: bool = True
    """Permissions to change the protocol while the group has members (`protocol_migration`)."""


Protocols = tuple[tuple[str, bytes], ...]
"""Tuples of (name, metadata), the member's preferred protocol first."""
Waiter = object
"""Receiver of an answer: opaque to the core."""


class JoinRequest(msgspec.Struct, frozen=True):
    """JoinGroup request. `member_id` "" means a new member; `new_id` is the id that it would get.

    knows_first   the client can receive its id before it joins (JoinGroup 4, KIP-394)
    may_skip      the client understands that it leads without having to assign (JoinGroup 9, KIP-814)
    """

    member_id: str
    new_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_ms: int
    rebalance_ms: int
    protocol_type: str
    protocols: Protocols
    knows_first: bool = False
    may_skip: bool = False


class JoinAnswer(msgspec.Struct, frozen=True):
    """Answer to a JoinGroup. `members` are tuples of (member id, instance id, metadata), for the leader only."""

    error: int
    member_id: str = ""
    generation: int = -1
    protocol_type: str | None = None
    protocol: str | None = None
    leader: str = ""
    skip_assignment: bool = False
    members: tuple[tuple[str, str | None, bytes], ...] = ()


class SyncRequest(msgspec.Struct, frozen=True):
    member_id: str
    instance_id: str | None
    generation: int
    protocol_type: str | None = None
    protocol: str | None = None
    assignments: tuple[tuple[str, bytes], ...] = ()


class SyncAnswer(msgspec.Struct, frozen=True):
    error: int
    protocol_type: str | None = None
    protocol: str | None = None
    assignment: bytes = b""
    member_id: str = ""
    """Id of the receiving member, where the core must find it again."""


class HeartbeatAnswer(msgspec.Struct, frozen=True):
    """Answer to a heartbeat of the consumer protocol. `assignment` (topic id → partitions) None means unchanged."""

    error: int
    message: str = ""
    member_id: str = ""
    epoch: int = 0
    assignment: Mapping[str, frozenset[int]] | None = None


Answer = JoinAnswer | SyncAnswer | HeartbeatAnswer


def error_answer_for(answer: Answer, code: int) -> Answer:
    """Return the error answer that replaces `answer` if its state did not become durable."""
    if isinstance(answer, JoinAnswer):
        return JoinAnswer(code, answer.member_id)
    return SyncAnswer(code) if isinstance(answer, SyncAnswer) else HeartbeatAnswer(code)


class ClassicMember(msgspec.Struct):
    """Member of a classic group.

    `until_ms` is the end of its session; a member that waits for an answer cannot time out. `joining` and `syncing` are
    the waiters of its JoinGroup and SyncGroup. `is_new` is true until its first join is answered.
    """

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_ms: int
    rebalance_ms: int
    protocols: Protocols
    assignment: bytes = b""
    until_ms: int = 0
    joining: Waiter | None = None
    syncing: Waiter | None = None
    is_new: bool = False

    @property
    def size_bytes(self) -> int:
        return metadata_bytes(self.protocols) + len(self.assignment)

    def metadata(self, protocol: str) -> bytes:
        return next((data for name, data in self.protocols if name == protocol), b"")


def metadata_bytes(protocols: Protocols) -> int:
    return sum(len(name) + len(data) for name, data in protocols)


class ClassicGroup:
    """State of a group. Only `rebalance` and `requests` change it. All times are monotonic milliseconds.

    expected      member ids that were assigned (KIP-394), and the times until which their joins are expected
    join_until    while PREPARING: when members that have not joined are removed
    delay_left    while the first members of an empty group gather: remaining time by which to delay; else −1
    arrived       a member joined since the last delay
    sync_until    while COMPLETING: when members that have not synced are removed
    assigning     the leader's assignment, while it is being written to the metastore
    later         answers to send once the current state is durable: (waiter, answer)
    unstored      the durable state differs from this one
    """

    def __init__(self, name: str, limits: GroupLimits) -> None:
        self.name = name
        self.limits = limits
        self.phase = Phase.EMPTY
        self.protocol_type = ""
        self.protocol = ""
        self.generation = 0
        self.leader = ""
        self.members: dict[str, ClassicMember] = {}
        self.instances: dict[str, str] = {}
        self.expected: dict[str, int] = {}
        self.join_until = 0
        self.delay_left = -1
        self.arrived = False
        self.sync_until = 0
        self.unsynced: set[str] = set()
        self.assigning: dict[str, bytes] | None = None
        self.later: list[tuple[Waiter, Answer]] = []
        self.unstored = False
        self.outbox: list[tuple[Waiter, Answer]] = []

    @property
    def size_bytes(self) -> int:
        return sum(member.size_bytes for member in self.members.values())

    @property
    def is_vacant(self) -> bool:
        """True if the group has no members and no answer waits for a write: it may change to the other protocol.

        Expected members do not count, as in Kafka: a client may never join with the id that it got.
        """
        return not (self.members or self.later)

    @property
    def is_idle(self) -> bool:
        """True if the group has no members and no pending work."""
        return not (self.members or self.expected or self.unstored or self.outbox)

    def queue_answer(self, waiter: Waiter | None, answer: Answer) -> None:
        if waiter is not None:
            self.outbox.append((waiter, answer))

    def member_error(self, member_id: str, instance_id: str | None) -> int:
        """Return the error code if the ids do not identify a member, else 0 (KIP-345)."""
        if instance_id is not None:
            known = self.instances.get(instance_id)
            if known is None:
                return error_codes.UNKNOWN_MEMBER_ID
            if known != member_id:
                return error_codes.FENCED_INSTANCE_ID
        return 0 if member_id in self.members else error_codes.UNKNOWN_MEMBER_ID

    def supports(self, protocol_type: str, protocols: Protocols) -> bool:
        """Return whether all members and the caller share a protocol. An empty group supports any."""
        if not protocol_type or not protocols:
            return False
        if not self.members:
            return True
        return protocol_type == self.protocol_type and not self.common_protocols().isdisjoint(
            name for name, _ in protocols
        )

    def common_protocols(self) -> set[str]:
        """Return the protocols that all members speak."""
        spoken = [{name for name, _ in member.protocols} for member in self.members.values()]
        return set.intersection(*spoken) if spoken else set()

    def elected_protocol(self) -> str:
        """Return the common protocol that most members prefer; of equals the first by name."""
        common = self.common_protocols()
        votes = [next((n for n, _ in m.protocols if n in common), "") for m in self.members.values()]
        return max(sorted(set(votes)), key=votes.count, default="")

    def members_for_leader(self) -> tuple[tuple[str, str | None, bytes], ...]:
        """Return the members as the leader receives them."""
        return tuple((m.member_id, m.instance_id, m.metadata(self.protocol)) for m in self.members.values())
