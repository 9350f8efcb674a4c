"""What the database's catalogue says, asked for ever, and read only where it may say something else by now.

V1  An answer is kept while PostgreSQL shows the same snapshot. Whatever changes a catalogue is a transaction with an
    id; the snapshot names those that have ended, so it is another one as soon as one more is visible, and never again
    an earlier one. It is asked for before the catalogue is read: what becomes visible in between is read once more.
    (What PostgreSQL writes over in place, such as the sizes it reckons with, is in no answer.)
V2  Where others write, the snapshot is always another one. Then the server says of the tables only their hash, if that
    is the one that was seen last; hash and rows are of one statement, so what was changed and changed back is no gap.
V3  The same answer is the very same object: who has dealt with it is done.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from tidemill.capture.catalog.table_discovery import TableInfo, list_tables_unless
from tidemill.capture.postgres.connection import Wire
from tidemill.capture.postgres.control_connection import Control

T = TypeVar("T")


async def visible(wire: Wire) -> str:
    """Which transactions a statement sees. Of a primary: in recovery the snapshot does not name all of them."""
    return await wire.value("SELECT pg_current_snapshot()") or ""


class CachedQuery(Generic[T]):
    """The answer to one question about the catalogue (V1). Nobody may change it."""

    def __init__(self, control: Control, question: Callable[[Wire], Awaitable[T]]) -> None:
        self._control = control
        self._question = question
        self._kept: tuple[str, T] | None = None

    async def now(self) -> T:
        """As of a moment after the call. Raises what the question raises, and is none the wiser then."""
        return await self._control.ask(self._looked)

    async def _looked(self, wire: Wire) -> T:
        snapshot = await visible(wire)
        if self._kept is None or self._kept[0] != snapshot:
            self._kept = snapshot, await self._question(wire)
        return self._kept[1]


class Tables:
    """All that there are, in name order, as `list_tables` (V2, V3)."""

    def __init__(self, control: Control) -> None:
        self._hash = ""
        self._tables: list[TableInfo] = []
        self._kept = CachedQuery(control, self._read)

    async def now(self) -> list[TableInfo]:
        return await self._kept.now()

    async def _read(self, wire: Wire) -> list[TableInfo]:
        self._hash, self._tables = await list_tables_unless(wire, self._hash, self._tables)
        return self._tables
