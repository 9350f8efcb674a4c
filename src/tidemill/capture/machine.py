"""Capture: sessions, one after another, with back-off between them, and what the world may see of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import Closed, Conflict, Fenced, TidemillError, Unavailable, Unknown
from tidemill.base.frontier import Lsn
from tidemill.base.marks import Tracker
from tidemill.base.tasks import Tasks
from tidemill.capture.changes import Relation
from tidemill.capture.config import CaptureConfig
from tidemill.capture.session import Session
from tidemill.capture.setup import check_server
from tidemill.capture.sinks import Sink
from tidemill.capture.tables import list_tables, resolve
from tidemill.capture.wire.connection import Wire
from tidemill.metastore.catalogue import Catalogue
from tidemill.shards.front import Remap
from tidemill.topics.front import PartitionReader, TopicLog

log = structlog.get_logger()

BACKOFF_S = 0.5
BACKOFF_MAX_S = 10.0
MARK_INTERVAL_S = 0.25
MARK_BUDGET_MS = 10_000
STALL_GRACE_MS = 60_000

_PASSES_BY = (Unavailable, Unknown, Conflict, Fenced, Closed)


class Capture:
    """One captured database. `add_sink` works before and during `run`.

    Marks: `capture:<name>` (position: confirmed LSN, target: the server's WAL end, unit lsn) and
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
        tracker: Tracker | None = None,
        sinks: Sequence[Sink] = (),
        reader: PartitionReader | None = None,
    ) -> None:
        """`reader` is accepted for symmetry with other sources; tails are read through `topics`."""
        self.config = config
        self._topics = topics
        self._catalogue = catalogue
        self._remap = remap
        self._clock = clock
        self._rand = rand
        self._tracker = tracker or Tracker()
        self._sinks = list(sinks)
        self._session: Session | None = None
        self._relations: list[Relation] = []
        self._phase = ("starting", "")
        self._running: asyncio.Task[object] | None = None
        self._closed = False

    # what others may ask --------------------------------------------------------------------------
    @property
    def dsn(self) -> str:
        return self.config.dsn

    def relations(self) -> list[Relation]:
        """The captured tables as the stream describes them now; empty until the first session is set up."""
        if self._session is not None and self._session.relations:
            self._relations = self._session.relations
        return list(self._relations)

    def relation(self, schema: str, table: str) -> Relation | None:
        return next((r for r in self.relations() if (r.schema, r.table) == (schema, table)), None)

    @property
    def streaming(self) -> bool:
        return self._session is not None and self._session.streaming

    def add_sink(self, sink: Sink) -> None:
        """It receives every transaction that begins from now on (and replays after each restart)."""
        self._sinks.append(sink)
        if self._session is not None:
            self._session.add_sink(sink)

    def remove_sink(self, sink: Sink) -> None:
        self._sinks = [each for each in self._sinks if each is not sink]
        if self._session is not None:
            self._session.remove_sink(sink)

    def facts(self) -> dict[str, object]:
        """For reports: slot, snapshot, LSNs. Plain values only."""
        session = self._session
        if session is None:
            return {"phase": self._phase[0]}
        facts: dict[str, object] = {
            "phase": self._phase[0] or "streaming",
            "generation": session.generation,
            "snapshot_rows": session.progress.rows,
            "snapshot_rows_expected": session.progress.expected,
            "snapshot_rows_per_s": round(session.progress.rows_per_s, 1),
            "snapshot_table": session.progress.table,
            "snapshot_done": session.streaming or session.progress.done,
        }
        if session.slot is not None:
            facts |= {
                "slot_retained_bytes": session.slot.retained_bytes,
                "slot_headroom_bytes": session.slot.headroom_bytes,
                "slot_wal_status": session.slot.wal_status,
            }
        if session.collector is not None:
            status = session.collector.status
            facts |= {
                "received_lsn": str(Lsn(status.received + 1)),
                "confirmed_lsn": str(Lsn(status.flushed + 1)),
                "last_commit_time_ms": session.collector.last_commit_time_ms,
                "pending": {name: str(position) for name, position in session.collector.tracker.pending.items()},
                "stalled": session.collector.tracker.stalled(self._clock.now_ms(), STALL_GRACE_MS),
            }
        return facts

    async def check(self) -> None:
        """Connect and check settings, rights and tables, changing nothing. Raises Invalid, Missing or Unavailable."""
        wire = await Wire.connect(self.config.dsn, purpose=f"check {self.config.name}")
        try:
            await check_server(wire, self.config)
            resolve(self.config.tables, await list_tables(wire))
        finally:
            await wire.aclose()

    # running --------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Until `aclose`. Raises what only the operator can mend (Invalid, Missing, Corrupt); everything else is
        tried again with back-off."""
        if self._closed:
            raise Closed(f"the capture was closed: capture={self.config.name}.")
        self._running = asyncio.current_task()
        backoff_s = BACKOFF_S
        async with Tasks() as tasks:
            tasks.spawn(self._publish_marks(), name="capture marks")
            try:
                while True:
                    started_s = self._clock.monotonic_s()
                    error = await self._one_session()
                    if self._clock.monotonic_s() - started_s > BACKOFF_MAX_S:
                        backoff_s = BACKOFF_S
                    self._set_phase(f"trying again: {error}", "postgres")
                    log.warning("capture session ended", capture=self.config.name, cause=str(error))
                    await asyncio.sleep(self._rand.uniform(backoff_s / 2, backoff_s))
                    backoff_s = min(BACKOFF_MAX_S, backoff_s * 2)
            except TidemillError as error:
                self._set_phase(str(error), "operator")
                self._mark()
                raise
            except asyncio.CancelledError:
                if not self._closed:
                    raise
            finally:
                self._running = None

    async def aclose(self) -> None:
        """End the session: both connections close, the lock and the slot are free. Idempotent."""
        self._closed = True
        running = self._running
        if running is not None and running is not asyncio.current_task():
            running.cancel()
            await asyncio.wait([running])
        self._tracker.remove(self.config.mark)
        self._tracker.remove(f"{self.config.mark}/topics")

    async def _one_session(self) -> TidemillError:
        """Returns an error that passes by; raises any other."""
        session = self._session = Session(
            self.config,
            topics=self._topics,
            catalogue=self._catalogue,
            remap=self._remap,
            sinks=self._sinks,
            clock=self._clock,
            rand=self._rand,
            on_phase=self._set_phase,
        )
        try:
            await session.run()
        except _PASSES_BY as error:
            return error
        return Unavailable("the session ended.")

    # marks ----------------------------------------------------------------------------------------
    def _set_phase(self, reason: str, held_by: str) -> None:
        self._phase = (reason, held_by)

    async def _publish_marks(self) -> None:
        while True:
            self._mark()
            await asyncio.sleep(MARK_INTERVAL_S)

    def _mark(self) -> None:
        """M1: while something is pending, the holder is the consumer with the least flushed position."""
        name, now_ms = self.config.mark, self._clock.now_ms()
        reason, held_by = self._phase
        session = self._session
        collector = session.collector if session is not None else None
        if session is None or collector is None:
            retained = session.slot if session is not None else None
            position = retained.confirmed_lsn if retained else 0
            target = max(position + 1, retained.wal_end if retained else 1)
            if session is not None and session.progress.rows and not session.progress.done:
                p = session.progress
                reason = f"copying {p.table}: {p.rows} of about {p.expected} rows, {p.rows_per_s:.0f} rows/s"
            self._tracker.set(
                name, position, target, now_ms=now_ms, held_by=held_by, reason=reason, budget_ms=60_000, unit="lsn"
            )
            return
        confirmed = collector.status.flushed + 1
        wal_end = max(session.slot.wal_end if session.slot else 0, collector.status.received + 1)
        holder = collector.tracker.holder()
        if not reason and confirmed < wal_end and holder:
            reason = f"waits until {holder} has flushed what it was sent"
        self._tracker.set(
            name, confirmed, wal_end, now_ms=now_ms, held_by=held_by or holder, reason=reason,
            budget_ms=MARK_BUDGET_MS, unit="lsn",
        )  # fmt: skip
        if session.binder is not None and session.writer is not None:
            bound = session.binder.latest.lsn if session.binder.latest is not None else 0
            topic = session.writer.held_by
            self._tracker.set(
                f"{name}/topics", bound, max(collector.last_commit_lsn, bound), now_ms=now_ms, held_by=topic,
                reason="a topic does not take its records" if topic else "", budget_ms=MARK_BUDGET_MS, unit="lsn",
            )  # fmt: skip
