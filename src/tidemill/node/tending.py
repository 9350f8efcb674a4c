"""What only an operator can mend waits for its operator, and the node serves on.

A capture whose slot was lost, or whose table lost its replica identity, cannot go on by itself. Were that the end of
the node, one table of one database would end Kafka, the shapes and the other captures with it, and then, since
another node takes the capture over, every other node as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import Corrupt, Invalid
from tidemill.base.marks import Tracker

RETRY_S = 10.0
BUDGET_MS = 5_000

log = structlog.get_logger()


async def tended(
    body: Callable[[], Awaitable[None]], tracker: Tracker, mark: str, clock: Clock, *, retry_s: float = RETRY_S
) -> None:
    """Run `body`; when it raises Invalid, Missing or Corrupt, say so under `mark`, wait, and run it again.

    Its return ends this, any other error is raised.
    """
    while True:
        try:
            await body()
            return
        except (Invalid, Corrupt) as error:
            log.error("waiting for the operator", mark=mark, error=str(error))
            tracker.set(
                mark, 0, 1, now_ms=clock.now_ms(), held_by="operator", reason=str(error), budget_ms=BUDGET_MS
            )  # fmt: skip
        try:
            await asyncio.sleep(retry_s)
        except asyncio.CancelledError:
            tracker.remove(mark)
            raise
