"""The publication of a capture, and the only way in which tables are added to it.

Invariant (publish with identity): a table is published and set to REPLICA IDENTITY FULL in one transaction, because
without an identity the UPDATEs and DELETEs of a published table fail. If identities are used unchanged
(capture.NAME.identity), none is altered, and a table is published only if its identity includes its key, which is
checked under the lock that preserves it. On PostgreSQL 18, stored generated columns are published from the start, and a
table with virtual ones is never passed here (table_discovery.refusal), because both would make UPDATEs and DELETEs fail
too. The same holds for other publications (foreign_publications.py): if one does not permit a full identity, the table
does not get it.

Invariant (wait for writers): a lock is acquired first and waits for writers that began before the table was published,
because their rows would be in neither snapshot nor stream (electric #4773). It is immediately the strongest lock that
is needed: ACCESS EXCLUSIVE if an identity is altered, otherwise SHARE. A session that upgrades from SHARE deadlocks
with each transaction that has read the table and now wants to write it. PostgreSQL ends that transaction immediately,
however short our wait is. A fixed order, and ADD before ALTER, prevent deadlocks of two configurators.

Writers of a table that is already published are waited for as well when the table is copied (`settle`), but without a
lock, which a read-only role cannot acquire. An administrator may have published the table recently. In a re-snapshot, a
commit that was decoded and confirmed may not be visible yet, and be in neither the copy nor the replayed stream. A
resumed copy was settled when it began, and everything confirmed since then is in its side topic (wal_hold.py), so the
changes of present writers arrive in the stream.

Invariant (short waits): a session that waits for a lock makes all later sessions wait too, and for ACCESS
EXCLUSIVE even readers. So each wait is short and waits are far apart: others are delayed for at most LOCK_TIMEOUT_MS
per LOCK_PAUSE_S, 5 % of the time.

Invariant (isolated failures): the failure of one table is reported for that table, and the others continue.

Invariant (restorable identity): the identity of a table is recorded before it is altered, so that `capture drop` can
restore it after any crash. Only FULL is ever reverted: another identity was set by another client since. It is restored
only if no publication makes UPDATE and DELETE fail with it (foreign_publications.py).

Invariant (recorded publication): the catalogue rows under which a table is published are recorded, by oid and xmin,
before the table is copied. Altering a publication writes a new row version, even if it is altered back immediately.
From then on changes may be missing from the stream, and the table is re-snapshotted (continuity_check.py).

A manual capture alters nothing. A table that would need an alteration is refused with the statements to run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Container, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import msgspec
import structlog
from msgspec.structs import replace

from tidemill.base.errors import InvalidError, TidemillError, UnavailableError, UnknownOutcomeError
from tidemill.capture.catalog.foreign_publications import IdentityFailure, find_identity_failures, find_objections
from tidemill.capture.catalog.table_discovery import (
    GENERATED_PUBLISHED,
    MAX_STATEMENTS_SHOWN,
    TableInfo,
    find_keyless_identities,
)
from tidemill.capture.config import CaptureConfig
from tidemill.capture.postgres.connection import PgConnection, identifier, literal, qualified_identifier
from tidemill.capture.postgres.errors import SqlError
from tidemill.capture.setup.blockers import Blocker, find_table_blocker, find_writers
from tidemill.capture.setup.statements import (
    add_table_statement,
    create_publication_statement,
    find_missing_statements,
    full_identity_statement,
    generated_columns_statement,
    publication_target,
)
from tidemill.metastore.catalogue import CaptureTableRow

log = structlog.get_logger()

LOCK_TIMEOUT_MS = 50
LOCK_PAUSE_S = 1.0
LOCK_ATTEMPTS = 5
"""Attempts to lock one table while tables are copied. After that the table is refused, and retried later."""
SETTLE_POLL_S = 0.1
SETTLE_POLLS = 4
"""Number of checks for writers of a published table, per attempt."""
LOCK_SQLSTATES = ("55P03", "40P01")
"""lock_not_available, deadlock_detected"""


class TableLockedError(UnavailableError):
    """The locks of one table were not available in the permitted time. `held_by`: the blocker, for a stage status."""

    def __init__(self, table: TableInfo, holder: Blocker | None) -> None:
        super().__init__(
            f"the table is locked by others: table={table.name} {holder or 'pid=gone'}.",
            fix=f"{holder.end if holder else 'End that transaction'}; the table is added once the lock is free.",
        )
        self.held_by = holder.name if holder is not None else ""


class SetupRequiredError(InvalidError):
    """A table lacks something that its capture needs and must not (manual) or cannot set up itself."""

    def __init__(self, table: TableInfo, statements: Sequence[str]) -> None:
        some = statements[:MAX_STATEMENTS_SHOWN]
        rest = f" and {len(statements) - len(some)} more, see `tidemill doctor`" if len(some) < len(statements) else ""
        super().__init__(
            f"the table is not prepared for its capture, which must not prepare it itself: table={table.name}"
            f" statements={len(statements)}.",
            fix=f"Run {'; '.join(some)};{rest}",
        )


class PublishedTable(NamedTuple):
    """A table in the publication: its name in SQL, and the catalogue rows that publish it."""

    name: str
    rows: tuple[int, ...] = ()


class IdentityConflictError(InvalidError):
    """A publication makes the table's UPDATE and DELETE fail with the identity that it would get."""


class IdentityRequiredError(InvalidError):
    """`publications` make UPDATE or DELETE of a relation fail with the identity that was to be restored."""

    def __init__(self, relation: str, before: str, found: Sequence[IdentityFailure]) -> None:
        self.publications = {each.publication for each in found}
        super().__init__(
            f"an UPDATE or DELETE would fail with the original identity: relation={relation} identity={before!r}"
            f" publications={','.join(sorted(self.publications))} cause={found[0].cause!r}.",
            fix=f"Remove it from those publications, then run ALTER TABLE {relation} REPLICA IDENTITY {before};",
        )


class PublishResult(msgspec.Struct, frozen=True):
    """Result of publishing tables. `newly`: oids that were not published before. `failed`: error of each table that
    failed, by name.
    """

    newly: frozenset[int]
    failed: dict[str, TidemillError]


async def read_published_tables(
    wire: PgConnection, publication: str, *, manual: bool = False
) -> dict[int, PublishedTable] | None:
    """Return the tables of the publication by oid; None if there is no such publication.

    Raises InvalidError if the publication is unsuitable: it lacks operations, or does not publish through the partition
    root. In a manual capture also if it lacks generated columns, which are added otherwise.
    """
    generated = "pubgencols = 's'" if wire.server_version >= GENERATED_PUBLISHED else "true"
    rows = await wire.query(
        f"SELECT pubinsert AND pubupdate AND pubdelete AND pubtruncate, pubviaroot, puballtables, {generated}"
        f" FROM pg_publication WHERE pubname = {literal(publication)}"
    )
    if not rows:
        return None
    if rows[0][:3] != ("t", "t", "f"):
        raise InvalidError(
            f"a publication of this name exists with other options: publication={publication}.",
            fix=f"Run DROP PUBLICATION {identifier(publication)}; "
            + (
                f"{create_publication_statement(publication, wire.server_version)};"
                if manual
                else "it is created again as needed."
            ),
        )
    if rows[0][3] != "t":
        # Created before the server was upgraded.
        statement = generated_columns_statement(publication)
        if manual:
            raise InvalidError(
                f"the publication lacks generated columns, and its capture is manual: publication={publication}.",
                fix=f"Run {statement};",
            )
        await wire.query(statement)
    tables = await wire.query(
        "SELECT c.oid, n.nspname, c.relname, c.relkind, p.oid, p.xmin, r.oid, r.xmin"
        " FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid"
        " JOIN pg_class c ON c.oid = r.prrelid JOIN pg_namespace n ON n.oid = c.relnamespace"
        f" WHERE p.pubname = {literal(publication)}"
    )
    return {
        int(oid or 0): PublishedTable(
            ("" if kind == "p" else "ONLY ") + qualified_identifier(schema or "", table or ""),
            tuple(int(each or 0) for each in by),
        )
        for oid, schema, table, kind, *by in tables
    }


async def find_unpublished(wire: PgConnection, publication: str, oids: Collection[int]) -> set[int]:
    """Return those of these tables that exist and are not in the publication, as of one moment. Dropping a table
    removes it from the database and the publication atomically, but possibly between two queries.
    """
    if not oids:
        return set()
    rows = await wire.query(
        f"SELECT c.oid FROM pg_class c WHERE c.oid IN ({', '.join(str(int(oid)) for oid in oids)}) AND NOT EXISTS ("
        "SELECT FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid"
        f" WHERE r.prrelid = c.oid AND p.pubname = {literal(publication)})"
    )
    return {int(oid or 0) for (oid,) in rows}


def not_published_error(publication: str, version: int) -> InvalidError:
    """Return the error for a manual capture without a publication, which must not create one."""
    return InvalidError(
        f"there is no publication, and its capture is manual: publication={publication}.",
        fix=f"Run {create_publication_statement(publication, version)}; and then what `tidemill doctor` prints.",
    )


async def create_publication(wire: PgConnection, publication: str) -> None:
    """Create the publication without tables. Raises InvalidError if the role lacks the privilege."""
    statement = create_publication_statement(publication, wire.server_version)
    try:
        await wire.query(statement)
    except InvalidError as error:
        raise InvalidError(
            f"the publication cannot be created: publication={publication} error={error.message}",
            fix="Grant the role CREATE on the database and let it own the captured tables, or have an administrator run"
            f" what `tidemill doctor` prints, first of all: {statement}.",
        ) from error


Identities = dict[int, tuple[str, str]]
"""oid → (its name in SQL, its identity in SQL)"""


class IdentityStore(Protocol):
    """Durable storage of identities of a table and its partitions. Its methods may raise UnknownOutcomeError."""

    async def store_identities(self, name: str, identities: Identities) -> None:
        """Store identities that are about to be replaced by FULL, and have to be restored later."""

    async def store_asked_identities(self, name: str, identities: Identities) -> None:
        """Store identities that an administrator is asked to replace by FULL."""


class PublishRequest(msgspec.Struct, frozen=True):
    """Tables to publish, and the oids of published tables. `settle`: oids of published tables whose copy is about to
    begin. `attempts`: for each lock.
    """

    tables: Sequence[TableInfo]
    published: Collection[int]
    settle: Container[int] = ()
    attempts: int = 1


def with_asked_identities(row: CaptureTableRow, identities: Identities) -> CaptureTableRow:
    """Return the row with the identities that an administrator is asked to replace by FULL. Identities that the capture
    itself has to restore remain as they were noted.
    """
    new = {oid: noted for oid, noted in identities.items() if oid not in row.identities}
    return replace(row, identities_asked={**row.identities_asked, **new})


async def publish_tables(
    wire: PgConnection,
    config: CaptureConfig,
    request: PublishRequest,
    store: IdentityStore,
    begin_table: Callable[[int], None] = lambda _: None,
) -> PublishResult:
    """Publish each table that is not yet published, with a full identity. `begin_table(n)`: the nth table begins.
    Raises only if the connection breaks, and the errors of `store`.
    """
    newly: set[int] = set()
    failed: dict[str, TidemillError] = {}
    for number, table in enumerate(request.tables, 1):
        begin_table(number)
        try:
            locked = await _publish_table(wire, config, table, request, store)
            if not locked and table.oid in request.settle:
                await _wait_for_writers(wire, table, request.attempts)
        except UnavailableError as error:
            if not isinstance(error, SqlError | TableLockedError):
                raise
            failed[table.name] = error
        except UnknownOutcomeError:
            raise  # it is unknown what was stored: not an error of PostgreSQL
        except TidemillError as error:
            known = isinstance(error, SetupRequiredError | IdentityConflictError)
            failed[table.name] = error if known else await _explain_failure(wire, config, table, error)
        else:
            newly |= {table.oid} - {*request.published}
    return PublishResult(frozenset(newly), failed)


async def _explain_failure(
    wire: PgConnection, config: CaptureConfig, table: TableInfo, error: TidemillError
) -> InvalidError:
    missing = await find_missing_statements(wire, config, [table])
    run = f"Let the role own {table.name}, or have an administrator run: {'; '.join(missing)};" if missing else ""
    return InvalidError(
        f"the table cannot be published: table={table.name} error={error.message}", fix=run or error.fix
    )


async def unpublish_table(wire: PgConnection, config: CaptureConfig, name: str) -> bool:
    """Remove a table from the publication (`name` as in Entry). Returns False if its lock was not available."""
    drop = f"ALTER PUBLICATION {identifier(config.publication)} DROP TABLE {name}"
    try:
        await _run_transaction(wire, [drop])
    except TidemillError as error:
        if isinstance(error, UnavailableError) and not isinstance(error, SqlError):
            raise
        log.warning("table not removed from the publication yet", capture=config.name, table=name, cause=str(error))
        return False
    log.info("table is no longer published", capture=config.name, table=name)
    return True


async def _publish_table(
    wire: PgConnection,
    config: CaptureConfig,
    table: TableInfo,
    request: PublishRequest,
    store: IdentityStore,
) -> bool:
    """Publish one table. Returns True if its lock was acquired, False if nothing had to be done. Raises
    SetupRequiredError.
    """
    name, published, attempts = publication_target(table), table.oid in request.published, request.attempts
    for attempt in range(1, attempts + 1):
        earlier = await find_partial_identities(wire, table.oid) if config.requires_full_identity else {}
        alter = [full_identity_statement(name) for name, _ in earlier.values()]
        add = [] if published else [add_table_statement(config.publication, table)]
        if config.manual and (add or alter):
            if earlier:
                await store.store_asked_identities(table.name, earlier)
            raise SetupRequiredError(table, await find_missing_statements(wire, config, [table]) or [*add, *alter])
        if not add and not alter:
            return False
        if earlier:
            await store.store_identities(table.name, earlier)
        sound = (
            partial(_check_objections, wire, config, table)
            if config.requires_full_identity
            else partial(_check_key_identity, wire, table)
        )
        try:
            mode = "ACCESS EXCLUSIVE" if alter else "SHARE"
            await _run_transaction(wire, [f"LOCK TABLE {name} IN {mode} MODE", *add, *alter], sound)
            return True
        except SqlError as error:
            if error.sqlstate not in LOCK_SQLSTATES:
                raise
            if attempt == attempts:
                raise TableLockedError(table, await find_table_blocker(wire, table.oid)) from error
            await asyncio.sleep(LOCK_PAUSE_S)
    return False


async def _check_objections(wire: PgConnection, config: CaptureConfig, table: TableInfo) -> None:
    """Check other publications under the table's lock (foreign_publications.py). Raises IdentityConflictError."""
    objection = (await find_objections(wire, config)).get(table.oid)
    if objection is not None and objection.refuses:
        raise IdentityConflictError(objection.reason, fix=objection.fix)


async def _check_key_identity(wire: PgConnection, table: TableInfo) -> None:
    """Check the identity under the table's lock. Raises SetupRequiredError if an UPDATE or DELETE would not identify
    its row.
    """
    missing = (await find_keyless_identities(wire, [table.oid])).values()
    if missing:
        raise SetupRequiredError(table, [statement for each in missing for statement in each])


async def _wait_for_writers(wire: PgConnection, table: TableInfo, attempts: int) -> None:
    """Wait until all transactions that wrote to the table at the beginning have ended. Raises TableLockedError, sooner
    than for a lock, because no session waits behind this, and it is retried as soon as the reported blocker is gone
    (table_adder.py).
    """
    behind = await find_writers(wire, table.oid)
    for _ in range(attempts * SETTLE_POLLS):
        if not behind:
            return
        await asyncio.sleep(SETTLE_POLL_S)
        behind &= await find_writers(wire, table.oid)
    if behind:
        raise TableLockedError(table, await find_table_blocker(wire, table.oid))


async def find_partial_identities(wire: PgConnection, oid: int) -> Identities:
    """Return the table and its partitions that do not log whole old rows (WAL uses the identity of the partition)."""
    rows = await wire.query(
        f"WITH RECURSIVE tree(oid) AS (SELECT {oid}::oid UNION ALL"
        " SELECT i.inhrelid FROM pg_inherits i JOIN pg_class p ON p.oid = i.inhparent AND p.relkind = 'p'"
        " JOIN tree t ON i.inhparent = t.oid)"
        " SELECT c.oid, n.nspname, c.relname, CASE c.relreplident WHEN 'n' THEN 'NOTHING' WHEN 'i' THEN (SELECT"
        " 'USING INDEX ' || quote_ident(i.relname) FROM pg_index x JOIN pg_class i ON i.oid = x.indexrelid"
        " WHERE x.indrelid = c.oid AND x.indisreplident) END"
        " FROM tree JOIN pg_class c USING (oid) JOIN pg_namespace n"
        " ON n.oid = c.relnamespace WHERE c.relreplident <> 'f' ORDER BY 2, 3"
    )
    # If its index was dropped, a table acts as with NOTHING; DEFAULT is the identity that works.
    return {
        int(found or 0): (qualified_identifier(schema or "", name or ""), before or "DEFAULT")
        for found, schema, name, before in rows
    }


async def restore_identity(wire: PgConnection, oid: int, before: str, *, attempts: int) -> str:
    """Restore the identity that a table or partition had, and return its present name in SQL. Returns "" if nothing has
    to be restored: it was dropped, or another client set another identity. Raises IdentityRequiredError, and SqlError
    if its lock is not available, or PostgreSQL rejects the identity.
    """
    for attempt in range(1, attempts + 1):
        rows = await wire.query(
            "SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
            f" WHERE c.oid = {oid} AND c.relreplident = 'f'"
        )
        if not rows:
            return ""
        name = qualified_identifier(rows[0][0] or "", rows[0][1] or "")
        check = partial(_check_identity_allowed, wire, oid, name, before)
        await check()  # no session waits behind this check
        try:
            lock = f"LOCK TABLE ONLY {name} IN ACCESS EXCLUSIVE MODE"
            await _run_transaction(wire, [lock, f"ALTER TABLE ONLY {name} REPLICA IDENTITY {before}"], check)
            return name
        except SqlError as error:
            if error.sqlstate not in LOCK_SQLSTATES or attempt == attempts:
                raise
            await asyncio.sleep(LOCK_PAUSE_S)
    return ""


async def _check_identity_allowed(wire: PgConnection, oid: int, name: str, before: str) -> None:
    found = await find_identity_failures(wire, [(oid, before)])
    if found:
        raise IdentityRequiredError(name, before, found)


async def _run_transaction(
    wire: PgConnection, statements: Sequence[str], sound: Callable[[], Awaitable[None]] | None = None
) -> None:
    """Run one transaction that waits for each lock for at most LOCK_TIMEOUT_MS. `sound` is called after the first
    statement, and raises if the others must not run.
    """
    await wire.query("BEGIN")
    try:
        await wire.query(f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}")
        for number, statement in enumerate(statements):
            if number == 1 and sound is not None:
                await sound()
            await wire.query(statement)
        await wire.query("COMMIT")
    except TidemillError:
        await wire.query("ROLLBACK")
        raise
