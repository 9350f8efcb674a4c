"""What an object store's own calls say of it: does it answer, does it take writes, is it slow.

Counted by attempt, not by call: a call retries for seconds before it gives up, and an operator wants to know at once.
An answer of any kind, also "no such object", ends the trouble of its kind; what fails writes says nothing of reads.
"""

from __future__ import annotations

from typing import Literal

from tidemill.base.clock import Clock
from tidemill.base.errors import TidemillError, Unavailable, Unknown

SLOW_S = 5.0
"""An attempt under way for so long is told, before it has failed."""

Kind = Literal["write", "read"]


class Health:
    """One per store. Plain calls, a few hundred nanoseconds an attempt."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._under_way: dict[int, float] = {}
        self._number = 0
        self._failing: dict[Kind, str] = {}
        self._last_s: dict[Kind, float] = {}

    def began(self) -> int:
        self._number = number = self._number + 1
        self._under_way[number] = self._clock.monotonic_s()
        return number

    def ended(self, number: int, kind: Kind, error: BaseException | None) -> None:
        """`error` None: it did what it should. A cancelled attempt says nothing."""
        self._under_way.pop(number, None)
        if error is None:
            if self._failing:
                self._failing.pop(kind, None)
        elif isinstance(error, Unavailable | Unknown):
            self._failing[kind] = str(error)
            self._last_s[kind] = self._clock.monotonic_s()
        elif isinstance(error, TidemillError):
            self._failing.pop(kind, None)

    def trouble(self) -> str:
        """Writes first: they are what others wait for. Empty while all is well."""
        failing = self._failing.get("write") or self._failing.get("read")
        if failing:
            return failing
        # Insertion order is age.
        oldest_s = next(iter(self._under_way.values()), None)
        if oldest_s is None or self._clock.monotonic_s() - oldest_s <= SLOW_S:
            return ""
        return f"The object store is slow: oldest_request_s={self._clock.monotonic_s() - oldest_s:.0f}."

    def unproven(self, kind: Kind, quiet_s: float) -> bool:
        """Has it failed, and did nobody try again for so long? Then somebody should, or the trouble never ends."""
        return kind in self._failing and self._clock.monotonic_s() - self._last_s[kind] > quiet_s
