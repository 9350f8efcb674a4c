"""Consumers of one group on the real coordinators over the real metastore, which come, go and die while nodes do.

Faults: every store fault; two nodes that die at any step and start again; in every third world both believe that they
coordinate every group, so that they fence each other. Consumers leave, die without leaving and come back as new
members; connections break, answers are lost, and a request may be executed when no client waits for it any more.
In a third of the worlds the consumers use the consumer protocol (`group_members`), in another third both protocols, so
that the group changes its protocol back and forth; half of those end with the classic protocol only.
Oracle: in one generation every partition is assigned once, and no member commits to a partition of another member;
every later read finds an acknowledged offset or a newer one; offsets never go back. After healing every partition is
assigned to a live member and makes progress, and every wait ends.
Replay: ./dev sim --room groups --seed K --trace
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

from sim.scenarios.group_plants import planted
from sim.world import Actor, Crew, Down, Link, Violated, World
from tidemill.base.errors import TidemillError
from tidemill.base.status.status import StatusTracker
from tidemill.kafka import error_codes
from tidemill.kafka.groups.classic.state import GroupLimits, JoinRequest, SyncRequest
from tidemill.kafka.groups.consumer.state import Topic
from tidemill.kafka.groups.coordinator import CoordinatorLimits, GroupCoordinator, GroupUnavailableError
from tidemill.kafka.groups.group_runner import GroupRunner
from tidemill.kafka.groups.subscriptions import assigned_places, encode_assignment
from tidemill.metastore.domain.settings import DomainSettings
from tidemill.metastore.factory import create_metastore
from tidemill.metastore.rows import GROUP_OFFSETS
from tidemill.metastore.rows.groups import GroupOffsetRow
from tidemill.topics.membership import Membership, NodeInfo, rendezvous_leader

GROUP, TOPIC = "g", "t"
SUBSCRIBED = b"\x00\x00" + b"\x00\x00\x00\x01" + b"\x00\x01t" + b"\xff\xff\xff\xff"
"""Metadata of a consumer of version 0: the topic."""
AGAIN = (error_codes.COORDINATOR_LOAD_IN_PROGRESS, error_codes.COORDINATOR_NOT_AVAILABLE, error_codes.NOT_COORDINATOR)
REJOIN = (error_codes.REBALANCE_IN_PROGRESS, error_codes.ILLEGAL_GENERATION)

T = TypeVar("T")


class Node(NamedTuple):
    coordinator: GroupCoordinator
    membership: Membership | None


class Shared:
    """Nodes of the group, and the assignments and offsets that its consumers learned."""

    def __init__(self, world: World, fault: str) -> None:
        source = world.source
        self.world = world
        self.quarrel = world.seed % 3 == 2
        self.partitions = source.randint(1, 4)
        self.patience_s = source.choice((3.0, 8.0))
        """Time without an answer after which a client hangs up."""
        self.session_ms = source.choice((800, 3_000))
        self.limits = GroupLimits(
            initial_delay_ms=source.choice((0, 300)), session_ms_min=10, consumer_session_ms=self.session_ms
        )
        self.settings = DomainSettings(
            lease_ttl_ms=source.choice((300, 2_000)),
            persist_interval_s=5.0,
            request_timeout_s=source.choice((1.0, 5.0)),
            rollup_after_records=source.choice((8, 64)),
        )
        self.nodes = [Actor(world, name, self._build) for name in ("node-a", "node-b")]
        self.assigned: dict[int, dict[str, frozenset[int]]] = {}
        """Generation → member → assignment."""
        self.acknowledged: dict[int, int] = {}
        self.read: dict[int, int] = {}
        """Greatest offset that a completed read found."""
        self.commits_healed: set[int] = set()
        self.stopping = False
        self.is_mixed, self.is_modern = source.choice(((False, False), (False, True), (True, True)))
        """True if members use both protocols, and if any use the consumer protocol (`group_members`)."""
        self.retires = self.is_mixed and source.random() < 0.5
        """True if the members of the consumer protocol leave at the end."""
        self.telling = 0
        self.holders: dict[int, tuple[int, str, int]] = {}
        """Partition → (greatest epoch in which it was assigned to a member, that member, number of the answer)."""

    async def _build(self, actor: Actor[Node]) -> Node:
        consensus, rand = actor.consensus(), self.world.rand()
        metastore = create_metastore(
            consensus, actor.objects(), actor.clock, rand, holder=f"{actor.name}/{actor.life.number}",
            settings=self.settings,
        )  # fmt: skip
        await metastore.start()
        membership: Membership | None = None
        if not self.quarrel:
            membership = Membership(consensus, actor.name, NodeInfo(), actor.clock, rand, ttl_ms=2_000)
            await membership.start()

        def is_own(group: str) -> bool:
            if membership is not None:
                return rendezvous_leader([m.name for m in membership.members()], group, 0) == actor.name
            return (
                not self.world.faults.healed or rendezvous_leader([n.name for n in self.nodes], group, 0) == actor.name
            )

        coordinator = GroupCoordinator(
            metastore, is_own, actor.clock, rand, node=actor.name, tracker=StatusTracker(),
            limits=CoordinatorLimits(lambda _: self.limits, 10, 1 << 20),
        )  # fmt: skip
        if membership is not None:
            membership.on_change(coordinator.apply_ownership)
        coordinator.apply_ownership()
        return Node(coordinator, membership)

    def pick(self) -> Actor[Node] | None:
        running = [node for node in self.nodes if node.ready]
        return self.world.source.choice(running) if running else None

    def assign(self, generation: int, member: str, partitions: frozenset[int]) -> None:
        of_this = self.assigned.setdefault(generation, {})
        for other, theirs in of_this.items():
            if (other != member and theirs & partitions) or (other == member and theirs != partitions):
                raise Violated(
                    f"of one generation a partition is assigned twice: generation={generation} "
                    f"{member}={sorted(partitions)} {other}={sorted(theirs)}"
                )
        of_this[member] = partitions

    @property
    def has_retired(self) -> bool:
        return self.retires and self.world.faults.healed

    def reported(self, member: str, epoch: int, partitions: frozenset[int]) -> None:
        """Record an assignment. Answers arrive in any order; their epochs order them."""
        self.telling += 1
        for partition in partitions:
            newest, holder, _ = self.holders.get(partition, (0, member, 0))
            if epoch == newest and holder != member:
                raise Violated(f"in epoch {epoch} partition {partition} is given to {member} and {holder}")
            if epoch >= newest:
                self.holders[partition] = (epoch, member, self.telling)

    def committed(self, member: str, offsets: dict[int, int], since: int) -> None:
        """Record an acknowledged commit. Answers up to number `since` came before its request."""
        for partition, offset in offsets.items():
            _, holder, number = self.holders.get(partition, (0, member, 0))
            if holder != member and number <= since:
                raise Violated(f"{member} commits to partition {partition}, which is given to {holder}")
            self.acknowledged[partition] = max(offset, self.acknowledged.get(partition, 0))
        if self.world.faults.healed:
            self.commits_healed |= offsets.keys()


async def call(shared: Shared, actor: Actor[Node] | None, ask: Callable[[Node], Awaitable[T]]) -> T | None:
    """Make a request over a separate connection. Return None if no answer came in time."""
    if actor is None:
        return None
    link = Link(actor, delay_s=shared.world.source.choice((0.0, 0.001, 0.05)))
    try:
        async with asyncio.timeout(shared.patience_s):
            return await link.request(ask)
    except (TimeoutError, Down, TidemillError):
        return None
    finally:
        link.close()


async def led(node: Node) -> GroupRunner | int:
    try:
        return await node.coordinator.get(GROUP)
    except GroupUnavailableError as refused:
        return refused.code


class Topics:
    """Metadata of the only topic, as every node sees it."""

    version = 1

    def __init__(self, partitions: int) -> None:
        self._topic = Topic(TOPIC, partitions)

    def topic(self, name: str) -> Topic | None:
        return self._topic if name == TOPIC else None

    def matching(self, pattern: str) -> frozenset[str]:
        return frozenset({TOPIC})


class Consumer:
    """Member of the classic protocol with eager rebalancing."""

    def __init__(self, shared: Shared, name: str) -> None:
        self._shared = shared
        self._world = shared.world
        self._source = shared.world.source
        self._topics = Topics(shared.partitions)
        self.name = name
        self._lives = 0
        self._member = ""
        self._generation = -1
        self._coordinator: Actor[Node] | None = None
        self.partitions: frozenset[int] = frozenset()

    async def work(self) -> None:
        while not self._shared.stopping:
            if not self._member:
                self._lives += 1
            if await self._join():
                await self._consume()
            self.partitions = frozenset()
            await asyncio.sleep(self._source.uniform(0.01, 0.2))

    async def _call(self, ask: Callable[[Node], Awaitable[T]]) -> T | None:
        """Ask the same node as long as it answers that it coordinates the group."""
        if self._coordinator is None or not self._coordinator.ready:
            self._coordinator = self._shared.pick()
        answer = await call(self._shared, self._coordinator, ask)
        if answer is None or getattr(answer, "error", answer) in AGAIN:
            self._coordinator = None
        return answer

    async def _join(self) -> bool:
        """Join and sync; return whether the member got an assignment."""
        lives = f"{self.name}.{self._lives}"
        ask = JoinRequest(
            self._member, lives, None, "c", "/h", self._shared.session_ms, 2_000, "consumer", (("range", SUBSCRIBED),),
            knows_first=self._source.random() < 0.5,
        )  # fmt: skip

        async def join(node: Node) -> object:
            found = await led(node)
            return found if isinstance(found, int) else await found.join(ask, self._topics)

        answer = await self._call(join)
        if answer is None or isinstance(answer, int):
            # An unknown member waits for its session to end. Like clients do, it joins as a new member.
            if answer is None:
                self._member = ""
            return False
        code = answer.error  # type: ignore[attr-defined]
        if code == error_codes.MEMBER_ID_REQUIRED:
            self._member = answer.member_id  # type: ignore[attr-defined]
            return False
        if code:
            if code not in (*AGAIN, *REJOIN):
                self._member = ""
            return False
        self._member, self._generation = answer.member_id, answer.generation  # type: ignore[attr-defined]
        members = [member for member, _, _ in answer.members]  # type: ignore[attr-defined]
        return await self._sync(members)

    async def _sync(self, members: list[str]) -> bool:
        self._source.shuffle(members)
        assignments: dict[str, list[int]] = {member: [] for member in members}
        for partition in range(self._shared.partitions if members else 0):
            assignments[members[partition % len(members)]].append(partition)
        encoded = {member: encode_assignment(0, {TOPIC: mine} if mine else {}) for member, mine in assignments.items()}
        ask = SyncRequest(self._member, None, self._generation, assignments=tuple(encoded.items()))

        async def sync(node: Node) -> object:
            found = await led(node)
            return found if isinstance(found, int) else await found.sync(ask)

        for _ in range(5):
            answer = await self._call(sync)
            code = answer if isinstance(answer, int) else answer.error if answer is not None else AGAIN[0]  # type: ignore[attr-defined]
            if not code:
                self.partitions = frozenset(p for _, p in assigned_places(answer.assignment))  # type: ignore[attr-defined]
                self._world.trace(f"{self._member} has {sorted(self.partitions)} of {self._generation}")
                if self._shared.is_mixed:
                    self._shared.reported(self._member, self._generation, self.partitions)
                else:
                    self._shared.assign(self._generation, self._member, self.partitions)
                return True
            if code not in AGAIN:
                if code not in REJOIN:
                    self._member = ""
                return False
            await asyncio.sleep(0.1)
        return False

    async def _consume(self) -> None:
        at = await read(self._shared, self.partitions)
        while at is None:
            await asyncio.sleep(0.1)
            at = await read(self._shared, self.partitions)
        while not self._shared.stopping:
            await asyncio.sleep(self._source.uniform(0.02, self._shared.session_ms / 2_000))
            end = self._source.random()
            if not self._world.faults.healed and end < 0.05:
                if end < 0.02:
                    await self._call(self._leave)
                self._member = ""  # dead, or gone
                return
            code = await self._commit(at) if self.partitions and end < 0.6 else await self._call(self._beat)
            if code is None:
                # The request may be executed at any later time, so only a new member may continue from here.
                self._member = ""
                return
            if code and code not in AGAIN:
                if code not in REJOIN:
                    self._member = ""
                return

    async def _leave(self, node: Node) -> int:
        found = await led(node)
        return found if isinstance(found, int) else found.remove_members([(self._member, None)])[0]

    async def _beat(self, node: Node) -> int:
        found = await led(node)
        return found if isinstance(found, int) else found.heartbeat(self._member, None, self._generation)

    async def _commit(self, at: dict[int, int]) -> int | None:
        for partition in self.partitions:
            at[partition] += self._source.randint(0, 3)
        committed = dict(at)
        since = self._shared.telling if self._shared.is_mixed else -1
        rows = [GROUP_OFFSETS.encode(GroupOffsetRow(GROUP, TOPIC, p, offset)) for p, offset in committed.items()]

        async def commit(node: Node) -> int:
            found = await led(node)
            if isinstance(found, int):
                return found
            return found.commit_error(self._member, None, self._generation) or await found.write(rows)

        code = await self._call(commit)
        self._world.trace(f"{self._member} commits {committed}: {code}")
        if code == 0:
            self._shared.committed(self._member, committed, since)
        return code


async def read(shared: Shared, partitions: frozenset[int]) -> dict[int, int] | None:
    """Read committed offsets, and check them against everything acknowledged or read before this call."""
    least = {p: max(shared.acknowledged.get(p, 0), shared.read.get(p, 0)) for p in partitions}

    async def ask(node: Node) -> dict[tuple[str, int], GroupOffsetRow]:
        return await node.coordinator.rows.offsets_of(GROUP, [(TOPIC, p) for p in sorted(partitions)])

    if not partitions:
        return {}
    found = await call(shared, shared.pick(), ask)
    if found is None:
        return None
    offsets = {p: found[TOPIC, p].offset if (TOPIC, p) in found else 0 for p in partitions}
    for partition, offset in offsets.items():
        if offset < least[partition]:
            raise Violated(f"an offset went back: partition={partition} found={offset} before={least[partition]}")
        shared.read[partition] = max(offset, shared.read.get(partition, 0))
    return offsets


async def watch(shared: Shared) -> None:
    while not shared.stopping:
        await read(shared, frozenset(range(shared.partitions)))
        await asyncio.sleep(0.3)


async def nemesis(shared: Shared) -> None:
    source = shared.world.source
    for _ in range(source.choice((0, 1, 3, 5))):
        await asyncio.sleep(source.uniform(0.1, 5.0))
        victim = source.choice(shared.nodes)
        if victim.up:
            victim.crash()
            await asyncio.sleep(source.choice((0.0, 0.5, 4.0)))
        if not victim.up:
            await victim.start()


async def run(world: World, fault: str = "") -> None:
    with planted(fault):
        await _run(world, fault)


async def _run(world: World, fault: str) -> None:
    from sim.scenarios.group_members import Modern

    shared = Shared(world, fault)
    for node in shared.nodes:
        await node.start()
    names = [f"c{i}" for i in range(world.source.randint(1, 4))]
    consumers: list[Modern | Consumer] = [(Modern if shared.is_modern else Consumer)(shared, name) for name in names]
    if shared.is_mixed:
        consumers += [Consumer(shared, f"old-{i}") for i in range(world.source.randint(1, 2))]
    everything = set(range(shared.partitions))
    async with Crew() as crew:
        for consumer in consumers:
            crew.spawn(consumer.work())
        crew.spawn(watch(shared))
        await crew.spawn(nemesis(shared))
        await asyncio.sleep(world.source.choice((1.0, 10.0)))
        await world.heal()
        await world.until(lambda: shared.commits_healed == everything)
        await world.until(lambda: {p for c in consumers for p in c.partitions} == everything)
        shared.stopping = True
    await world.answered()
    for actor in world.actors:
        actor.crash()
