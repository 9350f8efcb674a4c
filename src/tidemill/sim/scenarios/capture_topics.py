"""The real topic writer and binder on the real topic room, between a model of Postgres and stores with faults.

Faults: every store fault; the capture process dies at any step and begins again at the position the server was last
told; statuses are delayed or lost with the process; a session that fails begins anew in the same process.
Oracle: the position told to the server never passes a commit that no stored binding covers, and no stored binding
passes what the topics hold (P1: confirmed ≤ bound ≤ durable); every binding describes one commit boundary exactly
(B1); after healing every change stands in its topic once and in order, every marker has its binding at its very
commit, and the server is told the last commit.
Replay: python -m tidemill.sim --room capture --seed K --trace
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tidemill.base.errors import TidemillError
from tidemill.base.frontier import ChangePosition
from tidemill.base.tasks import Tasks
from tidemill.capture.bindings import Binder
from tidemill.capture.boundaries import Boundary
from tidemill.capture.changes import Change, Column, Fragment, Marker, Op, Relation, Row
from tidemill.capture.collector import Collector
from tidemill.capture.converter import key_changed
from tidemill.capture.topic_writer import CapturedTable, TopicWriter, position_of
from tidemill.capture.wire.status import Keepalive, Status
from tidemill.metastore.catalogue import Catalogue, TableSnapshot, TopicRow
from tidemill.metastore.open import metastore_on
from tidemill.shards.front import Binding
from tidemill.shards.remap import LogRemap, decode_binding, log_name
from tidemill.sim.world import Actor, Violated, World
from tidemill.topics.batch import decode_batch
from tidemill.topics.leadership import Alone
from tidemill.topics.log import LocalTopics
from tidemill.topics.reader import PartitionReaderImpl
from tidemill.topics.settings import TopicSettings

FAULTS = ("early-confirm", "early-boundary", "lost-notice")
REMAP = "capture/sim"
PRODUCER_ID = 1 << 62
RESTART_S = 0.2


class Database:
    """What Postgres keeps: transactions as fragments, the slot's confirmed position (inclusive), and what it all has
    to become."""

    def __init__(self, world: World, topics: dict[str, TopicRow]) -> None:
        source = world.source
        self.world = world
        self.topics = topics
        self.confirmed = 0
        self.transactions: list[list[Fragment]] = []
        self.wanted: dict[str, list[ChangePosition]] = {name: [] for name in topics}
        """table → the positions of all records its topic must hold, in order"""
        self.tags: dict[str, int] = {}
        self._bindings: list[Binding] = []
        self._relations = [
            Relation(oid, "public", name, (Column("id", 23, -1, "", 0), Column("v", 25, -1, "", -1)))
            for oid, name in enumerate(topics, 1)
        ]
        lsn = 0
        for number in range(source.randint(3, 14)):
            lsn += source.randint(1, 5)
            self._transaction(number, lsn)
        self.last_lsn = lsn

    def _transaction(self, number: int, lsn: int) -> None:
        source, ordinal, fragments = self.world.source, 0, []
        count = source.choice((1, 1, 1, 2, 4))
        for index in range(count):
            changes = []
            for _ in range(source.randint(0 if count == 1 else 1, 3)):
                changes.append(self._change(source.choice(self._relations), ChangePosition(lsn, ordinal)))
                ordinal += 2
            commits = index == count - 1
            markers: tuple[Marker, ...] = ()
            if commits and source.random() < 0.2:
                markers = (Marker(f"tag-{number}"),)
                self.tags[f"tag-{number}"] = lsn
            last = changes[-1].position if changes else ChangePosition(lsn, 0)
            fragments.append(
                Fragment(
                    xid=lsn, commit_lsn=lsn, commit_time_ms=lsn, begins=index == 0, commits=commits,
                    changes=tuple(changes), last=last, markers=markers,
                )
            )  # fmt: skip
        self.transactions.append(fragments)

    def _change(self, relation: Relation, at: ChangePosition) -> Change:
        source = self.world.source
        op: Op = source.choice(("insert", "insert", "update", "update", "delete", "truncate"))
        new: Row = {"id": str(source.randint(0, 3)), "v": "x"}
        old: Row = {"id": str(source.randint(0, 3)), "v": "y"}
        match op:
            case "insert":
                change = Change(relation, op, at, new)
            case "update":
                change = Change(relation, op, at, new, old)
            case "delete":
                change = Change(relation, op, at, None, old)
            case "truncate":
                change = Change(relation, op, at)
        records = self.wanted[relation.table]
        records.append(at)
        if key_changed(change):
            records.append(ChangePosition(at.commit_lsn, at.ordinal + 1))
        elif op == "truncate":
            records += [at] * (self.topics[relation.table].partitions - 1)
        return change

    # oracle ---------------------------------------------------------------------------------------
    def bindings(self) -> list[Binding]:
        """Every binding that ever landed, whole."""
        for record in self.world.consensus.landed.get(log_name(REMAP), [])[len(self._bindings) :]:
            self._bindings.append(decode_binding(record, self._bindings[-1] if self._bindings else None))
        return self._bindings

    def check_told(self, flushed: int) -> None:
        """P1, first half: a commit that is confirmed is bound."""
        stored = self.bindings()
        bound = stored[-1].lsn if stored else 0
        unbound = [t[0].commit_lsn for t in self.transactions if bound < t[0].commit_lsn <= flushed]
        if unbound:
            raise Violated(f"confirmed past what is bound: flushed={flushed} bound={bound} commits={unbound}")

    async def check_bound(self) -> None:
        """P1, second half: what is bound is durable."""
        for binding in self.bindings()[-1:]:
            reader = PartitionReaderImpl(self.world.consensus, self.world.objects)
            for name, topic in self.topics.items():
                for partition, offset in enumerate(binding.offsets.get(topic.topic_id, ())):
                    held = await reader.high_watermark(topic.topic_id, partition)
                    if offset > held:
                        raise Violated(f"bound past what is durable: table={name} bound={offset} held={held}")

    async def check(self) -> None:
        reader = PartitionReaderImpl(self.world.consensus, self.world.objects)
        for name, topic in self.topics.items():
            found: list[ChangePosition] = []
            for partition in range(topic.partitions):
                end = await reader.high_watermark(topic.topic_id, partition)
                batches = await reader.read(await reader.plan(topic.topic_id, partition, 0, end))
                here = [position_of(record) for batch in batches for record in decode_batch(batch).records]
                if here != sorted(set(here)):
                    raise Violated(f"a topic repeats or reorders changes: table={name} held={here}")
                found += here
            if sorted(found) != self.wanted[name]:
                raise Violated(f"a topic misses changes: table={name} held={found} wanted={self.wanted[name]}")
        for binding in self.bindings():
            for name, topic in self.topics.items():
                held = sum(binding.offsets.get(topic.topic_id, ()))
                due = sum(position.commit_lsn <= binding.lsn for position in self.wanted[name])
                if held != due:
                    raise Violated(f"a binding is no commit boundary: {binding} table={name} covers={held} due={due}")
        for tag, lsn in self.tags.items():
            # An idle binding after it hides from the next life that it was bound: it is bound again, at the same place.
            at = {binding.lsn for binding in self.bindings() if binding.tag == tag}
            if at != {lsn}:
                raise Violated(f"a marker is not bound at its commit: tag={tag} commit={lsn} bound={at}")


class EagerWriter(TopicWriter):
    """Plants early-boundary: a commit's boundary goes to the binder when it was handed over, not when it is durable."""

    def _boundary(self, fragment: Fragment, written: ChangePosition | None) -> None:
        super()._boundary(fragment, written)
        self._aligned(fragment.last)


class EagerBinder(Binder):
    """Plants early-confirm: a boundary is reported flushed when it is durable, before a binding covers it."""

    def durable(self, boundaries: list[Boundary]) -> None:  # type: ignore[override]
        super().durable(boundaries)
        for boundary in boundaries:
            self._on_bound(boundary.last)


class Capturing:
    """One capture process: sessions, one after another, as capture/session.py puts them together."""

    def __init__(self, db: Database, actor: Actor[Capturing], topics: LocalTopics, fault: str) -> None:
        self._db = db
        self._actor = actor
        self._topics = topics
        self._fault = fault
        self._world = db.world
        self._tasks = Tasks(self._failed)

    def start(self) -> None:
        self._tasks.spawn(self._sessions(), name="sessions")

    def _failed(self, name: str, error: BaseException) -> None:
        self._world.loop.call_exception_handler({"message": f"{name} failed: {error}", "exception": error})

    async def _sessions(self) -> None:
        while True:
            try:
                await self._session()
            except TidemillError as error:
                self._world.trace(f"{self._actor.life} session ended {type(error).__name__}: {error}")
            await asyncio.sleep(RESTART_S)

    async def _session(self) -> None:
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def fail(_: str, error: BaseException) -> None:
            if not ended.done():
                ended.set_exception(error)

        tasks = Tasks(fail)
        writer: TopicWriter | None = None
        try:
            collector, writer = await self._open(tasks)
            tasks.spawn(self._stream(collector, self._db.confirmed), name="stream")
            tasks.spawn(writer.failed(), name="writer")
            await ended
        finally:
            await tasks.aclose()
            if writer is not None:
                await writer.aclose()

    async def _open(self, tasks: Tasks) -> tuple[Collector, TopicWriter]:
        world, rand, start = self._world, self._world.rand(), self._db.confirmed
        remap = LogRemap(self._actor.consensus(), REMAP, self._actor.clock, rand)
        early = self._fault == "early-confirm"
        collectors: list[Collector] = []

        def bound(position: ChangePosition) -> None:
            if self._fault == "lost-notice" and world.source.random() < 0.3:
                return
            if collectors:
                collectors[0].flushed("topics", position)

        kind = EagerBinder if early else Binder
        binder = kind(remap, self._actor.clock, bound, interval_ms=world.source.choice((1, 50)), idle_ms=500)
        latest = await binder.open()
        tables = []
        for relation in self._db._relations:
            topic = self._db.topics[relation.table]
            table = CapturedTable(relation.name, topic, PRODUCER_ID, oid=relation.oid)
            table.snapshot = TableSnapshot(1, 1, (), 0, 0, (0,) * topic.partitions)
            tables.append(table)
        make: Callable[..., TopicWriter] = EagerWriter if self._fault == "early-boundary" else TopicWriter
        writer = make("topics", tables, self._topics, rand, binder.durable)
        await writer.open(latest.offsets if latest else {}, latest.lsn if latest else 0)
        starts = {t.topic.topic_id: [0] * t.topic.partitions for t in tables}
        binder.start_at(starts | {t: list(o) for t, o in (latest.offsets if latest else {}).items()}, 0)
        status = Status(start)
        collector = Collector(
            [writer],
            status,
            self._actor.clock,
            on_keepalive=writer.progress,
            on_status=lambda: self._tell(status.flushed),
            queue_changes=world.source.choice((2, 20_000)),
        )
        collectors.append(collector)
        tasks.spawn(collector.run(), name="collector")
        tasks.spawn(binder.run(), name="binder")
        return collector, writer

    def _tell(self, flushed: int) -> None:
        self._world.trace(f"status flushed={flushed}")
        self._db.check_told(flushed)
        # In this life's context: a status that is still on its way dies with the connection.
        self._world.loop.call_later(self._world.source.uniform(0, 0.05), self._told, flushed)

    def _told(self, flushed: int) -> None:
        self._db.confirmed = max(self._db.confirmed, flushed)

    async def _stream(self, collector: Collector, start: int) -> None:
        """Everything that commits after `start`, keepalives in between, then keepalives for ever."""
        source, sent = self._world.source, start
        for fragments in self._db.transactions:
            if fragments[0].commit_lsn <= start:
                continue
            for fragment in fragments:
                await asyncio.sleep(source.uniform(0, 0.2) if source.random() < 0.3 else 0)
                if source.random() < 0.3 and sent < fragment.commit_lsn:
                    wal_end = source.randint(sent + 1, fragment.commit_lsn)
                    collector.keepalive(Keepalive(wal_end, False), inside_txn=not fragment.begins)
                await collector.put(fragment)
            sent = fragments[0].commit_lsn
        while True:
            collector.keepalive(Keepalive(sent + 1, False), inside_txn=False)
            await asyncio.sleep(1.0)


async def run(world: World, fault: str = "") -> None:
    source = world.source
    metastore = metastore_on(world.consensus, world.objects, world.clock, world.rand(), holder="scenario")
    catalogue = Catalogue(metastore, world.clock, world.rand())
    names = [f"t{n}" for n in range(source.randint(1, 2))]
    topics = {name: await catalogue.create_topic(name, source.randint(1, 2), kind="capture") for name in names}
    await metastore.aclose()
    db = Database(world, topics)
    settings = TopicSettings(
        object_bytes=source.choice((300, 1 << 20)),
        uploads_in_flight=source.randint(1, 4),
        linger_s=source.choice((0.0, 0.0, 0.05)),
        append_budget_s=source.choice((0.5, 10.0)),
    )

    async def build(actor: Actor[Capturing]) -> Capturing:
        consensus, objects, rand = actor.consensus(), actor.objects(), world.rand()
        own = metastore_on(consensus, objects, actor.clock, rand, holder=str(actor.life))
        node = LocalTopics(
            consensus,
            objects,
            Catalogue(own, actor.clock, rand),
            clock=actor.clock,
            rand=rand,
            assignment=Alone(actor.name, actor.life.number),
            settings=settings,
        )
        await node.start()
        process = Capturing(db, actor, node, fault)
        process.start()
        return process

    capture = Actor(world, "capture", build)
    await capture.start()
    for _ in range(source.choice((0, 1, 2, 4))):
        await asyncio.sleep(source.uniform(0, 1.0) ** 2 * 2)
        capture.crash()
        await db.check_bound()
        await asyncio.sleep(source.uniform(0, 0.1))
        await capture.start()
    await asyncio.sleep(source.uniform(0, 2.0))
    await world.heal()
    last_tag = max(db.tags.values(), default=0)

    def done() -> bool:
        stored = db.bindings()
        return bool(stored) and db.confirmed >= db.last_lsn and stored[-1].lsn >= max(db.last_lsn, last_tag)

    await world.until(lambda: bool(world.loop.failures) or done())
    if not world.loop.failures:
        await db.check()
