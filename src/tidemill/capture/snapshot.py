"""The initial snapshot: every row of the captured tables as of one moment, stitched to the stream by xids.

Order: the slot exists already; tables are locked against DDL (ACCESS SHARE); then the REPEATABLE READ
transaction takes its snapshot, whose pg_current_snapshot() and WAL insert position are recorded; then each
table is copied out in PostgreSQL's text format, exactly as the stream would print it.

A transaction is in the snapshot, in the stream, or in both, never in neither: the slot sees all that commits
after its creation. Those in both are skipped from the stream (boundaries.in_snapshot).
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence

import msgspec

from tidemill.base.clock import Clock
from tidemill.base.errors import Corrupt
from tidemill.base.frontier import Lsn
from tidemill.capture.changes import Relation, Row
from tidemill.capture.tables import TableInfo, describe
from tidemill.capture.wire.connection import Wire, identifier, qualified


class SnapshotPoint(msgspec.Struct, frozen=True):
    """pg_current_snapshot() (64-bit xids) and the WAL insert position right after it."""

    xmin: int
    xmax: int
    xip: tuple[int, ...]
    lsn: int


class SnapshotProgress:
    """Rows copied so far, rows expected (the planner's estimate), rows per second since the start."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started_s = clock.monotonic_s()
        self._ended_s: float | None = None
        self.rows = 0
        self.estimate = 0
        self.table = ""
        self.done = False

    def finish(self) -> None:
        self.done = True
        self._ended_s = self._clock.monotonic_s()

    @property
    def rows_per_s(self) -> float:
        end_s = self._ended_s if self._ended_s is not None else self._clock.monotonic_s()
        return self.rows / max(end_s - self._started_s, 1e-3)

    @property
    def expected(self) -> int:
        return self.rows if self.done else max(self.rows, self.estimate)


def parse_point(snapshot: str, lsn: str) -> SnapshotPoint:
    """`xmin:xmax:xip,xip…` and `X/Y`. Raises Corrupt."""
    try:
        xmin, xmax, xip = snapshot.split(":")
        members = tuple(int(x) for x in xip.split(",") if x)
        return SnapshotPoint(int(xmin), int(xmax), members, Lsn.parse(lsn).value)
    except ValueError as error:
        raise Corrupt(f"not a snapshot: snapshot={snapshot!r}.") from error


class Snapshot:
    """One open snapshot transaction on a connection of its own. Use as: begin, rows of each table, end."""

    def __init__(self, wire: Wire, tables: Sequence[TableInfo]) -> None:
        self._wire = wire
        self._tables = tables
        self.relations: dict[int, Relation] = {}

    async def begin(self) -> SnapshotPoint:
        names = ", ".join(qualified(t.schema, t.table) for t in self._tables)
        await self._wire.query("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        # Locks first: the first query takes the snapshot, and no DDL may come between the two.
        await self._wire.query(f"LOCK TABLE {names} IN ACCESS SHARE MODE")
        rows = await self._wire.query("SELECT pg_current_snapshot()::text, pg_current_wal_insert_lsn()::text")
        self.relations = await describe(self._wire, [table.oid for table in self._tables])
        return parse_point(rows[0][0] or "", rows[0][1] or "")

    async def estimate(self) -> int:
        oids = ", ".join(str(table.oid) for table in self._tables)
        total = await self._wire.value(
            f"SELECT coalesce(sum(greatest(reltuples, 0)), 0)::bigint FROM pg_class WHERE oid IN ({oids})"
        )
        return int(total or 0)

    async def rows(self, table: TableInfo) -> AsyncIterator[list[Row]]:
        relation = self.relations[table.oid]
        names = [column.name for column in relation.columns]
        columns = ", ".join(identifier(name) for name in names)
        only = "" if table.kind == "p" else "ONLY "
        statement = f"COPY (SELECT {columns} FROM {only}{qualified(table.schema, table.table)}) TO STDOUT"
        async for burst in self._wire.copy_out(statement):
            yield [dict(zip(names, parse_copy_row(line), strict=True)) for line in burst]

    async def end(self) -> None:
        await self._wire.query("COMMIT")


_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


def parse_copy_row(line: bytes) -> list[str | None]:
    """One row of COPY's text format: tabs between values, \\N for NULL, backslash escapes."""
    text = line.decode().removesuffix("\n")
    values: list[str | None] = [*text.split("\t")]
    if "\\" not in text:
        return values
    return [None if value == "\\N" else _unescape(value) for value in text.split("\t")]


def _unescape(value: str) -> str:
    return _ESCAPED.sub(lambda m: _ESCAPES.get(m.group(1), m.group(1)), value) if "\\" in value else value
