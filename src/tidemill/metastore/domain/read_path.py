"""The reads of a domain: from the leader's database while this process leads, else from the follower's.

Which of the two may change under a read, and a follower's files may be collected under it: then it begins again.
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
"""A read that met a change of leadership or a collected file begins again, so often at most."""


class Reading:
    """`Domain` is one. Without `sync` before them, reads are stale by a bound; they never see half a batch."""

    def __init__(self, name: str, follower: Follower) -> None:
        self.name = name
        self._follower = follower
        self._leader: Leader | None = None
        self._closed: TidemillError | None = None

    async def get(self, key: bytes) -> bytes | None:
        leader = self._leader
        if leader is not None and not leader.ended:
            value = leader.database.peek(key)
            if value is not PENDING:
                return value
        return await self._read(lambda database: database.get(key), None)

    async def get_row(self, key: bytes) -> Row | None:
        return await self._read(lambda database: database.get_row(key), None)

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """One value, or None, for each key, all of one moment."""
        return await self._read(lambda database: database.get_many(keys), [None] * len(keys))

    async def stamp(self, first: bytes) -> object:
        """See `api.Rows`."""
        database = await self._serving()
        return None if database is None else database.stamp(first)

    async def scan(
        self, lower: bytes = b"", upper: bytes | None = None, *, reverse: bool = False
    ) -> AsyncIterator[Chunk]:
        """Chunks of live rows in [lower, upper), all of one moment.

        Unavailable when leadership changed, or a file was collected, after the first chunk was given.
        """
        given, met = False, None
        for _ in range(READ_ATTEMPTS):
            database = await self._serving()
            if database is None:
                return
            try:
                async for chunk in database.scan(lower, upper, reverse=reverse):
                    given = True
                    yield chunk
                return
            except (ClosedError, FencedError, UnknownOutcomeError, MissingError) as error:
                await self._begin_again(database, error)
                if given:
                    raise UnavailableError(
                        f"The scan was cut off: reason={error.message!r}.", fix="Scan again."
                    ) from error
                met = error
        raise self._restless(met)

    def prefix(self, prefix: bytes, *, reverse: bool = False) -> AsyncIterator[Chunk]:
        return self.scan(prefix, prefix_end(prefix), reverse=reverse)

    async def snapshot(self) -> Snapshot:
        """The database as it is now; ends with leadership. Raises UnavailableError while nobody has led yet."""
        database = await self._serving()
        if database is None:
            raise UnavailableError(f"The domain has no rows yet: domain={self.name}.", fix="Write to it first.")
        return database.snapshot()

    async def _read(self, read: Callable[[Database], Awaitable[T]], nothing: T) -> T:
        met = None
        for _ in range(READ_ATTEMPTS):
            database = await self._serving()
            if database is None:
                return nothing
            try:
                return await read(database)
            except (ClosedError, FencedError, UnknownOutcomeError, MissingError) as error:
                await self._begin_again(database, error)
                met = error
        raise self._restless(met)

    async def _serving(self) -> Database | None:
        """The database that answers now; None while the domain has no uuid."""
        self._check()
        leader = self._leader
        if leader is not None and not leader.ended:
            return leader.database
        if self._follower.database is not None:
            return self._follower.database
        return await self._follower.advance()

    async def _begin_again(self, database: Database, error: TidemillError) -> None:
        """Raise `error` when it is no consequence of a change."""
        self._check()
        leader = self._leader
        if leader is not None and leader.database is database and not leader.ended:
            if isinstance(error, MissingError):
                # Deposed without knowing it: the next leader may have collected what this one still reads.
                with contextlib.suppress(FencedError):
                    await leader.stands()
                    raise error
                return
            raise error
        if isinstance(error, MissingError) and database is self._follower.database:
            await self._follower.refresh()

    def _restless(self, met: TidemillError | None) -> TidemillError:
        """What is missing under every version of the database was not collected: it is gone."""
        if isinstance(met, MissingError):
            return met
        return UnavailableError(
            f"Leadership keeps changing: domain={self.name} attempts={READ_ATTEMPTS}.", fix="Retry."
        )

    def _check(self) -> None:
        if self._closed is not None:
            raise self._closed
