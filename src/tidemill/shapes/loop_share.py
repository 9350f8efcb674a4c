"""Limits the event loop time of shapes: work runs in short slices, and in total uses at most a share of the time.

- Invariant (short slices): a slice ends after SLICE_S, at the end of the current step. Other tasks wait for shapes no
  longer than that.
- Invariant (bounded share): over any longer period shapes use at most `share` of the loop's time, however much work
  they have. After each slice the loop is left to other tasks until the share is met. Work that arrives faster falls
  behind, and shapes that fall too far behind end (capture_tap.py).
- Invariant (fairness): slices are handed out in turns, so that rendering a snapshot and evaluating a stream both
  progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tidemill.base.clock import Clock

SLICE_S = 0.004
SHARE = 0.5


class Turn:
    """One slice. A step checks `is_over` after each piece of work, and stops."""

    def __init__(self, clock: Clock, until_s: float) -> None:
        self._clock = clock
        self.until_s = until_s

    @property
    def is_over(self) -> bool:
        return self._clock.monotonic_s() >= self.until_s


Step = Callable[[Turn], bool]
"""A function that works until its turn ends or nothing is left to do; returns True if there is more to do."""


class LoopShare:
    """Runs the steps of all shapes of one process."""

    def __init__(self, clock: Clock, share: float = SHARE, slice_s: float = SLICE_S) -> None:
        self._clock = clock
        self._share = share
        self._slice_s = slice_s
        self._turns = asyncio.Lock()
        self._debt_s = 0.0
        """Time that other users of the loop must still get for work already done."""
        self._settled_s = clock.monotonic_s()
        self.busy_s = 0.0
        self.longest_s = 0.0

    async def run_step(self, step: Step) -> None:
        """Call `step` in turns until it has nothing left. Raises what `step` raises."""
        more = True
        while more:
            async with self._turns:
                started_s = self._clock.monotonic_s()
                try:
                    more = step(Turn(self._clock, started_s + self._slice_s))
                finally:
                    pause_s = self._charge(self._clock.monotonic_s() - started_s)
                if pause_s > 0:
                    await asyncio.sleep(pause_s)
                elif more:
                    await asyncio.sleep(0)

    def _charge(self, spent_s: float) -> float:
        """Return how long to leave the loop to others after `spent_s` of work; isolated bursts need no pause."""
        now_s = self._clock.monotonic_s()
        factor = (1 - self._share) / self._share
        idle_s = max(0.0, now_s - self._settled_s - spent_s)
        self._settled_s = now_s
        self._debt_s = max(0.0, self._debt_s - idle_s) + spent_s * factor
        self.busy_s += spent_s
        self.longest_s = max(self.longest_s, spent_s)
        return self._debt_s if self._debt_s >= self._slice_s * factor else 0.0
