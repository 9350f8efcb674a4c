"""State of one group of the consumer protocol (KIP-848), with its requests and answers.

subscriptions, partitions of topics ──► group epoch ──► target (its epoch) ──► each member, step by step
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Final, NamedTuple, Protocol

import msgspec

from tidemill.kafka.groups.classic.state import Answer, GroupLimits, Phase, Protocols, Waiter, metadata_bytes
from tidemill.kafka.groups.consumer.assignors import Partitions

EPOCH_LEAVE: Final = -1
EPOCH_LEAVE_TEMPORARILY: Final = -2
"""Epoch in the heartbeat of a static member that leaves temporarily and will return within its session."""
PARTITION_BYTES: Final = 8
"""Approximate memory of one held partition."""


class HeartbeatRequest(msgspec.Struct, frozen=True):
    """One ConsumerGroupHeartbeat; `epoch` 0 joins. None means unchanged. `pattern` "" means no pattern."""

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
    """Existing topics, as a node sees them. `version` changes with every change of the content."""

    @property
    def version(self) -> int: ...
    def topic(self, name: str) -> Topic | None: ...
    def matching(self, pattern: str) -> frozenset[str]:
        """Return the names that match a pattern."""


class ClassicSubscription(msgspec.Struct, frozen=True):
    """Properties of a member of the classic protocol; the first of its protocols is the one in its answers."""

    session_ms: int
    protocols: Protocols


class ConsumerGroupMember(msgspec.Struct):
    """Member of a consumer group.

    epoch, previous   epoch of the assignment that it received; the one before, which a repeated heartbeat may name
    held              partitions that it was given and has not revoked yet; `revoking` are those of them to revoke
    target            partitions that it should have
    away              a static member that left temporarily
    classic           set while it speaks the classic protocol in this group (`classic_members`)
    owes_until_ms     deadline of a classic member that must join or sync; 0 = none
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
    classic: ClassicSubscription | None = None
    owes_until_ms: int = 0

    @property
    def sort_key(self) -> tuple[str, str]:
        """Sort key among the members of a group; a static member keeps its position under another id."""
        return (self.instance_id or self.member_id, self.member_id)

    @property
    def assigned(self) -> dict[str, frozenset[int]]:
        """Partitions that the member may use."""
        return subtract_partitions(self.held, self.revoking)

    @property
    def reported_epoch(self) -> int:
        return EPOCH_LEAVE_TEMPORARILY if self.away else self.epoch

    @property
    def subscription_bytes(self) -> int:
        own = metadata_bytes(self.classic.protocols) if self.classic is not None else 0
        return own + subscription_bytes(self.topics, self.pattern)

    @property
    def size_bytes(self) -> int:
        return self.subscription_bytes + PARTITION_BYTES * sum(map(len, self.held.values()))


class ConsumerWrite(NamedTuple):
    """Members that one write makes durable, and the answers that wait for it."""

    changed: frozenset[str]
    waiting: list[tuple[Waiter, Answer]]


class ConsumerGroup:
    """State of a group.

    Only `requests`, `classic_members` and `reconciliation` change it. All times are monotonic milliseconds.

    epoch, target_epoch    the group's epoch; the epoch for which the members' targets were computed
    owners                 (topic id, partition) → the member that holds it: the inverse of `held` of all members
    topics                 name → topic, of everything that any member is subscribed to; None before the first check
    topics_left_out        number of subscribed topics for which the group has no room (`sizes`)
    digest                 hash of `topics` for which the targets were computed
    matches                pattern → names of topics
    seen_version           version of the snapshot from which `topics` and `matches` were computed; -1 after a change of
                           subscriptions, and if there may be room for topics that were left out
    found_version          version of the snapshot that `topics` was looked up in
    found_names            names that were looked up for `topics`; None if there was no room for some
    subscribed_ids         names of a subscription → ids of those in `topics`
    changed                members whose current state is not durable
    unstored               the durable state differs from this one
    waiting, in_flight     answers that wait for the next write, and for the running one
    """

    protocol_type: Final = "consumer"

    def __init__(self, name: str, limits: GroupLimits) -> None:
        self.name = name
        self.limits = limits
        self.epoch = 0
        self.target_epoch = 0
        self.assignor = ""
        self.members: dict[str, ConsumerGroupMember] = {}
        self.instances: dict[str, str] = {}
        self.owners: dict[tuple[str, int], str] = {}
        self.topics: dict[str, Topic] | None = None
        self.topics_left_out = 0
        self.digest = ""
        self.matches: dict[str, frozenset[str]] = {}
        self.seen_version = -1
        self.found_version = -1
        self.found_names: frozenset[str] | None = None
        self.subscribed_ids: dict[frozenset[str], frozenset[str]] = {}
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
        """True if the group has no members and no answer waits for a write: it may change to the other protocol."""
        return not (self.members or self.waiting)

    @property
    def is_idle(self) -> bool:
        return self.is_vacant and not self.unstored and self.in_flight is None

    @property
    def is_all_classic(self) -> bool:
        """True if the group has members and none of them speaks the consumer protocol any more."""
        return bool(self.members) and all(member.classic is not None for member in self.members.values())

    def speaks_classic(self, member_id: str) -> bool:
        member = self.members.get(member_id)
        return member is not None and member.classic is not None

    def session_ms(self, member: ConsumerGroupMember) -> int:
        return self.limits.consumer_session_ms if member.classic is None else member.classic.session_ms

    def patterns(self) -> set[str]:
        return {member.pattern for member in self.members.values() if member.pattern}

    def matched_names(self) -> list[frozenset[str]]:
        """Return the sets of names that the group holds for its patterns."""
        found = self.found_names if self.matches else None
        return [*self.matches.values(), *([] if found is None else [found])]

    def subscribed_names(self, topics: frozenset[str], pattern: str) -> frozenset[str]:
        matches = self.matches.get(pattern, frozenset())
        return topics | matches if topics and matches else topics or matches


def subscription_bytes(topics: frozenset[str], pattern: str) -> int:
    return sum(len(name.encode()) for name in topics) + len(pattern.encode())


def digest_of(topics: Mapping[str, Topic]) -> str:
    return blake2b(msgspec.msgpack.encode(sorted(topics.items())), digest_size=16).hexdigest()


def subtract_partitions(these: Partitions, those: Partitions) -> dict[str, frozenset[int]]:
    left = {topic: partitions - those.get(topic, frozenset()) for topic, partitions in these.items()}
    return {topic: partitions for topic, partitions in left.items() if partitions}


def is_subset(these: Partitions, those: Partitions) -> bool:
    return all(partitions <= those.get(topic, frozenset()) for topic, partitions in these.items())


def iterate_places(these: Partitions) -> Iterator[tuple[str, int]]:
    return ((topic, partition) for topic, partitions in these.items() for partition in partitions)
