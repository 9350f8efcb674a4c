"""The memory of all shapes of a process: counted where it is taken, refused where it ends.

B1  What shapes hold (bases, logs, transactions under way, and a fixed cost each) never exceeds `limit_bytes`.
B2  Room is made of shapes that nobody reads, never of one in use. Where that is not enough, the newcomer is
    refused.
"""

from __future__ import annotations

from collections.abc import Callable

from tidemill.base.errors import UnavailableError

FULL_RETRY_S = 10


class OverBudgetError(UnavailableError):
    """No room for this one now; `retry_after_s` is when it may be worth asking again."""

    def __init__(self, message: str, retry_after_s: int, *, fix: str = "") -> None:
        super().__init__(message, fix=fix)
        self.retry_after_s = retry_after_s


class Budget:
    """`make_room(missing_bytes)` is asked before anything is refused; it gives back what it can."""

    def __init__(
        self,
        limit_bytes: int,
        make_room: Callable[[int], None] = lambda _: None,
        *,
        whose: str = "all shapes together",
        what: str = "memory",
        setting: str = "shapes.memory_mb",
    ) -> None:
        self.limit_bytes = limit_bytes
        self._whose = whose
        self._what = what
        self._setting = setting
        self.used_bytes = 0
        self.refused = 0
        self._make_room = make_room

    def take(self, size_bytes: int) -> None:
        """Raises OverBudgetError, and takes nothing then."""
        missing = self.used_bytes + size_bytes - self.limit_bytes
        if missing <= 0:
            self.used_bytes += size_bytes
            return
        self._make_room(missing)
        if self.used_bytes + size_bytes > self.limit_bytes:
            self.refused += 1
            raise OverBudgetError(
                f"{self._whose} hold as much {self._what} as they may: limit_bytes={self.limit_bytes}"
                f" used_bytes={self.used_bytes} wanted_bytes={size_bytes}.",
                FULL_RETRY_S,
                fix=f"Narrow the shape with where or columns, or raise {self._setting}.",
            )
        self.used_bytes += size_bytes

    def give(self, size_bytes: int) -> None:
        self.used_bytes -= size_bytes


def take_of_all(size_bytes: int, *budgets: Budget) -> None:
    """Take of each, or raise what one raises (OverBudgetError), and take of none."""
    for count, budget in enumerate(budgets):
        try:
            budget.take(size_bytes)
        except BaseException:
            for taken in budgets[:count]:
                taken.give(size_bytes)
            raise
