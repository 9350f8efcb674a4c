"""One point of a captured database and its rows as of that point, with the tables locked for milliseconds only.

    A   LOCK TABLE … IN SHARE MODE       every writer of these tables has committed, and none can start
        pg_export_snapshot, pg_logical_emit_message(true, 'tidemill', nonce)
    B   SET TRANSACTION SNAPSHOT         sees exactly what A sees
    A   COMMIT                           writers continue; capture mints a binding tagged `nonce` at this commit

B reads what the tables held at A's commit, because no transaction could write them between A's snapshot and its commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from tidemill.base.errors import InvalidError, MissingError, UnavailableError
from tidemill.base.lsn import Lsn
from tidemill.capture.naming import split_name
from tidemill.capture.postgres.connection import (
    describe_dsn,
    identifier,
    qualified_identifier,
    session_settings,
    settings_statement,
)
from tidemill.capture.postgres.errors import permission_fix
from tidemill.capture.setup.blockers import PREPARED_LOCK_SQL
from tidemill.cli.verify.canonical_values import (
    order_expression,
    ordered_columns,
    select_expression,
    source_canonicalizer,
)
from tidemill.cli.verify.compare import Row
from tidemill.shards.api import ShardSchema

if TYPE_CHECKING:
    import psycopg

LOCK_TIMEOUT_MS = 50
LOCK_BUDGET_S = 60.0
LOCK_PAUSE_S = 0.5
LOCK_SHARE = 0.05
"""Largest share of the time spent waiting for the lock, because writers queue behind a waiting lock."""
FETCH_ROWS = 20_000
MAINTAIN_VERSION = 170_000
"""The first server with the privilege MAINTAIN."""
MARKER_PREFIX = "tidemill"


class SourceColumn(NamedTuple):
    """Column of a source table. `generated` is "" for no, s for stored, v for virtual."""

    name: str
    type_name: str
    generated: str


class SourcePoint:
    """Reader of tables as of one commit. Readers share transaction B, so only one may run at a time.

    The commit's LSN is within `lsns`, both ends included.
    """

    def __init__(self, connection: psycopg.AsyncConnection[Any], nonce: str, lsns: tuple[int, int]) -> None:
        self._connection = connection
        self.nonce = nonce
        self.lsns = lsns

    async def count(self, table: str) -> int:
        """Return the planner's estimate of the number of rows, for a progress bar."""
        cursor = await self._connection.execute(
            "SELECT greatest(reltuples, 0)::int8 FROM pg_class WHERE oid = %s::regclass", (_quoted(table),)
        )
        found = await cursor.fetchone()
        return int(found[0]) if found else 0

    async def columns(self, table: str) -> tuple[list[SourceColumn], list[str]]:
        """Return all columns, including those that the stream does not carry, and the columns of the primary key."""
        cursor = await self._connection.execute(
            "SELECT a.attname, format_type(a.atttypid, a.atttypmod), a.attgenerated::text FROM pg_attribute a"
            " WHERE a.attrelid = %s::regclass AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum",
            (_quoted(table),),
        )
        columns = [SourceColumn(*row) for row in await cursor.fetchall()]
        cursor = await self._connection.execute(
            "SELECT a.attname FROM pg_index i, unnest(i.indkey::int2[]) WITH ORDINALITY AS k(attnum, place)"
            " JOIN pg_attribute a ON a.attnum = k.attnum"
            " WHERE i.indrelid = %s::regclass AND i.indisprimary AND k.place <= i.indnkeyatts"
            " AND a.attrelid = i.indrelid ORDER BY k.place",
            (_quoted(table),),
        )
        return columns, [str(name) for (name,) in await cursor.fetchall()]

    async def rows(self, table: str, schema: ShardSchema) -> AsyncIterator[list[Row]]:
        """Yield chunks of canonical rows in key order, with null in retired columns. Raises InvalidError when the table
        lacks a column of the shard, or the role may not read all its rows."""
        import psycopg

        columns = ordered_columns(schema)
        fix = source_canonicalizer(columns)
        keys = [c for c in columns if c.name in schema.key]
        values = ("NULL" if c.retired else select_expression(c) for c in columns)
        query = (
            f"SELECT {', '.join(values)} FROM {await self._from_item(table)}"
            f" ORDER BY {', '.join(order_expression(c) for c in keys)}"
        )
        async with self._connection.cursor(name="tidemill_verify") as cursor:
            try:
                await cursor.execute(query.encode())
            except psycopg.errors.UndefinedColumn as error:
                raise InvalidError(
                    f"the source lacks a column of its table: table={table} ({_first_line(error)})."
                ) from error
            except psycopg.errors.InsufficientPrivilege as error:
                raise InvalidError(
                    f"the role may not read the table: table={table} ({_first_line(error)}).",
                    fix=permission_fix(error.diag.source_function or ""),
                ) from error
            while chunk := await cursor.fetchmany(FETCH_ROWS):
                yield [fix(r) for r in chunk] if fix else chunk

    async def _from_item(self, table: str) -> str:
        """Return the FROM item, which excludes tables that inherit from the table: they are tables of their own."""
        cursor = await self._connection.execute(
            "SELECT relkind::text FROM pg_class WHERE oid = %s::regclass", (_quoted(table),)
        )
        found = await cursor.fetchone()
        return _quoted(table) if found is not None and found[0] == "p" else f"ONLY {_quoted(table)}"


@asynccontextmanager
async def open_source_point(dsn: str, tables: Sequence[str], nonce: str) -> AsyncIterator[SourcePoint]:
    """Fix a point at which all `tables` (schema.table) can be read, marked by `nonce` in the stream.

    Raises MissingError for a table that does not exist, InvalidError without the privilege to lock one, and
    UnavailableError when the server does not answer or the locks are not granted.
    """
    import psycopg

    reader = await _connect_repeatable_read(dsn)
    try:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + LOCK_BUDGET_S
        while True:
            began_s = loop.time()
            try:
                lsns = await _mark_commit(dsn, tables, nonce, reader)
                break
            except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected) as error:
                took_s = loop.time() - began_s
                if loop.time() > until_s:
                    raise UnavailableError(
                        f"the tables could not be locked for a moment: tables={','.join(tables)}"
                        f" {await _lock_blocker(reader, tables)}.",
                        fix="End the blocking transaction, and try again.",
                    ) from error
                await asyncio.sleep(max(LOCK_PAUSE_S, took_s / LOCK_SHARE))
            except psycopg.errors.UndefinedTable as error:
                raise MissingError(f"no such table: tables={','.join(tables)} ({_first_line(error)}).") from error
            except psycopg.errors.InsufficientPrivilege as error:
                raise InvalidError(
                    f"the role may not lock the tables: {describe_dsn(dsn)} ({_first_line(error)}).",
                    fix=f"Have an administrator run: {_grant_statement(reader.info, tables)};",
                ) from error
            except psycopg.Error as error:
                raise UnavailableError(f"the source failed: {describe_dsn(dsn)} ({_first_line(error)}).") from error
        yield SourcePoint(reader, nonce, lsns)
    finally:
        await reader.close()


async def _mark_commit(
    dsn: str, tables: Sequence[str], nonce: str, reader: psycopg.AsyncConnection[Any]
) -> tuple[int, int]:
    import psycopg

    marker = await _connect_repeatable_read(dsn)
    try:
        await reader.rollback()
        await marker.execute(f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}".encode())
        # The order is always the same, so that two verifications never wait for each other.
        names = ", ".join(_quoted(t) for t in sorted(tables))
        await marker.execute(f"LOCK TABLE {names} IN SHARE MODE".encode())
        # This is the first query: the transaction's snapshot is taken here, after the locks.
        cursor = await marker.execute(
            "SELECT pg_export_snapshot(), pg_logical_emit_message(true, %s, %s)::text", (MARKER_PREFIX, nonce)
        )
        exported = await cursor.fetchone()
        assert exported is not None
        await reader.execute(f"SET TRANSACTION SNAPSHOT '{exported[0]}'".encode())
        await reader.execute("SELECT 1")
        await marker.commit()
        cursor = await marker.execute("SELECT pg_current_wal_insert_lsn()::text")
        after = await cursor.fetchone()
        assert after is not None
        return Lsn.parse(exported[1]).value, Lsn.parse(after[0]).value
    except psycopg.Error:
        await reader.rollback()
        raise
    finally:
        await marker.close()


def _grant_statement(info: psycopg.ConnectionInfo, tables: Sequence[str]) -> str:
    """Return the statement with which a role that only reads may lock the tables in SHARE mode: with one of UPDATE,
    DELETE and TRUNCATE, or MAINTAIN (https://www.postgresql.org/docs/current/sql-lock.html).
    """
    privilege = "MAINTAIN" if info.server_version >= MAINTAIN_VERSION else "UPDATE"
    return f"GRANT {privilege} ON {', '.join(_quoted(t) for t in sorted(tables))} TO {identifier(info.user)}"


async def _connect_repeatable_read(dsn: str) -> psycopg.AsyncConnection[Any]:
    """Connect in REPEATABLE READ, with the settings of the stream's sessions. Raises UnavailableError."""
    import psycopg

    try:
        connection = await psycopg.AsyncConnection.connect(dsn, connect_timeout=10)
        await connection.execute(settings_statement(session_settings(connection.info.server_version)).encode())
        await connection.commit()
    except psycopg.Error as error:
        raise UnavailableError(
            f"the source cannot be reached: {describe_dsn(dsn)} ({_first_line(error)}).",
            fix="Start it, or correct the DSN.",
        ) from error
    await connection.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
    return connection


async def _lock_blocker(reader: psycopg.AsyncConnection[Any], tables: Sequence[str]) -> str:
    """Return the oldest transaction that writes one of the tables: pid, age and query, or the gid of a prepared one."""
    cursor = await reader.execute(
        "SELECT a.pid, extract(epoch FROM clock_timestamp() - coalesce(a.xact_start, p.prepared))::int,"
        " left(a.query, 120), p.gid FROM pg_locks l LEFT JOIN pg_stat_activity a USING (pid) LEFT JOIN"
        f" pg_prepared_xacts p ON {PREPARED_LOCK_SQL.format(lock='l')}"
        " WHERE l.granted AND l.relation = ANY(%s::regclass[]) AND l.mode <> 'AccessShareLock'"
        " ORDER BY coalesce(a.xact_start, p.prepared) LIMIT 1",
        ([_quoted(table) for table in tables],),
    )
    found = await cursor.fetchone()
    await reader.rollback()
    if found is None:
        return "pid=gone"
    if found[3] is not None:
        return f"gid={found[3]!r} for_s={found[1]} ended_by='COMMIT PREPARED or ROLLBACK PREPARED'"
    return f"pid={found[0]} for_s={found[1]} query={found[2]!r}"


def _quoted(table: str) -> str:
    return qualified_identifier(*split_name(table))


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0].strip()
