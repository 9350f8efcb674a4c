"""Transactional producers, coordinators and committed consumers on the real rooms.

Faults: every store fault; two brokers on the same stores that die at any step and start again; in every fourth world
both believe that they lead and coordinate everything, and in every fourth each sometimes believes that it coordinates
all groups. Producers commit or abort their transactions, sometimes while records are in flight, and have several
batches in flight; they lose answers, time out, and are fenced by producers of the same id.
Oracle: committed readers see all or nothing of a transaction, over all partitions: all of it if the commit was
acknowledged, nothing if none was requested; a producer's records in the order in which it sent them. A consumer sees
all of these records and no others; a group has the offsets of committed transactions only; after healing no transaction
is open anywhere, and every wait ends.
Replay: ./dev sim --room transactions --seed K --trace
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from sim.oracles.transactions import Fate, Sent, check_order, check_transaction
from sim.scenarios.topic_plants import planted
from sim.scenarios.topic_transactions import batch_of
from sim.world import Actor, Crew, Down, Link, Violated, World
from tidemill.base.clock import Clock
from tidemill.base.errors import TidemillError
from tidemill.base.runtime.tasks import Tasks
from tidemill.base.status.status import StatusTracker
from tidemill.kafka import error_codes
from tidemill.kafka.groups.classic.state import GroupLimits
from tidemill.kafka.groups.coordinator import CoordinatorLimits, GroupCoordinator
from tidemill.kafka.transactions.completion import TransactionCompletion
from tidemill.kafka.transactions.coordinator import TransactionCoordinator, TransactionLimits
from tidemill.kafka.transactions.group_offsets import CoordinatedOffsets, store_offsets
from tidemill.kafka.transactions.hints import TransactionHints
from tidemill.kafka.transactions.state import GroupOffset, Offsets
from tidemill.kafka.transactions.store import read_all
from tidemill.metastore.catalogue import Catalogue, TopicRow
from tidemill.metastore.factory import create_metastore
from tidemill.metastore.rows import GROUP_OFFSETS
from tidemill.topics.api import (
    FetchRead,
    InvalidProducerEpochError,
    InvalidTransactionError,
    OutOfOrderSequenceError,
    ProduceTransaction,
)
from tidemill.topics.batch import Record, decode_columns
from tidemill.topics.batch.decode import has_user_records
from tidemill.topics.batch.header import CONTROL, TRANSACTIONAL, parse_header
from tidemill.topics.config.settings import TopicSettings
from tidemill.topics.local_topics import LocalTopics
from tidemill.topics.membership import Assignment, Membership, NodeInfo, SingleNodeAssignment, rendezvous_leader
from tidemill.topics.partition_reader import LogPartitionReader
from tidemill.topics.produce.producer_ids import ProducerIds

GROUP = "g"
NOBODY = ("", None, -1)
AGAIN = (error_codes.COORDINATOR_LOAD_IN_PROGRESS, error_codes.COORDINATOR_NOT_AVAILABLE, error_codes.NOT_COORDINATOR)
TAKE_OVER_S = 1.0


Produce = Callable[["Broker"], Awaitable[object]]


class Over(Exception):
    """Raised when the producer's epoch or transaction has ended: it begins again with InitProducerId."""


class Untold(CoordinatedOffsets):
    """Planted fault untold-offsets: a group's offsets are reported as written before they are."""

    def __init__(
        self, groups: GroupCoordinator, owner: Callable[[str], str], clock: Clock, own: str, tasks: Tasks
    ) -> None:
        super().__init__(groups, owner, clock)
        self._own = own
        self._tasks = tasks

    async def commit(self, group: str, wanted: Callable[[], Awaitable[Offsets]]) -> None:
        if self.owner_of(group) != self._own:
            return await super().commit(group, wanted)
        offsets = await wanted()

        async def always() -> Offsets:
            return offsets

        async def write() -> None:
            with contextlib.suppress(TidemillError):
                await CoordinatedOffsets.commit(self, group, always)

        self._tasks.spawn(write(), name="untold offsets")


class Dozing(TransactionCoordinator):
    """Coordinator that pauses at times before it stores offsets, so that the group changes after the check."""

    doze: Callable[[], Awaitable[None]]

    async def commit_offsets(
        self, transactional_id: str, producer_id: int, epoch: int, group: str, offsets: Offsets, *, adds: bool = False
    ) -> int:
        await self.doze()
        return await super().commit_offsets(transactional_id, producer_id, epoch, group, offsets, adds=adds)


class Broker:
    """One node. `owner` returns the coordinator of a transactional id, `group_owner` that of a group."""

    def __init__(
        self,
        topics: LocalTopics,
        transactions: TransactionCoordinator,
        groups: GroupCoordinator,
        owner: Callable[[str], str],
        group_owner: Callable[[str], str],
    ) -> None:
        self.topics = topics
        self.transactions = transactions
        self.groups = groups
        self.owner = owner
        self.group_owner = group_owner


class Cluster:
    def __init__(self, world: World, fault: str) -> None:
        source = world.source
        self.world = world
        self.quarrel = world.seed % 4 == 3
        self.two_minds = world.seed % 4 == 1 or fault == "stays-replaced"
        self.settings = TopicSettings(
            object_bytes=source.choice((300, 1 << 20)),
            uploads_in_flight=source.randint(1, 4),
            linger_s=source.choice((0.0, 0.0, 0.05)),
            group_batches=source.choice((1, 3, 1024)),
            append_budget_s=source.choice((0.5, 10.0)),
            rollup_records=source.choice((2, 8, 4096)),
            cache_bytes=source.choice((0, 1 << 20)),
        )
        self.fault = fault
        self.session_ms = source.choice((600, 600, 600) if fault == "checked-once" else (100, 600, 2_000))
        self.brokers = [Actor(world, name, self._build) for name in ("broker-a", "broker-b")]
        self.sent: dict[bytes, Sent] = {}
        """Transactions by the prefix of their values."""
        self.seen: dict[tuple[int, int], bytes] = {}
        """(partition, offset) → value shown to consumers."""
        self.positions: dict[int, int] = {}
        """Partition → next offset of its consumer."""
        self.failure: BaseException | None = None
        self.stopping = False
        self.topic: TopicRow

    async def _build(self, actor: Actor[Broker]) -> Broker:
        consensus, objects, rand = actor.consensus(), actor.objects(), self.world.rand()
        assignment: Assignment
        if self.quarrel:
            assignment = SingleNodeAssignment(actor.name, actor.life.number)

            def owner(name: str) -> str:
                """Return the coordinator; after healing all nodes agree on it."""
                running = [broker.name for broker in self.brokers if broker.ready]
                return rendezvous_leader(running, name, 0) if self.world.faults.healed and running else actor.name
        else:
            membership = Membership(consensus, actor.name, NodeInfo(), actor.clock, rand, ttl_ms=3_000)
            await membership.start()
            assignment = membership
            membership.on_change(lambda: groups.apply_ownership())

            def owner(name: str) -> str:
                return rendezvous_leader([member.name for member in membership.members()], name, 0)

        metastore = create_metastore(consensus, objects, actor.clock, rand, holder=str(actor.life))
        catalogue = Catalogue(metastore, actor.clock, rand)
        topics = LocalTopics(
            consensus, objects, catalogue, clock=actor.clock, rand=rand, assignment=assignment, settings=self.settings
        )
        await topics.start()

        mistaken = False

        def group_owner(group: str) -> str:
            return actor.name if mistaken else owner(f"group/{group}")

        async def mistake() -> None:
            """Sometimes believe for a moment to coordinate every group: take the groups over and release them again.
            The last time is after healing, like a node with a late view of the others."""
            nonlocal mistaken
            chance = random.Random(f"two minds/{self.world.seed}/{actor.life}")
            healed = False
            while not healed:
                await asyncio.sleep(chance.uniform(0.1, 2.0))
                healed = self.world.faults.healed
                for mistaken in (True, False):
                    groups.apply_ownership()
                    await asyncio.sleep(chance.uniform(0.01, 0.2) if mistaken else 0)

        groups = GroupCoordinator(
            metastore,
            lambda group: group_owner(group) == actor.name,
            actor.clock,
            rand,
            node=actor.name,
            limits=CoordinatorLimits(lambda _: GroupLimits(initial_delay_ms=0, session_ms_min=10), 10, 1 << 20),
            tracker=StatusTracker(),
        )
        groups.apply_ownership()
        tasks = Tasks(self._broke)
        store = CoordinatedOffsets(groups, group_owner, actor.clock)
        if self.fault == "untold-offsets":
            store = Untold(groups, group_owner, actor.clock, actor.name, tasks)
        transactions = Dozing(
            consensus,
            TransactionCompletion(consensus, topics, store),
            ProducerIds(consensus, rand),
            actor.clock,
            rand,
            coordinates=lambda transactional_id: owner(transactional_id) == actor.name,
            limits=TransactionLimits(timeout_max_ms=60_000, expires_ms=1 << 40),
        )
        transactions.doze = self._doze
        hints = TransactionHints(consensus, rand, actor.name, transactions.check)
        transactions.completion.remind = hints.send
        topics.set_coordinator(transactions.confirm)
        tasks.spawn(self._again(transactions.take_over, every_s=TAKE_OVER_S), name="take over")
        tasks.spawn(self._again(hints.follow, every_s=0.1), name="hints")
        if self.two_minds:
            tasks.spawn(mistake(), name="mistake")
        return Broker(topics, transactions, groups, owner, group_owner)

    async def _doze(self) -> None:
        # The planted fault is rarely visible: another member must read the offsets before this one continues.
        often, least, most = (0.3, 1.0, 2.0) if self.fault == "checked-once" else (0.1, 0.5, 3.0)
        if not self.world.faults.healed and self.world.source.random() < often:
            await asyncio.sleep(self.session_ms / 1000 * self.world.source.uniform(least, most))

    def _broke(self, name: str, error: BaseException) -> None:
        self.failure = error

    async def _again(self, body: Callable[[], Coroutine[Any, Any, None]], every_s: float) -> None:
        """Repeat the body, like a supervisor. Take-overs are frequent, because worlds are short."""
        while True:
            try:
                await body()
            except TidemillError as error:
                self.world.trace(f"a loop ends: {type(error).__name__}")
            await asyncio.sleep(every_s)

    def pick(self, owner_of: Callable[[Broker], str]) -> Actor[Broker] | None:
        running = [broker for broker in self.brokers if broker.ready]
        if not running:
            return None
        if self.quarrel and not self.world.faults.healed:
            return self.world.source.choice(running)
        name = owner_of(running[0].node)
        return next((broker for broker in running if broker.name == name), running[0])


class Producer:
    """Client of a transactional id; several producers may have the same id."""

    def __init__(self, cluster: Cluster, transactional_id: str, name: str, partitions: int) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._id = transactional_id
        self._name = name
        self._partitions = partitions
        self._timeout_ms = self._world.source.choice((1_500, 20_000))
        self._extra = random.Random(f"in flight/{cluster.world.seed}/{name}")
        """Separate random source, so that later additions do not change the history of a seed."""
        self._identity = (-1, -1)
        self._sequences: dict[int, int] = {}
        self._count = 0

    async def work(self) -> None:
        for number in range(self._world.source.randint(2, 4)):
            try:
                if self._identity[0] < 0:
                    await self._init()
                await self._transaction(number)
            except Over as over:
                self._world.trace(f"{self._name} {number} is over: {over}")
                self._identity = (-1, -1)
            await asyncio.sleep(self._world.source.uniform(0, 0.3))

    async def _ask(self, work: Callable[[Broker], Coroutine[Any, Any, Any]], owner: Callable[[Broker], str]) -> Any:
        """Try once. Return None if the outcome is unknown."""
        broker = self._cluster.pick(owner)
        if broker is not None:
            link = Link(broker, delay_s=self._world.source.choice((0.0, 0.001, 0.05)))
            try:
                async with asyncio.timeout(self._world.source.choice((1.0, 5.0))):
                    return await link.request(work)
            except (TimeoutError, Down):
                pass
            except (InvalidTransactionError, InvalidProducerEpochError, OutOfOrderSequenceError) as error:
                raise Over(type(error).__name__) from error
            except TidemillError as error:
                self._world.trace(f"{self._name}: {type(error).__name__}")
            finally:
                link.close()
        await asyncio.sleep(self._world.source.uniform(0.01, 0.2))
        return None

    async def _coded(self, work: Callable[[TransactionCoordinator], Coroutine[Any, Any, int]]) -> None:
        """Repeat the request until it is done. Raises Over."""
        while True:
            code = await self._ask(lambda node: work(node.transactions), lambda node: node.owner(self._id))
            if code == 0:
                return
            if code is not None and code != error_codes.CONCURRENT_TRANSACTIONS:
                raise Over(f"code={code}")
            await asyncio.sleep(0.02)

    async def _commit_offset(self, number: int, offset: int) -> bool:
        """Commit an offset; return whether an abandoned request may still arrive."""
        offsets: Offsets = {self._name: {number: GroupOffset(offset)}}

        async def ask(node: Broker) -> int:
            identity = (self._id, *self._identity)
            return await store_offsets(node.groups, node.transactions, identity, GROUP, NOBODY, offsets, adds=False)

        given_up = False
        while True:
            code = await self._ask(ask, lambda node: node.group_owner(GROUP))
            if code == 0:
                return given_up
            if code is not None and code not in AGAIN:
                raise Over(f"offsets code={code}")
            given_up = given_up or code is None
            await asyncio.sleep(0.02)

    async def _init(self, *, again: bool = False) -> None:
        producer_id, epoch = self._identity if again else (-1, -1)
        while True:
            answer = await self._ask(
                lambda node: node.transactions.init(
                    self._id, timeout_ms=self._timeout_ms, producer_id=producer_id, epoch=epoch
                ),
                lambda node: node.owner(self._id),
            )
            if answer is not None and answer[0] == 0:
                self._identity, self._sequences = (answer[1], answer[2]), {}
                self._world.trace(f"{self._name} is {self._identity}")
                return
            if answer is not None and answer[0] not in (
                error_codes.CONCURRENT_TRANSACTIONS,
                error_codes.COORDINATOR_NOT_AVAILABLE,
            ):
                raise Over(f"init code={answer[0]}")
            await asyncio.sleep(0.05)

    async def _transaction(self, number: int) -> None:
        source = self._world.source
        prefix = f"{self._name}.{number}/".encode()
        sent = self._cluster.sent[prefix] = Sent(number)
        partitions = source.sample(range(self._partitions), source.randint(1, self._partitions))
        places = {self._cluster.topic.topic_id: tuple(sorted(partitions))}
        await self._coded(lambda t: t.add(self._id, *self._identity, partitions=places))
        late: list[asyncio.Future[Any]] = []
        # The planted fault is rarely visible: an abort must overtake records in flight.
        hasty = self._cluster.fault == "marker-before-data"
        commit = source.random() < (0.1 if hasty else 0.6)
        for partition in partitions if commit and self._extra.random() < 0.4 else ():
            await self._fly(partition, [self._batch(sent, prefix, partition) for _ in range(self._extra.randint(2, 4))])
        for partition in partitions * source.randint(1, 2):
            hurried = not commit and source.random() < (0.9 if hasty else 0.4)
            await self._produce(sent, prefix, partition, late if hurried else None)
        given_up = False
        if source.random() < 0.4:
            sent.offset = source.randint(1, 1_000)
            await self._coded(lambda t: t.add_group(self._id, *self._identity, GROUP))
            given_up = await self._commit_offset(number, sent.offset)
        if source.random() < 0.15:
            raise Over("it went away")
        if commit:
            sent.fate = Fate.MAYBE
        await self._coded(lambda t: t.end(self._id, *self._identity, commit=commit))
        sent.fate = Fate.COMMITTED if commit else Fate.ABORTED
        self._world.trace(f"{self._name} {number} {sent.fate.name}")
        if late or given_up:
            # Another epoch, so that nothing in flight counts for the next transaction. In version 1 one epoch has many
            # transactions, and a request does not name its transaction (KIP-890).
            await self._init(again=True)

    def _batch(self, sent: Sent, prefix: bytes, partition: int) -> Produce:
        values = [prefix + str(self._count + i).encode() for i in range(self._world.source.randint(1, 3))]
        self._count += len(values)
        sent.records |= {(partition, value) for value in values}
        sequence = self._sequences.get(partition, 0)
        records = [Record(None, value, timestamp_ms=self._world.clock.now_ms()) for value in values]
        batch = batch_of(records, self._identity, sequence)
        self._sequences[partition] = sequence + len(values)
        topic_id, within = self._cluster.topic.topic_id, ProduceTransaction(self._id)

        def produce(node: Broker) -> Awaitable[object]:
            return node.topics.produce_nowait(topic_id, partition, batch, sender=self._name, within=within)

        return produce

    def _leader(self, partition: int) -> Callable[[Broker], str]:
        return lambda node: node.topics.leader_of(self._cluster.topic.topic_id, partition)

    async def _fly(self, partition: int, batches: list[Produce]) -> None:
        """Send all batches concurrently; then repeat the failed ones, one after another."""
        broker = self._cluster.pick(self._leader(partition))
        good = 0
        if broker is not None:
            link = Link(broker, delay_s=self._extra.choice((0.0, 0.001, 0.05)))
            answers = [link.request_nowait(batch) for batch in batches]
            await asyncio.wait(answers, timeout=self._extra.choice((1.0, 5.0)))
            link.close()
            while good < len(answers) and answers[good].done() and answers[good].exception() is None:
                good += 1
        for batch in batches[good:]:
            await self._surely(partition, batch)

    async def _surely(self, partition: int, batch: Produce) -> None:
        async def produce(node: Broker) -> bool:
            await batch(node)
            return True

        while not await self._ask(produce, self._leader(partition)):
            pass

    async def _produce(self, sent: Sent, prefix: bytes, partition: int, late: list[asyncio.Future[Any]] | None) -> None:
        batch = self._batch(sent, prefix, partition)
        if late is not None:
            broker = self._cluster.pick(self._leader(partition))
            if broker is not None:
                # The connection stays open, so requests in flight arrive eventually.
                late.append(Link(broker, delay_s=self._world.source.choice((0.0, 0.05, 0.5))).request_nowait(batch))
            await asyncio.sleep(self._world.source.uniform(0, 0.05))
            return
        await self._surely(partition, batch)


async def consume(cluster: Cluster, partition: int, stop: asyncio.Event) -> None:
    """Read committed records like a consumer of Kafka, and remember them."""
    world, position = cluster.world, 0
    topic_id = cluster.topic.topic_id
    while not stop.is_set():
        broker = cluster.pick(lambda node: node.topics.leader_of(topic_id, partition))
        if broker is not None:
            read = FetchRead(topic_id, partition, position, 1 << 16, committed=True)
            link = Link(broker)
            try:
                async with asyncio.timeout(5.0):
                    [found] = await link.request(
                        lambda node, read=read: node.topics.fetch(
                            [read], max_wait_s=0.2, min_bytes=1, max_bytes=1 << 20
                        )  # type: ignore[misc]
                    )
                waiting, aborted = list(found.aborted), set[int]()
                for batch in found.batches:
                    header, columns = decode_columns(batch)
                    if header.base_offset > position:
                        raise Violated(f"a fetch skipped offsets: {partition=} {position=} to={header.base_offset}")
                    while waiting and waiting[0][1] < header.next_offset:
                        aborted.add(waiting.pop(0)[0])
                    if header.attributes & CONTROL:
                        aborted.discard(header.producer_id)
                    elif not (header.attributes & TRANSACTIONAL and header.producer_id in aborted):
                        for offset, value in zip(columns.offsets.tolist(), columns.values, strict=True):
                            cluster.seen[partition, offset] = value or b""
                    position = cluster.positions[partition] = max(position, header.next_offset)
            except (TimeoutError, Down, TidemillError):
                pass
            finally:
                link.close()
        await asyncio.sleep(world.source.uniform(0.05, 0.5))


async def nemesis(cluster: Cluster) -> None:
    source = cluster.world.source
    for _ in range(source.choice((0, 1, 2, 4))):
        await asyncio.sleep(source.uniform(0, 1.0) ** 2 * 3.0)
        broker = source.choice(cluster.brokers)
        if broker.up:
            broker.crash()
            await asyncio.sleep(source.choice((0.0, 0.5, 5.0)))
            await broker.start()


async def run(world: World, fault: str = "") -> None:
    with planted(fault):
        await _run(world, fault)


async def _run(world: World, fault: str) -> None:
    source = world.source
    cluster = Cluster(world, fault)
    partitions = source.randint(1, 3)
    metastore = create_metastore(world.consensus, world.objects, world.clock, world.rand(), holder="scenario")
    cluster.topic = await Catalogue(metastore, world.clock, world.rand()).create_topic("t", partitions)
    await metastore.aclose()
    for broker in cluster.brokers[: source.randint(1, 2)]:
        await broker.start()
    stop = asyncio.Event()
    async with Crew() as crew:
        ids = source.randint(1, 3)
        names = [(f"id{i}", f"id{i}") for i in range(ids)]
        if source.random() < 0.4:
            names.append(("id0", "namesake"))
        producers = [crew.spawn(Producer(cluster, *name, partitions).work()) for name in names]
        consumers = [crew.spawn(consume(cluster, partition, stop)) for partition in range(partitions)]
        await crew.spawn(nemesis(cluster))
        await asyncio.wait(producers, timeout=5.0)
        await world.heal()
        await asyncio.wait(producers)
        await ended(cluster, partitions)
        await read_to_the_end(cluster, partitions)
        stop.set()
        await asyncio.wait(consumers)
        await world.answered()
    for actor in world.actors:
        actor.crash()
    await check(cluster, partitions)


async def ended(cluster: Cluster, partitions: int) -> None:
    """Check liveness: every transaction ends, at its coordinator and in every partition."""
    world, topic_id = cluster.world, cluster.topic.topic_id
    while True:
        if cluster.failure is not None:
            raise cluster.failure
        reader = LogPartitionReader(world.consensus, world.objects)
        open_ids = [each for each, (_, found) in (await read_all(world.consensus)).items() if found.started_ms >= 0]
        behind = [
            partition
            for partition in range(partitions)
            if await reader.last_stable(topic_id, partition) < await reader.high_watermark(topic_id, partition)
        ]
        if not open_ids and not behind:
            return
        world.trace(f"waiting for ids={open_ids} partitions={behind}")
        await asyncio.sleep(0.5)


async def read_to_the_end(cluster: Cluster, partitions: int) -> None:
    """Check liveness: consumers get all committed records from the leader."""
    reader = LogPartitionReader(cluster.world.consensus, cluster.world.objects)
    ends = {p: await reader.last_stable(cluster.topic.topic_id, p) for p in range(partitions)}
    await cluster.world.until(lambda: all(cluster.positions.get(p, 0) >= end for p, end in ends.items()))


async def shown_of(cluster: Cluster, partitions: int) -> dict[tuple[int, int], bytes]:
    """Return (partition, offset) → value of all records shown to committed readers."""
    reader = LogPartitionReader(cluster.world.consensus, cluster.world.objects)
    shown: dict[tuple[int, int], bytes] = {}
    for partition in range(partitions):
        end = await reader.last_stable(cluster.topic.topic_id, partition)
        refs = await reader.plan(cluster.topic.topic_id, partition, 0, end)
        for ref, batch in zip(refs, await reader.read(refs), strict=True):
            if has_user_records(parse_header(batch), ref):
                _, columns = decode_columns(batch, ref=ref)
                for offset, value in zip(columns.offsets.tolist(), columns.values, strict=True):
                    shown[partition, offset] = value or b""
    return shown


async def check(cluster: Cluster, partitions: int) -> None:
    shown = await shown_of(cluster, partitions)
    offsets = await committed(cluster.world)
    found: dict[bytes, list[tuple[int, bytes]]] = {}
    for (partition, _), value in shown.items():
        found.setdefault(value[: value.index(b"/") + 1], []).append((partition, value))
    for prefix, sent in cluster.sent.items():
        check_transaction(prefix, sent, found.get(prefix, []), offsets)
    check_order(shown)
    for place in sorted(shown.keys() | cluster.seen.keys()):
        if shown.get(place) != cluster.seen.get(place):
            raise Violated(
                f"a consumer was not shown what is committed, or what is not: place={place} "
                f"committed={shown.get(place)!r} shown={cluster.seen.get(place)!r}"
            )


async def committed(world: World) -> dict[tuple[str, int], int]:
    """Return (topic, partition) → committed offset of the group."""
    metastore = create_metastore(world.consensus, world.objects, world.clock, world.rand(), holder="oracle")
    rows = await metastore.rows(GROUP_OFFSETS, GROUP)
    await metastore.aclose()
    return {(row.topic_id, row.partition): row.offset for row in rows}
