"""Histograms of durations: of fixed size for any count, and summable over processes.

    bucket 0: below 1 ms · bucket n: [2^((n−1)/4), 2^(n/4)) ms · the last one has all longer ones (37 hours)

Invariant (precision): a quantile is the upper end of its bucket, at most a fifth too high, and never above the maximum.

Invariant (window): `StageHistograms` covers the last WINDOW_MS to twice that while events arrive; without events it
does not change and costs nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from math import log2

PER_OCTAVE = 4
BUCKETS = 27 * PER_OCTAVE + 1
WINDOW_MS = 300_000

STAGES = ("received", "durable", "bound", "planned", "decoded", "written", "appended")
"""Stages from a commit to a shard. The first three are the capture's, the others a pipeline's."""

SINCE_BOUND = "appended since bound"
"""Delay of a pipeline alone: counted from the binding, while the others count from the commit."""

PlainHistogram = dict[str, object]


class Histogram:
    """Histogram of durations in ms. Not thread-safe."""

    def __init__(self) -> None:
        self._counts = [0] * BUCKETS
        self.most_ms = 0

    @property
    def count(self) -> int:
        return sum(self._counts)

    def add(self, duration_ms: int) -> None:
        """Add a duration; a negative one (clocks differ) counts as 0."""
        self._counts[_bucket(duration_ms)] += 1
        self.most_ms = max(self.most_ms, duration_ms)

    def merge(self, other: Histogram) -> None:
        self._counts = [mine + theirs for mine, theirs in zip(self._counts, other._counts, strict=True)]
        self.most_ms = max(self.most_ms, other.most_ms)

    def quantile(self, fraction: float) -> int | None:
        """Return a quantile in ms by nearest rank; None if empty."""
        rank = int(fraction * (self.count - 1))
        for bucket, count in enumerate(self._counts):
            if rank < count:
                return min(self.most_ms, _upper_ms(bucket))
            rank -= count
        return None

    def summary(self) -> dict[str, int | None]:
        """Return {"count", "p50", "p95", "p99", "max"} in ms; None values if empty."""
        count = self.count
        found: dict[str, int | None] = {"count": count}
        for name, fraction in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
            found[name] = self.quantile(fraction)
        return found | {"max": self.most_ms if count else None}

    def to_plain(self) -> PlainHistogram:
        """Return the form used in reports: {"max": ms, "counts": [[bucket, count], …]}."""
        return {"max": self.most_ms, "counts": [[n, count] for n, count in enumerate(self._counts) if count]}

    @classmethod
    def from_plain(cls, plain: object) -> Histogram:
        """Read the plain form of another process, of any version; unreadable content counts as nothing."""
        made = cls()
        match plain:
            case {"max": int(most), "counts": [*pairs]}:
                made.most_ms = most
                for pair in pairs:
                    match pair:
                        case [int(bucket), int(count)] if 0 <= bucket < BUCKETS and count > 0:
                            made._counts[bucket] += count
        return made


def _bucket(duration_ms: int) -> int:
    return 0 if duration_ms < 1 else min(BUCKETS - 1, 1 + int(PER_OCTAVE * log2(duration_ms)))


def _upper_ms(bucket: int) -> int:
    return int(2 ** (bucket / PER_OCTAVE))


class StageHistograms:
    """Histograms of one source, one for each stage. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now: dict[str, Histogram] = {}
        self._before: dict[str, Histogram] = {}
        self._began_ms: int | None = None

    def add(self, stage: str, since_ms: Iterable[int], now_ms: int) -> None:
        """Add one duration per element of `since_ms` (wall clock; 0 = unknown): from there to the arrival at `stage`
        now.
        """
        with self._lock:
            began_ms = self._began_ms
            if began_ms is None or not 0 <= now_ms - began_ms < WINDOW_MS:
                self._before, self._now, self._began_ms = self._now, {}, now_ms
            histogram = self._now.get(stage)
            for at_ms in since_ms:
                if at_ms:
                    if histogram is None:
                        histogram = self._now[stage] = Histogram()
                    histogram.add(now_ms - at_ms)

    def histograms(self) -> dict[str, Histogram]:
        with self._lock:
            return merge_histograms((self._before, self._now))

    def summary(self, stage: str) -> dict[str, int | None]:
        return self.histograms().get(stage, Histogram()).summary()

    def to_plain(self) -> dict[str, PlainHistogram]:
        return {stage: histogram.to_plain() for stage, histogram in self.histograms().items()}


def merge_histograms(several: Iterable[Mapping[str, Histogram]]) -> dict[str, Histogram]:
    found: dict[str, Histogram] = {}
    for each in several:
        for stage, histogram in each.items():
            found.setdefault(stage, Histogram()).merge(histogram)
    return found
