"""The real collector, flush tracker and status table between a model of Postgres and durable consumers.

Whole transactions arrive alone or in batches, which differ in each life of the process.

Faults: storages flush at any moment, also in the middle of a transaction, and may report a position slightly beyond
their last write if nothing else is left to write; the capture process dies at any step and begins again at the last
position confirmed to the server; statuses are delayed, or lost with the process.
Oracle (no early confirm): the position confirmed to the server never passes the position that every storage holds.
After any crash each storage holds every change once, in order. When everything is flushed, the last commit is
confirmed to the server.
Replay: ./dev sim --room capture --seed K --trace
"""

from __future__ import annotations

import asyncio
import random
from collections import deque

from sim.scenarios.capture_plants import EagerCollector, EqualityTracker, LastOnlyTracker, RawNotices, StaleStatus
from sim.world import Actor, Violated, World
from tidemill.base.lsn import ChangePosition
from tidemill.base.runtime.tasks import Tasks
from tidemill.capture.changes import Change, Fragment, Relation
from tidemill.capture.decode.batches import BatchBuilder
from tidemill.capture.decode.row_blocks import ChangePart
from tidemill.capture.delivery.collector import Collector
from tidemill.capture.delivery.consumers import FlushNotices
from tidemill.capture.delivery.flush_alignment import FlushAlignment
from tidemill.capture.postgres.standby_status import Keepalive, ReplicationStatus

FAULTS = ("seed002", "near-miss", "early-keepalive", "early-register", "early-batch")


class Server:
    """State of Postgres: transactions as fragments, and the slot's confirmed position (inclusive)."""

    def __init__(self, world: World, tables: int) -> None:
        source = world.source
        self.confirmed = 0
        self.transactions: list[list[Fragment]] = []
        self.wanted: dict[str, list[ChangePosition]] = {f"t{i}": [] for i in range(tables)}
        relations = [Relation(i, "public", f"t{i}", ()) for i in range(tables)]
        lsn = 0
        for _ in range(source.randint(3, 12)):
            lsn += source.randint(1, 5)
            ordinal = 0
            fragments: list[Fragment] = []
            count = source.choice((1, 1, 2, 4))
            for index in range(count):
                changes = []
                for _ in range(source.randint(1, 3)):
                    table = source.choice(relations)
                    changes.append(Change(table, "insert", ChangePosition(lsn, ordinal)))
                    self.wanted[table.table].append(ChangePosition(lsn, ordinal))
                    ordinal += 1
                begins, commits = index == 0, index == count - 1
                last = changes[-1].position
                fragments.append(Fragment(lsn, lsn, 0, begins, commits, tuple(changes), last))
            self.transactions.append(fragments)
        self.last_lsn = lsn

    def check(self, flushed: int, storages: dict[str, Storage]) -> None:
        for name, positions in self.wanted.items():
            held = storages[name].durable
            due = [position for position in positions if position.commit_lsn <= flushed]
            if held[: len(due)] != due:
                raise Violated(f"confirmed past what is durable: flushed={flushed} consumer={name} held={len(held)}")


class Storage:
    """Disk of one consumer; it survives the process."""

    def __init__(self) -> None:
        self.durable: list[ChangePosition] = []


class Consumer:
    """State of one consumer in memory: a buffer in front of its storage."""

    def __init__(self, storage: Storage, fault: str) -> None:
        self.storage = storage
        self.logic = RawNotices() if fault == "seed002" else FlushAlignment()
        self.buffer: deque[ChangePosition] = deque()
        self.sent = ChangePosition(0, 0)
        """The last change that this life of the process delivered."""
        self.open = False
        """True while a part of an uncommitted transaction has arrived."""


class Consumers:
    """Implementation of consumers.Sink for all consumers of one process."""

    def __init__(self, world: World, consumers: dict[str, Consumer], tasks: Tasks) -> None:
        self._world = world
        self._consumers = consumers
        self._tasks = tasks

    async def deliver(self, fragment: Fragment, notices: FlushNotices) -> list[str]:
        touched = []
        for name, consumer in self._consumers.items():
            own = [change.position for change in fragment.changes if change.relation.table == name]
            held = consumer.storage.durable
            # A replay: changes that the storage already holds are not written again, but still reported.
            fresh = [position for position in own if not held or position > held[-1]]
            consumer.open = not fragment.commits and (consumer.open or bool(own))
            if own:
                consumer.sent = own[-1]
                touched.append(name)
                consumer.buffer.extend(fresh)
            notice = consumer.logic.record_fragment(own[-1] if own else None, fragment.last, commits=fragment.commits)
            if notice is not None:
                notices.report_flushed(name, notice)
            if own and not consumer.buffer:
                self._report(name, consumer, held[-1], notices)
            elif own:
                self._tasks.spawn(self._flush(name, consumer, notices), name=f"flush {name}")
            if self._world.source.random() < 0.2:
                await asyncio.sleep(self._world.source.uniform(0, 0.02))
        return touched

    async def _flush(self, name: str, consumer: Consumer, notices: FlushNotices) -> None:
        """Make everything buffered durable some time later, or first only a part of it."""
        source = self._world.source
        while consumer.buffer:
            await asyncio.sleep(source.uniform(0, 0.1))
            if not consumer.buffer:
                return
            for _ in range(source.randint(1, len(consumer.buffer))):
                consumer.storage.durable.append(consumer.buffer.popleft())
            self._report(name, consumer, consumer.storage.durable[-1], notices)

    def _report(self, name: str, consumer: Consumer, position: ChangePosition, notices: FlushNotices) -> None:
        beyond = not consumer.buffer and not consumer.open and self._world.source.random() < 0.3
        if beyond and position == consumer.sent:  # an earlier life may have stored a part of what follows
            position = ChangePosition(position.commit_lsn, position.ordinal + 1)
        notice = consumer.logic.record_flush(position)
        if notice is not None:
            notices.report_flushed(name, notice)

    async def aclose(self) -> None:
        return None


class Process:
    """Capture process: collector, sink and the stream that feeds them."""

    def __init__(self, world: World, server: Server, storages: dict[str, Storage], fault: str) -> None:
        self._world = world
        self._server = server
        self._storages = storages
        self._tasks = Tasks(self._failed)
        consumers = {name: Consumer(storage, fault) for name, storage in storages.items()}
        self._status = (StaleStatus if fault == "early-keepalive" else ReplicationStatus)(server.confirmed)
        kind = EagerCollector if fault == "early-register" else Collector
        self._collector = kind(
            [Consumers(world, consumers, self._tasks)],
            self._status,
            world.clock,
            on_status=self._tell,
            queue_changes=world.source.choice((2, 20_000)),
        )
        if fault == "near-miss":
            self._collector.tracker = EqualityTracker()
        elif fault == "early-batch":
            self._collector.tracker = LastOnlyTracker()
        self._batch = BatchBuilder()
        self._reads = random.Random(f"reads {world.seed}")  # the rest of a world does not depend on it

    def _failed(self, name: str, error: BaseException) -> None:
        self._world.loop.call_exception_handler({"message": f"{name} failed: {error}", "exception": error})

    def start(self) -> None:
        self._tasks.spawn(self._collector.run(), name="collector")
        self._tasks.spawn(self._stream(self._server.confirmed), name="stream")

    def _tell(self) -> None:
        flushed = self._status.flushed
        self._world.trace(f"status flushed={flushed}")
        self._server.check(flushed, self._storages)
        # In this life's context: a status in flight dies with the connection.
        self._world.loop.call_later(self._world.source.uniform(0, 0.05), self._reported, flushed)

    def _reported(self, flushed: int) -> None:
        self._server.confirmed = max(self._server.confirmed, flushed)

    async def _stream(self, start: int) -> None:
        """Stream everything that commits after `start`, with keepalives in between, then only keepalives, forever."""
        source, sent = self._world.source, start
        for fragments in self._server.transactions:
            if fragments[0].commit_lsn <= start:
                continue
            for fragment in fragments:
                await asyncio.sleep(source.uniform(0, 0.05) if source.random() < 0.5 else 0)
                if source.random() < 0.3:
                    await self._put_batch()
                    # The next record may be this commit, so the server can promise nothing beyond its start.
                    self._keepalive(source.randint(sent + 1, fragment.commit_lsn), inside=not fragment.begins)
                self._world.trace(f"fragment {fragment.last} {'commits' if fragment.commits else ''}")
                if fragment.begins and fragment.commits and self._reads.random() < 0.7:
                    parts: list[ChangePart] = list(fragment.changes)
                    self._batch.add(fragment.xid, fragment.commit_lsn, 0, parts, len(parts), 0)
                    continue
                await self._put_batch()
                await self._collector.put(fragment)
            sent = fragments[0].commit_lsn
            if self._reads.random() < 0.3:
                await self._put_batch()
        await self._put_batch()
        while True:
            self._keepalive(sent + 1, inside=False)
            await asyncio.sleep(1.0)

    async def _put_batch(self) -> None:
        """Put the transactions that one read delivered."""
        batch = self._batch.take_fragment()
        if batch is not None:
            await self._collector.put(batch)

    def _keepalive(self, wal_end: int, *, inside: bool) -> None:
        self._collector.put_keepalive(Keepalive(wal_end, False), inside_txn=inside)


async def run(world: World, fault: str = "") -> None:
    source = world.source
    server = Server(world, source.randint(1, 3))
    storages = {name: Storage() for name in server.wanted}

    async def build(actor: Actor[Process]) -> Process:
        process = Process(world, server, storages, fault)
        process.start()
        return process

    capture = Actor(world, "capture", build)
    await capture.start()
    for _ in range(source.choice((0, 1, 3))):
        await asyncio.sleep(source.uniform(0, 1.0) ** 2)
        capture.crash()
        await asyncio.sleep(source.uniform(0, 0.1))
        await capture.start()
    await world.until(lambda: bool(world.loop.failures) or server.confirmed >= server.last_lsn)
    for name, positions in server.wanted.items():
        if not world.loop.failures and storages[name].durable != positions:
            raise Violated(f"a storage misses or repeats changes: consumer={name} held={storages[name].durable}")
