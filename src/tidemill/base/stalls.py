"""How long the event loop of this process stood still: the price that every other unit paid for one of them.

A heartbeat sleeps `TICK_S` and sees by how much it woke too late. What kept the loop shows as lateness, short of it
by at most one tick. The longest of the last minute and of the whole life are facts of every process, and metrics.
On a machine that is busy elsewhere a loop is also late without having done anything: the processor time that its
thread used meanwhile tells the two apart.
"""

from __future__ import annotations

import asyncio

from prometheus_client import Gauge

from tidemill.base.clock import Clock, thread_cpu_s

TICK_S = 0.02
WINDOW_S = 60.0

_LONGEST = Gauge("tidemill_loop_stall_seconds", "Longest stall of the event loop in the last minute")
_DEAREST = Gauge("tidemill_loop_stall_cpu_seconds", "Most processor time that the event loop used in one stall")


class LoopWatch:
    """`run` until cancelled; `facts` any time, also from other threads."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._longest_s = 0.0
        self._longest_cpu_s = 0.0
        self._window_s = 0.0
        self._earlier_s = 0.0
        self._window_started_s = clock.monotonic_s()

    async def run(self) -> None:
        _LONGEST.set_function(lambda: self.recent_s)
        _DEAREST.set_function(lambda: self._longest_cpu_s)
        while True:
            before_s, cpu_s = self._clock.monotonic_s(), thread_cpu_s()
            await asyncio.sleep(TICK_S)
            late_s = self._clock.monotonic_s() - before_s - TICK_S
            self.observe(late_s, before_s, thread_cpu_s() - cpu_s)

    def observe(self, late_s: float, now_s: float, cpu_s: float) -> None:
        """One wake-up that came `late_s` after its time, during which the thread worked for `cpu_s`. The window is two
        halves, so that a stall is seen for at least half a minute and forgotten after one."""
        if now_s - self._window_started_s > WINDOW_S / 2:
            self._earlier_s, self._window_s, self._window_started_s = self._window_s, 0.0, now_s
        self._window_s = max(self._window_s, late_s)
        self._longest_s = max(self._longest_s, late_s)
        self._longest_cpu_s = max(self._longest_cpu_s, min(late_s, cpu_s))

    @property
    def recent_s(self) -> float:
        """Longest stall of the last minute."""
        return max(self._earlier_s, self._window_s)

    def facts(self) -> dict[str, object]:
        """{"stall_ms": of the last minute, "longest_stall_ms": since the process began, "longest_stall_cpu_ms": the
        most work that was done in one stall}."""
        return {
            "stall_ms": round(self.recent_s * 1000, 1),
            "longest_stall_ms": round(self._longest_s * 1000, 1),
            "longest_stall_cpu_ms": round(self._longest_cpu_s * 1000, 1),
        }
