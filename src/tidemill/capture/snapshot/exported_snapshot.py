"""The initial snapshot: every row of the captured tables as of one moment, stitched to the stream by xids.

Several connections may read it at once, each in a transaction of its own that sees the same (pg_export_snapshot).

Order: the slot exists already; tables are locked against DDL (ACCESS SHARE; each wait is short and far from the next,
and holds no other table's lock meanwhile: publication.py, P3); then the REPEATABLE READ
transaction takes its snapshot, whose pg_current_snapshot() and WAL insert position are recorded; then each
table is copied out in PostgreSQL's text format, exactly as the stream would print it.

A transaction is in the snapshot, in the stream, or in both, never in neither: the slot sees all that commits
after its creation. Those in both are skipped from the stream (boundaries.in_snapshot).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence

from tidemill.base.errors import MissingError, TidemillError
from tidemill.base.lsn import Lsn
from tidemill.capture.catalog.columns import Attributes, attributes_of
from tidemill.capture.catalog.table_discovery import TableInfo, describe, list_partitions
from tidemill.capture.changes import Relation
from tidemill.capture.postgres.connection import BURST_BYTES, Wire, identifier, literal, scope
from tidemill.capture.postgres.errors import SqlError, may_pass
from tidemill.capture.postgres.pg_snapshot import PgSnapshot, since
from tidemill.capture.setup.blockers import table_holder
from tidemill.capture.setup.publication import LOCK_ATTEMPTS, LOCK_PAUSE_S, LOCK_TIMEOUT_MS, LOCKED, TableLockedError
from tidemill.capture.tables.copy_progress import SnapshotProgress

DESCRIBED_AT_ONCE = 250
"""Tables in one question, so that thousands of them are progress."""


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
        self.attributes: dict[int, Attributes] = {}
        self.partitions: dict[int, dict[int, int]] = {}

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
            blocked = TableLockedError(table, holder := await table_holder(self._wire, table.oid))
            tries[table.name] += 1
            if tries[table.name] == LOCK_ATTEMPTS:
                failed[table.name] = blocked
                continue
            self._progress.held_by, self._progress.blocked = blocked.held_by, str(holder or blocked.message)
            await asyncio.sleep(LOCK_PAUSE_S)
        self._progress.held_by = self._progress.blocked = ""
        rows = await self._wire.query("SELECT pg_current_snapshot()::text, pg_current_wal_insert_lsn()::text")
        for start in range(0, len(self.tables), DESCRIBED_AT_ONCE):
            self._progress.steps.step("tables are described", start, len(self.tables))
            oids = [table.oid for table in self.tables[start : start + DESCRIBED_AT_ONCE]]
            self.relations |= await describe(self._wire, oids)
            self.attributes |= await attributes_of(self._wire, oids)
        for table in self.tables:
            if table.kind == "p":
                self.partitions[table.oid] = await list_partitions(self._wire, table.oid)
            # One that was renamed since has left its name, and the lock, to another.
            relation = self.relations.get(table.oid)
            if table.name not in failed and (relation is None or relation.name != table.name):
                failed[table.name] = MissingError(f"the table is gone: table={table.name}.")
        self.tables = [table for table in self.tables if table.name not in failed]
        self.seen, self.lsn = PgSnapshot.parse(rows[0][0] or ""), Lsn.parse(rows[0][1] or "").value
        return failed

    async def _locked(self, failed: dict[str, TidemillError]) -> TableInfo | None:
        """Begin, and lock what has not failed. A table whose lock others have; None when all the rest is locked."""
        await self._wire.query("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        await self._wire.query(f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}")
        # Locks first: the first query takes the snapshot, and no DDL may come between the two.
        for number, table in enumerate(self.tables, 1):
            if table.name in failed:
                continue
            self._progress.steps.step("tables are locked", number, len(self.tables))
            await self._wire.query("SAVEPOINT one_table")
            try:
                await self._wire.query(f"LOCK TABLE {_scope(table)} IN ACCESS SHARE MODE")
            except TidemillError as error:
                if isinstance(error, SqlError) and error.sqlstate in LOCKED:
                    return table
                if may_pass(error):
                    raise
                failed[table.name] = error
                await self._wire.query("ROLLBACK TO one_table")
            # No snapshot is exported from within a subtransaction.
            await self._wire.query("RELEASE one_table")
        await self._wire.query("SET LOCAL lock_timeout = 0")
        return None

    async def estimate(self) -> int:
        oids = ", ".join(str(table.oid) for table in self.tables) or "0"
        total = await self._wire.value(
            f"SELECT coalesce(sum(greatest(reltuples, 0)), 0)::bigint FROM pg_class WHERE oid IN ({oids})"
        )
        return int(total or 0)

    async def blocks(self, table: TableInfo) -> tuple[int, int]:
        """How many a table has with its partitions, and how many the longest of these has."""
        rows = await self._wire.query(
            f"WITH RECURSIVE tree(oid) AS (SELECT {table.oid}::oid UNION ALL SELECT i.inhrelid FROM tree t"
            " JOIN pg_class p ON p.oid = t.oid AND p.relkind = 'p' JOIN pg_inherits i ON i.inhparent = t.oid),"
            " part(blocks) AS (SELECT pg_relation_size(oid) / current_setting('block_size')::bigint FROM tree)"
            " SELECT coalesce(sum(blocks), 0)::bigint, coalesce(max(blocks), 0) FROM part"
        )
        return int(rows[0][0] or 0), int(rows[0][1] or 0)

    async def divided_since(self, table: TableInfo, xid: int) -> bool:
        """Whether a partition was attached by a transaction that is not older than `xid`: be it one that was detached
        before, its rows changed in between, of which the stream says nothing."""
        if table.kind != "p":
            return False
        found = await self._wire.value(
            f"SELECT EXISTS (SELECT FROM pg_inherits WHERE {since('xmin', str(xid))} AND"
            f" inhrelid IN (SELECT relid FROM pg_partition_tree({table.oid})))"
        )
        return found == "t"

    async def export(self) -> str:
        """A name for `join`, good until `end`."""
        return await self._wire.value("SELECT pg_export_snapshot()") or ""

    async def join(self, wire: Wire, exported: str) -> None:
        """Let another connection read what this one does."""
        await wire.query("SET row_security = off")
        await wire.query("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        await wire.query(f"SET TRANSACTION SNAPSHOT {literal(exported)}")

    async def rows(self, wire: Wire, table: TableInfo, condition: str = "") -> AsyncIterator[list[bytes]]:
        """Lines of COPY's text format, some hundred kilobytes at a time, of the rows that meet a condition. The caller
        reads them to the end: only then does the connection take the next question."""
        columns = ", ".join(identifier(column.name) for column in self.relations[table.oid].columns)
        where = f" WHERE {condition}" if condition else ""
        lines: list[bytes] = []
        size = 0
        async for burst in wire.copy_out(f"COPY (SELECT {columns} FROM {_scope(table)}{where}) TO STDOUT"):
            lines += burst
            size += sum(map(len, burst))
            if size >= BURST_BYTES:
                yield lines
                lines, size = [], 0
        if lines:
            yield lines

    async def end(self) -> None:
        await self._wire.query("COMMIT")


def _scope(table: TableInfo) -> str:
    return scope(table.schema, table.table, partitioned=table.kind == "p")
