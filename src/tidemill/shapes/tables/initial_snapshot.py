"""Reads a table shape's initial rows and joins them to the stream.

The caller of `load` must follow this order:

1. the consumer is registered with the router (changes are buffered from here on); 2. `load` locks the table, and then
opens a REPEATABLE READ snapshot that sees every transaction delivered before step 1 (`must_see`); 3. rows become the
base; 4. `consumer.open(snapshot)` replays the buffer through the xid filter.

Rows are PostgreSQL's text output under capture's DISPLAY_SETTINGS, since snapshot and stream must print a value alike.

Each fetch is bounded by FETCH_BYTES (or one row), and rendered in the loop share of shapes. A query that returns no
rows for STATEMENT_TIMEOUT_S is cancelled: a filter without an index must not occupy a snapshot slot forever.

Reads subsets of a captured table's shape, joined to its stream as initial rows are.

The snapshot sees every transaction that was streamed before it was opened (`must_see`), so no row is older than what a
client at the end of the log has already applied. The client drops later changes that the rows already show, by
`SubsetMetadata`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tidemill.base.errors import InvalidError, MissingError, UnavailableError
from tidemill.capture.postgres.connection import (
    DISPLAY_SETTINGS,
    identifier,
    qualified_identifier,
    session_settings,
    settings_statement,
)
from tidemill.capture.postgres.errors import permission_fix
from tidemill.capture.postgres.pg_snapshot import PgSnapshot
from tidemill.shapes.definition.planner import Compiler, SubsetReader
from tidemill.shapes.definition.subset import SubsetMetadata, SubsetRequest, SubsetScope, build_subset_sql
from tidemill.shapes.definition.table_columns import (
    DESCRIBE_SQL,
    PRESENT_SQL,
    ColumnInfo,
    PresentColumn,
    TableColumns,
    build_table_columns,
    changed_columns,
    read_present_columns,
)
from tidemill.shapes.live_shape import LiveShape
from tidemill.shapes.log.chunks import ResponseMemory
from tidemill.shapes.log.row_writer import RowWriter
from tidemill.shapes.loop_share import LoopShare, Turn
from tidemill.shapes.where import Where

if TYPE_CHECKING:
    import psycopg
    from psycopg.pq.abc import PGresult

    from tidemill.capture.changes import Relation

STATEMENT_TIMEOUT_S = 30
SESSION_SETTINGS = {**DISPLAY_SETTINGS, "statement_timeout": f"{STATEMENT_TIMEOUT_S}s"}
"""Added to the settings of every session on a captured database."""
FETCH_BYTES = 1 << 20
FIRST_ROWS = 50
MAX_FETCH_ROWS = 5_000
SAMPLED_ROWS = 20
"""Rows of each result that are measured to choose the size of the next fetch."""
VISIBILITY_RETRY_S = 0.02
VISIBILITY_TIMEOUT_S = 20.0
QUERY_ERROR_CLASSES = frozenset({"0A", "21", "22", "23", "42", "54"})
"""SQLSTATE classes that blame the query: not supported, cardinality, data, constraint, syntax, limits. A denied
permission is in class 42 too, and is not the query's fault: an administrator can grant it at any time."""
MAX_SNAPSHOTS = 4
MAX_SUBSETS = 4
"""Slots for subsets: these do not wait for shapes that load, which takes much longer."""
MAX_LOOKUPS = 2
"""Slots for catalog queries, which do not wait for snapshots. Questions about rows, for which the stream waits, have
one slot of their own."""


class TransientTableError(UnavailableError):
    """The table is about to be captured, or captured again after a change; a client that retries is served."""


class TableReplacedError(TransientTableError):
    """The name refers to another table than the captured one, or to none. The capture will detect this."""


class TableQuery(NamedTuple):
    """A query of a captured table, the values of its parameters, and the table's columns that it uses."""

    sql: str
    params: tuple[str, ...]
    columns: Collection[str]


class SnapshotFilter:
    """Decides for each transaction, in commit order, whether to apply it to a shape, or to skip it because the initial
    rows contain it. `snapshot` has its LSN. The visibility rule itself is in `capture/postgres/pg_snapshot.py`; this
    class decides until when to apply it.

    A transaction with xid ≥ xmax may be streamed before one that the snapshot sees: of two that commit at the same
    time, the first one in the WAL need not be the first to become visible. But nothing that the snapshot sees is at or
    after the end of the WAL at that time. From that LSN on nothing is skipped. The LSN decides even if the shape was
    quiet until the next xid is outside the 2³¹ window in which xids can be compared.

    `passed` is valid within one session and never stored. After a restart the stream begins at an earlier position. It
    repeats transactions that the snapshot contains and that left no item in the log of the shape.
    """

    def __init__(self, snapshot: PgSnapshot) -> None:
        self._snapshot = snapshot
        self.passed = False
        """True if all further transactions are later than the snapshot."""

    def admits(self, xid: int, commit_lsn: int) -> bool:
        if self.passed:
            return True
        if commit_lsn >= self._snapshot.lsn:
            self.passed = True
            return True
        return not self._snapshot.is_visible(xid)


class PostgresSource:
    """One captured database: catalog queries and snapshots over ordinary connections."""

    def __init__(self, dsn: str, outdated: Callable[[], None] = lambda: None) -> None:
        """Create a source. `outdated()` is called whenever TableReplacedError is raised."""
        self._dsn = dsn
        self._outdated = outdated
        self._snapshots = asyncio.Semaphore(MAX_SNAPSHOTS)
        self._lookups = asyncio.Semaphore(MAX_LOOKUPS)
        self._subsets = asyncio.Semaphore(MAX_SUBSETS)
        self._questions = asyncio.Semaphore(1)

    @asynccontextmanager
    async def _connection(self, slots: asyncio.Semaphore) -> AsyncIterator[psycopg.AsyncConnection[tuple[object, ...]]]:
        """Connect with the session settings. Raises UnavailableError if the database does not answer or fails while in
        use."""
        import psycopg

        async with slots:
            try:
                connection = await psycopg.AsyncConnection.connect(
                    self._dsn, autocommit=True, application_name="tidemill shapes"
                )
            except psycopg.Error as error:
                raise UnavailableError(f"the database does not answer: error={str(error).strip()!r}.") from error
            try:
                settings = {**session_settings(connection.info.server_version), **SESSION_SETTINGS}
                await connection.execute(settings_statement(settings).encode())
                yield connection
            except TableReplacedError:
                self._outdated()
                raise
            except psycopg.errors.InsufficientPrivilege as error:
                raise UnavailableError(
                    f"the database denied a permission: error={_error_message(error)!r}.",
                    fix=permission_fix(error.diag.source_function or ""),
                ) from error
            except psycopg.Error as error:
                if (error.sqlstate or "")[:2] in QUERY_ERROR_CLASSES:
                    raise InvalidError(_error_message(error)) from error
                raise UnavailableError(f"the database failed: error={_error_message(error)!r}.") from error
            finally:
                await connection.close()

    async def describe_table(self, relation: Relation) -> TableColumns:
        """Read the columns of a relation from the catalog. Raises TableReplacedError, UnavailableError."""
        async with self._connection(self._lookups) as connection:
            return await describe_relation(connection, relation)

    async def columns(self, relation: Relation) -> dict[str, PresentColumn]:
        """Return the columns that the table has now, by name. Raises UnavailableError.

        The stream carries generated columns only if they are stored and published.
        """
        async with self._connection(self._lookups) as connection:
            cursor = await connection.execute(PRESENT_SQL, (relation.oid,))
            return read_present_columns(await cursor.fetchall())

    async def has_old_rows(self, relation: Relation) -> bool:
        """Return whether the stream carries whole old rows of a table (captured_database.py).

        Raises TableReplacedError, UnavailableError.
        """
        async with self._connection(self._lookups) as connection:
            cursor = await connection.execute(
                "SELECT relreplident = 'f' AND relkind <> 'p' FROM pg_class WHERE oid = %s", (relation.oid,)
            )
            row = await cursor.fetchone()
            if row is None:
                raise TableReplacedError(f"the table does not exist: table={relation.name}.")
        return bool(row[0])

    @asynccontextmanager
    async def evaluation_connection(self) -> AsyncIterator[psycopg.AsyncConnection[tuple[object, ...]]]:
        """Open a connection for `remote_evaluation`. Raises UnavailableError or InvalidError, also for queries on the
        connection."""
        async with self._connection(self._questions) as connection:
            yield connection

    async def load(
        self,
        shape: LiveShape,
        info: TableColumns,
        where: Where | None,
        writer: RowWriter,
        must_see: frozenset[int],
        with_rows: bool,
        share: LoopShare,
    ) -> PgSnapshot:
        """Fill the shape's base; return the snapshot in which it was read, with its LSN. Raises UnavailableError or
        InvalidError."""
        query = _initial_query(info, where)
        async with self._connection(self._snapshots) as connection:
            snapshot = await _open_snapshot(connection, info, query.columns, must_see)
            snapshot = msgspec.structs.replace(snapshot, lsn=await _written_lsn(connection))
            if with_rows:

                def add_to_base(rows: list[bytes]) -> bool:
                    shape.log.add_base(rows)
                    shape.rows_loaded += len(rows)
                    return not shape.has_ended

                async for result in _fetch_results(connection, query):
                    await share.run_step(_RowRenderer(add_to_base, result, info.names, writer).render_slice)
                    await shape.log.wait_for_room()
                    if shape.has_ended:
                        break
            await connection.execute("COMMIT")
        return snapshot

    async def read_subset(
        self,
        info: TableColumns,
        shown: Sequence[str],
        query: TableQuery,
        writer: RowWriter,
        must_see: frozenset[int],
        share: LoopShare,
        rows: ResponseMemory,
    ) -> tuple[PgSnapshot, int]:
        """Read the rows of `query`, which selects the `shown` columns, into `rows`. Return the snapshot in which they
        were read, and an LSN after every commit that it sees.

        Raises UnavailableError, InvalidError or OverBudgetError.
        """

        def add_to_response(rendered: list[bytes]) -> bool:
            rows.add(rendered)
            return True

        async with self._connection(self._subsets) as connection:
            snapshot = await _open_snapshot(connection, info, query.columns, must_see)
            lsn = await _written_lsn(connection)
            async for result in _fetch_results(connection, query):
                await share.run_step(_RowRenderer(add_to_response, result, shown, writer).render_slice)
            await connection.execute("COMMIT")
        return snapshot, lsn


async def describe_relation(
    connection: psycopg.AsyncConnection[tuple[object, ...]], relation: Relation
) -> TableColumns:
    """Read the columns of a relation from the catalog. Raises TableReplacedError."""
    cursor = await connection.execute(DESCRIBE_SQL, (relation.oid,))
    rows = [ColumnInfo(*row) for row in await cursor.fetchall()]  # type: ignore[arg-type]
    try:
        return build_table_columns(relation, rows)
    except MissingError as error:
        raise TableReplacedError(error.message) from error


async def _open_snapshot(
    connection: psycopg.AsyncConnection[tuple[object, ...]],
    info: TableColumns,
    used: Collection[str],
    must_see: frozenset[int],
) -> PgSnapshot:
    """Begin a transaction with a snapshot that sees `must_see`, and check that the table is still the captured one, and
    that the columns `used` are as captured. The lock keeps them so until the transaction ends.

    A commit is in the WAL shortly before it is visible, and long before if it waits for a synchronous standby. Another
    process may have confirmed such a commit, so PostgreSQL is asked for them. Raises TableReplacedError,
    UnavailableError.

    The table is locked before the snapshot is taken: TRUNCATE and rewrites leave a table empty for older snapshots
    (https://www.postgresql.org/docs/current/mvcc-caveats.html), while the stream still delivers what changed in it
    before.
    """
    deadline = asyncio.get_running_loop().time() + VISIBILITY_TIMEOUT_S
    # Only once, and before the snapshot: later transactions that wait for a standby are delivered by the stream.
    must_see |= await _waiting_for_standbys(connection, info.relation.oid)
    while True:
        await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        await _lock_table(connection, info)
        cursor = await connection.execute("SELECT pg_current_snapshot()::text")
        row = await cursor.fetchone()
        assert row is not None
        snapshot = PgSnapshot.parse(str(row[0]))
        unseen = [xid for xid in must_see if not snapshot.is_visible(xid)]
        if not unseen:
            await _check_identity(connection, info.relation)
            await _check_columns(connection, info.relation, used)
            return snapshot
        await connection.execute("ROLLBACK")
        if asyncio.get_running_loop().time() > deadline:
            raise UnavailableError(
                f"a streamed transaction is not visible yet: xid={unseen[0]}.", fix="Check synchronous standbys."
            )
        await asyncio.sleep(VISIBILITY_RETRY_S)


async def _waiting_for_standbys(connection: psycopg.AsyncConnection[tuple[object, ...]], oid: int) -> frozenset[int]:
    """Return the transactions that changed the table, are in the WAL, and wait for a synchronous standby to become
    visible.

    A role without pg_read_all_stats sees only its own sessions.
    """
    cursor = await connection.execute(
        "SELECT a.backend_xid::text FROM pg_stat_activity a WHERE a.wait_event = 'SyncRep'"
        " AND current_setting('synchronous_standby_names') <> '' AND a.backend_xid IS NOT NULL"
        " AND EXISTS (SELECT FROM pg_locks l WHERE l.pid = a.pid AND l.locktype = 'relation'"
        " AND l.mode NOT IN ('AccessShareLock', 'RowShareLock')"
        " AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        " AND l.relation IN (SELECT %s::oid UNION SELECT relid FROM pg_partition_tree(%s::oid)))",
        (oid, oid),
    )
    return frozenset(int(str(xid)) for (xid,) in await cursor.fetchall())


async def _written_lsn(connection: psycopg.AsyncConnection[tuple[object, ...]]) -> int:
    """Return an LSN above every commit that the snapshot sees; called after the snapshot was opened.

    It is the insert position: an asynchronous commit is visible before its WAL is written. On a standby it is the
    replay position.
    """
    cursor = await connection.execute(
        "SELECT ((CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_insert_lsn() END)"
        " - '0/0'::pg_lsn)::text"
    )
    row = await cursor.fetchone()
    assert row is not None
    return int(str(row[0]))


async def _lock_table(connection: psycopg.AsyncConnection[tuple[object, ...]], info: TableColumns) -> None:
    import psycopg

    try:
        await connection.execute(f"LOCK TABLE {info.scope} IN ACCESS SHARE MODE".encode())
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName) as error:
        raise TableReplacedError(f"the table is gone: table={info.relation.name}.") from error
    except psycopg.errors.WrongObjectType as error:
        raise TableReplacedError(
            f"the table was re-created and is not captured yet: table={info.relation.name}."
        ) from error


async def _check_identity(connection: psycopg.AsyncConnection[tuple[object, ...]], relation: Relation) -> None:
    """Check that the name still refers to the relation whose changes are routed; a re-created table has another oid."""
    name = qualified_identifier(relation.schema, relation.table)
    cursor = await connection.execute("SELECT to_regclass(%s)::oid::bigint", (name,))
    row = await cursor.fetchone()
    oid = row[0] if row else None
    if oid is None:
        raise TableReplacedError(f"the table is gone: table={relation.name}.")
    if oid != relation.oid:
        raise TableReplacedError(f"the table was re-created and is not captured yet: table={relation.name} oid={oid}.")


async def _check_columns(
    connection: psycopg.AsyncConnection[tuple[object, ...]], relation: Relation, used: Collection[str]
) -> None:
    """Check that the columns `used` have the names and types of the relation, or wider types. With others the query
    would fail, or read values that the relation does not describe, until the capture has noticed the change.
    """
    cursor = await connection.execute(PRESENT_SQL, (relation.oid,))
    present = read_present_columns(await cursor.fetchall())
    if other := [name for name in changed_columns(relation, present, exact=False) if name in used]:
        raise TableReplacedError(f"the table was redefined: table={relation.name} columns={','.join(other)}.")


class _RowRenderer:
    """Renders the rows of one result in slices; `take` stores them, and returns whether to continue."""

    def __init__(
        self, take: Callable[[list[bytes]], bool], result: PGresult, names: Sequence[str], writer: RowWriter
    ) -> None:
        self._take = take
        self._result = result
        self._names = names
        self._writer = writer
        self._next = 0

    def render_slice(self, turn: Turn) -> bool:
        result, names, width = self._result, self._names, range(len(self._names))
        rows: list[bytes] = []
        while self._next < result.ntuples:
            values = (result.get_value(self._next, column) for column in width)
            row = dict(zip(names, (None if v is None else bytes(v).decode() for v in values), strict=True))
            rows.append(self._writer.render_base_row(row))
            self._next += 1
            if turn.is_over:
                break
        return self._take(rows) and self._next < result.ntuples


def _initial_query(info: TableColumns, where: Where | None) -> TableQuery:
    """Return the query of a shape's initial rows."""
    query = f"SELECT {', '.join(map(identifier, info.names))} FROM {info.scope}"
    if where is None:
        return TableQuery(query, (), info.names)
    return TableQuery(f"{query} WHERE ({where.sql})", where.params, info.names)


async def _fetch_results(
    connection: psycopg.AsyncConnection[tuple[object, ...]], query: TableQuery
) -> AsyncIterator[PGresult]:
    """Yield the rows as text, FETCH_BYTES at a time, through a server-side cursor; the where clause runs in the
    database.

    The query is planned with an empty search path, so that names refer to PostgreSQL's own operators and functions
    only. Values are printed under the session's own search path, as in the stream.
    """
    import psycopg

    raw = psycopg.AsyncRawCursor(connection)
    await connection.execute("SET LOCAL search_path = pg_catalog")
    await raw.execute(f"DECLARE shape NO SCROLL CURSOR FOR {query.sql}", query.params or None)
    await connection.execute("SET LOCAL search_path TO DEFAULT")
    rows = FIRST_ROWS
    while True:
        await raw.execute(f"FETCH {rows} FROM shape")
        result = raw.pgresult
        assert result is not None
        if result.ntuples == 0:
            return
        sampled = range(0, result.ntuples, max(1, result.ntuples // SAMPLED_ROWS))
        values = (result.get_value(row, column) for row in sampled for column in range(result.nfields))
        size = sum(len(value) for value in values if value is not None)
        rows = max(1, min(MAX_FETCH_ROWS, FETCH_BYTES * len(sampled) // max(1, size)))
        yield result


def _error_message(error: psycopg.Error) -> str:
    primary = error.diag.message_primary
    return primary if primary else str(error).strip()


class SubsetBounds(msgspec.Struct, frozen=True):
    """Rows and columns that a subset may have. `columns` are shown, () = all; `queryable` may be used to filter and
    order, () = all."""

    where: Where | None
    columns: tuple[str, ...]
    queryable: tuple[str, ...]


def subset_reader(
    source: PostgresSource,
    info: TableColumns,
    bounds: SubsetBounds,
    compiler: Compiler,
    share: LoopShare,
    recent: Callable[[], frozenset[int]],
) -> SubsetReader:
    """Return a reader of subsets."""
    relation, where = info.relation, bounds.where
    shown = bounds.columns or info.names
    params_count = len(where.params) if where is not None else 0
    scope = SubsetScope(relation.schema, relation.table, info.where_types(), bounds.queryable, params_count)

    async def read(request: SubsetRequest, rows: ResponseMemory, mark: int) -> SubsetMetadata:
        subset = await compiler.compile_subset(request, scope)
        parts = [part for part in (where, subset.where, subset.order_by) if part is not None]
        used = {*shown, *info.key, *(name for part in parts for name in part.columns)}
        query = TableQuery(*build_subset_sql(shown, info.scope, info.key, where, subset), used)
        marks = {"snapshot_mark": mark}
        writer = RowWriter(relation.schema, relation.table, shown, info.key, info.booleans, marks=marks)
        snapshot, lsn = await source.read_subset(info, shown, query, writer, recent(), share, rows)
        in_progress = [str(xid) for xid in sorted(snapshot.in_progress)]
        return SubsetMetadata(mark, str(snapshot.xmin), str(snapshot.xmax), in_progress, str(lsn))

    return read
