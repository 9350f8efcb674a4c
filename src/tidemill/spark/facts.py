"""Figures that a pipeline's driver publishes beside its marks."""

from __future__ import annotations

import threading

MAX_SAMPLES = 50_000


class Latency:
    """Samples in ms from any thread. Past MAX_SAMPLES every other one is dropped, so memory stays bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples: list[int] = []
        self._keep_every = 1
        self._seen = 0
        self._most = 0

    def add(self, value_ms: int) -> None:
        with self._lock:
            self._seen += 1
            self._most = max(self._most, value_ms)
            if self._seen % self._keep_every:
                return
            self._samples.append(value_ms)
            if len(self._samples) > MAX_SAMPLES:
                self._samples = self._samples[::2]
                self._keep_every *= 2

    def summary(self) -> dict[str, int | None]:
        """{"count", "p50", "p99", "max"}: nearest rank, ms; None of nothing."""
        with self._lock:
            ordered = sorted(self._samples)
            seen, most = self._seen, self._most
        if not ordered:
            return {"count": 0, "p50": None, "p99": None, "max": None}
        last = len(ordered) - 1
        return {"count": seen, "p50": ordered[int(last * 0.5)], "p99": ordered[int(last * 0.99)], "max": most}
