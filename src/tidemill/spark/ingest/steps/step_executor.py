"""Executor of the steps of one feed's tables: plan one step of each due table, choose those that fit into a round, and
append each to its table.

    a step [p, e) by the bindings → decode → dead letters → drain → one part → one append

Small steps are computed here, larger ones by Spark tasks through the same functions (distributed_step.py), with the
append still here. While a step is resolved and written, the next one is fetched and decoded (`Prefetcher`). A lost race
is recomputed from the peer's upper, never trimmed. Tables share only a round, so that a hundred small ones cost one
round trip; they fail independently (table_schedule.py). A time that is too large for a step is processed in a separate
thread (oversized_step.py).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from tidemill.base.errors import InvalidError, TidemillError
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.shards.api import Remap
from tidemill.spark.decode.captured import Stop
from tidemill.spark.ingest.dead_letters import (
    DeadLetterWriter,
    StepDeadLetters,
    letters_of_resolved,
    stop_of_rejected,
    violations_of_rejected,
)
from tidemill.spark.ingest.fetch_decode import Batches, Decoded, Prefetcher, decode, fetch_batches
from tidemill.spark.ingest.schema_growth import SourceSchemaGrewError
from tidemill.spark.ingest.step_planner import STEP_BYTES, STEP_RECORDS, Step, StepPlanner
from tidemill.spark.ingest.steps.distributed_step import DistributedStep
from tidemill.spark.ingest.steps.oversized_step import OversizedStep
from tidemill.spark.ingest.table_schedule import ScheduledTable, TableSchedule
from tidemill.spark.ingest.table_writer import TableWriter
from tidemill.spark.merge.commands import Commands, filter_commands, times_of
from tidemill.spark.predicates.expectations import Violations
from tidemill.spark.stores import Stores

if TYPE_CHECKING:
    from pyspark import SparkContext

INLINE_ROWS = 20_000
"""Largest step, in records, that the driver computes if the cluster has executors. On a single machine the driver
computes every step: tasks cost three times as much and more at every possible step size (`./dev bench upsert`,
benchmarks/results/pipelines.md)."""


class TableStopsError(InvalidError):
    """The table is advanced to the last time before a record that it cannot represent, and no further."""


class _StepWork(msgspec.Struct):
    """Work of one table in a round. `upper` shrinks if the table stops."""

    seat: ScheduledTable
    step: Step
    upper: int
    decoded: Decoded | None = None
    pending: Any = None
    commands: Commands | None = None
    dead: Any = None
    """Decoded records and dead letters, until the step is in the table."""
    violations: tuple[Violations, ...] = ()

    @property
    def table(self) -> TableWriter:
        return self.seat.table


class StepExecutor:
    """Executor of one feed, for one thread at a time. `decoders`: threads that decode, none = the caller's. `stopping`:
    set when an oversized step must end early."""

    def __init__(
        self,
        portal: BlockingPortal,
        stores: Stores,
        remap: Remap,
        seats: TableSchedule,
        dead_letters: DeadLetterWriter | None,
        decoders: ThreadPoolExecutor | None,
        stopping: threading.Event,
    ) -> None:
        self.records = 0
        """Records in the steps of all rounds."""
        self._portal = portal
        self._stores = stores
        self._seats = seats
        self._dead = dead_letters
        self._decoders = decoders
        self._stopping = stopping
        self._planner = StepPlanner(stores, remap)
        self._ahead = Prefetcher(portal, stores, remap, decoders)
        self._by_tasks: DistributedStep | None = None
        self._most_inline = STEP_RECORDS
        self._round_bytes = 0

    @property
    def in_flight_bytes(self) -> int:
        """Stored bytes of the current round and of the prefetched step; at most three steps' worth."""
        return self._round_bytes + self._ahead.bytes

    def use_spark(self, context: SparkContext, inline_rows: int | None = None) -> None:
        """Allow Spark tasks for steps of more than `inline_rows` records, as is best for the cluster by default; until
        then every step is computed here."""
        if inline_rows is None:
            inline_rows = STEP_RECORDS if str(context.master).startswith("local") else INLINE_ROWS
        self._by_tasks, self._most_inline = DistributedStep(context, self._stores), inline_rows

    def end_rounds(self) -> None:
        """Discard what was prefetched, because no table is due."""
        self._round_bytes = 0
        self._ahead.discard()

    # one round ----------------------------------------------------------------------------------------
    def run_round(self, due: Sequence[ScheduledTable], end: int) -> None:
        """Process one step of every table that fits into the round's share of memory; at least one."""
        self._planner.start_round()
        ahead = next((s for s in due if self._ahead.is_for(s.name, _feed_of(s), s.table.upper)), None)
        prepared = self._ahead.wait_result() if ahead is not None else None
        to_plan = [s for s in due if prepared is None or s is not ahead]
        planned = self._gather([(s, self._planner.next(s.name, _feed_of(s), s.table.upper, end)) for s in to_plan])
        small: list[_StepWork] = []
        for seat, step in planned:
            if step.large:
                self._start_oversized(seat, step)
            elif not step.slices and step.upper >= end and self._seats.moved_lately(seat):
                seat.nothing_until = step.upper
            else:
                small.append(_StepWork(seat, step, step.upper))
        if ahead is not None and prepared is not None:
            small.append(_StepWork(ahead, prepared.step, prepared.step.upper, prepared.decoded))
        work = _select_round(small)
        self._seats.record_latency("planned", (w.step for w in work))
        self._round_bytes = sum(w.step.bytes for w in work)
        self.records += sum(w.step.records for w in work)
        self._prefetch_next(small, work, end)
        # Tasks have no tombstones.
        big = [w for w in work if w.step.records > self._most_inline and w.table.tombstones is None]
        self._run_inline([w for w in work if w not in big])
        if big:
            self._run_distributed(big)

    def _prefetch_next(self, small: Sequence[_StepWork], work: Sequence[_StepWork], end: int) -> None:
        """Prefetch the step that is certainly needed next: of the table that will then be furthest behind."""
        after = [((w.upper if w in work else w.step.lower), w.seat.name, w.seat) for w in small]
        lower, _, seat = min(after, key=lambda one: one[:2], default=(end, "", None))
        if lower < end and seat is not None:
            self._ahead.start(seat.name, _feed_of(seat), seat.table.schemas, lower, end, self._most_inline)

    def _gather(self, calls: Sequence[tuple[ScheduledTable, Any]]) -> list[tuple[ScheduledTable, Any]]:
        """Await all calls concurrently on the portal's loop. Failures are reported to their tables, results
        returned."""

        async def run() -> list[Any]:
            return list(await asyncio.gather(*(call for _, call in calls), return_exceptions=True))

        out = []
        for (seat, _), found in zip(calls, self._portal.call(run()), strict=True):
            if isinstance(found, BaseException):
                self._seats.handle_failure(seat, found)
            else:
                out.append((seat, found))
        return out

    def _run_inline(self, work: Sequence[_StepWork]) -> None:
        """Decode and resolve on this thread; then write the parts and appends of all tables concurrently."""
        by_seat = {w.seat.name: w for w in work}
        self._fetch([w for w in work if w.decoded is None])
        self._seats.record_latency("decoded", (w.step for w in work if w.decoded is not None))
        ready = [w for w in work if w.decoded is not None and self._seats.run_isolated(w.seat, partial(self._drain, w))]
        appended = self._gather([(w.seat, self._append(w)) for w in ready])
        for seat, won in appended:
            item = by_seat[seat.name]
            self._seats.run_isolated(seat, partial(self._settle, item, won))

    def _fetch(self, work: Sequence[_StepWork]) -> None:
        """Fetch for all tables concurrently, then decode; an unreadable table gets the error."""
        fetched = self._portal.call(fetch_batches(self._stores.objects, [w.step.descriptors for w in work]))
        for item, batches in zip(work, fetched, strict=True):
            if isinstance(batches, TidemillError):
                self._seats.handle_failure(item.seat, batches)
            else:
                self._seats.run_isolated(item.seat, partial(self._decode, item, batches))

    def _decode(self, item: _StepWork, batches: Batches) -> None:
        feed, schemas = _feed_of(item.seat), item.table.schemas
        item.decoded = decode(feed, item.step.descriptors, batches, self._decoders, schemas)

    def _drain(self, item: _StepWork) -> None:
        table, decoded = item.table, item.decoded
        assert decoded is not None
        item.decoded = None  # the operator owns it from here on
        item.commands, item.dead = decoded.commands, decoded.dead
        if decoded.stop is not None:
            item.upper = _stop_time(decoded.stop, item.step.lower)
        self._put_dead_letters(decoded.dead)
        table.follow_tombstones()
        table.operator.replace_stash(decoded.commands)
        table.operator.advance(item.upper)
        item.pending = table.operator.drain()
        stop = stop_of_rejected(_feed_of(item.seat), item.pending)
        if stop is not None:
            item.upper = _stop_time(stop, item.step.lower)
            item.commands = filter_commands(decoded.commands, times_of(decoded.commands) < item.upper)
            table.operator.replace_stash(item.commands)
            table.operator.advance(item.upper)
            item.pending = table.operator.drain()
        item.violations = decoded.violations + violations_of_rejected(item.pending)
        self._put_dead_letters(letters_of_resolved(_feed_of(item.seat), item.pending))
        table.put_tombstones([item.pending])

    async def _append(self, item: _StepWork) -> bool:
        found = item.pending
        if found.upper <= found.lower:
            return True
        parts = await item.table.write(found.updates)
        self._seats.record_latency("written", [item.step])
        return await item.table.append(found.lower, found.upper, parts)

    def _settle(self, item: _StepWork, won: bool) -> None:
        if won and item.pending.upper > item.pending.lower:
            item.table.committed(item.pending)
            item.table.count_violations(item.violations, item.pending.upper)
        elif not won:
            item.table.follow()
        item.table.dead_run.add_step(item.commands, item.dead)
        item.commands = item.dead = None
        self._seats.record_progress(item.seat, item.step, item.step.records)

    def _run_distributed(self, work: Sequence[_StepWork]) -> None:
        """Compute the steps in Spark: tasks by table and hash range write parts, the driver appends."""
        assert self._by_tasks is not None
        results = self._by_tasks.run([(w.table, w.step) for w in work])
        self._seats.record_latency("written", (w.step for w in work if not results[w.seat.name].inline))
        over = []
        for item in work:
            found = results[item.seat.name]
            if found.inline:
                over.append(item)
            elif self._seats.run_isolated(item.seat, partial(self._append_results, item, found)):
                buried = StepDeadLetters()
                buried.add(found.dead)
                item.table.dead_run.add_counted_step(item.step.records, buried)
                self._seats.record_progress(item.seat, item.step, item.step.records)
        self._run_inline(over)

    def _append_results(self, item: _StepWork, found: Any) -> None:
        assert self._by_tasks is not None
        self._put_dead_letters(found.dead)
        self._by_tasks.append(item.table, item.step, found)

    def _put_dead_letters(self, letters: Any) -> None:
        if letters.num_rows and self._dead is not None:
            self._dead.put(letters)

    # a time larger than a step --------------------------------------------------------------------------
    def _start_oversized(self, seat: ScheduledTable, step: Step) -> None:
        seat.aside = True
        threading.Thread(target=self._run_oversized, args=(seat, step), name=f"large-{seat.name}", daemon=True).start()

    def _run_oversized(self, seat: ScheduledTable, step: Step) -> None:
        try:
            self._seats.run_isolated(seat, partial(self._oversized_step, seat, step))
        finally:
            seat.aside = False
            self._seats.changed.set()

    def _oversized_step(self, seat: ScheduledTable, step: Step) -> None:
        table = seat.table
        scratch = table.mirror_dir.parent.parent / "large" / seat.name
        table.progress.start(step.records + step.to_go)
        large = OversizedStep(self._stores, table, step, scratch, table.progress.add)
        buried = StepDeadLetters()

        def bury(letters: pa.Table) -> None:
            self._put_dead_letters(letters)
            buried.add(letters)

        if not large.run(bury, self._stopping.is_set):
            return
        table.dead_run.add_counted_step(step.records, buried)
        if large.stop is not None:
            large.upper = _stop_time(large.stop, step.lower)
        table.put_tombstones(large.resolved)
        if self._portal.call(table.append(step.lower, large.upper, large.parts)):
            table.apply_external(large.changes, step.lower, large.upper, large.rows)
            table.count_late(large.resolved)
            table.count_violations(large.violations, large.upper)
        else:
            table.follow()
        self._seats.record_progress(seat, step, 0)


def _feed_of(seat: ScheduledTable) -> Any:
    feed = seat.table.feed
    assert feed is not None
    return feed


def _select_round(work: Sequence[_StepWork]) -> list[_StepWork]:
    """Choose small steps first, up to one step's worth of memory, but always the table that is furthest behind."""
    if not work:
        return []
    chosen = [min(work, key=lambda w: (w.step.lower, w.seat.name))]
    records = size = 0
    for item in sorted(work, key=lambda w: w.step.records):
        records, size = records + item.step.records, size + item.step.bytes
        if records > STEP_RECORDS or size > STEP_BYTES:
            break
        if item is not chosen[0]:
            chosen.append(item)
    return chosen


def _stop_time(stop: Stop, lower: int) -> int:
    """Return the time up to which a table that stops may advance.

    Raises TableStopsError if the table is there already, SourceSchemaGrewError if it then continues under a new schema
    version.
    """
    if stop.time_ms <= lower and stop.grown:
        raise SourceSchemaGrewError(stop.reason, fix=stop.fix)
    if stop.time_ms <= lower:
        raise TableStopsError(stop.reason, fix=stop.fix)
    return stop.time_ms
