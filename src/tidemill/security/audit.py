"""Audit log: lines about rejected requests and about changes of permissions.

A refusal that repeats is logged once every LOG_INTERVAL_S, with the number of lines that were left out. The memory for
this is bounded. Every change of permissions is logged: only authorized users can cause such lines.
"""

from __future__ import annotations

import threading
from typing import Any, Final

import structlog
from prometheus_client import Counter

from tidemill.base.clock import Clock

log = structlog.get_logger()

LOG_INTERVAL_S: Final = 10.0
REMEMBERED_MAX: Final = 1_000
"""Limit of distinct refusals remembered within LOG_INTERVAL_S. Further ones are counted together, by event."""

TEXT_CHARS_MAX: Final = 250

_REFUSED: Final = Counter("tidemill_refused", "Connections and operations that were refused", ("event",))


class Audit:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._logged_s: dict[tuple[str, ...], float] = {}
        self._suppressed: dict[tuple[str, ...], int] = {}
        self._lock = threading.Lock()
        """Guards both dictionaries: large requests are checked in threads."""

    def log_refusal(self, event: str, about: tuple[str, ...], **facts: Any) -> None:
        """Log a refusal. Refusals of one event with equal `about` share one line."""
        _REFUSED.labels(event).inc()
        with self._lock:
            untold = self._count_suppressed((event, *(_truncate(part) for part in about)), event)
        if untold is not None:
            log.warning(event, audit=True, untold=untold, **{key: _truncate(value) for key, value in facts.items()})

    def _count_suppressed(self, key: tuple[str, ...], event: str) -> int | None:
        """Return how many lines of this kind were left out since the last one; None if this line is left out too."""
        now_s = self._clock.monotonic_s()
        if key not in self._logged_s and len(self._logged_s) >= REMEMBERED_MAX:
            self._drop_old_kinds(now_s)
            if len(self._logged_s) >= REMEMBERED_MAX:
                key = (event,)
        logged_s = self._logged_s.get(key)
        if logged_s is not None and now_s - logged_s < LOG_INTERVAL_S:
            self._suppressed[key] = self._suppressed.get(key, 0) + 1
            return None
        self._logged_s[key] = now_s
        return self._suppressed.pop(key, 0)

    def log_change(self, event: str, **facts: Any) -> None:
        log.info(event, audit=True, **facts)

    def _drop_old_kinds(self, now_s: float) -> None:
        old = [key for key, logged_s in self._logged_s.items() if now_s - logged_s >= LOG_INTERVAL_S]
        for key in old:
            del self._logged_s[key]
            self._suppressed.pop(key, None)


def _truncate(value: Any) -> Any:
    """Truncate text that comes from clients."""
    return value[:TEXT_CHARS_MAX] if isinstance(value, str) else value
