"""The engine's clock of the memory and SQLite backends. It never goes back, within a process life or across them."""

from __future__ import annotations

from tidemill.base.clock import Clock


class EngineClock:
    """Clock that starts at the later of the wall clock and the last time ever seen, then runs monotonically.

    Steps of the wall clock during a life therefore neither expire a lease early nor prolong one.
    """

    def __init__(self, clock: Clock, last_seen_ms: int = 0) -> None:
        self._clock = clock
        self._base_ms = max(clock.now_ms(), last_seen_ms)
        self._started_s = clock.monotonic_s()

    def now_ms(self) -> int:
        return self._base_ms + round((self._clock.monotonic_s() - self._started_s) * 1000)
