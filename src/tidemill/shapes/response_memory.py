"""Memory of rows that are being sent to one reader.

The bytes count against the memory of all shapes until the last byte is sent, and against the share of it that all such
responses have together, so that slow readers cannot use up the memory of the shapes.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.base.errors import InvalidError
from tidemill.shapes.log.log import SEPARATOR
from tidemill.shapes.memory_budget import Budget, reserve_in_all


class ResponseMemory:
    """Rows of one response: `add` while they are read, then send `pieces`, and `release` at the end."""

    def __init__(self, budget: Budget, share: Budget, limit_bytes: int) -> None:
        self.budget = budget
        self._share = share
        self._limit_bytes = limit_bytes
        self.pieces: list[bytes] = []
        """Rows as JSON, several joined by SEPARATOR."""
        self.size_bytes = 0
        self._released = False

    def add(self, rows: Sequence[bytes]) -> None:
        """Add rows. Raises InvalidError if the response grows too large, OverBudgetError if a budget has no room."""
        if not rows or self._released:
            return
        joined = SEPARATOR.join(rows)
        if self.size_bytes + len(joined) > self._limit_bytes:
            raise InvalidError(
                f"the subset is too large: limit_bytes={self._limit_bytes}.", fix="Narrow it, or read it in pages."
            )
        reserve_in_all(len(joined), self._share, self.budget)
        self.size_bytes += len(joined)
        self.pieces.append(joined)

    def release(self) -> None:
        """Free the memory. Idempotent."""
        if not self._released:
            self._released = True
            self.budget.release(self.size_bytes)
            self._share.release(self.size_bytes)
            self.pieces = []
