"""Shared parts of the fuzzers that run in this process: duration, memory, failures, with examples."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

EXAMPLES_MAX = 20


class Found:
    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        self.examples: list[str] = []
        self.longest_s = 0.0
        self.memory_mib = [0.0, 0.0]
        """Memory at the beginning, and at most."""

    def fail(self, what: str, data: object = "") -> None:
        self.failures[what[:300]] += 1
        if len(self.examples) < EXAMPLES_MAX:
            self.examples.append(f"{what[:200]} {data!r}"[:2_000])

    def spent(self, seconds: float, limit_s: float, what: str, data: object) -> None:
        self.longest_s = max(self.longest_s, seconds)
        if seconds > limit_s:
            self.fail(f"{what} took {seconds * 1000:.0f} ms", data)

    def rounds(self, seconds: float, grows_mib: float) -> Iterator[None]:
        """Yield once per round until `seconds` have passed. Memory may grow by `grows_mib` in that time."""
        gc.collect()
        self.memory_mib = [resident_mib()] * 2
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            yield
            self.memory_mib[1] = max(self.memory_mib[1], resident_mib())
        before_mib, peak_mib = self.memory_mib
        if peak_mib - before_mib > grows_mib:
            self.fail(f"memory grew from {before_mib:.0f} to {peak_mib:.0f} MiB")


def resident_mib() -> float:
    return round(int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / (1 << 20), 1)
