"""One captured database as its shapes see it: the captured relations, their columns, and the capture's answers about
tables that are not among them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tidemill.capture.changes import Relation
from tidemill.capture.tables.table_reasons import TableUnavailability
from tidemill.shapes.definition.definition import Replica
from tidemill.shapes.definition.table_columns import TableColumns
from tidemill.shapes.log.row_writer import RowWriter
from tidemill.shapes.log.store import ShapeStore
from tidemill.shapes.tables.capture_tap import ShapeTap
from tidemill.shapes.tables.initial_snapshot import PostgresSource, TableReplacedError, describe_relation
from tidemill.shapes.tables.replica_identity import OldRowCache
from tidemill.shapes.tables.table_consumer import has_same_layout

if TYPE_CHECKING:
    from tidemill.shapes.tables.remote_evaluation import Connection

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
        self.columns: Mapping[str, bool] = {}


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
        if {name for name, generated in columns.items() if not generated} <= known <= columns.keys():
            self._unlike.pop(relation, None)
        elif now_s < self._unlike.setdefault(relation, now_s) + REDEFINITION_GRACE_S:
            self._report_replaced_table()
            raise TableReplacedError(f"the table was redefined: table={relation.name}.")

    async def _read_columns(self, relation: Relation) -> Mapping[str, bool]:
        """Return the table's columns (name → generated), read by a query that started after this call.

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
        """Return the catalog entry of a table, read again at most every LOOK_S. None if the table is not captured.
        Raises TableReplacedError.

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
