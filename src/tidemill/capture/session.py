"""One session: from connecting until anything fails. Every failure ends the session, and the next one starts from
what is durable (slot, topics' tails, newest binding): there is one way to recover, and it is walked every time.

    reader ─► converter ─► collector ─► sinks (topic writer, shapes)       one task each: reader, collector,
    status  ◄─ tracker  ◄─┘                                               binder, status timer, heartbeat
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import Invalid, Unavailable
from tidemill.base.frontier import ChangePosition
from tidemill.base.tasks import Tasks
from tidemill.capture.bindings import Binder
from tidemill.capture.changes import Relation
from tidemill.capture.collector import Collector
from tidemill.capture.config import CaptureConfig
from tidemill.capture.converter import Converter, RelationSeen, merge_relation
from tidemill.capture.prepare import Prepared, prepare, take_snapshot
from tidemill.capture.setup import (
    ServerFacts,
    SlotState,
    check_server,
    check_slot,
    heartbeat,
    published_tables,
    slot_state,
    try_lock,
)
from tidemill.capture.sinks import Sink
from tidemill.capture.snapshot import SnapshotProgress
from tidemill.capture.tables import describe, list_tables, resolve
from tidemill.capture.topic_writer import TopicWriter
from tidemill.capture.wire.connection import Wire
from tidemill.capture.wire.errors import LockHeld, SqlError
from tidemill.capture.wire.status import Keepalive, Status, keepalive_interval_s
from tidemill.capture.wire.stream import ReplicationStream
from tidemill.metastore.catalogue import Catalogue
from tidemill.shards.front import Remap
from tidemill.topics.front import TopicLog

log = structlog.get_logger()

T = TypeVar("T")

LOCK_POLL_S = 0.5
SLOT_BUSY_POLL_S = 0.2
SLOT_BUSY_ATTEMPTS = 400
SLOT_POLL_S = 1.0
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
        self._control: Wire | None = None
        self._control_lock = asyncio.Lock()
        self._stream: ReplicationStream | None = None
        self._converter = Converter(max_changes=config.fragment_changes)
        self._status_due = asyncio.Event()
        self._last_activity_s = clock.monotonic_s()
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
            await tasks.aclose()
            if self.writer is not None:
                await self.writer.aclose()
            if self._stream is not None:
                await self._stream.aclose()
            if self._control is not None:
                await self._control.aclose()
            if failed.done() and not failed.cancelled():
                failed.exception()

    # set-up ---------------------------------------------------------------------------------------
    async def _start(self, tasks: Tasks) -> None:
        prepared, facts = await self._prepare()
        # A long copy must not go on after its slot is lost.
        tasks.spawn(self._watch_slot(), name="capture slot")
        await self._open_writer(prepared)
        await self._start_stream(prepared, facts, tasks)

    async def _prepare(self) -> tuple[Prepared, ServerFacts]:
        config = self._config
        self._on_phase("connecting to PostgreSQL", "")
        wire = self._control = await Wire.connect(config.dsn, purpose=f"capture {config.name}")
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
        prepared = await prepare(wire, config, facts, self._catalogue)
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
        tasks.spawn(self._beat(), name="capture heartbeat")
        tasks.spawn(self._watch_tables(prepared), name="capture tables")

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
            self._last_activity_s = self._clock.monotonic_s()

    async def _learn(self, seen: RelationSeen) -> None:
        """The stream describes a table differently: its columns from the stream, the rest from the catalogue."""
        found = await self._query(lambda wire: describe(wire, [seen.message.oid]))
        known = found.get(seen.message.oid) or self._converter.relations.get(seen.message.oid)
        self._converter.learn(merge_relation(seen.message, known))
        log.info("table described anew", capture=self._config.name, table=f"{seen.message.schema}.{seen.message.table}")

    def _on_bound(self, position: ChangePosition) -> None:
        if self.collector is not None:
            self.collector.flushed(self.topic_consumer, position)

    # status, heartbeat, slot ----------------------------------------------------------------------
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

    async def _beat(self) -> None:
        """One at the start, so that the snapshot's LSN is crossed; then whenever no data came for heartbeat_s."""
        await self._query(heartbeat)
        while True:
            before = self.collector.last_commit_lsn if self.collector is not None else 0
            await asyncio.sleep(self._config.heartbeat_s)
            if self.collector is not None and self.collector.last_commit_lsn == before:
                await self._query(heartbeat)

    async def _watch_slot(self) -> None:
        """The server's side of the story: retained WAL, WAL end; SlotLost as soon as it is."""
        while True:
            state = await self._query(lambda wire: slot_state(wire, self._config.slot))
            self.slot = check_slot(self._config, state)
            await asyncio.sleep(SLOT_POLL_S)

    async def _watch_tables(self, prepared: Prepared) -> None:
        """A table created anew, unpublished, or new under a pattern ends this session; the next one takes it in."""
        config = self._config
        warned = ""
        while True:
            await asyncio.sleep(self._config.table_poll_s)
            published = await self._query(lambda wire: published_tables(wire, config.publication)) or set()
            tables = await self._query(list_tables)
            oids = {table.name: table.oid for table in tables}
            for table in prepared.tables:
                if table.name in oids and (oids[table.name] != table.oid or table.name not in published):
                    raise Unavailable(f"a captured table was made anew or unpublished: table={table.name}.")
            try:
                added = {table.name for table in resolve(config.tables, tables)} - {t.name for t in prepared.tables}
            except Invalid as error:
                # What runs goes on; the next start will refuse it.
                if warned != error.message:
                    log.warning("a table cannot be captured", capture=config.name, cause=str(error))
                    warned = error.message
                continue
            if added:
                raise Unavailable(f"new tables match the capture: tables={','.join(sorted(added))}.")

    async def _query(self, ask: Callable[[Wire], Awaitable[T]]) -> T:
        """One at a time on the control connection, which also carries the capture's lock."""
        async with self._control_lock:
            if self._control is None:
                raise Unavailable("the control connection is gone.")
            return await ask(self._control)
