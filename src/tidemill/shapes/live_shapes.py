"""The live shapes of one process: starts, restores and ends them, and bounds their number, memory and disk.

State: the live shapes by handle (least recently used first) and by definition, one task per shape, the number of shapes
per stage status, and the definitions that failed recently.

- Invariant (one shape per definition): a definition has at most one live shape. A shape that was dropped is replaced
  under a new handle.
- Invariant (bounded): at most `max_shapes` shapes are live, and together they use at most `memory_bytes`. Room is made
  only by evicting shapes that were not read for `idle_s` and have no waiting request. If no such shape exists, the new
  one is rejected; a shape in use is never ended for it. Without room for a change, the shape whose log has grown most
  ends. It need not be the one that asks: which change comes last depends on the order of evaluation.
- Invariant (isolated failures): any exception from building or following a shape ends that shape only (`_run_shape`).
  An exception from evaluating its part of a stream ends it in the tap. The definition is then rejected for a while
  (`plan_cache`).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence

import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import InvalidError, TidemillError
from tidemill.base.runtime.tasks import Tasks, is_own_fault_of_await
from tidemill.base.status.status import StatusTracker
from tidemill.shapes.definition.definition import HandleMint, ShapeDefinition, fixed_bytes
from tidemill.shapes.definition.plan_cache import PlanCache, RejectionCache
from tidemill.shapes.definition.planner import Plan
from tidemill.shapes.eviction import IdleEviction
from tidemill.shapes.live_shape import LiveShape, unexpected_failure
from tidemill.shapes.log.disk_log import DiskLog
from tidemill.shapes.log.log import ShapeLog
from tidemill.shapes.log.saved_shape import SavedShardShape, SavedTableShape
from tidemill.shapes.log.sqlite_file import StoredShape
from tidemill.shapes.memory_budget import Budget, OverBudgetError
from tidemill.shapes.reporting import SHARDS_STATUS, ShapeReporter, status_name_of
from tidemill.shapes.settings import ShapeSettings
from tidemill.shapes.shards.shard_shapes import Build
from tidemill.shapes.tables.initial_snapshot import TransientTableError
from tidemill.shapes.tables.table_shapes import TableShapes

_log = structlog.get_logger()


class LiveShapes:
    """Registry of the live shapes. `tasks` runs one task per shape; `tables` has the consumers of table shapes."""

    def __init__(
        self,
        settings: ShapeSettings,
        clock: Clock,
        rand: Rand,
        tracker: StatusTracker,
        tasks: Tasks,
        tables: TableShapes,
    ) -> None:
        self.by_handle: OrderedDict[str, LiveShape] = OrderedDict()
        """Live shapes, least recently used first."""
        self.by_definition: dict[ShapeDefinition, LiveShape] = {}
        self.loading: dict[LiveShape, None] = {}
        self.over_shards: dict[LiveShape, None] = {}
        self.counts: dict[str, int] = {}
        """Number of live shapes per stage status."""
        self.has_begun = asyncio.Event()
        """A first shape was added."""
        self.has_ended_shapes = False
        """Shapes have ended since the catalog entries of uncaptured tables were last removed."""
        self.eviction = IdleEviction(settings, clock, self.by_handle, self.end)
        self.budget = Budget(settings.memory_bytes, self.eviction.make_memory)
        self.disk = Budget(
            settings.disk_bytes,
            self.eviction.make_disk,
            whose="all shapes together",
            what="disk",
            setting="shapes.disk_mb",
        )
        self.plans = PlanCache(capacity=2 * settings.max_shapes)
        self.rejections = RejectionCache()
        self.reporter = ShapeReporter(tracker)
        self.handles = HandleMint(clock, rand)
        self._settings = settings
        self._clock = clock
        self._tasks = tasks
        self._tables = tables
        self._runners: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self.by_handle)

    def all(self) -> Sequence[LiveShape]:
        """Return the live shapes of this moment."""
        return list(self.by_handle.values())

    def find_current(self, definition: ShapeDefinition) -> LiveShape | None:
        shape = self.by_definition.get(definition)
        return None if shape is None or shape.has_ended else shape

    def record_use(self, shape: LiveShape) -> None:
        shape.used_s = self._clock.monotonic_s()
        self.by_handle.move_to_end(shape.handle)

    def start(self, plan: Plan, create_log: Callable[[], ShapeLog]) -> LiveShape:
        """Start a shape. A plain def: the place is reserved before any other request runs.

        Raises OverBudgetError if there is no room, and the definition's recent error (rejection cache).
        """
        now_s = self._clock.monotonic_s()
        self.rejections.raise_if_rejected(plan.definition, now_s)
        self.eviction.make_room_for_shape(now_s)
        self.budget.reserve(fixed_bytes(plan.definition))
        shape = LiveShape(self.handles.mint(plan.definition), plan.definition, plan.schema_json, create_log())
        self._add(shape, plan.build, now_s)
        return shape

    def restore_table_shape(self, saved: StoredShape, kept: SavedTableShape, log: DiskLog) -> LiveShape:
        """Add a shape of an earlier run. Raises OverBudgetError; no live shape is ended to make room for it."""
        return self._restore(saved, kept, log, _build_nothing)

    def restore_shard_shape(self, saved: StoredShape, kept: SavedShardShape, log: DiskLog, build: Build) -> None:
        shape = self._restore(saved, kept, log, build)
        shape.rows_loaded = kept.rows_loaded

    def _restore(
        self, saved: StoredShape, kept: SavedTableShape | SavedShardShape, log: DiskLog, build: Build
    ) -> LiveShape:
        if len(self.by_handle) >= self._settings.max_shapes:
            raise OverBudgetError(f"too many shapes on this node: limit={self._settings.max_shapes}.", 1)
        self.budget.reserve(fixed_bytes(kept.definition))
        shape = LiveShape(saved.handle, kept.definition, kept.schema_json, log)
        shape.restored = True
        self._add(shape, build, self._clock.monotonic_s())
        return shape

    def _add(self, shape: LiveShape, build: Build, now_s: float) -> None:
        self.has_begun.set()
        shape.choose_ending = self._find_largest_tail
        shape.started_s = shape.used_s = now_s
        self.by_handle[shape.handle] = shape
        self.loading[shape] = None
        status = status_name_of(shape)
        self.counts[status] = self.counts.get(status, 0) + 1
        if status == SHARDS_STATUS:
            self.over_shards[shape] = None
        self.by_definition[shape.definition] = shape
        self._runners[shape.handle] = self._tasks.spawn(self._run_shape(shape, build), name=f"shape:{shape.handle}")

    def _find_largest_tail(self, growing: LiveShape) -> LiveShape:
        """Return the shape with most bytes of its log in memory; `growing` if no other has more."""
        largest = max(self.by_handle.values(), key=lambda shape: shape.log.tail_bytes, default=growing)
        return largest if largest.log.tail_bytes > growing.log.tail_bytes else growing

    def end(self, shape: LiveShape, reason: str) -> None:
        """End a shape and remove all references to it. Idempotent."""
        shape.drop(reason)
        if self.by_handle.pop(shape.handle, None) is None:
            return
        self.has_ended_shapes = True
        self.budget.release(fixed_bytes(shape.definition))
        self.loading.pop(shape, None)
        self.over_shards.pop(shape, None)
        status = status_name_of(shape)
        self.counts[status] -= 1
        if not self.counts[status]:
            del self.counts[status]
        if self.by_definition.get(shape.definition) is shape:
            del self.by_definition[shape.definition]
            self.plans.remove(shape.definition)
        self._tables.detach(shape)
        runner = self._runners.pop(shape.handle, None)
        if runner is not None and runner is not asyncio.current_task():
            runner.cancel()
        self.reporter.clear_loading(shape)
        _log.info("shape ended", handle=shape.handle, source=str(shape.definition.source), why=shape.end_reason)

    def end_all(self, reason: str) -> None:
        for shape in self.all():
            self.end(shape, reason)

    def end_database(self, name: str, reason: str) -> None:
        """End the shapes of a captured database, and accept again the definitions of it that failed recently."""
        self.rejections.remove_database(name)
        for shape in self.all():
            source = shape.definition.source
            if source.kind == "table" and source.database == name:
                self.end(shape, reason)

    async def _run_shape(self, shape: LiveShape, build: Build) -> None:
        """Load the shape, then wait until it has ended. Every exception of the shape's own work is caught here and ends
        only this shape."""
        try:
            await build(shape)
            await shape.wait_ended()
        except BaseException as error:
            if not is_own_fault_of_await(error):
                raise
            listed = isinstance(error, TidemillError)
            shape.fail(error if isinstance(error, TidemillError) else unexpected_failure(error), broken=not listed)
        finally:
            self._report_failure(shape)
            self.end(shape, "its task ended")

    def _report_failure(self, shape: LiveShape) -> None:
        """Cache a failure for repeated requests; log and report it unless the request itself caused it."""
        error = shape.error
        if error is None or isinstance(error, OverBudgetError):
            return
        now_s = self._clock.monotonic_s()
        self.rejections.add(shape.definition, error, now_s, broken=shape.broken)
        if isinstance(error, TransientTableError):
            _log.info("shape not started", handle=shape.handle, cause=str(error))
        elif not isinstance(error, InvalidError):
            _log.error("shape failed", handle=shape.handle, error=str(error), exc_info=error)
            self.reporter.report_failure(shape, str(error), self._clock.now_ms(), now_s)


async def _build_nothing(_: LiveShape) -> None:
    """Do nothing: the rows of a restored shape are already in its log."""
