"""The dead-letter shard of a pipeline: every record of its stream topics that could not be read, once.

Several topics feed one shard, each at its own pace, so its upper follows the slowest of them. What a
topic delivered ahead of that is kept here, classified by the same three-way rule as everything else.
A process that starts finds the tables further than this shard: it decodes the gap again, for its dead
letters only. Writers race as equals: what is malformed is a function of the records alone.

The feeds of a process call from threads of their own, so each method lets one in at a time: two flushes at once
would append the same letters against each other, and a `take` between them be forgotten.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from tidemill.shards.front import TIME
from tidemill.spark.decode.stream import no_dead_letters
from tidemill.spark.table import TableWriter
from tidemill.spark.upsert.arrays import int64s
from tidemill.spark.upsert.classify import AT, BELOW, classify
from tidemill.spark.upsert.resolve import Resolved, no_changes

IDLE_MS = 1_000
"""Without dead letters the upper moves this often: it has no reader who needs more."""


class DeadLetters:
    def __init__(self, writer: TableWriter, sources: Iterable[str]) -> None:
        self.writer = writer
        self._through = dict.fromkeys(sources, writer.upper)
        self._kept = no_dead_letters()
        self._one_at_a_time = threading.Lock()
        self.total = 0

    @property
    def upper(self) -> int:
        return self.writer.upper

    def missing_from(self, source: str, lower: int) -> int | None:
        """Where the source must be decoded again from, when its next batch begins at `lower`; None = no gap."""
        with self._one_at_a_time:
            return self._through[source] if self._through[source] < lower else None

    def take(self, source: str, upper: int, letters: pa.Table) -> None:
        """All dead letters of the source from where it stood up to `upper`; those already taken are dropped."""
        with self._one_at_a_time:
            times = int64s(letters, TIME)
            new = classify(times, max(self._through[source], self.upper), upper) != BELOW
            if letters.num_rows:
                self._kept = pa.concat_tables([self._kept, letters.filter(pa.array(new))])
            self._through[source] = max(self._through[source], upper)

    def flush(self) -> None:
        """Append what all sources have passed. Losing to a peer drops what the peer wrote."""
        with self._one_at_a_time:
            self._flush()

    def _flush(self) -> None:
        while True:
            end = min(self._through.values())
            times = int64s(self._kept, TIME)
            ready = classify(times, self.upper, end) == AT
            due = bool(ready.any()) or end - self.upper >= IDLE_MS
            if end <= self.upper or not due:
                return
            updates = self._kept.filter(pa.array(ready))
            pending = Resolved(self.upper, end, updates, no_changes(self.writer.schema))
            if self._append(pending):
                self.total += updates.num_rows
            self._drop_below()

    def _append(self, pending: Resolved) -> bool:
        async def run() -> bool:
            parts = await self.writer.write(pending.updates)
            return await self.writer.append(pending.lower, pending.upper, parts)

        won = self.writer.portal.call(run())
        if won:
            # The mirror of this shard is never looked into: only its upper is followed.
            self.writer.committed(pending)
        else:
            self.writer.follow()
        return won

    def _drop_below(self) -> None:
        keep = classify(int64s(self._kept, TIME), self.upper, np.iinfo(np.int64).max) != BELOW
        self._kept = self._kept.filter(pa.array(keep))
        for source, through in self._through.items():
            self._through[source] = max(through, self.upper)
