"""What the loops beside the stream share: what is published, which tables are wanted, and parking at the WAL's end.

J3  A table is parked at the WAL end as of after its difference was seen, and from before that is asked for until the
    park is durable the stream's reader takes nothing more: no transaction at or above it is bound or confirmed by a
    session whose successor would not know of the park. Rows that came under the new description before were found by
    the reader (Session).
"""

from __future__ import annotations

import asyncio

from tidemill.base.errors import Missing
from tidemill.base.frontier import Lsn
from tidemill.capture.config import CaptureConfig
from tidemill.capture.desk import Desk
from tidemill.capture.entry import without_taken
from tidemill.capture.looking import Tables
from tidemill.capture.publication import Entry, published_tables
from tidemill.capture.tables import Choice, TableInfo, resolve
from tidemill.capture.watch import Control
from tidemill.capture.wire.connection import Wire
from tidemill.metastore.catalogue import Catalogue


class Beside:
    """`parking`: while it is taken, the stream's reader stands."""

    def __init__(
        self, config: CaptureConfig, control: Control, desk: Desk, catalogue: Catalogue, parking: asyncio.Lock
    ) -> None:
        self.config = config
        self.control = control
        self.desk = desk
        self.catalogue = catalogue
        self.parking = parking
        self.tables = Tables(control)
        self._resolved: tuple[list[TableInfo], Choice] | None = None

    async def published(self) -> dict[int, Entry] | None:
        return await self.control.ask(self.ask_published)

    async def ask_published(self, wire: Wire) -> dict[int, Entry] | None:
        return await published_tables(wire, self.config.publication, manual=self.config.manual)

    async def choice(self, found: list[TableInfo]) -> Choice:
        """`found`: of `tables`."""
        if self._resolved is None or self._resolved[0] is not found:
            self._resolved = found, await self.control.ask(lambda wire: _resolved(wire, self.config, found))
        choice, rows = self._resolved[1], self.desk.rows
        fresh = tuple(t for t in choice.tables if t.name not in rows or rows[t.name].snapshot is None)
        if not fresh:
            return choice
        checked = await without_taken(self.config, self.catalogue, Choice(fresh, choice.refused))
        taken = set(checked.refused) - set(choice.refused)
        return Choice(tuple(t for t in choice.tables if t.name not in taken), checked.refused)

    async def park(self, name: str, reason: str, fix: str = "", *, state: str = "parked", again: bool = False) -> None:
        """J3."""
        async with self.parking:
            await self.desk.park(name, await self.wal_end(), reason, fix, state=state, again=again)

    async def wal_end(self) -> int:
        """Nothing that was received by now is at or above it."""
        found = await self.control.ask(lambda wire: wire.value("SELECT pg_current_wal_insert_lsn()"))
        return Lsn.parse(found or "0/0").value


async def _resolved(wire: Wire, config: CaptureConfig, found: list[TableInfo]) -> Choice:
    try:
        return resolve(config.tables, found, wire.server_version, whole=config.whole)
    except Missing:
        return Choice((), {})
