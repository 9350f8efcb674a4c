"""One session of a capture: from the connection to the first failure.

Every failure ends the session. The next session starts from durable state (the slot, the tails of the topics, the
newest binding), so there is a single recovery path and every start takes it.

    reader ─► converter ─► collector ─► taps (shapes), topic writer       one task each: reader, collector,
    status  ◄─ tracker  ◄─┘                                               binder, status timer, heartbeat
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
import structlog
from msgspec.structs import replace

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import TidemillError, UnavailableError
from tidemill.base.lsn import ChangePosition
from tidemill.base.runtime.tasks import Tasks, error_sentence
from tidemill.base.status.histogram import StageHistograms
from tidemill.capture.capture_row import FencedCaptureRow
from tidemill.capture.catalog.relations import read_current_rows
from tidemill.capture.changes import Relation, Row
from tidemill.capture.config import CaptureConfig
from tidemill.capture.decode.transaction_builder import RelationSeen, TransactionBuilder
from tidemill.capture.delivery.collector import Collector
from tidemill.capture.delivery.consumers import Sink, TapRegistry
from tidemill.capture.delivery.deferrable_keys import DeferrableKeys
from tidemill.capture.postgres.connection import PgConnection, describe_dsn, server_address
from tidemill.capture.postgres.control_connection import (
    ControlConnection,
    OpenQueries,
    check_same_server,
    identify_server,
)
from tidemill.capture.postgres.errors import UndecodableSlotError
from tidemill.capture.postgres.replication_stream import ReplicationStream, StatusSender
from tidemill.capture.postgres.standby_status import ReplicationStatus, keepalive_interval_s
from tidemill.capture.postgres.timeline import Timeline
from tidemill.capture.session.bad_rows import BadRowPolicy
from tidemill.capture.session.bootstrap import prepare_session, start_over_undecodable, take_first_snapshot
from tidemill.capture.session.continuity_check import check_slot_unmoved
from tidemill.capture.session.parked_streams import find_continuing_streams, set_carried_relations, store_descriptions
from tidemill.capture.session.relation_tracker import RelationTracker
from tidemill.capture.session.server_watch import (
    SlotReport,
    StreamWatch,
    WaitReport,
    send_heartbeats,
    watch_blockers,
    watch_slot,
)
from tidemill.capture.session.set_up_context import PreparedSession, SetUpContext
from tidemill.capture.session.stream_reader import StreamHandlers, StreamReader
from tidemill.capture.session.table_adder import REPAIR_POLL_S, TableAdder
from tidemill.capture.setup.blockers import Blocker, find_busy_walsender
from tidemill.capture.setup.server_checks import ServerFacts, SlotState, check_server
from tidemill.capture.setup.session_lock import acquire_lock, read_own_session, start_stream_when_free
from tidemill.capture.snapshot.copier import CopyContext
from tidemill.capture.snapshot.wal_hold import ConfirmedWal
from tidemill.capture.tables.context import SideLoopContext
from tidemill.capture.tables.copy_progress import SnapshotProgress
from tidemill.capture.tables.publication_repair import PublicationRepair
from tidemill.capture.tables.table_states import TableStates
from tidemill.capture.topics.batch_sender import SendPace
from tidemill.capture.topics.binder import Binder, compute_start
from tidemill.capture.topics.topic_writer import TopicWriter
from tidemill.metastore.catalogue import Catalogue
from tidemill.shards.api import Remap
from tidemill.topics.api import TopicLog

log = structlog.get_logger()

FINAL_BINDING_TIMEOUT_S = 1.0
"""Time limit for one last binding while the session closes. The session does not wait longer if consensus is
unavailable.
"""
SETTING_UP = "setting up publication, slot and topics"


class SessionContext(msgspec.Struct, frozen=True):
    """Parts of a capture that outlive its sessions.

    `taps` and `sinks` receive fragments in addition to the topic writer. `on_phase(reason, blocker)` reports what the
    session waits for. `states` has the states of the tables. `stages` has the times at which commits were received
    (measured once per burst), durable (once per send round) and bound (once per binding).
    """

    config: CaptureConfig
    topics: TopicLog
    catalogue: Catalogue
    remap: Remap
    taps: TapRegistry
    sinks: tuple[Sink, ...]
    clock: Clock
    rand: Rand
    on_phase: Callable[[str, str], None]
    states: TableStates
    stages: StageHistograms


class Session:
    """Connections, tasks and state of one session."""

    def __init__(self, context: SessionContext) -> None:
        self._config = config = context.config
        self._stages = context.stages
        self._topics = context.topics
        self._catalogue = catalogue = context.catalogue
        self._remap = context.remap
        self._taps = taps = context.taps
        self._sinks = context.sinks
        self._clock = clock = context.clock
        self._rand = context.rand
        self._on_phase = on_phase = context.on_phase
        self.states = states = context.states
        self._copies = CopyContext(config, context.topics, states, clock, context.rand)
        self.adder: TableAdder | None = None
        self._server = f"postgres:{server_address(config.dsn)}"
        self.waits = WaitReport(clock, self._server, on_phase)
        self._control: ControlConnection | None = None
        self._stream: ReplicationStream | None = None
        self._converter = TransactionBuilder(max_changes=config.fragment_changes)
        self._reports = StatusSender(clock)
        self._reader_lock = asyncio.Lock()
        self._wal = ConfirmedWal(states, self._reports.due)
        self._descriptions = RelationTracker(config, states, self._converter, self._reader_lock)
        self._unfit = BadRowPolicy(states, self._converter, taps, self._wal.hold_if_needed)
        self._rivals = DeferrableKeys(self._read_current_rows, self._unfit.handle_unresolved_key)
        self.answers = OpenQueries(clock)
        self.collector: Collector | None = None
        self.writer: TopicWriter | None = None
        self.binder: Binder | None = None
        self.progress = SnapshotProgress(clock)
        self.slot = SlotReport()
        self._carried: tuple[Relation, ...] = ()
        self._carried_at = (-1, -1)
        self._seen_lsn = -1
        self._watching: asyncio.Task[None] | None = None
        self.line: Timeline | None = None
        self.generation = 0
        self._own = FencedCaptureRow(catalogue, config.name)
        self.streaming = False
        self.running = False

    @property
    def has_described_relations(self) -> bool:
        """True once the session knows which relations it carries, even if it carries no relation."""
        return bool(self._converter.relations)

    @property
    def relations(self) -> tuple[Relation, ...]:
        """Return the relations that this session carries to its end. A table that is being re-snapshotted is carried by
        the next session. The same tuple is returned until it changes, because every shape request reads it.
        """
        converter, changes = self._converter, (self._converter.changes, self.states.changes)
        if changes != self._carried_at:
            served = self.states.served_oids()
            self._carried_at = changes
            self._carried = tuple(
                r
                for r in converter.relations.values()
                if r.oid in served and not converter.is_paused_or_followed(r.oid)
            )
        return self._carried

    @property
    def markers_left_out(self) -> int:
        return self._converter.markers_left_out

    @property
    def copy_progress(self) -> SnapshotProgress:
        """Return the progress of the current or latest copy: the first one, or one that runs concurrently with the
        stream.
        """
        adder = self.adder
        is_adding = adder is not None and (adder.copying_tables or adder.progress.table)
        return adder.progress if adder is not None and is_adding else self.progress

    @property
    def last_recopy(self) -> tuple[str, int]:
        """Return why tables were last re-snapshotted automatically, and when (ms); "" = never."""
        row = self._own.row
        return (row.recopied, row.recopied_ms) if row is not None else ("", 0)

    @property
    def topic_consumer(self) -> str:
        return f"{self._config.mark}/topics"

    async def run(self) -> None:
        """Run until something fails, and raise that error, translated. Closes everything that the session opened."""
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def fail(_: str, error: BaseException) -> None:
            if not failed.done():
                failed.set_exception(error)

        tasks = Tasks(fail)
        self.running = True
        try:
            tasks.spawn(self._set_up(tasks), name="capture start")
            await failed
        finally:
            self.streaming = self.running = False
            try:
                await tasks.aclose()
                if self.collector is not None:
                    self.states.following.record_confirmed(self.collector.status.flushed)
                if failed.cancelled():
                    await self._bind_last_lsn()
                elif failed.done() and isinstance(failed.exception(), UndecodableSlotError):
                    await self._start_over_if_undecodable()
            finally:
                await self._close_connections()
            if failed.done() and not failed.cancelled():
                failed.exception()

    async def _bind_last_lsn(self) -> None:
        """End in an orderly way. PostgreSQL sends changes that cannot be bound in time to the next session again."""
        if self.binder is None or self.collector is None:
            return
        try:
            async with asyncio.timeout(FINAL_BINDING_TIMEOUT_S):
                await self.binder.bind_idle_lsn()
        except (TidemillError, TimeoutError) as error:
            log.warning("the idle LSN could not be bound", capture=self._config.name, cause=error_sentence(error))

    async def _start_over_if_undecodable(self) -> None:
        """Recreate publication and slot. Raises UnavailableError if everything starts over; otherwise the original
        failure remains.
        """
        # On a separate connection: the query on the other one was interrupted.
        wire = await self._connect("start over")
        try:
            await start_over_undecodable(wire, self._config, self.states.rows.values())
        finally:
            await wire.aclose()

    async def _close_connections(self) -> None:
        """Close everything even if interrupted. A failed session may be cancelled while it ends, and a connection left
        open would hold the slot and the capture's lock until it is garbage-collected.
        """
        try:
            if self.writer is not None:
                await self.writer.aclose()
        finally:
            if self._stream is not None:
                await self._stream.aclose()
            if self._control is not None:
                await self._control.aclose()

    # set-up ---------------------------------------------------------------------------------------
    async def _set_up(self, tasks: Tasks) -> None:
        prepared, facts = await self._prepare(tasks)
        # A long copy must end once its slot is lost.
        assert self._control is not None
        tasks.spawn(watch_slot(self._control, self._config, self._on_slot_state, self._is_idle), name="capture slot")
        guarded = asyncio.Event()
        repair = PublicationRepair(
            SideLoopContext(self._config, self._control, self.states, self._catalogue, self._reader_lock)
        )
        guard = tasks.spawn(repair.guard_identities(guarded, REPAIR_POLL_S), name="capture identities")
        await self._open_writer(prepared)
        # Not cancelled: after an interrupted query the control connection does not answer any further ones.
        guarded.set()
        await asyncio.wait([guard])
        await self._start_stream(prepared, facts, tasks)

    async def _prepare(self, tasks: Tasks) -> tuple[PreparedSession, ServerFacts]:
        config = self._config
        self._on_phase(f"connecting to PostgreSQL: {describe_dsn(config.dsn)}", self._server)
        wire = await self._connect("capture")
        self._control = ControlConnection(wire, self.answers)
        facts = await self._control.run(lambda wire: check_server(wire, config))
        await acquire_lock(
            self._control, config, self._catalogue, self._clock,
            lambda holder: self.waits.report_wait("another session captures under this name", holder),
        )  # fmt: skip
        self._own.session = await self._control.run(read_own_session)
        self.waits.report_step(SETTING_UP)
        steps = self.progress.steps
        steps.begin_phase("reading the server's timeline")
        line = self.line = await identify_server(lambda: self._connect("identify", replication=True), self.answers)
        if line.system_id != facts.system_id:
            raise UnavailableError(f"the DSN leads to more than one server: server={self._server}.")
        blocked = watch_blockers(lambda: self._connect("watch"), self.answers, config.name, self.waits.record_blockers)
        self._watching = tasks.spawn(blocked, name="capture set-up watch")
        prepared = await prepare_session(
            SetUpContext(
                wire, config, facts, line, self._catalogue, self._own, self._remap, self._topics, self.states,
                self._clock, steps,
            )
        )  # fmt: skip
        steps.begin_phase("recording the taps")
        self.slot.state = prepared.slot
        self.generation = self._own.current.generation
        goes_on = await find_continuing_streams(self._control, config, self.states, prepared)
        # No await from here until the converter has learned the relations: a shape that subscribes now follows this
        # session.
        self._taps.begin_session(self._own.current.taps, self._own.current.era)
        set_carried_relations(
            self._taps, self._converter, self.states, prepared, goes_on, self._descriptions.requires_whole_rows
        )
        # Before anything is confirmed that taps recorded earlier have not seen (consumers.py).
        await self.store_tap_names()
        return prepared, facts

    async def _open_writer(self, prepared: PreparedSession) -> None:
        """Read the tails, copy fresh tables, and determine the offsets at which binding starts."""
        config = self._config
        binder = self.binder = Binder(
            self._remap,
            self._clock,
            self._on_bound,
            interval_ms=config.binding_interval_ms,
            idle_ms=config.idle_binding_ms,
            stages=self._stages,
            on_stored=self._wal.record_stored_binding,
        )
        steps = self.progress.steps
        steps.begin_phase("reading bindings")
        latest = await binder.open()
        self._wal.binder = binder
        steps.end()
        if prepared.fresh:
            self.waits.report_step(f"copying {len(prepared.fresh)} tables")
            fresh = await take_first_snapshot(self._copies, prepared, self._own, self.progress)
            assert self._control is not None
            await store_descriptions(self._control, self.states, fresh)
        copied = [table for table in prepared.captured if table.snapshot is not None]
        self._wal.carried = copied
        writer = self.writer = TopicWriter(
            self.topic_consumer,
            copied,
            self._topics,
            self._rand,
            binder.add_durable,
            self._unfit.handle_row,
            SendPace(self._config.linger_ms / 1000),
        )
        await writer.open_tables(
            latest.offsets if latest else {},
            latest.lsn if latest else 0,
            lambda number: steps.begin_table_step("opening topics", number, len(copied)),
        )
        steps.end()
        snapshots = {table.topic.topic_id: table.snapshot for table in copied if table.snapshot is not None}
        binder.start_at(*compute_start(snapshots, latest))

    async def _start_stream(self, prepared: PreparedSession, facts: ServerFacts, tasks: Tasks) -> None:
        config = self._config
        assert self.writer is not None and self.binder is not None and self._control is not None
        if self._watching is not None:
            self._watching.cancel()
        self._on_phase("starting the stream", self._server)
        wire = await self._connect("stream", replication=True)
        stream = self._stream = ReplicationStream(wire)
        assert self.line is not None
        await check_same_server(wire, self.answers, self.line)
        await start_stream_when_free(
            stream, self._control, config, self.answers,
            lambda holder: self.waits.report_wait(f"the slot is in use: slot={config.slot}", holder),
        )  # fmt: skip
        await check_slot_unmoved(self._control, config, self._wal.carried, self._wal.latest_binding)
        status = ReplicationStatus(prepared.slot.confirmed_lsn - 1)
        self._wal.begin_stream(status)
        collector = self.collector = Collector(
            [self.writer, *self._sinks],
            status,
            self._clock,
            taps=self._taps,
            on_keepalive=self.writer.record_keepalive,
            on_status=self._reports.due.set,
            queue_changes=config.queue_changes,
        )
        interval_s = keepalive_interval_s(facts.wal_sender_timeout_ms)
        self._taps.begin_stream(self, prepared.slot.confirmed_lsn - 1, prepared.slot.wal_end)
        self.streaming = True
        self._on_phase("", "")
        log.info("capture streams", capture=config.name, confirmed=prepared.slot.confirmed_lsn)
        control = self._control
        watch = StreamWatch(
            wire.target, self._clock, self.answers, self._reports.request_keepalive, facts.wal_sender_timeout_ms,
            busy=lambda: control.run(lambda wire: find_busy_walsender(wire, config.slot)),
            tell=self.waits.record_walsender,
        )  # fmt: skip
        tasks.spawn(watch.run(), name="capture silence")
        handlers = StreamHandlers(
            self._converter,
            self._rivals,
            self._unfit,
            self._reader_lock,
            self._process_description,
            self.binder.bind_soon,
        )
        reader = StreamReader(stream, collector, watch, handlers, self._stages, self._clock)
        tasks.spawn(reader.run(), name="capture reader")
        tasks.spawn(collector.run(), name="capture collector")
        tasks.spawn(self.binder.run(), name="capture binder")
        tasks.spawn(self.writer.failed(), name="capture topic writer")
        tasks.spawn(self._reports.run(stream, status, interval_s), name="capture status")
        tasks.spawn(send_heartbeats(self._control, config, lambda: collector.last_commit_lsn), name="capture heartbeat")
        self.states.on_park = self._pause_relation
        self.states.following.on_narrow = self._taps.lose_relation
        context = SideLoopContext(config, self._control, self.states, self._catalogue, self._reader_lock)
        adder = self.adder = TableAdder(
            self._copies, context, self._wal, self.writer, self._descriptions, prepared.side_topics
        )
        tasks.spawn(adder.wal_hold.run(), name="capture aside")
        tasks.spawn(adder.watch_catalogue(), name="capture tables")
        tasks.spawn(adder.add_tables(), name="capture joining")

    # the stream -----------------------------------------------------------------------------------
    async def _process_description(self, seen: RelationSeen) -> None:
        """Process the description of a relation, whose rows follow."""
        assert self._control is not None
        schemas = await self._descriptions.process_description(seen, self._control)
        self._wal.hold_if_needed()
        if self.writer is not None:
            self.writer.update_schemas(seen.message.oid, schemas)

    async def _read_current_rows(self, relation: Relation, rows: Sequence[Row]) -> list[Row | None]:
        assert self._control is not None
        return await read_current_rows(self._control, relation, rows)

    def _pause_relation(self, oid: int, lsn: int, columns: frozenset[str]) -> bool:
        """Stop carrying the current and later transactions of a table at or above `lsn`, because it is being paused.
        Returns whether shapes that use only unaffected `columns` still follow it.
        """
        goes_on = self._taps.lose_relation(oid, "its table is not carried any more", columns)
        if goes_on:
            self._converter.continue_for_followers(oid)
        else:
            self._converter.pause_relation(oid, lsn)
        if self.writer is not None:
            self.writer.pause_table(oid, lsn)
        return goes_on

    def _on_slot_state(self, state: SlotState, pinned_by: Blocker | None) -> None:
        self.slot.record(self._clock.monotonic_s(), state, pinned_by)
        self.copy_progress.record_wal(state.retained_bytes, state.headroom_bytes)

    def _on_bound(self, position: ChangePosition) -> None:
        self.report_flushed(self.topic_consumer, position)

    # consumers.TapSession --------------------------------------------------------------------------
    def report_flushed(self, consumer: str, position: ChangePosition) -> None:
        if self.collector is not None and self.running:
            self.collector.report_flushed(consumer, position)

    async def store_tap_names(self) -> None:
        """Store the names of the taps in the capture's row. Raises the catalogue's errors, and UnavailableError if the
        session has ended or another session owns the row.
        """
        if not self.running or self._own.row is None:
            raise UnavailableError("the session has ended.")
        # The names at the time of the write: a retried attempt must not restore older ones.
        await self._own.update(lambda found: replace(found, taps=self._taps.names))

    def _is_idle(self) -> bool:
        """True while the session streams, copies nothing, and has received no commit since the slot was last polled."""
        seen = self.collector.last_commit_lsn if self.collector is not None else 0
        before, self._seen_lsn = self._seen_lsn, seen
        copying = self.adder is not None and (self.states.copying or self.states.interrupted_copies)
        return self.streaming and not copying and seen == before

    # waiting --------------------------------------------------------------------------------------
    async def _connect(self, purpose: str, *, replication: bool = False) -> PgConnection:
        name = self._config.name
        with self.answers.track(f"a connection ({purpose} {name})"):
            return await PgConnection.connect(self._config.dsn, replication=replication, purpose=purpose, capture=name)
