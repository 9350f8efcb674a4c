"""Capture: sessions, one after another, with back-off between them, and what the world may see of them.

The one boundary of the unit is `base.tasks.keep` in `run`: whatever a session ends with, of whatever type, is told as
a failure of `capture:<name>` and the next session begins after a pause. Nothing here lists kinds of errors. The age of
a failure survives restarts at the same LSN, so a session that dies again and again at one place is stuck, not starting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import ClosedError, UnavailableError
from tidemill.base.lsn import Lsn
from tidemill.base.runtime.tasks import Tasks, keep
from tidemill.base.status.histogram import Stages
from tidemill.base.status.status import StatusTracker
from tidemill.capture.catalog.table_discovery import NoTablesError
from tidemill.capture.changes import Relation
from tidemill.capture.config import CaptureConfig
from tidemill.capture.delivery.collector import Collector
from tidemill.capture.delivery.sinks import Sink
from tidemill.capture.delivery.taps import Tap, Taps
from tidemill.capture.encode.schema_registration import Schemas
from tidemill.capture.naming import table_name
from tidemill.capture.postgres.connection import server, where
from tidemill.capture.postgres.timeline import History
from tidemill.capture.session.session import Session
from tidemill.capture.session.table_adder import RestartSession
from tidemill.capture.tables.table_states import TableStates
from tidemill.capture.tables.unavailable_tables import Standing, standing_of
from tidemill.metastore.catalogue import Catalogue
from tidemill.shards.api import Remap
from tidemill.topics.api import TopicLog

MARK_INTERVAL_S = 0.5
STALL_GRACE_MS = 60_000
HISTORY_TOLD_MS = 60_000
"""The time for which a failover is reported."""
SOUGHT_POLL_S = 0.05
PATIENT_S = 20.0
"""A session that has lasted so long, and is owed no answer, waits for somebody in a database that this node reaches."""


log = structlog.get_logger()


class Capture:
    """One captured database. `add_tap` works before and during `run`; `sinks`: besides the topic writer; `schemas`:
    where those of Avro records are registered.

    Marks: `capture:<name>` (position: confirmed LSN, 0 before any; target: the server's WAL end, unit lsn) and
    `capture:<name>/topics` (position: LSN of the newest binding, target: newest commit received).
    """

    def __init__(
        self,
        config: CaptureConfig,
        *,
        topics: TopicLog,
        catalogue: Catalogue,
        remap: Remap,
        clock: Clock,
        rand: Rand,
        tracker: StatusTracker | None = None,
        sinks: Sequence[Sink] = (),
        schemas: Schemas | None = None,
    ) -> None:
        self.config = config
        self._topics = topics
        self._catalogue = catalogue
        self._remap = remap
        self._clock = clock
        self._rand = rand
        self._tracker = tracker or StatusTracker()
        self._taps = Taps(clock)
        self._sinks = tuple(sinks)
        self._desk = TableStates(config, catalogue, clock, self._tracker, schemas=schemas)
        self.stages = Stages()
        """How long commits take to be received, durable and bound."""
        self._session: Session | None = None
        self._began_s = clock.monotonic_s()
        self._relations: tuple[Relation, ...] = ()
        self._phase = ("starting", "")
        self._running: asyncio.Task[object] | None = None
        self._closed = False
        self._settled = False
        self._none_s = float("-inf")
        """When the last session began that found no table to capture."""
        self._told = ""

    # what others may ask --------------------------------------------------------------------------
    @property
    def dsn(self) -> str:
        return self.config.dsn

    def relations(self) -> tuple[Relation, ...]:
        """The captured tables as the stream describes them now; empty until the first session is set up. The same tuple
        until that changes."""
        if self._session is not None and self._session.described:
            self._relations = self._session.relations
        return self._relations

    def relation(self, schema: str, table: str) -> Relation | None:
        return next((r for r in self.relations() if (r.schema, r.table) == (schema, table)), None)

    def look(self) -> None:
        """Somebody found a captured table to be another one, or gone: look now, not only at the next poll."""
        if self._session is not None and self._session.joining is not None:
            self._session.joining.look()

    def standing(self, schema: str, table: str) -> Standing | None:
        """Why a table that is not among `relations()` will be again; None where the desk says nothing of the kind."""
        return standing_of(self._desk.rows.get(table_name(schema, table)), self._clock.now_ms())

    @property
    def settled(self) -> bool:
        """It is known which tables there are, be it none: a session has streamed, or found nothing to capture."""
        if self._session is not None and self._session.joining is not None:
            self._settled = True
        return self._settled

    async def sought(self, schema: str, table: str, timeout_s: float) -> bool:
        """Somebody asks for a table that is not among `relations()`: True once it is, or is parked (`standing`). False:
        there is none, or it is not to be captured, or cannot be. Raises UnavailableError when none of these is known in
        time: it is copied, or held."""
        name, asked_s = table_name(schema, table), self._clock.monotonic_s()
        try:
            async with asyncio.timeout(timeout_s):
                while self.relation(schema, table) is None:
                    if self._none_s >= asked_s:
                        return False
                    standing = self.standing(schema, table)
                    if standing is not None and not standing.passing:
                        return True
                    joining = self._session.joining if self._session is not None else None
                    if joining is not None and await joining.seeks(name) is False and standing is None:
                        return self.relation(schema, table) is not None
                    await asyncio.sleep(SOUGHT_POLL_S)
        except TimeoutError as error:
            raise UnavailableError(f"the table is being taken in: capture={self.config.name} table={name}.") from error
        return True

    @property
    def streaming(self) -> bool:
        return self._session is not None and self._session.streaming

    def follows(self, history: History) -> bool:
        """It streams from a server of this history."""
        session = self._session
        line = session.line if session is not None and session.streaming else None
        return line is not None and line.history == history

    def health(self) -> str | None:
        """None while it streams or copies; else what its sessions fail with, or "" where nothing is known to fail: it
        begins, or waits for somebody."""
        session, failure = self._session, self._tracker.failure(self.config.mark)
        if session is not None and session.running:
            copy = session.progress
            if session.streaming or (copy.rows and not copy.done):
                return None
            if session.answers.overdue() is None and self._clock.monotonic_s() - self._began_s >= PATIENT_S:
                return ""
        return failure.error if failure is not None else ""

    def add_tap(self, tap: Tap) -> None:
        """It receives every transaction that begins from now on (and replays after each restart)."""
        self._taps.add(tap)

    def facts(self) -> dict[str, object]:
        """For reports: slot, snapshot, LSNs. Plain values only."""
        session = self._session
        if session is None:
            return {"phase": self._phase[0]}
        copy = session.copy
        facts: dict[str, object] = {
            "phase": self._phase[0] or "streaming",
            "generation": session.generation,
            "snapshot_rows": copy.rows,
            "snapshot_rows_expected": copy.expected,
            "snapshot_rows_per_s": round(copy.rows_per_s, 1),
            "snapshot_left_s": copy.left_s,
            "snapshot_chunks": copy.chunks,
            "snapshot_chunks_done": copy.chunks_done,
            "snapshot_table": copy.table,
            "snapshot_done": session.streaming or session.progress.done,
            "recopied": session.recopied[0],
            "recopied_ms": session.recopied[1],
            **self._set_aside(),
            **self._taps.facts(),
        }
        if session.slot is not None:
            facts |= {
                "slot_retained_bytes": session.slot.retained_bytes,
                "slot_headroom_bytes": session.slot.headroom_bytes,
                "slot_wal_status": session.slot.wal_status,
                "slot_grows_bytes_per_s": round(session.retained.grows_bytes_per_s),
                "slot_full_in_s": session.retained.full_in_s,
                "slot_pinned_bytes": session.slot.pinned_bytes,
                "slot_pinned_by": str(session.pinned_by or ""),
            }
        if session.collector is not None:
            status = session.collector.status
            facts |= {
                "received_lsn": str(Lsn(status.received + 1)),
                "confirmed_lsn": str(Lsn(status.told + 1)),
                "last_commit_time_ms": session.collector.last_commit_time_ms,
                "pending": {name: str(position) for name, position in session.collector.tracker.pending.items()},
                "stalled": session.collector.tracker.stalled(self._clock.now_ms(), STALL_GRACE_MS),
                "markers_left_out": session.markers_left_out,
                **session.collector.facts(),
                **(session.writer.facts() if session.writer is not None else {}),
            }
        return facts

    def _set_aside(self) -> dict[str, object]:
        """Of all tables whose changes are set aside while they are copied, and those for whose copy WAL is kept."""
        joining = self._session.joining if self._session is not None else None
        names = [row.table for row in self._desk.rows.values() if row.aside is not None]
        found = [sizes for name in names if joining is not None and (sizes := joining.keeping.sizes(name)) is not None]
        return {
            "set_aside_records": sum(each.records for each in found),
            "set_aside_bytes": sum(each.bytes for each in found),
            "set_aside_limit_bytes": self.config.copy_aside_max_mb << 20,
            "set_aside_appended": sum(each.appended for each in found),
            "wal_kept_for": joining.keeping.tables if joining is not None else [],
        }

    # running --------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Until `aclose`, whatever befalls the sessions. Raises only what keeps it from telling how it is."""
        if self._closed:
            raise ClosedError(f"the capture was closed: capture={self.config.name}.")
        self._running = asyncio.current_task()
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def fail(_: str, error: BaseException) -> None:
            if not ended.done():
                ended.set_exception(error)

        sessions = keep(self.config.mark, self.session, tracker=self._tracker, clock=self._clock)
        try:
            async with Tasks(fail) as tasks:
                tasks.spawn(self._publish_marks(), name="capture marks")
                tasks.spawn(sessions, name="capture sessions")
                await ended
        except asyncio.CancelledError:
            if not self._closed:
                raise
        finally:
            self._running = None

    async def session(self) -> None:
        """Sessions until one fails; raises what ended it. That tables were taken in is no failure: the next one begins
        at once, with them."""
        while True:
            try:
                await self._one_session()
            except RestartSession as joined:
                log.info("the session begins anew", capture=self.config.name, cause=joined.message)

    async def _one_session(self) -> None:
        self._began_s = self._clock.monotonic_s()
        self._session = Session(
            self.config,
            topics=self._topics,
            catalogue=self._catalogue,
            remap=self._remap,
            taps=self._taps,
            sinks=self._sinks,
            clock=self._clock,
            rand=self._rand,
            on_phase=self._set_phase,
            desk=self._desk,
            stages=self.stages,
        )
        try:
            await self._session.run()
        except NoTablesError:
            self._settled, self._none_s = True, self._began_s
            raise
        finally:
            self._settled = self.settled
            if self._told or not self._phase[0]:
                # Who held what while it streamed holds nothing now.
                self._set_phase("the session ended", f"postgres:{server(self.config.dsn)}" if self._told else "")

    async def aclose(self) -> None:
        """End the session: both connections close, the lock and the slot are free. Idempotent."""
        self._closed = True
        running = self._running
        if running is not None and running is not asyncio.current_task():
            running.cancel()
            await asyncio.wait([running])
        self._desk.close()
        for name in (self.config.mark, f"{self.config.mark}/topics", f"{self.config.mark}/history"):
            self._tracker.heal(name)
            self._tracker.remove(name)

    # marks ----------------------------------------------------------------------------------------
    def _set_phase(self, reason: str, held_by: str) -> None:
        self._phase = (reason, held_by)

    async def _publish_marks(self) -> None:
        while True:
            self._mark()
            await asyncio.sleep(MARK_INTERVAL_S)

    def _mark(self) -> None:
        """M1: while something is pending, the holder is the consumer with the least flushed position."""
        session = self._session
        self._tell_silence(session)
        self._tell_history()
        if session is None or session.collector is None or not session.running:
            self._mark_set_up(session)
        else:
            self._mark_stream(session, session.collector)

    def _tell_silence(self, session: Session | None) -> None:
        """A server that does not answer is a failure from the moment it was asked (control_connection.py, Q1), not only
        when the session gives up: a connection that swallows packets would look idle until then."""
        overdue = session.answers.overdue() if session is not None else None
        mark = self.config.mark
        if overdue is not None and not self._told:
            what, asked_ms = overdue
            self._told = f"PostgreSQL does not answer: {where(self.config.dsn)} waits_for={what!r}."
            self._tracker.fail(mark, self._told, now_ms=asked_ms, held_by=f"postgres:{server(self.config.dsn)}")
        elif overdue is None and self._told:
            told, self._told = self._told, ""
            failure = self._tracker.failure(mark)
            if failure is not None and failure.error == told and session is not None and session.running:
                self._tracker.heal(mark)

    def _tell_history(self) -> None:
        """A failover, or a return to an earlier state, is known only once the database works again, so it is a notice
        for a while and no failure."""
        (said, at_ms), now_ms, name = self._desk.history, self._clock.now_ms(), f"{self.config.mark}/history"
        if said and now_ms - at_ms <= HISTORY_TOLD_MS:
            self._tracker.works(name, "", now_ms=now_ms, notice=said)
        elif self._tracker.mark(name) is not None:
            self._tracker.heal(name)
            self._tracker.remove(name)

    def _mark_set_up(self, session: Session | None) -> None:
        """It stands where it, or the process before it, had come to (M5, M6): a slot made just now has come nowhere
        yet, and its LSN is another one in each life. Rows that are copied are progress."""
        (reason, held_by), now_ms = self._phase, self._clock.now_ms()
        copy = session.progress if session is not None else None
        if copy is not None and (copy.rows or copy.blocked) and not copy.done:
            reason, held_by = copy.sentence, copy.held_by or held_by
        elif copy is not None and copy.steps.doing and not held_by:
            reason = f"{reason}: {copy.steps.doing}"
        earlier = self._tracker.mark(self.config.mark)
        position = earlier.position if earlier is not None else 0
        slot = session.slot if session is not None and position else None
        self._tracker.set(
            self.config.mark, position, max(position + 1, slot.wal_end if slot else 0), now_ms=now_ms,
            held_by=held_by, reason=reason, budget_ms=self.config.budget_ms, unit="lsn",
            progress=copy.rows + copy.chunks_done + copy.steps.count if copy is not None else 0,
        )  # fmt: skip

    def _mark_stream(self, session: Session, collector: Collector) -> None:
        """An LSN stands for as long as its transaction takes, or a copy beside the stream; what is taken of it, made
        durable, or copied is progress."""
        name, now_ms, budget_ms = self.config.mark, self._clock.now_ms(), self.config.budget_ms
        reason, held_by = self._phase
        confirmed = collector.status.sent + 1
        wal_end = max(session.slot.wal_end if session.slot else 0, collector.status.received + 1)
        holder, copied_rows = collector.tracker.holder(), 0
        if session.joining is not None:
            session.joining.mark()
            copy = session.joining.progress
            copied_rows = copy.moved + copy.chunks_done + copy.steps.count
            kept_for = session.joining.keeping.tables
            if collector.status.told < collector.status.flushed and kept_for:
                holder = self.config.table_mark(kept_for[0])
                reason = reason or "nothing is confirmed beyond where the copy of a table began"
        if not reason and confirmed < wal_end and holder:
            reason = f"waits until {holder} has flushed what it was sent"
        elif not reason and confirmed < wal_end:
            reason, holder = "waits for WAL that PostgreSQL has not sent", f"postgres:{server(self.config.dsn)}"
        landed_bytes = session.writer.landed_bytes if session.writer is not None else 0
        progress = collector.taken_changes + landed_bytes + copied_rows + session.seen_at_work
        self._tracker.set(
            name, confirmed, wal_end, now_ms=now_ms, held_by=held_by or holder, reason=reason,
            budget_ms=budget_ms, unit="lsn", progress=progress,
        )  # fmt: skip
        if session.binder is not None and session.writer is not None:
            bound = session.binder.latest.lsn if session.binder.latest is not None else 0
            topic = session.writer.held_by
            self._tracker.set(
                f"{name}/topics", bound, max(collector.last_commit_lsn, bound), now_ms=now_ms, held_by=topic,
                reason="a topic does not take its records" if topic else "", budget_ms=budget_ms, unit="lsn",
                progress=progress,
            )  # fmt: skip
