"""What shapes may take of the event loop: work in short slices, and a share of the time in all.

Q1  A slice ends after SLICE_S, at the next step's end: that is how long anything else waits for shapes at once.
Q2  Over any longer while shapes take at most `share` of the loop's time, however much they have to do. What comes
    in faster than that falls behind, and what falls too far behind ends (capture_tap.py); nobody else waits for it.
Q3  Slices are taken in turns: a snapshot that is rendered and a stream that is evaluated both go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tidemill.base.clock import Clock

SLICE_S = 0.004
SHARE = 0.5


class Turn:
    """One slice. A step asks `over` after each piece of work, and stops."""

    def __init__(self, clock: Clock, until_s: float) -> None:
        self._clock = clock
        self.until_s = until_s

    @property
    def over(self) -> bool:
        return self._clock.monotonic_s() >= self.until_s


Step = Callable[[Turn], bool]
"""Works until the turn is over or nothing is left; True = there is more to do."""


class LoopShare:
    """All shapes of one process work through one of these."""

    def __init__(self, clock: Clock, share: float = SHARE, slice_s: float = SLICE_S) -> None:
        self._clock = clock
        self._share = share
        self._slice_s = slice_s
        self._turns = asyncio.Lock()
        self._debt_s = 0.0
        """Work that the loop's other users have not yet had their share of time for (Q2)."""
        self._settled_s = clock.monotonic_s()
        self.busy_s = 0.0
        self.longest_s = 0.0

    async def work(self, step: Step) -> None:
        """Call `step` in turns until it has nothing left. Raises what it raises."""
        more = True
        while more:
            async with self._turns:
                started_s = self._clock.monotonic_s()
                try:
                    more = step(Turn(self._clock, started_s + self._slice_s))
                finally:
                    pause_s = self._settle(self._clock.monotonic_s() - started_s)
                if pause_s > 0:
                    await asyncio.sleep(pause_s)
                elif more:
                    await asyncio.sleep(0)

    def _settle(self, spent_s: float) -> float:
        """How long to leave the loop to others after `spent_s` of work; bursts with time between them owe nothing."""
        now_s = self._clock.monotonic_s()
        factor = (1 - self._share) / self._share
        idle_s = max(0.0, now_s - self._settled_s - spent_s)
        self._settled_s = now_s
        self._debt_s = max(0.0, self._debt_s - idle_s) + spent_s * factor
        self.busy_s += spent_s
        self.longest_s = max(self.longest_s, spent_s)
        return self._debt_s if self._debt_s >= self._slice_s * factor else 0.0
