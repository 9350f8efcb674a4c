"""Short pauses of Python's cyclic collector in a process whose heap is large and long-lived.

A full collection walks every container there is: with a gigabyte of shapes and caches it stops the loop for a tenth
of a second, to find next to nothing, since what this package drops has no cycles. So whatever survives a full
collection is set aside (`gc.freeze`): the next one walks only what came since. A cycle that dies among what was set
aside is found when everything is taken back: where what was set aside has grown by half since the last time, which
is looked at every `LOOK_EVERY` full collections (a heap which only stays is never walked, and one that grows ever more
rarely), and after `TAKE_BACK_EVERY` of them in any case, for few containers may hold many bytes.
"""

from __future__ import annotations

import gc

TAKE_BACK_EVERY = 100_000
"""Under full load a process makes some fifty full collections a second: half an hour."""
LOOK_EVERY = 3_000
"""Full collections from one count of what was set aside to the next, a minute of full load: the count walks a list, at
20 to 240 ns a container, by how they lie in memory."""
GROWN_LEAST = 50_000
"""Containers: fewer are not worth a walk (1 to 2 µs each)."""
THRESHOLDS = (700, 5, 3)
"""A full collection comes after 10,500 more containers were made than dropped: it walks that many, at 1 to 2 µs each
(measured: docs/benchmarks.md). What survives is walked once at each size, so smaller ones cost no more in all."""
OLDEST = 2


class _Setter:
    def __init__(self) -> None:
        self.full_collections = 0
        self.taken_back = False
        self.kept = 0
        """Containers that survived when everything was taken back the last time."""

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] != OLDEST:
            return
        if phase == "stop":
            gc.freeze()
            if self.taken_back:
                self.kept, self.taken_back = gc.get_freeze_count(), False
            return
        self.full_collections += 1
        if self.full_collections % TAKE_BACK_EVERY == 0 or (self.full_collections % LOOK_EVERY == 0 and self._grown()):
            gc.unfreeze()
            self.taken_back = True

    def _grown(self) -> bool:
        return gc.get_freeze_count() > self.kept + max(self.kept // 2, GROWN_LEAST)


_setter = _Setter()


def keep_pauses_short() -> None:
    """For this process, from now on. Idempotent."""
    if _setter not in gc.callbacks:
        gc.set_threshold(*THRESHOLDS)
        gc.callbacks.append(_setter)
        _setter.taken_back = True  # what is there now is where growth is counted from
        gc.collect()
