"""An input of a derived table: its contents at exactly one time, and what of it changed since the output was made."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa

from tidemill.base.clock import Clock
from tidemill.base.portal import Portal
from tidemill.shards.front import HistoryLost
from tidemill.shards.handle import LogShard
from tidemill.shards.hashing import U64
from tidemill.shards.holding import MovingHold
from tidemill.spark.groups import NO_GROUPS, empty_grouped, grouped, groups_of, rows_of
from tidemill.spark.upsert.mirror import Mirror


class InputMirror:
    """A mirror of the shard, moved forward by its deltas; with `by`, one that finds rows by group.

    `touched`: groups that may differ from those that the output was last made of; None = any row may. It grows before
    the mirror moves, for a move may fail half way; `settle` empties it. Long runs are files in `directory`.
    """

    def __init__(
        self, portal: Portal, shard: LogShard, clock: Clock, by: tuple[str, ...] = (), directory: Path | None = None
    ) -> None:
        self.shard = shard
        self.by = by
        self.touched: U64 | None = None
        self.hold = MovingHold(shard, shard.reader_name("derived"), clock)
        self._portal = portal
        self._directory = directory
        if directory is not None:  # of a process before this one, which nobody can trust
            shutil.rmtree(directory, ignore_errors=True)
        schema = shard.schema
        self._mirror = empty_grouped(schema, by, directory) if by else Mirror(schema, directory=directory)

    @property
    def changed(self) -> bool:
        return self.touched is None or len(self.touched) > 0

    def settle(self) -> None:
        """The output was made of what is here now."""
        self.touched = NO_GROUPS

    def move_to(self, time_ms: int) -> None:
        """Contents as of `time_ms`, which must be final."""
        end = time_ms + 1
        if end <= self._mirror.upper:
            return
        try:
            if self._mirror.upper:
                self._follow(end)
        except HistoryLost:
            pass
        if self._mirror.upper < end:
            self.touched = None
            contents, schema = self._portal.call(self.shard.snapshot(time_ms)), self.shard.schema
            if self.by:
                self._mirror = grouped(schema, self.by, contents, end, self._directory)
            else:
                self._mirror = Mirror.hydrate(schema, contents, end, directory=self._directory)
            self._mirror.sweep()

    def _follow(self, end: int) -> None:
        for batch in self._portal.call(self.shard.batches(self._mirror.upper)):
            lower, upper = self._mirror.upper, min(batch.upper, end)
            if upper <= lower:
                continue
            rows = self._portal.call(self.shard.read_batch(batch, lower, upper))
            self._touch(rows)
            merges = self._mirror.merges
            self._mirror.apply(rows, lower, upper)
            if self._mirror.merges > merges:
                self._mirror.sweep()

    def _touch(self, rows: pa.Table) -> None:
        if not rows.num_rows or self.touched is None:
            return
        # What was retracted counts as well: its group has lost a row.
        self.touched = np.union1d(self.touched, groups_of(rows, self.by)) if self.by else None

    def keep(self, time_ms: int) -> None:
        """Hold the input's history from `time_ms` on: while another input is behind, a restart reads there again."""
        with contextlib.suppress(HistoryLost):
            self._portal.call(self.hold.at(time_ms))

    def contents(self) -> pa.Table:
        return self._mirror.live_rows()

    def rows_of(self, groups: U64) -> pa.Table:
        """The live rows of these groups; of an input without groups all rows."""
        return rows_of(self._mirror, groups) if self.by else self.contents()
