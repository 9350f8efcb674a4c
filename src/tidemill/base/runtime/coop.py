"""Giving the event loop its turn inside long plain work: stretches are bounded by time, not by a guess.

One `CoopBudget` is shared by all work of one kind, for a hundred tasks that took a stretch each would be one long
stretch: in one turn of the loop they have one together, and who waits gets it in the order of coming.

P1  Who rests after working goes behind all who wait; who was called and found the stretch used up keeps its place.
P2  While anybody waits, a turn's stretch begins with one who was called: whoever comes new before it waits too.
    So every turn the first who waits goes on, however many come; a short work waits for a stretch of each before it.
P3  `_turned` is scheduled exactly while a stretch has begun or anybody waits. It depends on no waiter's coming back:
    a cancelled one takes its place away and no other's turn.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from itertools import islice
from math import inf

from tidemill.base.clock import Clock

STRETCH_S = 0.005
"""A tenth of what the loop may stand still."""
_KEPT = -inf
"""No stretch has begun, and only one who was called may begin it."""


class CoopBudget:
    """`if pace.due: await pace.rest()` between two elements of the work, and before the first where many may begin."""

    def __init__(self, clock: Clock, stretch_s: float = STRETCH_S) -> None:
        self._clock = clock
        self._stretch_s = stretch_s
        self._until_s: float | None = None
        """Of this turn of the loop, once anybody works in it."""
        self._waiting: OrderedDict[object, asyncio.Future[None]] = OrderedDict()
        """By place, first come first; a place that gets another future stays where it is."""
        self._called = 0
        self._went_on = 0
        """Of those called for this turn."""

    @property
    def due(self) -> bool:
        now_s = self._clock.monotonic_s()
        if self._until_s is None:
            self._until_s = now_s + self._stretch_s
            asyncio.get_running_loop().call_soon(self._turned)
        return now_s >= self._until_s

    async def rest(self) -> None:
        """Until a turn of the loop whose stretch others have not used up; whoever rests first goes on first."""
        place = object()
        try:
            while self.due:
                self._waiting[place] = asyncio.get_running_loop().create_future()
                await self._waiting[place]
                if self._until_s == _KEPT:
                    self._until_s = self._clock.monotonic_s() + self._stretch_s
            self._went_on += place in self._waiting
        finally:
            self._waiting.pop(place, None)

    def _turned(self) -> None:
        """Runs after those it called in the turn before. As many are called as went on; twice as many if all did."""
        if self._waiting:
            count = self._went_on if self._went_on < self._called else 2 * self._called
            self._called, self._went_on = min(max(count, 1), len(self._waiting)), 0
            self._until_s = _KEPT
            for future in islice(self._waiting.values(), self._called):
                if not future.done():
                    future.set_result(None)
        elif self._called:
            self._called = 0  # what is left of the stretch they had is all that this turn still has
        else:
            self._until_s = None
            return
        asyncio.get_running_loop().call_soon(self._turned)
