"""Clocks and random sources, which are passed in: no other module of the package reads one.

`tests/tidy` bans the raw calls outside this file. Waiting is always `asyncio.sleep` or a timeout, so the simulation's
virtual-time loop controls it without knowing about `Clock`.
"""

from __future__ import annotations

import asyncio
import os
import random
import selectors
import time
import uuid
from typing import Protocol


class Clock(Protocol):
    def now_ms(self) -> int:
        """Return the wall time in milliseconds since the Unix epoch; it may jump."""
        ...

    def monotonic_s(self) -> float:
        """Return seconds from an arbitrary start; never goes back. Event loops use it. It does not advance while the
        machine is suspended."""
        ...

    def boot_s(self) -> float:
        """Return seconds from an arbitrary start, with the time for which the machine was suspended; never goes
        back."""
        ...


_BOOT_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Clock that continues while the machine is suspended. Only Linux has CLOCK_BOOTTIME; CLOCK_MONOTONIC of macOS
continues, too."""


class SystemClock:
    def now_ms(self) -> int:
        if TEST_CLOCK is not None:
            return TEST_CLOCK.now_ms()
        return time.time_ns() // 1_000_000

    def monotonic_s(self) -> float:
        return time.monotonic() if TEST_CLOCK is None else TEST_CLOCK.monotonic_s()

    def boot_s(self) -> float:
        return time.clock_gettime(_BOOT_CLOCK) if TEST_CLOCK is None else TEST_CLOCK.boot_s()


class TestClock:
    """Clock for tests: the process believes that it started at `start_ms`, and that time runs `rate` times as fast."""

    def __init__(self, start_ms: int, rate: float) -> None:
        self.rate = rate
        self._start_ms = start_ms
        self._began_s = time.monotonic()

    def monotonic_s(self) -> float:
        return self._began_s + (time.monotonic() - self._began_s) * self.rate

    def boot_s(self) -> float:
        return self.monotonic_s()

    def now_ms(self) -> int:
        return self._start_ms + int((self.monotonic_s() - self._began_s) * 1000)

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return an event loop whose sleeps and timeouts follow this clock."""
        rate, clock = self.rate, self

        class Selector(selectors.DefaultSelector):
            def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
                return super().select(None if timeout is None else timeout / rate)

        class Loop(asyncio.SelectorEventLoop):
            def time(self) -> float:
                return clock.monotonic_s()

        return Loop(Selector())


def _parse_test_clock(setting: str) -> TestClock | None:
    start, _, rate = setting.partition(":")
    if not start:
        return None
    start_ms = int(start) if int(start) >= 0 else time.time_ns() // 1_000_000 + int(start)
    return TestClock(start_ms, float(rate or 1))


TEST_CLOCK = _parse_test_clock(os.environ.get("TIDEMILL_TEST_CLOCK", ""))
"""Clock set by `START_MS:RATE` in the environment, for the calendar test: thirty days of real processes in minutes.

A negative start is relative to now, for every process that is started with it.
"""


def thread_cpu_s() -> float:
    """Return the processor time that the calling thread has used, independent of other load on the machine."""
    return time.thread_time()


class ManualClock:
    """Clock that only moves on request, for tests of pure cores."""

    def __init__(self, now_ms: int = 1_000_000) -> None:
        self._now_ms = now_ms
        self._set_by_ms = 0
        self._suspended_ms = 0

    def now_ms(self) -> int:
        return self._now_ms

    def monotonic_s(self) -> float:
        return self.boot_s() - self._suspended_ms / 1000

    def boot_s(self) -> float:
        return (self._now_ms - self._set_by_ms) / 1000

    def advance(self, delta_ms: int) -> None:
        self._now_ms += delta_ms

    def jump(self, delta_ms: int) -> None:
        """Set the wall clock forward or back; the monotonic clock continues."""
        self._now_ms += delta_ms
        self._set_by_ms += delta_ms

    def suspend(self, delta_ms: int) -> None:
        """Suspend the machine for this time: the monotonic clock does not advance."""
        self._now_ms += delta_ms
        self._suspended_ms += delta_ms


class Rand:
    """Randomness and identifiers from one seeded source; unseeded = the operating system's entropy."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.SystemRandom() if seed is None else random.Random(seed)
        self._seeded = seed is not None

    def uniform(self, low: float, high: float) -> float:
        return self._random.uniform(low, high)

    def below(self, bound: int) -> int:
        return self._random.randrange(bound)

    def nonce(self) -> str:
        """Return 32 hex digits, unique for all practical purposes, that name one attempt of one write."""
        if self._seeded:
            return f"{self._random.getrandbits(128):032x}"
        return os.urandom(16).hex()

    def uuid(self) -> str:
        return str(uuid.UUID(int=self._random.getrandbits(128), version=4))
