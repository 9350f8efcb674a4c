"""Giving the event loop its turn inside long plain work: stretches are bounded by time, not by a guess.

One `Pace` is shared by all work of one kind, for a hundred tasks that took a stretch each would be one long stretch:
in one turn of the loop they have one together.
"""

from __future__ import annotations

import asyncio

from tidemill.base.clock import Clock

STRETCH_S = 0.005
"""A tenth of what the loop may stand still."""


class Pace:
    """`if pace.due: await pace.rest()` between two elements of the work, and before the first where many may begin."""

    def __init__(self, clock: Clock, stretch_s: float = STRETCH_S) -> None:
        self._clock = clock
        self._stretch_s = stretch_s
        self._until_s: float | None = None
        """Of this turn of the loop, once anybody works in it."""

    @property
    def due(self) -> bool:
        if self._until_s is None:
            self._until_s = self._clock.monotonic_s() + self._stretch_s
            asyncio.get_running_loop().call_soon(self._turned)
            return False
        return self._clock.monotonic_s() >= self._until_s

    def _turned(self) -> None:
        self._until_s = None

    async def rest(self) -> None:
        """Until a turn of the loop whose stretch others have not used up; whoever rests first goes on first."""
        while True:
            await asyncio.sleep(0)
            if not self.due:
                return
