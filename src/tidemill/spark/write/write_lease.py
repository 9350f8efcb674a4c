"""Write lease: writers of one shard take turns. The lease is renewed while its holder computes. It only saves work; the
compare-and-append keeps the shard correct without it."""

from __future__ import annotations

import asyncio

import structlog

from tidemill.base.errors import ConflictError, TidemillError
from tidemill.base.limits import LEASE_TTL_MS
from tidemill.consensus.api import Lease
from tidemill.spark.stores import Stores

PAUSE_S = 0.05
PAUSE_MAX_S = 0.5
WAIT_LOG_S = 10.0

log = structlog.get_logger()


class WriteLease:
    """One turn of one process. A process that cannot acquire, renew or release the lease continues without it."""

    def __init__(self, stores: Stores, name: str) -> None:
        self._stores = stores
        self._name = name
        self._holder = f"writer-{stores.rand.nonce()}"
        self._lease: Lease | None = None
        self._taken_s = 0.0

    async def acquire(self) -> None:
        """Acquire the lease; wait while other writers hold it."""
        pause_s, tell_s = PAUSE_S, self._stores.clock.monotonic_s() + WAIT_LOG_S
        while (holder := await self._try_acquire()) is not None:
            if self._stores.clock.monotonic_s() >= tell_s:
                log.info("waiting for the write lease", lease=self._name, held_by=holder)
                tell_s += WAIT_LOG_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    async def renew(self) -> None:
        if self._stores.clock.monotonic_s() - self._taken_s > LEASE_TTL_MS / 3000:
            await self._try_acquire()

    async def release(self) -> None:
        if self._lease is None:
            return
        try:
            await self._stores.consensus.release(self._name, self._holder, self._lease.term)
        except TidemillError as error:
            log.info("write lease not released; it expires", lease=self._name, cause=str(error))

    async def _try_acquire(self) -> str | None:
        """Return the current holder; None if this process holds the lease, or if the holder is unknown."""
        self._taken_s = self._stores.clock.monotonic_s()
        try:
            self._lease = await self._stores.consensus.acquire(self._name, self._holder, LEASE_TTL_MS)
        except ConflictError as error:
            return error.current.holder if isinstance(error.current, Lease) else "another"
        except TidemillError as error:
            log.info("write lease not acquired; writing without it", lease=self._name, cause=str(error))
        return None
