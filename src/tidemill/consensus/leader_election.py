"""Leader election: run a body on one of several nodes, for as long as this process holds a lease.

The lease decides which node tries. Safety comes from what the body fences (a replication slot serves one connection;
log appends carry terms), so a late cancellation costs time, never data.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import structlog

from tidemill.base.errors import ConflictError, TidemillError, UnavailableError, UnknownOutcomeError
from tidemill.base.limits import LEASE_TTL_MS
from tidemill.base.runtime.tasks import Tasks
from tidemill.consensus.api import Consensus, Lease

log = structlog.get_logger()

Body = Callable[[Lease], Awaitable[None]]

RELEASE_TIMEOUT_S = 2.0
"""Timeout for the release of a lease. Releasing is optional: a lease that is not released in time expires."""


class LeaseRequest(msgspec.Struct, frozen=True):
    """Arguments of `Consensus.acquire`, for the first acquisition and for each renewal."""

    name: str
    holder: str
    info: bytes = b""
    ttl_ms: int = LEASE_TTL_MS

    async def acquire(self, consensus: Consensus) -> Lease:
        return await consensus.acquire(self.name, self.holder, self.ttl_ms, self.info)


async def run_while_leading(
    consensus: Consensus,
    request: LeaseRequest,
    body: Body,
    *,
    own_earlier_life: Callable[[str], bool] = lambda _: False,
    wanted: Callable[[], bool] = lambda: True,
) -> None:
    """Acquire the lease, run `body` and renew the lease, and repeat after the lease is lost.

    Returns when the body returns, and raises the body's error. `own_earlier_life(holder)` recognises a lease left
    behind by a killed process of this node: it is released instead of waited out. `wanted` is checked before each
    attempt to acquire; False ends the loop. In every case the body has ended before the lease is released, and the
    release is attempted once, within RELEASE_TIMEOUT_S.
    """
    while wanted():
        try:
            lease = await request.acquire(consensus)
        except ConflictError as conflict:
            current = conflict.current
            own = current if isinstance(current, Lease) and own_earlier_life(current.holder) else None
            if own is None or not await _try_release(consensus, own):
                await asyncio.sleep(request.ttl_ms / 3000)
            continue
        except (UnavailableError, UnknownOutcomeError):
            await asyncio.sleep(request.ttl_ms / 3000)
            continue
        log.info("leading", lease=lease.name, term=lease.term)
        if await _run_under_lease(consensus, request, lease, body):
            return
        log.warning("lease lost", lease=lease.name, term=lease.term)


async def _run_under_lease(consensus: Consensus, request: LeaseRequest, lease: Lease, body: Body) -> bool:
    """Return True if the body returned, False if the lease was lost."""
    try:
        return await _run_and_renew(consensus, request, lease, body)
    except (Exception, asyncio.CancelledError):
        # The body or consensus failed, or this task is being cancelled. The body no longer runs.
        await _try_release(consensus, lease)
        raise


async def _run_and_renew(consensus: Consensus, request: LeaseRequest, lease: Lease, body: Body) -> bool:
    async with Tasks(lambda *_: None) as tasks:
        running = tasks.spawn(_run_body(body, lease), name=f"lead-{lease.name}")
        missed = 0
        while True:
            done, _ = await asyncio.wait([running], timeout=request.ttl_ms / 3000)
            if done:
                running.result()
                await _try_release(consensus, lease)
                return True
            try:
                renewed = await request.acquire(consensus)
                missed = 0
                if renewed.term != lease.term:
                    return False
            except ConflictError:
                return False
            except (UnavailableError, UnknownOutcomeError):
                missed += 1
                if missed >= 3:
                    return False


async def _try_release(consensus: Consensus, lease: Lease) -> bool:
    """Release the lease; False if the release is not confirmed. Never raises: the lease expires."""
    try:
        async with asyncio.timeout(RELEASE_TIMEOUT_S):
            await consensus.release(lease.name, lease.holder, lease.term)
    except (TidemillError, TimeoutError) as error:
        log.info("lease not released; it will expire", lease=lease.name, term=lease.term, cause=str(error))
        return False
    return True


async def _run_body(body: Body, lease: Lease) -> None:
    await body(lease)
