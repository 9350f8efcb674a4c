"""Detect which logs changed, in the client: the server has no journal of its logs.

    sums of the heads, by part of the logs ─► heads of the parts whose sum changed ─► changed heads go to the journal

So a query makes the server read all heads of its prefix, but only the heads of changed parts are sent, PAGE per
statement, and only changed heads are returned.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Collection

from tidemill.consensus.api import Changes, LogHead
from tidemill.consensus.change_journal import PAGE_HEADS, ChangeJournal
from tidemill.consensus.operations import Changed
from tidemill.consensus.postgres import sql
from tidemill.consensus.postgres.connections import Connection
from tidemill.consensus.postgres.single_ops import fetch_rows

Sums = Callable[[str], Awaitable[dict[int, int]]]
HeadsAfter = Callable[[str, str, Collection[int], int], Awaitable[list[tuple[str, LogHead]]]]


class HeadComparison:
    """Journal of one client. `sums(prefix)` and `heads_after(prefix, after, parts, limit)` run `read_head_sums` and
    `read_heads_after` on one of its connections.

    They may raise TidemillError.
    """

    def __init__(self, life: str, sums: Sums, heads_after: HeadsAfter) -> None:
        self._read_sums = sums
        self._heads_after = heads_after
        self._journal = ChangeJournal(life, remembered=sys.maxsize, page=sys.maxsize)
        self._sums: dict[str, dict[int, int]] = {}
        """prefix → sums read before the known heads were."""
        self._heads: dict[str, LogHead] = {}
        self._lock = asyncio.Lock()

    async def changes_since(self, op: Changed) -> Changes:
        async with self._lock:
            sums, known = await self._read_sums(op.prefix), self._sums.get(op.prefix, {})
            parts = [part for part, total in sums.items() if known.get(part) != total]
            after, more = "", bool(parts)
            while more:
                found = await self._heads_after(op.prefix, after, parts, PAGE_HEADS)
                differs = [(name, head) for name, head in found if self._heads.get(name) != head]
                self._heads.update(differs)
                self._journal.record_changes(name for name, _ in differs)
                more = len(found) == PAGE_HEADS
                after = found[-1][0] if found else ""
            self._sums[op.prefix] = sums
            return self._journal.changes_since(op, self._list_heads, self._heads.__getitem__)

    def _list_heads(self, prefix: str, after: str, limit: int) -> list[tuple[str, LogHead]]:
        names = sorted(name for name in self._heads if name.startswith(prefix) and name > after)
        return [(name, self._heads[name]) for name in names[:limit]]


async def read_head_sums(connection: Connection, prefix: str) -> dict[int, int]:
    """Return the sum of the heads of each part of the logs with this prefix."""
    return dict(await fetch_rows(connection, sql.SUMS, (prefix,)))


async def read_heads_after(
    connection: Connection, prefix: str, after: str, parts: Collection[int], limit: int
) -> list[tuple[str, LogHead]]:
    """Return the first `limit` logs of these parts with this prefix whose name is greater than `after`, by name."""
    bits = sum(1 << part for part in parts).to_bytes(sql.PARTS // 8, "little")
    rows = await fetch_rows(connection, sql.HEADS_AFTER, (prefix, after, bits, limit))
    return [(row[0], LogHead(*row[1:])) for row in rows]
