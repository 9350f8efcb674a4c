"""How long the event loop of this process stood still: the price that every other unit paid for one of them.

One turn of the loop is from when its selector should have returned (its next timer was due, or something came) until
it is asked again: by so much was late whoever became due meanwhile. It is measured there, at each turn, so an idle
process is not woken to be watched. The longest of the last minute and of the whole life are facts of every process,
and metrics. On a machine that is busy elsewhere a loop is also late without having done anything: the processor time
that its thread used meanwhile tells the two apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from prometheus_client import Gauge

from tidemill.base.clock import Clock, thread_cpu_s

WORTH_S = 0.001
"""A shorter turn is none that anybody waits for."""
WINDOW_S = 60.0

T = TypeVar("T")

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
        loop = asyncio.get_running_loop()
        # Of every loop that waits in a selector; it has no other place that is passed once a turn.
        selector: Any = vars(loop)["_selector"]
        wait = selector.select
        selector.select = self.around(wait)
        try:
            await loop.create_future()
        finally:
            selector.select = wait

    def around(self, wait: Callable[[float | None], T]) -> Callable[[float | None], T]:
        """The selector's `select`, watched: it waits as long as it does without."""
        monotonic_s = self._clock.monotonic_s
        due_s, cpu_s = monotonic_s(), thread_cpu_s()
        read_s = due_s

        def select(timeout: float | None = None) -> T:
            nonlocal due_s, cpu_s, read_s
            asked_s = monotonic_s()
            # The processor time is a system call: of short turns it is read once for many.
            if asked_s - read_s >= WORTH_S:
                used_s = thread_cpu_s()
                if asked_s - due_s >= WORTH_S:
                    self.observe(asked_s - due_s, asked_s, used_s - cpu_s)
                cpu_s, read_s = used_s, asked_s
            found = wait(timeout)
            due_s = monotonic_s()
            if timeout is not None and due_s > asked_s + timeout:
                due_s = asked_s + timeout
            return found

        return select

    def observe(self, late_s: float, now_s: float, cpu_s: float) -> None:
        """One turn of the loop that took `late_s`, during which the thread worked for `cpu_s`. The window is two
        halves, so that a stall is seen for at least half a minute and forgotten after one."""
        passed_s = now_s - self._window_started_s
        if passed_s > WINDOW_S / 2:
            self._earlier_s = self._window_s if passed_s <= WINDOW_S else 0.0
            self._window_s, self._window_started_s = 0.0, now_s
        self._window_s = max(self._window_s, late_s)
        self._longest_s = max(self._longest_s, late_s)
        self._longest_cpu_s = max(self._longest_cpu_s, min(late_s, cpu_s))

    @property
    def recent_s(self) -> float:
        """Longest stall of the last minute. Changes nothing: only the loop's own thread does (`observe`)."""
        passed_s = self._clock.monotonic_s() - self._window_started_s
        if passed_s <= WINDOW_S / 2:
            return max(self._earlier_s, self._window_s)
        return self._window_s if passed_s <= WINDOW_S else 0.0

    def facts(self) -> dict[str, object]:
        """{"stall_ms": of the last minute, "longest_stall_ms": since the process began, "longest_stall_cpu_ms": the
        most work that was done in one stall}."""
        return {
            "stall_ms": round(self.recent_s * 1000, 1),
            "longest_stall_ms": round(self._longest_s * 1000, 1),
            "longest_stall_cpu_ms": round(self._longest_cpu_s * 1000, 1),
        }
