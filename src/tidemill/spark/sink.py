"""The `foreachBatch` body: every table of one feed, from its own upper to the end of the micro-batch.

    p = the table's upper → cut [p, end) by the bindings → decode → drain → one part → one compare-and-append

Spark's batch says only "time has come to `end`". What is read follows from the shard's upper and remap, so
a replay after a crash (p ≥ end) does nothing, a hole or a foreign checkpoint (p < start) is simply read, and
a batch id never identifies anything (U5). Small batches are computed here; big ones by Spark tasks through
the same functions, with the append still here. A lost race is recomputed from the peer's upper, never trimmed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import structlog

from tidemill.base.errors import TidemillError, Unavailable, Unknown
from tidemill.base.portal import Portal
from tidemill.metastore.catalogue import TopicRow
from tidemill.shards.front import Binding, Remap
from tidemill.spark.dead_letters import DeadLetters
from tidemill.spark.decode.slices import Descriptor, Slice, cut, record_count
from tidemill.spark.decode.stream import no_dead_letters
from tidemill.spark.facts import Latency
from tidemill.spark.feeds import TopicFeed
from tidemill.spark.planning import bindings_between, locate
from tidemill.spark.stores import Stores
from tidemill.spark.table import TableWriter
from tidemill.spark.tasks import Task, TaskResult, boot_id, concat_changes, decode, fetch, from_ipc, run_task
from tidemill.spark.upsert.resolve import KeyChanges
from tidemill.spark.upsert.runs import Run, open_run

if TYPE_CHECKING:
    from pyspark import SparkContext

INLINE_ROWS = 20_000
"""A batch of at most this many records is computed on the driver: a Spark job costs more than it (notes §2)."""
TASKS_MAX = 8
"""Hash ranges of one table's big batch."""
RETRY_S = 0.2
SLOWEST_RETRY_S = 5.0

log = structlog.get_logger()


class _Work(msgspec.Struct):
    """One table's share of a micro-batch."""

    table: TableWriter
    lower: int
    slices: list[Slice]
    descriptors: list[Descriptor] = []

    @property
    def feed(self) -> TopicFeed:
        assert self.table.feed is not None
        return self.table.feed


class FeedSink:
    """`process` may be called by any thread and lets one in at a time; so may `stop`."""

    def __init__(
        self,
        portal: Portal,
        stores: Stores,
        source: str,
        remap: Remap,
        tables: Sequence[TableWriter],
        latency: Latency,
        bound: Latency,
        *,
        dead_letters: DeadLetters | None = None,
        inline_rows: int = INLINE_ROWS,
    ) -> None:
        self.source = source
        self.remap = remap
        self.tables = list(tables)
        self.target = 0
        """One past the newest binding that this sink has seen."""
        self._topics_seen: set[str] = set()
        """Topic ids of bindings after which the catalogue was looked at."""
        self.error = ""
        self.failure: BaseException | None = None
        """What no retry can heal, raised by a batch."""
        self._portal = portal
        self._stores = stores
        self._latency = latency
        self._bound = bound
        self._dead = dead_letters
        self._inline_rows = inline_rows
        self._context: SparkContext | None = None
        self._stopping = threading.Event()
        self.called = threading.Event()
        """Set when Spark has brought a batch."""
        self._one_at_a_time = threading.Lock()
        self.idle = threading.Event()
        """Set while no batch is under way."""
        self.idle.set()

    def use(self, context: SparkContext) -> None:
        """From now on big batches may run as Spark tasks; until then everything is computed here."""
        self._context = context

    def stop(self) -> None:
        """The batch under way ends as soon as it may; nothing new begins."""
        self._stopping.set()

    def body(self, checkpoint: Path) -> Any:
        """The function for `foreachBatch`. The end of a batch is read from Spark's own log of offsets."""

        def run(_: Any, batch_id: int) -> None:
            self.called.set()
            end = planned_end(checkpoint, batch_id)
            self.process(end if end is not None else self.latest())

        return run

    def latest(self) -> int:
        """One past the newest binding: how far this feed's tables could be."""
        newest = self._portal.call(self.remap.latest())
        self.target = max(self.target, newest.time_ms + 1 if newest is not None else 0)
        return self.target

    def process(self, end: int) -> None:
        """Bring every table to `end`. Storage that is away is waited for, visibly; other errors end the query."""
        self.target = max(self.target, end)
        with self._one_at_a_time:
            self.idle.clear()
            try:
                self._until(end)
            except BaseException as error:
                self.failure = error
                raise
            finally:
                self.idle.set()

    def _until(self, end: int) -> None:
        pause_s = RETRY_S
        while not self._stopping.is_set():
            try:
                if self._step(end):
                    self.error = ""
                    return
                pause_s = RETRY_S
            except (Unavailable, Unknown) as error:
                self.error = str(error)
                log.warning("micro-batch waits", source=self.source, error=str(error), retry_in_s=pause_s)
                self._stopping.wait(pause_s)
                pause_s = min(pause_s * 2, SLOWEST_RETRY_S)

    def _step(self, end: int) -> bool:
        """One round over the tables that are behind; True when none is. Losers of a race take another round."""
        behind = [table for table in self.tables if table.upper < end]
        if not behind:
            return True
        lowest = min(table.upper for table in behind)
        bindings, bases = self._portal.call(self._bindings(lowest, end, {t.upper for t in behind}))
        self._portal.call(self._check_topics(bindings))
        work = []
        for table in behind:
            assert table.feed is not None
            mine = [b for b in bindings if b.time_ms >= table.upper]
            slices = cut(bases[table.upper], mine, table.feed.topic, table.feed.topic_id)
            work.append(_Work(table, table.upper, slices))
        self._portal.call(self._locate(work))
        if self._dead is not None:
            self._fill_gap(max(w.lower for w in work), work[0].feed)
        big = [w for w in work if record_count(w.slices) > self._inline_rows and self._context is not None]
        self._inline([w for w in work if w not in big], end)
        if big:
            self._by_tasks(big, end)
        if self._dead is not None:
            self._dead.flush()
        done = all(table.upper >= end for table in behind)
        if done:
            self._observe(work, bindings)
        return done

    # reading ----------------------------------------------------------------------------------------
    async def _bindings(
        self, lower: int, end: int, lowers: set[int]
    ) -> tuple[list[Binding], dict[int, Binding | None]]:
        bases = {at: await self.remap.at(at - 1) for at in lowers}
        return await bindings_between(self.remap, lower, end), bases

    async def _check_topics(self, bindings: Sequence[Binding]) -> None:
        """A binding with a topic never seen may be where a captured table was started over, on a new topic under the
        old name. Nothing may be appended past it from the old one. Raises TidemillError, for the pipeline to reopen."""
        found = {topic_id for binding in bindings for topic_id in binding.offsets}
        if found <= self._topics_seen:
            return
        for table in self.tables:
            assert table.feed is not None
            row = await self._stores.catalogue.get(TopicRow, table.feed.topic) if table.feed.captured else None
            if row is not None and row.topic_id != table.feed.topic_id:
                raise TidemillError(f"a captured table was started over: shard={table.name} topic={table.feed.topic}.")
        self._topics_seen |= found

    async def _locate(self, work: Sequence[_Work]) -> None:
        for item in work:
            item.descriptors = await locate(self._stores.topics, item.slices)

    def _fill_gap(self, lower: int, feed: TopicFeed) -> None:
        """Decode again what the dead-letter shard still lacks below this batch, for its dead letters only."""
        assert self._dead is not None
        start = self._dead.missing_from(self.source, lower)
        if start is None:
            return
        bindings, bases = self._portal.call(self._bindings(start, lower, {start}))
        again = [_Work(self.tables[0], start, cut(bases[start], bindings, feed.topic, feed.topic_id))]
        self._portal.call(self._locate(again))
        batches = self._portal.call(fetch(self._stores.objects, again[0].descriptors))
        self._dead.take(self.source, lower, decode(feed, again[0].descriptors, batches).dead)

    # computing and appending --------------------------------------------------------------------------
    def _inline(self, work: Sequence[_Work], end: int) -> None:
        """Decode and resolve on this thread; then all parts and appends of all tables at once."""

        async def fetch_all() -> list[list[list[bytes]]]:
            return list(await asyncio.gather(*(fetch(self._stores.objects, w.descriptors) for w in work)))

        pending = []
        for item, batches in zip(work, self._portal.call(fetch_all()), strict=True):
            decoded = decode(item.feed, item.descriptors, batches)
            if self._dead is not None and item is work[0]:
                self._dead.take(self.source, end, decoded.dead)
            operator = item.table.operator
            operator.ingest(decoded.commands)
            operator.advance(end)
            pending.append(operator.drain())
        ready = [(item.table, found) for item, found in zip(work, pending, strict=True) if found.upper > found.lower]

        async def append_all() -> list[bool]:
            async def one(table: TableWriter, found: Any) -> bool:
                return await table.append(found.lower, found.upper, await table.write(found.updates))

            return list(await asyncio.gather(*(one(table, found) for table, found in ready)))

        for (table, found), won in zip(ready, self._portal.call(append_all()), strict=True):
            if won:
                table.committed(found)
            else:
                table.follow()

    def _by_tasks(self, work: Sequence[_Work], end: int) -> None:
        """The same through Spark: tasks by table and hash range write parts, the driver appends."""
        assert self._context is not None
        payloads = []
        for item in work:
            item.table.save()
            buckets = min(TASKS_MAX, max(1, self._context.defaultParallelism), 1 + record_count(item.slices) // 50_000)
            for bucket in range(buckets):
                task = Task(
                    item.table.name,
                    item.table.shard.shard_id,
                    item.table.shard.writer,
                    item.feed,
                    item.table.schema,
                    tuple(item.descriptors),
                    item.lower,
                    end,
                    bucket,
                    buckets,
                    self._stores.urls,
                    str(item.table.mirror_dir),
                    boot_id(),
                )
                payloads.append(msgspec.msgpack.encode(task))
        found = self._context.parallelize(payloads, len(payloads)).map(run_task).collect()
        results = [msgspec.msgpack.decode(f, type=TaskResult) for f in found]
        for item in work:
            mine = sorted((r for r in results if r.table == item.table.name), key=lambda r: r.bucket)
            if any(r.truncates for r in mine):  # needs every live key at once
                self._inline([item], end)
                continue
            if self._dead is not None and item is work[0]:
                letters = [from_ipc(r.dead, no_dead_letters()) for r in mine]
                self._dead.take(self.source, end, pa.concat_tables(letters))
            self._append_tasks(item, mine, end)

    def _append_tasks(self, item: _Work, results: Sequence[TaskResult], end: int) -> None:
        table = item.table
        parts = [r.part for r in results if r.part is not None]
        won = self._portal.call(table.append(item.lower, end, parts))
        runs = [Path(r.run) for r in results if r.run]
        try:
            if won and len(runs) == len(parts):
                opened: list[Run] = [open_run(table.schema, path) for path in runs]
                changes = _joined(table, opened)
                table.operator.mirror.advance(changes, item.lower, end)
                table.operator.advance(end)
                table.rows += sum(r.rows for r in results)
            else:  # lost, or the runs are on another machine: what the shard holds says it all
                table.follow()
        finally:
            for path in runs:
                path.unlink(missing_ok=True)

    # watching ---------------------------------------------------------------------------------------
    def _observe(self, work: Sequence[_Work], bindings: Sequence[Binding]) -> None:
        """Commit at the source → visible in the shard, and binding → visible: our own share of it.

        Once for every binding that brought a table something.
        """
        now_ms = self._stores.clock.now_ms()
        times = {t for item in work for s in item.slices for t in s.times}
        for binding in bindings:
            if binding.time_ms in times:
                self._bound.add(now_ms - binding.time_ms)
                if binding.source_time_ms:
                    self._latency.add(now_ms - binding.source_time_ms)


def _joined(table: TableWriter, runs: Sequence[Run]) -> KeyChanges:
    if not runs:
        from tidemill.spark.upsert.resolve import no_changes

        return no_changes(table.schema)
    run = concat_changes(table.schema, runs)
    return KeyChanges(run.rows, run.hashes, run.live)


def planned_end(checkpoint: Path, batch_id: int) -> int | None:
    """{"ts": T} of a micro-batch, from the log that Spark writes before it runs one; None when it is not readable here.

    A file of lines: version, metadata, then one offset a source.
    """
    try:
        lines = (checkpoint / "offsets" / str(batch_id)).read_text().splitlines()
        return int(msgspec.json.decode(lines[2])["ts"])
    except (OSError, IndexError, KeyError, ValueError, TypeError, msgspec.MsgspecError):
        return None
