"""The tables, created on first use: idempotent, and safe when many processes open an empty database concurrently."""

from __future__ import annotations

from typing import Any

import structlog

from tidemill.base.errors import InvalidError, MissingError

LAYOUT_VERSION = 1
OLDEST_SERVER = 140000

SCHEMA_LOCK = 0x7469_6465_6D69_6C6C
"""Advisory lock held during the creation of the schema ("tidemill" in ASCII); transaction-scoped."""

LAYOUT = """
CREATE SCHEMA IF NOT EXISTS tidemill;
CREATE TABLE IF NOT EXISTS tidemill.registers (
    key text COLLATE "C" PRIMARY KEY, seq int8 NOT NULL, nonce text NOT NULL, data bytea STORAGE EXTERNAL NOT NULL)
    WITH (fillfactor = 50);
CREATE TABLE IF NOT EXISTS tidemill.logs (
    id int8 GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text COLLATE "C" NOT NULL UNIQUE,
    term int8 NOT NULL DEFAULT 0, start int8 NOT NULL DEFAULT 0, next int8 NOT NULL DEFAULT 0)
    WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
CREATE TABLE IF NOT EXISTS tidemill.log_records (
    log int8 NOT NULL, position int8 NOT NULL, term int8 NOT NULL, nonce text NOT NULL,
    data bytea STORAGE EXTERNAL NOT NULL, PRIMARY KEY (log, position));
CREATE TABLE IF NOT EXISTS tidemill.leases (
    name text COLLATE "C" PRIMARY KEY, holder text NOT NULL, term int8 NOT NULL,
    ttl_ms int8 NOT NULL, expires_ms int8 NOT NULL, info bytea NOT NULL) WITH (fillfactor = 50);
CREATE TABLE IF NOT EXISTS tidemill.meta (id int4 PRIMARY KEY CHECK (id = 1), layout int4 NOT NULL);
INSERT INTO tidemill.meta (id, layout) VALUES (1, 1) ON CONFLICT (id) DO NOTHING;
"""

log = structlog.get_logger()


async def prepare_session(connection: Any) -> None:
    """Apply the settings that every statement relies on, independent of the server's and database's defaults."""
    await connection.execute(
        "SELECT set_config('default_transaction_isolation', 'read committed', false),"
        " set_config('lock_timeout', '10s', false), set_config('statement_timeout', '25s', false),"
        " set_config('jit', 'off', false), set_config('search_path', 'pg_catalog', false),"
        # An acknowledged write is on disk; a stronger setting of the server stays.
        " CASE WHEN current_setting('synchronous_commit') IN ('off', 'local')"
        " THEN set_config('synchronous_commit', 'on', false) END"
    )


async def ensure_schema(connection: Any, *, create: bool = True) -> None:
    """Check the server and create missing tables. Raises InvalidError, MissingError for an absent schema without
    `create`, or psycopg.Error for the caller to translate."""
    version = connection.info.server_version
    if version < OLDEST_SERVER:
        raise InvalidError(
            f"the PostgreSQL of consensus.url is too old: version={version // 10000}.",
            fix="Use PostgreSQL 14 or newer.",
        )
    cursor = await connection.execute(
        "SELECT pg_is_in_recovery(), current_setting('fsync'), to_regclass('tidemill.meta') IS NOT NULL"
    )
    standby, fsync, exists = await cursor.fetchone()
    if standby:
        raise InvalidError(
            "the PostgreSQL of consensus.url is a standby and cannot be written.",
            fix="Point consensus.url at the primary (target_session_attrs=read-write with several hosts).",
        )
    if fsync != "on":
        log.warning("PostgreSQL runs with fsync off: acknowledged writes do not survive a power cut")
    if not exists and not create:
        raise MissingError("consensus has no cluster: its database has no schema tidemill.")
    if not exists:
        make = f"BEGIN; SELECT pg_advisory_xact_lock({SCHEMA_LOCK}); {_layout_for(version)} COMMIT"
        # Several commands in one string need the simple protocol, so the statement is not prepared.
        await connection.execute(make, prepare=False)
    cursor = await connection.execute("SELECT layout FROM tidemill.meta")
    row = await cursor.fetchone()
    if row is None or row[0] != LAYOUT_VERSION:
        raise InvalidError(
            f"the schema tidemill has another layout: layout={row and row[0]} known={LAYOUT_VERSION}.",
            fix="Run the tidemill version that created it, or use another database.",
        )


def _layout_for(version: int) -> str:
    """Return the layout for a server version: STORAGE in CREATE TABLE needs 16. Without it values may be compressed."""
    return LAYOUT if version >= 160000 else LAYOUT.replace(" STORAGE EXTERNAL", "")
