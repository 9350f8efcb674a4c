"""Housekeeping of the live shapes, once a second.

It ends shapes whose table is no longer captured or was redefined, ends abandoned loads and shapes that fell behind, and
publishes stage statuses and metrics.

Invariant (no residue): a shape ends when its table is no longer captured. Nothing of an ended shape remains, except the
stage status of a failure for one minute.
"""

from __future__ import annotations

import asyncio

from tidemill.base.clock import Clock
from tidemill.shapes.live_shapes import LiveShapes
from tidemill.shapes.loop_share import LoopShare
from tidemill.shapes.reporting import SHARDS_STATUS, SourceProgress, set_metrics, shards_progress
from tidemill.shapes.tables.capture_tap import ShapeTap
from tidemill.shapes.tables.table_shapes import TableShapes

HOUSEKEEPING_S = 1.0
ABANDONED_S = 10.0
"""Time after its last request at which a loading shape without waiting requests is ended, to free its snapshot slot."""


class Housekeeping:
    """`run` in a supervised task."""

    def __init__(self, live: LiveShapes, tables: TableShapes, share: LoopShare, clock: Clock) -> None:
        self._live = live
        self._tables = tables
        self._share = share
        self._clock = clock

    async def run(self) -> None:
        """Run until cancelled. A process without shapes does nothing, and publishes no stage status of shapes."""
        await self._live.has_begun.wait()
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            self.run_once()

    def run_once(self) -> None:
        taps = self._tables.taps()
        self._end_shapes_without_table()
        self._end_abandoned_loads()
        for tap in taps.values():
            tap.end_late_shapes()
        self._publish(taps)

    def _end_shapes_without_table(self) -> None:
        live = self._live
        for consumer in self._tables.uncaptured_consumers():
            live.end(consumer.shape, "its table is no longer captured")
        for consumer in self._tables.redefined_consumers():
            live.end(consumer.shape, "the table's definition changed")
        if live.has_ended_shapes:
            live.has_ended_shapes = False
            self._tables.forget_uncaptured()

    def _end_abandoned_loads(self) -> None:
        live, now_s = self._live, self._clock.monotonic_s()
        for shape in list(live.loading):
            if shape.state != "loading":  # for a shape over a shard, `build` runs for as long as the shape lives
                live.loading.pop(shape)
                live.reporter.clear_loading(shape)
            elif not (shape.restored or shape.waiting_count) and now_s - shape.used_s > ABANDONED_S:
                live.end(shape, "no request waits for its initial rows any more")

    def _publish(self, taps: dict[str, ShapeTap]) -> None:
        live, budget = self._live, self._live.budget
        sources = {
            f"shapes:{name}": SourceProgress(min(tap.evaluated_position(), tap.taken), tap.taken, "lsn")
            for name, tap in taps.items()
        }
        sources[SHARDS_STATUS] = shards_progress(live.over_shards)
        words = f"; {budget.used_bytes >> 20} of {budget.limit_bytes >> 20} MiB"
        live.reporter.clear_recovered(live.by_definition)
        live.reporter.publish(
            live.counts, live.loading, sources, words, self._clock.now_ms(), self._clock.monotonic_s()
        )
        set_metrics(
            shapes=len(live),
            used=budget.used_bytes,
            limit=budget.limit_bytes,
            backlog=sum(tap.held_bytes for tap in taps.values()),
            busy_s=self._share.busy_s,
            longest_s=self._share.longest_s,
        )
