"""Producers, brokers and consumers on the real topic room.

Faults: every store fault; two brokers on the same stores that die at any step, start again, stall, and have wrong wall
clocks; in every fourth world both believe that they lead everything, so that they fence each other. Producers have up
to five batches in flight on one connection and send again from the first unanswered one, like Kafka's; connections
break with their broker or by timeout.
Oracle: offsets are contiguous; acknowledged records are in the log, those of idempotent producers once and in order,
those of a producer without id in the order of each of its connections; no client learns of anything before it is
durable; a record that a consumer received stays; the next batch of a producer is never rejected as out of order. After
healing everything is acknowledged, consumers reach the end, and every wait ends.
Variants: in two of three worlds the topic has retention by size or time, and objects are collected concurrently: all
records above the log start exist. In half of them brokers move settled batches into L1, where checkpoints are written
and garbage is collected too, and half of those compact by key; after healing everything is in L1, and no unreferenced
object is left. In half of the worlds a partition has transactions (`topic_transactions`): readers of committed records
see no others. A record of a compacted topic may be gone if a newer record of its key exists, but the end of the log
never is. In some worlds with maintenance a second topic comes, grows and goes (`topic_lives`); without compaction a
client asks for offsets by time (`topic_times`).
Replay: ./dev sim --room topics --seed K --trace
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

from sim.oracles.topics import Durable, Place, check_acknowledged, check_log, check_producer, check_stable
from sim.scenarios.maintenance_plants import COLLECTORS, COMPACTIONS, ForgottenLog
from sim.scenarios.topic_lives import Lives
from sim.scenarios.topic_plants import planted
from sim.scenarios.topic_times import ask_for_times
from sim.scenarios.topic_transactions import Transactor, confirmed, consume_committed
from sim.world import Actor, Crew, Down, Link, NotLive, Violated, World
from tidemill.base.errors import CorruptError, TidemillError
from tidemill.base.runtime.tasks import Tasks
from tidemill.maintenance.scheduler import JobContext, Retention, StepBudget
from tidemill.maintenance.topics.compaction import TopicCompaction
from tidemill.maintenance.topics.l0_garbage import L0GarbageCollector
from tidemill.maintenance.topics.l1_garbage import L1GarbageCollector
from tidemill.maintenance.topics.l1_merge import L1Merger
from tidemill.maintenance.topics.rollups import RollupCollector
from tidemill.metastore.backup.checkpoint import Checkpointer
from tidemill.metastore.catalogue import Catalogue, TopicRow
from tidemill.metastore.domain.settings import DomainSettings
from tidemill.metastore.factory import create_metastore
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import L1_EXTENTS, L1_PARTITIONS
from tidemill.topics.api import (
    CorruptBatchError,
    FetchRead,
    InvalidProducerEpochError,
    OffsetOutOfRangeError,
    OutOfOrderSequenceError,
    ProduceResult,
)
from tidemill.topics.batch import Record, decode_columns, encode_batch
from tidemill.topics.config.settings import TopicSettings
from tidemill.topics.l1.extent_store import ExtentStore
from tidemill.topics.l1.reader import L1Reader
from tidemill.topics.lifecycle.checkpoint import PartitionsStage
from tidemill.topics.lifecycle.retention import no_retention_holds
from tidemill.topics.local_topics import LocalTopics
from tidemill.topics.membership import Assignment, Membership, NodeInfo, SingleNodeAssignment
from tidemill.topics.partition.recovery import partition_log
from tidemill.topics.partition_reader import LogPartitionReader

COMPACTION_FAULTS = ("clean-last", "aborted-supersedes")
COLLECTION_FAULTS = ("first-region", "undecided", "one-report")
LIVES_FAULTS = ("forgotten-log",)
QUARREL_FAULTS = ("untold-leader",)
HANDOVER_FAULTS = ("no-handover-gate",)
CUT_FAULTS = ("below-start",)
TRANSACTION_FAULTS = ("first-data-base", "aborted-supersedes")
L1_FAULTS = ("forget-before-add", "first-data-base", *COMPACTION_FAULTS)
EAGER = DomainSettings(lead=True, persist_interval_s=0.5)

COLLECTED_S = 120.0
"""Virtual time after healing within which everything is in its place and nothing else is left."""

ACKNOWLEDGED_S = 200.0
"""Virtual time after healing within which everything is acknowledged to producers."""

READ_S = 60.0
"""Virtual time after healing within which consumers reach the end."""

IN_FLIGHT = 5
"""Limit of Kafka for idempotent producers: the broker remembers five batches."""


class Cluster:
    """Cluster with the topic, its brokers, and everything that clients learned."""

    def __init__(self, world: World, fault: str) -> None:
        source = world.source
        self.world = world
        self.extra = random.Random(f"topics/{world.seed}")
        """Separate random source, so that later additions do not change the history of a seed."""
        self.quarrel = world.seed % 4 == 3 or fault in QUARREL_FAULTS
        self.settings = TopicSettings(
            object_bytes=source.choice((300, 2_000, 1 << 20)),
            uploads_in_flight=source.randint(1, 4),
            linger_s=source.choice((0.0, 0.0, 0.01, 0.1)),
            group_batches=source.choice((1, 3, 1024)),
            append_budget_s=source.choice((0.5, 10.0)),
            rollup_records=source.choice((2, 8, 4096)),
            cache_bytes=source.choice((0, 1 << 20)),
            retention_check_s=source.choice((0.05, 0.5)),
            leaders_check_s=1.0,
            settle_after_s=source.choice((0.2, 3600.0)),
            reconcile=source.random() < 0.5 or fault in L1_FAULTS,
            reconcile_min_s=source.choice((0.05, 0.3)),
            reconcile_max_s=1.0,
            l1_object_bytes=source.choice((1, 400, 1 << 20)),
            appends_at_once=self.extra.choice((1, 1, 1) if fault == "fence-before-redeem" else (1, 2, 64)),
        )
        size = source.choice(("0", "300", "900"))
        self.config: dict[str, str] = source.choice(({}, {"retention.bytes": size}, {"retention.ms": "700"}))
        self.compacted = self.settings.reconcile and (self.extra.random() < 0.5 or fault in COMPACTION_FAULTS)
        if self.compacted:
            policy = self.extra.choice(("compact", "compact,delete"))
            self.config = {**self.config, "cleanup.policy": policy, "min.cleanable.dirty.ratio": "0"}
        self.keys: dict[bytes, bytes] = {}
        """Record → key, in a compacted topic."""
        self.fates: dict[bytes, bool] = {}
        """Record of a transaction → whether it is, or will be, committed."""
        self.fault = fault
        self.collector = Actor(world, "keeper", self._build_collector)
        self.collection_fault = fault if fault in COLLECTION_FAULTS else ""
        self.brokers = [Actor(world, name, self._build) for name in ("broker-a", "broker-b")]
        self.acknowledged: dict[bytes, Place] = {}
        self.sent: dict[tuple[str, int], list[bytes]] = {}
        self.times: dict[bytes, int] = {}
        """Record → timestamp."""
        self.idempotent: dict[str, bool] = {}
        """Producer (and connection, without id) → whether all of its records must be acknowledged."""
        self.seen: dict[Place, bytes] = {}
        self.positions: dict[tuple[str, int], int] = {}
        """(kind of read, partition) → next offset of a consumer."""
        self.durable = Durable(lambda partition: self.world.consensus.placed.get(self._log(partition), ()))
        self.topic: TopicRow
        self.lives: Lives | None = None
        self.failure: BaseException | None = None

    async def _build_collector(self, actor: Actor[L0GarbageCollector]) -> L0GarbageCollector:
        """Build a process that collects all the time: without delay, or after one in which batches are in flight."""
        consensus, objects, rand = actor.consensus(), actor.objects(), self.world.rand()
        metastore = create_metastore(consensus, objects, actor.clock, rand, holder=str(actor.life), settings=EAGER)
        retention = Retention(collect_after_s=self.world.source.choice((0.0, 0.5)), orphans_after_s=1.0)
        context = JobContext(consensus, objects, metastore, actor.clock, rand, retention)
        collector = COLLECTORS.get(self.fault, L0GarbageCollector)(context, quiet_s=2.0)
        l1 = L1GarbageCollector(context, registered_s=1.0)
        levels = L1Merger(context, target_bytes=self.world.source.choice((300, 1 << 20)), fanout=2)
        compaction = COMPACTIONS.get(self.fault, TopicCompaction)(
            context,
            no_retention_holds,
            room=self.extra.choice((1, 3, 1 << 20)),
            target_bytes=self.extra.choice((300, 1 << 20)),
        )
        rollups = (ForgottenLog if self.fault == "forgotten-log" else RollupCollector)(context)
        stages = [PartitionsStage(consensus, objects, metastore, actor.clock)]
        checkpoint = Checkpointer(metastore, stages, actor.clock, holder=str(actor.life))

        jobs = [l1.run, levels.run, compaction.run, collector.run] if self.settings.reconcile else [collector.run]
        if self.lives is not None:
            jobs.append(rollups.run)
        steps: list[Callable[[], Awaitable[object]]] = [checkpoint.round] if self.settings.reconcile else []
        steps += [lambda run=run: run(StepBudget(actor.clock, 1)) for run in jobs]  # type: ignore[misc]

        async def collect() -> None:
            while True:
                for step in steps:
                    try:
                        await step()
                    except TidemillError as error:  # the other jobs still run, as in a node
                        self.world.trace(f"{actor.life} step ends: {type(error).__name__}")
                await asyncio.sleep(0.1)

        self.collecting = Tasks(self._broken)
        self.collecting.spawn(collect(), name="collect")
        return collector

    def key(self, value: bytes) -> bytes | None:
        """Return the key of a new record: one of a few if the topic is compacted."""
        if not self.compacted:
            return None
        return self.keys.setdefault(value, b"k%d" % self.extra.randrange(4))

    def _log(self, partition: int) -> str:
        return partition_log(self.topic.topic_id, partition)

    def _broken(self, name: str, error: BaseException) -> None:
        self.failure = error

    async def _build(self, actor: Actor[LocalTopics]) -> LocalTopics:
        consensus, rand = actor.consensus(), self.world.rand()
        assignment: Assignment
        if self.quarrel:
            assignment = SingleNodeAssignment(actor.name, actor.life.number)
        else:
            membership = Membership(consensus, actor.name, NodeInfo(), actor.clock, rand, ttl_ms=3_000)
            await membership.start()
            assignment = membership
        objects = actor.objects()
        metastore = create_metastore(consensus, objects, actor.clock, rand, holder=str(actor.life))
        node = LocalTopics(
            consensus,
            objects,
            Catalogue(metastore, actor.clock, rand),
            clock=actor.clock,
            rand=rand,
            assignment=assignment,
            settings=self.settings,
            metastore=metastore,
        )
        node.set_coordinator(confirmed)
        await node.start()
        return node

    def pick(self, partition: int, topic_id: str = "") -> Actor[LocalTopics] | None:
        """Return a broker to talk to: usually the one that another broker names as leader."""
        running = [broker for broker in self.brokers if broker.up and broker._node is not None]
        if not running:
            return None
        if self.quarrel and not self.world.faults.healed:
            return self.world.source.choice(running)
        leader = running[0].node.leader_of(topic_id or self.topic.topic_id, partition)
        return next((broker for broker in running if broker.name == leader), running[0])


class Producer:
    """Producer on one partition. Without id, order is promised only within each connection, and acknowledged records
    stay: each of its records names its connection."""

    def __init__(self, cluster: Cluster, name: str, partition: int, producer_id: int) -> None:
        source = cluster.world.source
        self._cluster = cluster
        self._world = cluster.world
        self._name = name
        self._partition = partition
        self._producer_id = producer_id
        self._idempotent = producer_id >= 0
        self._timeout_s = source.choice((0.5, 3.0, 15.0))
        self._connections = 0
        self._counts = [source.randint(1, 3) for _ in range(source.randint(2, 7) if self._idempotent else 12)]
        self._batches: list[tuple[list[bytes], bytes]] = []
        self._encode("")

    def _encode(self, connection: str) -> None:
        """Encode all batches for this connection; those of an idempotent producer never change."""
        self._batches = []
        sequence = 0
        for number, count in enumerate(self._counts):
            values = [f"{self._name}{connection}:{number}.{i}".encode() for i in range(count)]
            at_ms = self._world.clock.now_ms()
            self._cluster.times |= {value: at_ms + i for i, value in enumerate(values)}
            batch = encode_batch(
                [Record(self._cluster.key(v), v, timestamp_ms=self._cluster.times[v]) for v in values],
                producer_id=self._producer_id,
                producer_epoch=0 if self._idempotent else -1,
                base_sequence=sequence if self._idempotent else -1,
            )
            self._batches.append((values, batch))
            sequence += count
        self._cluster.idempotent[self._name + connection] = self._idempotent
        self._cluster.sent[self._name + connection, self._partition] = [
            v for values, _ in self._batches for v in values
        ]

    async def work(self) -> None:
        """Send until everything is acknowledged, over as many connections as necessary."""
        first = 0
        while first < len(self._batches):
            broker = self._cluster.pick(self._partition)
            if broker is None:
                await asyncio.sleep(0.1)
                continue
            link = Link(broker, delay_s=self._world.source.choice((0.0, 0.001, 0.05)))
            self._connections += 1
            if not self._idempotent:
                self._encode(f"/{self._connections}")
            try:
                first = await self._session(link, first)
            finally:
                link.close()
            if first < len(self._batches):
                await asyncio.sleep(self._world.source.uniform(0.01, 0.2))

    async def _session(self, link: Link[LocalTopics], first: int) -> int:
        """Send from batch `first` on. Return the first batch that was not acknowledged when something went wrong."""
        source = self._world.source
        flying: dict[int, asyncio.Future[ProduceResult]] = {}
        following = first
        while first < len(self._batches):
            while following < len(self._batches) and len(flying) < IN_FLIGHT:
                flying[following] = self._send(link, following)
                following += 1
                if source.random() < 0.3:
                    await asyncio.sleep(source.uniform(0, 0.02))
            alone = len(flying) == 1
            try:
                async with asyncio.timeout(self._timeout_s):
                    result = await asyncio.shield(flying[first])
            except (TimeoutError, Down) as error:
                self._world.trace(f"{self._name} hangs up: {type(error).__name__}")
                return first
            except (InvalidProducerEpochError, CorruptBatchError) as error:
                raise Violated(
                    f"a good batch was refused: producer={self._name} batch={first} error={error}"
                ) from error
            except OutOfOrderSequenceError as error:
                # Everything before it was acknowledged, and no current leader may miss an acknowledged record.
                raise Violated(
                    f"the producer's next batch was refused as out of order: producer={self._name} batch={first} "
                    f"alone={alone} error={error}"
                ) from error
            except TidemillError as error:
                self._world.trace(f"{self._name} batch {first} failed: {type(error).__name__}")
                await self._drain(flying)
                return first
            self._acknowledge(first, result)
            self._cluster.durable.vouch(self._partition, result.last_offset + 1, "a batch is acknowledged")
            del flying[first]
            first += 1
        return first

    def _send(self, link: Link[LocalTopics], number: int) -> asyncio.Future[ProduceResult]:
        batch, topic_id = self._batches[number][1], self._cluster.topic.topic_id
        sender = (self._name, self._connections)
        self._world.trace(f"{self._name} sends batch {number} to {link.life}")
        return link.request_nowait(lambda node: node.produce_nowait(topic_id, self._partition, batch, sender=sender))

    async def _drain(self, flying: dict[int, asyncio.Future[ProduceResult]]) -> None:
        """Wait for all batches in flight, since a failed batch is sent again only after them. Late successes count."""
        waiting = list(flying.values())
        await asyncio.wait(waiting, timeout=self._timeout_s)
        for number, future in flying.items():
            if future.done() and future.exception() is None:
                self._acknowledge(number, future.result())

    def _acknowledge(self, number: int, result: ProduceResult) -> None:
        values = self._batches[number][0]
        if result.last_offset - result.base_offset + 1 != len(values):
            raise Violated(f"an acknowledgement covers the wrong count: producer={self._name} batch={number} {result}")
        for i, value in enumerate(values):
            place = (self._partition, result.base_offset + i)
            known = self._cluster.acknowledged.setdefault(value, place)
            if known != place:
                raise Violated(f"one record has two offsets: record={value!r} first={known} second={place}")
        self._world.trace(f"{self._name} batch {number} acknowledged at {self._partition}/{result.base_offset}")


async def consume(cluster: Cluster, partition: int, stop: asyncio.Event) -> None:
    """Read forward from 0, through the leading broker, and remember the records."""
    world, position = cluster.world, 0
    topic_id = cluster.topic.topic_id
    while not stop.is_set():
        broker = cluster.pick(partition)
        if broker is not None:
            read = FetchRead(topic_id, partition, position, 1 << 16)
            link = Link(broker)
            try:
                async with asyncio.timeout(5.0):
                    [found] = await link.request(
                        lambda node, read=read: node.fetch([read], max_wait_s=0.2, min_bytes=1, max_bytes=1 << 20)  # type: ignore[misc]
                    )
                if isinstance(found.error, OffsetOutOfRangeError):
                    position = max(position, found.log_start_offset)
                elif isinstance(found.error, CorruptError):
                    raise Violated(f"acknowledged records are gone: partition={partition} error={found.error}")
                position = cluster.positions["all", partition] = _remember(cluster, partition, position, found.batches)
                cluster.durable.vouch(partition, max(position, found.high_watermark), "a consumer learns of it")
            except (TimeoutError, Down, TidemillError):
                pass
            finally:
                link.close()
        await asyncio.sleep(world.source.uniform(0.05, 0.5))


def _remember(cluster: Cluster, partition: int, position: int, batches: list[Any]) -> int:
    for batch in batches:
        header, columns = decode_columns(batch)
        for offset, value in zip(columns.offsets.tolist(), columns.values, strict=True):
            if offset >= position:
                if offset != position and not cluster.compacted:
                    raise Violated(f"a fetch skipped offsets: partition={partition} from={position} to={offset}")
                assert value is not None
                cluster.seen[partition, offset] = value
                position = offset + 1
        position = max(position, header.next_offset)
    return position


async def nemesis(cluster: Cluster) -> None:
    """Cause crashes, restarts and clock jumps at drawn moments."""
    source = cluster.world.source
    cuts = cluster.fault in CUT_FAULTS
    for _ in range(source.choice((8, 8, 8, 8) if cuts else (0, 1, 2, 4))):
        await asyncio.sleep(source.uniform(0, 1.0) ** 2 * 3.0)
        broker: Actor[Any] = source.choice([*cluster.brokers, cluster.collector])
        if source.random() < 0.2:
            broker.clock.skew_ms = source.choice((-60_000, -500, 500, 60_000))
            cluster.world.trace(f"{broker.life} clock jumps to {broker.clock.skew_ms:+d} ms")
        elif cluster.config and broker is not cluster.collector and (cuts or source.random() < 0.5):
            cut(cluster, broker)
        elif broker.up:
            broker.crash()
            await asyncio.sleep(source.choice((0.0, 0.5, 5.0)))
            await broker.start()


def cut(cluster: Cluster, broker: Actor[LocalTopics]) -> None:
    """Advance the log start to any offset, also within a batch, as DeleteRecords does."""
    for led in broker._node._led.values() if broker._node is not None else ():
        if led.is_open:
            led.advance_log_start(cluster.world.source.randint(0, led.state.high_watermark))
            cluster.world.trace(f"{broker.life} cuts {led.partition}")


async def run(world: World, fault: str = "") -> None:
    with planted(fault):
        await _run(world, fault)


async def _run(world: World, fault: str) -> None:
    source = world.source
    cluster = Cluster(world, fault)
    partitions = source.randint(1, 3)
    metastore = create_metastore(world.consensus, world.objects, world.clock, world.rand(), holder="scenario")
    catalogue = Catalogue(metastore, world.clock, world.rand())
    cluster.topic = await catalogue.create_topic("t", partitions, config=cluster.config)
    kept = bool(cluster.config or cluster.collection_fault or cluster.settings.reconcile)
    if kept and (fault in LIVES_FAULTS or random.Random(f"lives? {world.seed}").random() < 0.3):
        cluster.lives = Lives(cluster, metastore, reader_of(world, metastore))
    else:
        await metastore.aclose()
    for broker in cluster.brokers[: source.randint(2 if fault in HANDOVER_FAULTS else 1, 2)]:
        await broker.start()
    if fault in HANDOVER_FAULTS:
        cluster.brokers[0].crash()  # the other leads when this lease has ended, and gets requests before that
    if kept:
        await cluster.collector.start()
    stop = asyncio.Event()
    async with Crew() as crew:
        producers = [
            crew.spawn(Producer(cluster, f"p{i}", source.randrange(partitions), i + 1 if i < count - 1 else -1).work())
            for count in (source.randint(2, 4),)
            for i in range(count)
        ]
        cluster.positions |= {("all", partition): 0 for partition in range(partitions)}
        consumers = [crew.spawn(consume(cluster, partition, stop)) for partition in range(partitions)]
        for partition in range(partitions if cluster.extra.random() < 0.5 or fault in TRANSACTION_FAULTS else 0):
            producers.append(crew.spawn(Transactor(cluster, f"t{partition}", partition, 100 + partition).work()))
            cluster.positions["committed", partition] = 0
            consumers.append(crew.spawn(consume_committed(cluster, partition, stop)))
        if not cluster.compacted and fault in ("", "below-start"):
            for partition in range(partitions):
                consumers.append(crew.spawn(ask_for_times(cluster, partition, stop)))
        if cluster.lives is not None:
            producers.append(crew.spawn(cluster.lives.work()))
        await crew.spawn(nemesis(cluster))
        await asyncio.wait(producers, timeout=5.0)
        await world.heal()
        if (await asyncio.wait(producers, timeout=ACKNOWLEDGED_S))[1]:
            raise NotLive(f"after healing producers do not end; {world.waiting()}")
        await read_to_the_end(cluster)
        stop.set()
        await asyncio.wait(consumers)
        await world.answered()
        if cluster.collector.up:
            await collected(cluster)
    for actor in world.actors:
        actor.crash()
    metastore = create_metastore(world.consensus, world.objects, world.clock, world.rand(), holder="oracle")
    try:
        await check(cluster, partitions, metastore)
    finally:
        await metastore.aclose()


def reader_of(world: World, metastore: Metastore) -> LogPartitionReader:
    l1 = L1Reader(ExtentStore(metastore, world.clock, world.rand()), world.objects)
    return LogPartitionReader(world.consensus, world.objects, l1)


async def read_to_the_end(cluster: Cluster) -> None:
    """Check liveness: consumers get all acknowledged records from the leader, although nothing more is written."""
    world, topic = cluster.world, cluster.topic
    reader = LogPartitionReader(world.consensus, world.objects)
    ends = {partition: await reader.high_watermark(topic.topic_id, partition) for partition in range(topic.partitions)}

    def behind() -> dict[tuple[str, int], int]:
        return {who: position for who, position in cluster.positions.items() if position < ends[who[1]]}

    try:
        async with asyncio.timeout(READ_S):
            await world.until(lambda: not behind())
    except TimeoutError as error:
        raise Violated(f"after healing consumers do not come to the end: ends={ends} behind={behind()}") from error


async def collected(cluster: Cluster) -> None:
    """Check liveness: unreferenced objects are deleted, also uploads of a dead broker that were never placed."""
    world = cluster.world
    metastore = create_metastore(world.consensus, world.objects, world.clock, world.rand(), holder="collected")
    try:
        until_s = world.loop.time() + COLLECTED_S
        while True:
            if cluster.failure is not None:
                raise cluster.failure
            reader = reader_of(world, metastore)
            moved = await everything_moved(cluster, metastore, reader)
            # Include L1 extents that the log does not know yet, because the partition was not opened since.
            named = {extent.object_key for extent in await metastore.rows(L1_EXTENTS)}
            for partition in range(cluster.topic.partitions):
                end = await reader.high_watermark(cluster.topic.topic_id, partition)
                try:
                    refs = await reader.plan(cluster.topic.topic_id, partition, 0, end)
                except CorruptError as error:
                    raise Violated(f"records are gone: partition={partition} error={error}") from error
                named |= {ref.object_key for ref in refs}
            stored = {meta.key for prefix in ("l0/", "l1/") async for meta in world.objects.list(prefix)}
            left = await cluster.lives.left() if cluster.lives is not None else []
            if stored <= named and moved and not left:
                return
            if world.loop.time() > until_s:
                objects = sorted(stored - named)[:3]
                raise Violated(f"after healing it is not put away: {objects=} {moved=} deleted={left[:5]}")
            await asyncio.sleep(0.5)
    finally:
        await metastore.aclose()


async def read_all(
    reader: LogPartitionReader, cluster: Cluster, partition: int, end: int
) -> tuple[list[tuple[int, bytes]], int]:
    """Return the records of a partition, and the end of its last batch."""
    try:
        batches = await reader.read(await reader.plan(cluster.topic.topic_id, partition, 0, end))
    except CorruptError as error:
        raise Violated(f"records are gone: partition={partition} error={error}") from error
    found: list[tuple[int, bytes]] = []
    reached = 0
    for batch in batches:
        header, columns = decode_columns(batch)
        found += [(at, value or b"") for at, value in zip(columns.offsets.tolist(), columns.values, strict=True)]
        if reached > header.base_offset:
            raise Violated(f"batches overlap: partition={partition} at={header.base_offset} reached={reached}")
        reached = header.next_offset
    return found, reached


async def everything_moved(cluster: Cluster, metastore: Metastore, reader: LogPartitionReader) -> bool:
    """Return whether the whole topic is in L1, in worlds where brokers move batches there."""
    if not cluster.settings.reconcile:
        return True
    ends = {row.partition: row.next for row in await metastore.rows(L1_PARTITIONS, cluster.topic.topic_id)}
    for partition in range(cluster.topic.partitions):
        end = await reader.high_watermark(cluster.topic.topic_id, partition)
        if await reader.log_start(cluster.topic.topic_id, partition) < end and ends.get(partition, 0) < end:
            return False
    return True


async def check(cluster: Cluster, partitions: int, metastore: Metastore) -> None:
    reader = reader_of(cluster.world, metastore)
    logs: dict[int, dict[int, bytes]] = {}
    starts: dict[int, int] = {}
    for partition in range(partitions):
        found: list[tuple[int, bytes]] = []
        end = await reader.high_watermark(cluster.topic.topic_id, partition)
        starts[partition] = start = await reader.log_start(cluster.topic.topic_id, partition)
        if start and not cluster.config:
            raise Violated(f"a topic that keeps everything has forgotten: partition={partition} log_start={start}")
        found, reached = await read_all(reader, cluster, partition, end)
        found = [(offset, value) for offset, value in found if offset >= start]
        logs[partition] = dict(found)
        if not cluster.compacted:
            check_log(partition, found, start)
        if reached != end and end > start:
            raise Violated(f"the log ends elsewhere: partition={partition} high_watermark={end} reached={reached}")

    def superseded(value: bytes, place: Place) -> bool:
        """Return whether compaction may have removed the record."""
        partition, offset = place
        later = (v for at, v in logs[partition].items() if at > offset and cluster.fates.get(v, True))
        return cluster.compacted and (
            not cluster.fates.get(value, True)
            or value not in cluster.keys  # a marker
            or any(cluster.keys.get(other) == cluster.keys[value] for other in later)
        )

    check_acknowledged(logs, cluster.acknowledged, starts, superseded)
    for (name, partition), sent in cluster.sent.items():
        check_producer(name, sent, list(logs[partition].items()))
        missing = [value for value in sent if value not in cluster.acknowledged]
        if missing and cluster.idempotent[name]:
            raise Violated(f"records were never acknowledged: producer={name} records={missing}")
    check_stable(cluster.seen, logs, starts, superseded)
