"""Reads of a domain: from the leader's database while this process leads, else from the follower's.

Leadership may change during a read, and a follower's files may be deleted during it. Then the read restarts.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from tidemill.base.errors import (
    ClosedError,
    FencedError,
    MissingError,
    TidemillError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidemill.metastore.domain.follower import Follower
from tidemill.metastore.domain.leader import Leader
from tidemill.metastore.lsm.database import Database
from tidemill.metastore.lsm.read_view import PENDING, Row
from tidemill.metastore.lsm.snapshot import Snapshot
from tidemill.metastore.lsm.version import prefix_end

T = TypeVar("T")
Chunk = tuple[list[bytes], list[bytes]]

READ_ATTEMPTS = 5
"""Limit of restarts of a read during which leadership changed or a file was deleted."""


class DomainReads:
    """Reads of a domain; base class of `Domain`. Without a `sync` before, reads are stale by a bounded time, never
    torn."""

    def __init__(self, name: str, follower: Follower) -> None:
        self.name = name
        self._follower = follower
        self._leader: Leader | None = None
        self._closed: TidemillError | None = None

    async def get(self, key: bytes) -> bytes | None:
        leader = self._leader
        if leader is not None and not leader.has_ended:
            value = leader.database.peek(key)
            if value is not PENDING:
                return value
        return await self._read(lambda database: database.get(key), None)

    async def get_row(self, key: bytes) -> Row | None:
        return await self._read(lambda database: database.get_row(key), None)

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return one value, or None, for each key, all from one snapshot."""
        return await self._read(lambda database: database.get_many(keys), [None] * len(keys))

    async def change_stamp(self, first: bytes) -> object:
        """Return a change stamp, see `api.Rows`."""
        database = await self._serving_database()
        return None if database is None else database.change_stamp(first)

    async def scan(
        self, lower: bytes = b"", upper: bytes | None = None, *, reverse: bool = False
    ) -> AsyncIterator[Chunk]:
        """Yield chunks of live rows in [lower, upper), all from one snapshot.

        Raises Unavailable if leadership changed, or a file was deleted, after the first chunk.
        """
        given, met = False, None
        for _ in range(READ_ATTEMPTS):
            database = await self._serving_database()
            if database is None:
                return
            try:
                async for chunk in database.scan(lower, upper, reverse=reverse):
                    given = True
                    yield chunk
                return
            except (ClosedError, FencedError, UnknownOutcomeError, MissingError) as error:
                await self._prepare_restart(database, error)
                if given:
                    raise UnavailableError(
                        f"the scan was interrupted: reason={error.message!r}.", fix="Scan again."
                    ) from error
                met = error
        raise self._attempts_exhausted_error(met)

    def prefix(self, prefix: bytes, *, reverse: bool = False) -> AsyncIterator[Chunk]:
        return self.scan(prefix, prefix_end(prefix), reverse=reverse)

    async def snapshot(self) -> Snapshot:
        """Return a snapshot of the database, valid until leadership ends. Raises UnavailableError if no process has led
        yet."""
        database = await self._serving_database()
        if database is None:
            raise UnavailableError(f"the domain has no rows yet: domain={self.name}.", fix="Write to it first.")
        return database.snapshot()

    async def _read(self, read: Callable[[Database], Awaitable[T]], nothing: T) -> T:
        met = None
        for _ in range(READ_ATTEMPTS):
            database = await self._serving_database()
            if database is None:
                return nothing
            try:
                return await read(database)
            except (ClosedError, FencedError, UnknownOutcomeError, MissingError) as error:
                await self._prepare_restart(database, error)
                met = error
        raise self._attempts_exhausted_error(met)

    async def _serving_database(self) -> Database | None:
        """Return the database that serves reads now; None while the domain has no uuid."""
        self._check_open()
        leader = self._leader
        if leader is not None and not leader.has_ended:
            return leader.database
        if self._follower.database is not None:
            return self._follower.database
        return await self._follower.advance()

    async def _prepare_restart(self, database: Database, error: TidemillError) -> None:
        """Prepare a restart of a read. Raises `error` if a change of leadership or of files does not explain it."""
        self._check_open()
        leader = self._leader
        if leader is not None and leader.database is database and not leader.has_ended:
            if isinstance(error, MissingError):
                # Possibly superseded without knowing: the new leader may have deleted a file that this one still reads.
                with contextlib.suppress(FencedError):
                    await leader.check_still_leading()
                    raise error
                return
            raise error
        if isinstance(error, MissingError) and database is self._follower.database:
            await self._follower.refresh()

    def _attempts_exhausted_error(self, met: TidemillError | None) -> TidemillError:
        """Return the error of a read that failed at every attempt. A file missing from every version was not collected;
        it is lost."""
        if isinstance(met, MissingError):
            return met
        return UnavailableError(
            f"leadership keeps changing: domain={self.name} attempts={READ_ATTEMPTS}.", fix="Retry."
        )

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed
