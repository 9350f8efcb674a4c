"""Reads a table shape's initial rows and joins them to the stream.

Order matters, and is the caller's contract with `load`:

1. the consumer is registered with the router (changes are buffered from here on);
2. `load` opens a REPEATABLE READ snapshot that sees every transaction delivered before 1 (`must_see`);
3. rows become the base; 4. `consumer.open(snapshot)` replays the buffer through the xid filter.

Rows are PostgreSQL's text output under capture's DISPLAY_SETTINGS: snapshot and stream must spell a value alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tidemill.base.errors import Invalid, Missing, Unavailable
from tidemill.capture.wire.connection import DISPLAY_SETTINGS
from tidemill.shapes.describe import DESCRIBE_SQL, ColumnInfo, TableInfo, table_info
from tidemill.shapes.live import LiveShape
from tidemill.shapes.rows import RowWriter
from tidemill.shapes.stitch import PgSnapshot
from tidemill.shapes.where import Where

if TYPE_CHECKING:
    import psycopg

    from tidemill.capture.changes import Relation

SESSION_SETTINGS = {
    **DISPLAY_SETTINGS,
    "statement_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
}
FETCH_ROWS = 2_000
VISIBILITY_RETRY_S = 0.02
VISIBILITY_TIMEOUT_S = 20.0
SNAPSHOTS_AT_ONCE = 4


def quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


class PostgresSource:
    """One captured database: catalogue look-ups and snapshots over ordinary connections."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._slots = asyncio.Semaphore(SNAPSHOTS_AT_ONCE)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[psycopg.AsyncConnection[tuple[object, ...]]]:
        """Raises Unavailable when the database does not answer or fails while in use."""
        import psycopg

        options = " ".join(f"-c {name}={value.replace(' ', chr(92) + ' ')}" for name, value in SESSION_SETTINGS.items())
        async with self._slots:
            try:
                connection = await psycopg.AsyncConnection.connect(
                    self._dsn, autocommit=True, options=options, application_name="tidemill shapes"
                )
            except psycopg.Error as error:
                raise Unavailable(f"the database does not answer: error={str(error).strip()!r}.") from error
            try:
                yield connection
            except (psycopg.errors.DataError, psycopg.errors.ProgrammingError) as error:
                raise Invalid(_message(error)) from error
            except psycopg.Error as error:
                raise Unavailable(f"the database failed: error={_message(error)!r}.") from error
            finally:
                await connection.close()

    async def describe(self, relation: Relation) -> TableInfo:
        async with self._connection() as connection:
            cursor = await connection.execute(DESCRIBE_SQL, (relation.oid,))
            rows = [ColumnInfo(*row) for row in await cursor.fetchall()]  # type: ignore[arg-type]
        return table_info(relation, rows)

    async def load(
        self,
        shape: LiveShape,
        info: TableInfo,
        where: Where | None,
        writer: RowWriter,
        must_see: frozenset[int],
        with_rows: bool,
    ) -> PgSnapshot:
        """Fill the shape's base; returns the snapshot it was read in. Raises Unavailable or Invalid."""
        async with self._connection() as connection:
            snapshot = await _open_snapshot(connection, must_see)
            await _check_identity(connection, info.relation)
            if with_rows:
                async for rows in _rows(connection, info, where):
                    shape.log.add_base([writer.base_row(row) for row in rows])
                    shape.rows_loaded += len(rows)
            await connection.execute("COMMIT")
        return snapshot


async def _open_snapshot(
    connection: psycopg.AsyncConnection[tuple[object, ...]], must_see: frozenset[int]
) -> PgSnapshot:
    """BEGIN, with a snapshot that sees `must_see`: a commit is in the WAL shortly before it is visible."""
    deadline = asyncio.get_running_loop().time() + VISIBILITY_TIMEOUT_S
    while True:
        await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        cursor = await connection.execute("SELECT pg_current_snapshot()::text")
        row = await cursor.fetchone()
        assert row is not None
        snapshot = PgSnapshot.parse(str(row[0]))
        unseen = [xid for xid in must_see if not snapshot.sees(xid)]
        if not unseen:
            return snapshot
        await connection.execute("ROLLBACK")
        if asyncio.get_running_loop().time() > deadline:
            raise Unavailable(
                f"a streamed transaction stays invisible: xid={unseen[0]}.", fix="Check synchronous standbys."
            )
        await asyncio.sleep(VISIBILITY_RETRY_S)


async def _check_identity(connection: psycopg.AsyncConnection[tuple[object, ...]], relation: Relation) -> None:
    """The name must still mean the relation whose changes are routed; a table made anew has another oid."""
    name = f"{quote(relation.schema)}.{quote(relation.table)}"
    cursor = await connection.execute("SELECT to_regclass(%s)::oid::bigint", (name,))
    row = await cursor.fetchone()
    oid = row[0] if row else None
    if oid is None:
        raise Missing(f"the table is gone: table={relation.name}.")
    if oid != relation.oid:
        raise Unavailable(f"the table was made anew and is not captured yet: table={relation.name} oid={oid}.")


async def _rows(
    connection: psycopg.AsyncConnection[tuple[object, ...]], info: TableInfo, where: Where | None
) -> AsyncIterator[list[dict[str, str | None]]]:
    """Batches of rows as text, through a server-side cursor; the where clause runs in the database."""
    import psycopg

    names = info.names
    relation = info.relation
    query = f"SELECT {', '.join(map(quote, names))} FROM {quote(relation.schema)}.{quote(relation.table)}"
    params: tuple[str, ...] = ()
    if where is not None:
        query += f" WHERE ({where.sql})"
        params = where.params
    raw = psycopg.AsyncRawCursor(connection)
    await raw.execute(f"DECLARE shape NO SCROLL CURSOR FOR {query}", params or None)
    width = range(len(names))
    while True:
        await raw.execute(f"FETCH {FETCH_ROWS} FROM shape")
        result = raw.pgresult
        assert result is not None
        if result.ntuples == 0:
            return
        batch: list[dict[str, str | None]] = []
        for index in range(result.ntuples):
            values = (result.get_value(index, column) for column in width)
            batch.append(dict(zip(names, (None if v is None else bytes(v).decode() for v in values), strict=True)))
        yield batch
        await asyncio.sleep(0)


def _message(error: psycopg.Error) -> str:
    primary = error.diag.message_primary
    return primary if primary else str(error).strip()
