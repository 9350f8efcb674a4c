"""All shapes of one process: from a definition to a live shape, one for equal definitions; bounded, and closed as one.

V1  One definition has at most one live shape; a dropped one is replaced under a new handle.
V3  At most `max_shapes` live, and `memory_bytes` in all. Room is made of shapes that nobody read for `idle_s` and
    nobody waits for; a newcomer that finds none is refused, and none in use is ended for it.
V5  Whatever building or following a shape raises, of whatever type, ends that shape and nothing else (`_run`); what its
    share of a stream raises ends it in the sink. Asked for again it is refused for a while (`refusals`).
V6  A shape whose table is captured no more ends; nothing of an ended one stays, but for a fault's mark for a minute.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import Invalid, TidemillError, Unavailable
from tidemill.base.marks import Tracker
from tidemill.base.tasks import Tasks, is_own_fault, keep, sentence
from tidemill.shapes.budget import Budget, Full
from tidemill.shapes.compiling import CompilerThread
from tidemill.shapes.live import LiveShape
from tidemill.shapes.log import LogStorage, MemoryLog
from tidemill.shapes.offsets import LogOffset
from tidemill.shapes.plan import Plan, ShapeRequest, shard_name
from tidemill.shapes.refusals import Refusals
from tidemill.shapes.reporting import LARGEST, SHARDS, Reporter, Source, mark_of, show
from tidemill.shapes.settings import ShapeSettings
from tidemill.shapes.shape import HandleMint, ShapeDefinition
from tidemill.shapes.shard_shapes import ShardOpener, ShardShapes
from tidemill.shapes.share import LoopShare
from tidemill.shapes.sink import ShapeSink, broken
from tidemill.shapes.table_shapes import Relations, TableShapes

_log = structlog.get_logger()

HOUSEKEEPING_S = 1.0
ABANDONED_S = 10.0
"""A shape that loads while nobody waits for so long gives its place among the few snapshots to others."""

SHAPE_BYTES = 24 << 10
"""What a shape takes beside its rows: definition, plan, compiled clause, task (measured: docs/shapes.md)."""


class ShapeService:
    """Assembled by node: add databases and shards, mount `shape_routes(service)`, close at the end."""

    def __init__(self, clock: Clock, rand: Rand, tracker: Tracker, settings: ShapeSettings | None = None) -> None:
        self.settings = settings or ShapeSettings()
        self.clock = clock
        self.rand = rand
        self.budget = Budget(self.settings.memory_bytes, self._make_bytes)
        self.share = LoopShare(clock, self.settings.loop_share)
        self._tracker = tracker
        self._reporter = Reporter(tracker)
        self._refusals = Refusals()
        self._tasks = Tasks(self._task_failed)
        self._compiler = CompilerThread()
        self._tables = TableShapes(clock, self.share, self.settings.backlog, self._compiler)
        self._shards = ShardShapes(clock, self.share, self._compiler)
        self._handles = HandleMint(clock, rand)
        self._by_handle: dict[str, LiveShape] = {}
        self._by_definition: dict[ShapeDefinition, LiveShape] = {}
        self._plans: dict[ShapeRequest, Plan] = {}
        self._runners: dict[str, asyncio.Task[None]] = {}
        self._pumps: dict[str, asyncio.Task[None]] = {}
        self._evicted = 0
        self._keeping = False
        self._closed = False

    # -- assembly ----------------------------------------------------------------------------------

    def add_database(self, name: str, dsn: str, relations: Relations) -> ShapeSink:
        """Serve the tables of a captured database; returns the tap to add to its capture.

        `relations()` gives the relations captured now: their columns are what the stream carries. It may name
        none until the replication slot exists, never before. Adding a name again (a capture that was started
        anew, perhaps after another node had it) ends the shapes of its earlier life: they may have missed changes.
        """
        self.suspend_database(name, "the capture was started anew")
        sink = self._tables.add(name, dsn, relations)
        pump = keep(f"shapes:{name}", sink.run, tracker=self._tracker, clock=self.clock)
        self._pumps[name] = self._tasks.spawn(pump, name=f"shapes:{name}")
        return sink

    def suspend_database(self, name: str, reason: str = "the capture left this node") -> None:
        """This process does not capture it now: its shapes end, requests are 503 until it is added again."""
        self._plans.clear()
        self._refusals.forget()
        for shape in list(self._by_handle.values()):
            if shape.definition.source.kind == "table" and shape.definition.source.database == name:
                self._forget(shape, reason)
        pump = self._pumps.pop(name, None)
        if pump is not None:
            pump.cancel()
        self._tables.suspend(name)

    def add_shards(self, opener: ShardOpener) -> None:
        """Serve shards: `opener(name)` returns a handle or raises Missing."""
        self._shards.serve(opener)

    async def aclose(self) -> None:
        """End all shapes and wait for their tasks. Idempotent."""
        self._closed = True
        for shape in list(self._by_handle.values()):
            self._forget(shape, "the node is stopping")
        await self._tasks.aclose()
        self._compiler.close()

    def _task_failed(self, name: str, error: BaseException) -> None:
        """Nothing here ends with an error unless it is a defect of the supervision itself: then nobody is served."""
        _log.error("shapes cannot go on", part=name, error=sentence(error), exc_info=error)
        self._tracker.fail("shapes", sentence(error), now_ms=self.clock.now_ms())
        self._closed = True
        for shape in list(self._by_handle.values()):
            self._forget(shape, "shapes cannot go on")

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
                "pending_bytes": self._tables.pending_bytes(shape),
                "waiting": shape.waiting,
            }
            for shape in self._by_handle.values()
        ]

    def facts(self) -> dict[str, object]:
        """Counts and bytes of all shapes, and which are the largest; of bounded size."""
        largest = sorted(self._by_handle.values(), key=lambda s: s.log.base_bytes + s.log.log_bytes, reverse=True)
        sinks = self._tables.sinks().values()
        return {
            "shapes": len(self._by_handle),
            "max_shapes": self.settings.max_shapes,
            "memory_bytes": self.budget.used_bytes,
            "memory_limit_bytes": self.budget.limit_bytes,
            "memory_refused": self.budget.refused,
            "backlog_bytes": sum(sink.held_bytes for sink in sinks),
            "fell_behind": sum(sink.fell_behind for sink in sinks),
            "evicted_idle": self._evicted,
            "refused": self._refusals.count,
            "last_refusal": self._refusals.last,
            "loop_ms": round(self.share.busy_s * 1000, 1),
            "longest_slice_ms": round(self.share.longest_s * 1000, 1),
            "largest": [
                {"handle": s.handle, "source": str(s.definition.source), "bytes": s.log.base_bytes + s.log.log_bytes}
                for s in largest[:LARGEST]
            ],
        }

    @property
    def health(self) -> str:
        """`active`; `starting` while a captured database has no relations yet."""
        if self._closed:
            return "stopping"
        return "starting" if self._tables.starting() else "active"

    def by_handle(self, handle: str) -> LiveShape | None:
        return self._by_handle.get(handle)

    def current(self, definition: ShapeDefinition) -> LiveShape | None:
        shape = self._by_definition.get(definition)
        return None if shape is None or shape.gone else shape

    def last_seen(self, shape: LiveShape) -> int:
        """Newest transaction of this shape's source whose effect on the shape, if any, is in its log."""
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
        if self.current(plan.definition) is not None:
            self._remember(request, plan)
        return plan

    def _still_true(self, plan: Plan, request: ShapeRequest) -> bool:
        if plan.relation is None:
            shape = self.current(plan.definition)  # a shard may have got columns since
            return shape is not None and shape.schema_json == plan.schema_json
        return self._tables.find(request.table)[1] == plan.relation

    def _remember(self, request: ShapeRequest, plan: Plan) -> None:
        if len(self._plans) >= 2 * self.settings.max_shapes:
            self._plans.clear()
        self._plans[request] = plan

    def open(self, plan: Plan) -> LiveShape:
        """The live shape of a plan; starts one when there is none (V1). Plain def: the place is taken at once.

        Raises Full when there is no room, Unavailable when the service is closed, and what the definition failed
        with lately.
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
        now_s = self.clock.monotonic_s()
        self._refusals.check(plan.definition, now_s)
        self._make_place(now_s)
        self.budget.take(SHAPE_BYTES)
        if not self._keeping:
            self._keeping = True
            house = keep("shapes", self._keep_house, tracker=self._tracker, clock=self.clock)
            self._tasks.spawn(house, name="shapes-housekeeping")
        log: LogStorage = MemoryLog(self.settings.limits, self.budget)
        shape = LiveShape(self._handles.mint(plan.definition), plan.definition, plan.schema_json, log)
        shape.started_s = shape.used_s = now_s
        self._by_handle[shape.handle] = shape
        self._by_definition[plan.definition] = shape
        self._runners[shape.handle] = self._tasks.spawn(self._run(shape, plan.build), name=f"shape:{shape.handle}")
        return shape

    def _idle(self) -> list[LiveShape]:
        """Shapes that nobody waits for and nobody has read for `idle_s`, least recently used first."""
        before_s = self.clock.monotonic_s() - self.settings.idle_s
        idle = [s for s in self._by_handle.values() if not s.waiting and s.used_s <= before_s and s.state != "loading"]
        return sorted(idle, key=lambda shape: shape.used_s)

    def _make_place(self, now_s: float) -> None:
        if len(self._by_handle) < self.settings.max_shapes:
            return
        idle = self._idle()
        if idle:
            self._evict(idle[0])
            return
        left_s = [s.used_s + self.settings.idle_s - now_s for s in self._by_handle.values() if not s.waiting]
        raise Full(
            f"this node serves as many shapes as it may: limit={self.settings.max_shapes}.",
            max(1, min(60, int(min(left_s, default=60.0)) + 1)),
            fix="Raise shapes.max_shapes, or let unused ones become idle.",
        )

    def _make_bytes(self, missing_bytes: int) -> None:
        for shape in self._idle():
            if missing_bytes <= 0:
                return
            missing_bytes -= shape.log.base_bytes + shape.log.log_bytes + SHAPE_BYTES
            self._evict(shape)

    def _evict(self, shape: LiveShape) -> None:
        self._evicted += 1
        self._forget(shape, f"evicted: nobody read it for idle_s={self.settings.idle_s}")

    def _forget(self, shape: LiveShape, reason: str) -> None:
        """End a shape and every trace of it. Idempotent."""
        shape.drop(reason)
        if self._by_handle.pop(shape.handle, None) is None:
            return
        self.budget.give(SHAPE_BYTES)
        if self._by_definition.get(shape.definition) is shape:
            del self._by_definition[shape.definition]
        self._tables.detach(shape)
        runner = self._runners.pop(shape.handle, None)
        if runner is not None and runner is not asyncio.current_task():
            runner.cancel()
        self._reporter.ended(shape)
        _log.info("shape over", handle=shape.handle, source=str(shape.definition.source), why=shape.end_reason)

    async def _run(self, shape: LiveShape, build: Callable[[LiveShape], Awaitable[None]]) -> None:
        """Load, then stay until the shape is over. THE boundary of a shape's own work (V5)."""
        try:
            await build(shape)
            await shape.wait_over()
        except BaseException as error:
            if not is_own_fault(error):
                raise
            listed = isinstance(error, TidemillError)
            shape.fail(error if isinstance(error, TidemillError) else broken(error), broken=not listed)
        finally:
            self._tell(shape)
            self._forget(shape, "its task ended")

    def _tell(self, shape: LiveShape) -> None:
        """A failure is remembered for those who ask again; one that is not the request's own is told."""
        error = shape.error
        if error is None or isinstance(error, Full):
            return
        now_s = self.clock.monotonic_s()
        self._refusals.add(shape.definition, error, now_s, broken=shape.broken)
        if not isinstance(error, Invalid):
            _log.error("shape failed", handle=shape.handle, error=str(error), exc_info=error)
            self._reporter.fault(shape.handle, str(error), self.clock.now_ms(), now_s)

    # -- once a second -----------------------------------------------------------------------------

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            self._house()

    def _house(self) -> None:
        for consumer in self._tables.uncaptured():
            self._forget(consumer.shape, "its table is not captured any more")
        now_s = self.clock.monotonic_s()
        for shape in list(self._by_handle.values()):
            if shape.state == "loading" and not shape.waiting and now_s - shape.used_s > ABANDONED_S:
                self._forget(shape, "nobody waits for its initial rows any more")
        sinks = self._tables.sinks()
        for sink in sinks.values():
            sink.end_the_late()
        sources: dict[str, Source] = {}
        for shape in self._by_handle.values():
            name, seen = mark_of(shape), self.last_seen(shape)
            target = seen if name == SHARDS else sinks[shape.definition.source.database].taken
            old = sources.get(name)
            position = min(seen, target) if shape.state == "live" else target
            if old is not None:
                position, target = min(position, old.position), max(target, old.target)
            sources[name] = Source(position, target, "ms" if name == SHARDS else "lsn")
        words = f"; {self.budget.used_bytes >> 20} of {self.budget.limit_bytes >> 20} MiB"
        now_ms = self.clock.now_ms()
        self._reporter.tick(self._by_handle.values(), sources, words, now_ms, now_s)
        show(
            shapes=len(self._by_handle),
            used=self.budget.used_bytes,
            limit=self.budget.limit_bytes,
            backlog=sum(sink.held_bytes for sink in sinks.values()),
            busy_s=self.share.busy_s,
            longest_s=self.share.longest_s,
        )
