"""Shapes on a captured table: the real tap, router, consumers and logs over snapshots of the model, and their readers.

Readers come at any moment, also in the middle of a transaction, read by chunks at their own pace, and go at any moment.
Oracle: a reader that has read a log to its end has exactly the rows of a SELECT as of the LSN that the shape reports,
each inserted once and changed only while it exists.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from msgspec import structs

from sim.loop import LIFE
from sim.scenarios.capture_database import Database
from sim.world import Violated, World, swapped
from tidemill.base.clock import Clock
from tidemill.base.errors import TidemillError
from tidemill.base.runtime.tasks import Tasks
from tidemill.capture.changes import Relation
from tidemill.capture.postgres.pg_snapshot import PgSnapshot
from tidemill.capture.session.capture import Capture
from tidemill.shapes.definition.compiler_thread import CompileRequest, compile_all
from tidemill.shapes.definition.planner import Plan, ShapeRequest, compile_request
from tidemill.shapes.definition.table_columns import ColumnInfo, TableColumns
from tidemill.shapes.live_shape import LiveShape
from tidemill.shapes.log.chunks import split_chunk
from tidemill.shapes.log.items import snapshot_end_item
from tidemill.shapes.log.log import UNBOUNDED, LogLimits
from tidemill.shapes.log.log_offset import BEFORE_ALL
from tidemill.shapes.log.row_writer import RowWriter
from tidemill.shapes.log.store import ShapeStore
from tidemill.shapes.loop_share import LoopShare
from tidemill.shapes.memory_budget import Budget
from tidemill.shapes.tables import captured_database as database_module
from tidemill.shapes.tables.backlog import BacklogLimits
from tidemill.shapes.tables.restore import RegisteredConsumer
from tidemill.shapes.tables.table_consumer import TableConsumer
from tidemill.shapes.tables.table_shapes import TableShapes
from tidemill.shapes.where import Type, Where

DSN = "host=sim dbname=sim"
HOUSE_S = 1.0
"""Interval at which the service checks for shapes whose table is no longer captured."""
LATE_S = 0.2
INFOS = (
    ColumnInfo("id", "int4", "b", 0, -1, True, True, True),
    ColumnInfo("v", "text", "b", 0, -1, False, True, True),
    ColumnInfo("b", "text", "b", 0, -1, False, True, True),
)
WHERES = ("", "", "id < 4", "v < 'm'", "id IN (1, 5)", "b IS NULL OR id = 2")


class Ticking:
    """Clock whose every reading takes a moment, so that time slices of the shapes' work end at any step."""

    def __init__(self, world: World, clock: Clock) -> None:
        self._source = world.source
        self._clock = clock
        self._ahead_s = 0.0

    def now_ms(self) -> int:
        return self._clock.now_ms()

    def monotonic_s(self) -> float:
        self._ahead_s += self._source.choice((0.0, 0.0, 0.0005, 0.002))
        return self._clock.monotonic_s() + self._ahead_s

    def boot_s(self) -> float:
        return self._clock.boot_s() + self._ahead_s


class ModelSource:
    """Replacement of PostgresSource."""

    def __init__(self, db: Database, dsn: str) -> None:
        self._db = db
        self.sees: dict[str, frozenset[int]] = {}
        """Handle → transactions that its initial rows contain."""

    async def describe_table(self, relation: Relation) -> TableColumns:
        await asyncio.sleep(self._db.world.source.uniform(0, 0.02))
        return TableColumns(relation, INFOS)

    async def load(
        self,
        shape: LiveShape,
        info: TableColumns,
        where: Where | None,
        writer: RowWriter,
        must_see: frozenset[int],
        with_rows: bool,
        share: LoopShare,
    ) -> PgSnapshot:
        source = self._db.world.source
        await asyncio.sleep(source.uniform(0, 0.1))
        await self._db.world.until(lambda: self._db.visible(must_see), every_s=0.01)
        taken = self._db.snapshot()
        self.sees[shape.handle] = taken.visible
        for row in taken.rows[info.relation.oid].values():
            if source.random() < 0.3:
                await asyncio.sleep(source.uniform(0, 0.1))
            if where is None or where.matches(row):
                shape.log.add_base([writer.render_base_row(row)])
        return structs.replace(taken.seen, lsn=taken.lsn)


class LateShapes(TableShapes):
    """Planted fault late-consumer: a shape is registered with the router after its snapshot was taken, not before."""

    async def _build_shape(
        self, shape: LiveShape, request: ShapeRequest, database_name: str, info: TableColumns, where: Where | None
    ) -> None:
        database = self._databases[database_name]
        writer = RowWriter("public", info.relation.table, info.names, info.key)
        consumer = TableConsumer(shape, info.relation, where, writer)
        snapshot = await database.source.load(shape, info, where, writer, frozenset(), True, self._share)
        await asyncio.sleep(LATE_S)
        database.sink.router.add(consumer)
        self._consumers[shape.handle] = RegisteredConsumer(database.sink, consumer, info)
        shape.log.add_base([snapshot_end_item(snapshot.xmin, snapshot.xmax, sorted(snapshot.in_progress))])
        shape.log.seal_base()
        consumer.set_snapshot(snapshot)
        await self._share.run_step(consumer.publish_waiting)
        shape.mark_ready()


class Compiler:
    """Replacement of the compiler thread: the simulated loop has no threads."""

    async def __call__(self, request: ShapeRequest, types: Mapping[str, Type], schema: str, table: str) -> Where | None:
        return compile_request(request, types, schema, table)

    async def compile_many(self, asked: Sequence[CompileRequest]) -> list[Where | BaseException | None]:
        return compile_all(asked)


class Shapes:
    """Shapes of one process, and their readers."""

    def __init__(
        self,
        db: Database,
        capture: Capture,
        clock: Clock,
        tasks: Tasks,
        *,
        late: bool,
        store: ShapeStore | None = None,
    ) -> None:
        self._db = db
        self._capture = capture
        self._world = db.world
        self._tasks = tasks
        self._clock = clock
        self.checked = 0
        """Number of logs that were read to their end and compared."""
        ticking = Ticking(db.world, clock)
        kind: Callable[..., TableShapes] = LateShapes if late else TableShapes
        self._tables = kind(ticking, LoopShare(ticking), BacklogLimits(), Compiler())
        self._handles = 0
        with swapped(database_module, "PostgresSource", self._source):
            self._sink = self._tables.add("sim", DSN, capture.relations, store)
        capture.add_tap(self._sink)

    def _source(self, dsn: str, _: Callable[[], None]) -> ModelSource:
        self.source = ModelSource(self._db, dsn)
        return self.source

    def start(self, readers: int) -> None:
        self._tasks.spawn(self._sink.run(), name="shapes")
        self._run(readers)

    def _run(self, readers: int) -> None:
        self._tasks.spawn(self._house(), name="house")
        for number in range(readers):
            self._tasks.spawn(self._reader(), name=f"reader {number}")

    async def _house(self) -> None:
        while True:
            await asyncio.sleep(HOUSE_S)
            for consumer in self._tables.uncaptured_consumers():
                self._end(consumer.shape, "its table is not captured any more")
            self._sink.end_late_shapes()

    async def _reader(self) -> None:
        source = self._world.source
        while True:
            await asyncio.sleep(source.uniform(0, 0.5) ** 2)
            oid = source.choice(self._db.captured)
            request = ShapeRequest(
                f"t{oid}", source.choice(WHERES), replica=source.choice(("default", "full"))
            )  # fmt: skip
            try:
                plan = await self._tables.plan_request(request)
            except TidemillError:
                continue  # not captured now
            shape = self._shape(plan, LogLimits(chunk_bytes=source.choice((100, 1 << 20))))
            self._world.trace(f"shape {shape.handle} of t{oid} where {request.where!r}")
            try:
                await self._follow(shape, plan.build, oid, request)
            finally:
                self._end(shape, "no client reads it")
            self._world.trace(f"shape {shape.handle} ended: {shape.end_reason}")

    def _shape(self, plan: Plan, limits: LogLimits) -> LiveShape:
        self._handles += 1
        handle = f"h{LIFE.get()}.{self._handles}"
        return LiveShape(handle, plan.definition, plan.schema_json, self._tables.log("sim", limits, Budget(UNBOUNDED)))

    def _end(self, shape: LiveShape, reason: str) -> None:
        shape.drop(reason)
        self._tables.detach(shape)

    async def _follow(
        self, shape: LiveShape, build: Callable[[LiveShape], Awaitable[None]], oid: int, request: ShapeRequest
    ) -> None:
        """Read the shape until it ends, or for a random number of chunks."""
        source, rows, offset = self._world.source, dict[str, dict[str, Any]](), BEFORE_ALL
        await build(shape)
        where = filter_of(self._db, oid, request)
        for _ in range(source.choice((3, 30, 1_000_000))):
            if shape.has_ended:
                return
            chunk = await shape.log.fetch(offset)
            for item in split_chunk(chunk.items):
                read(json.loads(item), rows, shape.handle)
            offset = chunk.end
            if chunk.complete and self._follows:
                self._compare(shape, oid, where, rows)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(source.choice((0.02, 1.0))):
                        await shape.subscribe()
            await asyncio.sleep(source.uniform(0, 0.1) if source.random() < 0.2 else 0)

    @property
    def _follows(self) -> bool:
        """True if the stream comes from the current server. Between the two servers a shape shows the former one."""
        return self._db.fork_lsn is None or self._capture.is_streaming_from(self._db.history)

    def _compare(self, shape: LiveShape, oid: int, where: Where | None, rows: dict[str, dict[str, Any]]) -> None:
        last_seen = self._tables.last_seen(shape)
        table = self._db.select(oid, self.source.sees[shape.handle], last_seen)
        due = {key: row for key, row in table.items() if where is None or where.matches(row)}
        held = {str(row["id"]): row for row in rows.values()}
        if held != due:
            raise Violated(f"a shape's rows are not the table's: shape={shape.handle} of=t{oid} where="
                           f"{shape.definition.where!r} lsn={last_seen} held={held} due={due}")  # fmt: skip
        self.checked += 1


def filter_of(db: Database, oid: int, request: ShapeRequest) -> Where | None:
    return compile_request(request, TableColumns(db.relations[oid], INFOS).where_types(), "public", f"t{oid}")


def read(item: dict[str, Any], rows: dict[str, dict[str, Any]], handle: str) -> None:
    """Apply an item to `rows` as a client of the protocol does. Raises Violated for an item that does not fit."""
    operation, key = item["headers"].get("operation"), item.get("key", "")
    if operation is None:
        return
    if (operation == "insert") == (key in rows):
        raise Violated(f"an item does not fit what was read: shape={handle} item={item} rows={sorted(rows)}")
    if operation == "delete":
        del rows[key]
    else:
        rows[key] = {**rows.get(key, {}), **item["value"]}
