"""A group of either protocol without clock, network or store, and clients of both for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from tidemill.kafka import error_codes
from tidemill.kafka.groups import protocol_dispatch
from tidemill.kafka.groups.classic import requests as classic
from tidemill.kafka.groups.classic.state import (
    Answer,
    ClassicGroup,
    GroupLimits,
    HeartbeatAnswer,
    JoinAnswer,
    JoinRequest,
    SyncAnswer,
    SyncRequest,
)
from tidemill.kafka.groups.consumer import requests as consumer
from tidemill.kafka.groups.consumer.state import ConsumerGroup, HeartbeatRequest, Topic
from tidemill.kafka.groups.group_records import (
    StoredMembers,
    count_stored,
    head_row,
    in_protocol,
    member_rows,
    restore_group,
)
from tidemill.kafka.groups.protocol_dispatch import AnyGroup
from tidemill.kafka.groups.subscriptions import assigned_places, decode_subscription, encode_assignment
from tidemill.kafka.schema.primitives import I16, I32
from tidemill.metastore.rows import GROUP_MEMBERS, GROUP_PARTITIONS, GROUPS, Family
from tidemill.metastore.rows.groups import GroupMemberRow, GroupPartitionsRow, with_partitions

EAGER, COOPERATIVE = "range", "cooperative-sticky"
TOPIC, TOPIC_ID, PARTITIONS = "a", "ta", 4
LIMITS = GroupLimits(members=6, initial_delay_ms=0, session_ms_min=10, consumer_session_ms=1_000)
SESSION_MS, REBALANCE_MS = 1_000, 700
FAMILIES: Final[tuple[Family[Any], ...]] = (GROUP_MEMBERS, GROUP_PARTITIONS)


def subscription(owned: frozenset[int] = frozenset(), topic: str = TOPIC, version: int = 3) -> bytes:
    """Encode a subscription as a Java client does."""
    name = I16.pack(len(topic)) + topic.encode()
    listed = [I32.pack(1), name, I32.pack(len(owned)), *map(I32.pack, sorted(owned))] if owned else [I32.pack(0)]
    whole = [I16.pack(version), I32.pack(1), name, I32.pack(-1), *listed, I32.pack(1), I16.pack(-1)]
    return b"".join(whole[: 4 if version == 0 else -2 if version == 1 else -1 if version == 2 else None])


def stored_members(rows: Mapping[bytes, bytes]) -> list[GroupMemberRow]:
    """Return the members in a group's rows, with their partitions."""
    return with_partitions(*_member_rows(rows))


def stored_counts(rows: Mapping[bytes, bytes]) -> dict[str, int]:
    return count_stored(*_member_rows(rows))


def _member_rows(rows: Mapping[bytes, bytes]) -> tuple[list[GroupMemberRow], list[GroupPartitionsRow]]:
    of = {family: [family.decode(k, v) for k, v in sorted(rows.items()) if k[0] == family.tag] for family in FAMILIES}
    return of[GROUP_MEMBERS], of[GROUP_PARTITIONS]


class World:
    """A group of either protocol and the rows that are durable of it."""

    def __init__(self, limits: GroupLimits = LIMITS) -> None:
        self.now = 0
        self.seen = See({TOPIC: Topic(TOPIC_ID, PARTITIONS)})
        self.group: AnyGroup = ClassicGroup("g", limits)
        self.limits = limits
        self.rows: dict[bytes, bytes] = {}
        self.before: dict[bytes, bytes] = {}
        self.stored: StoredMembers = {}
        self.writing: tuple[AnyGroup, Any] | None = None
        self.answers: dict[Any, Answer] = {}

    def turn(self, kind: str) -> None:
        if self.group.is_vacant:
            self.group = in_protocol(self.group, kind)

    def join(self, waiter: Any, ask: JoinRequest) -> None:
        self.turn("classic")
        self.group = protocol_dispatch.join(self.group, self.now, ask, waiter, self.seen)
        self.deliver(self.group)

    def sync(self, waiter: Any, ask: SyncRequest) -> None:
        protocol_dispatch.sync(self.group, self.now, ask, waiter)
        self.deliver(self.group)

    def consumer_heartbeat(self, waiter: Any, ask: HeartbeatRequest) -> None:
        if ask.epoch == 0:
            self.turn("consumer")
        self.group = protocol_dispatch.consumer_heartbeat(self.group, self.now, ask, waiter, self.seen)
        self.deliver(self.group)

    def leave(self, member_id: str, instance_id: str | None = None) -> int:
        return protocol_dispatch.leave_group(self.group, self.now, member_id, instance_id)

    def heartbeat(self, member_id: str, generation: int, instance_id: str | None = None) -> int:
        return protocol_dispatch.heartbeat(self.group, self.now, member_id, instance_id, generation)

    def tick(self) -> None:
        due = protocol_dispatch.next_due_ms(self.group)
        while due is not None and due <= self.now:
            self.group = protocol_dispatch.tick(self.group, self.now)
            self.deliver(self.group)
            due = protocol_dispatch.next_due_ms(self.group)

    def deliver(self, group: AnyGroup) -> None:
        outbox, group.outbox = list(group.outbox), []
        for waiter, said in outbox:
            self.answers[waiter] = said

    def write(self) -> None:
        group, changed = self.group, frozenset[str]()
        head = GROUPS.encode(head_row(group, "o", 0))
        if isinstance(group, ConsumerGroup):
            changes = consumer.begin_store(group)
            changed = changes.changed
            self.writing = (group, changes)
        else:
            self.writing = (group, classic.begin_store(group))
        rows, self.stored = member_rows(group, self.stored, changed)
        self.before = self.rows
        self.rows = {k: v for k, v in {**self.rows, **dict([head, *rows])}.items() if v}

    def written(self, code: int = 0) -> None:
        if self.writing is None:
            return
        (group, storing), self.writing = self.writing, None
        done: Any = consumer.complete_store if isinstance(group, ConsumerGroup) else classic.complete_store
        done(group, self.now, storing, code)
        self.deliver(group)
        self.deliver(self.group)

    def settle(self) -> None:
        self.written()
        while self.group.unstored:
            self.write()
            self.written()

    @property
    def durable(self) -> dict[bytes, bytes]:
        return self.rows if self.writing is None else self.before

    def take_over(self, *, landed: bool = True) -> None:
        if self.writing is not None and not landed:
            self.rows = self.before
        self.writing = None
        self.answers.clear()
        key = GROUPS.key("g")
        if key not in self.rows:
            self.group, self.stored = ClassicGroup("g", self.limits), {}
            return
        head = GROUPS.decode(key, self.rows[key])
        members = stored_members(self.rows)
        assert head.members == len(members)
        self.group = protocol_dispatch.after_takeover(restore_group(head, members, self.limits, self.now), self.now)
        self.stored = stored_counts(self.rows)

    def is_member(self, member_id: str, generation: int) -> bool:
        """May it commit, as far as its identity goes?"""
        if isinstance(self.group, ConsumerGroup):
            return member_id in self.group.members and self.group.members[member_id].epoch == generation
        return member_id in self.group.members and self.group.generation == generation


class Member:
    """A client. `uses`: partitions that it reads and commits."""

    uses: frozenset[int]
    generation: int
    name: str

    def step(self) -> None:
        """The next request, if it waits for none; what was answered is taken up first."""
        raise NotImplementedError

    def lose(self) -> None:
        """Continue as another member after a lost answer, because the request may still take effect."""
        raise NotImplementedError


class ClassicMember(Member):
    """A member of the classic protocol, eager or cooperative."""

    def __init__(self, world: World, name: str, protocol: str, instance: str | None = None) -> None:
        self.world, self.protocol, self.instance = world, protocol, instance
        self.name, self.life = name, 0
        self.begin()

    def begin(self) -> None:
        self.life += 1
        self.member_id, self.generation, self.uses = "", -1, frozenset()
        self.phase, self.waits = "join", None
        self.listed: tuple[tuple[str, str | None, bytes], ...] = ()

    lose = begin

    def step(self) -> None:
        if self.waits is not None:
            said = self.world.answers.pop(self.waits, None)
            if said is None:
                return
            self.waits = None
            assert isinstance(said, JoinAnswer | SyncAnswer)
            self.joined(said) if isinstance(said, JoinAnswer) else self.synced(said)
        elif self.phase == "join":
            self.ask_to_join()
        elif self.phase == "sync":
            self.ask_to_sync()
        else:
            self.failed(self.world.heartbeat(self.member_id, self.generation, self.instance))

    def ask_to_join(self) -> None:
        if self.protocol == EAGER:
            self.uses = frozenset()
        self.waits = (self.name, self.life, object())
        ask = JoinRequest(
            self.member_id, f"{self.name}.{self.life}", self.instance, "c", "/h", SESSION_MS, REBALANCE_MS, "consumer",
            ((self.protocol, subscription(self.uses)),), knows_first=self.instance is None,
        )  # fmt: skip
        self.world.join(self.waits, ask)

    def joined(self, said: JoinAnswer) -> None:
        if said.error:
            self.member_id = said.member_id if said.error == error_codes.MEMBER_ID_REQUIRED else self.member_id
            self.failed(said.error)
            return
        self.member_id, self.generation, self.listed = said.member_id, said.generation, said.members
        self.phase = "sync"

    def ask_to_sync(self) -> None:
        self.waits = (self.name, self.life, object())
        owners = {p: m for m, _, data in self.listed for _, p in decode_subscription(data).owned}
        names = sorted(member for member, _, _ in self.listed)
        mine: dict[str, list[int]] = {name: [] for name in names}
        for partition in range(PARTITIONS if names else 0):
            name = names[partition % len(names)]
            if owners.get(partition, name) == name or self.protocol == EAGER:
                mine[name].append(partition)
        assignments = tuple((n, encode_assignment(3, {TOPIC: ps} if ps else {})) for n, ps in mine.items())
        self.world.sync(
            self.waits, SyncRequest(self.member_id, self.instance, self.generation, assignments=assignments)
        )

    def synced(self, said: SyncAnswer) -> None:
        if said.error:
            self.failed(said.error)
            return
        assigned = frozenset(partition for _, partition in assigned_places(said.assignment))
        group = self.world.group
        if isinstance(group, ConsumerGroup) and said.member_id in group.members:
            kept = {row.member_id: row.consumer for row in stored_members(self.world.durable)}[said.member_id]
            assert kept is not None and assigned <= set(kept.held.get(TOPIC_ID, ())), "CG2"
        let_go, self.uses = self.uses - assigned, assigned
        self.phase = "join" if let_go else "stable"

    def failed(self, code: int) -> None:
        if code in (error_codes.UNKNOWN_MEMBER_ID, error_codes.FENCED_INSTANCE_ID):
            self.begin()
        elif code:
            if code == error_codes.ILLEGAL_GENERATION:
                self.uses = frozenset()
            self.phase = "join"


class ModernMember(Member):
    """A member of the consumer protocol."""

    def __init__(self, world: World, name: str, instance: str | None = None) -> None:
        self.world, self.instance = world, instance
        self.base, self.life = name, 0
        self.begin()

    def begin(self) -> None:
        self.life += 1
        self.name = self.member_id = f"{self.base}.{self.life}"
        self.forget()

    lose = begin

    def forget(self) -> None:
        self.generation, self.uses, self.waits = 0, frozenset(), None

    def step(self) -> None:
        if self.waits is None:
            self.waits = (self.name, object())
            owned = {TOPIC_ID: self.uses} if self.uses else {}
            self.world.consumer_heartbeat(
                self.waits,
                HeartbeatRequest(
                    self.member_id, self.generation, self.instance, rebalance_ms=REBALANCE_MS,
                    topics=frozenset({TOPIC}), owned=owned,
                ),
            )  # fmt: skip
            return
        said = self.world.answers.pop(self.waits, None)
        if said is None:
            return
        self.waits = None
        assert isinstance(said, HeartbeatAnswer)
        if said.error in (error_codes.COORDINATOR_LOAD_IN_PROGRESS, error_codes.UNRELEASED_INSTANCE_ID):
            return
        if said.error:
            self.forget()
            return
        self.generation = said.epoch
        if said.assignment is not None:
            self.uses = frozenset(said.assignment.get(TOPIC_ID, frozenset()))


def settled(world: World, members: list[Member], rounds: int = 60) -> None:
    """Let all members continue until no work is left."""
    for _ in range(rounds):
        for member in members:
            member.step()
            world.settle()
        world.now += 10
        world.tick()
    world.settle()


def shared(members: list[Member]) -> Counter[int]:
    return Counter(partition for member in members for partition in member.uses)


ALL = Counter(range(PARTITIONS))


class See:
    def __init__(self, topics: dict[str, Topic]) -> None:
        self.version, self.topics = 1, dict(topics)

    def change(self, name: str, topic: Topic | None) -> None:
        self.version += 1
        self.topics = {n: t for n, t in {**self.topics, name: topic}.items() if t is not None}

    def topic(self, name: str) -> Topic | None:
        return self.topics.get(name)

    def matching(self, pattern: str) -> frozenset[str]:
        return frozenset(name for name in self.topics if name in pattern)
