"""One captured database as its shapes see it: the captured relations, their columns, their replica identities, and the
capture's answers about tables that are not among them.

A filter needs the old row to decide whether a row leaves the shape, and replica=full shows it. With REPLICA IDENTITY
FULL the stream carries the whole old row; with any other identity it does not, and such a shape is rejected. The
catalog is checked here, so that no shape is built that would end at its first change; the change itself decides
(table_consumer.py).

For a partitioned table the stream announces old rows by the root's identity, but fills them by the partition's. A row
that looks whole need not be, so partitioned tables never count as FULL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tidemill.base.errors import UnavailableError
from tidemill.capture.changes import Relation
from tidemill.capture.tables.table_reasons import TableUnavailability
from tidemill.shapes.definition.definition import Replica
from tidemill.shapes.definition.planner import FieldError, ShapeRequest
from tidemill.shapes.definition.table_columns import PresentColumn, TableColumns, changed_columns
from tidemill.shapes.log.row_writer import RowWriter
from tidemill.shapes.log.store import ShapeStore
from tidemill.shapes.tables.capture_tap import ShapeTap
from tidemill.shapes.tables.change_translator import has_same_layout
from tidemill.shapes.tables.initial_snapshot import PostgresSource, TableReplacedError, describe_relation

if TYPE_CHECKING:
    from tidemill.shapes.tables.remote_evaluation import Connection

IDENTITY_INTERVAL_S = 5.0
"""Interval at which a table's identity is read again, however many requests need it."""


def needs_old_rows(relation: Relation, request: ShapeRequest) -> bool:
    """Return whether the shape needs old rows that the stream of the relation need not carry."""
    filtered = bool(request.where) or (request.within is not None and bool(request.within.where))
    return relation.old_rows != "whole" and (filtered or request.replica == "full")


class OldRowCache:
    """Cache of which tables of one database have whole old rows in the stream."""

    def __init__(self, source: PostgresSource) -> None:
        self._source = source
        self._known: dict[int, tuple[bool, float]] = {}
        """oid → (its identity is FULL, time until which that is valid). Tables without recent requests are removed."""

    async def check_old_rows(self, relation: Relation, request: ShapeRequest, now_s: float) -> None:
        """Raise FieldError if the stream does not carry what the shape needs, UnavailableError if that is unknown."""
        known, until_s = self._known.get(relation.oid, (False, 0.0))
        if now_s >= until_s:
            if until_s:
                self._known[relation.oid] = (
                    known,
                    now_s + IDENTITY_INTERVAL_S,
                )  # one request queries, the others use the old value
            self._known = {oid: seen for oid, seen in self._known.items() if now_s < seen[1]}
            try:
                known = await self._source.has_old_rows(relation)
            except UnavailableError:
                if not until_s:
                    raise
            self._known[relation.oid] = (known, now_s + IDENTITY_INTERVAL_S)
        if known:
            return
        field, what = ("where", "a where clause") if request.where else ("replica", "replica=full")
        raise FieldError(
            field,
            f"{what} needs the old row of each change, which the stream does not carry: table={relation.name}.",
            fix=f"Run ALTER TABLE {relation.name} REPLICA IDENTITY FULL; capture a partitioned table with"
            ' identity = "full". Or request the whole table.',
        )


Relations = Callable[[], Iterable[Relation]]

REDEFINITION_GRACE_S = 30.0
"""Time within which a capture detects that a table has other columns. If the difference lasts longer, the capture
carries only some of the columns on purpose."""

CATALOG_INTERVAL_S = 1.0
"""Interval at which a table's catalog entry is read again while its rows need evaluation by PostgreSQL."""

MAX_CACHED_SELECTIONS = 1_000
"""Cached column selections of one database; beyond that the cache is cleared."""


class TableFinder(Protocol):
    """The capture, queried for tables that its next poll would find."""

    async def wait_for_table(self, schema: str, table: str, timeout_s: float) -> bool:
        """Return True once the table is captured, or paused (`unavailability`); False if it will not be captured.

        Raises UnavailableError if that is not known in time.
        """
        ...

    def check_tables_soon(self) -> None:
        """Check the tables soon: a captured table was replaced or dropped."""
        ...

    def unavailability(self, schema: str, table: str) -> TableUnavailability | None:
        """Return why a captured table carries no changes at the moment; None if there is no such reason. Does no
        I/O."""
        ...

    @property
    def knows_tables(self) -> bool:
        """True if it is known which tables are captured, even if none is."""
        ...


class ColumnSelection(NamedTuple):
    """State shared by shapes that show the same columns of a table."""

    info: TableColumns
    schema_json: bytes
    writer: RowWriter


class _ColumnsLookup:
    """The newest result of a column look-up. `began`: the tick at which it started."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.began = 0
        self.columns: Mapping[str, PresentColumn] = {}


class CapturedDatabase:
    def __init__(
        self,
        dsn: str,
        relations: Relations,
        sink: ShapeTap,
        store: ShapeStore | None,
        seeker: TableFinder | None,
    ) -> None:
        self.store = store
        self.seeker = seeker
        self.source = PostgresSource(dsn, self._report_replaced_table)
        self.relations = relations
        self.sink = sink
        self.suspended = False
        self.old_rows = OldRowCache(self.source)
        self.infos: dict[Relation, TableColumns] = {}
        """Columns of captured relations; entries of other relations are removed later."""
        self.looked_at: Mapping[int, Relation] = {}
        self._ticks = count(1)
        self._looks: dict[Relation, _ColumnsLookup] = {}
        self._looked_s: dict[Relation, float] = {}
        """Time at which a relation's catalog entry was last read again."""
        self._unlike: dict[Relation, float] = {}
        """Relations whose columns differ in the database → since when that is known."""
        self._indexed: Iterable[Relation] = ()
        self._by_oid: dict[int, Relation] = {}
        self._by_name: dict[tuple[str, str], Relation] = {}
        self._shown: dict[tuple[int, tuple[str, ...], Replica], ColumnSelection] = {}

    def _report_replaced_table(self) -> None:
        """Tell the capture that the database has another table than the captured one."""
        if self.seeker is not None:
            self.seeker.check_tables_soon()

    @property
    def is_starting(self) -> bool:
        """True if the capture has not reported its tables yet."""
        return not self.captured_by_oid() and (self.seeker is None or not self.seeker.knows_tables)

    def unavailability(self, schema: str, table: str) -> TableUnavailability | None:
        return self.seeker.unavailability(schema, table) if self.seeker is not None else None

    async def check_definition_current(self, relation: Relation, now_s: float) -> None:
        """Check a relation's columns after a request for it was rejected.

        Raises TableReplacedError if the database has had other columns for a short time: then the capture is informed,
        and the request may succeed once it has checked.
        """
        known = frozenset(column.name for column in relation.columns)
        columns = await self._read_columns(relation)
        written = {name for name, column in columns.items() if not column.generated}
        if written <= known and not changed_columns(relation, columns):
            self._unlike.pop(relation, None)
        elif now_s < self._unlike.setdefault(relation, now_s) + REDEFINITION_GRACE_S:
            self._report_replaced_table()
            raise TableReplacedError(f"the table was redefined: table={relation.name}.")

    async def _read_columns(self, relation: Relation) -> Mapping[str, PresentColumn]:
        """Return the table's present columns, read by a query that started after this call.

        An older result might lack a column that was added before the request. Concurrent callers share the next query,
        so that rejected requests occupy at most one look-up slot per relation.
        """
        asked, look = next(self._ticks), self._looks.setdefault(relation, _ColumnsLookup())
        async with look.turn:
            if look.began < asked:
                began = next(self._ticks)
                look.columns = await self.source.columns(relation)
                look.began = began
            return look.columns

    async def reread_columns(self, connection: Connection, oid: int, now_s: float) -> TableColumns | None:
        """Return the catalog entry of a table, read again at most every CATALOG_INTERVAL_S.

        Return None if the table is not captured. Raises TableReplacedError.

        Used when PostgreSQL has to evaluate a row: an enum may have new labels while its relation is unchanged.
        """
        relation = self.captured_by_oid().get(oid)
        if relation is None:
            return None
        if now_s >= self._looked_s.get(relation, -CATALOG_INTERVAL_S) + CATALOG_INTERVAL_S:
            self._looked_s[relation] = now_s
            info = await describe_relation(connection, relation)
            if info != self.infos.get(relation):
                self.infos[relation] = info
        return self.infos.get(relation)

    def column_selection(self, info: TableColumns, columns: tuple[str, ...], replica: Replica) -> ColumnSelection:
        """Return the cached writer and schema of a column selection; `columns` () = all."""
        relation = info.relation
        key = relation.oid, columns, replica
        found = self._shown.get(key)
        if found is None or found.info is not info:
            if len(self._shown) >= MAX_CACHED_SELECTIONS:
                self._shown.clear()
            names = columns or info.names
            writer = RowWriter(relation.schema, relation.table, names, info.key, info.booleans, replica)
            found = self._shown[key] = ColumnSelection(info, info.schema_json(columns), writer)
        return found

    def captured_by_oid(self) -> Mapping[int, Relation]:
        """Map oid → captured relation; the same object until a relation changes, if `relations` returns the same
        iterable until then."""
        self._refresh_index()
        return self._by_oid

    def find_unchanged(self, relation: Relation, needed: frozenset[str] | None = None) -> Relation | None:
        """Return the relation as captured now; None if it is not, or if its rows look different to a client of these
        columns (None = all).

        A consumer must be added in the same turn of the loop as this check: `redefined` only finds existing consumers.
        """
        now = self.captured_by_oid().get(relation.oid)
        return now if now is not None and has_same_layout(now, relation, needed) else None

    def captured_by_name(self) -> Mapping[tuple[str, str], Relation]:
        """Map (schema, table) → captured relation, like `captured_by_oid`."""
        self._refresh_index()
        return self._by_name

    def _refresh_index(self) -> None:
        relations = self.relations()
        if relations is not self._indexed:
            self._indexed = relations
            self._by_oid = {relation.oid: relation for relation in relations}
            self._by_name = {(relation.schema, relation.table): relation for relation in self._by_oid.values()}

    def forget_uncaptured(self, relations: list[Relation]) -> None:
        self._unlike = {relation: since_s for relation, since_s in self._unlike.items() if relation in relations}
        self._looks = {relation: look for relation, look in self._looks.items() if relation in relations}
        self._looked_s = {relation: at_s for relation, at_s in self._looked_s.items() if relation in relations}
        if len(self.infos) > len(relations):
            self.infos = {relation: info for relation, info in self.infos.items() if relation in relations}
