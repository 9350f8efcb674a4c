"""Run something on one node of many: while this process holds a lease, the body runs; when it loses it, the body ends.

The lease decides who tries. Safety comes from what the body fences (a replication slot serves one
connection; log appends carry terms), so a late cancellation costs time, never data.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from tidemill.base.errors import ConflictError, TidemillError, UnavailableError, UnknownOutcomeError
from tidemill.base.limits import LEASE_TTL_MS
from tidemill.base.runtime.tasks import Tasks
from tidemill.consensus.api import Consensus, Lease

log = structlog.get_logger()

Body = Callable[[Lease], Awaitable[None]]

RELEASE_TIMEOUT_S = 2.0
"""To give a lease up is a courtesy: whoever cannot do it in time leaves it to expire."""


async def lead(
    consensus: Consensus,
    name: str,
    holder: str,
    info: bytes,
    body: Body,
    *,
    own_earlier_life: Callable[[str], bool] = lambda _: False,
    wanted: Callable[[], bool] = lambda: True,
    ttl_ms: int = LEASE_TTL_MS,
) -> None:
    """For ever: acquire `name`, run `body`, renew. An error of the body is raised; its return ends this too.

    `own_earlier_life(holder)` recognises a lease that a killed process of this very node left behind: it
    is released instead of waited out. `wanted` is asked before each attempt to acquire: False ends this.
    However it ends, the body has ended first and the lease is given up if consensus takes that in time.
    """
    while wanted():
        try:
            lease = await consensus.acquire(name, holder, ttl_ms, info)
        except ConflictError as conflict:
            current = conflict.current
            own = current if isinstance(current, Lease) and own_earlier_life(current.holder) else None
            if own is None or not await _released(consensus, own):
                await asyncio.sleep(ttl_ms / 3000)
            continue
        except (UnavailableError, UnknownOutcomeError):
            await asyncio.sleep(ttl_ms / 3000)
            continue
        log.info("leading", lease=name, term=lease.term)
        if await _while_held(consensus, lease, holder, info, body):
            return
        log.warning("lease lost", lease=name, term=lease.term)


async def _while_held(consensus: Consensus, lease: Lease, holder: str, info: bytes, body: Body) -> bool:
    """True when the body returned by itself; False when the lease was lost."""
    try:
        return await _held(consensus, lease, holder, info, body)
    except (Exception, asyncio.CancelledError):
        # An error of the body or of consensus, or whoever runs this is being stopped. Nothing of it runs any more.
        await _released(consensus, lease)
        raise


async def _held(consensus: Consensus, lease: Lease, holder: str, info: bytes, body: Body) -> bool:
    async with Tasks(lambda *_: None) as tasks:
        running = tasks.spawn(_as_coroutine(body, lease), name=f"lead-{lease.name}")
        missed = 0
        while True:
            done, _ = await asyncio.wait([running], timeout=lease.ttl_ms / 3000)
            if done:
                running.result()
                await _released(consensus, lease)
                return True
            try:
                renewed = await consensus.acquire(lease.name, holder, lease.ttl_ms, info)
                missed = 0
                if renewed.term != lease.term:
                    return False
            except ConflictError:
                return False
            except (UnavailableError, UnknownOutcomeError):
                missed += 1
                if missed >= 3:
                    return False


async def _released(consensus: Consensus, lease: Lease) -> bool:
    """Give the lease up; False when that is not known to have happened. Raises nothing: it expires by itself."""
    try:
        async with asyncio.timeout(RELEASE_TIMEOUT_S):
            await consensus.release(lease.name, lease.holder, lease.term)
    except (TidemillError, TimeoutError) as error:
        log.info("lease not released; it expires by itself", lease=lease.name, term=lease.term, cause=str(error))
        return False
    return True


async def _as_coroutine(body: Body, lease: Lease) -> None:
    await body(lease)
