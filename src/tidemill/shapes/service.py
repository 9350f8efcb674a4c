"""All shapes of one process: creates them from definitions, shares and bounds them, and closes them.

    http ─► service ─┬─► tables, shards   plans a request, builds its shape
                     ├─► live_shapes      starts and ends shapes, within the budgets of memory and disk
                     ├─► sources          captured databases and shards, their files and tasks
                     └─► housekeeping     once a second

`open_shape` returns the live shape of a plan or starts one. The service itself owns only the order of these steps, and
whether it is closed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import UnavailableError
from tidemill.base.runtime.tasks import Tasks, error_sentence, run_unit
from tidemill.base.status.status import StatusTracker
from tidemill.shapes.definition.compiler_thread import CompilerThread
from tidemill.shapes.definition.definition import ShapeDefinition
from tidemill.shapes.definition.planner import Plan, ShapeRequest, parse_shard_name
from tidemill.shapes.housekeeping import Housekeeping
from tidemill.shapes.live_shape import LiveShape
from tidemill.shapes.live_shapes import LiveShapes
from tidemill.shapes.log.log import ShapeLog
from tidemill.shapes.log.log_offset import LogOffset
from tidemill.shapes.loop_share import LoopShare
from tidemill.shapes.memory_budget import Budget
from tidemill.shapes.reporting import LargestShapes, describe_shape
from tidemill.shapes.settings import ShapeSettings
from tidemill.shapes.shards.shard_shapes import ShardOpener, ShardShapes
from tidemill.shapes.sources import ShapeSources
from tidemill.shapes.store_files import StoreFiles
from tidemill.shapes.tables.capture_tap import ShapeTap
from tidemill.shapes.tables.captured_database import Relations, TableFinder, needs_old_rows
from tidemill.shapes.tables.table_search import NotCapturedError, TablePausedError
from tidemill.shapes.tables.table_shapes import TableShapes

_log = structlog.get_logger()

SUBSET_MEMORY_DIVISOR = 4
"""Divisor of the memory that rows of subsets in flight may use; the rest is reserved for shapes."""


class ShapeService:
    """Assembled by the node: add databases and shards, mount `shape_routes(service)`, and close it at the end."""

    def __init__(self, clock: Clock, rand: Rand, tracker: StatusTracker, settings: ShapeSettings | None = None) -> None:
        self.settings = settings or ShapeSettings()
        self.clock = clock
        self.rand = rand
        self.share = LoopShare(clock, self.settings.loop_share)
        self.subsets = Budget(self.settings.memory_bytes // SUBSET_MEMORY_DIVISOR, whose="all subsets together")
        self._tracker = tracker
        self._tasks = Tasks(self._task_failed)
        self._compiler = CompilerThread()
        self._tables = TableShapes(clock, self.share, self.settings.backlog, self._compiler)
        self._shards = ShardShapes(clock, self.share, self._compiler)
        self._live = LiveShapes(self.settings, clock, rand, tracker, self._tasks, self._tables)
        self.budget, self.disk = self._live.budget, self._live.disk
        self._files = StoreFiles(self.settings, clock, rand, tracker, self.budget, self.disk)
        self._sources = ShapeSources(self._live, self._tables, self._shards, self._files, self._tasks, tracker, clock)
        self._housekeeping = Housekeeping(self._live, self._tables, self.share, clock)
        self._largest = LargestShapes()
        self._keeps_house = False
        self._closed = False

    # -- assembly ----------------------------------------------------------------------------------

    def add_database(self, name: str, dsn: str, relations: Relations, seeker: TableFinder | None = None) -> ShapeTap:
        """Serve the tables of a captured database; return the tap to add to its capture.

        `relations()` returns the relations that are captured now: their columns are what the stream carries. It returns
        none until the replication slot exists. `seeker` is queried for tables that are not among them. Adding a name
        again (the capture was restarted, perhaps after it ran on another node) ends the shapes of its previous run:
        they may have missed changes. Shapes that are stored on disk are restored unless they have missed changes (RFC
        0006). Raises RuntimeError if the database is already served and was not released.
        """
        self._start_housekeeping()
        return self._sources.add_database(name, dsn, relations, seeker)

    async def release_database(self, name: str, reason: str = "the capture left this node") -> None:
        """End the shapes of a database that this process no longer captures.

        Requests get 503 until it is added again. Pending log writes are flushed first, for the process that continues
        the same stream.
        """
        await self._sources.release_database(name, reason)

    def suspend_database(self, name: str, reason: str = "the capture left this node") -> None:
        """End the shapes of a database like `release_database`, without flushing anything to disk."""
        self._sources.suspend_database(name, reason)

    def set_leaders(self, led_elsewhere: Callable[[str], bool]) -> None:
        """`led_elsewhere(name)` returns whether another node captures the database, so that its tables are not awaited
        here after it left this node."""
        self._tables.search.led_elsewhere = led_elsewhere

    def add_shards(self, opener: ShardOpener, cluster: Callable[[], Awaitable[str]] | None = None) -> None:
        """Serve shards: `opener(name)` returns a handle or raises MissingError. `cluster()` returns the id of the
        cluster that they belong to; without it their shapes are in memory only."""
        self._start_housekeeping()
        self._sources.add_shards(opener, cluster)

    def _start_housekeeping(self) -> None:
        if not self._keeps_house:
            self._keeps_house = True
            body = run_unit("shapes", self._housekeeping.run, tracker=self._tracker, clock=self.clock)
            self._tasks.spawn(body, name="shapes-housekeeping")

    async def aclose(self) -> None:
        """End all shapes and wait for their tasks. Idempotent."""
        self._closed = True
        await self._sources.release_all("the node is stopping")
        self._live.end_all("the node is stopping")
        await self._tasks.aclose()
        self._compiler.close()
        self._files.close()

    def _task_failed(self, name: str, error: BaseException) -> None:
        """Stop all shapes: a supervised task ends with an error only if the supervision itself has a defect."""
        _log.error(
            "shapes have stopped after an internal error", part=name, error=error_sentence(error), exc_info=error
        )
        self._tracker.fail("shapes", error_sentence(error), now_ms=self.clock.now_ms())
        self._closed = True
        self._live.end_all("shapes have stopped after an internal error")

    # -- look-up -----------------------------------------------------------------------------------

    def shapes(self) -> list[dict[str, object]]:
        """Return one plain record per live shape, for the CLI and the console."""
        return [describe_shape(shape, self._tables.pending_bytes(shape)) for shape in self._live.all()]

    def facts(self) -> dict[str, object]:
        """Return counts and bytes of all shapes, and the largest ones; of bounded size."""
        taps = self._tables.taps().values()
        return {
            "shapes": len(self._live.by_handle),
            "max_shapes": self.settings.max_shapes,
            "memory_bytes": self.budget.used_bytes,
            "memory_limit_bytes": self.budget.limit_bytes,
            "memory_refused": self.budget.refused,
            "disk_bytes": self.disk.used_bytes,
            "disk_limit_bytes": self.disk.limit_bytes,
            "disk_refused": self.disk.refused,
            "read_bytes": sum(store.reader.lent.used_bytes for store in self._sources.stores.values()),
            "kept": sorted(name for name, store in self._sources.stores.items() if store.waited_for),
            "backlog_bytes": sum(tap.held_bytes for tap in taps),
            "fell_behind": sum(tap.fell_behind for tap in taps),
            "evicted_idle": self._live.eviction.count,
            "refused": self._live.rejections.count,
            "last_refusal": self._live.rejections.last,
            "loop_ms": round(self.share.busy_s * 1000, 1),
            "longest_slice_ms": round(self.share.longest_s * 1000, 1),
            "largest": self._largest.describe(self._live.by_handle),
        }

    @property
    def health(self) -> str:
        """`active`; `starting` while a captured database has no relations yet; `stopping` once closed."""
        if self._closed:
            return "stopping"
        return "starting" if self._tables.is_starting() else "active"

    def find_by_handle(self, handle: str) -> LiveShape | None:
        return self._live.by_handle.get(handle)

    def find_current(self, definition: ShapeDefinition) -> LiveShape | None:
        return self._live.find_current(definition)

    def last_seen(self, shape: LiveShape) -> int:
        """Return the newest transaction of the shape's source whose effect on the shape, if any, is in its log."""
        return shape.last_seen if shape.definition.source.kind == "shard" else self._tables.last_seen(shape)

    def has_reached(self, shape: LiveShape, offset: LogOffset) -> bool:
        """Return whether `offset` is in the log, or names a transaction that the source has seen: event streams resume
        at the last transaction seen, which need not be one of the shape's own."""
        return offset <= shape.log.end or offset.tx <= self.last_seen(shape)

    async def plan_request(self, request: ShapeRequest, *, waits: bool = True) -> Plan:
        """Check a request against its table or shard and return its plan.

        `waits`: wait for a table that was created a moment ago. Raises FieldError, InvalidError or UnavailableError.
        """
        if self._closed:
            raise UnavailableError("the node is stopping.")
        name = parse_shard_name(request.table)
        plan = self._live.plans.get(request)
        if plan is not None and self._is_plan_valid(plan, request):
            return plan
        if name is None:
            plan = await self._tables.plan_request(request, waits=waits)
        else:
            plan = await self._shards.plan_request(request, name)
        if self.find_current(plan.definition) is not None:
            self._live.plans.put(request, plan)
        return plan

    def _is_plan_valid(self, plan: Plan, request: ShapeRequest) -> bool:
        if plan.relation is None:
            shape = self.find_current(plan.definition)  # the shard may have new columns
            return shape is not None and shape.schema_json == plan.schema_json
        if needs_old_rows(plan.relation, request) and self.find_current(plan.definition) is None:
            return False  # the stream may no longer carry old rows, which would be why the shape ended
        shape = self.find_current(plan.definition)
        if shape is not None and self._tables.continues_while_paused(shape):
            return True
        try:
            return self._tables.search.find_relation(request.table)[1] == plan.relation
        except (NotCapturedError, TablePausedError):
            return False

    def successor_handle(self, handle: str) -> str:
        """Return a handle for a client whose shape has ended without a replacement. No shape ever gets this handle."""
        return self._live.handles.mint_successor(handle)

    # -- opening and deleting ------------------------------------------------------------------------

    def open_shape(self, plan: Plan) -> LiveShape:
        """Return the live shape of a plan; start one if none exists.

        A plain def: the place is reserved before any other request runs. Raises OverBudgetError if there is no room,
        UnavailableError if the service is closed, and the definition's recent error (rejection cache).
        """
        if self._closed:
            raise UnavailableError("the node is stopping.")
        shape = self.find_current(plan.definition)
        if shape is not None and (
            shape.schema_json != plan.schema_json or not self._tables.follows_relation(shape, plan.relation)
        ):
            self._live.end(shape, "the table's definition changed")
            shape = None
        if shape is None:
            shape = self._live.start(plan, lambda: self._create_log(plan.definition))
        self._live.record_use(shape)
        return shape

    def _create_log(self, definition: ShapeDefinition) -> ShapeLog:
        source, limits = definition.source, self.settings.limits
        if source.kind == "shard":
            return self._shards.log(limits, self.budget)
        return self._tables.log(source.database, limits, self.budget)

    def delete(self, shape: LiveShape) -> None:
        self._live.end(shape, "deleted on request")
