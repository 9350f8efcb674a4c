"""Checks of a new session before its first use: the server is a primary, and has the history that this client has seen.

    life    identifies the server process and its timeline; in the same life as before there is nothing to prove
    proof   in another life, one comparison with `RollbackDetector`, before this client reads or writes anything there

A promoted standby has another life, and so has a server that was restarted or restored. Other processes may write past
the lost commits. The proof compares nonces, so it does not depend on which process comes first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import psycopg
from psycopg import errors as pgerrors

from tidemill.consensus.api import Lease, LogHead
from tidemill.consensus.postgres import group_commit, single_ops, sql
from tidemill.consensus.postgres.connections import Connection
from tidemill.consensus.rollback_detection import RollbackDetector


class SessionAdmission:
    """Admission of one client's sessions.

    `adopted(life)` is called when the server has a new life that was proved to continue the old one: anything else
    cached about the server is invalid.
    """

    def __init__(self, seen: RollbackDetector, adopted: Callable[[str], None]) -> None:
        self._seen = seen
        self._adopted = adopted
        self._life = ""
        self._one_at_a_time = asyncio.Lock()

    async def admit(self, connection: Connection) -> None:
        """Admit a session. Raises StoreRolledBackError, or psycopg.Error for a standby or a broken session."""
        life = await read_server_life(connection)
        async with self._one_at_a_time:
            if self._seen.lost is not None:
                raise self._seen.lost
            if life == self._life:
                return
            if self._life:
                await self._check_history(connection)
            self._life = life
            self._adopted(life)

    async def _check_history(self, connection: Connection) -> None:
        seen, asked = self._seen, self._seen.seen_logs
        try:
            logs = {
                name: (LogHead(term, start, next_position), nonce)
                for name, term, start, next_position, nonce in await (
                    await connection.execute(
                        sql.HISTORY,
                        ([name for name, _ in asked], [position for _, position in asked]),
                        binary=True,
                    )
                ).fetchall()
            }
            registers = await group_commit.read_registers(connection, seen.seen_registers)
            leases: list[Lease] = await single_ops.read_leases(connection, seen.seen_leases)
        except (pgerrors.UndefinedTable, pgerrors.InvalidSchemaName) as error:
            raise seen.end("schema=tidemill found=none") from error
        seen.check_new_life(logs, registers, leases)


async def read_server_life(connection: Connection) -> str:
    """Return the name of the server process and its timeline. Raises StandbyError if the server is a standby."""
    row = await (await connection.execute(sql.LIFE)).fetchone()
    assert row is not None
    if row[0]:
        raise StandbyError("the server is a standby and cannot be written")
    return str(row[1])


class StandbyError(psycopg.OperationalError):
    """Retried as if the server did not answer: it may be promoted, or the URL's next host may be the primary."""
