"""The tables of one feed while they take part: which are due, what becomes of one that fails, how far each has come.

What one of them raises, of whatever type, is that table's own. It leaves its seat and its owner hears of it
(table_unit.py); storage that is away is waited for in the seat.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import UnavailableError, UnknownOutcomeError
from tidemill.base.runtime.tasks import Backoff, is_fault, sentence
from tidemill.base.status.histogram import SINCE_BOUND, Stages
from tidemill.spark.ingest.step_planner import Step
from tidemill.spark.ingest.table_writer import TableWriter

IDLE_MOVE_S = 1.0
"""A table that got nothing moves its upper this often at most: a hundred idle tables beside a busy one would else
cost a hundred appends for every binding. Whoever reads them at one time with the busy one waits that long."""
RETRY_S = 0.2
SLOWEST_RETRY_S = 5.0

Told = Callable[[BaseException, bool], None]
"""(what a table failed with, whether it left its seat). Called from the thread that brings tables forward."""

log = structlog.get_logger()


class ScheduledTable:
    """One table while it takes part."""

    def __init__(self, table: TableWriter, told: Told | None) -> None:
        self.table = table
        self.told = told
        self.aside = False
        """A thread of its own works on it."""
        self.due_s = 0.0
        self.moved_s = float("-inf")
        self.nothing_until = 0
        """Up to this time there was nothing for the table when it was last looked at."""
        self.pauses = Backoff(RETRY_S, SLOWEST_RETRY_S)

    @property
    def name(self) -> str:
        return self.table.name


class TableSchedule:
    """Any thread may attach and detach; the one that brings tables forward does the rest.

    What reads the seats reads one dict, which nobody changes; `_changing` keeps two who replace it from losing the
    seat that the other gave or took.
    """

    def __init__(self, clock: Clock, stages: Stages, idle_move_s: float) -> None:
        self.failed: dict[str, BaseException] = {}
        """What tables left their seats with."""
        self.changed = threading.Event()
        """Set when somebody may be due who was not: a seat was taken, a round ended, there is more to come to."""
        self._clock = clock
        self._stages = stages
        self._idle_move_s = idle_move_s
        self._seats: dict[str, ScheduledTable] = {}
        self._changing = threading.Lock()

    @property
    def tables(self) -> list[TableWriter]:
        return [seat.table for _, seat in sorted(self._seats.items())]

    @property
    def at_rest(self) -> list[TableWriter]:
        """All but those that a thread of their own works on."""
        return [seat.table for seat in self._seats.values() if not seat.aside]

    def attach(self, table: TableWriter, told: Told | None = None) -> None:
        """From the next round on."""
        self.failed.pop(table.name, None)
        seat = ScheduledTable(table, told)
        with self._changing:
            self._seats = {**self._seats, seat.name: seat}
        self.changed.set()

    def detach(self, name: str) -> None:
        with self._changing:
            self._seats = {n: seat for n, seat in self._seats.items() if n != name}

    def due(self, end: int) -> list[ScheduledTable]:
        now_s = self._clock.monotonic_s()
        return [s for s in self._seats.values() if (at_s := self._due_at_s(s, end)) is not None and at_s <= now_s]

    def due_in_s(self, end: int) -> float | None:
        """How long until some table is due, 0 where one is; None while none is to come."""
        at_s = [at_s for s in self._seats.values() if (at_s := self._due_at_s(s, end)) is not None]
        return max(0.0, min(at_s) - self._clock.monotonic_s()) if at_s else None

    def _due_at_s(self, seat: ScheduledTable, end: int) -> float | None:
        if seat.table.upper >= end or seat.aside:
            return None
        return max(seat.due_s, seat.moved_s + self._idle_move_s) if end <= seat.nothing_until else seat.due_s

    def moved_lately(self, seat: ScheduledTable) -> bool:
        return seat.moved_s + self._idle_move_s > self._clock.monotonic_s()

    def alone(self, seat: ScheduledTable, call: Callable[[], None]) -> bool:
        """Run one table's share: what it raises is that table's own."""
        try:
            call()
        except BaseException as error:
            if not is_fault(error):
                raise
            self.fault(seat, error)
            return False
        return True

    def fault(self, seat: ScheduledTable, error: BaseException) -> None:
        """Storage that is away is waited for where the table sits; anything else makes it leave."""
        leaves = not isinstance(error, UnavailableError | UnknownOutcomeError)
        if leaves:
            self.failed[seat.name] = error
            with self._changing:  # only its own: the table may have been given another seat
                self._seats = {n: other for n, other in self._seats.items() if other is not seat}
        else:
            pause_s = seat.pauses.pause_s(0.0)
            seat.due_s = self._clock.monotonic_s() + pause_s
            log.warning("table waits", table=seat.name, error=sentence(error), retry_in_s=pause_s)
        if seat.told is not None:
            seat.told(error, leaves)

    def went_on(self, seat: ScheduledTable, step: Step, records: int) -> None:
        seat.pauses = Backoff(RETRY_S, SLOWEST_RETRY_S)
        seat.moved_s = self._clock.monotonic_s()
        seat.table.progress.add(records)
        seat.table.progress.to_go = step.to_go
        self.came_to("appended", [step])

    def came_to(self, stage: str, steps: Iterable[Step]) -> None:
        """Once for every binding that brought a table something: commit at the source → stage. For `appended` also
        binding → stage, which is our own share of it."""
        now_ms = self._clock.now_ms()
        for step in steps:
            times = {t for s in step.slices for t in s.times}
            brought = [binding for binding in step.bindings if binding.time_ms in times]
            self._stages.add(stage, [binding.source_time_ms for binding in brought], now_ms)
            if stage == "appended":
                self._stages.add(SINCE_BOUND, [binding.time_ms for binding in brought], now_ms)
