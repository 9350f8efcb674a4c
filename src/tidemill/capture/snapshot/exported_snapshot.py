"""A snapshot of the captured tables: every row as of one moment, joined to the stream by transaction ids.

Several connections may read it concurrently, each in its own transaction that sees the same state (pg_export_snapshot).

Order: the slot exists already. Tables are locked against DDL (ACCESS SHARE; each wait is short, waits are far apart,
and no other table's lock is held during one: publication.py). Then the REPEATABLE READ transaction takes its snapshot,
whose pg_current_snapshot() and WAL insert position are recorded. Then each table is copied out in PostgreSQL's text
format, exactly as the stream would print it.

Invariant (no gap): a transaction is in the snapshot, in the stream, or in both, never in neither, because the slot sees
everything that commits after its creation. Transactions that are in both are skipped from the stream
(captured_table.is_in_snapshot).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence

from tidemill.base.errors import MissingError, TidemillError
from tidemill.base.lsn import Lsn
from tidemill.capture.catalog.columns import TableAttributes, read_attributes
from tidemill.capture.catalog.relations import describe_tables
from tidemill.capture.catalog.table_discovery import TableInfo, list_partitions
from tidemill.capture.changes import Relation
from tidemill.capture.postgres.connection import BURST_BYTES, PgConnection, from_clause_name, identifier, literal
from tidemill.capture.postgres.errors import SqlError, is_transient
from tidemill.capture.postgres.pg_snapshot import PgSnapshot, xid_condition
from tidemill.capture.setup.blockers import find_table_blocker
from tidemill.capture.setup.publication import (
    LOCK_ATTEMPTS,
    LOCK_PAUSE_S,
    LOCK_SQLSTATES,
    LOCK_TIMEOUT_MS,
    TableLockedError,
)
from tidemill.capture.tables.copy_progress import SnapshotProgress

TABLES_PER_QUERY = 250
"""Tables per query, so that describing thousands of tables shows progress."""


class ExportedSnapshot:
    """One open snapshot transaction on its own connection. Call begin, then rows for each of `tables`, then end."""

    seen: PgSnapshot
    lsn: int
    """WAL insert position right after `seen` was taken."""

    def __init__(self, wire: PgConnection, tables: Sequence[TableInfo], progress: SnapshotProgress) -> None:
        self._wire = wire
        self._progress = progress
        self.tables = list(tables)
        self.relations: dict[int, Relation] = {}
        self.attributes: dict[int, TableAttributes] = {}
        self.partitions: dict[int, dict[int, int]] = {}

    async def open_snapshot(self) -> dict[str, TidemillError]:
        """Take the snapshot and set `seen` and `lsn`. Returns the errors of tables that cannot be read, by name;
        `tables` has the others.
        """
        failed: dict[str, TidemillError] = {}
        tries: Counter[str] = Counter()
        while (table := await self._lock_tables(failed)) is not None:
            await self._wire.query("ROLLBACK")
            blocked = TableLockedError(table, holder := await find_table_blocker(self._wire, table.oid))
            tries[table.name] += 1
            if tries[table.name] == LOCK_ATTEMPTS:
                failed[table.name] = blocked
                continue
            self._progress.held_by, self._progress.blocked = blocked.held_by, str(holder or blocked.message)
            await asyncio.sleep(LOCK_PAUSE_S)
        self._progress.held_by = self._progress.blocked = ""
        rows = await self._wire.query("SELECT pg_current_snapshot()::text, pg_current_wal_insert_lsn()::text")
        for start in range(0, len(self.tables), TABLES_PER_QUERY):
            self._progress.steps.begin_table_step("describing tables", start, len(self.tables))
            oids = [table.oid for table in self.tables[start : start + TABLES_PER_QUERY]]
            self.relations |= await describe_tables(self._wire, oids)
            self.attributes |= await read_attributes(self._wire, oids)
        for table in self.tables:
            if table.kind == "p":
                self.partitions[table.oid] = await list_partitions(self._wire, table.oid)
            # A renamed table has left its name, and the lock, to another table.
            relation = self.relations.get(table.oid)
            if table.name not in failed and (relation is None or relation.name != table.name):
                failed[table.name] = MissingError(f"the table does not exist: table={table.name}.")
        self.tables = [table for table in self.tables if table.name not in failed]
        self.seen, self.lsn = PgSnapshot.parse(rows[0][0] or ""), Lsn.parse(rows[0][1] or "").value
        return failed

    async def _lock_tables(self, failed: dict[str, TidemillError]) -> TableInfo | None:
        """Begin a transaction and lock the tables that have not failed. Returns a table that others have locked, or
        None when all remaining ones are locked.
        """
        await self._wire.query("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        await self._wire.query(f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}")
        # Locks first: the first query takes the snapshot, and no DDL may come between the two.
        for number, table in enumerate(self.tables, 1):
            if table.name in failed:
                continue
            self._progress.steps.begin_table_step("locking tables", number, len(self.tables))
            await self._wire.query("SAVEPOINT one_table")
            try:
                await self._wire.query(f"LOCK TABLE {_from_clause_name(table)} IN ACCESS SHARE MODE")
            except TidemillError as error:
                if isinstance(error, SqlError) and error.sqlstate in LOCK_SQLSTATES:
                    return table
                if is_transient(error):
                    raise
                failed[table.name] = error
                await self._wire.query("ROLLBACK TO one_table")
            # A snapshot cannot be exported from within a subtransaction.
            await self._wire.query("RELEASE one_table")
        await self._wire.query("SET LOCAL lock_timeout = 0")
        return None

    async def estimate_rows(self) -> int:
        oids = ", ".join(str(table.oid) for table in self.tables) or "0"
        total = await self._wire.value(
            f"SELECT coalesce(sum(greatest(reltuples, 0)), 0)::bigint FROM pg_class WHERE oid IN ({oids})"
        )
        return int(total or 0)

    async def count_blocks(self, table: TableInfo) -> tuple[int, int]:
        """Return the number of blocks of a table with its partitions, and of the longest of these."""
        rows = await self._wire.query(
            f"WITH RECURSIVE tree(oid) AS (SELECT {table.oid}::oid UNION ALL SELECT i.inhrelid FROM tree t"
            " JOIN pg_class p ON p.oid = t.oid AND p.relkind = 'p' JOIN pg_inherits i ON i.inhparent = t.oid),"
            " part(blocks) AS (SELECT pg_relation_size(oid) / current_setting('block_size')::bigint FROM tree)"
            " SELECT coalesce(sum(blocks), 0)::bigint, coalesce(max(blocks), 0) FROM part"
        )
        return int(rows[0][0] or 0), int(rows[0][1] or 0)

    async def has_partition_attached_since(self, table: TableInfo, xid: int) -> bool:
        """Return whether a transaction that is not older than `xid` attached a partition. Such a partition may have
        been detached before, and changed in between, which the stream does not show.
        """
        if table.kind != "p":
            return False
        found = await self._wire.value(
            f"SELECT EXISTS (SELECT FROM pg_inherits WHERE {xid_condition('xmin', str(xid))} AND"
            f" inhrelid IN (SELECT relid FROM pg_partition_tree({table.oid})))"
        )
        return found == "t"

    async def export(self) -> str:
        """Return a snapshot id for `join`, valid until `end`."""
        return await self._wire.value("SELECT pg_export_snapshot()") or ""

    async def join(self, wire: PgConnection, exported: str) -> None:
        """Let another connection read the same snapshot."""
        await wire.query("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        await wire.query(f"SET TRANSACTION SNAPSHOT {literal(exported)}")

    async def rows(self, wire: PgConnection, table: TableInfo, condition: str = "") -> AsyncIterator[list[bytes]]:
        """Yield lines of COPY's text format, some hundred kilobytes at a time, of the rows that satisfy `condition`.
        The caller must read to the end, because only then does the connection accept the next query.
        """
        columns = ", ".join(identifier(column.name) for column in self.relations[table.oid].columns)
        where = f" WHERE {condition}" if condition else ""
        lines: list[bytes] = []
        size = 0
        async for burst in wire.copy_out(f"COPY (SELECT {columns} FROM {_from_clause_name(table)}{where}) TO STDOUT"):
            lines += burst
            size += sum(map(len, burst))
            if size >= BURST_BYTES:
                yield lines
                lines, size = [], 0
        if lines:
            yield lines

    async def end(self) -> None:
        await self._wire.query("COMMIT")


def _from_clause_name(table: TableInfo) -> str:
    return from_clause_name(table.schema, table.table, partitioned=table.kind == "p")
