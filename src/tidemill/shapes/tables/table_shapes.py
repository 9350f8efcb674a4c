"""Shapes over captured tables: plans a request for the table that it names, and builds or restores its shape.

Owns the captured databases, and the consumer of each table shape.

Invariant (no gap): the consumer is registered with the router before the snapshot is taken, and the snapshot sees every
transaction that was streamed before that (see `initial_snapshot`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from tidemill.base.clock import Clock
from tidemill.capture.changes import Relation
from tidemill.shapes.definition.compiler_thread import CompilerThread
from tidemill.shapes.definition.planner import (
    FieldError,
    Plan,
    ShapeRequest,
    build_definition,
    check_columns,
    check_queryable_columns,
)
from tidemill.shapes.definition.subset import SubsetMetadata, SubsetRequest
from tidemill.shapes.definition.table_columns import TableColumns
from tidemill.shapes.live_shape import LiveShape
from tidemill.shapes.log.chunks import ResponseMemory
from tidemill.shapes.log.disk_log import DiskLog
from tidemill.shapes.log.items import snapshot_end_item
from tidemill.shapes.log.log import LogLimits, ShapeLog
from tidemill.shapes.log.saved_shape import SavedTableShape
from tidemill.shapes.log.store import ShapeStore
from tidemill.shapes.loop_share import LoopShare
from tidemill.shapes.memory_budget import Budget
from tidemill.shapes.tables.backlog import BacklogLimits
from tidemill.shapes.tables.capture_tap import ShapeTap
from tidemill.shapes.tables.captured_database import CapturedDatabase, Relations, TableFinder, needs_old_rows
from tidemill.shapes.tables.change_translator import has_same_layout
from tidemill.shapes.tables.initial_snapshot import SubsetBounds, TransientTableError, subset_reader
from tidemill.shapes.tables.remote_evaluation import EvaluationRequest, answer_requests
from tidemill.shapes.tables.restore import RegisteredConsumer, ShapeRestorer, ShapeStart, table_source
from tidemill.shapes.tables.table_consumer import TableConsumer
from tidemill.shapes.tables.table_search import TableSearch
from tidemill.shapes.where import Where

if TYPE_CHECKING:
    from tidemill.shapes.tables.remote_evaluation import Connection

_log = structlog.get_logger()


class TableShapes:
    """Shapes over all captured databases of this process."""

    def __init__(self, clock: Clock, share: LoopShare, backlog: BacklogLimits, compiler: CompilerThread) -> None:
        self._clock = clock
        self._share = share
        self._backlog = backlog
        self._compiler = compiler
        self._databases: dict[str, CapturedDatabase] = {}
        self.search = TableSearch(self._databases)
        self._consumers: dict[str, RegisteredConsumer] = {}

    def add(
        self,
        name: str,
        dsn: str,
        relations: Relations,
        store: ShapeStore | None = None,
        seeker: TableFinder | None = None,
    ) -> ShapeTap:
        """Create the tap of a database. The caller runs `restore` and then the tap's `run` in a task."""
        sink = ShapeTap(self._clock, self._share, self._backlog, consumer=f"shapes:{name}", store=store)
        self._databases[name] = CapturedDatabase(dsn, relations, sink, store, seeker)
        return sink

    def log(self, database: str, limits: LogLimits, budget: Budget) -> ShapeLog:
        """Create the log of a new shape of this database."""
        store = self._databases[database].store
        return ShapeLog(limits, budget) if store is None else store.create_log()

    def suspend_database(self, name: str) -> None:
        """Treat the database as not captured for now, as if its capture were starting."""
        database = self._databases.get(name)
        if database is not None:
            database.relations = tuple
            database.seeker = None
            database.suspended = True

    def is_starting(self) -> bool:
        """Return whether some database has not reported its tables yet, or is restoring its shapes."""
        return any(
            not each.suspended and (each.sink.restoring or each.is_starting) for each in self._databases.values()
        )

    def uncaptured_consumers(self) -> list[TableConsumer]:
        """Return the consumers whose table is no longer captured; none for a database whose tables are unknown."""
        found: list[TableConsumer] = []
        for each in self._databases.values():
            followed = each.sink.router.oids
            captured = each.captured_by_oid() if followed else {}
            for oid in followed if captured else ():
                if oid not in captured and oid not in each.sink.parked_oids:
                    found += each.sink.router.consumers_of(oid)
        return found

    def redefined_consumers(self) -> list[TableConsumer]:
        """Return the consumers whose table was redefined since the last call, even if no row has arrived since."""
        found: list[TableConsumer] = []
        for each in self._databases.values():
            captured = each.captured_by_oid()
            for oid in each.sink.router.oids:
                relation = captured.get(oid)
                if relation is not None and each.looked_at.get(oid) is not relation:
                    found += [
                        c
                        for c in each.sink.router.consumers_of(oid)
                        if not has_same_layout(relation, c.relation, c.needed)
                    ]
            each.looked_at = captured
        return found

    def forget_uncaptured(self) -> None:
        """Forget what is known of relations that are no longer captured."""
        for database in self._databases.values():
            database.forget_uncaptured(list(database.relations()))

    def taps(self) -> dict[str, ShapeTap]:
        return {name: database.sink for name, database in self._databases.items()}

    def last_seen(self, shape: LiveShape) -> int:
        """Return the newest transaction of the shape's database whose effect on the shape, if any, is in its log."""
        registered = self._consumers.get(shape.handle)
        if registered is None:
            return shape.last_seen
        return max(shape.last_seen, registered.sink.last_seen_by(registered.consumer))

    def pending_bytes(self, shape: LiveShape) -> int:
        registered = self._consumers.get(shape.handle)
        return 0 if registered is None else registered.consumer.pending_bytes

    async def plan_request(self, request: ShapeRequest, *, waits: bool = True) -> Plan:
        """Check a request and return its plan. `waits`: wait for a table that is not captured yet.

        Raises FieldError, or UnavailableError for temporary conditions: TablePausedError, or TableReplacedError if the
        database has another table than the captured one.
        """
        plan = await self._plan_on_paused(request)
        return plan or await self._plan_on_relation(
            request, *(await self.search.wait_for_relation(request.table, waits=waits))
        )

    async def _plan_on_paused(self, request: ShapeRequest) -> Plan | None:
        """Return the plan of a shape that continues while its table is paused, by the columns it was built with.

        A request for any other shape waits for the table.
        """
        if not any(each.sink.parked_oids for each in self._databases.values()):
            return None
        asked, schema, name = self.search.parse_table(request.table)
        infos: dict[int, tuple[str, TableColumns]] = {}
        for database_name in asked:
            database = self._databases[database_name]
            for oid in database.sink.parked_oids if (schema, name) not in database.captured_by_name() else ():
                for consumer in database.sink.router.consumers_of(oid):
                    info = self._consumers[consumer.shape.handle].info
                    if (info.relation.schema, info.relation.table) == (schema, name):
                        infos[id(info)] = database_name, info
        for database_name, info in infos.values():
            try:
                columns = check_columns(request, info.names, info.key)
                where = await self._compiler(request, info.where_types(), schema, name)
            except FieldError:
                continue
            plan = self._build_plan(request, database_name, info, columns, where)
            following = self._databases[database_name].sink.router.consumers_of(info.relation.oid)
            if any(consumer.shape.definition == plan.definition for consumer in following):
                return plan
        return None

    async def _plan_on_relation(self, request: ShapeRequest, database_name: str, relation: Relation) -> Plan:
        database = self._databases[database_name]
        try:
            found, columns = await self._check_request(request, database_name, relation)
            where = await self._compiler(request, found.where_types(), relation.schema, relation.table)
        except FieldError:
            await database.check_definition_current(relation, self._clock.monotonic_s())
            raise
        return self._build_plan(request, database_name, found, columns, where)

    def _build_plan(
        self,
        request: ShapeRequest,
        database_name: str,
        found: TableColumns,
        columns: tuple[str, ...],
        where: Where | None,
    ) -> Plan:
        database, relation = self._databases[database_name], found.relation
        definition = build_definition(request, table_source(database_name, relation), columns, where)

        async def build(shape: LiveShape) -> None:
            await self._build_shape(shape, request, database_name, found, where)

        reader = subset_reader(
            database.source,
            found,
            SubsetBounds(where, columns, check_queryable_columns(request, found.names, found.key)),
            self._compiler,
            self._share,
            lambda: database.sink.recent,
        )

        async def read(request: SubsetRequest, rows: ResponseMemory, mark: int) -> SubsetMetadata:
            try:
                return await reader(request, rows, mark)
            except FieldError:
                await database.check_definition_current(relation, self._clock.monotonic_s())
                raise

        return Plan(
            definition, database.column_selection(found, columns, request.replica).schema_json, build, read, relation
        )

    async def _check_request(
        self, request: ShapeRequest, database_name: str, relation: Relation
    ) -> tuple[TableColumns, tuple[str, ...]]:
        """Return the relation's columns, and those that the request shows. Raises as `plan_request` does."""
        database = self._databases[database_name]
        info = database.infos.get(relation)
        if info is None:
            info = database.infos[relation] = await database.source.describe_table(relation)
            database.forget_uncaptured(list(database.relations()))
        if needs_old_rows(relation, request):
            await database.old_rows.check_old_rows(relation, request, self._clock.monotonic_s())
        return info, check_columns(request, info.names, info.key)

    def follows_relation(self, shape: LiveShape, relation: Relation | None) -> bool:
        """Return whether the shape's consumer follows this very relation, not a dropped one of the same name."""
        registered = self._consumers.get(shape.handle)
        return registered is None or relation is None or registered.consumer.oid == relation.oid

    def continues_while_paused(self, shape: LiveShape) -> bool:
        """Return whether the table is paused and the shape needs none of the changed columns."""
        registered = self._consumers.get(shape.handle)
        return registered is not None and registered.consumer.oid in registered.sink.parked_oids

    def detach(self, shape: LiveShape) -> None:
        """Stop offering changes to a shape. Idempotent."""
        registered = self._consumers.pop(shape.handle, None)
        if registered is not None:
            registered.sink.remove_consumer(registered.consumer)

    async def _build_shape(
        self, shape: LiveShape, request: ShapeRequest, database_name: str, info: TableColumns, where: Where | None
    ) -> None:
        database, definition, relation = self._databases[database_name], shape.definition, info.relation
        writer = database.column_selection(info, definition.columns, definition.replica).writer
        consumer = TableConsumer(shape, relation, where, writer, asks=True)
        if database.find_unchanged(relation) is None:
            raise TransientTableError(f"the table is not captured now, or was redefined: table={relation.name}.")
        must_see = database.sink.recent
        database.sink.router.add(consumer)
        self._consumers[shape.handle] = RegisteredConsumer(database.sink, consumer, info)
        with_rows = definition.log_mode == "full"
        snapshot = await database.source.load(shape, info, where, writer, must_see, with_rows, self._share)
        if shape.has_ended:
            return
        shape.log.add_base([snapshot_end_item(snapshot.xmin, snapshot.xmax, sorted(snapshot.in_progress))])
        shape.log.seal_base()
        consumer.set_snapshot(snapshot)
        await self._share.run_step(consumer.publish_waiting)
        shape.mark_ready()
        if database.store is not None and isinstance(shape.log, DiskLog):
            kept = SavedTableShape(request, definition, shape.schema_json, consumer.relation, shape.rows_loaded)
            database.store.logs.save_record(shape.log, shape.handle, kept.encode(), str(snapshot))

    async def answer_requests(self, name: str) -> None:
        """Send the questions of the database's shapes to the database, forever.

        A shape whose column types changed in the catalog ends: compiled again it knows them, and need not ask
        repeatedly.
        """
        database = self._databases[name]

        async def end_if_types_changed(
            connection: Connection, consumer: TableConsumer, question: EvaluationRequest
        ) -> None:
            info = await database.reread_columns(connection, consumer.oid, self._clock.monotonic_s())
            registered = self._consumers.get(consumer.shape.handle)
            if info is None or registered is None:
                return
            now, then = info.where_types(), registered.info.where_types()
            if any(now.get(column) != then.get(column) for column in question.where.columns):
                consumer.shape.drop("the types of its columns changed")
                database.sink.remove_consumer(consumer)

        await answer_requests(database.sink, database.source, end_if_types_changed)

    async def restore(self, name: str, start: ShapeStart) -> None:
        """Restore the stored shapes of a database, before anything is routed; `start` adds each of them.

        Shapes that cannot continue are deleted. Idempotent. Raises UnavailableError; the caller retries.
        """
        database = self._databases[name]
        restorer = ShapeRestorer(name, database, self._clock, self._compiler, self._check_request, self._consumers)
        await restorer.restore(start)
