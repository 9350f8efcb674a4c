"""Memory and disk budgets of all shapes of a process: counted before use, rejected at the limit.

Invariant (bounded): what shapes hold (initial rows, logs, open transactions, and a fixed cost each) never exceeds
`limit_bytes`. Room is made by ending idle shapes, never shapes in use; if that does not suffice, the request is
rejected, and a change ends the shape whose log has grown most (live_shapes.py).
"""

from __future__ import annotations

from collections.abc import Callable

from tidemill.base.errors import UnavailableError

FULL_RETRY_S = 10


class OverBudgetError(UnavailableError):
    """No room at the moment; `retry_after_s` says when a retry makes sense."""

    def __init__(self, message: str, retry_after_s: int, *, fix: str = "") -> None:
        super().__init__(message, fix=fix)
        self.retry_after_s = retry_after_s


class Budget:
    """A byte counter with a limit. `make_room(missing_bytes)` is called before a request is rejected; it frees what it
    can."""

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

    def reserve(self, size_bytes: int) -> None:
        """Reserve bytes. Raises OverBudgetError, and reserves nothing then."""
        missing = self.used_bytes + size_bytes - self.limit_bytes
        if missing <= 0:
            self.used_bytes += size_bytes
            return
        self._make_room(missing)
        if self.used_bytes + size_bytes > self.limit_bytes:
            self.refused += 1
            raise OverBudgetError(
                f"{self._whose} have reached the {self._what} limit: limit_bytes={self.limit_bytes}"
                f" used_bytes={self.used_bytes} wanted_bytes={size_bytes}.",
                FULL_RETRY_S,
                fix=f"Narrow the shape with `where` or `columns`, or raise {self._setting}.",
            )
        self.used_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        self.used_bytes -= size_bytes


def reserve_in_all(size_bytes: int, *budgets: Budget) -> None:
    """Reserve bytes in each budget, or in none: raises OverBudgetError if one of them has no room."""
    for count, budget in enumerate(budgets):
        try:
            budget.reserve(size_bytes)
        except BaseException:
            for taken in budgets[:count]:
                taken.release(size_bytes)
            raise
