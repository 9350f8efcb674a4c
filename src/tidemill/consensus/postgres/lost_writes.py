"""Handling of writes whose connection was lost, if commits wait for a synchronous standby.

A commit that waits for a synchronous standby is invisible. PostgreSQL answers a cancel or a termination of the backend
during this wait with a local commit: it becomes visible, and a failover can still lose it. A crash of the server during
the wait has the same effect.

    hang_up             a write is never cancelled: its socket is shut down, and its backend continues to wait
    end_session         a backend is terminated only where it cannot be committing
    prove_replication   before the outcome of a lost write is read, the new session commits an empty record. WAL is
                        replicated in order, so that its confirmation covers all earlier commits
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import Any

import psycopg
from psycopg import errors as pgerrors

REPLICATION_TIMEOUT_S = 10.0
"""Time that a new session waits until a synchronous standby has what was committed before it."""

END_BACKEND = (
    "SELECT CASE WHEN a.wait_event_type IN ('Client', 'Lock') THEN pg_terminate_backend(a.pid) ELSE false END,"
    " a.wait_event = 'SyncRep'"
    " FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid WHERE l.locktype = 'advisory'"
    " AND l.pid = %s AND l.objsubid = 1 AND ((l.classid::int8 << 32) | l.objid::int8) = %s"
)

BARRIER = "SELECT pg_logical_emit_message(true, 'tidemill', '')"
"""Changes nothing, but is written to WAL: its commit waits for the synchronous standbys."""


class NotReplicatedError(psycopg.OperationalError):
    """Earlier commits are not proved to be on a synchronous standby. Retried as if the server did not answer."""


def hang_up(connection: psycopg.AsyncConnection[Any]) -> None:
    """Shut the session's socket down. The work on it fails immediately, and its backend gets no cancel request.

    The descriptor stays open until the connection is closed, since the event loop still watches it.
    """
    with contextlib.suppress(psycopg.Error, OSError), socket.socket(fileno=os.dup(connection.fileno())) as stream:
        stream.shutdown(socket.SHUT_RDWR)


async def end_session(connection: psycopg.AsyncConnection[Any], backend: int, session_lock: int) -> None:
    """Take the lock of the previous session, whose backend is `backend` (0 = there was none), once it has ended.

    Raises psycopg.Error; NotReplicatedError if that backend waits for a standby.
    """
    waits_for_standby = False
    if backend:
        # Only an acceleration, and only for our own backend: the lock below is the proof. A backend that works or
        # commits is left alone; it ends within its statement_timeout, or with the wait for its standbys.
        cursor = await connection.execute(END_BACKEND, (backend, session_lock))
        waits_for_standby = any(row[1] for row in await cursor.fetchall())
    try:
        await connection.execute("SELECT pg_advisory_lock(%s)", (session_lock,))
    except pgerrors.LockNotAvailable as error:
        if waits_for_standby:
            raise NotReplicatedError("an earlier commit waits for a synchronous standby") from error
        raise


async def prove_replication(connection: psycopg.AsyncConnection[Any]) -> None:
    """Return once everything committed so far is on the synchronous standbys. Raises NotReplicatedError."""
    try:
        # Cancelling this commit is harmless: it has no effect that anyone reads.
        async with asyncio.timeout(REPLICATION_TIMEOUT_S):
            await connection.execute(BARRIER)
    except TimeoutError as error:
        raise NotReplicatedError("earlier commits are not on a synchronous standby") from error
