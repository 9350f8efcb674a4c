"""One session: from connecting until anything fails. Every failure ends the session, and the next one starts from
what is durable (slot, topics' tails, newest binding): there is one way to recover, and it is walked every time.

    reader ─► converter ─► collector ─► taps (shapes), topic writer       one task each: reader, collector,
    status  ◄─ tracker  ◄─┘                                               binder, status timer, heartbeat
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog
from msgspec.structs import replace

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import TidemillError
from tidemill.base.frontier import ChangePosition
from tidemill.base.pace import Pace
from tidemill.base.tasks import Tasks, sentence
from tidemill.capture.bindings import Binder
from tidemill.capture.changes import NEVER, Relation
from tidemill.capture.collector import Collector
from tidemill.capture.config import CaptureConfig
from tidemill.capture.converter import Converter, RelationSeen, merge_relation
from tidemill.capture.copying import take_snapshot
from tidemill.capture.desk import Desk, recopy
from tidemill.capture.holders import Holder, busy_walsender, lock_holder, slot_holder
from tidemill.capture.joining import Joining
from tidemill.capture.poison import Poisoned, take
from tidemill.capture.prepare import Prepared, begin_anew, prepare
from tidemill.capture.setup import ADVISORY_CLASS, ServerFacts, SlotState, check_server, lock_key, try_lock
from tidemill.capture.sinks import Sink
from tidemill.capture.snapshot import SnapshotProgress
from tidemill.capture.tables import describe_after
from tidemill.capture.taps import Taps
from tidemill.capture.topic_writer import CapturedTable, TopicWriter
from tidemill.capture.watch import (
    BLOCKER_REMEMBERED_S,
    Answers,
    Control,
    StreamWatch,
    keep_beating,
    watch_set_up,
    watch_slot,
)
from tidemill.capture.wire.connection import Wire, server, where
from tidemill.capture.wire.errors import SqlError, Undecodable
from tidemill.capture.wire.status import Keepalive, Status, keepalive_interval_s
from tidemill.capture.wire.stream import Framed, ReplicationStream
from tidemill.metastore.catalogue import Catalogue
from tidemill.shards.front import Remap
from tidemill.topics.front import TopicLog

log = structlog.get_logger()

LOCK_POLL_S = 0.5
SLOT_BUSY_POLL_S = 0.2
SLOT_BUSY_ATTEMPTS = 400
"""A walsender whose client died holds the slot until wal_sender_timeout (60 s by default) has passed."""
STATUS_MIN_INTERVAL_S = 0.02
SETTLE_S = 1.0
"""For one last binding while consensus answers; without it nobody waits."""
_OBJECT_IN_USE = "55006"

SETTING_UP = "setting up publication, slot and topics"


class Session:
    """`taps` outlive it; `sinks`: besides the topic writer. `on_phase(reason, held_by)`: what the session waits for.
    `desk`: the tables, and which of them are parked; it outlives the session, too."""

    def __init__(
        self,
        config: CaptureConfig,
        *,
        topics: TopicLog,
        catalogue: Catalogue,
        remap: Remap,
        taps: Taps,
        sinks: Sequence[Sink] = (),
        clock: Clock,
        rand: Rand,
        on_phase: Callable[[str, str], None],
        desk: Desk,
    ) -> None:
        self._config = config
        self._topics = topics
        self._catalogue = catalogue
        self._remap = remap
        self._taps = taps
        self._sinks = tuple(sinks)
        self._clock = clock
        self._pace = Pace(clock)
        self._rand = rand
        self._on_phase = on_phase
        self.desk = desk
        self.joining: Joining | None = None
        self._server = f"postgres:{server(config.dsn)}"
        self._control: Control | None = None
        self._stream: ReplicationStream | None = None
        self._converter = Converter(max_changes=config.fragment_changes)
        self._status_due = asyncio.Event()
        self._ask_keepalive = False
        self._parking = asyncio.Lock()
        self.answers = Answers(clock)
        self.collector: Collector | None = None
        self.writer: TopicWriter | None = None
        self.binder: Binder | None = None
        self.progress = SnapshotProgress(clock)
        self.slot: SlotState | None = None
        self._seen_lsn = -1
        self._blocked_s = float("-inf")
        self._doing = ""
        self._watching: asyncio.Task[None] | None = None
        self.generation = 0
        self.seen_at_work = 0
        """How often a walsender was silent because it worked: progress, for the capture's mark."""
        self.streaming = False
        self.running = False

    @property
    def relations(self) -> list[Relation]:
        return [relation for relation in self._converter.relations.values() if self.desk.serves(relation.oid)]

    @property
    def markers_left_out(self) -> int:
        return self._converter.markers_left_out

    @property
    def topic_consumer(self) -> str:
        return f"{self._config.mark}/topics"

    async def run(self) -> None:
        """Until something fails; raises it, translated. Closes everything it opened."""
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def fail(_: str, error: BaseException) -> None:
            if not failed.done():
                failed.set_exception(error)

        tasks = Tasks(fail)
        self.running = True
        try:
            tasks.spawn(self._start(tasks), name="capture start")
            await failed
        finally:
            self.streaming = self.running = False
            try:
                await tasks.aclose()
                if failed.cancelled():
                    await self._settle()
                elif failed.done() and isinstance(failed.exception(), Undecodable):
                    await self._start_over()
            finally:
                await self._close()
            if failed.done() and not failed.cancelled():
                failed.exception()

    async def _settle(self) -> None:
        """An orderly end. What cannot be bound in time is told again to the next session, as after any other end."""
        if self.binder is None or self.collector is None:
            return
        try:
            async with asyncio.timeout(SETTLE_S):
                await self.binder.settle()
        except (TidemillError, TimeoutError) as error:
            log.warning("the idle LSN is not bound", capture=self._config.name, cause=sentence(error))

    async def _start_over(self) -> None:
        """Raises Unavailable when all begins anew; else what failed stands."""
        # Of a connection of its own: what asked on the other one was cut off in the middle.
        wire = await self._connect("start over")
        try:
            await begin_anew(wire, self._config, self.desk.rows.values())
        finally:
            await wire.aclose()

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
        prepared, facts = await self._prepare(tasks)
        # A long copy must not go on after its slot is lost.
        assert self._control is not None
        tasks.spawn(watch_slot(self._control, self._config, self._saw_slot, self._idle), name="capture slot")
        await self._open_writer(prepared)
        await self._start_stream(prepared, facts, tasks)

    async def _prepare(self, tasks: Tasks) -> tuple[Prepared, ServerFacts]:
        config = self._config
        self._on_phase(f"connecting to PostgreSQL: {where(config.dsn)}", self._server)
        wire = await self._connect("capture")
        self._control = Control(wire, self.answers)
        facts = await self._control.ask(lambda wire: check_server(wire, config))
        while not await self._control.ask(lambda wire: try_lock(wire, config)):
            holder = await self._control.ask(lambda wire: lock_holder(wire, ADVISORY_CLASS, lock_key(config)))
            self._wait_for("another session captures under this name", holder)
            await asyncio.sleep(LOCK_POLL_S)
        self._step(SETTING_UP)
        latest = await self._remap.latest()
        blocked = watch_set_up(lambda: self._connect("watch"), self.answers, config.name, self._blocked)
        self._watching = tasks.spawn(blocked, name="capture set-up watch")
        prepared = await prepare(wire, config, facts, self._catalogue, latest, self.desk)
        self.slot = prepared.slot
        self.generation = prepared.row.generation
        for relation in prepared.relations.values():
            self._converter.learn(relation)
        for table in prepared.captured:
            if table.parked_lsn < NEVER:
                self._converter.park(table.oid, table.parked_lsn)
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
            self.topic_consumer, prepared.captured, self._topics, self._rand, binder.durable, self._row_failed
        )
        await writer.open(latest.offsets if latest else {}, latest.lsn if latest else 0)
        if prepared.fresh:
            await self._copy(prepared, writer)
        copied = [table for table in prepared.captured if table.snapshot is not None]
        starts: dict[str, list[int]] = {}
        late: list[int] = []
        gate = 0
        for table in copied:
            assert table.snapshot is not None
            bound = latest.offsets.get(table.topic.topic_id) if latest else None
            if bound is None:
                late.append(table.snapshot.lsn)
            gate = max(gate, table.snapshot.lsn)
            starts[table.topic.topic_id] = list(bound if bound is not None else table.snapshot.offsets)
        binder.start_at(starts, gate, min(late, default=None))

    async def _copy(self, prepared: Prepared, writer: TopicWriter) -> None:
        """The first snapshot: nothing streams before it is done. A table that fails is left out of the stream."""
        config = self._config
        self._step(f"copying {len(prepared.fresh)} tables")
        log.info("snapshot begins", capture=config.name, tables=list(prepared.fresh))
        captured = {table.name: table for table in prepared.captured}
        tables = [table for table in prepared.tables if table.name in prepared.fresh]
        done = await take_snapshot(config, tables, captured, writer, self.desk, self.progress, self._clock)
        for name in prepared.fresh:
            if name not in done:
                await writer.retire(captured[name].oid)
        await self._catalogue.put(replace(prepared.row, snapshot_done=True))

    async def _start_stream(self, prepared: Prepared, facts: ServerFacts, tasks: Tasks) -> None:
        config = self._config
        assert self.writer is not None and self.binder is not None and self._control is not None
        if self._watching is not None:
            self._watching.cancel()
        self._on_phase("starting the stream", self._server)
        wire = await self._connect("stream", replication=True)
        stream = self._stream = ReplicationStream(wire)
        await self._start_when_free(stream)
        status = Status(prepared.slot.confirmed_lsn - 1)
        collector = self.collector = Collector(
            [self.writer, *self._sinks],
            status,
            self._clock,
            taps=self._taps,
            on_keepalive=self.writer.progress,
            on_status=self._status_due.set,
            queue_changes=config.queue_changes,
        )
        interval_s = keepalive_interval_s(facts.wal_sender_timeout_ms)
        self.streaming = True
        self._on_phase("", "")
        log.info("capture streams", capture=config.name, confirmed=prepared.slot.confirmed_lsn)
        control = self._control
        watch = StreamWatch(
            wire.target, self._clock, self.answers, self._ask, facts.wal_sender_timeout_ms,
            busy=lambda: control.ask(lambda wire: busy_walsender(wire, config.slot)), tell=self._saw_walsender,
        )  # fmt: skip
        tasks.spawn(watch.run(), name="capture silence")
        tasks.spawn(self._read(stream, collector, watch), name="capture reader")
        tasks.spawn(collector.run(), name="capture collector")
        tasks.spawn(self.binder.run(), name="capture binder")
        tasks.spawn(self.writer.failed(), name="capture topic writer")
        tasks.spawn(self._send_status(stream, status, interval_s), name="capture status")
        tasks.spawn(keep_beating(self._control, config, lambda: collector.last_commit_lsn), name="capture heartbeat")
        self.desk.connect(self._carry_no_more)
        joining = self.joining = Joining(
            config, self._control, self.desk, topics=self._topics, catalogue=self._catalogue, clock=self._clock,
            rand=self._rand, hold=self._hold, flushed=lambda: status.flushed, retire=self.writer.retire,
            parking=self._parking,
        )  # fmt: skip
        tasks.spawn(joining.watch(), name="capture tables")
        tasks.spawn(joining.take_in(), name="capture joining")

    async def _start_when_free(self, stream: ReplicationStream) -> None:
        """A predecessor's walsender may outlive its client for a moment. Raises SqlError when it stays."""
        assert self._control is not None
        for attempt in range(SLOT_BUSY_ATTEMPTS):
            try:
                # An answer to START_REPLICATION takes no longer than any other.
                with self.answers.expected("the start of the stream"):
                    await stream.start(self._config.slot, self._config.publication)
                return
            except SqlError as error:
                if error.sqlstate != _OBJECT_IN_USE or attempt == SLOT_BUSY_ATTEMPTS - 1:
                    raise
                holder = await self._control.ask(lambda wire: slot_holder(wire, self._config.slot))
                self._wait_for(f"the slot is in use: slot={self._config.slot}", holder)
                await asyncio.sleep(SLOT_BUSY_POLL_S)

    # the stream -----------------------------------------------------------------------------------
    async def _read(self, stream: ReplicationStream, collector: Collector, watch: StreamWatch) -> None:
        """Not reading while the collector is full is the back-pressure; statuses have a task of their own."""
        converter = self._converter
        while True:
            watch.waiting()
            items = await stream.receive()
            watch.heard()
            for item in items:
                if self._pace.due:
                    await self._pace.rest()  # one receive may bring thousands
                if self._parking.locked():  # nothing beyond a park is handed on before it is durable (joining.py, J3)
                    async with self._parking:
                        pass
                if isinstance(item, Keepalive):
                    collector.keepalive(item, inside_txn=converter.inside_txn)
                    continue
                try:
                    out = take(item, converter)
                except Poisoned as poisoned:
                    await self._set_aside(item, poisoned)
                    continue
                if out is None:
                    continue
                if isinstance(out, RelationSeen):
                    await self._learn(out)
                    continue
                await collector.put(out)

    async def _set_aside(self, item: Framed, poisoned: Poisoned) -> None:
        """Where it is about one table, that table is parked before its transaction; else the session ends with it."""
        if not poisoned.table or poisoned.position is None or poisoned.table not in self.desk.rows:
            raise poisoned
        lsn = poisoned.position.commit_lsn
        row = self.desk.followed(poisoned.oid, self._converter.xid, lsn)
        if row is not None:
            await self.desk.park(row.table, lsn, poisoned.message, self._way_out(poisoned, row.table))
        self._converter.pass_over(item.payload)

    @staticmethod
    def _way_out(error: BaseException, table: str) -> str:
        return f"{getattr(error, 'fix', '')} {recopy(table)}".strip()

    async def _row_failed(self, table: CapturedTable, lsn: int, error: BaseException) -> None:
        """The topic writer cannot write a row of this table (W3)."""
        await self.desk.park(
            table.name, lsn, f"a row cannot be written: {_message(error)}", self._way_out(error, table.name)
        )

    def _carry_no_more(self, oid: int, lsn: int) -> None:
        """The desk parks a table: nothing that comes, nor what is under way, is carried at or above `lsn`."""
        self._converter.park(oid, lsn)
        if self.writer is not None:
            self.writer.park(oid, lsn)

    def _hold(self, on: bool) -> None:
        if self.collector is not None:
            status = self.collector.status
            status.hold = status.flushed if on else None

    async def _learn(self, seen: RelationSeen) -> None:
        """The stream describes a table, at its first change and after every DDL on it. Where the next rows are not what
        the table's shard was made of, it is parked before this transaction; a NULL in their place would be a lie.

        Columns come from the stream, the rest from the catalogue.
        """
        assert self._control is not None
        message = seen.message
        xid = self._converter.xid
        now = await self._control.ask(lambda wire: describe_after(wire, xid, message.oid))
        lsn = self._converter.commit_lsn
        difference = self.desk.differs_in_stream(message, now, xid, lsn)
        if difference is not None:
            await self.desk.park(difference[0], lsn, difference[1])
        if seen.changed:
            known = now or self._converter.relations.get(message.oid)
            self._converter.learn(merge_relation(message, known))
            log.info("table described anew", capture=self._config.name, table=f"{message.schema}.{message.table}")

    def _saw_slot(self, state: SlotState) -> None:
        self.slot = state

    def _on_bound(self, position: ChangePosition) -> None:
        if self.collector is not None:
            self.collector.flushed(self.topic_consumer, position)

    def _idle(self) -> bool:
        """Streaming, and nothing came since the slot was last looked at."""
        seen = self.collector.last_commit_lsn if self.collector is not None else 0
        before, self._seen_lsn = self._seen_lsn, seen
        return self.streaming and seen == before

    # what is waited for ---------------------------------------------------------------------------
    async def _connect(self, purpose: str, *, replication: bool = False) -> Wire:
        purpose = f"{purpose} {self._config.name}"
        with self.answers.expected(f"a connection ({purpose})"):
            return await Wire.connect(self._config.dsn, replication=replication, purpose=purpose)

    def _wait_for(self, reason: str, holder: Holder | None) -> None:
        self._on_phase(f"{reason}: {holder}" if holder is not None else reason, holder.name if holder else self._server)

    def _blocked(self, found: Sequence[Holder]) -> None:
        now_s = self._clock.monotonic_s()
        if found:
            self._blocked_s = now_s
            self._wait_for("the set-up waits for another session", found[0])
        elif now_s - self._blocked_s > BLOCKER_REMEMBERED_S:
            self._on_phase(self._doing, "")

    def _step(self, doing: str) -> None:
        """What the set-up does now, as far as it waits for nobody."""
        self._doing = doing
        self._on_phase(doing, "")

    def _saw_walsender(self, at_work: Holder | None) -> None:
        if at_work is None:
            self._on_phase("", "")
            return
        self.seen_at_work += 1
        self._wait_for("the walsender works through WAL and has sent nothing for a while", at_work)

    # status -----------------------------------------------------------------------------------
    def _ask(self) -> None:
        self._ask_keepalive = True
        self._status_due.set()

    async def _send_status(self, stream: ReplicationStream, status: Status, interval_s: float) -> None:
        """Soon after something moved, and at the latest every `interval_s`, whatever else is stuck."""
        while True:
            ask, self._ask_keepalive = self._ask_keepalive, False
            await stream.send_status(status.encode(self._clock.now_ms(), ask=ask))
            await asyncio.sleep(STATUS_MIN_INTERVAL_S)
            try:
                async with asyncio.timeout(interval_s):
                    await self._status_due.wait()
            except TimeoutError:
                pass
            self._status_due.clear()


def _message(error: BaseException) -> str:
    """Without its fix, which is told apart."""
    return error.message if isinstance(error, TidemillError) else sentence(error)
