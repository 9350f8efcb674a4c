"""Sink of one feed: advance every table from its own upper to the newest binding or the end of a micro-batch, in steps
(step_executor.py).

A Spark batch only means "time has reached `end`". The shard's upper and the remap shard determine what is read.

Invariant (scratch checkpoint): a replay after a crash (p ≥ end) does nothing, a gap or a foreign checkpoint (p < start)
is simply read, and a batch id never identifies anything. p = the table's upper.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from tidemill.base.errors import UnavailableError, UnknownOutcomeError
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.base.runtime.tasks import error_sentence
from tidemill.shards.api import Remap
from tidemill.spark.ingest.dead_letters import DeadLetterWriter
from tidemill.spark.ingest.fetch_decode import DECODERS
from tidemill.spark.ingest.schema_growth import SourceSchemaGrewError
from tidemill.spark.ingest.steps.step_executor import StepExecutor
from tidemill.spark.ingest.table_schedule import TableSchedule
from tidemill.spark.ingest.table_writer import TableWriter
from tidemill.spark.stores import Stores


class FeedSink:
    """Sink of the tables that `seats` schedules. Any thread may call `process`, which runs one call at a time, and
    `stop`, and attach or detach tables. `decoders`: number of threads that decode; 0 = the caller's only."""

    def __init__(
        self,
        portal: BlockingPortal,
        stores: Stores,
        source: str,
        remap: Remap,
        seats: TableSchedule,
        dead_letters: DeadLetterWriter | None = None,
        *,
        decoders: int = DECODERS,
    ) -> None:
        self.source = source
        self.remap = remap
        self.seats = seats
        self.target = 0
        """End of the newest binding that this sink has seen (exclusive)."""
        self.error = ""
        """Reason why no table of the feed advances."""
        self._portal = portal
        self._stopping = threading.Event()
        self._one_at_a_time = threading.Lock()
        self.idle = threading.Event()
        """Set while no batch is being processed."""
        self.idle.set()
        self._reached = threading.Event()
        """Set while every table is at `target`, or cannot advance to it."""
        self._reached.set()
        pool = ThreadPoolExecutor(decoders, f"decode-{source}") if decoders else None
        self.steps = StepExecutor(portal, stores, remap, seats, dead_letters, pool, self._stopping)

    @property
    def records(self) -> int:
        """Records in all rounds of this process."""
        return self.steps.records

    @property
    def idle_tables(self) -> list[TableWriter]:
        """Tables that no thread is changing, so their mirrors may be saved: a half-applied change would be trusted
        later."""
        return self.seats.idle_tables if self.idle.is_set() else []

    def stop(self) -> None:
        """End the current batch as soon as possible, and start no other."""
        self._stopping.set()

    def advance(self, end: int | None = None) -> None:
        """Process to `end`, or else to the newest binding; if storage is unavailable, set `error`."""
        try:
            self.process(self.latest() if end is None else end)
        except (UnavailableError, UnknownOutcomeError) as error:
            self.error = error_sentence(error)

    def advance_to(self, end: int) -> None:
        """Advance to the end of a micro-batch. If a round is running, return: its thread continues to this end."""
        self._raise_target(end)
        if self.idle.is_set():
            self.advance(end)

    def latest(self) -> int:
        """Return the end of the newest binding: the target of this feed's tables."""
        return self._portal.call(self.fetch_newest_time())

    async def fetch_newest_time(self) -> int:
        """Return the same as `latest`, on the portal's loop."""
        newest = await self.remap.latest()
        if newest is not None:
            self._raise_target(newest.time_ms + 1)
        return self.target

    def _raise_target(self, end: int) -> None:
        if end > self.target:
            self.target = end
            self._reached.clear()
            self.seats.changed.set()

    async def wait_for_binding(self, timeout_s: float) -> None:
        """Return once there is a binding newer than the newest seen, and update `target`, or after the timeout."""
        newest = await self.remap.wait(self.target - 1, timeout_s)
        if newest is not None:
            self._raise_target(newest.time_ms + 1)

    def wait_until_reached(self, timeout_s: float) -> bool:
        """Wait until `process` has advanced the tables to `target`; return False after the timeout."""
        return self._reached.wait(timeout_s)

    @property
    def due_in_s(self) -> float | None:
        """Time until a call of `process` would advance a table; None if only `seats.changed` can tell."""
        return self.seats.due_in_s(self.target) if self.idle.is_set() else None

    def process(self, end: int) -> None:
        """Advance every table that can to `end`. Tables that fail, wait or are processed separately stay behind."""
        self.target = max(self.target, end)
        with self._one_at_a_time:
            if self._stopping.is_set():
                return  # once idle after a stop, it stays idle: its mirrors may be saved
            self.idle.clear()
            try:
                while not self._stopping.is_set():
                    for seat in [seat for seat in self.seats.due_tables(end) if seat.table.outgrown]:
                        self.seats.handle_failure(
                            seat,
                            SourceSchemaGrewError(f"the source has a new description of the table: table={seat.name}."),
                        )
                    due = self.seats.due_tables(end)
                    if not due:
                        self.error = ""
                        return
                    self.steps.run_round(due, end)
            finally:
                self.steps.end_rounds()
                if end >= self.target:
                    self._reached.set()
                self.idle.set()
                self.seats.changed.set()
