"""All shapes of one process: from a definition to a live shape, one for equal definitions; bounded, and closed as one.

V1  One definition has at most one live shape; a dropped one is replaced under a new handle.
V2  A table shape is registered with the router before its snapshot is taken.
V3  At most `max_shapes` live; the least recently used one without waiting clients goes first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import msgspec
import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import Invalid, Missing, TidemillError, Unavailable
from tidemill.base.marks import Tracker
from tidemill.base.tasks import Tasks
from tidemill.capture.changes import Relation
from tidemill.shapes.consumer import TableConsumer
from tidemill.shapes.describe import TableInfo
from tidemill.shapes.items import snapshot_end
from tidemill.shapes.live import LiveShape
from tidemill.shapes.log import LogLimits, LogStorage, MemoryLog
from tidemill.shapes.postgres_source import PostgresSource, as_tidemill_error
from tidemill.shapes.router import Router
from tidemill.shapes.rows import RowWriter
from tidemill.shapes.shape import HandleMint, LogMode, Replica, ShapeDefinition, Source
from tidemill.shapes.shard_source import ShardFeed, ShardOpener, shard_types
from tidemill.shapes.sink import ShapeSink
from tidemill.shapes.where import Type, Where, WhereError, compile_where

_log = structlog.get_logger()

Relations = Callable[[], Iterable[Relation]]
SHARD_SCHEMA = "shard"


class ShapeSettings(msgspec.Struct, frozen=True):
    """
    max_shapes          live shapes at once
    long_poll_s         a live request without news is answered after this long
    sse_s               an event stream is closed after this long
    keep_alive_s        a comment line on a quiet event stream
    load_timeout_s      a client waits this long for the initial rows
    secret              required as `secret` in every request when set
    allow_delete        DELETE /v1/shape drops a shape (405 otherwise)
    """

    max_shapes: int = 1_000
    long_poll_s: float = 20.0
    sse_s: float = 60.0
    keep_alive_s: float = 21.0
    load_timeout_s: float = 45.0
    max_initial: int = 300
    max_existing: int = 10_000
    secret: str = ""
    allow_delete: bool = False
    limits: LogLimits = LogLimits()


class ShapeRequest(msgspec.Struct, frozen=True):
    """What a client asked for, not yet checked against the table."""

    table: str
    where: str = ""
    params: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    replica: Replica = "default"
    log_mode: LogMode = "full"


class FieldError(Invalid):
    """A parameter is wrong; `field` names it."""

    def __init__(self, field: str, message: str, *, fix: str = "") -> None:
        super().__init__(message, fix=fix)
        self.field = field


class _Database:
    def __init__(self, source: PostgresSource, relations: Relations, sink: ShapeSink) -> None:
        self.source = source
        self.relations = relations
        self.sink = sink
        self.infos: dict[Relation, TableInfo] = {}


class Plan(msgspec.Struct, frozen=True):
    """A checked request: its definition, and how to build the shape."""

    definition: ShapeDefinition
    schema_json: bytes
    build: Callable[[LiveShape], Awaitable[None]]


class ShapeService:
    def __init__(self, clock: Clock, rand: Rand, tracker: Tracker, settings: ShapeSettings | None = None) -> None:
        self.settings = settings or ShapeSettings()
        self.clock = clock
        self.rand = rand
        self._tracker = tracker
        self._handles = HandleMint(clock, rand)
        self._router = Router()
        self._databases: dict[str, _Database] = {}
        self._open_shard: ShardOpener | None = None
        self._by_handle: dict[str, LiveShape] = {}
        self._by_definition: dict[ShapeDefinition, LiveShape] = {}
        self._consumers: dict[str, tuple[str, TableConsumer]] = {}
        self._loaders: dict[str, asyncio.Task[None]] = {}
        self._tasks = Tasks()
        self._closed = False

    # -- assembly ----------------------------------------------------------------------------------

    def add_database(self, name: str, dsn: str, relations: Relations) -> ShapeSink:
        """Serve the tables of a captured database; returns the Sink to register with its collector.

        `relations()` gives the relations captured now: their columns are what the stream carries.
        """
        sink = ShapeSink(name, self._router)
        self._databases[name] = _Database(PostgresSource(dsn), relations, sink)
        return sink

    @property
    def sink(self) -> ShapeSink:
        """The sink of the only database. Raises Invalid when there is none or more than one."""
        if len(self._databases) != 1:
            raise Invalid(f"no single database: databases={','.join(self._databases) or 'none'}.")
        return next(iter(self._databases.values())).sink

    def add_shards(self, opener: ShardOpener) -> None:
        """Serve shards: `opener(name)` returns a handle or raises Missing."""
        self._open_shard = opener

    def restart_database(self, name: str, reason: str) -> None:
        """The stream has a gap (slot lost, new slot): every shape of the database refetches."""
        for shape in list(self._by_handle.values()):
            if shape.definition.source.kind == "table" and shape.definition.source.database == name:
                self._forget(shape, reason)

    async def aclose(self) -> None:
        """Drop all shapes and wait for their tasks. Idempotent."""
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
        """Newest transaction seen by this shape's source, whether or not it touched the shape."""
        database = self._databases.get(shape.definition.source.database)
        if shape.definition.source.kind == "shard" or database is None:
            return shape.last_seen
        return max(shape.last_seen, database.sink.last_seen)

    async def plan(self, request: ShapeRequest) -> Plan:
        """Check a request against its table or shard. Raises FieldError, Invalid or Unavailable."""
        if self._closed:
            raise Unavailable("the node is stopping.")
        shard_name = _shard_name(request.table)
        if shard_name is not None:
            return await self._plan_shard(request, shard_name)
        database_name, relation = self._find(request.table)
        database = self._databases[database_name]
        info = database.infos.get(relation)
        if info is None:
            info = database.infos[relation] = await database.source.describe(relation)
        columns = _check_columns(request.columns, info.names, info.key)
        where = _compile(request, info.where_types(), relation.schema, relation.table)
        source = Source("table", database_name, relation.schema, relation.table)
        definition = ShapeDefinition(
            source, request.where, where.params if where else (), columns, request.replica, request.log_mode
        )

        async def build(shape: LiveShape) -> None:
            await self._build_table(shape, database_name, info, where)

        return Plan(definition, info.schema_json(columns), build)

    def open(self, plan: Plan) -> LiveShape:
        """The live shape of a plan; starts one when there is none (V1). Plain def: the place is taken at once."""
        shape = self.current(plan.definition)
        if shape is not None and shape.schema_json != plan.schema_json:
            self._forget(shape, "the table's definition changed")
            shape = None
        if shape is None:
            self._make_room()
            log: LogStorage = MemoryLog(self.settings.limits)
            shape = LiveShape(self._handles.mint(plan.definition), plan.definition, plan.schema_json, log)
            self._by_handle[shape.handle] = shape
            self._by_definition[plan.definition] = shape
            self._loaders[shape.handle] = self._tasks.spawn(self._run(shape, plan.build), name=f"shape:{shape.handle}")
        shape.used_s = self.clock.monotonic_s()
        return shape

    def delete(self, shape: LiveShape) -> None:
        self._forget(shape, "deleted on request")

    # -- life of a shape ---------------------------------------------------------------------------

    def _make_room(self) -> None:
        if len(self._by_handle) < self.settings.max_shapes:
            return
        idle = [shape for shape in self._by_handle.values() if not shape.waiting]
        if not idle:
            raise Unavailable(f"too many shapes with waiting clients: limit={self.settings.max_shapes}.")
        self._forget(min(idle, key=lambda shape: shape.used_s), "evicted: least recently used")

    def _forget(self, shape: LiveShape, reason: str) -> None:
        shape.drop(reason)
        self._by_handle.pop(shape.handle, None)
        if self._by_definition.get(shape.definition) is shape:
            del self._by_definition[shape.definition]
        registered = self._consumers.pop(shape.handle, None)
        if registered is not None:
            self._router.remove(*registered)
        loader = self._loaders.pop(shape.handle, None)
        if loader is not None and loader is not asyncio.current_task():
            loader.cancel()
        self._tracker.remove(f"shape:{shape.handle}")

    async def _run(self, shape: LiveShape, build: Callable[[LiveShape], Awaitable[None]]) -> None:
        """Load, then stay until the shape is gone; failures become the shape's error, never this task's."""
        try:
            self._mark(shape)
            await build(shape)
            while not shape.gone:
                self._mark(shape)
                self._check_size(shape)
                await shape.subscribe()
        except (TidemillError, OSError, EOFError) as error:
            shape.fail(as_tidemill_error(error))
        finally:
            if shape.gone:
                _log.info(
                    "shape ended", handle=shape.handle, source=str(shape.definition.source), why=shape.drop_reason
                )
            self._forget(shape, shape.drop_reason or "ended")

    def _check_size(self, shape: LiveShape) -> None:
        limits = self.settings.limits
        if shape.log.log_bytes > limits.log_bytes:
            shape.drop(f"the log outgrew its limit: limit_bytes={limits.log_bytes}")
        if shape.log.base_bytes > limits.base_bytes:
            raise Invalid(
                f"the shape is too large: source={shape.definition.source} limit_bytes={limits.base_bytes}.",
                fix="Narrow it with where or columns.",
            )

    def _mark(self, shape: LiveShape) -> None:
        loading = shape.state == "loading"
        self._tracker.set(
            f"shape:{shape.handle}",
            0 if loading else self.last_seen(shape),
            1 if loading else self.last_seen(shape),
            now_ms=self.clock.now_ms(),
            reason=f"loading the initial rows of {shape.definition.source}" if loading else "",
            budget_ms=60_000,
        )

    async def _build_table(self, shape: LiveShape, database_name: str, info: TableInfo, where: Where | None) -> None:
        database = self._databases[database_name]
        definition = shape.definition
        writer = RowWriter(
            info.relation.schema,
            info.relation.table,
            definition.columns or info.names,
            info.key,
            info.booleans,
            definition.replica,
        )
        consumer = TableConsumer(shape, info.relation, where, writer)
        must_see = database.sink.recent
        self._router.add(database_name, consumer)
        self._consumers[shape.handle] = (database_name, consumer)
        snapshot, lsn = await database.source.load(
            shape,
            info,
            where,
            writer,
            must_see,
            definition.log_mode == "full",
            lambda: self._check_size(shape),
        )
        if shape.gone:
            return
        if definition.log_mode == "full":
            shape.log.add_base([snapshot_end(snapshot.xmin, snapshot.xmax, sorted(snapshot.in_progress))])
        shape.log.seal_base()
        consumer.open(snapshot, lsn)
        shape.ready()

    async def _plan_shard(self, request: ShapeRequest, name: str) -> Plan:
        if self._open_shard is None:
            raise FieldError("table", f"this node serves no shards: shard={name}.")
        try:
            shard = await self._open_shard(name)
        except Missing as error:
            raise FieldError("table", error.message, fix=error.fix) from error
        names = tuple(column.name for column in shard.schema.columns)
        columns = _check_columns(request.columns, names, shard.schema.key)
        where = _compile(request, shard_types(shard.schema), SHARD_SCHEMA, name)
        definition = ShapeDefinition(
            Source("shard", "", SHARD_SCHEMA, name),
            request.where,
            where.params if where else (),
            columns,
            request.replica,
            request.log_mode,
        )
        feed = ShardFeed(shard, where, columns, request.replica, request.log_mode)

        async def build(shape: LiveShape) -> None:
            await feed.load(shape)
            shape.ready()
            self._tasks.spawn(self._follow(shape, feed), name=f"shape-feed:{shape.handle}")

        return Plan(definition, feed.schema_json(), build)

    async def _follow(self, shape: LiveShape, feed: ShardFeed) -> None:
        try:
            await feed.follow(shape)
        except (TidemillError, OSError, EOFError) as error:
            shape.drop(f"the shard's changes ended: {error}")

    def _find(self, table: str) -> tuple[str, Relation]:
        """The captured relation a table parameter names. Raises FieldError."""
        prefix, separator, rest = table.partition(":")
        databases = [prefix] if separator and prefix in self._databases else list(self._databases)
        schema, name = split_table(rest if separator and prefix in self._databases else table)
        found = [
            (database, relation)
            for database in databases
            for relation in self._databases[database].relations()
            if (relation.schema, relation.table) == (schema, name)
        ]
        if not found:
            raise FieldError(
                "table",
                f'Table "{schema}"."{name}" is not captured.',
                fix="Check the name (quote it if it has capitals), or add the table to the capture.",
            )
        if len(found) > 1:
            names = ", ".join(f"{database}:{schema}.{name}" for database, _ in found)
            raise FieldError("table", f"the table is in several databases: tables={names}.", fix="Write one of these.")
        return found[0]


def _shard_name(table: str) -> str | None:
    """`shard:<anything>` or `shard.<name>`: the schema name `shard` is reserved for shards."""
    if table.startswith("shard:"):
        return table[len("shard:") :]
    if table.startswith("shard."):
        return split_table(table)[1] if table.startswith('shard."') else table[len("shard.") :]
    return None


def split_table(text: str) -> tuple[str, str]:
    """`table`, `schema.table`, parts optionally double-quoted; unquoted parts fold to lower case. Raises FieldError."""
    parts: list[str] = []
    at = 0
    while True:
        if text[at : at + 1] == '"':
            end = at + 1
            while (end := text.find('"', end)) >= 0 and text[end + 1 : end + 2] == '"':
                end += 2
            if end < 0:
                raise FieldError("table", f"unterminated quote in table name: table={text!r}.")
            parts.append(text[at + 1 : end].replace('""', '"'))
            at = end + 1
        else:
            end = next((i for i in range(at, len(text)) if text[i] in '."'), len(text))
            parts.append(text[at:end].lower())
            at = end
        if at == len(text):
            break
        if text[at] != ".":
            raise FieldError(
                "table", f"invalid table name: table={text!r}.", fix="Quote names with special characters."
            )
        at += 1
    if len(parts) > 2 or not all(parts):
        raise FieldError("table", f"invalid table name: table={text!r}.", fix="Write table or schema.table.")
    return (parts[0], parts[1]) if len(parts) == 2 else ("public", parts[0])


def _check_columns(wanted: tuple[str, ...], names: tuple[str, ...], key: tuple[str, ...]) -> tuple[str, ...]:
    """The wanted columns in table order; () when all are wanted. Raises FieldError."""
    if not wanted:
        return ()
    unknown = [name for name in wanted if name not in names]
    if unknown:
        raise FieldError("columns", f"The following columns are not found on the table: {', '.join(unknown)}")
    missing = [name for name in key or names if name not in wanted]
    if missing:
        raise FieldError(
            "columns", f"The list of columns must include all primary key columns, missing: {', '.join(missing)}"
        )
    shown = tuple(name for name in names if name in wanted)
    return () if shown == names else shown


def _compile(request: ShapeRequest, types: dict[str, Type], schema: str, table: str) -> Where | None:
    if not request.where:
        if request.params:
            raise FieldError("params", "params were given without a where clause.")
        return None
    try:
        return compile_where(request.where, request.params, types, schema=schema, table=table)
    except WhereError as error:
        field = "params" if error.message.startswith("parameters must") else "where"
        raise FieldError(field, error.message, fix=error.fix) from error
