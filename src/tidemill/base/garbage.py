"""Short pauses of Python's cyclic collector in a process whose heap is large and long-lived.

A full collection walks every container there is: with a gigabyte of shapes and caches it stops the loop for a tenth
of a second, to find next to nothing, since what this package drops has no cycles. So whatever survives a full
collection is set aside (`gc.freeze`): the next one walks only what came since. A cycle that dies among what was set
aside is found when everything is taken back, every `TAKE_BACK_EVERY` full collections.
"""

from __future__ import annotations

import gc

TAKE_BACK_EVERY = 3_000
THRESHOLDS = (700, 5, 3)
"""A full collection comes after 10,500 more containers were made than dropped: it walks that many, at 1 to 2 µs each
(measured: docs/benchmarks.md). What survives is walked once at each size, so smaller ones cost no more in all."""
OLDEST = 2


class _Setter:
    def __init__(self) -> None:
        self.full_collections = 0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] != OLDEST:
            return
        if phase == "stop":
            gc.freeze()
            return
        self.full_collections += 1
        if self.full_collections % TAKE_BACK_EVERY == 0:
            gc.unfreeze()


_setter = _Setter()


def keep_pauses_short() -> None:
    """For this process, from now on. Idempotent."""
    if _setter not in gc.callbacks:
        gc.set_threshold(*THRESHOLDS)
        gc.callbacks.append(_setter)
        gc.collect()
