"""Turns at writing into one shard: a lease, renewed while its holder computes. It saves work; the append is safe."""

from __future__ import annotations

import asyncio

import structlog

from tidemill.base.errors import ConflictError, TidemillError
from tidemill.base.limits import LEASE_TTL_MS
from tidemill.consensus.api import Lease
from tidemill.spark.stores import Stores

PAUSE_S = 0.05
PAUSE_MAX_S = 0.5
TELL_S = 10.0

log = structlog.get_logger()


class WriteLease:
    """One process's, once. Whoever cannot take, keep or give it up goes on without."""

    def __init__(self, stores: Stores, name: str) -> None:
        self._stores = stores
        self._name = name
        self._holder = f"writer-{stores.rand.nonce()}"
        self._lease: Lease | None = None
        self._taken_s = 0.0

    async def take(self) -> None:
        """Waits while others have theirs."""
        pause_s, tell_s = PAUSE_S, self._stores.clock.monotonic_s() + TELL_S
        while (holder := await self._held_by()) is not None:
            if self._stores.clock.monotonic_s() >= tell_s:
                log.info("waiting for a turn at writing", lease=self._name, held_by=holder)
                tell_s += TELL_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    async def keep(self) -> None:
        if self._stores.clock.monotonic_s() - self._taken_s > LEASE_TTL_MS / 3000:
            await self._held_by()

    async def give(self) -> None:
        if self._lease is None:
            return
        try:
            await self._stores.consensus.release(self._name, self._holder, self._lease.term)
        except TidemillError as error:
            log.info("turn not given up; it lapses by itself", lease=self._name, cause=str(error))

    async def _held_by(self) -> str | None:
        """Who has it; None when it is ours, or nobody can say."""
        self._taken_s = self._stores.clock.monotonic_s()
        try:
            self._lease = await self._stores.consensus.acquire(self._name, self._holder, LEASE_TTL_MS)
        except ConflictError as error:
            return error.current.holder if isinstance(error.current, Lease) else "another"
        except TidemillError as error:
            log.info("no turn, writing without", lease=self._name, cause=str(error))
        return None
