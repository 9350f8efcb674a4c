"""A background loop of a client that cannot die: whatever ends it is told, and it begins again after a pause.

A consensus client is its whole process's only way to consensus. So nothing that one request, one answer or one
notification brings may end it: the loop fails what it had in hand, and goes on with the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tidemill.base.runtime.tasks import Backoff, RetryState, until_it_returns

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 5.0


async def kept(name: str, body: Callable[[], Awaitable[None]], told: Callable[[str], None]) -> None:
    """Run `body` for ever. `told(sentence)` hears of every fault, of whatever type, before the pause."""
    now_s, restarts = asyncio.get_running_loop().time, Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
    attempts = RetryState(name, lambda error, parked: told(f"{name} failed: {error}"), now_s, restarts, may_park=False)
    await until_it_returns(body, attempts)
