"""All shapes of one process: creates them from definitions, shares and bounds them, and closes them.

The service owns the table of live shapes (by handle and by definition), the plans of recent requests, one pump task per
captured database, one task per shape, and the budgets of memory and disk. `open_shape` returns the live shape of a plan
or starts one. A housekeeping task runs once a second. It ends shapes whose table is no longer captured or was
redefined, ends abandoned loads, and publishes stage statuses and metrics.

- Invariant (one shape per definition): a definition has at most one live shape. A shape that was dropped is replaced
  under a new handle.
- Invariant (bounded): at most `max_shapes` shapes are live, and together they use at most `memory_bytes`. Room is made
  only by evicting shapes that were not read for `idle_s` and have no waiting request. If no such shape exists, the new
  one is rejected; a shape in use is never ended for it.
- Invariant (isolated failures): any exception from building or following a shape ends that shape only (`_run_shape`).
  An exception from evaluating its part of a stream ends it in the tap. The definition is then rejected for a while
  (`plan_cache`).
- Invariant (no residue): a shape ends when its table is no longer captured. Nothing of an ended shape remains, except
  the stage status of a failure for one minute.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from urllib.parse import quote

import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import InvalidError, TidemillError, UnavailableError
from tidemill.base.runtime.tasks import Tasks, error_sentence, is_own_fault_of_await, run_unit
from tidemill.base.status.status import StatusTracker
from tidemill.shapes.definition.compiler_thread import CompilerThread
from tidemill.shapes.definition.definition import HandleMint, ShapeDefinition, fixed_bytes
from tidemill.shapes.definition.plan_cache import PlanCache, RejectionCache
from tidemill.shapes.definition.planner import Plan, ShapeRequest, parse_shard_name
from tidemill.shapes.eviction import IdleEviction
from tidemill.shapes.live_shape import LiveShape, unexpected_failure
from tidemill.shapes.log.disk_log import DiskLog
from tidemill.shapes.log.log import LogStorage
from tidemill.shapes.log.log_offset import LogOffset
from tidemill.shapes.log.saved_shape import SavedShardShape, SavedTableShape
from tidemill.shapes.log.sqlite_file import StoredShape
from tidemill.shapes.log.store import ShapeStore
from tidemill.shapes.loop_share import LoopShare
from tidemill.shapes.memory_budget import Budget, OverBudgetError
from tidemill.shapes.reporting import (
    SHARDS_STATUS,
    LargestShapes,
    ShapeReporter,
    SourceProgress,
    describe_shape,
    set_metrics,
    status_name_of,
)
from tidemill.shapes.settings import ShapeSettings
from tidemill.shapes.shards.shard_shapes import Build, ShardOpener, ShardShapes
from tidemill.shapes.store_files import SHARDS_FILE, StoreFiles, disk_status_name
from tidemill.shapes.tables.capture_tap import ShapeTap
from tidemill.shapes.tables.captured_database import Relations, TableFinder, needs_old_rows
from tidemill.shapes.tables.initial_snapshot import TransientTableError
from tidemill.shapes.tables.table_shapes import NotCapturedError, TablePausedError, TableShapes

_log = structlog.get_logger()

HOUSEKEEPING_S = 1.0
ABANDONED_S = 10.0
"""Time after its last request at which a loading shape without waiting requests is ended, to free its snapshot slot."""

SUBSET_MEMORY_DIVISOR = 4
"""Divisor of the memory that rows of subsets in flight may use; the rest is reserved for shapes."""


class ShapeService:
    """Assembled by the node: add databases and shards, mount `shape_routes(service)`, and close it at the end."""

    def __init__(self, clock: Clock, rand: Rand, tracker: StatusTracker, settings: ShapeSettings | None = None) -> None:
        self.settings = settings or ShapeSettings()
        self.clock = clock
        self.rand = rand
        self._by_handle: OrderedDict[str, LiveShape] = OrderedDict()
        """Live shapes, least recently used first."""
        self._eviction = IdleEviction(self.settings, clock, self._by_handle, self._end_shape)
        self.budget = Budget(self.settings.memory_bytes, self._eviction.make_memory)
        self.disk = Budget(
            self.settings.disk_bytes,
            self._eviction.make_disk,
            whose="all shapes together",
            what="disk",
            setting="shapes.disk_mb",
        )
        self.subsets = Budget(self.settings.memory_bytes // SUBSET_MEMORY_DIVISOR, whose="all subsets together")
        self.share = LoopShare(clock, self.settings.loop_share)
        self._tracker = tracker
        self._reporter = ShapeReporter(tracker)
        self._refusals = RejectionCache()
        self._tasks = Tasks(self._task_failed)
        self._compiler = CompilerThread()
        self._tables = TableShapes(clock, self.share, self.settings.backlog, self._compiler)
        self._shards = ShardShapes(clock, self.share, self._compiler)
        self._handles = HandleMint(clock, rand)
        self._counts: dict[str, int] = {}
        """Number of live shapes per stage status."""
        self._loading: dict[LiveShape, None] = {}
        self._over_shards: dict[LiveShape, None] = {}
        self._largest = LargestShapes()
        self._by_definition: dict[ShapeDefinition, LiveShape] = {}
        self._plans = PlanCache(capacity=2 * self.settings.max_shapes)
        self._runners: dict[str, asyncio.Task[None]] = {}
        self._pumps: dict[str, list[asyncio.Task[None]]] = {}
        self._stores: dict[str, ShapeStore] = {}
        self._shard_store: ShapeStore | None = None
        self._shard_pumps: list[asyncio.Task[None]] = []
        self._files = StoreFiles(self.settings, clock, rand, tracker, self.budget, self.disk)
        self._over = False
        """Shapes have ended since the catalog entries of uncaptured tables were last removed."""
        self._keeping = False
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
        if name in self._stores:
            raise RuntimeError(f"the database is already served: name={name}")
        self.suspend_database(name, "the capture was restarted")
        store = self._files.open(quote(name, safe=""), name)
        sink = self._tables.add(name, dsn, relations, store, seeker)

        async def pump() -> None:
            await self._tables.restore(name, self._restore_table_shape)
            await sink.run()

        async def answer() -> None:
            await self._tables.answer_requests(name)

        kept = [
            run_unit(f"shapes:{name}", pump, tracker=self._tracker, clock=self.clock),
            run_unit(f"shapes:{name}/asked", answer, tracker=self._tracker, clock=self.clock),
        ]
        if store is not None:
            self._stores[name] = store
            kept.append(run_unit(disk_status_name(name), store.run, tracker=self._tracker, clock=self.clock))
        self._pumps[name] = [self._tasks.spawn(each, name=f"shapes:{name}") for each in kept]
        return sink

    async def release_database(self, name: str, reason: str = "the capture left this node") -> None:
        """End the shapes of a database that this process no longer captures.

        Requests get 503 until it is added again. Pending log writes are flushed first, for the process that continues
        the same stream.
        """
        store = self._stores.get(name)
        if store is not None:
            pumps = self._pumps.pop(name, [])
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            try:
                await asyncio.shield(store.aclose())
            finally:
                self._stores.pop(name, None)
        self.suspend_database(name, reason)

    def suspend_database(self, name: str, reason: str = "the capture left this node") -> None:
        """End the shapes of a database like `release_database`, without flushing anything to disk."""
        self._plans.clear()
        self._refusals.clear()
        for shape in list(self._by_handle.values()):
            if shape.definition.source.kind == "table" and shape.definition.source.database == name:
                self._end_shape(shape, reason)
        for pump in self._pumps.pop(name, []):
            pump.cancel()
        self._tables.suspend_database(name)

    def add_shards(self, opener: ShardOpener, cluster: Callable[[], Awaitable[str]] | None = None) -> None:
        """Serve shards: `opener(name)` returns a handle or raises MissingError. `cluster()` returns the id of the
        cluster that they belong to; without it their shapes are in memory only."""
        store = self._shard_store = self._files.open(SHARDS_FILE, "shards") if cluster is not None else None
        self._shards.start_serving(opener, cluster, store)
        if store is not None:
            store.name = _ignore_file_name
            restore = run_unit(SHARDS_STATUS, self._restore_shards, tracker=self._tracker, clock=self.clock)
            writes = run_unit(disk_status_name("shards"), store.run, tracker=self._tracker, clock=self.clock)
            self._shard_pumps = [self._tasks.spawn(each, name=SHARDS_STATUS) for each in (restore, writes)]

    async def _restore_shards(self) -> None:
        await self._shards.restore(self._restore_shard_shape)
        await asyncio.Event().wait()  # keep the supervised task running

    async def _release_shards(self) -> None:
        """Write the progress of the shapes over shards, and release their file."""
        store = self._shard_store
        if store is not None:
            self._shards.save_progress()
            for pump in self._shard_pumps:
                pump.cancel()
            await asyncio.gather(*self._shard_pumps, return_exceptions=True)
            self._shard_store = None
            await asyncio.shield(store.aclose())

    async def aclose(self) -> None:
        """End all shapes and wait for their tasks. Idempotent."""
        self._closed = True
        for name in list(self._stores):
            await self.release_database(name, "the node is stopping")
        await self._release_shards()
        for shape in list(self._by_handle.values()):
            self._end_shape(shape, "the node is stopping")
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
        for shape in list(self._by_handle.values()):
            self._end_shape(shape, "shapes have stopped after an internal error")

    # -- look-up -----------------------------------------------------------------------------------

    def shapes(self) -> list[dict[str, object]]:
        """Return one plain record per live shape, for the CLI and the console."""
        return [describe_shape(shape, self._tables.pending_bytes(shape)) for shape in self._by_handle.values()]

    def facts(self) -> dict[str, object]:
        """Return counts and bytes of all shapes, and the largest ones; of bounded size."""
        sinks = self._tables.taps().values()
        return {
            "shapes": len(self._by_handle),
            "max_shapes": self.settings.max_shapes,
            "memory_bytes": self.budget.used_bytes,
            "memory_limit_bytes": self.budget.limit_bytes,
            "memory_refused": self.budget.refused,
            "disk_bytes": self.disk.used_bytes,
            "disk_limit_bytes": self.disk.limit_bytes,
            "disk_refused": self.disk.refused,
            "read_bytes": sum(store.lent.used_bytes for store in self._all_stores().values()),
            "kept": sorted(name for name, store in self._all_stores().items() if store.waited_for),
            "backlog_bytes": sum(sink.held_bytes for sink in sinks),
            "fell_behind": sum(sink.fell_behind for sink in sinks),
            "evicted_idle": self._eviction.count,
            "refused": self._refusals.count,
            "last_refusal": self._refusals.last,
            "loop_ms": round(self.share.busy_s * 1000, 1),
            "longest_slice_ms": round(self.share.longest_s * 1000, 1),
            "largest": self._largest.describe(self._by_handle),
        }

    def _all_stores(self) -> dict[str, ShapeStore]:
        return self._stores if self._shard_store is None else {**self._stores, "shards": self._shard_store}

    @property
    def health(self) -> str:
        """`active`; `starting` while a captured database has no relations yet; `stopping` once closed."""
        if self._closed:
            return "stopping"
        return "starting" if self._tables.is_starting() else "active"

    def find_by_handle(self, handle: str) -> LiveShape | None:
        return self._by_handle.get(handle)

    def find_current(self, definition: ShapeDefinition) -> LiveShape | None:
        shape = self._by_definition.get(definition)
        return None if shape is None or shape.has_ended else shape

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
        plan = self._plans.get(request)
        if plan is not None and self._is_plan_valid(plan, request):
            return plan
        if name is None:
            plan = await self._tables.plan_request(request, waits=waits)
        else:
            plan = await self._shards.plan_request(request, name)
        if self.find_current(plan.definition) is not None:
            self._plans.put(request, plan)
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
            return self._tables.find_relation(request.table)[1] == plan.relation
        except (NotCapturedError, TablePausedError):
            return False

    def successor_handle(self, handle: str) -> str:
        """Return a handle for a client whose shape has ended without a replacement. No shape ever gets this handle."""
        return self._handles.mint_successor(handle)

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
            self._end_shape(shape, "the table's definition changed")
            shape = None
        if shape is None:
            shape = self._start_shape(plan)
        shape.used_s = self.clock.monotonic_s()
        self._by_handle.move_to_end(shape.handle)
        return shape

    def delete(self, shape: LiveShape) -> None:
        self._end_shape(shape, "deleted on request")

    # -- life of a shape ---------------------------------------------------------------------------

    def _start_shape(self, plan: Plan) -> LiveShape:
        now_s = self.clock.monotonic_s()
        self._refusals.raise_if_rejected(plan.definition, now_s)
        self._eviction.make_room_for_shape(now_s)
        self.budget.reserve(fixed_bytes(plan.definition))
        source = plan.definition.source
        log: LogStorage = (
            self._shards.log(self.settings.limits, self.budget)
            if source.kind == "shard"
            else self._tables.log(source.database, self.settings.limits, self.budget)
        )
        shape = LiveShape(self._handles.mint(plan.definition), plan.definition, plan.schema_json, log)
        self._add_shape(shape, plan.build, now_s)
        return shape

    def _add_shape(self, shape: LiveShape, build: Build, now_s: float) -> None:
        if not self._keeping:
            self._keeping = True
            house = run_unit("shapes", self._run_housekeeping, tracker=self._tracker, clock=self.clock)
            self._tasks.spawn(house, name="shapes-housekeeping")
        shape.started_s = shape.used_s = now_s
        self._by_handle[shape.handle] = shape
        self._loading[shape] = None
        mark = status_name_of(shape)
        self._counts[mark] = self._counts.get(mark, 0) + 1
        if mark == SHARDS_STATUS:
            self._over_shards[shape] = None
        self._by_definition[shape.definition] = shape
        self._runners[shape.handle] = self._tasks.spawn(self._run_shape(shape, build), name=f"shape:{shape.handle}")

    def _restore_table_shape(self, saved: StoredShape, kept: SavedTableShape, log: DiskLog) -> LiveShape:
        """Add a shape of an earlier run. Raises OverBudgetError; no live shape is ended to make room for it."""
        return self._restore_shape(saved, kept, log, _build_nothing)

    def _restore_shard_shape(self, saved: StoredShape, kept: SavedShardShape, log: DiskLog, build: Build) -> None:
        shape = self._restore_shape(saved, kept, log, build)
        shape.rows_loaded = kept.rows_loaded

    def _restore_shape(
        self, saved: StoredShape, kept: SavedTableShape | SavedShardShape, log: DiskLog, build: Build
    ) -> LiveShape:
        if len(self._by_handle) >= self.settings.max_shapes:
            raise OverBudgetError(f"too many shapes on this node: limit={self.settings.max_shapes}.", 1)
        self.budget.reserve(fixed_bytes(kept.definition))
        shape = LiveShape(saved.handle, kept.definition, kept.schema_json, log)
        shape.restored = True
        self._add_shape(shape, build, self.clock.monotonic_s())
        return shape

    def _end_shape(self, shape: LiveShape, reason: str) -> None:
        """End a shape and remove all references to it. Idempotent."""
        shape.drop(reason)
        if self._by_handle.pop(shape.handle, None) is None:
            return
        self._over = True
        self.budget.release(fixed_bytes(shape.definition))
        self._loading.pop(shape, None)
        self._over_shards.pop(shape, None)
        mark = status_name_of(shape)
        self._counts[mark] -= 1
        if not self._counts[mark]:
            del self._counts[mark]
        if self._by_definition.get(shape.definition) is shape:
            del self._by_definition[shape.definition]
            self._plans.remove(shape.definition)
        self._tables.detach(shape)
        runner = self._runners.pop(shape.handle, None)
        if runner is not None and runner is not asyncio.current_task():
            runner.cancel()
        self._reporter.clear_loading(shape)
        _log.info("shape ended", handle=shape.handle, source=str(shape.definition.source), why=shape.end_reason)

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
            self._end_shape(shape, "its task ended")

    def _report_failure(self, shape: LiveShape) -> None:
        """Cache a failure for repeated requests; log and report it unless the request itself caused it."""
        error = shape.error
        if error is None or isinstance(error, OverBudgetError):
            return
        now_s = self.clock.monotonic_s()
        self._refusals.add(shape.definition, error, now_s, broken=shape.broken)
        if isinstance(error, TransientTableError):
            _log.info("shape not started", handle=shape.handle, cause=str(error))
        elif not isinstance(error, InvalidError):
            _log.error("shape failed", handle=shape.handle, error=str(error), exc_info=error)
            self._reporter.report_failure(shape, str(error), self.clock.now_ms(), now_s)

    # -- once a second -----------------------------------------------------------------------------

    async def _run_housekeeping(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            self._housekeep()

    def _housekeep(self) -> None:
        for consumer in self._tables.uncaptured_consumers():
            self._end_shape(consumer.shape, "its table is no longer captured")
        for consumer in self._tables.redefined_consumers():
            self._end_shape(consumer.shape, "the table's definition changed")
        if self._over:
            self._over = False
            self._tables.forget_uncaptured()
        now_s = self.clock.monotonic_s()
        for shape in list(self._loading):
            if shape.state != "loading":  # for a shape over a shard, `build` runs for as long as the shape lives
                self._loading.pop(shape)
                self._reporter.clear_loading(shape)
            elif not (shape.restored or shape.waiting_count) and now_s - shape.used_s > ABANDONED_S:
                self._end_shape(shape, "no request waits for its initial rows any more")
        sinks = self._tables.taps()
        for sink in sinks.values():
            sink.end_late_shapes()
        sources = {
            f"shapes:{name}": SourceProgress(min(sink.evaluated_position(), sink.taken), sink.taken, "lsn")
            for name, sink in sinks.items()
        }
        seen = [shape.last_seen for shape in self._over_shards if shape.state == "live"]
        sources[SHARDS_STATUS] = SourceProgress(min(seen, default=0), max(seen, default=0), "ms")
        words = f"; {self.budget.used_bytes >> 20} of {self.budget.limit_bytes >> 20} MiB"
        now_ms = self.clock.now_ms()
        self._reporter.clear_recovered(self._by_definition)
        self._reporter.publish(self._counts, self._loading, sources, words, now_ms, now_s)
        set_metrics(
            shapes=len(self._by_handle),
            used=self.budget.used_bytes,
            limit=self.budget.limit_bytes,
            backlog=sum(sink.held_bytes for sink in sinks.values()),
            busy_s=self.share.busy_s,
            longest_s=self.share.longest_s,
        )


async def _ignore_file_name(_: str) -> None:
    """Ignore the file name of shapes over shards: no capture row names this file, and the shards themselves keep the
    history."""


async def _build_nothing(_: LiveShape) -> None:
    """Do nothing: the rows of a restored shape are already in its log."""
