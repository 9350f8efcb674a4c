"""Restores the stored shapes of one captured database after a restart, before anything of the stream is routed.

    saved record ─► its table, as captured now ─► compiled clause ─► log of the disk ─► consumer

A shape continues if its table is unchanged and the stream omitted nothing of it; otherwise it is deleted, and its
clients refetch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

import structlog
from msgspec.structs import replace

from tidemill.base.clock import Clock
from tidemill.base.errors import MissingError, UnavailableError
from tidemill.base.runtime.tasks import error_sentence, is_own_fault_of_await
from tidemill.capture.changes import Relation
from tidemill.capture.postgres.pg_snapshot import PgSnapshot
from tidemill.shapes.definition.compiler_thread import CompileRequest, CompilerThread
from tidemill.shapes.definition.definition import Source
from tidemill.shapes.definition.planner import ShapeRequest, build_definition
from tidemill.shapes.definition.table_columns import TableColumns
from tidemill.shapes.live_shape import LiveShape
from tidemill.shapes.log.disk_log import DiskLog
from tidemill.shapes.log.saved_shape import SavedTableShape
from tidemill.shapes.log.sqlite_file import StoredShape
from tidemill.shapes.log.store import ShapeStore
from tidemill.shapes.tables.capture_tap import ShapeTap
from tidemill.shapes.tables.captured_database import CapturedDatabase
from tidemill.shapes.tables.change_translator import needed_columns
from tidemill.shapes.tables.initial_snapshot import TransientTableError
from tidemill.shapes.tables.table_consumer import TableConsumer
from tidemill.shapes.where import Type, Where

_log = structlog.get_logger()

ShapeStart = Callable[[StoredShape, SavedTableShape, DiskLog], LiveShape]
RequestCheck = Callable[[ShapeRequest, str, Relation], Awaitable[tuple[TableColumns, tuple[str, ...]]]]

RESTORE_S = 20.0
"""Deadline for a database that does not answer while its shapes are restored: commits and clients wait for them."""
RESTORE_RETRY_S = 0.5
RESTORE_BATCH = 100
"""Shapes compiled together, and added before other tasks get their turn of the loop."""


class _FoundShape(NamedTuple):
    """A stored shape, and the table that it belongs to now."""

    saved: StoredShape
    kept: SavedTableShape
    relation: Relation
    info: TableColumns
    columns: tuple[str, ...]


class RegisteredConsumer(NamedTuple):
    """A consumer, and the columns of its table when its shape was built."""

    sink: ShapeTap
    consumer: TableConsumer
    info: TableColumns


class ShapeRestorer:
    """Restores the shapes of one database; it writes their consumers to `consumers`, by handle."""

    def __init__(
        self,
        name: str,
        database: CapturedDatabase,
        clock: Clock,
        compiler: CompilerThread,
        check_request: RequestCheck,
        consumers: dict[str, RegisteredConsumer],
    ) -> None:
        self._name = name
        self._database = database
        self._clock = clock
        self._compiler = compiler
        self._check_request = check_request
        self._consumers = consumers

    async def restore(self, start: ShapeStart) -> None:
        """Restore the stored shapes of a database, before anything is routed; `start` adds each of them.

        Shapes that cannot continue are deleted. Idempotent. Raises UnavailableError; the caller retries.
        """
        database, name = self._database, self._name
        sink, store = database.sink, database.store
        if store is None or not sink.restoring:
            return
        await sink.begun.wait()
        deadline_s = self._clock.monotonic_s() + RESTORE_S
        try:
            saved = await store.read_saved() if sink.restoring else []
        except UnavailableError as error:
            _log.error("stored shapes cannot be read", database=name, error=str(error))
            store.discard_shapes()
            sink.name = store.owner
            saved = []
        for first in range(0, len(saved), RESTORE_BATCH):
            some = saved[first : first + RESTORE_BATCH]
            some = [each for each in some if each.id not in store.logs and not store.is_deleted(each)]
            if some and sink.restoring:
                await self._restore_some(store, some, start, deadline_s)
        sink.finish_restore()

    async def _restore_some(
        self,
        store: ShapeStore,
        some: Sequence[StoredShape],
        start: ShapeStart,
        deadline_s: float,
    ) -> None:
        over: list[tuple[StoredShape, BaseException]] = []
        found: list[_FoundShape] = []
        types: dict[int, Mapping[str, Type]] = {}
        for saved in some:
            try:
                found.append(await self._find_saved_until(saved, deadline_s))
            except BaseException as error:
                if not is_own_fault_of_await(error):
                    raise
                over.append((saved, error))
        for each in found:
            if each.relation.oid not in types:
                types[each.relation.oid] = each.info.where_types()
        asked = [
            CompileRequest(f.kept.request, types[f.relation.oid], f.relation.schema, f.relation.table) for f in found
        ]
        for each, where in zip(found, await self._compiler.compile_many(asked), strict=True):
            try:
                if isinstance(where, BaseException):
                    raise where
                self._start_saved(store, each, where, start)
            except BaseException as error:
                if not is_own_fault_of_await(error):
                    raise
                over.append((each.saved, error))
        for saved, why in over:
            _log.info("a stored shape cannot be restored", handle=saved.handle, why=error_sentence(why))
            store.delete_saved(saved)

    async def _find_saved_until(self, saved: StoredShape, deadline_s: float) -> _FoundShape:
        """Find a stored shape's table. If the database does not answer, retry until the deadline; other errors are
        raised.

        WAL is retained while shapes are restored, so a shape that cannot be restored soon is deleted.
        """
        while True:
            try:
                return await self._find_saved(saved)
            except UnavailableError:
                if self._clock.monotonic_s() >= deadline_s:
                    raise
                await asyncio.sleep(RESTORE_RETRY_S)

    async def _find_saved(self, saved: StoredShape) -> _FoundShape:
        """Return the stored shape with its table's current relation. Raises the error that ends the shape."""
        kept = SavedTableShape.decode(saved.record)
        relation = self._database.find_unchanged(
            kept.relation, needed_columns(kept.relation, kept.definition.columns, None)
        )
        if relation is None:
            raise MissingError("its table was re-created or redefined.")
        try:
            return _FoundShape(saved, kept, relation, *await self._check_request(kept.request, self._name, relation))
        except TransientTableError as error:  # a retry before the deadline would not help
            raise MissingError(error.message) from error

    def _start_saved(
        self,
        store: ShapeStore,
        found: _FoundShape,
        where: Where | None,
        start: ShapeStart,
    ) -> None:
        """Start a stored shape. A plain def: from here on the tap informs it of changes to its table. Raises the error
        that ends it."""
        sink = self._database.sink
        saved, kept, relation, info, columns = found
        definition = build_definition(kept.request, table_source(self._name, relation), columns, where)
        shown = self._database.column_selection(info, columns, definition.replica)
        if definition != kept.definition or shown.schema_json != kept.schema_json:
            raise MissingError("its table's description changed.")
        if relation.oid not in (sink.resumable or ()):
            raise MissingError("changes of its table were omitted.")
        needed = needed_columns(kept.relation, kept.definition.columns, where)
        if self._database.find_unchanged(kept.relation, needed) is not relation:  # may have changed since it was found
            raise MissingError("its table was re-created or redefined.")
        snapshot = PgSnapshot.parse(saved.snapshot) if saved.snapshot else None
        if snapshot is None or not snapshot.lsn:
            raise MissingError("its record lacks the LSN of its snapshot.")
        log = store.restore_log(saved)
        try:
            shape = start(saved, replace(kept, schema_json=shown.schema_json), log)
        except BaseException:
            log.drop()
            raise
        consumer = TableConsumer(shape, relation, where, shown.writer, has_lsn=shape.log.end.tx, asks=True)
        consumer.set_snapshot(snapshot)
        consumer.follow_immediately()
        sink.router.add(consumer)
        self._consumers[shape.handle] = RegisteredConsumer(sink, consumer, info)
        shape.rows_loaded = kept.rows_loaded
        shape.mark_ready()


def table_source(database: str, relation: Relation) -> Source:
    return Source("table", database, relation.schema, relation.table)
