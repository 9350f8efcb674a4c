"""All shapes of one process: from a definition to a live shape, one for equal definitions; bounded, and closed as one.

V1  One definition has at most one live shape; a dropped one is replaced under a new handle.
V3  At most `max_shapes` live; the least recently used one without waiting clients goes first.
V4  Bases and logs together stay near `total_bytes`: once a second shapes beyond it end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import Invalid, TidemillError, Unavailable
from tidemill.base.marks import Tracker
from tidemill.base.tasks import Tasks
from tidemill.shapes.live import LiveShape
from tidemill.shapes.log import LogStorage, MemoryLog
from tidemill.shapes.offsets import LogOffset
from tidemill.shapes.plan import Plan, ShapeRequest, shard_name
from tidemill.shapes.settings import ShapeSettings
from tidemill.shapes.shape import HandleMint, ShapeDefinition
from tidemill.shapes.shard_shapes import ShardOpener, ShardShapes
from tidemill.shapes.sink import ShapeSink
from tidemill.shapes.table_shapes import Relations, TableShapes

_log = structlog.get_logger()

HOUSEKEEPING_S = 1.0
LOADING_BUDGET_MS = 60_000
"""A shape that loads for longer shows as stuck."""


class ShapeService:
    """Assembled by node: add databases and shards, mount `shape_routes(service)`, close at the end."""

    def __init__(self, clock: Clock, rand: Rand, tracker: Tracker, settings: ShapeSettings | None = None) -> None:
        self.settings = settings or ShapeSettings()
        self.clock = clock
        self.rand = rand
        self._tracker = tracker
        self._tasks = Tasks()
        self._tables = TableShapes()
        self._shards = ShardShapes(self._tasks)
        self._handles = HandleMint(clock, rand)
        self._by_handle: dict[str, LiveShape] = {}
        self._by_definition: dict[ShapeDefinition, LiveShape] = {}
        self._plans: dict[ShapeRequest, Plan] = {}
        self._runners: dict[str, asyncio.Task[None]] = {}
        self._keeping = False
        self._closed = False

    # -- assembly ----------------------------------------------------------------------------------

    def add_database(self, name: str, dsn: str, relations: Relations) -> ShapeSink:
        """Serve the tables of a captured database; returns the Sink to register with its collector.

        `relations()` gives the relations captured now: their columns are what the stream carries. It may name
        none until the replication slot exists, never before. Adding a name again (a capture that was started
        anew, perhaps after another node had it) ends the shapes of its earlier life: they may have missed changes.
        """
        self.restart_database(name, "the capture was started anew")
        return self._tables.add(name, dsn, relations)

    def suspend_database(self, name: str) -> None:
        """This process does not capture it now: its shapes end, requests are 503 until it is added again."""
        self.restart_database(name, "the capture left this node")
        self._tables.suspend(name)

    @property
    def sink(self) -> ShapeSink:
        """The sink of the only database. Raises Invalid when there is none or more than one."""
        sinks = self._tables.sinks()
        if len(sinks) != 1:
            raise Invalid(f"no single captured database: databases={len(sinks)}.")
        return sinks[0]

    def add_shards(self, opener: ShardOpener) -> None:
        """Serve shards: `opener(name)` returns a handle or raises Missing."""
        self._shards.serve(opener)

    def restart_database(self, name: str, reason: str) -> None:
        """The stream has a gap (slot lost, new slot): every shape of the database refetches."""
        self._plans.clear()
        for shape in list(self._by_handle.values()):
            if shape.definition.source.kind == "table" and shape.definition.source.database == name:
                self._forget(shape, reason)

    async def aclose(self) -> None:
        """End all shapes and wait for their tasks. Idempotent."""
        self._closed = True
        for shape in list(self._by_handle.values()):
            self._forget(shape, "the node is stopping")
        await self._tasks.aclose()

    # -- look-up -----------------------------------------------------------------------------------

    def shapes(self) -> list[dict[str, object]]:
        """One plain record per live shape, for the CLI and the console."""
        return [
            {
                "handle": shape.handle,
                "source": str(shape.definition.source),
                "where": shape.definition.where,
                "state": shape.state,
                "offset": str(shape.log.end),
                "rows": shape.rows_loaded,
                "base_bytes": shape.log.base_bytes,
                "log_bytes": shape.log.log_bytes,
                "waiting": shape.waiting,
            }
            for shape in self._by_handle.values()
        ]

    def by_handle(self, handle: str) -> LiveShape | None:
        return self._by_handle.get(handle)

    def current(self, definition: ShapeDefinition) -> LiveShape | None:
        shape = self._by_definition.get(definition)
        return None if shape is None or shape.gone else shape

    def last_seen(self, shape: LiveShape) -> int:
        """Newest transaction seen of this shape's source, whether or not it touched the shape."""
        return shape.last_seen if shape.definition.source.kind == "shard" else self._tables.last_seen(shape)

    def covers(self, shape: LiveShape, offset: LogOffset) -> bool:
        """Whether `offset` is a place the shape has reached: the end of its log, or a transaction its source has seen.

        Event streams resume at the last transaction seen, which need not be one of the shape's own.
        """
        return offset <= shape.log.end or offset.tx <= self.last_seen(shape)

    async def plan(self, request: ShapeRequest) -> Plan:
        """Check a request against its table or shard. Raises FieldError, Invalid or Unavailable.

        A live client asks the same again and again, so a plan is kept for as long as it is true.
        """
        if self._closed:
            raise Unavailable("the node is stopping.")
        name = shard_name(request.table)
        plan = self._plans.get(request)
        if plan is not None and self._still_true(plan, request):
            return plan
        plan = await (self._tables.plan(request) if name is None else self._shards.plan(request, name))
        if len(self._plans) >= 2 * self.settings.max_shapes:
            self._plans.clear()
        self._plans[request] = plan
        return plan

    def _still_true(self, plan: Plan, request: ShapeRequest) -> bool:
        if plan.relation is None:
            return self.current(plan.definition) is not None
        return self._tables.find(request.table)[1] == plan.relation

    def open(self, plan: Plan) -> LiveShape:
        """The live shape of a plan; starts one when there is none (V1). Plain def: the place is taken at once.

        Raises Unavailable when there is no room, or the service is closed.
        """
        if self._closed:
            raise Unavailable("the node is stopping.")
        shape = self.current(plan.definition)
        if shape is not None and (
            shape.schema_json != plan.schema_json or not self._tables.follows(shape, plan.relation)
        ):
            self._forget(shape, "the table's definition changed")
            shape = None
        if shape is None:
            shape = self._start(plan)
        shape.used_s = self.clock.monotonic_s()
        return shape

    def delete(self, shape: LiveShape) -> None:
        self._forget(shape, "deleted on request")

    # -- life of a shape ---------------------------------------------------------------------------

    def _start(self, plan: Plan) -> LiveShape:
        self._make_room()
        if not self._keeping:
            self._keeping = True
            self._tasks.spawn(self._keep_house(), name="shapes-housekeeping")
        log: LogStorage = MemoryLog(self.settings.limits)
        shape = LiveShape(self._handles.mint(plan.definition), plan.definition, plan.schema_json, log)
        self._by_handle[shape.handle] = shape
        self._by_definition[plan.definition] = shape
        self._mark(shape)
        self._runners[shape.handle] = self._tasks.spawn(self._run(shape, plan.build), name=f"shape:{shape.handle}")
        return shape

    def _make_room(self) -> None:
        if len(self._by_handle) < self.settings.max_shapes:
            return
        idle = [shape for shape in self._by_handle.values() if not shape.waiting]
        if not idle:
            raise Unavailable(f"too many shapes with waiting clients: limit={self.settings.max_shapes}.")
        self._forget(min(idle, key=lambda shape: shape.used_s), "evicted: least recently used")

    def _forget(self, shape: LiveShape, reason: str) -> None:
        """End a shape and every trace of it. Idempotent."""
        shape.drop(reason)
        self._by_handle.pop(shape.handle, None)
        if self._by_definition.get(shape.definition) is shape:
            del self._by_definition[shape.definition]
        self._tables.detach(shape)
        runner = self._runners.pop(shape.handle, None)
        if runner is not None and runner is not asyncio.current_task():
            runner.cancel()
        self._tracker.remove(f"shape:{shape.handle}")

    async def _run(self, shape: LiveShape, build: Callable[[LiveShape], Awaitable[None]]) -> None:
        """Load, then stay until the shape is over; failures become the shape's error, never this task's."""
        try:
            await build(shape)
            await shape.wait_over()
        except TidemillError as error:
            shape.fail(error)
        except (OSError, EOFError) as error:
            shape.fail(Unavailable(f"loading failed: error={error!r}."))
        finally:
            self._forget(shape, "its task ended")
            _log.info("shape over", handle=shape.handle, source=str(shape.definition.source), why=shape.end_reason)

    async def _keep_house(self) -> None:
        """Once a second: marks, and the budget of all shapes together (V4)."""
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            self._trim()
            for shape in self._by_handle.values():
                self._mark(shape)

    def _trim(self) -> None:
        """Shapes without waiting clients go first, the least recently used of them before the others."""
        held = {shape: shape.log.base_bytes + shape.log.log_bytes for shape in self._by_handle.values()}
        excess = sum(held.values()) - self.settings.total_bytes
        for shape in sorted(held, key=lambda shape: (shape.waiting > 0, shape.used_s)):
            if excess <= 0:
                return
            excess -= held[shape]
            self._forget(shape, "evicted: all shapes together outgrew their memory")

    def _mark(self, shape: LiveShape) -> None:
        loading = shape.state == "loading"
        seen = self.last_seen(shape)
        self._tracker.set(
            f"shape:{shape.handle}",
            0 if loading else seen,
            1 if loading else seen,
            now_ms=self.clock.now_ms(),
            reason=f"loads the initial rows of {shape.definition.source}" if loading else "",
            budget_ms=LOADING_BUDGET_MS,
            unit="ms" if shape.definition.source.kind == "shard" else "lsn",
        )
