"""One group of the consumer protocol (KIP-848) in memory, and what its members ask and are told.

subscriptions, partitions of topics ──► group epoch ──► target (its epoch) ──► each member, step by step
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Final, NamedTuple, Protocol

import msgspec

from tidemill.kafka.groups.assignors import Partitions
from tidemill.kafka.groups.classic_state import Answer, GroupLimits, Phase, Protocols, Waiter, metadata_bytes

LEAVES: Final = -1
LEAVES_FOR_A_WHILE: Final = -2
"""A static member that will be back within its session."""
PARTITION_BYTES: Final = 8
"""What a partition that somebody has takes in memory, about."""


class HeartbeatRequest(msgspec.Struct, frozen=True):
    """One ConsumerGroupHeartbeat; `epoch` 0 joins. None = as it said before. `pattern` "" = none."""

    member_id: str
    epoch: int
    instance_id: str | None = None
    rack_id: str | None = None
    rebalance_ms: int = -1
    topics: frozenset[str] | None = None
    pattern: str | None = None
    assignor: str | None = None
    owned: Partitions | None = None
    client_id: str = ""
    client_host: str = ""


class Topic(NamedTuple):
    topic_id: str
    partitions: int


class TopicSnapshot(Protocol):
    """The topics that exist, as a node sees them. `version` changes whenever anything here does."""

    @property
    def version(self) -> int: ...
    def of(self, name: str) -> Topic | None: ...
    def matching(self, pattern: str) -> frozenset[str]:
        """Names."""


class Classic(msgspec.Struct, frozen=True):
    """What a member of the classic protocol says of itself; the first of its protocols is the one it is told."""

    session_ms: int
    protocols: Protocols


class Consumer(msgspec.Struct):
    """
    epoch, previous   of the assignment it was told; the one before, which a repeated heartbeat may name
    held              what it was given and has not let go of; `revoking` of it is to be let go
    target            what it should have
    away              a static member that said it would be back
    classic           set while it speaks the classic protocol in this group of the other one (`classic_members`)
    owes_until_ms     such a member was told to join, or has joined: by when it is to join, or to sync; 0 = neither
    """

    member_id: str
    instance_id: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    rebalance_ms: int = 0
    topics: frozenset[str] = frozenset()
    pattern: str = ""
    assignor: str | None = None
    epoch: int = 0
    previous: int = -1
    held: dict[str, frozenset[int]] = {}
    revoking: dict[str, frozenset[int]] = {}
    target: dict[str, frozenset[int]] = {}
    until_ms: int = 0
    revoke_until_ms: int = 0
    away: bool = False
    classic: Classic | None = None
    owes_until_ms: int = 0

    @property
    def order(self) -> tuple[str, str]:
        """Among the members of a group; a static member keeps its place when it comes back under another id."""
        return (self.instance_id or self.member_id, self.member_id)

    @property
    def assigned(self) -> dict[str, frozenset[int]]:
        """What it may use."""
        return minus(self.held, self.revoking)

    @property
    def told_epoch(self) -> int:
        return LEAVES_FOR_A_WHILE if self.away else self.epoch

    @property
    def subscription_bytes(self) -> int:
        own = metadata_bytes(self.classic.protocols) if self.classic is not None else 0
        return own + subscription_bytes(self.topics, self.pattern)

    @property
    def size_bytes(self) -> int:
        return self.subscription_bytes + PARTITION_BYTES * sum(map(len, self.held.values()))


class Storing(NamedTuple):
    """What one write makes durable: these members as they are, and whoever waits for it."""

    changed: frozenset[str]
    waiting: list[tuple[Waiter, Answer]]


class ConsumerGroup:
    """Changed by `consumer`, `classic_members` and `consumer_reconciliation` only; all times are monotonic
    milliseconds.

    epoch, target_epoch    the group's; the one that the members' targets are of
    owners                 (topic id, partition) → the member that holds it: `held` of all members, the other way round
    topics                 name → what it is, of everything that anybody is subscribed to; None before the first look
    digest                 of `topics`, as the target knows them
    matches                pattern → names of topics
    seen_version           of what `topics` and `matches` were made of
    changed                members that are not durable as they are
    unstored               what is durable is not what is here
    waiting, in_flight     who is answered by the next write, and by the one under way
    """

    protocol_type: Final = "consumer"

    def __init__(self, name: str, limits: GroupLimits) -> None:
        self.name = name
        self.limits = limits
        self.epoch = 0
        self.target_epoch = 0
        self.assignor = ""
        self.members: dict[str, Consumer] = {}
        self.instances: dict[str, str] = {}
        self.owners: dict[tuple[str, int], str] = {}
        self.topics: dict[str, Topic] | None = None
        self.digest = ""
        self.matches: dict[str, frozenset[str]] = {}
        self.seen_version = -1
        self.changed: set[str] = set()
        self.unstored = False
        self.waiting: list[tuple[Waiter, Answer]] = []
        self.in_flight: list[tuple[Waiter, Answer]] | None = None
        self.outbox: list[tuple[Waiter, Answer]] = []
        self.is_dead = False

    @property
    def phase(self) -> Phase:
        if self.is_dead:
            return Phase.DEAD
        if not self.members:
            return Phase.EMPTY
        if self.epoch != self.target_epoch:
            return Phase.ASSIGNING
        done = all(m.epoch == self.epoch and m.held == m.target and not m.revoking for m in self.members.values())
        return Phase.STABLE if done else Phase.RECONCILING

    @property
    def size_bytes(self) -> int:
        return sum(member.size_bytes for member in self.members.values())

    @property
    def is_vacant(self) -> bool:
        """Nobody is here, and nobody waits for a write to begin: the group may go over to the other protocol."""
        return not (self.members or self.waiting)

    @property
    def idle(self) -> bool:
        return self.is_vacant and not self.unstored and self.in_flight is None

    @property
    def is_all_classic(self) -> bool:
        """Somebody is here, and nobody speaks the consumer protocol any more."""
        return bool(self.members) and all(member.classic is not None for member in self.members.values())

    def speaks_classic(self, member_id: str) -> bool:
        member = self.members.get(member_id)
        return member is not None and member.classic is not None

    def session_ms(self, member: Consumer) -> int:
        return self.limits.consumer_session_ms if member.classic is None else member.classic.session_ms

    def patterns(self) -> set[str]:
        return {member.pattern for member in self.members.values() if member.pattern}

    def subscribed_names(self, member: Consumer) -> frozenset[str]:
        return member.topics | self.matches.get(member.pattern, frozenset())


def subscription_bytes(topics: frozenset[str], pattern: str) -> int:
    return sum(len(name.encode()) for name in topics) + len(pattern.encode())


def digest_of(topics: Mapping[str, Topic]) -> str:
    return blake2b(msgspec.msgpack.encode(sorted(topics.items())), digest_size=16).hexdigest()


def minus(these: Partitions, those: Partitions) -> dict[str, frozenset[int]]:
    left = {topic: partitions - those.get(topic, frozenset()) for topic, partitions in these.items()}
    return {topic: partitions for topic, partitions in left.items() if partitions}


def within(these: Partitions, those: Partitions) -> bool:
    return all(partitions <= those.get(topic, frozenset()) for topic, partitions in these.items())


def places(these: Partitions) -> Iterator[tuple[str, int]]:
    return ((topic, partition) for topic, partitions in these.items() for partition in partitions)
