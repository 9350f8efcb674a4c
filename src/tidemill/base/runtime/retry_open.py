"""Open stores that may be away when a process starts: retry, and report which store it is waiting for.

A node that ended because its bucket or consensus does not answer would be restarted forever without any message:
nothing is published before consensus is open, and nothing is served before the bucket is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import UnavailableError, UnknownOutcomeError
from tidemill.base.runtime.tasks import Backoff, error_sentence

T = TypeVar("T")

REPORT_PENDING_AFTER_S = 2.0
"""Duration after which a pending attempt is reported, too: a black-holed connection fails only much later."""

log = structlog.get_logger()


async def open_with_retry(
    opening: Callable[[], Awaitable[T]], clock: Clock, *, waiting: Callable[[str], None], longest_s: float = 5.0
) -> T:
    """Return the result of `opening`, retried on UnavailableError and UnknownOutcomeError.

    Each failure is reported with `waiting(sentence)`, and success with `waiting("")`. Raises errors that a retry cannot
    fix (InvalidError, CorruptError).
    """
    restarts = Backoff(0.25, longest_s)
    loop = asyncio.get_running_loop()
    while True:
        began_s = clock.monotonic_s()
        slow = loop.call_later(REPORT_PENDING_AFTER_S, waiting, f"no answer for {REPORT_PENDING_AFTER_S:g} s")
        try:
            opened = await opening()
        except (UnavailableError, UnknownOutcomeError) as error:
            cause = error_sentence(error)
        else:
            waiting("")
            return opened
        finally:
            slow.cancel()
        waiting(cause)
        log.warning("waiting for a store", cause=cause)
        await asyncio.sleep(restarts.pause_s(clock.monotonic_s() - began_s))
