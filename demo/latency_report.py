"""Latency percentiles, and the final report of the demo with its verdict."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

MAX_SAMPLES = 200_000


class Latencies:
    """Samples in ms. Above MAX_SAMPLES every second sample is dropped, which bounds the memory."""

    def __init__(self) -> None:
        self._samples: list[float] = []
        self._keep_every = 1
        self._seen = 0

    def add(self, value_ms: float) -> None:
        self._seen += 1
        if self._seen % self._keep_every:
            return
        self._samples.append(value_ms)
        if len(self._samples) > MAX_SAMPLES:
            self._samples = self._samples[::2]
            self._keep_every *= 2

    def summary(self) -> dict[str, float | int | None]:
        return {"p50": percentile(self._samples, 0.5), "p99": percentile(self._samples, 0.99), "samples": self._seen}


def percentile(samples: Sequence[float], fraction: float) -> float | None:
    """Return the nearest-rank percentile with one decimal; None without samples."""
    if not samples:
        return None
    ordered = sorted(samples)
    return round(ordered[min(len(ordered) - 1, int(fraction * len(ordered)))], 1)


class Report(msgspec.Struct):
    """The report that `--json` prints. `stuck` names the stages that were stuck at any moment of the run, and the
    tables that did not reach their target during the drain."""

    verify: dict[str, dict[str, int]] = {}
    equal: bool = False
    """`tidemill verify` exited 0: columns and hashes too."""
    commit_to_shard_ms: dict[str, float | int | None] = {}
    commit_to_client_ms: dict[str, float | int | None] = {}
    produced: int = 0
    malformed: int = 0
    dead_letters: int = 0
    transactions: int = 0
    crashes: int = 0
    money_checks: int = 0
    money_unequal: int = 0
    first_client_row_s: float | None = None
    first_shard_row_s: float | None = None
    stuck: list[str] = []
    spark: str = ""

    @property
    def clean(self) -> bool:
        counts = [t[k] for t in self.verify.values() for k in ("missing", "extra", "different", "poisoned")]
        return bool(counts) and self.equal and not any(counts) and not self.stuck and not self.money_unequal \
            and self.dead_letters == self.malformed  # fmt: skip
