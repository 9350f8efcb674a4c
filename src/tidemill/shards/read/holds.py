"""Leased holds as their users take them: renewed while used, gone soon after their owner died.

    a short read            none: replaced objects stay readable for the collection's delay
    `holding`               one long read at one time (verify, an export, a big snapshot): hold, then choose batches
    `MovingHold`            whoever goes along the shard and means to come back to where it was (derived tables,
                            streams)

A listener at the shard's head takes none: history trails the head by the retention, and one that is further behind
holds while it catches up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol

import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import TidemillError, UnavailableError, UnknownOutcomeError
from tidemill.base.runtime.tasks import Tasks
from tidemill.shards.api import HistoryLostError
from tidemill.shards.state.state import ShardState

HOLD_TTL_MS = 300_000
"""How long history outlives a reader that died. Renewed at a third of it, so that two lost renewals harm nobody."""

HOLD_ABOVE_BYTES = 16 << 20
"""A read of more than this takes a hold by itself: it may last longer than collection waits."""

RELEASE_TIMEOUT_S = 2.0

log = structlog.get_logger()


class Holdable(Protocol):
    name: str

    @property
    def state(self) -> ShardState: ...

    async def hold(self, reader: str, since: int, ttl_ms: int) -> None: ...

    async def release(self, reader: str) -> None: ...


@asynccontextmanager
async def holding(shard: Holdable, reader: str, since: int, *, ttl_ms: int = HOLD_TTL_MS) -> AsyncIterator[None]:
    """Every time ≥ `since` stays readable inside, and so does what was chosen there. `reader` names this very use.

    Raises HistoryLostError (since is below the shard's), UnavailableError (too many holds, or consensus is away),
    UnknownOutcomeError. A hold that could not be renewed lapses: the reads then say that history is lost.
    """
    await shard.hold(reader, since, ttl_ms)

    def lapsed(_: str, error: BaseException) -> None:
        log.warning("hold lapsed", shard=shard.name, reader=reader, cause=str(error))

    try:
        async with Tasks(lapsed) as tasks:
            renewing = _renewing(lambda: shard.hold(reader, since, ttl_ms), shard.name, reader, ttl_ms)
            tasks.spawn(renewing, name=f"hold-{shard.name}")
            yield
    finally:
        await let_go(shard, reader)


async def _renewing(renew: Callable[[], Awaitable[None]], shard: str, reader: str, ttl_ms: int) -> None:
    while True:
        await asyncio.sleep(ttl_ms / 3000)
        try:
            await renew()
        except (UnavailableError, UnknownOutcomeError) as error:
            log.warning("hold not renewed, trying again", shard=shard, reader=reader, cause=str(error))


async def let_go(shard: Holdable, reader: str) -> None:
    """A courtesy: what cannot be released in time lapses by itself."""
    try:
        async with asyncio.timeout(RELEASE_TIMEOUT_S):
            await shard.release(reader)
    except (TidemillError, TimeoutError) as error:
        log.info("hold not released; it lapses by itself", shard=shard.name, reader=reader, cause=str(error))


class MovingHold:
    """Holds one shard from a time that moves on. Writes only when that is worth it: an idle shard costs nothing.

    `kept`: its owner may be away for longer than the lease, and runs `keep` meanwhile. The newest time is held too
    then, for much may be written before the owner comes back; an idle shard costs a write every third of the lease.
    """

    def __init__(
        self, shard: Holdable, reader: str, clock: Clock, *, ttl_ms: int = HOLD_TTL_MS, kept: bool = False
    ) -> None:
        self._shard = shard
        self._reader = reader
        self._clock = clock
        self._ttl_ms = ttl_ms
        self._kept = kept
        self._writing = asyncio.Lock()
        self._since = -1
        self._until_ms = 0

    async def at(self, since: int) -> None:
        """From now on hold from `since`. Raises as `hold`; nothing while no history above it can be lost."""
        if not self._kept and since >= self._shard.state.upper - 1:
            return  # since never passes the newest time
        async with self._writing:
            fresh = self._until_ms - self._clock.now_ms() > self._ttl_ms * 2 // 3
            if fresh and since - self._since < self._ttl_ms // 10:
                return
            # Before the write: were its answer lost, a renewal further back would be refused for ever.
            self._since = since
            await self._write()

    async def keep(self) -> None:
        """Renew where `at` was last, until cancelled. What is lost is not told here: the next `at` raises it."""
        try:
            await _renewing(self._renew, self._shard.name, self._reader, self._ttl_ms)
        except Exception as error:
            log.warning("hold given up", shard=self._shard.name, reader=self._reader, cause=str(error))
            raise

    async def _renew(self) -> None:
        async with self._writing:
            if self._since < 0:
                return
            try:
                # At the same time as before: a hold that moves protects no longer what was chosen under it.
                await self._write()
            except HistoryLostError as error:
                self._since, self._until_ms = -1, 0
                log.warning("hold lapsed", shard=self._shard.name, reader=self._reader, cause=str(error))

    async def _write(self) -> None:
        now_ms = self._clock.now_ms()
        await self._shard.hold(self._reader, self._since, self._ttl_ms)
        self._until_ms = now_ms + self._ttl_ms

    async def release(self) -> None:
        if self._until_ms > self._clock.now_ms():
            await let_go(self._shard, self._reader)
