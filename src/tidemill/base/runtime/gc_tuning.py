"""Short pauses of Python's cyclic collector in a process with a large, long-lived heap.

A full collection walks every container. With a gigabyte of shapes and caches it stops the loop for a tenth of a second,
and finds next to nothing, since this package's garbage has no cycles. So all survivors of a full collection are frozen
(`gc.freeze`), and the next one walks only newer containers.

A cycle that dies among frozen containers is found when everything is unfrozen. That happens when the number of frozen
containers has grown by half since the last time, which is checked every `GROWTH_CHECK_EVERY` full collections. So a
stable heap is never walked, and a growing one less and less often. Because few containers may hold many bytes, it also
happens after `UNFREEZE_EVERY` full collections.
"""

from __future__ import annotations

import gc

UNFREEZE_EVERY = 100_000
"""Full collections between unconditional unfreezes: half an hour at full load, with fifty a second."""
GROWTH_CHECK_EVERY = 3_000
"""Full collections between two checks of the growth, a minute at full load: counting frozen containers walks a list, at
20 to 240 ns per container, depending on their locality.
"""
GROWTH_MIN = 50_000
"""Least growth in containers that is worth a walk, at 1 to 2 µs each."""
THRESHOLDS = (700, 5, 3)
"""Collector thresholds: a full collection follows 10,500 net new containers, and walks as many.

Survivors are walked once at any threshold, so a smaller one costs no more in total.
"""
OLDEST = 2


class _FreezeCallback:
    def __init__(self) -> None:
        self.full_collections = 0
        self.taken_back = False
        self.kept = 0
        """Containers that survived the last collection after an unfreeze."""

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] != OLDEST:
            return
        if phase == "stop":
            gc.freeze()
            if self.taken_back:
                self.kept, self.taken_back = gc.get_freeze_count(), False
            return
        self.full_collections += 1
        if self.full_collections % UNFREEZE_EVERY == 0 or (
            self.full_collections % GROWTH_CHECK_EVERY == 0 and self._grown()
        ):
            gc.unfreeze()
            self.taken_back = True

    def _grown(self) -> bool:
        return gc.get_freeze_count() > self.kept + max(self.kept // 2, GROWTH_MIN)


_freeze_callback = _FreezeCallback()


def install_gc_tuning() -> None:
    """Install the tuning in this process. Idempotent."""
    if _freeze_callback not in gc.callbacks:
        gc.set_threshold(*THRESHOLDS)
        gc.callbacks.append(_freeze_callback)
        _freeze_callback.taken_back = True  # growth is counted from the current heap
        gc.collect()
