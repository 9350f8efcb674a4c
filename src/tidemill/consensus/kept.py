"""A background loop of a client that cannot die: whatever ends it is told, and it begins again after a pause.

A consensus client is its whole process's only way to consensus. So nothing that one request, one answer or one
notification brings may end it: the loop fails what it had in hand, and goes on with the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from tidemill.base.tasks import Restarts, cancelled_from_outside, is_fault, sentence

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 5.0

log = structlog.get_logger()


async def kept(name: str, body: Callable[[], Awaitable[None]], told: Callable[[str], None]) -> None:
    """Run `body` for ever. `told(sentence)` hears of every fault, of whatever type, before the pause."""
    loop = asyncio.get_running_loop()
    restarts = Restarts(FIRST_PAUSE_S, LONGEST_PAUSE_S)
    while True:
        started_s = loop.time()
        try:
            await body()
        except asyncio.CancelledError as error:
            if cancelled_from_outside():
                raise
            fault: BaseException = error
        except BaseException as error:
            if not is_fault(error):
                raise
            fault = error
        else:
            return
        log.error("a loop of the consensus client begins again", loop=name, error=sentence(fault), exc_info=fault)
        told(f"{name} failed: {sentence(fault)}")
        await asyncio.sleep(restarts.pause_s(loop.time() - started_s))
