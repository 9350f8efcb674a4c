"""Giving the event loop its turn inside a long plain piece of work: stretches are bounded by time, not by a guess."""

from __future__ import annotations

import asyncio

from tidemill.base.clock import Clock

STRETCH_S = 0.005
"""A tenth of what the loop may stand still."""


class Pace:
    """`if pace.due: await pace.rest()` between two elements of the work."""

    def __init__(self, clock: Clock, stretch_s: float = STRETCH_S) -> None:
        self._clock = clock
        self._stretch_s = stretch_s
        self._until_s = clock.monotonic_s() + stretch_s

    @property
    def due(self) -> bool:
        return self._clock.monotonic_s() >= self._until_s

    async def rest(self) -> None:
        await asyncio.sleep(0)
        self._until_s = self._clock.monotonic_s() + self._stretch_s
