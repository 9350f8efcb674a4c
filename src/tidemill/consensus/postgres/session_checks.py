"""What a new session must show before anything is asked on it: a primary, and the history that this client has heard.

    life    the server process and its timeline: the same one as before, and there is nothing to prove
    proof   in another life, one look at what `RollbackDetector` names, before this client writes or reads anything
            there

A promoted standby has another life, and so has a server that was restarted or restored. Other processes may write
past what is missing; the proof compares nonces, so it does not depend on who comes first.
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


class Admission:
    """One client's. `adopted(life)` is called when the server has another life than before, which was proved to be a
    continuation: whatever else was cached of the server is void."""

    def __init__(self, seen: RollbackDetector, adopted: Callable[[str], None]) -> None:
        self._seen = seen
        self._adopted = adopted
        self._life = ""
        self._one_at_a_time = asyncio.Lock()

    async def admit(self, connection: Connection) -> None:
        """Raises MovedBack (`consensus.seen` SE1), or psycopg.Error: a standby, or a session that broke."""
        life = await life_of(connection)
        async with self._one_at_a_time:
            if self._seen.lost is not None:
                raise self._seen.lost
            if life == self._life:
                return
            if self._life:
                await self._prove(connection)
            self._life = life
            self._adopted(life)

    async def _prove(self, connection: Connection) -> None:
        seen, asked = self._seen, self._seen.logs
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
            registers = await group_commit.registers(connection, seen.registers)
            leases: list[Lease] = await single_ops.leases(connection, seen.leases)
        except (pgerrors.UndefinedTable, pgerrors.InvalidSchemaName) as error:
            raise seen.end("schema=tidemill found=none") from error
        seen.compare(logs, registers, leases)


async def life_of(connection: Connection) -> str:
    """Names the server process and its timeline. Raises ReadOnlySqlTransaction of a standby."""
    row = await (await connection.execute(sql.LIFE)).fetchone()
    assert row is not None
    if row[0]:
        raise Standby("the server is a standby and cannot be written")
    return str(row[1])


class Standby(psycopg.OperationalError):
    """Waited for, as a server that is away: it may be promoted, or the next host of the URL may be the primary."""
