"""A month of a small cluster, day by day: the amount of stored data stays level.

The cluster has one busy topic that forgets after half a day, idle topics, a topic that lives for one day, producers
that come and go, and one node that starts again every day, after an orderly stop or after a crash with batches in
flight. A day is half a minute of the node's life, followed by a clock jump to the next day. The stores have no faults:
the worlds of the rooms cover those.
Oracle: from the third day on, in the evening, records and objects of each kind grow by at most a tenth, and everything
within retention is there.
Replay: ./dev sim --room calendar --seed K --trace
"""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec

from sim.world import Actor, Violated, World
from tidemill.base.errors import TidemillError, UnavailableError
from tidemill.base.runtime.tasks import Tasks
from tidemill.maintenance.scheduler import JobContext, Retention, StepBudget
from tidemill.maintenance.topics.l0_garbage import L0GarbageCollector
from tidemill.maintenance.topics.rollups import RollupCollector
from tidemill.metastore.catalogue import Catalogue, TopicRow
from tidemill.metastore.domain.settings import DomainSettings
from tidemill.metastore.factory import create_metastore
from tidemill.topics.batch import Record, encode_batch
from tidemill.topics.config.settings import TopicSettings
from tidemill.topics.local_topics import LocalTopics
from tidemill.topics.membership import SingleNodeAssignment
from tidemill.topics.partition_reader import LogPartitionReader

DAY_MS = 86_400_000
AWAKE_S = 40.0
DAYS = 6
IDLE_TOPICS = 12
BATCHES = 40
SETTLED_DAY = 3
TOLERANCE = 0.10
SLACK = 14
"""Tolerated records or objects of one kind: a rollup is due today or tomorrow; a crash leaves work in flight."""

NO_COLLECTOR = "no-keeper"

Evening = Counter[str]


class Month:
    def __init__(self, world: World, fault: str, idle_topics: int) -> None:
        self.world = world
        self.fault = fault
        self.idle_topics = idle_topics
        self.node: Actor[LocalTopics] = Actor(world, "node", self._build)
        self.catalogue: Catalogue
        self.topics: dict[str, TopicRow] = {}
        self.broken: BaseException | None = None

    async def _build(self, actor: Actor[LocalTopics]) -> LocalTopics:
        consensus, objects, clock = actor.consensus(), actor.objects(), actor.clock
        rand = self.world.rand()
        options = msgspec.structs.replace(DomainSettings().options, gc_delay_ms=5_000)
        settings = DomainSettings(lead=True, persist_interval_s=2.0, options=options)
        metastore = create_metastore(consensus, objects, clock, rand, holder=str(actor.life), settings=settings)
        self.catalogue = Catalogue(metastore, clock, rand)
        node = LocalTopics(
            consensus,
            objects,
            self.catalogue,
            clock=clock,
            rand=rand,
            assignment=SingleNodeAssignment("node", actor.life.number),
            settings=TopicSettings(retention_check_s=2.0, settle_after_s=20.0, rollup_records=16),
        )
        await node.start()
        if self.fault != NO_COLLECTOR:
            context = JobContext(consensus, objects, metastore, clock, rand, Retention(collect_after_s=4.0))
            collectors = L0GarbageCollector(context, quiet_s=10.0), RollupCollector(context)

            async def keep() -> None:
                while True:
                    for collector in collectors:
                        try:
                            await collector.run(StepBudget(clock, 1))
                        except TidemillError as error:
                            self.world.trace(f"a round ends: {error}")
                    await asyncio.sleep(2.0)

            Tasks(self._failed).spawn(keep(), name="keep")
        return node

    def _failed(self, name: str, error: BaseException) -> None:
        self.broken = error

    async def day(self, number: int) -> Evening:
        """Run one life of the node; return the stored data after its end."""
        source = self.world.source
        self.node.clock.skew_ms = number * DAY_MS
        await self.node.start()
        if number == 0:
            await self._create("busy", {"retention.ms": str(DAY_MS // 2)}, 2)
            for index in range(self.idle_topics):
                await self._create(f"idle{index}", {}, 1)
                await self._produce(f"idle{index}", 1)
        await self._create(f"day{number}", {}, 1)
        await self._produce(f"day{number}", 5)
        if number:
            await self.node.enter(lambda _: self.catalogue.delete(TopicRow, f"day{number - 1}"))
        for _ in range(BATCHES):
            await self._produce("busy", 1)
            await asyncio.sleep(source.uniform(0.0, 0.2))
        await asyncio.sleep(AWAKE_S - 10.0)
        if self.broken is not None:
            raise self.broken
        await self._check(number)
        if source.random() < 0.3:
            self.node.enter(lambda node: node.produce_nowait(*self._place("busy"), self._batch()))
        elif source.random() < 0.7:
            await self.node.enter(lambda node: node.aclose())
        self.node.crash()
        return self._stored()

    async def _create(self, name: str, config: dict[str, str], partitions: int) -> None:
        row = await self.node.enter(lambda _: self.catalogue.create_topic(name, partitions, config=config))
        self.topics[name] = row

    def _place(self, name: str) -> tuple[str, int]:
        row = self.topics[name]
        return row.topic_id, self.world.source.randrange(row.partitions)

    def _batch(self) -> bytes:
        return encode_batch([Record(None, b"v" * 40, timestamp_ms=self.node.clock.now_ms())])

    async def _produce(self, name: str, count: int) -> None:
        """Produce like a client, with retries: a partition that settles has its leader again a moment later."""
        for _ in range(count):
            place, batch = self._place(name), self._batch()
            while True:
                try:
                    await self.node.enter(lambda node, place=place, batch=batch: node.produce_nowait(*place, batch))  # type: ignore[misc]
                    break
                except UnavailableError:
                    await asyncio.sleep(0.05)

    async def _check(self, number: int) -> None:
        """Check that today's records and those of idle topics are readable, and that yesterday's busy ones are gone."""
        reader = LogPartitionReader(self.world.consensus, self.world.objects)
        for name, row in self.topics.items():
            if name.startswith("day") and name != f"day{number}":
                continue
            kept = 0
            for partition in range(row.partitions):
                end = await reader.high_watermark(row.topic_id, partition)
                kept += len(await reader.read(await reader.plan(row.topic_id, partition, 0, end)))
            if name == "busy" and not BATCHES <= kept <= BATCHES + 1:
                raise Violated(f"retention kept the wrong number of batches: day={number + 1} batches={kept}")
            if name.startswith("idle") and kept != 1:
                raise Violated(f"an idle topic lost its record: topic={name} batches={kept}")

    def _stored(self) -> Evening:
        found: Evening = Counter()
        for key in self.world.objects._objects:
            found[f"objects {key.partition('/')[0]}"] += 1
        for log, records in self.world.consensus.state.records.items():
            found[f"records {log.partition('/')[0]}"] += len(records)
        found["registers"] = len(self.world.consensus.state.registers)
        found["leases"] = len(self.world.consensus.state.leases)
        return found


async def run(world: World, fault: str = "") -> None:
    await month(world, fault)


async def month(world: World, fault: str = "", *, days: int = DAYS, idle_topics: int = IDLE_TOPICS) -> list[Evening]:
    """Return the amounts of stored data of each evening. Raises Violated."""
    world.faults.heal()
    cluster = Month(world, fault, idle_topics)
    evenings = []
    for number in range(days):
        evenings.append(await cluster.day(number))
        world.trace(f"day {number + 1} {sorted(evenings[-1].items())}")
    settled, last = evenings[SETTLED_DAY - 1], evenings[-1]
    for kind, count in last.items():
        if count > settled[kind] * (1 + TOLERANCE) + SLACK:
            raise Violated(f"stored data grows: {kind} day {SETTLED_DAY} {settled[kind]} → day {days} {count}")
    return evenings
