"""One group of the classic protocol in memory, and what clients ask of it and are told. The limits of any group."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import msgspec

from tidemill.kafka import error_codes


class Phase(Enum):
    """Named as Kafka's tools show them: of the classic protocol, of the consumer protocol, and of both."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    ASSIGNING = "Assigning"
    RECONCILING = "Reconciling"
    STABLE = "Stable"
    DEAD = "Dead"


class GroupLimits(msgspec.Struct, frozen=True):
    """Of one group. Times in ms."""

    members: int = 1_000
    member_bytes: int = 120 << 10
    """Metadata of one member over all its protocols; and its assignment."""
    bytes: int = 2 << 20
    """All of a group: it is stored in one batch."""
    initial_delay_ms: int = 3_000
    session_ms_min: int = 6_000
    session_ms_max: int = 1_800_000
    consumer_session_ms: int = 45_000
    """In the consumer protocol it is not the member's to say; a group's own configs may (`configs`), within bounds."""
    consumer_heartbeat_ms: int = 5_000
    consumer_session_ms_bounds: tuple[int, int] = (45_000, 60_000)
    consumer_heartbeat_ms_bounds: tuple[int, int] = (5_000, 15_000)
    upgrades: bool = True
    downgrades: bool = True
    """May its protocol change while members are in it (`protocol_migration`)?"""


Protocols = tuple[tuple[str, bytes], ...]
"""(name, metadata), the member's favourite first."""
Waiter = object
"""Who waits for an answer: opaque to the core."""


class Join(msgspec.Struct, frozen=True):
    """`member_id` "" = a new member; `new_id` is what it would be called.

    knows_first   the client can be told its id before it joins (JoinGroup 4, KIP-394)
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
    """members: (member id, instance id, metadata), for the leader only."""

    error: int
    member_id: str = ""
    generation: int = -1
    protocol_type: str | None = None
    protocol: str | None = None
    leader: str = ""
    skip_assignment: bool = False
    members: tuple[tuple[str, str | None, bytes], ...] = ()


class Sync(msgspec.Struct, frozen=True):
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
    """Whom it is for, where somebody keeps it."""


class BeatAnswer(msgspec.Struct, frozen=True):
    """Of the consumer protocol. `assignment` (topic id → partitions) None = as it was told before."""

    error: int
    message: str = ""
    member_id: str = ""
    epoch: int = 0
    assignment: Mapping[str, frozenset[int]] | None = None


Answer = JoinAnswer | SyncAnswer | BeatAnswer


def failed(answer: Answer, code: int) -> Answer:
    """Told instead of it, where what it tells of did not come to be."""
    if isinstance(answer, JoinAnswer):
        return JoinAnswer(code, answer.member_id)
    return SyncAnswer(code) if isinstance(answer, SyncAnswer) else BeatAnswer(code)


class Member(msgspec.Struct):
    """`until_ms`: when it is gone unless it is heard of; while it waits for an answer it counts as heard.

    `joining`, `syncing`: who waits for its JoinGroup and SyncGroup. `is_new` until its first join is answered.
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


class Group:
    """What a group is made of. Changed by `classic_rebalance` and `classic` only; all times are monotonic milliseconds.

    expected      ids that were given out (KIP-394) and until when they are waited for
    join_until    while PREPARING: when those who have not joined are left behind
    delay_left    while the first members of an empty group gather: for how long it may still be put off; else −1
    arrived       somebody came since the last time it was put off
    sync_until    while COMPLETING: when those who have not synced are left behind
    assigning     the leader's assignment, on its way to the metastore
    later         who is answered once the group is durable as it is: (waiter, answer)
    unstored      what is durable is not what is here
    """

    def __init__(self, name: str, limits: GroupLimits) -> None:
        self.name = name
        self.limits = limits
        self.phase = Phase.EMPTY
        self.protocol_type = ""
        self.protocol = ""
        self.generation = 0
        self.leader = ""
        self.members: dict[str, Member] = {}
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
        """Nobody is here, and nobody waits for a write to begin: the group may go over to the other protocol."""
        return not (self.members or self.expected or self.later)

    @property
    def idle(self) -> bool:
        """Nobody is here, and nothing is to be done."""
        return not (self.members or self.expected or self.unstored or self.outbox)

    def say(self, waiter: Waiter | None, answer: Answer) -> None:
        if waiter is not None:
            self.outbox.append((waiter, answer))

    def check(self, member_id: str, instance_id: str | None) -> int:
        """The error code of whoever claims to be this member; 0 where it is (KIP-345)."""
        if instance_id is not None:
            known = self.instances.get(instance_id)
            if known is None:
                return error_codes.UNKNOWN_MEMBER_ID
            if known != member_id:
                return error_codes.FENCED_INSTANCE_ID
        return 0 if member_id in self.members else error_codes.UNKNOWN_MEMBER_ID

    def supports(self, protocol_type: str, protocols: Protocols) -> bool:
        """Is there a protocol that everybody speaks? An empty group takes any."""
        if not protocol_type or not protocols:
            return False
        if not self.members:
            return True
        return protocol_type == self.protocol_type and not self.common().isdisjoint(name for name, _ in protocols)

    def common(self) -> set[str]:
        """Protocols that all members speak."""
        spoken = [{name for name, _ in member.protocols} for member in self.members.values()]
        return set.intersection(*spoken) if spoken else set()

    def elected_protocol(self) -> str:
        """What most members like best of what all speak; of equals the first by name."""
        common = self.common()
        votes = [next((n for n, _ in m.protocols if n in common), "") for m in self.members.values()]
        return max(sorted(set(votes)), key=votes.count, default="")

    def listed(self) -> tuple[tuple[str, str | None, bytes], ...]:
        """The members as the leader is told of them."""
        return tuple((m.member_id, m.instance_id, m.metadata(self.protocol)) for m in self.members.values())
