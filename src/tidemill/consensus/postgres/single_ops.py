"""Operations with a commit of their own (fences, truncations, leases), and reads."""

from __future__ import annotations

from typing import Any

from tidemill.base.errors import UnavailableError
from tidemill.consensus.api import Lease, LogHead, LogRecord, LogSlice, Versioned
from tidemill.consensus.engine_state import UNWRITTEN, LeaseRow
from tidemill.consensus.operations import (
    Acquire,
    Drop,
    Fence,
    Head,
    HeadOfLog,
    Leases,
    Read,
    Release,
    Scan,
    Truncate,
    cas_conflict_error,
    fenced_error,
    lease_conflict_error,
    truncated_error,
)
from tidemill.consensus.postgres import group_commit, sql
from tidemill.consensus.postgres.connections import Connection

SWEEP_ROWS = 5_000

SingleOp = Drop | Fence | Truncate | Acquire | Release


async def execute_write(connection: Connection, op: SingleOp, log_ids: dict[str, int]) -> Any:
    """Do one write in its own transaction. Raises its outcome, or psycopg.Error."""
    match op:
        case Fence(log=log, term=term):
            log_id = await group_commit.log_id_of(connection, log, log_ids)
            rows = await fetch_rows(connection, sql.FENCE, (term, log_id, term))
            if rows:
                return LogHead(*rows[0])
            raise fenced_error((await read_heads(connection, [log]))[log], op)
        case Truncate(log=log, before=before):
            rows = await fetch_rows(connection, sql.TRUNCATE, (before, log, before))
            if rows:
                return LogHead(*rows[0][1:])
            return op.cut((await read_heads(connection, [log])).get(log, UNWRITTEN))
        case Acquire(name=name, holder=holder, ttl_ms=ttl_ms, info=info):
            rows = await fetch_rows(connection, sql.ACQUIRE, (name, holder, ttl_ms, ttl_ms, info))
            if rows:
                return _lease(rows[0])
            rows = await fetch_rows(connection, sql.LEASE, (name,))
            if not rows:
                raise UnavailableError(f"the lease vanished: name={name!r}.")
            raise lease_conflict_error(_lease(rows[0]))
        case Drop(key=key, expected_seq=expected):
            if await fetch_rows(connection, sql.DROP, (key, expected)):
                return None
            raise cas_conflict_error((await group_commit.read_registers(connection, [key])).get(key), op)
        case Release(name=name, holder=holder, term=term):
            await connection.execute(sql.RELEASE, (name, holder, term))
            return None


async def sweep_records(connection: Connection, log_id: int, start: int) -> bool:
    """Delete some rows below `start`. True while there may be more."""
    cursor = await connection.execute(sql.SWEEP, (log_id, SWEEP_ROWS, log_id, start))
    return cursor.rowcount > 0


async def execute_reads(connection: Connection, ops: list[Any]) -> list[Any]:
    """Return one outcome (result or error) per read. Heads and registers of the whole group take one statement each."""
    keys = list({op.key: None for op in ops if isinstance(op, Head)})
    logs = list({op.log: None for op in ops if isinstance(op, HeadOfLog)})
    versions = await group_commit.read_registers(connection, keys) if keys else {}
    log_heads = await read_heads(connection, logs) if logs else {}
    outcomes: list[Any] = []
    for op in ops:
        match op:
            case Head(key=key):
                outcomes.append(versions.get(key))
            case HeadOfLog(log=log):
                outcomes.append(log_heads.get(log, UNWRITTEN))
            case Read():
                outcomes.append(await _read(connection, op))
            case Scan(prefix=prefix):
                rows = await fetch_rows(connection, sql.SCAN, (prefix,))
                outcomes.append([(key, Versioned(seq, data, nonce)) for key, seq, data, nonce in rows])
            case Leases(prefix=prefix):
                outcomes.append([_lease(row) for row in await fetch_rows(connection, sql.LEASES, (prefix,))])
    return outcomes


async def _read(connection: Connection, op: Read) -> Any:
    rows = await fetch_rows(connection, sql.READ, (op.start, op.limit_records, op.limit_bytes, op.log))
    head = LogHead(*rows[0][:3]) if rows else UNWRITTEN
    if op.start < head.start:
        return truncated_error(head, op)
    return LogSlice(tuple(LogRecord(*row[3:]) for row in rows if row[3] is not None), head)


async def read_leases(connection: Connection, names: list[str]) -> list[Lease]:
    """Return the leases that exist, of these names."""
    return [_lease(row) for row in await fetch_rows(connection, sql.LEASES_NAMED, (names,))]


async def read_heads(connection: Connection, logs: list[str]) -> dict[str, LogHead]:
    """Return the heads of those of `logs` that were ever written."""
    return {row[0]: LogHead(*row[1:]) for row in await fetch_rows(connection, sql.HEADS, (logs,))}


def _lease(row: tuple[Any, ...]) -> Any:
    return LeaseRow(*row[:6]).view(row[6])


async def fetch_rows(connection: Connection, sql: str, parameters: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    cursor = await connection.execute(sql, parameters, binary=True)
    return await cursor.fetchall()
