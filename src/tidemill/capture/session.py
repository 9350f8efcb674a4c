"""One session: from connecting until anything fails. Every failure ends the session, and the next one starts from
what is durable (slot, topics' tails, newest binding): there is one way to recover, and it is walked every time.

    reader ─► converter ─► collector ─► sinks (topic writer, shapes)       one task each: reader, collector,
    status  ◄─ tracker  ◄─┘                                               binder, status timer, heartbeat
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.frontier import ChangePosition
from tidemill.base.tasks import Tasks
from tidemill.capture.bindings import Binder
from tidemill.capture.changes import Relation
from tidemill.capture.collector import Collector
from tidemill.capture.config import CaptureConfig
from tidemill.capture.converter import Converter, RelationSeen, merge_relation
from tidemill.capture.prepare import Prepared, prepare, take_snapshot
from tidemill.capture.setup import ServerFacts, SlotState, check_server, try_lock
from tidemill.capture.sinks import Sink
from tidemill.capture.snapshot import SnapshotProgress
from tidemill.capture.tables import describe
from tidemill.capture.topic_writer import TopicWriter
from tidemill.capture.watch import Control, keep_beating, watch_slot, watch_tables
from tidemill.capture.wire.connection import Wire
from tidemill.capture.wire.errors import LockHeld, SqlError
from tidemill.capture.wire.status import Keepalive, Status, keepalive_interval_s
from tidemill.capture.wire.stream import ReplicationStream
from tidemill.metastore.catalogue import Catalogue
from tidemill.shards.front import Remap
from tidemill.topics.front import TopicLog

log = structlog.get_logger()

LOCK_POLL_S = 0.5
SLOT_BUSY_POLL_S = 0.2
SLOT_BUSY_ATTEMPTS = 400
STATUS_MIN_INTERVAL_S = 0.02
_OBJECT_IN_USE = "55006"


class Session:
    """`sinks`: besides the topic writer. `on_phase(reason, held_by)`: what the session waits for."""

    def __init__(
        self,
        config: CaptureConfig,
        *,
        topics: TopicLog,
        catalogue: Catalogue,
        remap: Remap,
        sinks: Sequence[Sink],
        clock: Clock,
        rand: Rand,
        on_phase: Callable[[str, str], None],
    ) -> None:
        self._config = config
        self._topics = topics
        self._catalogue = catalogue
        self._remap = remap
        self._sinks = list(sinks)
        self._clock = clock
        self._rand = rand
        self._on_phase = on_phase
        self._control: Control | None = None
        self._stream: ReplicationStream | None = None
        self._converter = Converter(max_changes=config.fragment_changes)
        self._status_due = asyncio.Event()
        self.collector: Collector | None = None
        self.writer: TopicWriter | None = None
        self.binder: Binder | None = None
        self.progress = SnapshotProgress(clock)
        self.slot: SlotState | None = None
        self.generation = 0
        self.streaming = False

    @property
    def relations(self) -> list[Relation]:
        return list(self._converter.relations.values())

    @property
    def topic_consumer(self) -> str:
        return f"{self._config.mark}/topics"

    def add_sink(self, sink: Sink) -> None:
        self._sinks.append(sink)
        if self.collector is not None:
            self.collector.add_sink(sink)

    def remove_sink(self, sink: Sink) -> None:
        self._sinks = [each for each in self._sinks if each is not sink]
        if self.collector is not None:
            self.collector.remove_sink(sink)

    async def run(self) -> None:
        """Until something fails; raises it, translated. Closes everything it opened."""
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def fail(_: str, error: BaseException) -> None:
            if not failed.done():
                failed.set_exception(error)

        tasks = Tasks(fail)
        try:
            tasks.spawn(self._start(tasks), name="capture start")
            await failed
        finally:
            self.streaming = False
            try:
                await tasks.aclose()
            finally:
                await self._close()
            if failed.done() and not failed.cancelled():
                failed.exception()

    async def _close(self) -> None:
        """Whatever interrupts it: a session that failed by itself may be cancelled while it ends, and a connection left
        open then would hold the slot and the capture's lock until it is garbage."""
        try:
            if self.writer is not None:
                await self.writer.aclose()
        finally:
            if self._stream is not None:
                await self._stream.aclose()
            if self._control is not None:
                await self._control.aclose()

    # set-up ---------------------------------------------------------------------------------------
    async def _start(self, tasks: Tasks) -> None:
        prepared, facts = await self._prepare()
        # A long copy must not go on after its slot is lost.
        assert self._control is not None
        tasks.spawn(watch_slot(self._control, self._config, self._saw_slot), name="capture slot")
        await self._open_writer(prepared)
        await self._start_stream(prepared, facts, tasks)

    async def _prepare(self) -> tuple[Prepared, ServerFacts]:
        config = self._config
        self._on_phase("connecting to PostgreSQL", "")
        wire = await Wire.connect(config.dsn, purpose=f"capture {config.name}")
        self._control = Control(wire)
        facts = await check_server(wire, config)
        while True:
            try:
                await try_lock(wire, config)
                break
            except LockHeld as held:
                self._on_phase("another session captures under this name", "postgres-session")
                log.debug("waiting for the capture's lock", capture=config.name, cause=str(held))
                await asyncio.sleep(LOCK_POLL_S)
        self._on_phase("setting up publication, slot and topics", "")
        prepared = await prepare(wire, config, facts, self._catalogue, await self._remap.latest())
        self.slot = prepared.slot
        self.generation = prepared.row.generation
        for relation in prepared.relations.values():
            self._converter.learn(relation)
        return prepared, facts

    async def _open_writer(self, prepared: Prepared) -> None:
        """Tails, snapshot of what is fresh, and where the count of offsets starts."""
        config = self._config
        binder = self.binder = Binder(
            self._remap,
            self._clock,
            self._on_bound,
            interval_ms=config.binding_interval_ms,
            idle_ms=config.idle_binding_ms,
        )
        latest = await binder.open()
        writer = self.writer = TopicWriter(
            self.topic_consumer, prepared.captured, self._topics, self._rand, binder.durable
        )
        await writer.open(latest.offsets if latest else {}, latest.lsn if latest else 0)
        if prepared.fresh:
            self._on_phase(f"copying {len(prepared.fresh)} tables", "")
            log.info("snapshot begins", capture=config.name, tables=list(prepared.fresh))
            await take_snapshot(config, prepared, writer, self._catalogue, self.progress, self._clock)
        gate = max((t.snapshot.lsn for t in prepared.captured if t.snapshot is not None), default=0)
        starts: dict[str, list[int]] = {}
        for table in prepared.captured:
            bound = latest.offsets.get(table.topic.topic_id) if latest else None
            assert table.snapshot is not None
            starts[table.topic.topic_id] = list(bound if bound is not None else table.snapshot.offsets)
        binder.start_at(starts, gate)

    async def _start_stream(self, prepared: Prepared, facts: ServerFacts, tasks: Tasks) -> None:
        config = self._config
        assert self.writer is not None and self.binder is not None and self._control is not None
        self._on_phase("starting the stream", "")
        stream = self._stream = ReplicationStream(
            await Wire.connect(config.dsn, replication=True, purpose=f"stream {config.name}")
        )
        await self._start_when_free(stream)
        status = Status(prepared.slot.confirmed_lsn - 1)
        collector = self.collector = Collector(
            [self.writer, *self._sinks],
            status,
            self._clock,
            on_keepalive=self.writer.progress,
            on_status=self._note_status,
            queue_changes=config.queue_changes,
        )
        interval_s = keepalive_interval_s(facts.wal_sender_timeout_ms)
        self.streaming = True
        self._on_phase("", "")
        log.info("capture streams", capture=config.name, confirmed=prepared.slot.confirmed_lsn)
        tasks.spawn(self._read(stream, collector), name="capture reader")
        tasks.spawn(collector.run(), name="capture collector")
        tasks.spawn(self.binder.run(), name="capture binder")
        tasks.spawn(self.writer.failed(), name="capture topic writer")
        tasks.spawn(self._send_status(stream, status, interval_s), name="capture status")
        tasks.spawn(keep_beating(self._control, config, lambda: collector.last_commit_lsn), name="capture heartbeat")
        tasks.spawn(watch_tables(self._control, config, prepared.tables), name="capture tables")

    async def _start_when_free(self, stream: ReplicationStream) -> None:
        """A predecessor's walsender may outlive its client for a moment."""
        for attempt in range(SLOT_BUSY_ATTEMPTS):
            try:
                await stream.start(self._config.slot, self._config.publication)
                return
            except SqlError as error:
                if error.sqlstate != _OBJECT_IN_USE or attempt == SLOT_BUSY_ATTEMPTS - 1:
                    raise
                self._on_phase("the slot is still in use by a previous connection", "postgres-session")
                await asyncio.sleep(SLOT_BUSY_POLL_S)

    # the stream -----------------------------------------------------------------------------------
    async def _read(self, stream: ReplicationStream, collector: Collector) -> None:
        """Not reading while the collector is full is the back-pressure; statuses have a task of their own."""
        converter = self._converter
        while True:
            for item in await stream.receive():
                if isinstance(item, Keepalive):
                    collector.keepalive(item, inside_txn=converter.inside_txn)
                    continue
                out = converter.feed(item.message, item.size_bytes)
                if out is None:
                    continue
                if isinstance(out, RelationSeen):
                    if out.changed:
                        await self._learn(out)
                    continue
                await collector.put(out)

    async def _learn(self, seen: RelationSeen) -> None:
        """The stream describes a table differently: its columns from the stream, the rest from the catalogue."""
        assert self._control is not None
        found = await self._control.ask(lambda wire: describe(wire, [seen.message.oid]))
        known = found.get(seen.message.oid) or self._converter.relations.get(seen.message.oid)
        self._converter.learn(merge_relation(seen.message, known))
        log.info("table described anew", capture=self._config.name, table=f"{seen.message.schema}.{seen.message.table}")

    def _saw_slot(self, state: SlotState) -> None:
        self.slot = state

    def _on_bound(self, position: ChangePosition) -> None:
        if self.collector is not None:
            self.collector.flushed(self.topic_consumer, position)

    # status -----------------------------------------------------------------------------------
    def _note_status(self, urgent: bool) -> None:
        self._status_due.set()

    async def _send_status(self, stream: ReplicationStream, status: Status, interval_s: float) -> None:
        """Soon after something moved, and at the latest every `interval_s`, whatever else is stuck."""
        while True:
            await stream.send_status(status.encode(self._clock.now_ms()))
            await asyncio.sleep(STATUS_MIN_INTERVAL_S)
            try:
                async with asyncio.timeout(interval_s):
                    await self._status_due.wait()
            except TimeoutError:
                pass
            self._status_due.clear()
