"""Producers, brokers and consumers on the real topic room.

Faults: every store fault; two brokers on the same stores that die at any step, start again, stall, and have
wrong wall clocks; in every fourth world both believe that they lead everything, so they fence each other.
Producers keep up to five batches in flight on one connection and resend from the first unanswered one, as
Kafka's do; connections break with their broker or by timeout.
Oracle: offsets contiguous, acknowledged records stand, idempotent ones once and in order, nothing a
consumer saw goes away, no batch that is its producer's next is refused as out of order; after healing
everything is acknowledged.
Replay: python -m tidemill.sim --room topics --seed K --trace
"""

from __future__ import annotations

import asyncio
from typing import Any

from tidemill.base.errors import TidemillError
from tidemill.metastore.catalogue import Catalogue, TopicRow
from tidemill.metastore.open import metastore_on
from tidemill.sim.oracles.topics import Place, check_acknowledged, check_log, check_producer, check_stable
from tidemill.sim.world import Actor, Crew, Down, Link, Violated, World
from tidemill.topics.batch import Record, decode_columns, encode_batch
from tidemill.topics.front import (
    CorruptBatch,
    FetchRead,
    InvalidProducerEpoch,
    OutOfOrderSequence,
    ProduceResult,
)
from tidemill.topics.leadership import Alone, Assignment, Membership, NodeInfo
from tidemill.topics.log import LocalTopics
from tidemill.topics.reader import PartitionReaderImpl
from tidemill.topics.settings import TopicSettings

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
        )
        self.brokers = [Actor(world, name, self._build) for name in ("broker-a", "broker-b")]
        self.acknowledged: dict[bytes, Place] = {}
        self.sent: dict[tuple[str, int], list[bytes]] = {}
        self.seen: dict[Place, bytes] = {}
        self.topic: TopicRow

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
    """One producer on one partition. Without id it only promises that what was acknowledged stands."""

    def __init__(self, cluster: Cluster, name: str, partition: int, producer_id: int) -> None:
        source = cluster.world.source
        self._cluster = cluster
        self._world = cluster.world
        self._name = name
        self._partition = partition
        self._timeout_s = source.choice((0.5, 3.0, 15.0))
        self._batches: list[tuple[list[bytes], bytes]] = []
        sequence, count = 0, source.randint(2, 7)
        for number in range(count):
            values = [f"{name}:{number}.{i}".encode() for i in range(source.randint(1, 3))]
            batch = encode_batch(
                [Record(None, value, timestamp_ms=self._world.clock.now_ms()) for value in values],
                producer_id=producer_id,
                producer_epoch=0 if producer_id >= 0 else -1,
                base_sequence=sequence if producer_id >= 0 else -1,
            )
            self._batches.append((values, batch))
            sequence += len(values)
        if producer_id >= 0:
            cluster.sent[name, partition] = [value for values, _ in self._batches for value in values]
        self._idempotent = producer_id >= 0

    async def work(self) -> None:
        """Get everything acknowledged, over as many connections as it takes."""
        first = 0
        while first < len(self._batches):
            broker = self._cluster.pick(self._partition)
            if broker is None:
                await asyncio.sleep(0.1)
                continue
            link = Link(broker, delay_s=self._world.source.choice((0.0, 0.001, 0.05)))
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
        self._world.trace(f"{self._name} sends batch {number} to {link.life}")
        return link.request_nowait(lambda node: node.produce_nowait(topic_id, self._partition, batch))

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
            if known != place and self._idempotent:
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
                position = _remember(cluster, partition, position, found.batches)
            except (TimeoutError, Down, TidemillError):
                pass
            finally:
                link.close()
        await asyncio.sleep(world.source.uniform(0.05, 0.5))


def _remember(cluster: Cluster, partition: int, position: int, batches: list[Any]) -> int:
    for batch in batches:
        _, columns = decode_columns(batch)
        for offset, value in zip(columns.offsets, columns.values, strict=True):
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
        broker = source.choice(cluster.brokers)
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
    cluster.topic = await Catalogue(metastore, world.clock, world.rand()).create_topic("t", partitions)
    await metastore.aclose()
    for broker in cluster.brokers[: source.randint(1, 2)]:
        await broker.start()
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
    await check(cluster, partitions)


async def check(cluster: Cluster, partitions: int) -> None:
    reader = PartitionReaderImpl(cluster.world.consensus, cluster.world.objects)
    logs: dict[int, list[tuple[int, bytes]]] = {}
    for partition in range(partitions):
        found: list[tuple[int, bytes]] = []
        end = await reader.high_watermark(cluster.topic.topic_id, partition)
        for batch in await reader.read(await reader.plan(cluster.topic.topic_id, partition, 0, end)):
            _, columns = decode_columns(batch)
            found += zip(columns.offsets, [value or b"" for value in columns.values], strict=True)
        logs[partition] = found
        check_log(partition, found)
        if len(found) != end:
            raise Violated(f"the log ends elsewhere: partition={partition} high_watermark={end} records={len(found)}")
    check_acknowledged(logs, cluster.acknowledged)
    for (name, partition), sent in cluster.sent.items():
        check_producer(name, sent, logs[partition])
        missing = [value for value in sent if value not in cluster.acknowledged]
        if missing:
            raise Violated(f"records were never acknowledged: producer={name} records={missing}")
    check_stable(cluster.seen, logs)
