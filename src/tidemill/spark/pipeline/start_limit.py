"""How many streaming queries of one JVM are started at once: those of the pipelines that share it, one each
(streaming_query.py).

Spark gives a query's Python planner ten seconds to connect, which no setting changes: a dozen that begin together on a
busy machine all miss that. So the next begins once one before it has had its first batch, has ended, or has taken
LONGEST_S. Rows do not wait: feeds bring them forward without a query.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable

AT_ONCE = 2
LONGEST_S = 120.0
"""A start that takes longer keeps nobody else from starting."""


class Starts:
    """Called by the threads of all queries. Times are those of a monotonic clock."""

    def __init__(self, at_once: int = AT_ONCE, longest_s: float = LONGEST_S) -> None:
        self._at_once = at_once
        self._longest_s = longest_s
        self._began_s: dict[Hashable, float] = {}
        self._lock = threading.Lock()

    def begin(self, who: Hashable, now_s: float) -> bool:
        """May `who` start now? It calls `end` then. False = ask again soon."""
        with self._lock:
            self._began_s = {w: at_s for w, at_s in self._began_s.items() if now_s - at_s < self._longest_s}
            if who not in self._began_s and len(self._began_s) >= self._at_once:
                return False
            self._began_s[who] = now_s
            return True

    def end(self, who: Hashable) -> None:
        """It runs, or has ended."""
        with self._lock:
            self._began_s.pop(who, None)


STARTS = Starts()
"""Of this process, which has one JVM, however many pipelines share it."""
