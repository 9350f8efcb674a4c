"""Extents that were looked up before: who reads through a partition asks for the same few again with each fetch.

RX1  What is told is what the rows say when they are asked (`ExtentStore.extents_stamp`), never something older.
RX2  At most `extents_max` are kept; those of the partition that was read first go first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

from tidemill.metastore.rows.l1 import L1ExtentRow
from tidemill.topics.l1.extent_store import ExtentStore

AT_ONCE = 8
"""Extents that one look brings at least: who reads large ones needs the next one much later, if at all."""

AT_MOST = 1_024

EXTENTS_MAX = 8_192


class _Run:
    """Extents of a partition in order, with none between them."""

    __slots__ = ("extents", "lasts", "stamp")

    def __init__(self, stamp: object, extents: Sequence[L1ExtentRow]) -> None:
        self.stamp = stamp
        self.extents = extents
        self.lasts = [extent.last_offset for extent in extents]

    def at(self, offset: int) -> L1ExtentRow | None:
        """None where another one, of which nothing is known here, may be it."""
        index = bisect_left(self.lasts, offset)
        if index == len(self.lasts) or (index == 0 and offset < self.extents[0].base_offset):
            return None
        return self.extents[index]


class RecentExtents:
    def __init__(self, rows: ExtentStore, *, extents_max: int = EXTENTS_MAX) -> None:
        self._rows = rows
        self._extents_max = extents_max
        self._count = 0
        self._runs: OrderedDict[tuple[str, int], _Run] = OrderedDict()

    def known(self, topic_id: str, partition: int, offset: int) -> L1ExtentRow | None:
        """What `at` told of it before, which may be outdated."""
        run = self._runs.get((topic_id, partition))
        return run.at(offset) if run is not None else None

    async def at(
        self, topic_id: str, partition: int, offset: int, *, fresh: bool, passed: int = 0
    ) -> L1ExtentRow | None:
        """The extent that holds `offset`, or the first one after it. Raises Unavailable.

        `passed`: so many did the caller go through already; as many more are read at once, so that thousands of small
        ones take a few looks.
        """
        # Before the rows: what is written while they are read has a stamp of its own.
        stamp = await self._rows.extents_stamp(topic_id, partition, fresh=fresh)
        run = self._runs.get((topic_id, partition))
        if run is not None and run.stamp == stamp:
            known = run.at(offset)
            if known is not None:
                return known
        count = min(max(AT_ONCE, passed), AT_MOST)
        found = await self._rows.some_extents(topic_id, partition, offset, count, fresh=False)
        self._keep((topic_id, partition), _Run(stamp, found))
        return found[0] if found else None

    def _keep(self, key: tuple[str, int], run: _Run) -> None:
        before = self._runs.pop(key, None)
        self._count -= len(before.extents) if before is not None else 0
        if not run.extents:
            return
        self._runs[key] = run
        self._count += len(run.extents)
        while self._count > self._extents_max:
            self._count -= len(self._runs.popitem(last=False)[1].extents)
