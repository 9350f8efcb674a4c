"""Bindings of one source, for planners that wait for them and tasks that read by them."""

from __future__ import annotations

from tidemill.metastore.catalogue import TopicRow
from tidemill.shards.api import Binding, Remap
from tidemill.spark.decode.records import SliceDescriptor
from tidemill.spark.ingest.step_planner import plan_interval
from tidemill.spark.stores import Stores


class SourceBindings:
    """Bindings of one source. `source`: topic/NAME or capture/NAME; `table`: of a capture, "" = all of its tables. The
    remap shard is opened on the first call."""

    def __init__(self, source: str, table: str = "") -> None:
        self.source = source
        self._table = table
        self._remap: Remap | None = None
        self._stores: Stores | None = None
        """Stores that `_remap` reads from. After a rollback of consensus a process closes its stores and opens
        others."""

    async def end(self, stores: Stores) -> int:
        """Return the end of the newest binding, or 0."""
        newest = await (await self._open(stores)).latest()
        return 0 if newest is None else newest.time_ms + 1

    async def wait_for_binding(self, stores: Stores, start: int, timeout_s: float) -> bool:
        """Return whether there is a binding at or after `start`, waiting at most `timeout_s`."""
        return await (await self._open(stores)).wait(start - 1, timeout_s) is not None

    async def end_within(self, stores: Stores, start: int, most: int | None, target: int | None) -> int:
        """Return the latest end with at most `most` records after `start`, and not past `target`.

        At least one time is included, even if it is larger. `start` if there is nothing after it.
        """
        if most is None:
            end = await self.end(stores)
            return max(start, end if target is None else min(end, target))
        page = await (await self._open(stores)).page(start)
        before = _record_total(page.base) if page.base is not None else 0
        bindings = [b for b in page.bindings if target is None or b.time_ms < target]
        fitting = [b for b in bindings if _record_total(b) - before <= most] or bindings[:1]
        return fitting[-1].time_ms + 1 if fitting else start

    async def plan_slices(self, stores: Stores, start: int, end: int) -> list[SliceDescriptor]:
        """Return the slices of [start, end)."""
        remap = await self._open(stores)
        return await plan_interval(stores.topics, remap, await self._topics(stores), start, end)

    async def _open(self, stores: Stores) -> Remap:
        if self._remap is None or self._stores is not stores:
            self._remap, self._stores = await stores.remap(self.source), stores
        return self._remap

    async def _topics(self, stores: Stores) -> list[tuple[str, str]]:
        """Return (name, id) of every topic that is read."""
        kind, _, name = self.source.partition("/")
        names = [name]
        if kind == "capture":
            tables = await stores.catalogue.tables(name)
            names = [table.topic for table in tables if table.topic and self._table in ("", table.table)]
        found = [await stores.catalogue.get(TopicRow, n) for n in names]
        return [(row.name, row.topic_id) for row in found if row is not None]


def _record_total(binding: Binding) -> int:
    return sum(sum(offsets) for offsets in binding.offsets.values())
