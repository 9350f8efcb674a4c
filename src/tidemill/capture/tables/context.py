"""Shared state of the loops that run concurrently with the stream: what is published, which tables are wanted, and
pausing a table at the WAL end.

Invariant (pause at the WAL end): a table is paused at the WAL end as of after its difference was seen. From before the
query for that LSN until the pause is durable, the stream's reader processes nothing more. So no transaction at or above
the position is bound or confirmed by a session whose successor would not know of the pause. Rows that arrived earlier
under the new description were found by the reader (Session).
"""

from __future__ import annotations

import asyncio

from tidemill.base.errors import MissingError
from tidemill.base.lsn import Lsn
from tidemill.capture.catalog.catalog_cache import CachedQuery, Tables
from tidemill.capture.catalog.columns import Attributes
from tidemill.capture.catalog.foreign_publications import Objections, objections
from tidemill.capture.catalog.table_discovery import Choice, Refusal, TableInfo, resolve
from tidemill.capture.config import CaptureConfig
from tidemill.capture.postgres.connection import Wire
from tidemill.capture.postgres.control_connection import Control
from tidemill.capture.setup.publication import Entry, published_tables
from tidemill.capture.tables.table_setup import without_taken
from tidemill.capture.tables.table_states import TableStates
from tidemill.metastore.catalogue import Catalogue


class SideLoopContext:
    """Connection, tables and publication, for the concurrent loops. While `parking` is locked, the stream's reader is
    paused.
    """

    def __init__(
        self, config: CaptureConfig, control: Control, desk: TableStates, catalogue: Catalogue, parking: asyncio.Lock
    ) -> None:
        self.config = config
        self.control = control
        self.desk = desk
        self.catalogue = catalogue
        self.parking = parking
        self.tables = Tables(control)
        self._objections = CachedQuery(control, self._ask_objections)
        self._objected: Objections = {}
        self._resolved: tuple[list[TableInfo], Objections, Choice] | None = None

    async def published(self) -> dict[int, Entry] | None:
        return await self.control.ask(self.ask_published)

    async def ask_published(self, wire: Wire) -> dict[int, Entry] | None:
        return await published_tables(wire, self.config.publication, manual=self.config.manual)

    async def objections(self) -> Objections:
        """Return the objections of publications to tables (foreign_publications.py). An unchanged result is the
        identical object.
        """
        return await self._objections.now()

    async def _ask_objections(self, wire: Wire) -> Objections:
        found = await objections(wire, self.config)
        if found != self._objected:
            self._objected = found
        return self._objected

    async def choice(self, found: list[TableInfo]) -> Choice:
        """Return the choice of tables among `found`, which is a result of `tables`."""
        objected = await self.objections()
        if self._resolved is None or self._resolved[0] is not found or self._resolved[1] is not objected:
            choice = await self.control.ask(lambda wire: _resolved(wire, self.config, found, objected))
            self._resolved = found, objected, choice
        choice, rows = self._resolved[2], self.desk.rows
        fresh = tuple(t for t in choice.tables if t.name not in rows or rows[t.name].snapshot is None)
        if not fresh:
            return choice
        checked = await without_taken(self.config, self.catalogue, Choice(fresh, choice.refused))
        taken = set(checked.refused) - set(choice.refused)
        return Choice(tuple(t for t in choice.tables if t.name not in taken), checked.refused)

    async def park(
        self,
        name: str,
        reason: str,
        fix: str = "",
        *,
        state: str = "parked",
        again: bool = False,
        first: str = "",
        found: Attributes | None = None,
    ) -> None:
        """Pause a table at the WAL end while the stream's reader is paused."""
        async with self.parking:
            lsn = await self.wal_end()
            await self.desk.park(name, lsn, reason, fix, state=state, again=again, first=first, found=found)

    async def park_refused(self, name: str, why: Refusal) -> None:
        """Pause a table that flows and must not be captured in its present form."""
        await self.park(name, why.reason, again=why.again, first=why.fix if why.again else "")

    async def wal_end(self) -> int:
        """Return an LSN that is above everything received so far."""
        found = await self.control.ask(lambda wire: wire.value("SELECT pg_current_wal_insert_lsn()"))
        return Lsn.parse(found or "0/0").value


async def _resolved(wire: Wire, config: CaptureConfig, found: list[TableInfo], objected: Objections) -> Choice:
    try:
        return resolve(config.tables, found, wire.server_version, whole=config.whole, objections=objected)
    except MissingError:
        return Choice((), {})
