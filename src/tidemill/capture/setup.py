"""Checks and set-up of a captured database (PostgreSQL 14 to 18): settings, rights, publication, identities, slot.

Order, and the race each step prevents:
    1  session advisory lock       one capture of this name at a time, whatever process it lives in
    2  publication, then per table, in name order, in one transaction each: LOCK … IN SHARE MODE; ADD TABLE;
       REPLICA IDENTITY FULL        the lock waits out writers that began before the table was published: rows of
                                    theirs would be in neither snapshot nor stream (electric #4773); a fixed order
                                    and ADD before ALTER keep two configurators from deadlock
    3  slot                         after the publication, which the decoder looks up as of each change
    4  snapshot (snapshot.py)       after the slot, so that nothing commits between them unseen
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence

import msgspec
import structlog

from tidemill.base.errors import Invalid
from tidemill.base.frontier import Lsn
from tidemill.capture.config import CaptureConfig
from tidemill.capture.tables import TableInfo, list_tables, resolve
from tidemill.capture.wire.connection import Wire, identifier, literal, qualified
from tidemill.capture.wire.errors import LockHeld, SlotLost, SqlError

log = structlog.get_logger()

OLDEST_VERSION = 140_000
LOCK_TIMEOUT_MS = 1000
"""Writers queue behind a lock that is waited for: wait briefly, then let them pass for as long."""
LOCK_ATTEMPTS = 120
_LOCK_NOT_AVAILABLE, _DEADLOCK, _DUPLICATE = "55P03", "40P01", "42710"
_ADVISORY_CLASS = 0x7469_6465  # "tide"


class ServerFacts(msgspec.Struct, frozen=True):
    version: int
    system_id: str
    wal_sender_timeout_ms: int


class SlotState(msgspec.Struct, frozen=True):
    """`retained_bytes`: WAL the slot keeps; `headroom_bytes`: until it is invalidated, None = unlimited."""

    confirmed_lsn: int
    active_pid: int | None
    wal_status: str
    retained_bytes: int
    headroom_bytes: int | None
    wal_end: int


async def check_server(wire: Wire, config: CaptureConfig) -> ServerFacts:
    """Raises Invalid, naming the setting or right that is missing and the statement that gives it."""
    if wire.server_version < OLDEST_VERSION:
        raise Invalid(f"PostgreSQL is too old: version={wire.server_version}.", fix="Use PostgreSQL 14 or newer.")
    rows = await wire.query(
        "SELECT current_setting('wal_level'), current_setting('max_replication_slots')::int,"
        " current_setting('max_wal_senders')::int, pg_is_in_recovery(),"
        " (SELECT setting::int FROM pg_settings WHERE name = 'wal_sender_timeout'),"
        " (SELECT rolreplication OR rolsuper FROM pg_roles WHERE rolname = current_user), current_user,"
        " (SELECT count(*) FROM pg_replication_slots),"
        f" EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = {literal(config.slot)})"
    )
    wal_level, slots, senders, in_recovery, sender_timeout, may_replicate, user, used, exists = rows[0]
    restart = "and restart PostgreSQL."
    if wal_level != "logical":
        raise Invalid(
            f"PostgreSQL does not log logical changes: wal_level={wal_level}.",
            fix=f"Run ALTER SYSTEM SET wal_level = 'logical' {restart}",
        )
    if in_recovery == "t":
        raise Invalid("the server is a standby.", fix="Point the DSN at the primary.")
    if int(senders or 0) < 1:
        raise Invalid(
            f"no WAL senders are allowed: max_wal_senders={senders}.",
            fix=f"Run ALTER SYSTEM SET max_wal_senders = 10 {restart}",
        )
    if exists != "t" and int(used or 0) >= int(slots or 0):
        raise Invalid(
            f"no replication slot is free: max_replication_slots={slots} used={used}.",
            fix=f"Drop an unused slot, or raise max_replication_slots {restart}",
        )
    if may_replicate != "t":
        raise Invalid(
            f"the role may not replicate: role={user}.", fix=f"Run ALTER ROLE {identifier(user or '')} REPLICATION."
        )
    system_id = await wire.value("SELECT system_identifier FROM pg_control_system()")
    return ServerFacts(wire.server_version, system_id or "", int(sender_timeout or 0))


async def check_database(dsn: str, tables: Sequence[str] = ("public.*",)) -> str:
    """One line for `tidemill doctor` that says the database can be captured. Raises Invalid or Unavailable."""
    config = CaptureConfig(name="doctor", dsn=dsn, tables=tuple(tables))
    wire = await Wire.connect(dsn, purpose="doctor")
    try:
        facts = await check_server(wire, config)
        chosen = resolve(config.tables, await list_tables(wire))
    finally:
        await wire.aclose()
    return f"PostgreSQL {facts.version // 10_000}.{facts.version % 10_000}, {len(chosen)} tables"


def lock_key(config: CaptureConfig) -> int:
    return zlib.crc32(config.slot.encode()) & 0x7FFF_FFFF


async def try_lock(wire: Wire, config: CaptureConfig) -> None:
    """Take the session's advisory lock, or raise LockHeld with the pid that has it. It ends with the connection."""
    key = lock_key(config)
    if await wire.value(f"SELECT pg_try_advisory_lock({_ADVISORY_CLASS}, {key})") == "t":
        return
    pid = await wire.value(
        "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted"
        f" AND classid::bigint = {_ADVISORY_CLASS} AND objid::bigint = {key} LIMIT 1"
    )
    raise LockHeld(f"another session captures under this name: capture={config.name} pid={pid}.")


async def published_tables(wire: Wire, publication: str) -> set[str] | None:
    """Names of the tables the publication holds, None when there is no such publication. Raises Invalid when it is
    one that cannot serve (not all operations, or not through the partition root)."""
    rows = await wire.query(
        "SELECT pubinsert AND pubupdate AND pubdelete AND pubtruncate, pubviaroot, puballtables"
        f" FROM pg_publication WHERE pubname = {literal(publication)}"
    )
    if not rows:
        return None
    if rows[0] != ("t", "t", "f"):
        raise Invalid(
            f"a publication of this name exists with other options: publication={publication}.",
            fix=f"Run DROP PUBLICATION {identifier(publication)}; it is created again as needed.",
        )
    tables = await wire.query(
        "SELECT n.nspname || '.' || c.relname FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid"
        " JOIN pg_class c ON c.oid = r.prrelid JOIN pg_namespace n ON n.oid = c.relnamespace"
        f" WHERE p.pubname = {literal(publication)}"
    )
    return {name or "" for (name,) in tables}


async def publish(wire: Wire, config: CaptureConfig, tables: Sequence[TableInfo]) -> set[str]:
    """Make the publication hold exactly `tables`; returns the names that were not published before."""
    published = await published_tables(wire, config.publication)
    if published is None:
        await _create_publication(wire, config.publication)
        try:
            return await _publish_all(wire, config, tables, set())
        except Invalid:
            # Nothing half-made is left behind by a refusal.
            await wire.query(f"DROP PUBLICATION {identifier(config.publication)}")
            raise
    return await _publish_all(wire, config, tables, published)


async def _publish_all(wire: Wire, config: CaptureConfig, tables: Sequence[TableInfo], published: set[str]) -> set[str]:
    wanted = {table.name for table in tables}
    for table in tables:
        if table.name not in published:
            await _publish_table(wire, config.publication, table)
        else:
            await _identity_full(wire, table)
    for name in sorted(published - wanted):
        schema, _, table_name = name.partition(".")
        await wire.query(
            f"ALTER PUBLICATION {identifier(config.publication)} DROP TABLE {qualified(schema, table_name)}"
        )
        log.info("table is no longer captured", capture=config.name, table=name)
    return wanted - published


async def _create_publication(wire: Wire, publication: str) -> None:
    try:
        await wire.query(
            f"CREATE PUBLICATION {identifier(publication)} WITH"
            " (publish = 'insert, update, delete, truncate', publish_via_partition_root = true)"
        )
    except Invalid as error:
        raise Invalid(
            f"the publication cannot be created: publication={publication} error={error.message}",
            fix="Grant the role CREATE on the database (and ownership of the captured tables).",
        ) from error


async def _publish_table(wire: Wire, publication: str, table: TableInfo) -> None:
    name = qualified(table.schema, table.table)
    statements = [
        f"LOCK TABLE {name} IN SHARE MODE",
        f"ALTER PUBLICATION {identifier(publication)} ADD TABLE {name}",
        *[f"ALTER TABLE {part} REPLICA IDENTITY FULL" for part in await _not_full(wire, table)],
    ]
    await _transaction(wire, table, statements)


async def _identity_full(wire: Wire, table: TableInfo) -> None:
    parts = await _not_full(wire, table)
    if parts:
        await _transaction(wire, table, [f"ALTER TABLE {part} REPLICA IDENTITY FULL" for part in parts])


async def _not_full(wire: Wire, table: TableInfo) -> list[str]:
    """The table and its partitions that do not log whole old rows (WAL carries the identity of the partition)."""
    rows = await wire.query(
        f"WITH RECURSIVE tree(oid) AS (SELECT {table.oid}::oid UNION ALL"
        " SELECT i.inhrelid FROM pg_inherits i JOIN tree t ON i.inhparent = t.oid)"
        " SELECT n.nspname, c.relname FROM tree JOIN pg_class c USING (oid) JOIN pg_namespace n"
        " ON n.oid = c.relnamespace WHERE c.relreplident <> 'f' ORDER BY 1, 2"
    )
    return [qualified(schema or "", name or "") for schema, name in rows]


async def _transaction(wire: Wire, table: TableInfo, statements: Sequence[str]) -> None:
    """One short transaction under a lock time limit, tried again while others hold the table."""
    for attempt in range(1, LOCK_ATTEMPTS + 1):
        await wire.query("BEGIN")
        try:
            await wire.query(f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}")
            for statement in statements:
                await wire.query(statement)
            await wire.query("COMMIT")
            return
        except SqlError as error:
            await wire.query("ROLLBACK")
            if error.sqlstate not in (_LOCK_NOT_AVAILABLE, _DEADLOCK) or attempt == LOCK_ATTEMPTS:
                raise
            log.warning("waiting for writers of a table", table=table.name, attempt=attempt)
            await asyncio.sleep(LOCK_TIMEOUT_MS / 1000)
        except Invalid as error:
            await wire.query("ROLLBACK")
            raise Invalid(
                f"the table cannot be published: table={table.name} error={error.message}",
                fix=f"Let the role own {table.name}, or add it to the publication as its owner.",
            ) from error


async def slot_state(wire: Wire, slot: str) -> SlotState | None:
    """None when there is no such slot."""
    rows = await wire.query(
        "SELECT confirmed_flush_lsn, active_pid, wal_status, pg_current_wal_lsn() - restart_lsn, safe_wal_size,"
        f" pg_current_wal_flush_lsn() FROM pg_replication_slots WHERE slot_name = {literal(slot)}"
        " AND database = current_database() AND plugin = 'pgoutput'"
    )
    if not rows:
        return None
    confirmed, pid, wal_status, retained, headroom, wal_end = rows[0]
    return SlotState(
        Lsn.parse(confirmed).value if confirmed else 0,
        int(pid) if pid else None,
        wal_status or "",
        int(retained or 0),
        int(headroom) if headroom else None,
        Lsn.parse(wal_end or "0/0").value,
    )


def start_over(config: CaptureConfig) -> str:
    """What an operator does about a gap in the stream: without its publication a capture copies all tables anew."""
    return f"Run DROP PUBLICATION {identifier(config.publication)} in the database: all its tables are copied anew."


def check_slot(config: CaptureConfig, state: SlotState | None) -> SlotState:
    """Raises SlotLost when a slot that must be there is gone or was invalidated."""
    if state is None:
        raise SlotLost(
            f"the replication slot is gone: slot={config.slot}.",
            fix=f"Changes since are not in the stream. {start_over(config)}",
        )
    if state.wal_status == "lost" or not state.confirmed_lsn:
        raise SlotLost(
            f"PostgreSQL invalidated the replication slot: slot={config.slot} wal_status={state.wal_status}.",
            fix=f"Raise max_slot_wal_keep_size. {start_over(config)}",
        )
    return state


async def create_slot(wire: Wire, config: CaptureConfig) -> SlotState:
    """Create the slot; waits for transactions that are running. A left-over of the same name is dropped first."""
    database = await wire.value(
        f"SELECT database FROM pg_replication_slots WHERE slot_name = {literal(config.slot)}"
        " AND database IS DISTINCT FROM current_database()"
    )
    if database is not None:
        raise Invalid(
            f"another database of this server has a slot of this name: slot={config.slot} database={database}.",
            fix="Rename the capture, or drop that slot if nothing uses it.",
        )
    if await slot_state(wire, config.slot) is not None:
        await drop_slot(wire, config.slot)
    await wire.query(f"SELECT pg_create_logical_replication_slot({literal(config.slot)}, 'pgoutput')")
    return check_slot(config, await slot_state(wire, config.slot))


async def drop_slot(wire: Wire, slot: str) -> None:
    state = await slot_state(wire, slot)
    if state is None:
        return
    if state.active_pid is not None:
        raise LockHeld(f"the replication slot is in use: slot={slot} pid={state.active_pid}.")
    await wire.query(f"SELECT pg_drop_replication_slot({literal(slot)})")


async def heartbeat(wire: Wire) -> None:
    """A transaction with nothing but an empty message: it crosses every stage and lets an idle slot advance."""
    await wire.query("SELECT pg_logical_emit_message(true, 'tidemill', '')")
