"""Limit of the streaming queries that start concurrently in one JVM, one for each pipeline that shares it
(streaming_query.py).

Spark gives a query's Python planner ten seconds to connect, which no setting changes; a dozen that start together on a
busy machine all exceed it. So the next one starts once an earlier one has had its first batch, has ended, or has taken
LONGEST_S. Rows do not wait: feeds advance tables without a query.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable

CONCURRENT_STARTS = 2
START_TIMEOUT_S = 120.0
"""A start that takes longer no longer blocks others."""


class StartLimiter:
    """Limiter of starts. Called by the threads of all queries. Times are those of a monotonic clock."""

    def __init__(self, at_once: int = CONCURRENT_STARTS, longest_s: float = START_TIMEOUT_S) -> None:
        self._at_once = at_once
        self._longest_s = longest_s
        self._began_s: dict[Hashable, float] = {}
        self._lock = threading.Lock()

    def try_start(self, who: Hashable, now_s: float) -> bool:
        """Return whether `who` may start now; it must call `end` later. False = ask again soon."""
        with self._lock:
            self._began_s = {w: at_s for w, at_s in self._began_s.items() if now_s - at_s < self._longest_s}
            if who not in self._began_s and len(self._began_s) >= self._at_once:
                return False
            self._began_s[who] = now_s
            return True

    def end(self, who: Hashable) -> None:
        """Release the slot: `who` runs, or has ended."""
        with self._lock:
            self._began_s.pop(who, None)


START_LIMITER = StartLimiter()
"""Limiter of this process, which has one JVM, however many pipelines share it."""
