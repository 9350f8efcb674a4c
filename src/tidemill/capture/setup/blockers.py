"""Find the session that blocks a capture inside PostgreSQL, and describe it in one sentence: pid, application, client,
state, and its query.

    lock        another session holds this capture's advisory lock
    slot        another walsender streams from the slot
    table       others hold a lock on a table that a statement of ours could not acquire in the permitted time
    pinning     the oldest open transaction: decoding would restart with it, so its WAL is retained
    walsender   it computes or reads, and checks its input only occasionally
    blockers    sessions whose locks or open transactions a statement of ours waits for (pg_blocking_pids)

Only reads. PostgreSQL itself reports what a role may not see of other sessions (their queries).
https://www.postgresql.org/docs/current/monitoring-stats.html
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tidemill.capture.naming import to_readable
from tidemill.capture.postgres.connection import PgConnection, SqlRow, literal

QUERY_CHARS = 120
"""Length limit of a blocker's query in a message."""

_SHARE_CONFLICTING_MODES = (
    "'RowExclusiveLock', 'ShareUpdateExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock'"
)
"""Modes that SHARE waits for. An ALTER waits for readers as well; they are reported if there is no other blocker."""

_SESSION_SQL = """
SELECT a.pid, a.application_name, coalesce(a.client_hostname, host(a.client_addr), 'local'), a.state,
       extract(epoch FROM clock_timestamp() - coalesce(a.xact_start, a.state_change, a.backend_start))::int,
       left(a.query, {chars}), r.state
  FROM pg_stat_activity a LEFT JOIN pg_stat_replication r USING (pid)
 WHERE a.pid IN ({pids})
 ORDER BY coalesce(a.xact_start, a.backend_start) LIMIT 3
"""


_PREPARED_SQL = """
SELECT p.gid, p.owner, extract(epoch FROM clock_timestamp() - p.prepared)::int, p.transaction
  FROM pg_prepared_xacts p WHERE {condition} ORDER BY age(p.transaction) DESC LIMIT 1
"""
PREPARED_LOCK_SQL = (
    "{lock}.pid IS NULL AND EXISTS (SELECT FROM pg_locks x WHERE x.pid IS NULL AND x.locktype = 'transactionid'"
    " AND x.transactionid = p.transaction AND x.virtualtransaction = {lock}.virtualtransaction)"
)
"""Condition for a lock of a prepared transaction p, which has no session but keeps its virtual id, and the lock on its
own id. https://www.postgresql.org/docs/current/view-pg-locks.html
"""


_BLOCKING_PREPARED_SQL = """
EXISTS (SELECT FROM pg_locks w JOIN pg_stat_activity a USING (pid) JOIN pg_locks h ON {of_prepared}
    WHERE NOT w.granted AND h.granted AND starts_with(a.application_name, 'tidemill ')
      AND split_part(a.application_name, ' ', 3) = {capture}
      AND (h.locktype, h.database, h.relation, h.transactionid, h.classid, h.objid, h.objsubid) IS NOT DISTINCT FROM
          (w.locktype, w.database, w.relation, w.transactionid, w.classid, w.objid, w.objsubid))
"""


class Blocker(msgspec.Struct, frozen=True):
    """A session, or a prepared transaction, which has a `gid` and no session. `state`: of the session, or of its
    replication. `age_s`: of its transaction, or since its state changed.
    """

    pid: int
    application: str
    client: str
    state: str
    age_s: int
    query: str
    gid: str = ""

    @property
    def name(self) -> str:
        """Name for `held_by` of a stage status."""
        return f"postgres-prepared:{self.gid}" if self.gid else f"postgres-pid:{self.pid}"

    @property
    def end(self) -> str:
        """Instruction for an operator to end it."""
        if not self.gid:
            return "End that transaction"
        return f"Run COMMIT PREPARED {literal(self.gid).strip()} or ROLLBACK PREPARED {literal(self.gid).strip()}"

    def __str__(self) -> str:
        if self.gid:
            return (
                f"gid={self.gid!r} owner={self.application!r} state={self.state!r} for_s={self.age_s}"
                f" ended_by={'COMMIT PREPARED ' + literal(self.gid).strip()!r}"
            )
        query = f" query={self.query!r}" if self.query else ""
        return (
            f"pid={self.pid} application={self.application!r} client={self.client} state={self.state!r}"
            f" for_s={self.age_s}{query}"
        )


async def read_sessions(wire: PgConnection, pids: Sequence[int]) -> list[Blocker]:
    """Return at most three of these sessions, the oldest transaction first, without sessions that have ended."""
    if not pids:
        return []
    rows = await wire.query(_SESSION_SQL.format(chars=QUERY_CHARS, pids=", ".join(str(int(pid)) for pid in pids)))
    return [_to_blocker(row) for row in rows]


async def find_lock_holder(wire: PgConnection, lock_class: int, lock_key: int) -> Blocker | None:
    """Return the session that holds an advisory lock of two 32-bit keys in this database."""
    rows = await wire.query(
        "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 2"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        f" AND classid::bigint = {lock_class} AND objid::bigint = {lock_key} LIMIT 1"
    )
    return next(iter(await read_sessions(wire, [int(pid or 0) for (pid,) in rows])), None)


async def find_slot_holder(wire: PgConnection, slot: str) -> Blocker | None:
    """Return the session that currently streams from the slot."""
    rows = await wire.query(
        f"SELECT active_pid FROM pg_replication_slots WHERE slot_name = {literal(slot)} AND active_pid IS NOT NULL"
    )
    return next(iter(await read_sessions(wire, [int(pid or 0) for (pid,) in rows])), None)


async def find_busy_walsender(wire: PgConnection, slot: str) -> Blocker | None:
    """Return the walsender of a slot while it works on WAL, or seems to; None while it waits for input or output and
    could answer. https://www.postgresql.org/docs/current/monitoring-stats.html#WAIT-EVENT-TABLE
    """
    rows = await wire.query(
        "SELECT pid FROM pg_replication_slots JOIN pg_stat_activity ON pid = active_pid"
        f" WHERE slot_name = {literal(slot)} AND coalesce(wait_event_type, '') NOT IN ('Activity', 'Client')"
    )
    return next(iter(await read_sessions(wire, [int(pid or 0) for (pid,) in rows])), None)


async def find_table_blocker(wire: PgConnection, oid: int) -> Blocker | None:
    """Return the session with a lock on a table or a partition of it: the strongest lock first, then the oldest. As of
    right after the wait, which was short.
    """
    rows = await wire.query(
        "SELECT a.pid, p.gid FROM pg_locks l LEFT JOIN pg_stat_activity a USING (pid)"
        f" LEFT JOIN pg_prepared_xacts p ON {PREPARED_LOCK_SQL.format(lock='l')}"
        " WHERE l.granted AND l.locktype = 'relation' AND l.pid IS DISTINCT FROM pg_backend_pid()"
        " AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        f" AND l.relation IN (SELECT {oid} UNION SELECT relid FROM pg_partition_tree({oid}))"
        " ORDER BY l.mode = 'AccessExclusiveLock' DESC,"
        f" l.mode IN ({_SHARE_CONFLICTING_MODES}) DESC, coalesce(a.xact_start, p.prepared) LIMIT 1"
    )
    if rows and rows[0][1] is not None:
        return await _find_prepared_transaction(wire, f"p.gid = {literal(rows[0][1])}")
    return next(iter(await read_sessions(wire, [int(pid or 0) for pid, _ in rows])), None)


async def find_writers(wire: PgConnection, oid: int) -> frozenset[str]:
    """Return the transactions that hold a lock for writing rows of a table, or of a partition of it."""
    rows = await wire.query(
        "SELECT DISTINCT virtualtransaction FROM pg_locks WHERE granted AND locktype = 'relation'"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        " AND mode IN ('RowExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')"
        f" AND relation IN (SELECT {oid} UNION SELECT relid FROM pg_partition_tree({oid}))"
    )
    return frozenset(found or "" for (found,) in rows)


async def find_oldest_transaction(wire: PgConnection) -> Blocker | None:
    """Return the oldest transaction, open or prepared, that may still have to be decoded: WAL since its start is
    retained.
    """
    rows = await wire.query(
        "SELECT pid FROM pg_stat_activity WHERE backend_xid IS NOT NULL AND datname = current_database()"
        " ORDER BY age(backend_xid) DESC LIMIT 1"
    )
    prepared = await _find_prepared_transaction(wire, "p.database = current_database()")
    found = next(iter(await read_sessions(wire, [int(pid or 0) for (pid,) in rows])), None)
    return prepared if prepared is not None and (found is None or prepared.age_s > found.age_s) else found


async def find_blockers(wire: PgConnection, capture: str) -> list[Blocker]:
    """Return the sessions for which any session of this capture waits, found by application name (connection.py).
    Called on a separate connection, because the waiting ones do not answer.
    """
    rows = await wire.query(
        "SELECT DISTINCT unnest(pg_blocking_pids(pid)) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        " AND datname = current_database() AND starts_with(application_name, 'tidemill ')"
        f" AND split_part(application_name, ' ', 3) = {literal(capture)}"
    )
    # A prepared transaction has no session and blocks as pid 0.
    pids = [int(found or 0) for (found,) in rows]
    found = await read_sessions(wire, [pid for pid in pids if pid])
    if not found and 0 in pids:
        prepared = await _find_prepared_transaction(
            wire,
            _BLOCKING_PREPARED_SQL.format(of_prepared=PREPARED_LOCK_SQL.format(lock="h"), capture=literal(capture)),
        )
        return [prepared] if prepared is not None else []
    return found


async def _find_prepared_transaction(wire: PgConnection, condition: str) -> Blocker | None:
    """Return the oldest prepared transaction p that satisfies the condition."""
    for gid, owner, age_s, xid in await wire.query(_PREPARED_SQL.format(condition=condition)):
        found = to_readable(gid or "")
        return Blocker(
            0, to_readable(owner or ""), "", "prepared transaction", int(age_s or 0), f"xid={xid}", gid=found
        )
    return None


def _to_blocker(row: SqlRow) -> Blocker:
    pid, application, client, state, age_s, query, replication = row
    return Blocker(
        int(pid or 0),
        to_readable(application or ""),
        client or "",
        f"replication {replication}" if replication else state or "unknown",
        int(age_s or 0),
        to_readable(" ".join((query or "").split())),
    )
