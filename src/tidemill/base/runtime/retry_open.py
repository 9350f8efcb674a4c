"""Stores that are away when a process starts are waited for, and it is said who is waited for.

A node that ended because its bucket or its consensus does not answer would be restarted for ever without a word:
nothing is published before consensus is open, and nothing served before the bucket is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import UnavailableError, UnknownOutcomeError
from tidemill.base.runtime.tasks import Backoff, sentence

T = TypeVar("T")

SLOW_S = 2.0
"""An attempt that has not ended by then is told as well: what is black-holed fails only after a while."""

log = structlog.get_logger()


async def open_with_retry(
    opening: Callable[[], Awaitable[T]], clock: Clock, *, waiting: Callable[[str], None], longest_s: float = 5.0
) -> T:
    """The result of `opening`, tried again while it is Unavailable or Unknown; `waiting(sentence)` is told each time,
    and `""` when it opened. Raises what waiting cannot mend (Invalid, Corrupt)."""
    restarts = Backoff(0.25, longest_s)
    loop = asyncio.get_running_loop()
    while True:
        began_s = clock.monotonic_s()
        slow = loop.call_later(SLOW_S, waiting, f"no answer for {SLOW_S:g} s")
        try:
            opened = await opening()
        except (UnavailableError, UnknownOutcomeError) as error:
            cause = sentence(error)
        else:
            waiting("")
            return opened
        finally:
            slow.cancel()
        waiting(cause)
        log.warning("waiting for a store", cause=cause)
        await asyncio.sleep(restarts.pause_s(clock.monotonic_s() - began_s))
