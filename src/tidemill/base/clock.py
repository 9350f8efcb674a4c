"""Time and randomness are passed in; nothing else in the package reads a clock or a random source.

`tests/tidy` bans the raw calls outside this file. Waiting is always `asyncio.sleep` or a timeout,
so the simulation's virtual-time loop controls it without knowing about `Clock`.
"""

from __future__ import annotations

import random
import time
import uuid
from typing import Protocol


class Clock(Protocol):
    def now_ms(self) -> int:
        """Wall time in milliseconds since the Unix epoch; may jump."""
        ...

    def monotonic_s(self) -> float:
        """Seconds from an arbitrary start; never goes back."""
        ...


class SystemClock:
    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to, for tests of pure cores."""

    def __init__(self, now_ms: int = 1_000_000) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> int:
        return self._now_ms

    def monotonic_s(self) -> float:
        return self._now_ms / 1000

    def advance(self, delta_ms: int) -> None:
        self._now_ms += delta_ms


class Rand:
    """Randomness and identifiers from one seeded source; unseeded = the operating system's entropy."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.SystemRandom() if seed is None else random.Random(seed)

    def uniform(self, low: float, high: float) -> float:
        return self._random.uniform(low, high)

    def below(self, bound: int) -> int:
        return self._random.randrange(bound)

    def nonce(self) -> str:
        """32 hex digits, unique for all practical purposes; names one attempt of one write."""
        return f"{self._random.getrandbits(128):032x}"

    def uuid(self) -> str:
        return str(uuid.UUID(int=self._random.getrandbits(128), version=4))
