"""Cache of extents: a reader that moves through a partition requests the same few with each fetch.

Invariant (no stale extents): an entry is returned only if the rows are unchanged at the time of the call
(`ExtentStore.extents_stamp`).

At most `extents_max` extents are cached; those of the partition that was read first are evicted first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

from tidemill.metastore.rows.l1 import L1ExtentRow
from tidemill.topics.l1.extent_store import ExtentStore

LOOKUP_EXTENTS_MIN = 8
"""Minimum number of extents per look-up: a reader of large ones needs the next one much later, if at all."""

LOOKUP_EXTENTS_MAX = 1_024

EXTENTS_MAX = 8_192


class _CachedRun:
    """Contiguous extents of a partition, in order."""

    __slots__ = ("extents", "lasts", "stamp")

    def __init__(self, stamp: object, extents: Sequence[L1ExtentRow]) -> None:
        self.stamp = stamp
        self.extents = extents
        self.lasts = [extent.last_offset for extent in extents]

    def find(self, offset: int) -> L1ExtentRow | None:
        """Return the extent at `offset` or the first one after it, or None if an unknown extent may be that one."""
        index = bisect_left(self.lasts, offset)
        if index == len(self.lasts) or (index == 0 and offset < self.extents[0].base_offset):
            return None
        return self.extents[index]


class ExtentCache:
    def __init__(self, rows: ExtentStore, *, extents_max: int = EXTENTS_MAX) -> None:
        self._rows = rows
        self._extents_max = extents_max
        self._count = 0
        self._runs: OrderedDict[tuple[str, int], _CachedRun] = OrderedDict()

    def peek(self, topic_id: str, partition: int, offset: int) -> L1ExtentRow | None:
        """Return the extent that `at` would find in the cache; it may be outdated."""
        run = self._runs.get((topic_id, partition))
        return run.find(offset) if run is not None else None

    async def extent_at(
        self, topic_id: str, partition: int, offset: int, *, fresh: bool, passed: int = 0
    ) -> L1ExtentRow | None:
        """Return the extent that holds `offset`, or the first one after it. Raises UnavailableError.

        `passed`: number of extents that the caller has read so far. As many more are read in one look-up, so that
        thousands of small ones take few look-ups.
        """
        # Before the rows: a change during their read gets another stamp.
        stamp = await self._rows.extents_stamp(topic_id, partition, fresh=fresh)
        run = self._runs.get((topic_id, partition))
        if run is not None and run.stamp == stamp:
            known = run.find(offset)
            if known is not None:
                return known
        count = min(max(LOOKUP_EXTENTS_MIN, passed), LOOKUP_EXTENTS_MAX)
        found = await self._rows.first_extents(topic_id, partition, offset, count, fresh=False)
        self._store_run((topic_id, partition), _CachedRun(stamp, found))
        return found[0] if found else None

    def _store_run(self, key: tuple[str, int], run: _CachedRun) -> None:
        before = self._runs.pop(key, None)
        self._count -= len(before.extents) if before is not None else 0
        if not run.extents:
            return
        self._runs[key] = run
        self._count += len(run.extents)
        while self._count > self._extents_max:
            self._count -= len(self._runs.popitem(last=False)[1].extents)
