"""Yield to the event loop inside long synchronous work: time bounds each stretch of work, not a guess of its cost.

One `CoopBudget` is shared by all work of one kind, since a hundred tasks with a stretch each would be one long stretch.
In one turn of the loop they have one stretch together, and waiting tasks get it in the order of their arrival.

Invariant (queue order): a task that rests after working goes to the end of the queue. A task that was called but found
the stretch used up keeps its place.

Invariant (no starvation): while any task waits, a turn's stretch starts with a called task; a newcomer before it waits,
too. So the first waiting task continues in every turn, however many arrive, and a short piece of work waits for one
stretch of each task before it.

Invariant (no lost wake-up): `_call_next` is scheduled exactly while a stretch has begun or a task waits. It does not
depend on a waiter resuming: a cancelled one removes its own place and takes no other's turn.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from itertools import islice
from math import inf

from tidemill.base.clock import Clock

STRETCH_S = 0.005
"""Length of a stretch: a tenth of the tolerated stall of the event loop."""
_RESERVED = -inf
"""Marker: no stretch has begun, and only a called task may begin it."""


class CoopBudget:
    """Shared time budget: `if pace.due: await pace.rest()` between two elements of the work.

    Also use it before the first element if many tasks may start together.
    """

    def __init__(self, clock: Clock, stretch_s: float = STRETCH_S) -> None:
        self._clock = clock
        self._stretch_s = stretch_s
        self._until_s: float | None = None
        """End of the stretch in this turn of the loop; None until a task works in it."""
        self._waiting: OrderedDict[object, asyncio.Future[None]] = OrderedDict()
        """Futures by place, in order of arrival; a place whose future is replaced keeps its order."""
        self._called = 0
        self._went_on = 0
        """Number of tasks called for this turn that continued."""

    @property
    def is_used_up(self) -> bool:
        now_s = self._clock.monotonic_s()
        if self._until_s is None:
            self._until_s = now_s + self._stretch_s
            asyncio.get_running_loop().call_soon(self._call_next)
        return now_s >= self._until_s

    async def wait_for_turn(self) -> None:
        """Wait for a turn of the loop whose stretch is not used up; tasks continue in the order of arrival."""
        place = object()
        try:
            while self.is_used_up:
                self._waiting[place] = asyncio.get_running_loop().create_future()
                await self._waiting[place]
                if self._until_s == _RESERVED:
                    self._until_s = self._clock.monotonic_s() + self._stretch_s
            self._went_on += place in self._waiting
        finally:
            self._waiting.pop(place, None)

    def _call_next(self) -> None:
        """Call the next tasks; runs after those called in the previous turn.

        Calls as many tasks as continued in that turn, or twice as many if all did.
        """
        if self._waiting:
            count = self._went_on if self._went_on < self._called else 2 * self._called
            self._called, self._went_on = min(max(count, 1), len(self._waiting)), 0
            self._until_s = _RESERVED
            for future in islice(self._waiting.values(), self._called):
                if not future.done():
                    future.set_result(None)
        elif self._called:
            self._called = 0  # this turn has only the rest of the stretch of the called tasks
        else:
            self._until_s = None
            return
        asyncio.get_running_loop().call_soon(self._call_next)
