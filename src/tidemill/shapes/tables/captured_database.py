"""One captured database as its shapes see it: which relations are captured, how they look, and what its capture says of
tables that are not among them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tidemill.capture.changes import Relation
from tidemill.capture.tables.unavailable_tables import Standing
from tidemill.shapes.definition.definition import Replica
from tidemill.shapes.definition.table_columns import TableColumns
from tidemill.shapes.log.row_writer import RowWriter
from tidemill.shapes.log.store import ShapeStore
from tidemill.shapes.tables.capture_tap import ShapeTap
from tidemill.shapes.tables.initial_snapshot import PostgresSource, TableReplacedError, describe
from tidemill.shapes.tables.replica_identity import OldRows
from tidemill.shapes.tables.table_consumer import same_layout

if TYPE_CHECKING:
    from tidemill.shapes.tables.remote_evaluation import Connection

Relations = Callable[[], Iterable[Relation]]

UNLIKE_S = 30.0
"""A capture finds out within so long that a table has other columns; one that does not carries some of them only."""

LOOK_S = 1.0
"""What the catalogue says of a table is read again once in this time, however many of its rows are asked about."""

SHOWN_KEPT = 1_000
"""Ways in which shapes show their tables, of one database, that those which come find made."""


class Seeker(Protocol):
    """The capture, asked for what its next poll would find."""

    async def sought(self, schema: str, table: str, timeout_s: float) -> bool:
        """True once the table is captured, or parked (`standing`), False when it is not going to be. Raises Unavailable
        when that is not known in time."""
        ...

    def look(self) -> None:
        """A captured table is another one now, or gone."""
        ...

    def standing(self, schema: str, table: str) -> Standing | None:
        """Why a table that carries nothing just now will again; None where nothing says so. Asks nobody."""
        ...

    @property
    def settled(self) -> bool:
        """It is known which tables are captured, be it none."""
        ...


class ShownColumns(NamedTuple):
    """What shapes that show the same columns of a table share."""

    info: TableColumns
    schema_json: bytes
    writer: RowWriter


class _ColumnsLook:
    """The newest that was answered, at the tick at which it `began`."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.began = 0
        self.columns: Mapping[str, bool] = {}


class Database:
    def __init__(
        self,
        dsn: str,
        relations: Relations,
        sink: ShapeTap,
        store: ShapeStore | None,
        seeker: Seeker | None,
    ) -> None:
        self.store = store
        self.seeker = seeker
        self.source = PostgresSource(dsn, self._look)
        self.relations = relations
        self.sink = sink
        self.suspended = False
        self.old_rows = OldRows(self.source)
        self.infos: dict[Relation, TableColumns] = {}
        """Of relations captured now; one that is not any more goes at the next look."""
        self.looked_at: Mapping[int, Relation] = {}
        self._ticks = count(1)
        self._looks: dict[Relation, _ColumnsLook] = {}
        self._looked_s: dict[Relation, float] = {}
        """When what the catalogue says was read again."""
        self._unlike: dict[Relation, float] = {}
        """Relations that the database describes otherwise, and since when that is known."""
        self._indexed: Iterable[Relation] = ()
        self._by_oid: dict[int, Relation] = {}
        self._by_name: dict[tuple[str, str], Relation] = {}
        self._shown: dict[tuple[int, tuple[str, ...], Replica], ShownColumns] = {}

    def _look(self) -> None:
        """The database has another table than the captured one."""
        if self.seeker is not None:
            self.seeker.look()

    @property
    def starting(self) -> bool:
        """It does not say yet which tables it has."""
        return not self.captured() and (self.seeker is None or not self.seeker.settled)

    def standing(self, schema: str, table: str) -> Standing | None:
        return self.seeker.standing(schema, table) if self.seeker is not None else None

    async def check_described(self, relation: Relation, now_s: float) -> None:
        """A request was refused for what it says of this relation. Raises TableReplacedError where the database
        describes it otherwise since a moment ago: the capture is told, and the request is right once that has
        looked."""
        known = frozenset(column.name for column in relation.columns)
        columns = await self._columns(relation)
        if {name for name, generated in columns.items() if not generated} <= known <= columns.keys():
            self._unlike.pop(relation, None)
        elif now_s < self._unlike.setdefault(relation, now_s) + UNLIKE_S:
            self._look()
            raise TableReplacedError(f"the table is described anew: table={relation.name}.")

    async def _columns(self, relation: Relation) -> Mapping[str, bool]:
        """The source's columns, of a look that began after this was called: an older one may not have what was added
        before the request. All who come during one share the next, so that refusals never take more than one place
        a relation from who describes tables."""
        asked, look = next(self._ticks), self._looks.setdefault(relation, _ColumnsLook())
        async with look.turn:
            if look.began < asked:
                began = next(self._ticks)
                look.columns = await self.source.columns(relation)
                look.began = began
            return look.columns

    async def look_again(self, connection: Connection, oid: int, now_s: float) -> TableColumns | None:
        """What the catalogue says of a table now that PostgreSQL has to be asked about a row of it: an enum gets
        labels, and its relation stays the same. None while it is not captured. Raises TableReplacedError."""
        relation = self.captured().get(oid)
        if relation is None:
            return None
        if now_s >= self._looked_s.get(relation, -LOOK_S) + LOOK_S:
            self._looked_s[relation] = now_s
            info = await describe(connection, relation)
            if info != self.infos.get(relation):
                self.infos[relation] = info
        return self.infos.get(relation)

    def shown(self, info: TableColumns, columns: tuple[str, ...], replica: Replica) -> ShownColumns:
        """`columns` () = all."""
        relation = info.relation
        key = relation.oid, columns, replica
        found = self._shown.get(key)
        if found is None or found.info is not info:
            if len(self._shown) >= SHOWN_KEPT:
                self._shown.clear()
            names = columns or info.names
            writer = RowWriter(relation.schema, relation.table, names, info.key, info.booleans, replica)
            found = self._shown[key] = ShownColumns(info, info.schema_json(columns), writer)
        return found

    def captured(self) -> Mapping[int, Relation]:
        """oid → relation; the same mapping until one changes, where `relations` gives the same iterable until then."""
        self._index()
        return self._by_oid

    def still(self, relation: Relation, needed: frozenset[str] | None = None) -> Relation | None:
        """As it is captured now; None where it is not, or where its rows look otherwise to a client of these columns
        (None = all). Whoever begins to follow a relation asks in that turn: `redefined` looks at those only who are
        there already."""
        now = self.captured().get(relation.oid)
        return now if now is not None and same_layout(now, relation, needed) else None

    def named(self) -> Mapping[tuple[str, str], Relation]:
        """(schema, table) → relation, as `captured`."""
        self._index()
        return self._by_name

    def _index(self) -> None:
        relations = self.relations()
        if relations is not self._indexed:
            self._indexed = relations
            self._by_oid = {relation.oid: relation for relation in relations}
            self._by_name = {(relation.schema, relation.table): relation for relation in self._by_oid.values()}

    def forget_others(self, relations: list[Relation]) -> None:
        self._unlike = {relation: since_s for relation, since_s in self._unlike.items() if relation in relations}
        self._looks = {relation: look for relation, look in self._looks.items() if relation in relations}
        self._looked_s = {relation: at_s for relation, at_s in self._looked_s.items() if relation in relations}
        if len(self.infos) > len(relations):
            self.infos = {relation: info for relation, info in self.infos.items() if relation in relations}
