"""Simulated clocks: one true time, and the time that each process believes it is."""

from __future__ import annotations

from sim.loop import SimLoop

EPOCH_MS = 1_750_000_000_000
"""Wall time at the start of every world."""


class SimClock:
    """Virtual time of the loop. `skew_ms` may change at any moment: wall clocks jump, monotonic clocks do not."""

    def __init__(self, loop: SimLoop, skew_ms: int = 0) -> None:
        self._loop = loop
        self.skew_ms = skew_ms

    def now_ms(self) -> int:
        return EPOCH_MS + self.skew_ms + int(self._loop.time() * 1000)

    def monotonic_s(self) -> float:
        return self._loop.time()

    def boot_s(self) -> float:
        return self._loop.time()
