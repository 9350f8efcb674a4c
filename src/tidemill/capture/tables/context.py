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
from tidemill.capture.catalog.catalog_cache import CachedQuery, TableList
from tidemill.capture.catalog.foreign_publications import Objections, find_objections
from tidemill.capture.catalog.table_choice import TableChoice, choose_tables
from tidemill.capture.catalog.table_discovery import TableInfo
from tidemill.capture.config import CaptureConfig
from tidemill.capture.postgres.connection import PgConnection
from tidemill.capture.postgres.control_connection import ControlConnection
from tidemill.capture.setup.publication import PublishedTable, read_published_tables
from tidemill.capture.tables.table_reasons import PauseCause
from tidemill.capture.tables.table_setup import refuse_taken_topics
from tidemill.capture.tables.table_states import TableStates
from tidemill.metastore.catalogue import Catalogue


class SideLoopContext:
    """Connection, tables and publication, for the concurrent loops. While `reader_lock` is locked, the stream's reader
    is paused.
    """

    def __init__(
        self,
        config: CaptureConfig,
        control: ControlConnection,
        states: TableStates,
        catalogue: Catalogue,
        reader_lock: asyncio.Lock,
    ) -> None:
        self.config = config
        self.control = control
        self.states = states
        self.catalogue = catalogue
        self.reader_lock = reader_lock
        self.tables = TableList(control)
        self._objections = CachedQuery(control, self._query_objections)
        self._objected: Objections = {}
        self._resolved: tuple[list[TableInfo], Objections, TableChoice] | None = None

    async def read_published(self) -> dict[int, PublishedTable] | None:
        return await self.control.run(self.query_published)

    async def query_published(self, wire: PgConnection) -> dict[int, PublishedTable] | None:
        return await read_published_tables(wire, self.config.publication, manual=self.config.manual)

    async def fetch_objections(self) -> Objections:
        """Return the objections of publications to tables (foreign_publications.py). An unchanged result is the
        identical object.
        """
        return await self._objections.fetch()

    async def _query_objections(self, wire: PgConnection) -> Objections:
        found = await find_objections(wire, self.config)
        if found != self._objected:
            self._objected = found
        return self._objected

    async def choose_tables(self, found: list[TableInfo]) -> TableChoice:
        """Return the choice of tables among `found`, which is a result of `tables`."""
        objected = await self.fetch_objections()
        if self._resolved is None or self._resolved[0] is not found or self._resolved[1] is not objected:
            choice = await self.control.run(lambda wire: _resolve_tables(wire, self.config, found, objected))
            self._resolved = found, objected, choice
        choice, rows = self._resolved[2], self.states.rows
        fresh = tuple(t for t in choice.tables if t.name not in rows or rows[t.name].snapshot is None)
        if not fresh:
            return choice
        checked = await refuse_taken_topics(self.config, self.catalogue, TableChoice(fresh, choice.refused))
        taken = set(checked.refused) - set(choice.refused)
        return TableChoice(tuple(t for t in choice.tables if t.name not in taken), checked.refused)

    async def pause_at_wal_end(self, name: str, cause: PauseCause) -> None:
        """Pause a table at the WAL end while the stream's reader is paused."""
        async with self.reader_lock:
            await self.states.pause_table(name, await self.read_wal_end(), cause)

    async def read_wal_end(self) -> int:
        """Return an LSN that is above everything received so far."""
        found = await self.control.run(lambda wire: wire.value("SELECT pg_current_wal_insert_lsn()"))
        return Lsn.parse(found or "0/0").value


async def _resolve_tables(
    wire: PgConnection, config: CaptureConfig, found: list[TableInfo], objected: Objections
) -> TableChoice:
    try:
        return choose_tables(
            config.tables, found, wire.server_version, whole=config.requires_full_identity, objections=objected
        )
    except MissingError:
        return TableChoice((), {})
