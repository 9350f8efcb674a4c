"""Run something on one node of many: while this process holds a lease, the body runs; when it loses it, the body ends.

The lease decides who tries. Safety comes from what the body fences (a replication slot serves one
connection; log appends carry terms), so a late cancellation costs time, never data.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from tidemill.base.errors import Conflict, Unavailable, Unknown
from tidemill.base.limits import LEASE_TTL_MS
from tidemill.base.tasks import Tasks
from tidemill.consensus.api import Consensus, Lease

log = structlog.get_logger()

Body = Callable[[Lease], Awaitable[None]]


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
    """
    while wanted():
        try:
            lease = await consensus.acquire(name, holder, ttl_ms, info)
        except Conflict as conflict:
            current = conflict.current
            if isinstance(current, Lease) and own_earlier_life(current.holder):
                await consensus.release(name, current.holder, current.term)
            else:
                await asyncio.sleep(ttl_ms / 3000)
            continue
        except (Unavailable, Unknown):
            await asyncio.sleep(ttl_ms / 3000)
            continue
        log.info("leading", lease=name, term=lease.term)
        if await _while_held(consensus, lease, holder, info, body):
            return
        log.warning("lease lost", lease=name, term=lease.term)


async def _while_held(consensus: Consensus, lease: Lease, holder: str, info: bytes, body: Body) -> bool:
    """True when the body returned by itself; False when the lease was lost."""
    async with Tasks(lambda *_: None) as tasks:
        running = tasks.spawn(_as_coroutine(body, lease), name=f"lead-{lease.name}")
        missed = 0
        while True:
            done, _ = await asyncio.wait([running], timeout=lease.ttl_ms / 3000)
            if done:
                await consensus.release(lease.name, holder, lease.term)
                running.result()
                return True
            try:
                renewed = await consensus.acquire(lease.name, holder, lease.ttl_ms, info)
                missed = 0
                if renewed.term != lease.term:
                    return False
            except Conflict:
                return False
            except (Unavailable, Unknown):
                missed += 1
                if missed >= 3:
                    return False


async def _as_coroutine(body: Body, lease: Lease) -> None:
    await body(lease)
