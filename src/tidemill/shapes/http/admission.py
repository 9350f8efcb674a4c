"""How many requests are under way at once, from their first byte to the last of their answer: long polls, event streams
and slow readers included. Beyond that 503 with Retry-After: the protocol's client waits and asks again."""

from __future__ import annotations


class Slot:
    """One request's place; `release` is idempotent."""

    def __init__(self, admission: Admission, initial: bool) -> None:
        self._admission: Admission | None = admission
        self._initial = initial

    def release(self) -> None:
        admission, self._admission = self._admission, None
        if admission is not None:
            admission.under_way[self._initial] -= 1


class Admission:
    """`max_initial`: requests for initial rows; `max_existing`: all others."""

    def __init__(self, max_initial: int, max_existing: int) -> None:
        self._limits = {True: max_initial, False: max_existing}
        self.under_way = {True: 0, False: 0}
        self.refused = 0

    def take(self, initial: bool) -> Slot | None:
        """A place, None when there is none."""
        if self.under_way[initial] >= self._limits[initial]:
            self.refused += 1
            return None
        self.under_way[initial] += 1
        return Slot(self, initial)
