"""Run the sessions of a capture one after another, with back-off between them, and publish the capture's status.

All errors of a session are handled in one place, `base.runtime.tasks.run_unit` in `run`: an error of any type that ends
a session is reported as a failure of `capture:<name>`, and the next session begins after a pause. No kinds of errors
are listed here. The age of a failure survives restarts at the same LSN, so a capture whose sessions repeatedly die at
one place is stuck, not starting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import ClosedError, UnavailableError
from tidemill.base.lsn import Lsn
from tidemill.base.runtime.tasks import Tasks, run_unit
from tidemill.base.status.histogram import StageHistograms
from tidemill.base.status.status import StatusTracker
from tidemill.capture.catalog.table_choice import NoTablesError
from tidemill.capture.changes import Relation
from tidemill.capture.config import CaptureConfig
from tidemill.capture.delivery.collector import Collector
from tidemill.capture.delivery.consumers import Sink, Tap, TapRegistry
from tidemill.capture.encode.avro_schemas import SchemaRegistrar
from tidemill.capture.naming import table_name
from tidemill.capture.postgres.connection import describe_dsn, server_address
from tidemill.capture.postgres.timeline import TimelineHistory
from tidemill.capture.session.session import Session, SessionContext
from tidemill.capture.session.table_adder import SessionRestartError
from tidemill.capture.tables.table_reasons import TableUnavailability, unavailability_of
from tidemill.capture.tables.table_states import TableStates
from tidemill.metastore.catalogue import Catalogue
from tidemill.shards.api import Remap
from tidemill.topics.api import TopicLog

MARK_INTERVAL_S = 0.5
STALL_GRACE_MS = 60_000
HISTORY_NOTICE_MS = 60_000
"""Time for which a failover is reported."""
WAIT_FOR_TABLE_POLL_S = 0.05
WAITING_SESSION_S = 20.0
"""A session that has lasted this long without an overdue answer waits for another session of a database that this node
reaches.
"""


log = structlog.get_logger()


class Capture:
    """One captured database. `add_tap` works before and during `run`. `sinks` receive fragments in addition to the
    topic writer. `schemas` registers the schemas of Avro records.

    Stages: `capture:<name>` (position: confirmed LSN, 0 before any; target: the server's WAL end; unit: lsn) and
    `capture:<name>/topics` (position: LSN of the newest binding; target: newest commit received).
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
        schemas: SchemaRegistrar | None = None,
    ) -> None:
        self.config = config
        self._topics = topics
        self._catalogue = catalogue
        self._remap = remap
        self._clock = clock
        self._rand = rand
        self._tracker = tracker or StatusTracker()
        self._taps = TapRegistry(clock)
        self._sinks = tuple(sinks)
        self._states = TableStates(config, catalogue, clock, self._tracker, schemas=schemas)
        self.stages = StageHistograms()
        """Time that commits take to be received, durable and bound."""
        self._session_context = SessionContext(
            config, topics, catalogue, remap, self._taps, tuple(sinks), clock, rand, self._set_phase, self._states,
            self.stages,
        )  # fmt: skip
        self._session: Session | None = None
        self._began_s = clock.monotonic_s()
        self._relations: tuple[Relation, ...] = ()
        self._phase = ("starting", "")
        self._running: asyncio.Task[object] | None = None
        self._closed = False
        self._settled = False
        self._none_s = float("-inf")
        """Start of the last session that found no table to capture."""
        self._reported_silence = ""

    # queries --------------------------------------------------------------------------------------
    @property
    def dsn(self) -> str:
        return self.config.dsn

    def relations(self) -> tuple[Relation, ...]:
        """Return the captured tables as the stream describes them now; empty until the first session is set up. The
        same tuple is returned until it changes.
        """
        if self._session is not None and self._session.has_described_relations:
            self._relations = self._session.relations
        return self._relations

    def relation(self, schema: str, table: str) -> Relation | None:
        return next((r for r in self.relations() if (r.schema, r.table) == (schema, table)), None)

    def check_tables_soon(self) -> None:
        """Check the tables now instead of at the next poll, because a client found that a captured table was replaced
        or dropped.
        """
        if self._session is not None and self._session.adder is not None:
            self._session.adder.check_tables_soon()

    def unavailability(self, schema: str, table: str) -> TableUnavailability | None:
        """Return why a table is missing from `relations()` although it is captured or paused; None if its state gives
        no reason.
        """
        return unavailability_of(self._states.rows.get(table_name(schema, table)), self._clock.now_ms())

    @property
    def knows_tables(self) -> bool:
        """True once the set of tables is known, even an empty one: a session has streamed, or found no table."""
        if self._session is not None and self._session.adder is not None:
            self._settled = True
        return self._settled

    async def wait_for_table(self, schema: str, table: str, timeout_s: float) -> bool:
        """Wait for a table that is not among `relations()`. Returns True once it is, or is paused (`unavailability`),
        and False if it does not exist, is not selected, or cannot be captured. Raises UnavailableError if none of these
        is known within `timeout_s`, because the table is being copied or blocked.
        """
        name, asked_s = table_name(schema, table), self._clock.monotonic_s()
        try:
            async with asyncio.timeout(timeout_s):
                while self.relation(schema, table) is None:
                    if self._none_s >= asked_s:
                        return False
                    standing = self.unavailability(schema, table)
                    if standing is not None and not standing.passing:
                        return True
                    adder = self._session.adder if self._session is not None else None
                    if adder is not None and await adder.is_being_added(name) is False and standing is None:
                        return self.relation(schema, table) is not None
                    await asyncio.sleep(WAIT_FOR_TABLE_POLL_S)
        except TimeoutError as error:
            raise UnavailableError(f"the table is being added: capture={self.config.name} table={name}.") from error
        return True

    @property
    def streaming(self) -> bool:
        return self._session is not None and self._session.streaming

    def is_streaming_from(self, history: TimelineHistory) -> bool:
        """Return whether the capture streams from a server with this history."""
        session = self._session
        line = session.line if session is not None and session.streaming else None
        return line is not None and line.history == history

    def health(self) -> str | None:
        """Return None while the capture streams or copies; otherwise the error of its sessions, or "" if no failure is
        known because it starts, or waits for another session.
        """
        session, failure = self._session, self._tracker.failure(self.config.mark)
        if session is not None and session.running:
            copy = session.progress
            if session.streaming or (copy.rows and not copy.done):
                return None
            if (
                session.answers.oldest_overdue() is None
                and self._clock.monotonic_s() - self._began_s >= WAITING_SESSION_S
            ):
                return ""
        return failure.error if failure is not None else ""

    def add_tap(self, tap: Tap) -> None:
        """Add a tap, which receives every transaction that begins from now on (and replays after each restart)."""
        self._taps.add(tap)

    def facts(self) -> dict[str, object]:
        """Return facts for reports: slot, snapshot, LSNs. Plain values only."""
        session = self._session
        if session is None:
            return {"phase": self._phase[0]}
        copy = session.copy_progress
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
            "first_table": next((row.table for row in self._states.rows.values() if row.is_streaming), ""),
            "recopied": session.last_recopy[0],
            "recopied_ms": session.last_recopy[1],
            **self._side_topic_facts(),
            **self._taps.facts(),
            "slot": self.config.slot,
            **session.slot.facts(),
        }
        if session.collector is not None:
            status = session.collector.status
            facts |= {
                "received_lsn": str(Lsn(status.received + 1)),
                "confirmed_lsn": str(Lsn(status.reported_flush + 1)),
                "last_commit_time_ms": session.collector.last_commit_time_ms,
                "pending": {
                    name: str(position) for name, position in session.collector.tracker.pending_positions.items()
                },
                "stalled": session.collector.tracker.stalled_consumers(self._clock.now_ms(), STALL_GRACE_MS),
                "markers_left_out": session.markers_left_out,
                **session.collector.facts(),
                **(session.writer.facts() if session.writer is not None else {}),
            }
        return facts

    def _side_topic_facts(self) -> dict[str, object]:
        """Return the totals of all side topics, and the tables for whose copy WAL is retained."""
        adder = self._session.adder if self._session is not None else None
        names = [row.table for row in self._states.rows.values() if row.side_topic is not None]
        found = [
            sizes for name in names if adder is not None and (sizes := adder.wal_hold.side_topic_size(name)) is not None
        ]
        return {
            "set_aside_records": sum(each.records for each in found),
            "set_aside_bytes": sum(each.bytes for each in found),
            "set_aside_limit_bytes": self.config.copy_aside_max_mb << 20,
            "set_aside_appended": sum(each.appended for each in found),
            "wal_kept_for": adder.wal_hold.tables if adder is not None else [],
        }

    # running --------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Run sessions until `aclose`, whichever errors end them. Raises only failures to publish the status."""
        if self._closed:
            raise ClosedError(f"the capture is closed: capture={self.config.name}.")
        self._running = asyncio.current_task()
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def fail(_: str, error: BaseException) -> None:
            if not ended.done():
                ended.set_exception(error)

        sessions = run_unit(self.config.mark, self.run_sessions, tracker=self._tracker, clock=self._clock)
        try:
            async with Tasks(fail) as tasks:
                tasks.spawn(self._publish_statuses(), name="capture marks")
                tasks.spawn(sessions, name="capture sessions")
                await ended
        except asyncio.CancelledError:
            if not self._closed:
                raise
        finally:
            self._running = None

    async def run_sessions(self) -> None:
        """Run sessions until one fails, and raise its error. A session that ends because tables were added is no
        failure: the next one begins immediately.
        """
        while True:
            try:
                await self._run_session()
            except SessionRestartError as joined:
                log.info("the session restarts", capture=self.config.name, cause=joined.message)

    async def _run_session(self) -> None:
        self._began_s = self._clock.monotonic_s()
        self._session = Session(self._session_context)
        try:
            await self._session.run()
        except NoTablesError:
            self._settled, self._none_s = True, self._began_s
            raise
        finally:
            self._settled = self.knows_tables
            if self._reported_silence or not self._phase[0]:
                # A blocker that was reported while it streamed blocks nothing now.
                self._set_phase(
                    "the session ended", f"postgres:{server_address(self.config.dsn)}" if self._reported_silence else ""
                )

    async def aclose(self) -> None:
        """End the session: both connections close, and the lock and the slot are free. Idempotent."""
        self._closed = True
        running = self._running
        if running is not None and running is not asyncio.current_task():
            running.cancel()
            await asyncio.wait([running])
        self._states.statuses.close()
        for name in (self.config.mark, f"{self.config.mark}/topics", f"{self.config.mark}/history"):
            self._tracker.clear_failure(name)
            self._tracker.remove(name)

    # stage statuses -------------------------------------------------------------------------------
    def _set_phase(self, reason: str, held_by: str) -> None:
        self._phase = (reason, held_by)

    async def _publish_statuses(self) -> None:
        while True:
            self._publish_status()
            await asyncio.sleep(MARK_INTERVAL_S)

    def _publish_status(self) -> None:
        """Publish the stage statuses. While something is pending, the blocker is the consumer with the lowest flushed
        position.
        """
        session = self._session
        self._report_silence(session)
        self._report_history()
        if session is None or session.collector is None or not session.running:
            self._publish_set_up_status(session)
        else:
            self._publish_stream_status(session, session.collector)

    def _report_silence(self, session: Session | None) -> None:
        """Report a server that does not answer as a failure since the time of the request, not only when the session
        ends: a connection that drops packets would look idle until then.
        """
        overdue = session.answers.oldest_overdue() if session is not None else None
        mark = self.config.mark
        if overdue is not None and not self._reported_silence:
            what, asked_ms = overdue
            self._reported_silence = f"PostgreSQL does not answer: {describe_dsn(self.config.dsn)} waits_for={what!r}."
            self._tracker.fail(
                mark, self._reported_silence, now_ms=asked_ms, held_by=f"postgres:{server_address(self.config.dsn)}"
            )
        elif overdue is None and self._reported_silence:
            reported, self._reported_silence = self._reported_silence, ""
            failure = self._tracker.failure(mark)
            if failure is not None and failure.error == reported and session is not None and session.running:
                self._tracker.clear_failure(mark)

    def _report_history(self) -> None:
        """Report a failover, or a return to an earlier state, as a notice for a while. It is no failure, because it is
        known only once the database works again.
        """
        (said, at_ms), now_ms, name = self._states.history, self._clock.now_ms(), f"{self.config.mark}/history"
        if said and now_ms - at_ms <= HISTORY_NOTICE_MS:
            self._tracker.set_foundation(name, "", now_ms=now_ms, notice=said)
        elif self._tracker.mark(name) is not None:
            self._tracker.clear_failure(name)
            self._tracker.remove(name)

    def _publish_set_up_status(self, session: Session | None) -> None:
        """Publish the status of a set-up. Its position is the one that this or the previous process had reached: a slot
        that was just created has no progress yet, and its LSN differs after each restart. Copied rows count as
        progress.
        """
        (reason, held_by), now_ms = self._phase, self._clock.now_ms()
        copy = session.progress if session is not None else None
        if copy is not None and (copy.rows or copy.blocked) and not copy.done:
            reason, held_by = copy.sentence, copy.held_by or held_by
        elif copy is not None and copy.steps.doing and not held_by:
            reason = f"{reason}: {copy.steps.doing}"
        earlier = self._tracker.mark(self.config.mark)
        position = earlier.position if earlier is not None else 0
        slot = session.slot.state if session is not None and position else None
        self._tracker.set(
            self.config.mark, position, max(position + 1, slot.wal_end if slot else 0), now_ms=now_ms,
            held_by=held_by, reason=reason, budget_ms=self.config.budget_ms, unit="lsn",
            progress=copy.rows + copy.chunks_done + copy.steps.count if copy is not None else 0,
        )  # fmt: skip

    def _publish_stream_status(self, session: Session, collector: Collector) -> None:
        """Publish the status of a stream. The LSN does not move during a transaction or a concurrent copy, so changes
        that are received, made durable, or copied count as progress.
        """
        name, now_ms, budget_ms = self.config.mark, self._clock.now_ms(), self.config.budget_ms
        reason, held_by = self._phase
        confirmed = collector.status.sent + 1
        wal_end = max(session.slot.state.wal_end if session.slot.state else 0, collector.status.received + 1)
        holder, copied_rows = collector.tracker.blocking_consumer(), 0
        if session.adder is not None:
            session.adder.mark()
            copy = session.adder.progress
            copied_rows = copy.moved + copy.chunks_done + copy.steps.count
            kept_for = session.adder.wal_hold.tables
            if collector.status.reported_flush < collector.status.flushed and kept_for:
                holder = self.config.table_mark(kept_for[0])
                reason = reason or "the confirmed LSN stays at the start of a table's copy"
        if not reason and confirmed < wal_end and holder:
            reason = f"waits until {holder} has flushed the changes that it received"
        elif not reason and confirmed < wal_end:
            reason, holder = "waits for WAL that PostgreSQL has not sent", f"postgres:{server_address(self.config.dsn)}"
        landed_bytes = session.writer.landed_bytes if session.writer is not None else 0
        progress = collector.taken_changes + landed_bytes + copied_rows + session.waits.seen_at_work
        self._tracker.set(
            name, confirmed, wal_end, now_ms=now_ms, held_by=held_by or holder, reason=reason,
            budget_ms=budget_ms, unit="lsn", progress=progress,
        )  # fmt: skip
        if session.binder is not None and session.writer is not None:
            bound = session.binder.latest.lsn if session.binder.latest is not None else 0
            topic = session.writer.blocking_topic
            self._tracker.set(
                f"{name}/topics", bound, max(collector.last_commit_lsn, bound), now_ms=now_ms, held_by=topic,
                reason="a topic does not accept its records" if topic else "", budget_ms=budget_ms, unit="lsn",
                progress=progress,
            )  # fmt: skip
