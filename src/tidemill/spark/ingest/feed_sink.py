"""Sink of one feed: advance every table from its own upper to the newest binding or the end of a micro-batch, in steps.

    p = the table's upper → a step [p, e) by the bindings → decode → dead letters → drain → one part → one append

A Spark batch only means "time has reached `end`". The shard's upper and the remap shard determine what is read.

Invariant (scratch checkpoint): a replay after a crash (p ≥ end) does nothing, a gap or a foreign checkpoint (p < start)
is simply read, and a batch id never identifies anything.

Small steps are computed here, larger ones by Spark tasks through the same functions, with the append still here. While
a step is resolved and written, the next one is fetched and decoded (prefetch.py). A lost race is recomputed from the
peer's upper, never trimmed. Tables share only a round, so that a hundred small ones cost one round trip; they fail
independently (table_schedule.py). A time that is too large for a step is processed in a separate thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from tidemill.base.errors import InvalidError, TidemillError, UnavailableError, UnknownOutcomeError
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.base.runtime.tasks import sentence
from tidemill.base.status.histogram import Stages
from tidemill.shards.api import Remap
from tidemill.spark.decode.captured import Stop
from tidemill.spark.ingest.dead_letter_run import Buried
from tidemill.spark.ingest.dead_letters import DeadLetters
from tidemill.spark.ingest.distributed_step import ByTasks
from tidemill.spark.ingest.fetch_decode import DECODERS, Batches, Decoded, decode, fetch
from tidemill.spark.ingest.oversized_step import LargeStep
from tidemill.spark.ingest.prefetch import Prefetcher
from tidemill.spark.ingest.schema_growth import SourceSchemaGrewError
from tidemill.spark.ingest.step_planner import STEP_BYTES, STEP_RECORDS, Planner, Step
from tidemill.spark.ingest.table_schedule import IDLE_MOVE_S, ScheduledTable, TableSchedule
from tidemill.spark.ingest.table_writer import TableWriter
from tidemill.spark.ingest.unresolved_updates import lost_letters
from tidemill.spark.stores import Stores
from tidemill.spark.upsert.commands import Commands

if TYPE_CHECKING:
    from pyspark import SparkContext

INLINE_ROWS = 20_000
"""Largest step, in records, that the driver computes if the cluster has executors. On a single machine the driver
computes every step: tasks cost three times as much and more at every possible step size (docs/benchmarks.md,
upsert)."""


class TableStopsError(InvalidError):
    """The table is advanced to the last time before a record that it cannot represent, and no further."""


class _Work(msgspec.Struct):
    """Work of one table in a round. `upper` shrinks if the table stops."""

    seat: ScheduledTable
    step: Step
    upper: int
    decoded: Decoded | None = None
    pending: Any = None
    commands: Commands | None = None
    dead: Any = None
    """Decoded records and dead letters, until the step is in the table."""

    @property
    def table(self) -> TableWriter:
        return self.seat.table


class FeedSink:
    """Sink of one feed. Any thread may call `process`, which runs one call at a time, and `stop`, and attach or detach
    `seats`."""

    def __init__(
        self,
        portal: BlockingPortal,
        stores: Stores,
        source: str,
        remap: Remap,
        tables: Sequence[TableWriter],
        stages: Stages,
        *,
        dead_letters: DeadLetters | None = None,
        inline_rows: int | None = None,
        idle_move_s: float = IDLE_MOVE_S,
        decoders: int = DECODERS,
        scratch: Path | None = None,
    ) -> None:
        self.source = source
        self.remap = remap
        self.target = 0
        """End of the newest binding that this sink has seen (exclusive)."""
        self.error = ""
        """Reason why no table of the feed advances."""
        self._round_bytes = 0
        self._portal = portal
        self._stores = stores
        self._dead = dead_letters
        self._inline_rows = inline_rows
        self._most_inline = STEP_RECORDS
        self._scratch = scratch
        self.seats = TableSchedule(stores.clock, stages, idle_move_s)
        self._planner = Planner(stores, remap)
        self._helpers = ThreadPoolExecutor(decoders, f"decode-{source}") if decoders else None
        self._ahead = Prefetcher(portal, stores, remap, self._helpers)
        self._by_tasks: ByTasks | None = None
        self._stopping = threading.Event()
        self._one_at_a_time = threading.Lock()
        self.idle = threading.Event()
        """Set while no batch is being processed."""
        self.idle.set()
        for table in tables:
            self.seats.attach(table)

    @property
    def taken_bytes(self) -> int:
        """Stored bytes of the current round and of the prefetched step; at most three steps' worth."""
        return self._round_bytes + self._ahead.bytes

    @property
    def resting(self) -> list[TableWriter]:
        """Tables that no thread is changing, so their mirrors may be saved: a half-applied change would be trusted
        later."""
        return self.seats.at_rest if self.idle.is_set() else []

    def use(self, context: SparkContext) -> None:
        """Allow Spark tasks for larger steps from now on; until then every step is computed here."""
        local = str(context.master).startswith("local")
        wanted = self._inline_rows if self._inline_rows is not None else STEP_RECORDS if local else INLINE_ROWS
        self._by_tasks, self._most_inline = ByTasks(context, self._stores), wanted

    def stop(self) -> None:
        """End the current batch as soon as possible, and start no other."""
        self._stopping.set()

    def forward(self, end: int | None = None) -> None:
        """Process to `end`, or else to the newest binding; if storage is unavailable, set `error`."""
        try:
            self.process(self.latest() if end is None else end)
        except (UnavailableError, UnknownOutcomeError) as error:
            self.error = sentence(error)

    def time_comes(self, end: int) -> None:
        """Advance to the end of a micro-batch. If a round is running, return: its thread continues to this end."""
        if end > self.target:
            self.target = end
            self.seats.changed.set()
        if self.idle.is_set():
            self.forward(end)

    def latest(self) -> int:
        """Return the end of the newest binding: the target of this feed's tables."""
        return self._portal.call(self.newest())

    async def newest(self) -> int:
        """Return the same as `latest`, on the portal's loop."""
        newest = await self.remap.latest()
        end = newest.time_ms + 1 if newest is not None else 0
        if end > self.target:
            self.target = end
            self.seats.changed.set()
        return self.target

    async def arrival(self, timeout_s: float) -> None:
        """Return once there is a binding newer than the newest seen, and update `target`, or after the timeout."""
        if await self.remap.wait(self.target - 1, timeout_s):
            await self.newest()

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
                    for seat in [seat for seat in self.seats.due(end) if seat.table.outgrown]:
                        self.seats.fault(
                            seat,
                            SourceSchemaGrewError(f"the source has a new description of the table: shard={seat.name}."),
                        )
                    due = self.seats.due(end)
                    if not due:
                        self.error = ""
                        return
                    self._round(due, end)
            finally:
                self._round_bytes = 0
                self._ahead.drop()
                self.idle.set()
                self.seats.changed.set()

    # one round ----------------------------------------------------------------------------------------
    def _round(self, due: Sequence[ScheduledTable], end: int) -> None:
        """Process one step of every table that fits into the round's share of memory; at least one."""
        self._planner.begin()
        ahead = next((s for s in due if self._ahead.is_for(s.name, _feed(s), s.table.upper)), None)
        prepared = self._ahead.take() if ahead is not None else None
        to_plan = [s for s in due if prepared is None or s is not ahead]
        planned = self._gather([(s, self._planner.next(s.name, _feed(s), s.table.upper, end)) for s in to_plan])
        small: list[_Work] = []
        for seat, step in planned:
            if step.large:
                self._take_aside(seat, step)
            elif not step.slices and step.upper >= end and self.seats.moved_lately(seat):
                seat.nothing_until = step.upper
            else:
                small.append(_Work(seat, step, step.upper))
        if ahead is not None and prepared is not None:
            small.append(_Work(ahead, prepared.step, prepared.step.upper, prepared.decoded))
        work = _share(small)
        self.seats.came_to("planned", (w.step for w in work))
        self._round_bytes = sum(w.step.bytes for w in work)
        self._read_ahead(small, work, end)
        big = [w for w in work if w.step.records > self._most_inline]
        self._inline([w for w in work if w not in big])
        if big:
            self._in_spark(big)

    def _read_ahead(self, small: Sequence[_Work], work: Sequence[_Work], end: int) -> None:
        """Prefetch the step that is certainly needed next: of the table that will then be furthest behind."""
        after = [((w.upper if w in work else w.step.lower), w.seat.name, w.seat) for w in small]
        lower, _, seat = min(after, key=lambda one: one[:2], default=(end, "", None))
        if lower < end and seat is not None:
            self._ahead.begin(seat.name, _feed(seat), lower, end, self._most_inline)

    def _gather(self, calls: Sequence[tuple[ScheduledTable, Any]]) -> list[tuple[ScheduledTable, Any]]:
        """Await all calls concurrently on the portal's loop. Failures are reported to their tables, results
        returned."""

        async def run() -> list[Any]:
            return list(await asyncio.gather(*(call for _, call in calls), return_exceptions=True))

        out = []
        for (seat, _), found in zip(calls, self._portal.call(run()), strict=True):
            if isinstance(found, BaseException):
                self.seats.fault(seat, found)
            else:
                out.append((seat, found))
        return out

    def _inline(self, work: Sequence[_Work]) -> None:
        """Decode and resolve on this thread; then write the parts and appends of all tables concurrently."""
        by_seat = {w.seat.name: w for w in work}
        self._fetch([w for w in work if w.decoded is None])
        self.seats.came_to("decoded", (w.step for w in work if w.decoded is not None))
        ready = [w for w in work if w.decoded is not None and self.seats.alone(w.seat, partial(self._drain, w))]
        appended = self._gather([(w.seat, self._append(w)) for w in ready])
        for seat, won in appended:
            item = by_seat[seat.name]
            self.seats.alone(seat, partial(self._settle, item, won))

    def _fetch(self, work: Sequence[_Work]) -> None:
        """Fetch for all tables concurrently, then decode; an unreadable table gets the error."""
        fetched = self._portal.call(fetch(self._stores.objects, [w.step.descriptors for w in work]))
        for item, batches in zip(work, fetched, strict=True):
            if isinstance(batches, TidemillError):
                self.seats.fault(item.seat, batches)
            else:
                self.seats.alone(item.seat, partial(self._decode, item, batches))

    def _decode(self, item: _Work, batches: Batches) -> None:
        item.decoded = decode(_feed(item.seat), item.step.descriptors, batches, self._helpers)

    def _drain(self, item: _Work) -> None:
        table, decoded = item.table, item.decoded
        assert decoded is not None
        item.decoded = None  # the operator owns it from here on
        item.commands, item.dead = decoded.commands, decoded.dead
        if decoded.stop is not None:
            item.upper = _before(decoded.stop, item.step.lower)
        self._bury(decoded.dead)
        table.operator.begin(decoded.commands)
        table.operator.advance(item.upper)
        item.pending = table.operator.drain()
        self._bury(lost_letters(_feed(item.seat), item.pending.lost))

    async def _append(self, item: _Work) -> bool:
        found = item.pending
        if found.upper <= found.lower:
            return True
        parts = await item.table.write(found.updates)
        self.seats.came_to("written", [item.step])
        return await item.table.append(found.lower, found.upper, parts)

    def _settle(self, item: _Work, won: bool) -> None:
        if won and item.pending.upper > item.pending.lower:
            item.table.committed(item.pending)
        elif not won:
            item.table.follow()
        item.table.dead_run.passed(item.commands, item.dead)
        item.commands = item.dead = None
        self.seats.went_on(item.seat, item.step, item.step.records)

    def _in_spark(self, work: Sequence[_Work]) -> None:
        """Compute the steps in Spark: tasks by table and hash range write parts, the driver appends."""
        assert self._by_tasks is not None
        results = self._by_tasks.run([(w.table, w.step) for w in work])
        self.seats.came_to("written", (w.step for w in work if not results[w.seat.name].inline))
        over = []
        for item in work:
            found = results[item.seat.name]
            if found.inline:
                over.append(item)
            elif self.seats.alone(item.seat, partial(self._take_results, item, found)):
                buried = Buried()
                buried.add(found.dead)
                item.table.dead_run.of_many(item.step.records, buried)
                self.seats.went_on(item.seat, item.step, item.step.records)
        self._inline(over)

    def _take_results(self, item: _Work, found: Any) -> None:
        assert self._by_tasks is not None
        self._bury(found.dead)
        self._by_tasks.append(item.table, item.step, found)

    def _bury(self, letters: Any) -> None:
        if letters.num_rows and self._dead is not None:
            self._dead.put(letters)

    # a time larger than a step --------------------------------------------------------------------------
    def _take_aside(self, seat: ScheduledTable, step: Step) -> None:
        seat.aside = True
        threading.Thread(target=self._large, args=(seat, step), name=f"large-{seat.name}", daemon=True).start()

    def _large(self, seat: ScheduledTable, step: Step) -> None:
        try:
            self.seats.alone(seat, partial(self._large_step, seat, step))
        finally:
            seat.aside = False
            self.seats.changed.set()

    def _large_step(self, seat: ScheduledTable, step: Step) -> None:
        table = seat.table
        scratch = (self._scratch or table.mirror_dir.parent.parent) / "large" / seat.name
        table.progress.begin(step.records + step.to_go)
        large = LargeStep(self._stores, table, step, scratch, table.progress.add)
        buried = Buried()

        def bury(letters: pa.Table) -> None:
            self._bury(letters)
            buried.add(letters)

        if not large.run(bury, self._stopping.is_set):
            return
        table.dead_run.of_many(step.records, buried)
        if large.stop is not None:
            large.upper = _before(large.stop, step.lower)
        if self._portal.call(table.append(step.lower, large.upper, large.parts)):
            table.took(large.changes, step.lower, large.upper, large.rows)
        else:
            table.follow()
        self.seats.went_on(seat, step, 0)


def _feed(seat: ScheduledTable) -> Any:
    feed = seat.table.feed
    assert feed is not None
    return feed


def _share(work: Sequence[_Work]) -> list[_Work]:
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


def _before(stop: Stop, lower: int) -> int:
    """Return the time up to which a table that stops may advance.

    Raises TableStopsError if the table is there already, SourceSchemaGrewError if it then continues under a new schema
    version.
    """
    if stop.time_ms <= lower and stop.grown:
        raise SourceSchemaGrewError(stop.reason, fix=stop.fix)
    if stop.time_ms <= lower:
        raise TableStopsError(stop.reason, fix=stop.fix)
    return stop.time_ms
