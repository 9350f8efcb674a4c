"""Ensure that one session captures under a name, with PostgreSQL's advisory lock, and end a stale predecessor.

A stopped or disconnected process keeps its connections, and with them the lock and the slot, as long as PostgreSQL
believes that they are alive. The process that has the capture's lease ends them. The catalogue names the last session
that captured, so no other session is ever ended, neither of another cluster nor of another capture.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import structlog

from tidemill.base.clock import Clock
from tidemill.capture.config import CaptureConfig
from tidemill.capture.postgres.connection import PgConnection, literal
from tidemill.capture.postgres.control_connection import ControlConnection, OpenQueries
from tidemill.capture.postgres.errors import SqlError
from tidemill.capture.postgres.replication_stream import ReplicationStream
from tidemill.capture.setup.blockers import Blocker, find_lock_holder, find_slot_holder
from tidemill.capture.setup.server_checks import ADVISORY_CLASS, advisory_lock_key, try_advisory_lock
from tidemill.metastore.catalogue import CaptureRow, Catalogue

log = structlog.get_logger()

LOCK_POLL_S = 0.5
END_PREDECESSOR_AFTER_S = 2.0
"""Waiting time before a predecessor is ended. A running process that lost the capture's lease ends its session on its
own in less time.
"""
SLOT_POLL_S = 0.2
SLOT_ATTEMPTS = 400
"""A walsender whose client died holds the slot until wal_sender_timeout (60 s by default) has passed."""
_OBJECT_IN_USE = "55006"
_SESSION = "pid || ' ' || extract(epoch FROM backend_start)"


async def acquire_lock(
    control: ControlConnection,
    config: CaptureConfig,
    catalogue: Catalogue,
    clock: Clock,
    wait: Callable[[Blocker | None], None],
) -> None:
    """Wait until no other session captures under this name. `wait` is called with the session that does."""
    began_s = clock.monotonic_s()
    while not await control.run(lambda wire: try_advisory_lock(wire, config)):
        holder = await control.run(lambda wire: find_lock_holder(wire, ADVISORY_CLASS, advisory_lock_key(config)))
        wait(holder)
        if clock.monotonic_s() - began_s >= END_PREDECESSOR_AFTER_S:
            row = await catalogue.get(CaptureRow, config.name)
            # A restored row may belong to a cluster that is still running.
            known = row.session if row is not None and not row.restored else ""
            ended = bool(known) and await control.run(partial(end_session, config=config, session=known))
            if ended:
                log.warning("the previous capture session was ended", capture=config.name, held_by=str(holder))
        await asyncio.sleep(LOCK_POLL_S)


async def start_stream_when_free(
    stream: ReplicationStream,
    control: ControlConnection,
    config: CaptureConfig,
    answers: OpenQueries,
    wait: Callable[[Blocker | None], None],
) -> None:
    """Start the stream once the slot is free: a predecessor's walsender may outlive its client for a moment. Raises
    SqlError if it stays.
    """
    for attempt in range(1, SLOT_ATTEMPTS + 1):
        try:
            # The answer to START_REPLICATION takes no longer than any other.
            with answers.track("the start of the stream"):
                await stream.start(config.slot, config.publication)
            return
        except SqlError as error:
            if error.sqlstate != _OBJECT_IN_USE or attempt == SLOT_ATTEMPTS:
                raise
            wait(await control.run(lambda wire: find_slot_holder(wire, config.slot)))
            await asyncio.sleep(SLOT_POLL_S)


async def read_own_session(wire: PgConnection) -> str:
    """Return the id of this session, in the form of CaptureRow.session. It is unique on the server at all times."""
    return await wire.value(f"SELECT {_SESSION} FROM pg_stat_activity WHERE pid = pg_backend_pid()") or ""


async def end_session(wire: PgConnection, config: CaptureConfig, session: str) -> bool:
    """End this session if it holds the capture's lock, and what its process streams from the capture's slot. Returns
    True if it was found. The caller has the capture's lease, and `session` is the previous owner of it: a frozen or
    disconnected process whose connections PostgreSQL believes to be alive. Raises SqlError if the role lacks the
    privilege.
    """
    rows = await wire.query(
        f"WITH before AS (SELECT a.* FROM pg_stat_activity a JOIN pg_locks l USING (pid) WHERE {_SESSION} ="
        f" {literal(session)} AND locktype = 'advisory' AND granted AND objsubid = 2"
        f" AND classid::bigint = {ADVISORY_CLASS} AND objid::bigint = {advisory_lock_key(config)})"
        " SELECT pg_terminate_backend(a.pid) FROM pg_stat_activity a, before WHERE a.pid = before.pid OR"
        # By the word that identifies the process (connection.application_name).
        " (split_part(a.application_name, ' ', 2) = split_part(before.application_name, ' ', 2)"
        " AND a.client_addr IS NOT DISTINCT FROM before.client_addr AND a.pid IN"
        f" (SELECT active_pid FROM pg_replication_slots WHERE slot_name = {literal(config.slot)}))"
    )
    return bool(rows)
