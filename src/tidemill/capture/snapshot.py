"""The initial snapshot: every row of the captured tables as of one moment, stitched to the stream by xids.

Order: the slot exists already; tables are locked against DDL (ACCESS SHARE; each wait is short and far from the next,
and holds no other table's lock meanwhile: publication.py, P3); then the REPEATABLE READ
transaction takes its snapshot, whose pg_current_snapshot() and WAL insert position are recorded; then each
table is copied out in PostgreSQL's text format, exactly as the stream would print it.

A transaction is in the snapshot, in the stream, or in both, never in neither: the slot sees all that commits
after its creation. Those in both are skipped from the stream (boundaries.in_snapshot).
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Sequence

from tidemill.base.clock import Clock
from tidemill.base.errors import Invalid, Missing, TidemillError
from tidemill.base.frontier import Lsn
from tidemill.capture.changes import Relation, Row
from tidemill.capture.holders import table_holder
from tidemill.capture.publication import LOCK_ATTEMPTS, LOCK_PAUSE_S, LOCK_TIMEOUT_MS, LOCKED, Blocked
from tidemill.capture.tables import TableInfo, describe, list_partitions
from tidemill.capture.visibility import PgSnapshot
from tidemill.capture.wire.connection import Wire, identifier, qualified
from tidemill.capture.wire.errors import SqlError


class SnapshotProgress:
    """Rows copied so far, rows expected (the planner's estimate), rows per second since the start.

    `held_by`: whom the copy waits for just now, should it stand; `blocked`: the session whose lock is in its way."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started_s = clock.monotonic_s()
        self._ended_s: float | None = None
        self.rows = 0
        self.estimate = 0
        self.table = ""
        self.held_by = ""
        self.blocked = ""
        self.done = False

    def finish(self) -> None:
        self.done = True
        self._ended_s = self._clock.monotonic_s()

    @property
    def sentence(self) -> str:
        if self.blocked:
            return f"the copy waits for another session: {self.blocked}"
        if not self.table:
            return "waits to be copied"
        return f"copying {self.table}: {self.rows} of about {self.expected} rows, {self.rows_per_s:.0f} rows/s"

    @property
    def rows_per_s(self) -> float:
        end_s = self._ended_s if self._ended_s is not None else self._clock.monotonic_s()
        return self.rows / max(end_s - self._started_s, 1e-3)

    @property
    def expected(self) -> int:
        return self.rows if self.done else max(self.rows, self.estimate)


class Snapshot:
    """One open snapshot transaction on a connection of its own. Use as: begin, rows of each of `tables`, end."""

    seen: PgSnapshot
    lsn: int
    """WAL insert position right after `seen` was taken."""

    def __init__(self, wire: Wire, tables: Sequence[TableInfo], progress: SnapshotProgress) -> None:
        self._wire = wire
        self._progress = progress
        self.tables = list(tables)
        self.relations: dict[int, Relation] = {}
        self.partitions: dict[int, tuple[int, ...]] = {}

    async def begin(self) -> dict[str, TidemillError]:
        """Take it, as `seen` and `lsn` say; the tables that cannot be read, by name: `tables` are the others.

        Row-level security would leave rows out without a word: it is switched off, which makes reading such a table
        an error for a role that it binds.
        """
        await self._wire.query("SET row_security = off")
        failed: dict[str, TidemillError] = {}
        tries: Counter[str] = Counter()
        while (table := await self._locked(failed)) is not None:
            await self._wire.query("ROLLBACK")
            blocked = Blocked(table, holder := await table_holder(self._wire, table.oid))
            tries[table.name] += 1
            if tries[table.name] == LOCK_ATTEMPTS:
                failed[table.name] = blocked
                continue
            self._progress.held_by, self._progress.blocked = blocked.held_by, str(holder or blocked.message)
            await asyncio.sleep(LOCK_PAUSE_S)
        self._progress.held_by = self._progress.blocked = ""
        rows = await self._wire.query("SELECT pg_current_snapshot()::text, pg_current_wal_insert_lsn()::text")
        self.relations = await describe(self._wire, [table.oid for table in self.tables])
        for table in self.tables:
            if table.kind == "p":
                self.partitions[table.oid] = await list_partitions(self._wire, table.oid)
            if table.name not in failed and table.oid not in self.relations:
                failed[table.name] = Missing(f"the table is gone: table={table.name}.")
        self.tables = [table for table in self.tables if table.name not in failed]
        self.seen, self.lsn = PgSnapshot.parse(rows[0][0] or ""), Lsn.parse(rows[0][1] or "").value
        return failed

    async def _locked(self, failed: dict[str, TidemillError]) -> TableInfo | None:
        """Begin, and lock what has not failed. A table whose lock others have; None when all the rest is locked."""
        await self._wire.query("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        await self._wire.query(f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}")
        # Locks first: the first query takes the snapshot, and no DDL may come between the two.
        for table in self.tables:
            if table.name in failed:
                continue
            await self._wire.query("SAVEPOINT one_table")
            try:
                await self._wire.query(f"LOCK TABLE {_scope(table)} IN ACCESS SHARE MODE")
            except SqlError as error:
                if error.sqlstate not in LOCKED:
                    raise
                return table
            except Invalid as error:
                failed[table.name] = error
                await self._wire.query("ROLLBACK TO one_table")
        await self._wire.query("SET LOCAL lock_timeout = 0")
        return None

    async def estimate(self) -> int:
        oids = ", ".join(str(table.oid) for table in self.tables) or "0"
        total = await self._wire.value(
            f"SELECT coalesce(sum(greatest(reltuples, 0)), 0)::bigint FROM pg_class WHERE oid IN ({oids})"
        )
        return int(total or 0)

    async def rows(self, table: TableInfo) -> AsyncIterator[list[Row]]:
        """In bursts. Raises what a row that cannot be read raises, once the copy is read to its end: the connection
        goes on with the next table."""
        relation = self.relations[table.oid]
        names = [column.name for column in relation.columns]
        columns = ", ".join(identifier(name) for name in names)
        failure: Exception | None = None
        async for burst in self._wire.copy_out(f"COPY (SELECT {columns} FROM {_scope(table)}) TO STDOUT"):
            if failure is not None:
                continue
            try:
                rows = [dict(zip(names, parse_copy_row(line), strict=True)) for line in burst]
            except Exception as error:
                failure = error
                continue
            yield rows
        if failure is not None:
            raise failure

    async def end(self) -> None:
        await self._wire.query("COMMIT")


def _scope(table: TableInfo) -> str:
    return ("" if table.kind == "p" else "ONLY ") + qualified(table.schema, table.table)


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
