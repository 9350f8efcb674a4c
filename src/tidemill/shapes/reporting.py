"""Stage statuses of shapes: one per source for all healthy shapes, one per shape in trouble; and metrics.

    shapes:CAPTURE   position: the slowest of its shapes; target: the newest transaction received from the database
    shapes:shards    all shapes over shards
    shape:HANDLE     a shape that has been loading for longer than LOADING_SHOWN_S; or a shape that failed lately, with
                     its error, until its definition has a new live shape

The size of a report, and the work for it, grows with the number of sources and with MAX_SHAPE_STATUSES, not with the
number of shapes. A clause that is rejected as the client's own error is counted, but not reported as a failure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import nlargest

import msgspec
from prometheus_client import Gauge

from tidemill.base.status.status import StatusTracker
from tidemill.shapes.definition.definition import ShapeDefinition
from tidemill.shapes.live_shape import LiveShape

LOADING_SHOWN_S = 10.0
LOADING_BUDGET_MS = 60_000
FAULT_SHOWN_S = 60.0
MAX_SHAPE_STATUSES = 20
SHARDS_STATUS = "shapes:shards"
LARGEST_COUNT = 5
CHECKED_PER_REPORT = 1_000
"""Shapes whose size is checked for one report."""

_SHAPES = Gauge("tidemill_shapes", "Live shapes")
_BYTES = Gauge("tidemill_shapes_memory_bytes", "Bases, logs and transactions under way of all shapes")
_LIMIT = Gauge("tidemill_shapes_memory_limit_bytes", "Memory limit of all shapes together")
_BACKLOG = Gauge("tidemill_shapes_backlog_bytes", "Changes that not all shapes have evaluated")
_BUSY = Gauge("tidemill_shapes_loop_seconds", "Time of the event loop that shapes have used")
_LONGEST = Gauge("tidemill_shapes_longest_slice_seconds", "Longest slice of event loop time that shapes used")


class SourceProgress(msgspec.Struct, frozen=True):
    """Progress of one database, or of all shards: the position of the slowest shape, and of the stream."""

    position: int
    target: int
    unit: str


def shards_progress(shapes: Iterable[LiveShape]) -> SourceProgress:
    """Return the progress of live shapes over shards. The distance to the target is that of the shape that is furthest
    behind another shape of the same shard: a shard whose pipeline is late delays no shape.
    """
    newest: dict[str, int] = {}
    oldest: dict[str, int] = {}
    for shape in shapes:
        if shape.state == "live":
            shard, seen = str(shape.definition.source), shape.last_seen
            newest[shard] = max(newest.get(shard, seen), seen)
            oldest[shard] = min(oldest.get(shard, seen), seen)
    target = max(newest.values(), default=0)
    return SourceProgress(target - max((newest[each] - oldest[each] for each in newest), default=0), target, "ms")


class ShapeReporter:
    """Publishes the statuses. The service calls it once a second, and when a shape fails."""

    def __init__(self, tracker: StatusTracker) -> None:
        self._tracker = tracker
        self._own: dict[str, float] = {}
        """Status of a single shape → when it is removed (monotonic seconds)."""
        self._failed: dict[ShapeDefinition, str] = {}
        """Definition of a failed shape → the status that shows its failure."""
        self._sources: set[str] = set()

    def report_failure(self, shape: LiveShape, error: str, now_ms: int, now_s: float) -> None:
        """Report that a shape failed for a reason that is not its client's."""
        self.clear_failure(shape)
        if len(self._own) < MAX_SHAPE_STATUSES:
            name = f"shape:{shape.handle}"
            self._own[name] = now_s + FAULT_SHOWN_S
            self._failed[shape.definition] = name
            self._tracker.fail(name, error, now_ms=now_ms)

    def clear_recovered(self, by_definition: Mapping[ShapeDefinition, LiveShape]) -> None:
        """Clear the failures of definitions that have a live shape again."""
        for definition in list(self._failed):
            again = by_definition.get(definition)
            if again is not None and again.state == "live":
                self.clear_failure(again)

    def clear_failure(self, shape: LiveShape) -> None:
        """Clear the failure of the shape's definition: this shape has loaded, or failed itself."""
        name = self._failed.get(shape.definition)
        if name is not None:
            self._remove_status(name)

    def publish(
        self,
        counts: Mapping[str, int],
        load: Iterable[LiveShape],
        sources: Mapping[str, SourceProgress],
        words: str,
        now_ms: int,
        now_s: float,
    ) -> None:
        """Publish all statuses. `counts`: live shapes per status; `load`: shapes that are loading."""
        loading: dict[str, int] = {}
        for shape in load:
            name = status_name_of(shape)
            loading[name] = loading.get(name, 0) + 1
            if now_s - shape.started_s > LOADING_SHOWN_S:
                self._report_loading(shape, now_ms, now_s)
        for name, count in counts.items():
            source = sources[name]
            said = f"{count} shapes, {loading.get(name, 0)} of them loading{words}"
            self._tracker.set(
                name, source.position, source.target, now_ms=now_ms, reason=said, budget_ms=LOADING_BUDGET_MS,
                unit=source.unit,
            )  # fmt: skip
        for name in self._sources - counts.keys():
            self._tracker.remove(name)
        self._sources = set(counts)
        for name in [name for name, until_s in self._own.items() if until_s <= now_s]:
            self._remove_status(name)

    def _report_loading(self, shape: LiveShape, now_ms: int, now_s: float) -> None:
        name = f"shape:{shape.handle}"
        if name not in self._own and len(self._own) >= MAX_SHAPE_STATUSES:
            return
        self._own[name] = now_s + FAULT_SHOWN_S
        self._tracker.set(
            name, shape.rows_loaded, shape.rows_loaded + 1, now_ms=now_ms, unit="rows", budget_ms=LOADING_BUDGET_MS,
            reason=f"loads the initial rows of {shape.definition.source}",
        )  # fmt: skip

    def clear_loading(self, shape: LiveShape) -> None:
        """Remove the status of a shape that no longer loads; a failure remains for its time."""
        name = f"shape:{shape.handle}"
        if name in self._own and self._tracker.failure(name) is None:
            self._remove_status(name)

    def _remove_status(self, name: str) -> None:
        del self._own[name]
        self._failed = {definition: failed for definition, failed in self._failed.items() if failed != name}
        self._tracker.clear_failure(name)
        self._tracker.remove(name)


class LargestShapes:
    """Tracks the largest shapes. Each call checks CHECKED_PER_REPORT shapes, so with more shapes a large one is found
    some calls later."""

    def __init__(self) -> None:
        self._to_see: list[LiveShape] = []
        self._found: list[LiveShape] = []

    def find(self, shapes: Mapping[str, LiveShape]) -> list[LiveShape]:
        if len(self._to_see) < CHECKED_PER_REPORT:
            self._to_see = list(shapes.values())
        seen, self._to_see = self._to_see[-CHECKED_PER_REPORT:], self._to_see[:-CHECKED_PER_REPORT]
        live = {shape.handle: shape for shape in (*self._found, *seen) if not shape.has_ended}
        self._found = nlargest(
            LARGEST_COUNT, live.values(), key=lambda shape: shape.log.base_bytes + shape.log.log_bytes
        )
        return self._found

    def describe(self, shapes: Mapping[str, LiveShape]) -> list[dict[str, object]]:
        return [
            {"handle": s.handle, "source": str(s.definition.source), "bytes": s.log.base_bytes + s.log.log_bytes}
            for s in self.find(shapes)
        ]


def describe_shape(shape: LiveShape, pending_bytes: int) -> dict[str, object]:
    """Return a plain record of a shape, for the CLI and the console."""
    return {
        "handle": shape.handle,
        "source": str(shape.definition.source),
        "where": shape.definition.where,
        "state": shape.state,
        "offset": str(shape.log.end),
        "rows": shape.rows_loaded,
        "base_bytes": shape.log.base_bytes,
        "log_bytes": shape.log.log_bytes,
        "pending_bytes": pending_bytes,
        "waiting": shape.waiting_count,
    }


def status_name_of(shape: LiveShape) -> str:
    source = shape.definition.source
    return SHARDS_STATUS if source.kind == "shard" else f"shapes:{source.database}"


def set_metrics(*, shapes: int, used: int, limit: int, backlog: int, busy_s: float, longest_s: float) -> None:
    """Set the metrics."""
    _SHAPES.set(shapes)
    _BYTES.set(used)
    _LIMIT.set(limit)
    _BACKLOG.set(backlog)
    _BUSY.set(busy_s)
    _LONGEST.set(longest_s)
