"""Schedule of the tables of one feed: which are due, what happens to a table that fails, how far each has advanced.

An exception of any type concerns only the table that raised it. That table leaves the schedule, and its owner is
informed (table_unit.py); while storage is unavailable, a table stays scheduled and waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import UnavailableError, UnknownOutcomeError
from tidemill.base.runtime.tasks import Backoff, error_sentence, is_fault
from tidemill.base.status.histogram import SINCE_BOUND, StageHistograms
from tidemill.spark.ingest.step_planner import Step
from tidemill.spark.ingest.table_writer import TableWriter

IDLE_MOVE_S = 1.0
"""Minimum interval at which a table without records moves its upper: otherwise a hundred idle tables would cost a
hundred appends for every binding of a busy one. A reader of both at one time waits that long."""
RETRY_S = 0.2
SLOWEST_RETRY_S = 5.0

OnFailure = Callable[[BaseException, bool], None]
"""(the failure of a table, whether it left the schedule). Called from the thread that advances tables."""

log = structlog.get_logger()


class ScheduledTable:
    """One table while it is scheduled."""

    def __init__(self, table: TableWriter, on_failure: OnFailure | None) -> None:
        self.table = table
        self.on_failure = on_failure
        self.aside = False
        """True while a separate thread works on it."""
        self.due_s = 0.0
        self.moved_s = float("-inf")
        self.nothing_until = 0
        """Time up to which there was nothing for the table when it was last planned."""
        self.pauses = Backoff(RETRY_S, SLOWEST_RETRY_S)

    @property
    def name(self) -> str:
        return self.table.name


class TableSchedule:
    """Schedule of one feed. Any thread may attach and detach; the thread that advances tables does the rest.

    Readers use one dict that is replaced and never modified; `_changing` serializes the threads that replace it, so
    that none loses the change of another.
    """

    def __init__(self, clock: Clock, stages: StageHistograms, idle_move_s: float = IDLE_MOVE_S) -> None:
        self.failed: dict[str, BaseException] = {}
        """Failures with which tables left the schedule."""
        self.changed = threading.Event()
        """Set when another table may be due: one was attached, a round ended, or the target moved."""
        self.attached = threading.Event()
        """Set when a table was attached: it does not wait for the next round of the others."""
        self._clock = clock
        self._stages = stages
        self._idle_move_s = idle_move_s
        self._seats: dict[str, ScheduledTable] = {}
        self._changing = threading.Lock()

    @property
    def tables(self) -> list[TableWriter]:
        return [seat.table for _, seat in sorted(self._seats.items())]

    @property
    def idle_tables(self) -> list[TableWriter]:
        """All tables except those that a separate thread works on."""
        return [seat.table for seat in self._seats.values() if not seat.aside]

    def attach(self, table: TableWriter, on_failure: OnFailure | None = None) -> None:
        """Schedule the table from the next round on."""
        self.failed.pop(table.name, None)
        seat = ScheduledTable(table, on_failure)
        with self._changing:
            self._seats = {**self._seats, seat.name: seat}
        self.attached.set()
        self.changed.set()

    def detach(self, name: str) -> None:
        with self._changing:
            self._seats = {n: seat for n, seat in self._seats.items() if n != name}

    def due_tables(self, end: int) -> list[ScheduledTable]:
        now_s = self._clock.monotonic_s()
        return [s for s in self._seats.values() if (at_s := self._due_at_s(s, end)) is not None and at_s <= now_s]

    def due_in_s(self, end: int) -> float | None:
        """Return the time until some table is due, 0 if one is; None if none is expected."""
        at_s = [at_s for s in self._seats.values() if (at_s := self._due_at_s(s, end)) is not None]
        return max(0.0, min(at_s) - self._clock.monotonic_s()) if at_s else None

    def _due_at_s(self, seat: ScheduledTable, end: int) -> float | None:
        if seat.table.upper >= end or seat.aside:
            return None
        return max(seat.due_s, seat.moved_s + self._idle_move_s) if end <= seat.nothing_until else seat.due_s

    def moved_lately(self, seat: ScheduledTable) -> bool:
        return seat.moved_s + self._idle_move_s > self._clock.monotonic_s()

    def run_isolated(self, seat: ScheduledTable, call: Callable[[], None]) -> bool:
        """Run one table's share of a round; attribute any exception to that table. Return whether it succeeded."""
        try:
            call()
        except BaseException as error:
            if not is_fault(error):
                raise
            self.handle_failure(seat, error)
            return False
        return True

    def handle_failure(self, seat: ScheduledTable, error: BaseException) -> None:
        """Pause the table if storage is unavailable; remove it from the schedule for any other failure."""
        leaves = not isinstance(error, UnavailableError | UnknownOutcomeError)
        if leaves:
            self.failed[seat.name] = error
            with self._changing:  # only this entry: the table may have been attached again
                self._seats = {n: other for n, other in self._seats.items() if other is not seat}
        else:
            pause_s = seat.pauses.pause_s(0.0)
            seat.due_s = self._clock.monotonic_s() + pause_s
            log.warning("table waits", table=seat.name, error=error_sentence(error), retry_in_s=pause_s)
        if seat.on_failure is not None:
            seat.on_failure(error, leaves)

    def record_progress(self, seat: ScheduledTable, step: Step, records: int) -> None:
        seat.pauses = Backoff(RETRY_S, SLOWEST_RETRY_S)
        seat.moved_s = self._clock.monotonic_s()
        seat.table.progress.add(records)
        seat.table.progress.to_go = step.to_go
        self.record_latency("appended", [step])

    def record_latency(self, stage: str, steps: Iterable[Step]) -> None:
        """Record the latency of every binding that brought a table records: from the commit at the source to the stage.
        For `appended` also from the binding, which is the pipeline's own share."""
        now_ms = self._clock.now_ms()
        for step in steps:
            times = {t for s in step.slices for t in s.times}
            brought = [binding for binding in step.bindings if binding.time_ms in times]
            self._stages.add(stage, [binding.source_time_ms for binding in brought], now_ms)
            if stage == "appended":
                self._stages.add(SINCE_BOUND, [binding.time_ms for binding in brought], now_ms)
