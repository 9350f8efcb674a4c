"""What the loops beside the stream share: what is published, which tables are wanted, and parking at the WAL's end.

J3  A table is parked at the WAL end as of after its difference was seen, and from before that is asked for until the
    park is durable the stream's reader takes nothing more: no transaction at or above it is bound or confirmed by a
    session whose successor would not know of the park. Rows that came under the new description before were found by
    the reader (Session).
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
    """`parking`: while it is taken, the stream's reader stands."""

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
        """What publications have against tables (foreign_publications.py): the very same object while it is the
        same."""
        return await self._objections.now()

    async def _ask_objections(self, wire: Wire) -> Objections:
        found = await objections(wire, self.config)
        if found != self._objected:
            self._objected = found
        return self._objected

    async def choice(self, found: list[TableInfo]) -> Choice:
        """`found`: of `tables`."""
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
        """J3."""
        async with self.parking:
            lsn = await self.wal_end()
            await self.desk.park(name, lsn, reason, fix, state=state, again=again, first=first, found=found)

    async def park_refused(self, name: str, why: Refusal) -> None:
        """A table that flows, and is not to be captured as it is now."""
        await self.park(name, why.reason, again=why.again, first=why.fix if why.again else "")

    async def wal_end(self) -> int:
        """Nothing that was received by now is at or above it."""
        found = await self.control.ask(lambda wire: wire.value("SELECT pg_current_wal_insert_lsn()"))
        return Lsn.parse(found or "0/0").value


async def _resolved(wire: Wire, config: CaptureConfig, found: list[TableInfo], objected: Objections) -> Choice:
    try:
        return resolve(config.tables, found, wire.server_version, whole=config.whole, objections=objected)
    except MissingError:
        return Choice((), {})
