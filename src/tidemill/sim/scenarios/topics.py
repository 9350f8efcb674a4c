"""Producers, brokers and consumers on the real topic room.

Faults: every store fault; two brokers on the same stores that die at any step, start again, stall, and have
wrong wall clocks; in every fourth world both believe that they lead everything, so they fence each other.
Producers keep up to five batches in flight on one connection and resend from the first unanswered one, as
Kafka's do; connections break with their broker or by timeout.
Oracle: offsets contiguous, acknowledged records stand, idempotent ones once and in order, those of a producer without
id in the order of each of its connections, nothing a consumer saw goes away, no batch that is its producer's next is
refused as out of order; after healing everything is acknowledged. In two of three worlds the topic forgets by size or
time and a keeper collects objects meanwhile: everything above the log's start is there, below it nothing is asked.
Replay: python -m tidemill.sim --room topics --seed K --trace
"""

from __future__ import annotations

import asyncio
from typing import Any

from tidemill.base.errors import Corrupt, TidemillError
from tidemill.base.tasks import Tasks
from tidemill.keeper.grounds import Grounds, Retention
from tidemill.keeper.jobs import Budget
from tidemill.keeper.topic_objects import TopicObjects
from tidemill.metastore.catalogue import Catalogue, TopicRow
from tidemill.metastore.open import metastore_on
from tidemill.metastore.settings import DomainSettings
from tidemill.sim.oracles.topics import Place, check_acknowledged, check_log, check_producer, check_stable
from tidemill.sim.world import Actor, Crew, Down, Link, Violated, World
from tidemill.topics.batch import Record, decode_columns, encode_batch
from tidemill.topics.front import (
    CorruptBatch,
    FetchRead,
    InvalidProducerEpoch,
    OffsetOutOfRange,
    OutOfOrderSequence,
    ProduceResult,
)
from tidemill.topics.leadership import Alone, Assignment, Membership, NodeInfo
from tidemill.topics.log import LocalTopics
from tidemill.topics.reader import PartitionReaderImpl
from tidemill.topics.settings import TopicSettings

COLLECTION_FAULTS = ("first-region", "undecided")
EAGER = DomainSettings(lead=True, persist_interval_s=0.5)

IN_FLIGHT = 5
"""Kafka's limit for idempotent producers: the broker remembers five batches."""


class Cluster:
    """The topic, its brokers, and what clients were told."""

    def __init__(self, world: World, fault: str) -> None:
        source = world.source
        self.world = world
        self.quarrel = world.seed % 4 == 3
        self.settings = TopicSettings(
            object_bytes=source.choice((300, 2_000, 1 << 20)),
            uploads_in_flight=source.randint(1, 4),
            linger_s=source.choice((0.0, 0.0, 0.01, 0.1)),
            group_batches=source.choice((1, 3, 1024)),
            append_budget_s=source.choice((0.5, 10.0)),
            rollup_records=source.choice((2, 8, 4096)),
            cache_bytes=source.choice((0, 1 << 20)),
            reserve_after_upload=fault == "seed000",
            unordered_without_id=fault == "unordered-connection",
            retention_check_s=source.choice((0.05, 0.5)),
            settle_after_s=source.choice((0.2, 3600.0)),
        )
        size = source.choice(("0", "300", "900"))
        self.config: dict[str, str] = source.choice(({}, {"retention.bytes": size}, {"retention.ms": "700"}))
        self.keeper = Actor(world, "keeper", self._build_keeper)
        self.collection_fault = fault if fault in COLLECTION_FAULTS else ""
        self.brokers = [Actor(world, name, self._build) for name in ("broker-a", "broker-b")]
        self.acknowledged: dict[bytes, Place] = {}
        self.sent: dict[tuple[str, int], list[bytes]] = {}
        self.idempotent: dict[str, bool] = {}
        """producer, and connection where it has no id → must every one of its records be acknowledged"""
        self.seen: dict[Place, bytes] = {}
        self.topic: TopicRow
        self.failure: BaseException | None = None

    async def _build_keeper(self, actor: Actor[TopicObjects]) -> TopicObjects:
        """One that collects all the time: at once, or after a while in which batches are on their way."""
        consensus, objects, rand = actor.consensus(), actor.objects(), self.world.rand()
        metastore = metastore_on(consensus, objects, actor.clock, rand, holder=str(actor.life), settings=EAGER)
        retention = Retention(collect_after_s=self.world.source.choice((0.0, 0.5)))
        grounds = Grounds(consensus, objects, metastore, actor.clock, rand, retention)
        keeper = TopicObjects(grounds, quiet_s=2.0, fault=self.collection_fault)

        async def collect() -> None:
            while True:
                try:
                    await keeper.run(Budget(actor.clock, 1))
                except TidemillError as error:
                    self.world.trace(f"{actor.life} round ends: {type(error).__name__}")
                await asyncio.sleep(0.1)

        self.collecting = Tasks(self._broken)
        self.collecting.spawn(collect(), name="collect")
        return keeper

    def _broken(self, name: str, error: BaseException) -> None:
        self.failure = error

    async def _build(self, actor: Actor[LocalTopics]) -> LocalTopics:
        consensus, rand = actor.consensus(), self.world.rand()
        assignment: Assignment
        if self.quarrel:
            assignment = Alone(actor.name, actor.life.number)
        else:
            membership = Membership(consensus, actor.name, NodeInfo(), actor.clock, rand, ttl_ms=3_000)
            await membership.start()
            assignment = membership
        objects = actor.objects()
        metastore = metastore_on(consensus, objects, actor.clock, rand, holder=str(actor.life))
        node = LocalTopics(
            consensus,
            objects,
            Catalogue(metastore, actor.clock, rand),
            clock=actor.clock,
            rand=rand,
            assignment=assignment,
            settings=self.settings,
        )
        await node.start()
        return node

    def pick(self, partition: int) -> Actor[LocalTopics] | None:
        """A broker to talk to: usually the one that another broker names as leader."""
        running = [broker for broker in self.brokers if broker.up and broker._node is not None]
        if not running:
            return None
        if self.quarrel and not self.world.faults.healed:
            return self.world.source.choice(running)
        leader = running[0].node.leader_of(self.topic.topic_id, partition)
        return next((broker for broker in running if broker.name == leader), running[0])


class Producer:
    """One producer on one partition. Without id it promises the order of each connection, and that what was
    acknowledged stands: each of its records says by which connection it came."""

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
        """All batches anew, as they go over this connection; an idempotent producer's never change."""
        self._batches = []
        sequence = 0
        for number, count in enumerate(self._counts):
            values = [f"{self._name}{connection}:{number}.{i}".encode() for i in range(count)]
            batch = encode_batch(
                [Record(None, value, timestamp_ms=self._world.clock.now_ms()) for value in values],
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
        """Get everything acknowledged, over as many connections as it takes."""
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
        """Send from batch `first` on; returns the first one not acknowledged when something went wrong."""
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
            except (InvalidProducerEpoch, CorruptBatch) as error:
                raise Violated(
                    f"a good batch was refused: producer={self._name} batch={first} error={error}"
                ) from error
            except OutOfOrderSequence as error:
                # Everything before it was acknowledged: no leader that leads may miss anything (T4).
                raise Violated(
                    f"the producer's next batch was refused as out of order: producer={self._name} batch={first} "
                    f"alone={alone} error={error}"
                ) from error
            except TidemillError as error:
                self._world.trace(f"{self._name} batch {first} failed: {type(error).__name__}")
                await self._drain(flying)
                return first
            self._acknowledge(first, result)
            del flying[first]
            first += 1
        return first

    def _send(self, link: Link[LocalTopics], number: int) -> asyncio.Future[ProduceResult]:
        batch, topic_id = self._batches[number][1], self._cluster.topic.topic_id
        sender = (self._name, self._connections)
        self._world.trace(f"{self._name} sends batch {number} to {link.life}")
        return link.request_nowait(lambda node: node.produce_nowait(topic_id, self._partition, batch, sender=sender))

    async def _drain(self, flying: dict[int, asyncio.Future[ProduceResult]]) -> None:
        """A failed batch is sent again only when no later one is under way. Late successes count."""
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
    """Read forward from 0, through whichever broker leads, and remember what was given."""
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
                if isinstance(found.error, OffsetOutOfRange):
                    position = max(position, found.log_start_offset)
                elif isinstance(found.error, Corrupt):
                    raise Violated(f"acknowledged records are gone: partition={partition} error={found.error}")
                position = _remember(cluster, partition, position, found.batches)
            except (TimeoutError, Down, TidemillError):
                pass
            finally:
                link.close()
        await asyncio.sleep(world.source.uniform(0.05, 0.5))


def _remember(cluster: Cluster, partition: int, position: int, batches: list[Any]) -> int:
    for batch in batches:
        _, columns = decode_columns(batch)
        for offset, value in zip(columns.offsets.tolist(), columns.values, strict=True):
            if offset >= position:
                if offset != position:
                    raise Violated(f"a fetch skipped offsets: partition={partition} from={position} to={offset}")
                assert value is not None
                cluster.seen[partition, offset] = value
                position = offset + 1
    return position


async def nemesis(cluster: Cluster) -> None:
    """Crashes, restarts and clock jumps at drawn moments."""
    source = cluster.world.source
    for _ in range(source.choice((0, 1, 2, 4))):
        await asyncio.sleep(source.uniform(0, 1.0) ** 2 * 3.0)
        broker: Actor[Any] = source.choice([*cluster.brokers, cluster.keeper])
        if source.random() < 0.2:
            broker.clock.skew_ms = source.choice((-60_000, -500, 500, 60_000))
            cluster.world.trace(f"{broker.life} clock jumps to {broker.clock.skew_ms:+d} ms")
        elif broker.up:
            broker.crash()
            await asyncio.sleep(source.choice((0.0, 0.5, 5.0)))
            await broker.start()


async def run(world: World, fault: str = "") -> None:
    source = world.source
    cluster = Cluster(world, fault)
    partitions = source.randint(1, 3)
    metastore = metastore_on(world.consensus, world.objects, world.clock, world.rand(), holder="scenario")
    catalogue = Catalogue(metastore, world.clock, world.rand())
    cluster.topic = await catalogue.create_topic("t", partitions, config=cluster.config)
    await metastore.aclose()
    for broker in cluster.brokers[: source.randint(1, 2)]:
        await broker.start()
    if cluster.config or cluster.collection_fault:
        await cluster.keeper.start()
    stop = asyncio.Event()
    async with Crew() as crew:
        producers = [
            crew.spawn(Producer(cluster, f"p{i}", source.randrange(partitions), i + 1 if i < count - 1 else -1).work())
            for count in (source.randint(2, 4),)
            for i in range(count)
        ]
        consumers = [crew.spawn(consume(cluster, partition, stop)) for partition in range(partitions)]
        await crew.spawn(nemesis(cluster))
        await asyncio.wait(producers, timeout=5.0)
        await world.heal()
        await asyncio.wait(producers)
        stop.set()
        await asyncio.wait(consumers)
        if cluster.keeper.up:
            await collected(cluster)
    for actor in world.actors:
        actor.crash()
    await check(cluster, partitions)


async def collected(cluster: Cluster) -> None:
    """Liveness: what no log names goes, also what was uploaded by a broker that died and never placed."""
    world = cluster.world
    while True:
        if cluster.failure is not None:
            raise cluster.failure
        reader = PartitionReaderImpl(world.consensus, world.objects)
        named: set[str] = set()
        for partition in range(cluster.topic.partitions):
            end = await reader.high_watermark(cluster.topic.topic_id, partition)
            named |= {ref.object_key for ref in await reader.plan(cluster.topic.topic_id, partition, 0, end)}
        left = {meta.key async for meta in world.objects.list("l0/")} - named
        if not left:
            return
        await asyncio.sleep(0.5)


async def check(cluster: Cluster, partitions: int) -> None:
    reader = PartitionReaderImpl(cluster.world.consensus, cluster.world.objects)
    logs: dict[int, dict[int, bytes]] = {}
    starts: dict[int, int] = {}
    for partition in range(partitions):
        found: list[tuple[int, bytes]] = []
        end = await reader.high_watermark(cluster.topic.topic_id, partition)
        starts[partition] = start = await reader.log_start(cluster.topic.topic_id, partition)
        if start and not cluster.config:
            raise Violated(f"a topic that keeps everything has forgotten: partition={partition} log_start={start}")
        for batch in await reader.read(await reader.plan(cluster.topic.topic_id, partition, 0, end)):
            _, columns = decode_columns(batch)
            found += zip(columns.offsets.tolist(), [value or b"" for value in columns.values], strict=True)
        logs[partition] = dict(found)
        check_log(partition, found, start)
        if len(found) != end - start:
            raise Violated(f"the log ends elsewhere: partition={partition} high_watermark={end} records={len(found)}")
    check_acknowledged(logs, cluster.acknowledged, starts)
    for (name, partition), sent in cluster.sent.items():
        check_producer(name, sent, list(logs[partition].items()))
        missing = [value for value in sent if value not in cluster.acknowledged]
        if missing and cluster.idempotent[name]:
            raise Violated(f"records were never acknowledged: producer={name} records={missing}")
    check_stable(cluster.seen, logs, starts)
