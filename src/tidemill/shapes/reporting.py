"""What is told of shapes: one mark for all healthy ones of a source, marks of their own for those in trouble; metrics.

    shapes:CAPTURE   position: what the slowest of its shapes has; target: what has arrived from the database
    shapes:shards    all shapes over shards
    shape:HANDLE     one that loads for longer than LOADING_SHOWN_S, or that ended with a fault lately (its error) and
                     that nobody has had again since

A report is as large as the number of sources, and at most MOST_OWN: neither it nor what is looked at for it is ever as
large as the number of shapes. That a client's clause was refused is counted, and no trouble of ours.
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
MOST_OWN = 20
SHARDS = "shapes:shards"
LARGEST = 5
LOOKED_AT = 1_000
"""Shapes whose size is looked at in one report."""

_SHAPES = Gauge("tidemill_shapes", "Live shapes")
_BYTES = Gauge("tidemill_shapes_memory_bytes", "Bases, logs and transactions under way of all shapes")
_LIMIT = Gauge("tidemill_shapes_memory_limit_bytes", "What they may hold together")
_BACKLOG = Gauge("tidemill_shapes_backlog_bytes", "Changes that not all shapes have evaluated")
_BUSY = Gauge("tidemill_shapes_loop_seconds", "Time of the event loop that shapes have used")
_LONGEST = Gauge("tidemill_shapes_longest_slice_seconds", "Longest time they kept the loop at once")


class Source(msgspec.Struct, frozen=True):
    """Of one database, or of all shards: the place of the slowest shape, and of the stream."""

    position: int
    target: int
    unit: str


class Reporter:
    """Called by the service once a second, and when a shape ends with a fault."""

    def __init__(self, tracker: StatusTracker) -> None:
        self._tracker = tracker
        self._own: dict[str, float] = {}
        """Marks of single shapes → when they go (monotonic seconds)."""
        self._failed: dict[ShapeDefinition, str] = {}
        """Of which of them tell a fault."""
        self._sources: set[str] = set()

    def fault(self, shape: LiveShape, error: str, now_ms: int, now_s: float) -> None:
        """A shape ended with a fault that is not its client's."""
        self.healed(shape)
        if len(self._own) < MOST_OWN:
            name = f"shape:{shape.handle}"
            self._own[name] = now_s + FAULT_SHOWN_S
            self._failed[shape.definition] = name
            self._tracker.fail(name, error, now_ms=now_ms)

    def failed(self) -> list[ShapeDefinition]:
        """What faults are told of."""
        return list(self._failed)

    def healed(self, shape: LiveShape) -> None:
        """What ended one of the same definition is over: this one has its rows, or has a fault of its own."""
        name = self._failed.get(shape.definition)
        if name is not None:
            self._drop(name)

    def tick(
        self,
        counts: Mapping[str, int],
        load: Iterable[LiveShape],
        sources: Mapping[str, Source],
        words: str,
        now_ms: int,
        now_s: float,
    ) -> None:
        """`counts`: live shapes of each mark; `load`: those of them that load."""
        loading: dict[str, int] = {}
        for shape in load:
            name = mark_of(shape)
            loading[name] = loading.get(name, 0) + 1
            if now_s - shape.started_s > LOADING_SHOWN_S:
                self._loading(shape, now_ms, now_s)
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
            self._drop(name)

    def _loading(self, shape: LiveShape, now_ms: int, now_s: float) -> None:
        name = f"shape:{shape.handle}"
        if name not in self._own and len(self._own) >= MOST_OWN:
            return
        self._own[name] = now_s + FAULT_SHOWN_S
        self._tracker.set(
            name, shape.rows_loaded, shape.rows_loaded + 1, now_ms=now_ms, unit="rows", budget_ms=LOADING_BUDGET_MS,
            reason=f"loads the initial rows of {shape.definition.source}",
        )  # fmt: skip

    def ended(self, shape: LiveShape) -> None:
        """It loads no more; what it failed with stays for its time."""
        name = f"shape:{shape.handle}"
        if name in self._own and self._tracker.failure(name) is None:
            self._drop(name)

    def _drop(self, name: str) -> None:
        del self._own[name]
        self._failed = {definition: failed for definition, failed in self._failed.items() if failed != name}
        self._tracker.heal(name)
        self._tracker.remove(name)


class Largest:
    """The largest shapes. Of more than LOOKED_AT some are looked at each time: one may be found a round late."""

    def __init__(self) -> None:
        self._to_see: list[LiveShape] = []
        self._found: list[LiveShape] = []

    def look(self, shapes: Mapping[str, LiveShape]) -> list[LiveShape]:
        if len(self._to_see) < LOOKED_AT:
            self._to_see = list(shapes.values())
        seen, self._to_see = self._to_see[-LOOKED_AT:], self._to_see[:-LOOKED_AT]
        live = {shape.handle: shape for shape in (*self._found, *seen) if not shape.gone}
        self._found = nlargest(LARGEST, live.values(), key=lambda shape: shape.log.base_bytes + shape.log.log_bytes)
        return self._found


def mark_of(shape: LiveShape) -> str:
    source = shape.definition.source
    return SHARDS if source.kind == "shard" else f"shapes:{source.database}"


def show(*, shapes: int, used: int, limit: int, backlog: int, busy_s: float, longest_s: float) -> None:
    """Set the metrics."""
    _SHAPES.set(shapes)
    _BYTES.set(used)
    _LIMIT.set(limit)
    _BACKLOG.set(backlog)
    _BUSY.set(busy_s)
    _LONGEST.set(longest_s)
