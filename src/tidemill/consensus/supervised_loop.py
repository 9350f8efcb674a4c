"""Background loop of a client that restarts after any failure: the error is reported, and the loop restarts after a
pause.

A consensus client is the only way of its process to consensus. So no single request, answer or notification may end the
loop: the loop fails the work in hand and continues with the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tidemill.base.runtime.tasks import Backoff, RetryState, run_with_retries

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 5.0


async def run_supervised(name: str, body: Callable[[], Awaitable[None]], told: Callable[[str], None]) -> None:
    """Run `body` forever. Every error, of any type, is passed to the callback as a sentence before the pause."""
    now_s, restarts = asyncio.get_running_loop().time, Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
    attempts = RetryState(name, lambda error, parked: told(f"{name} failed: {error}"), now_s, restarts, may_park=False)
    await run_with_retries(body, attempts)
