"""Lines of the log about who was refused and who changed what. Refusals are told a few times, then counted.

AU1  A refusal that repeats is one line in TELL_EVERY_S, with how many were left out; what is remembered of them is
     bounded. Changes of what anybody may do are each a line, since only who may change it writes them.
"""

from __future__ import annotations

import threading
from typing import Any, Final

import structlog
from prometheus_client import Counter

from tidemill.base.clock import Clock

log = structlog.get_logger()

TELL_EVERY_S: Final = 10.0
REMEMBERED_MAX: Final = 1_000
"""Kinds of refusals within TELL_EVERY_S; beyond, they are counted together."""

TEXT_CHARS_MAX: Final = 250

_REFUSED: Final = Counter("tidemill_refused", "Connections and operations refused to somebody", ("event",))


class Audit:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._told: dict[tuple[str, ...], float] = {}
        self._untold: dict[tuple[str, ...], int] = {}
        self._lock = threading.Lock()
        """Large requests are checked in threads."""

    def refused(self, event: str, about: tuple[str, ...], **facts: Any) -> None:
        """`about`: refusals of one event about the same are one line."""
        _REFUSED.labels(event).inc()
        with self._lock:
            untold = self._tell((event, *(_cut(part) for part in about)), event)
        if untold is not None:
            log.warning(event, audit=True, untold=untold, **{key: _cut(value) for key, value in facts.items()})

    def _tell(self, key: tuple[str, ...], event: str) -> int | None:
        """How many were left out since the last line of its kind; None = this one is left out too."""
        now_s = self._clock.monotonic_s()
        if key not in self._told and len(self._told) >= REMEMBERED_MAX:
            self._forget(now_s)
            if len(self._told) >= REMEMBERED_MAX:
                key = (event,)
        told_s = self._told.get(key)
        if told_s is not None and now_s - told_s < TELL_EVERY_S:
            self._untold[key] = self._untold.get(key, 0) + 1
            return None
        self._told[key] = now_s
        return self._untold.pop(key, 0)

    def changed(self, event: str, **facts: Any) -> None:
        log.info(event, audit=True, **facts)

    def _forget(self, now_s: float) -> None:
        old = [key for key, told_s in self._told.items() if now_s - told_s >= TELL_EVERY_S]
        for key in old:
            del self._told[key]
            self._untold.pop(key, None)


def _cut(value: Any) -> Any:
    """What strangers write is kept and told in part."""
    return value[:TEXT_CHARS_MAX] if isinstance(value, str) else value
