"""PostgreSQL's own log of every row, and the state of a table at any commit, folded from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

Row = dict[str, str | None]
Shown = tuple[str | None, ...]
XIDS = 1 << 32
"""The stream's xids are the low half of PostgreSQL's."""


@dataclass(frozen=True)
class Version:
    """One logged version. op: I, U, D, T (truncate), R (the description changed; every row follows as S)."""

    n: int
    xid: int
    op: str
    old: Row | None
    new: Row | None


class History:
    """History of the rows, read at every pause of the writers: all committed versions then have lower numbers than
    later ones."""

    def __init__(self) -> None:
        self._last = 0
        self.of: dict[int, list[Version]] = defaultdict(list)
        self._lost: dict[int, list[Version]] = defaultdict(list)
        """Versions of a server that was failed over: clients may have seen them, but no state contains them."""

    def read_on(self, connection: psycopg.Connection[Any]) -> None:
        self._last = self._read(connection, self.of)

    def read_lost(self, connection: psycopg.Connection[Any]) -> None:
        """Read the versions of the server that is about to be killed; those that its successor has are read there."""
        self._read(connection, self._lost)

    def _read(self, connection: psycopg.Connection[Any], into: dict[int, list[Version]]) -> int:
        last = self._last
        rows = connection.execute(
            "SELECT n, xid::text::bigint, tab, op, old, new FROM oracle.history WHERE n > %s ORDER BY n", (self._last,)
        ).fetchall()
        for n, xid, tab, op, old, new in rows:
            into[tab].append(Version(n, xid, op, old, new))
            last = n
        return last

    def shown(self, number: int, columns: Sequence[str]) -> tuple[set[Shown], set[tuple[int, Shown]]]:
        """Return every past row, reduced to these columns, and the same with the low half of the xid that wrote it."""
        rows: set[Shown] = set()
        written: set[tuple[int, Shown]] = set()
        for version in (*self.of[number], *self._lost[number]):
            if version.new is not None and version.new.keys() >= set(columns):
                row = tuple(version.new[name] for name in columns)
                rows.add(row)
                written.add((version.xid % XIDS, row))
        return rows, written

    def size_bytes(self, number: int, xid: int) -> int:
        """Return the size of the values that a transaction wrote, by the low half of its xid."""
        rows = [v.new or v.old for v in (*self.of[number], *self._lost[number]) if v.xid % XIDS == xid]
        return sum(len(value or "") for row in rows for value in (row or {}).values())

    def gone(self, number: int, key: Sequence[str]) -> set[tuple[int, Shown]]:
        """Return (xid, key) of each row that left its key or changed its value."""
        return {
            (version.xid % XIDS, tuple(version.old[name] for name in key))
            for version in (*self.of[number], *self._lost[number])
            if version.old is not None and version.old.keys() >= set(key)
        }

    def state(self, number: int, key: Sequence[str], lsn_of: Mapping[int, int], below_lsn: int) -> dict[Shown, Row]:
        """Return the table as of the last commit below an LSN; `lsn_of`: xid → commit LSN."""
        known = [v for v in self.of[number] if lsn_of[v.xid] < below_lsn]
        return folded(sorted(known, key=lambda v: (lsn_of[v.xid], v.n)), key)


def folded(versions: Iterable[Version], key: Sequence[str]) -> dict[Shown, Row]:
    """Fold versions into rows. Two rows may hold a deferrable key within a transaction; values identify the one that
    leaves."""
    rows: dict[Shown, list[Row]] = defaultdict(list)
    for version in versions:
        if version.op in "TR":
            rows.clear()
        if version.old is not None and (held := rows[tuple(version.old[name] for name in key)]):
            held.remove(version.old if version.old in held else held[-1])
        if version.new is not None:
            rows[tuple(version.new[name] for name in key)].append(version.new)
    assert all(len(held) < 2 for held in rows.values()), "the history has two rows of one key"
    return {at: held[0] for at, held in rows.items() if held}
