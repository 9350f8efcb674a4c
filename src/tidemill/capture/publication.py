"""The publication of a capture, and the one way in which a table gets into it.

P1  A table is published and given REPLICA IDENTITY FULL in one transaction: published without an identity, its
    UPDATEs and DELETEs would fail. On PostgreSQL 18 stored generated columns are published from the start, and
    a table with virtual ones is never given here (tables.refusal): both would make them fail, too.
P2  LOCK … IN SHARE MODE comes first and waits out writers that began before the table was published: rows of
    theirs would be in neither snapshot nor stream (electric #4773). A fixed order, and ADD before ALTER, keep two
    configurators from deadlock.
P3  Whoever waits for a lock makes every later writer wait behind it. So each wait is short and far from the next:
    writers are delayed for at most LOCK_TIMEOUT_MS in LOCK_PAUSE_S, 5 % of the time.
P4  One table's failure is that table's: it is told, and the others go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import structlog

from tidemill.base.errors import Invalid, TidemillError, Unavailable
from tidemill.capture.config import CaptureConfig
from tidemill.capture.holders import Holder, table_holder
from tidemill.capture.tables import GENERATED_PUBLISHED, TableInfo
from tidemill.capture.wire.connection import Wire, identifier, literal, qualified
from tidemill.capture.wire.errors import SqlError

log = structlog.get_logger()

LOCK_TIMEOUT_MS = 50
LOCK_PAUSE_S = 1.0
LOCK_ATTEMPTS = 5
"""For the lock of one table while tables are copied; then that table is refused, and tried again later."""
LOCKED = ("55P03", "40P01")
"""lock_not_available, deadlock_detected"""


class Blocked(Unavailable):
    """The locks of one table could not be had in the time allowed. `held_by`: who has them, for a mark."""

    def __init__(self, table: TableInfo, holder: Holder | None) -> None:
        super().__init__(
            f"the table is locked by others: table={table.name} {holder or 'pid=gone'}.",
            fix="End that transaction; the table is taken in as soon as the lock is free.",
        )
        self.held_by = holder.name if holder is not None else ""


class Published(msgspec.Struct, frozen=True):
    """`newly`: oids that were not published before; `failed`: by name, what one table's statements ended with."""

    newly: frozenset[int]
    failed: dict[str, TidemillError]


async def published_tables(wire: Wire, publication: str) -> dict[int, str] | None:
    """oid → how SQL names it, of what the publication holds; None when there is no such publication.

    Raises Invalid when it is one that cannot serve (not all operations, or not through the partition root).
    """
    generated = "pubgencols = 's'" if wire.server_version >= GENERATED_PUBLISHED else "true"
    rows = await wire.query(
        f"SELECT pubinsert AND pubupdate AND pubdelete AND pubtruncate, pubviaroot, puballtables, {generated}"
        f" FROM pg_publication WHERE pubname = {literal(publication)}"
    )
    if not rows:
        return None
    if rows[0][:3] != ("t", "t", "f"):
        raise Invalid(
            f"a publication of this name exists with other options: publication={publication}.",
            fix=f"Run DROP PUBLICATION {identifier(publication)}; it is created again as needed.",
        )
    if rows[0][3] != "t":
        # Made by an older version, or before the server was upgraded.
        await wire.query(f"ALTER PUBLICATION {identifier(publication)} SET (publish_generated_columns = stored)")
    tables = await wire.query(
        "SELECT c.oid, n.nspname, c.relname, c.relkind"
        " FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid"
        " JOIN pg_class c ON c.oid = r.prrelid JOIN pg_namespace n ON n.oid = c.relnamespace"
        f" WHERE p.pubname = {literal(publication)}"
    )
    return {
        int(oid or 0): ("" if kind == "p" else "ONLY ") + qualified(schema or "", table or "")
        for oid, schema, table, kind in tables
    }


async def create_publication(wire: Wire, publication: str) -> None:
    """Of no table yet. Raises Invalid without the right to."""
    options = "publish = 'insert, update, delete, truncate', publish_via_partition_root = true"
    if wire.server_version >= GENERATED_PUBLISHED:
        options += ", publish_generated_columns = stored"
    try:
        await wire.query(f"CREATE PUBLICATION {identifier(publication)} WITH ({options})")
    except Invalid as error:
        raise Invalid(
            f"the publication cannot be created: publication={publication} error={error.message}",
            fix="Grant the role CREATE on the database (and ownership of the captured tables).",
        ) from error


async def publish(
    wire: Wire, config: CaptureConfig, tables: Sequence[TableInfo], published: dict[int, str], *, attempts: int
) -> Published:
    """Publish each table that is not, with a whole identity (P1 to P4). Raises only when the connection breaks."""
    newly: set[int] = set()
    failed: dict[str, TidemillError] = {}
    for table in tables:
        try:
            await _publish_table(wire, config, table, table.oid in published, attempts)
        except Unavailable as error:
            if not isinstance(error, SqlError | Blocked):
                raise
            failed[table.name] = error
        except TidemillError as error:
            failed[table.name] = Invalid(
                f"the table cannot be published: table={table.name} error={error.message}",
                fix=f'Let the role own {table.name}, or exclude it with "!{table.name}".',
            )
        else:
            newly |= {table.oid} - published.keys()
    return Published(frozenset(newly), failed)


async def unpublish(wire: Wire, config: CaptureConfig, name: str) -> bool:
    """Take a table out (`name` as `published_tables` gives it); False when its lock could not be had just now."""
    drop = f"ALTER PUBLICATION {identifier(config.publication)} DROP TABLE {name}"
    try:
        await _once(wire, [drop])
    except TidemillError as error:
        if isinstance(error, Unavailable) and not isinstance(error, SqlError):
            raise
        log.warning("table not taken out of the publication yet", capture=config.name, table=name, cause=str(error))
        return False
    log.info("table is no longer published", capture=config.name, table=name)
    return True


async def _publish_table(wire: Wire, config: CaptureConfig, table: TableInfo, published: bool, attempts: int) -> None:
    # Without ONLY the tables that inherit from this one would be published too: without an identity (P1).
    name = ("" if table.kind == "p" else "ONLY ") + qualified(table.schema, table.table)
    for attempt in range(1, attempts + 1):
        alter = [f"ALTER TABLE {part} REPLICA IDENTITY FULL" for part in await _not_full(wire, table.oid)]
        add = [] if published else [f"ALTER PUBLICATION {identifier(config.publication)} ADD TABLE {name}"]
        if not add and not alter:
            return
        try:
            await _once(wire, [f"LOCK TABLE {name} IN SHARE MODE", *add, *alter])
            return
        except SqlError as error:
            if error.sqlstate not in LOCKED:
                raise
            if attempt == attempts:
                raise Blocked(table, await table_holder(wire, table.oid)) from error
            await asyncio.sleep(LOCK_PAUSE_S)


async def _not_full(wire: Wire, oid: int) -> list[str]:
    """The table and its partitions that do not log whole old rows (WAL carries the identity of the partition)."""
    rows = await wire.query(
        f"WITH RECURSIVE tree(oid) AS (SELECT {oid}::oid UNION ALL"
        " SELECT i.inhrelid FROM pg_inherits i JOIN pg_class p ON p.oid = i.inhparent AND p.relkind = 'p'"
        " JOIN tree t ON i.inhparent = t.oid)"
        " SELECT n.nspname, c.relname FROM tree JOIN pg_class c USING (oid) JOIN pg_namespace n"
        " ON n.oid = c.relnamespace WHERE c.relreplident <> 'f' ORDER BY 1, 2"
    )
    return [qualified(schema or "", name or "") for schema, name in rows]


async def _once(wire: Wire, statements: Sequence[str]) -> None:
    """One transaction whose every lock is waited for at most LOCK_TIMEOUT_MS (P3)."""
    await wire.query("BEGIN")
    try:
        await wire.query(f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}")
        for statement in statements:
            await wire.query(statement)
        await wire.query("COMMIT")
    except TidemillError:
        await wire.query("ROLLBACK")
        raise
