"""Stalls of this process's event loop: the delay that one unit of work caused to all others.

One turn of the loop lasts from the time when its selector should have returned (the next timer was due, or an event
arrived) until it is called again: the delay of work that became due in between. It is measured there, in each turn, so
an idle process is not woken for the measurement. The longest of the last minute and of the whole life are facts of
every process, and metrics. On a busy machine a loop is also late without its own work: the processor time that its
thread used in the turn distinguishes the two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from prometheus_client import Gauge

from tidemill.base.clock import Clock, thread_cpu_s

RECORD_ABOVE_S = 0.001
"""Shortest turn that is recorded; a shorter one delays nothing noticeably."""
WINDOW_S = 60.0

T = TypeVar("T")

_LONGEST = Gauge("tidemill_loop_stall_seconds", "Longest stall of the event loop in the last minute")
_LONGEST_CPU = Gauge("tidemill_loop_stall_cpu_seconds", "Most processor time that the event loop used in one stall")


class LoopLagMonitor:
    """Monitor of the loop: `run` until cancelled; call `facts` at any time, also from other threads."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._longest_s = 0.0
        self._longest_cpu_s = 0.0
        self._window_s = 0.0
        self._earlier_s = 0.0
        self._window_started_s = clock.monotonic_s()

    async def run(self) -> None:
        _LONGEST.set_function(lambda: self.recent_s)
        _LONGEST_CPU.set_function(lambda: self._longest_cpu_s)
        loop = asyncio.get_running_loop()
        # Every loop that waits in a selector has it. No other place is passed exactly once per turn.
        selector: Any = vars(loop)["_selector"]
        wait = selector.select
        selector.select = self.watch_select(wait)
        try:
            await loop.create_future()
        finally:
            selector.select = wait

    def watch_select(self, wait: Callable[[float | None], T]) -> Callable[[float | None], T]:
        """Return the selector's `select` with the measurement, which does not change its waiting time."""
        monotonic_s = self._clock.monotonic_s
        due_s, cpu_s = monotonic_s(), thread_cpu_s()
        read_s = due_s

        def select(timeout: float | None = None) -> T:
            nonlocal due_s, cpu_s, read_s
            asked_s = monotonic_s()
            # The processor time is a system call: for short turns it is read once for many.
            if asked_s - read_s >= RECORD_ABOVE_S:
                used_s = thread_cpu_s()
                if asked_s - due_s >= RECORD_ABOVE_S:
                    self.observe(asked_s - due_s, asked_s, used_s - cpu_s)
                cpu_s, read_s = used_s, asked_s
            found = wait(timeout)
            due_s = monotonic_s()
            if timeout is not None and due_s > asked_s + timeout:
                due_s = asked_s + timeout
            return found

        return select

    def observe(self, late_s: float, now_s: float, cpu_s: float) -> None:
        """Record one turn of the loop that took `late_s`, in which the thread worked for `cpu_s`.

        The window has two halves, so that a stall is visible for at least half a minute and expires after one.
        """
        passed_s = now_s - self._window_started_s
        if passed_s > WINDOW_S / 2:
            self._earlier_s = self._window_s if passed_s <= WINDOW_S else 0.0
            self._window_s, self._window_started_s = 0.0, now_s
        self._window_s = max(self._window_s, late_s)
        self._longest_s = max(self._longest_s, late_s)
        self._longest_cpu_s = max(self._longest_cpu_s, min(late_s, cpu_s))

    @property
    def recent_s(self) -> float:
        """Longest stall of the last minute. Changes nothing, since only the loop's own thread may (`observe`)."""
        passed_s = self._clock.monotonic_s() - self._window_started_s
        if passed_s <= WINDOW_S / 2:
            return max(self._earlier_s, self._window_s)
        return self._window_s if passed_s <= WINDOW_S else 0.0

    def facts(self) -> dict[str, object]:
        """Return {"stall_ms", "longest_stall_ms", "longest_stall_cpu_ms"}.

        These are the longest stall of the last minute, the longest since the process began, and the most processor time
        used in one stall.
        """
        return {
            "stall_ms": round(self.recent_s * 1000, 1),
            "longest_stall_ms": round(self._longest_s * 1000, 1),
            "longest_stall_cpu_ms": round(self._longest_cpu_s * 1000, 1),
        }
