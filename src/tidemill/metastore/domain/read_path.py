"""Reads of a domain: from the leader's database while this process leads, else from the follower's.

A barrier before them is shared by concurrent callers: one read of consensus, begun after the last of them had called.
Leadership may change during a read, and a follower's files may be deleted during it. Then the read restarts.

A file that is missing is never reported as MissingError, which callers take for a name that does not exist. The leader
proves its term and reads a second time; a follower reads from newer manifests. If the file is missing again, it is
lost: CorruptError. A scan that has given rows cannot restart; it reads only as far as shows which of both it is.
"""

from __future__ import annotations

import asyncio
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
from tidemill.base.runtime.tasks import FailureHandler, Tasks
from tidemill.metastore.domain.follower import Follower
from tidemill.metastore.domain.leader import Leader
from tidemill.metastore.lsm.database import Database
from tidemill.metastore.lsm.file_store import lost_file_error
from tidemill.metastore.lsm.read_view import PENDING, Row
from tidemill.metastore.lsm.snapshot import Snapshot
from tidemill.metastore.lsm.version import prefix_end


class Barrier:
    """Shared barrier. `pass_through` performs one round. A caller joins the round that has not begun, never the running
    one: that may have read consensus before the write that the caller wants to see was durable.
    """

    def __init__(self, pass_through: Callable[[], Awaitable[None]], name: str, on_failure: FailureHandler) -> None:
        """`on_failure` handles unexpected errors of a round; its callers have received the error already."""
        self._pass_through = pass_through
        self._name = name
        self._joinable: asyncio.Future[None] | None = None
        self._busy = False
        self._closed: TidemillError | None = None
        self._tasks = Tasks(on_failure)

    async def wait(self) -> None:
        """Wait for a round. Raises what the round raised, to each of its callers; ClosedError."""
        if self._closed is not None:
            raise self._closed
        if self._joinable is None:
            self._joinable = asyncio.get_running_loop().create_future()
            if not self._busy:
                self._busy = True
                self._tasks.spawn(self._run_rounds(), name=self._name)
        await asyncio.shield(self._joinable)

    async def _run_rounds(self) -> None:
        try:
            while self._joinable is not None:
                joined, self._joinable = self._joinable, None
                await self._run_round(joined)
        finally:
            self._busy = False
            if self._joinable is not None:
                # A round failed unexpectedly: callers that had joined the next one must not wait forever.
                joined, self._joinable = self._joinable, None
                _set_exception(joined, self._closed or ClosedError(f"the barrier failed: barrier={self._name}."))

    async def _run_round(self, joined: asyncio.Future[None]) -> None:
        try:
            await self._pass_through()
        except TidemillError as error:
            _set_exception(joined, error)
        except BaseException as error:
            _set_exception(joined, ClosedError(f"the barrier failed: barrier={self._name} reason={error!r}."))
            raise
        else:
            joined.set_result(None)

    async def aclose(self) -> None:
        self._closed = ClosedError(f"the barrier is closed: barrier={self._name}.")
        joinable, self._joinable = self._joinable, None
        await self._tasks.aclose()
        if joinable is not None:
            _set_exception(joinable, self._closed)


def _set_exception(joined: asyncio.Future[None], error: TidemillError) -> None:
    joined.set_exception(error)
    joined.exception()  # marks it as retrieved, in case no caller is left; waiting callers still get it


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
        """Return a change stamp, see `api.DomainRows`."""
        database = await self._serving_database()
        return None if database is None else database.change_stamp(first)

    async def scan(
        self, lower: bytes = b"", upper: bytes | None = None, *, reverse: bool = False
    ) -> AsyncIterator[Chunk]:
        """Yield chunks of live rows in [lower, upper), all from one snapshot.

        Raises UnavailableError if leadership changed, or a file was deleted, after the first chunk; CorruptError if a
        file is lost.
        """
        last: bytes | None = None
        met, proved = None, None
        for _ in range(READ_ATTEMPTS):
            database = await self._serving_database()
            if database is None:
                return
            try:
                async for chunk in database.scan(lower, upper, reverse=reverse):
                    last = chunk[0][-1]
                    yield chunk
                return
            except (ClosedError, FencedError, UnknownOutcomeError, MissingError) as error:
                proved = await self._prepare_restart(database, error, proved)
                if last is not None:
                    if isinstance(error, MissingError):
                        await self._read_beyond(last, lower, upper, reverse=reverse)
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
        met, proved = None, None
        for _ in range(READ_ATTEMPTS):
            database = await self._serving_database()
            if database is None:
                return nothing
            try:
                return await read(database)
            except (ClosedError, FencedError, UnknownOutcomeError, MissingError) as error:
                proved = await self._prepare_restart(database, error, proved)
                met = error
        raise self._attempts_exhausted_error(met)

    async def _read_beyond(self, last: bytes, lower: bytes, upper: bytes | None, *, reverse: bool) -> None:
        """Read the next rows of a scan that ended behind the row `last`. Raises CorruptError if a file of them is
        lost."""
        if reverse:
            upper = last
        else:
            lower = last + b"\x00"
        with contextlib.suppress(ClosedError, FencedError, UnavailableError, UnknownOutcomeError):
            async for _ in self.scan(lower, upper, reverse=reverse):
                return

    async def _serving_database(self) -> Database | None:
        """Return the database that serves reads now; None while the domain has no uuid."""
        self._check_open()
        leader = self._leader
        if leader is not None and not leader.has_ended:
            return leader.database
        if self._follower.database is not None:
            return self._follower.database
        return await self._follower.advance()

    async def _prepare_restart(
        self, database: Database, error: TidemillError, proved: Database | None
    ) -> Database | None:
        """Prepare a restart of a read. Raises `error` if a change of leadership or of files does not explain it.

        Returns the leader's database if it lacks a file although its term stands; `proved` is the result of the attempt
        before. Raises CorruptError if that is the same one.
        """
        self._check_open()
        leader = self._leader
        if leader is not None and leader.database is database and not leader.has_ended:
            if isinstance(error, MissingError):
                # Possibly superseded without knowing: the new leader may have deleted a file that this one still reads.
                try:
                    await leader.check_still_leading()
                except FencedError:
                    return None
                if database is proved:
                    raise lost_file_error(error)
                return database
            raise error
        if isinstance(error, MissingError) and database is self._follower.database:
            await self._follower.refresh()
        return None

    def _attempts_exhausted_error(self, met: TidemillError | None) -> TidemillError:
        """Return the error of a read that failed at every attempt. A file missing from every version was not collected;
        it is lost."""
        if isinstance(met, MissingError):
            return lost_file_error(met)
        return UnavailableError(
            f"leadership keeps changing: domain={self.name} attempts={READ_ATTEMPTS}.", fix="Retry."
        )

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed
