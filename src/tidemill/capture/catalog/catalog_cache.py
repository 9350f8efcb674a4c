"""Cache the results of polled queries to the database's catalogue, and repeat a query only if its result may have
changed.

Invariant (cache by snapshot): a result is cached while PostgreSQL shows the same snapshot. Every change of a catalogue
is a transaction with an id. The snapshot lists those that have ended, so it changes as soon as another one is visible,
and never returns to an earlier value. The snapshot is read before the catalogue, so a change that becomes visible in
between is read again. (Values that PostgreSQL overwrites in place, such as size estimates, are in no result.)

On a server with other writers the snapshot changes all the time. Then the server sends only the hash of the tables if
it matches the last one. Hash and rows are from one statement, so a change that was reverted is not missed.

An unchanged result is the identical object, so callers can compare it with `is`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from tidemill.capture.catalog.table_discovery import TableInfo, list_tables_if_changed
from tidemill.capture.postgres.connection import PgConnection
from tidemill.capture.postgres.control_connection import ControlConnection

T = TypeVar("T")


async def read_snapshot(wire: PgConnection) -> str:
    """Return which transactions a statement sees. For a primary only: in recovery the snapshot does not list all of
    them.
    """
    return await wire.value("SELECT pg_current_snapshot()") or ""


class CachedQuery(Generic[T]):
    """Cached result of one query to the catalogue. The result must not be changed."""

    def __init__(self, control: ControlConnection, question: Callable[[PgConnection], Awaitable[T]]) -> None:
        self._control = control
        self._question = question
        self._kept: tuple[str, T] | None = None

    async def fetch(self) -> T:
        """Return a result that is at least as recent as the call. Raises the query's errors, and then leaves the cache
        unchanged.
        """
        return await self._control.run(self._refresh_if_changed)

    async def _refresh_if_changed(self, wire: PgConnection) -> T:
        snapshot = await read_snapshot(wire)
        if self._kept is None or self._kept[0] != snapshot:
            self._kept = snapshot, await self._question(wire)
        return self._kept[1]


class TableList:
    """All existing tables, in name order, as from `list_tables`."""

    def __init__(self, control: ControlConnection) -> None:
        self._hash = ""
        self._tables: list[TableInfo] = []
        self._kept = CachedQuery(control, self._read_unless_unchanged)

    async def fetch(self) -> list[TableInfo]:
        return await self._kept.fetch()

    async def _read_unless_unchanged(self, wire: PgConnection) -> list[TableInfo]:
        self._hash, self._tables = await list_tables_if_changed(wire, self._hash, self._tables)
        return self._tables
