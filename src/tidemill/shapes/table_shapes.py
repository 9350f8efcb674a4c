"""Shapes over captured tables: finding the table, planning, and building a shape in the order that stitching needs.

V2  The consumer is registered with the router before the snapshot is taken, and the snapshot sees every
    transaction that was streamed before that (`postgres_source` says how).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tidemill.base.clock import Clock
from tidemill.base.errors import Unavailable
from tidemill.capture.changes import Relation
from tidemill.shapes.consumer import TableConsumer
from tidemill.shapes.describe import TableColumns
from tidemill.shapes.items import snapshot_end
from tidemill.shapes.live import LiveShape
from tidemill.shapes.plan import Compiler, FieldError, Plan, ShapeRequest, check_columns, split_table
from tidemill.shapes.postgres_source import PostgresSource
from tidemill.shapes.rows import RowWriter
from tidemill.shapes.shape import ShapeDefinition, Source
from tidemill.shapes.share import LoopShare
from tidemill.shapes.sink import BacklogLimits, ShapeSink
from tidemill.shapes.where import Where

Relations = Callable[[], Iterable[Relation]]


class _Database:
    def __init__(self, source: PostgresSource, relations: Relations, sink: ShapeSink) -> None:
        self.source = source
        self.relations = relations
        self.sink = sink
        self.suspended = False
        self.infos: dict[Relation, TableColumns] = {}
        """Of relations captured now; one that is not any more goes at the next look."""

    def forget_others(self, relations: list[Relation]) -> None:
        if len(self.infos) > len(relations):
            self.infos = {relation: info for relation, info in self.infos.items() if relation in relations}


class TableShapes:
    """All captured databases of this process."""

    def __init__(self, clock: Clock, share: LoopShare, backlog: BacklogLimits, compiler: Compiler) -> None:
        self._clock = clock
        self._share = share
        self._backlog = backlog
        self._compiler = compiler
        self._databases: dict[str, _Database] = {}
        self._consumers: dict[str, tuple[ShapeSink, TableConsumer]] = {}

    def add(self, name: str, dsn: str, relations: Relations) -> ShapeSink:
        """The database's new sink; whoever adds it keeps its `run` running."""
        sink = ShapeSink(self._clock, self._share, self._backlog)
        self._databases[name] = _Database(PostgresSource(dsn), relations, sink)
        return sink

    def suspend(self, name: str) -> None:
        """Nothing is captured for now, which looks like a capture that starts."""
        database = self._databases.get(name)
        if database is not None:
            database.relations = tuple
            database.suspended = True

    def starting(self) -> bool:
        """Is there a database that names no relations yet?"""
        return any(not each.suspended and not list(each.relations()) for each in self._databases.values())

    def uncaptured(self) -> list[TableConsumer]:
        """Whose table is not among those captured now; none of a database where that is not known."""
        captured = {id(each.sink): {relation.oid for relation in each.relations()} for each in self._databases.values()}
        return [
            consumer
            for sink, consumer in self._consumers.values()
            if captured.get(id(sink)) and consumer.oid not in captured[id(sink)]
        ]

    def sinks(self) -> dict[str, ShapeSink]:
        return {name: database.sink for name, database in self._databases.items()}

    def last_seen(self, shape: LiveShape) -> int:
        """Newest transaction of the shape's database whose effect on the shape, if any, is in its log."""
        registered = self._consumers.get(shape.handle)
        return shape.last_seen if registered is None else max(shape.last_seen, registered[0].seen(registered[1]))

    def pending_bytes(self, shape: LiveShape) -> int:
        registered = self._consumers.get(shape.handle)
        return 0 if registered is None else registered[1].pending_bytes

    def find(self, table: str) -> tuple[str, Relation]:
        """The captured relation a table parameter names. Raises FieldError, or Unavailable while a capture starts."""
        prefix, separator, rest = table.partition(":")
        chosen = bool(separator) and prefix in self._databases
        schema, name = split_table(rest if chosen else table)
        known = {
            database: list(self._databases[database].relations())
            for database in ([prefix] if chosen else list(self._databases))
        }
        found = [
            (database, relation)
            for database, relations in known.items()
            for relation in relations
            if relation.table == name and relation.schema == schema
        ]
        if not found:
            starting = [database for database, relations in known.items() if not relations]
            if starting:
                raise Unavailable(f"the capture is starting: database={starting[0]}.")
            raise FieldError(
                "table",
                f'Table "{schema}"."{name}" is not captured.',
                fix="Check the name (quote it if it has capitals), or add the table to the capture.",
            )
        if len(found) > 1:
            names = ", ".join(f"{database}:{schema}.{name}" for database, _ in found)
            raise FieldError("table", f"the table is in several databases: tables={names}.", fix="Write one of these.")
        return found[0]

    async def plan(self, request: ShapeRequest) -> Plan:
        """Raises FieldError, Missing when the table is gone, Unavailable when the database is."""
        database_name, relation = self.find(request.table)
        database = self._databases[database_name]
        info = database.infos.get(relation)
        if info is None:
            info = database.infos[relation] = await database.source.describe(relation)
            database.forget_others(list(database.relations()))
        found = info
        columns = check_columns(request.columns, found.names, found.key)
        where = await self._compiler(request, found.where_types(), relation.schema, relation.table)
        definition = ShapeDefinition(
            Source("table", database_name, relation.schema, relation.table),
            request.where,
            where.params if where else (),
            columns,
            request.replica,
            request.log_mode,
        )

        async def build(shape: LiveShape) -> None:
            await self._build(shape, database_name, found, where)

        return Plan(definition, found.schema_json(columns), build, relation)

    def follows(self, shape: LiveShape, relation: Relation | None) -> bool:
        """Whether the shape's consumer is on this very relation, not on a dropped one of the same name."""
        registered = self._consumers.get(shape.handle)
        return registered is None or relation is None or registered[1].oid == relation.oid

    def detach(self, shape: LiveShape) -> None:
        """Stop offering changes to a shape. Idempotent."""
        registered = self._consumers.pop(shape.handle, None)
        if registered is not None:
            sink, consumer = registered
            sink.remove(consumer)

    async def _build(self, shape: LiveShape, database_name: str, info: TableColumns, where: Where | None) -> None:
        database, definition, relation = self._databases[database_name], shape.definition, info.relation
        columns = definition.columns or info.names
        writer = RowWriter(relation.schema, relation.table, columns, info.key, info.booleans, definition.replica)
        consumer = TableConsumer(shape, relation, where, writer)
        must_see = database.sink.recent
        database.sink.add(consumer)
        self._consumers[shape.handle] = (database.sink, consumer)
        with_rows = definition.log_mode == "full"
        snapshot = await database.source.load(shape, info, where, writer, must_see, with_rows, self._share)
        if shape.gone:
            return
        if with_rows:
            shape.log.add_base([snapshot_end(snapshot.xmin, snapshot.xmax, sorted(snapshot.in_progress))])
        shape.log.seal_base()
        consumer.open(snapshot)
        await self._share.work(consumer.settle)
        shape.ready()
