"""Checks and set-up of a captured database (PostgreSQL 14 to 18): settings, privileges, publication, identities, slot.

Order, and the race that each step prevents:

    1  session advisory lock       one capture of this name at a time, in any process
    2  publication, then per table, in name order (publication.py)
    3  slot                         after the publication, which the decoder looks up as of each change
    4  snapshot (exported_snapshot.py)       after the slot, so that every commit is in one of them
"""

from __future__ import annotations

import zlib

import msgspec
import structlog

from tidemill.base.errors import InvalidError, TidemillError, UnavailableError
from tidemill.base.lsn import Lsn
from tidemill.capture.config import CaptureConfig
from tidemill.capture.postgres.connection import PgConnection, identifier, literal
from tidemill.capture.postgres.errors import LockHeldError, SlotLostError
from tidemill.capture.postgres.pg_snapshot import xid_condition

log = structlog.get_logger()

OLDEST_VERSION = 140_000
FAILOVER_VERSION = 170_000
INVALIDATION_VERSION = 170_000
RDS_ROLE = "rds_replication"
"""Role of Amazon RDS and Aurora whose members may replicate, without the attribute."""
_REMEDIES = {
    "idle_timeout": "Raise idle_replication_slot_timeout.",
    "wal_level_insufficient": "Set wal_level = logical.",
    "rows_removed": "Set hot_standby_feedback = on at the standby.",
}
"""Remedy for each reason for which PostgreSQL invalidates a slot. Any other reason is that of max_slot_wal_keep_size.
https://www.postgresql.org/docs/current/view-pg-replication-slots.html
"""
SLOT_ATTEMPTS = 5
"""Attempts to create a slot that can decode everything. Afterwards the slot is used as created: most transactions
decode well, and otherwise everything starts over (bootstrap.py).
"""
ADVISORY_CLASS = 0x7469_6465  # "tide"


SET_PARAMETER = "ALTER SYSTEM SET "
"""Start of the statements after which PostgreSQL has to be restarted."""


class ServerFacts(msgspec.Struct, frozen=True):
    version: int
    system_id: str
    wal_sender_timeout_ms: int


class SlotState(msgspec.Struct, frozen=True):
    """State of the slot. `retained_bytes`: WAL that the slot retains. `headroom_bytes`: until it is invalidated, None =
    unlimited.
    """

    confirmed_lsn: int
    active_pid: int | None
    wal_status: str
    retained_bytes: int
    headroom_bytes: int | None
    wal_end: int
    pinned_bytes: int = 0
    """Part of the retained WAL that is confirmed, but retained for an open transaction"""
    invalidated: str = ""
    """Reason of the invalidation, as PostgreSQL 17 and newer report it"""


class ServerProblem(msgspec.Struct, frozen=True):
    """One reason why the server cannot be captured. `statement`: the SQL with which an administrator removes it, "" if
    that takes something else.
    """

    error: InvalidError | UnavailableError
    statement: str = ""


async def check_server(wire: PgConnection, config: CaptureConfig) -> ServerFacts:
    """Check the settings of the server and the privileges of the role. Raises InvalidError, which names the missing
    setting or privilege and the statement that sets it, and UnavailableError.
    """
    problems = await find_server_problems(wire, config)
    if problems:
        raise problems[0].error
    return await read_server_facts(wire)


async def read_server_facts(wire: PgConnection) -> ServerFacts:
    """Return facts about a server that is not older than `OLDEST_VERSION`."""
    sender_timeout = await wire.value("SELECT setting::int FROM pg_settings WHERE name = 'wal_sender_timeout'")
    system_id = await wire.value("SELECT system_identifier FROM pg_control_system()")
    return ServerFacts(wire.server_version, system_id or "", int(sender_timeout or 0))


async def find_server_problems(wire: PgConnection, config: CaptureConfig) -> list[ServerProblem]:
    """Return everything about the server and the role that prevents the capture, the most basic first. Only reads.

    Managed services have their own switches instead of `ALTER SYSTEM` and `ALTER ROLE`: a parameter of Amazon RDS
    (rds.logical_replication) and of Cloud SQL (cloudsql.logical_decoding), and RDS's role rds_replication.
    """
    if wire.server_version < OLDEST_VERSION:
        error = InvalidError(
            f"PostgreSQL is too old: version={wire.server_version}.", fix="Use PostgreSQL 14 or newer."
        )
        return [ServerProblem(error)]
    rows = await wire.query(
        "SELECT current_setting('wal_level'), current_setting('max_replication_slots')::int,"
        " current_setting('max_wal_senders')::int, pg_is_in_recovery(), (rolreplication OR rolsuper OR EXISTS (SELECT"
        f" FROM pg_roles g WHERE g.rolname = {literal(RDS_ROLE)} AND pg_has_role(g.oid, 'USAGE'))), current_user,"
        " (SELECT count(*) FROM pg_replication_slots),"
        f" EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = {literal(config.slot)}),"
        f" EXISTS (SELECT FROM pg_roles WHERE rolname = {literal(RDS_ROLE)}),"
        " current_setting('rds.logical_replication', true), current_setting('cloudsql.logical_decoding', true)"
        " FROM pg_roles WHERE rolname = current_user"
    )
    wal_level, slots, senders, in_recovery, may_replicate, user, used, exists, has_rds_role, rds, cloud_sql = rows[0]
    restart = "and restart PostgreSQL."
    found: list[ServerProblem] = []
    if wal_level != "logical":
        statement = f"{SET_PARAMETER}wal_level = 'logical'"
        fix = f"Run {statement} {restart}"
        if rds:
            statement, fix = "", "Set rds.logical_replication = 1 in its parameter group, and reboot it."
        elif cloud_sql:
            statement, fix = "", "Set its flag cloudsql.logical_decoding to on, which restarts it."
        error = InvalidError(f"PostgreSQL does not log logical changes: wal_level={wal_level}.", fix=fix)
        found.append(ServerProblem(error, statement))
    if in_recovery == "t":
        # A promoted standby is a primary, so an operator may not have to act.
        standby = UnavailableError(
            f"the server is a standby: {wire.target}.",
            fix="Point the DSN at the primary, or promote the standby.",
        )
        found.append(ServerProblem(standby))
    if int(senders or 0) < 1:
        statement = f"{SET_PARAMETER}max_wal_senders = 10"
        error = InvalidError(
            f"no WAL senders are allowed: max_wal_senders={senders}.", fix=f"Run {statement} {restart}"
        )
        found.append(ServerProblem(error, statement))
    if exists != "t" and int(used or 0) >= int(slots or 0):
        error = InvalidError(
            f"no replication slot is free: max_replication_slots={slots} used={used}.",
            fix=f"Drop an unused slot, or raise max_replication_slots {restart}",
        )
        found.append(ServerProblem(error))
    if may_replicate != "t":
        role = identifier(user or "")
        statement = f"GRANT {RDS_ROLE} TO {role}" if has_rds_role == "t" else f"ALTER ROLE {role} REPLICATION"
        error = InvalidError(f"the role lacks the REPLICATION attribute: role={user}.", fix=f"Run {statement}.")
        found.append(ServerProblem(error, statement))
    if config.failover and wire.server_version < FAILOVER_VERSION:
        error = InvalidError(
            f"this PostgreSQL has no failover slots: version={wire.server_version // 10_000}.",
            fix=f"Remove capture.{config.name}.failover from tidemill.toml, or use PostgreSQL 17 or newer.",
        )
        found.append(ServerProblem(error))
    return found


async def find_stream_problems(wire: PgConnection, config: CaptureConfig) -> list[TidemillError]:
    """Return what prevents the stream of a capture that does not run now: no WAL sender is free, or its slot lost
    WAL."""
    state = await read_slot_state(wire, config.slot)
    if state is not None and state.active_pid is not None:
        return []
    found: list[TidemillError] = []
    limit, used = (await wire.query(
        "SELECT current_setting('max_wal_senders')::int, (SELECT count(*) FROM pg_stat_replication)"
    ))[0]  # fmt: skip
    if 0 < int(limit or 0) <= int(used or 0):
        fix = "End an unused standby or subscriber, or raise max_wal_senders and restart PostgreSQL."
        found.append(InvalidError(f"no WAL sender is free: max_wal_senders={limit} used={used}.", fix=fix))
    if state is not None and not is_slot_usable(state):
        try:
            check_slot(config, state)
        except SlotLostError as error:
            found.append(error)
    return found


def advisory_lock_key(config: CaptureConfig) -> int:
    return zlib.crc32(config.slot.encode()) & 0x7FFF_FFFF


async def try_advisory_lock(wire: PgConnection, config: CaptureConfig) -> bool:
    """Acquire the session's advisory lock; False while another session has it. It is released with the connection."""
    return await wire.value(f"SELECT pg_try_advisory_lock({ADVISORY_CLASS}, {advisory_lock_key(config)})") == "t"


async def read_slot_state(wire: PgConnection, slot: str) -> SlotState | None:
    """Return the state of the slot, or None if it does not exist."""
    rows = await wire.query(
        "SELECT confirmed_flush_lsn, active_pid, wal_status, pg_current_wal_lsn() - restart_lsn, safe_wal_size,"
        " pg_current_wal_flush_lsn(), confirmed_flush_lsn - restart_lsn,"
        f" {'invalidation_reason' if wire.server_version >= INVALIDATION_VERSION else 'NULL'}"
        f" FROM pg_replication_slots WHERE slot_name = {literal(slot)}"
        " AND database = current_database() AND plugin = 'pgoutput'"
    )
    if not rows:
        return None
    confirmed, pid, wal_status, retained, headroom, wal_end, pinned, invalidated = rows[0]
    return SlotState(
        Lsn.parse(confirmed).value if confirmed else 0,
        int(pid) if pid else None,
        wal_status or "",
        int(retained or 0),
        int(headroom) if headroom else None,
        Lsn.parse(wal_end or "0/0").value,
        int(pinned or 0),
        invalidated or "",
    )


def start_over_instruction(config: CaptureConfig) -> str:
    """Return the instruction for an operator after a gap in the stream: without its publication a capture copies all
    tables again.
    """
    return (
        f"Run DROP PUBLICATION {identifier(config.publication)} in the database; all its tables are then copied again."
    )


def is_slot_usable(state: SlotState | None) -> bool:
    """Return whether the slot exists and retains all WAL after its confirmed LSN."""
    return state is not None and state.wal_status != "lost" and bool(state.confirmed_lsn)


def check_slot(config: CaptureConfig, state: SlotState | None) -> SlotState:
    """Return the state of a slot that must exist. Raises SlotLostError if it does not, or was invalidated."""
    if state is None:
        raise SlotLostError(
            f"the replication slot does not exist: slot={config.slot}.",
            fix=f"Changes since are not in the stream. {start_over_instruction(config)}",
        )
    if not is_slot_usable(state):
        why = f" reason={state.invalidated}" if state.invalidated else ""
        cure = _REMEDIES.get(state.invalidated, "Raise max_slot_wal_keep_size.")
        raise SlotLostError(
            f"PostgreSQL invalidated the replication slot: slot={config.slot} wal_status={state.wal_status}{why}.",
            fix=f"{cure} {start_over_instruction(config)}",
        )
    return state


async def create_slot(wire: PgConnection, config: CaptureConfig) -> SlotState:
    """Create the slot, which waits for running transactions. A left-over slot of the same name is dropped first.

    The initial catalogue snapshot of PostgreSQL's decoder (seen on 18.6, snapbuild.c) omits what a transaction changed
    that began after the slot's first waiting point and committed after its second. A TRUNCATE there, and an INSERT into
    the new file by a transaction that outlasts the set-up, can never be decoded. All such transactions have committed
    when the slot exists, so they are detected then, and the slot is created again.
    """
    database = await wire.value(
        f"SELECT database FROM pg_replication_slots WHERE slot_name = {literal(config.slot)}"
        " AND database IS DISTINCT FROM current_database()"
    )
    if database is not None:
        raise InvalidError(
            f"another database of this server has a slot of this name: slot={config.slot} database={database}.",
            fix="Rename the capture, or drop that slot if nothing uses it.",
        )
    left = await read_slot_state(wire, config.slot)
    if left is not None and left.active_pid is not None:
        raise LockHeldError(f"the replication slot is in use: slot={config.slot} pid={left.active_pid}.")
    if left is not None:
        await wire.query(f"SELECT pg_drop_replication_slot({literal(config.slot)})")
    failover = ", failover => true" if config.failover else ""
    for attempt in range(1, SLOT_ATTEMPTS + 1):
        began = await wire.value("SELECT pg_snapshot_xmax(pg_current_snapshot())")
        await wire.query(f"SELECT pg_create_logical_replication_slot({literal(config.slot)}, 'pgoutput'{failover})")
        changed = await _find_relations_changed_since(wire, began or "")
        if not changed:
            break
        log.info("tables changed while the slot was created", capture=config.name, tables=changed, attempt=attempt)
        if attempt < SLOT_ATTEMPTS:
            await wire.query(f"SELECT pg_drop_replication_slot({literal(config.slot)})")
    return check_slot(config, await read_slot_state(wire, config.slot))


async def _find_relations_changed_since(wire: PgConnection, xid: str) -> list[str]:
    """Return a few of the relations of this database that a transaction not older than `xid` created, rewrote or
    altered. Temporary relations are not in WAL.
    """
    newer = xid_condition("xmin", xid)
    rows = await wire.query(
        "SELECT oid::regclass::text FROM pg_class c WHERE relpersistence <> 't' AND relkind IN ('r', 'p', 'm', 't')"
        f" AND ({newer} OR EXISTS (SELECT FROM pg_attribute WHERE attrelid = c.oid AND {newer}))"
        " ORDER BY 1 LIMIT 5"
    )
    return [name or "" for (name,) in rows]


async def emit_heartbeat(wire: PgConnection) -> None:
    """Commit a transaction with only an empty message: it passes through every stage and lets an idle slot advance."""
    await wire.query("SELECT pg_logical_emit_message(true, 'tidemill', '')")
