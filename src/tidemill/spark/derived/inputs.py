"""Input of a derived table: whether and in which groups it changed since the output was computed, and its read hold."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from tidemill.base.clock import Clock
from tidemill.base.limits import MIB
from tidemill.base.runtime.blocking_portal import BlockingPortal, SyncContext
from tidemill.objects.store import Buffer
from tidemill.shards.api import Batch, HistoryLostError, Part
from tidemill.shards.handle import LogShard
from tidemill.shards.parts.row_hash import U64
from tidemill.shards.parts.schema import contents_schema
from tidemill.shards.parts.schema_evolution import check_schema_known
from tidemill.shards.read.hash_ranges import cut_ranges, read_range
from tidemill.shards.read.holds import MovingHold
from tidemill.shards.read.read_plan import small_contents
from tidemill.spark.derived.group_mirror import NO_GROUPS, build_group_mirror, find_group_rows, groups_of

INSPECT_BYTES_MAX = 1 * MIB
"""Encoded size. A batch that overlaps the interval partly is read to find out whether it has updates there; a larger
one that compaction merged is assumed to have some, because it may be the whole shard."""


class DerivedInput:
    """Input that is passed whole. It stores no rows: only the time up to which it was checked, and whether anything
    changed."""

    def __init__(self, portal: BlockingPortal, shard: LogShard, clock: Clock) -> None:
        self.shard = shard
        self.upper = 0
        self.changed = True
        """True if the contents at upper - 1 may differ from those that the output was last computed from."""
        self._portal = portal
        # kept: the hold outlasts its lease, because much may be written, merged and collected while Spark reads.
        self._hold = MovingHold(shard, shard.reader_name("derived"), clock, kept=True)

    def mark_computed(self) -> None:
        """Record that the output was computed from the present contents."""
        self.changed = False

    def move_to(self, time_ms: int) -> None:
        """Advance to `time_ms`, which must be final.

        Raises SchemaEvolvedError, MissingError, CorruptError, UnavailableError: call it again.
        """
        end = time_ms + 1
        if end <= self.upper:
            return
        try:
            self.changed |= not self.upper or any(
                self._has_updates(batch, end) for batch in self._portal.call(self.shard.batches(self.upper))
            )
        except HistoryLostError:
            self.changed = True
        self.upper = end

    def _has_updates(self, batch: Batch, end: int) -> bool:
        """Return whether the batch has updates from `upper` on and before `end`."""
        if batch.lower >= end:
            return False
        check_schema_known(self.shard.schema, batch)
        if not batch.parts or (self.upper <= batch.lower and batch.upper <= end):
            return bool(batch.parts)
        if sum(part.size_bytes for part in batch.parts) > INSPECT_BYTES_MAX:
            return True
        return bool(self._portal.call(self.shard.read_batch(batch, self.upper, end)).num_rows)

    def hold_from(self, time_ms: int) -> None:
        """Hold the input from `time_ms` on: Spark reads there, and so does a restart while another input is behind."""
        with contextlib.suppress(HistoryLostError):  # the reader gets the error
            self._portal.call(self._hold.move_to(time_ms))

    def small_contents(self, time_ms: int) -> pa.Table | None:
        """Return all rows at `time_ms`, which is held, if the shard is small; else None."""
        return small_contents(self._portal, self.shard, self._portal.call(self.shard.batches_until(time_ms)), time_ms)

    @contextlib.contextmanager
    def renewed_hold(self) -> Iterator[None]:
        """Renew the hold while the block runs: the parts at the time of the last `hold_from` stay readable."""
        renewing = asyncio.run_coroutine_threadsafe(self._hold.renew_until_cancelled(), self._portal.loop)
        try:
            yield
        finally:
            renewing.cancel()

    async def release(self) -> None:
        """Release the hold for good."""
        await self._hold.release()


class GroupedInput(DerivedInput):
    """Input that is passed by group: a mirror of the shard that finds rows by `by` and follows the shard's deltas.

    `touched`: groups that may differ from those that the output was last computed from; None = any row may. It grows
    before the mirror moves, because a move may fail half way; `mark_computed` empties it. Long runs are files in
    `directory`.
    """

    def __init__(
        self, portal: BlockingPortal, shard: LogShard, clock: Clock, by: tuple[str, ...], directory: Path
    ) -> None:
        super().__init__(portal, shard, clock)
        self.by = by
        self.touched: U64 | None = None
        self._directory = directory
        shutil.rmtree(directory, ignore_errors=True)  # of an earlier process, and not to be trusted
        self._mirror = build_group_mirror(shard.schema, by, directory)

    def mark_computed(self) -> None:
        super().mark_computed()
        self.touched = NO_GROUPS

    def move_to(self, time_ms: int) -> None:
        """Advance to the contents as of `time_ms`, which must be final."""
        end = time_ms + 1
        if end <= self.upper:
            return
        try:
            if self.upper:
                self._follow(end)
        except HistoryLostError:
            pass
        if self._mirror.upper < end:
            self.touched, self.changed = None, True
            with SyncContext(self._portal, self.shard.batches_held_until(time_ms)) as batches:
                contents = self._by_range(batches, time_ms)
                self._mirror = build_group_mirror(self.shard.schema, self.by, self._directory, contents, end)
            self._mirror.sweep()
        self.upper = end

    def _by_range(self, batches: Sequence[Batch], time_ms: int) -> Iterator[pa.Table]:
        """Yield the contents by ranges of the key's hash, so that memory holds one range."""
        schema = self.shard.schema

        def fetch(part: Part) -> Buffer:
            return self._portal.call(self.shard.fetch(part, batches))

        for chosen in cut_ranges(batches):
            rows = read_range(schema, chosen, time_ms, fetch)
            yield pa.concat_tables([contents_schema(schema).empty_table(), *rows])

    def _follow(self, end: int) -> None:
        for batch in self._portal.call(self.shard.batches(self._mirror.upper)):
            lower, upper = self._mirror.upper, min(batch.upper, end)
            if upper <= lower:
                continue
            rows = self._portal.call(self.shard.read_batch(batch, lower, upper))
            self._add_changed_groups(rows)
            self._mirror.apply(rows, lower, upper)

    def _add_changed_groups(self, rows: pa.Table) -> None:
        if not rows.num_rows:
            return
        self.changed = True
        if self.touched is not None:
            # Retracted rows count as well: their group has lost a row.
            self.touched = np.union1d(self.touched, groups_of(rows, self.by))

    def rows_of(self, groups: U64) -> pa.Table:
        """Return the live rows of these groups."""
        return find_group_rows(self._mirror, groups)
