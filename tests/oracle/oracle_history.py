"""What PostgreSQL itself wrote down of every row, and the state of a table at any commit, folded from it."""

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
    """op: I, U, D, T (truncate), R (the description changed; every row follows as S)."""

    n: int
    xid: int
    op: str
    old: Row | None
    new: Row | None


class History:
    """Read on at every pause of the writers: what is committed then has all its numbers below those to come."""

    def __init__(self) -> None:
        self._last = 0
        self.of: dict[int, list[Version]] = defaultdict(list)

    def read_on(self, connection: psycopg.Connection[Any]) -> None:
        rows = connection.execute(
            "SELECT n, xid::text::bigint, tab, op, old, new FROM oracle.history WHERE n > %s ORDER BY n", (self._last,)
        ).fetchall()
        for n, xid, tab, op, old, new in rows:
            self.of[tab].append(Version(n, xid, op, old, new))
            self._last = n

    def shown(self, number: int, columns: Sequence[str]) -> tuple[set[Shown], set[tuple[int, Shown]]]:
        """(every row that was, as these columns; the same with the low half of the xid that wrote it)."""
        rows: set[Shown] = set()
        written: set[tuple[int, Shown]] = set()
        for version in self.of[number]:
            if version.new is not None and version.new.keys() >= set(columns):
                row = tuple(version.new[name] for name in columns)
                rows.add(row)
                written.add((version.xid % XIDS, row))
        return rows, written

    def gone(self, number: int, key: Sequence[str]) -> set[tuple[int, Shown]]:
        """(xid, key) of each row that left its key, or its value."""
        return {
            (version.xid % XIDS, tuple(version.old[name] for name in key))
            for version in self.of[number]
            if version.old is not None and version.old.keys() >= set(key)
        }

    def state(self, number: int, key: Sequence[str], lsn_of: Mapping[int, int], below_lsn: int) -> dict[Shown, Row]:
        """The table as of the last commit below an LSN; `lsn_of`: xid → commit LSN."""
        known = [v for v in self.of[number] if lsn_of[v.xid] < below_lsn]
        return folded(sorted(known, key=lambda v: (lsn_of[v.xid], v.n)), key)


def folded(versions: Iterable[Version], key: Sequence[str]) -> dict[Shown, Row]:
    rows: dict[Shown, Row] = {}
    for version in versions:
        if version.op in "TR":
            rows.clear()
        if version.old is not None:
            rows.pop(tuple(version.old[name] for name in key), None)
        if version.new is not None:
            rows[tuple(version.new[name] for name in key)] = version.new
    return rows
