"""Faults planted into the jobs that collect and compact topics: each job is replaced by a subclass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tidemill.base.errors import MissingError, TidemillError
from tidemill.consensus.api import LogHead
from tidemill.maintenance.scheduler import StepBudget
from tidemill.maintenance.topics.compaction import DirtyPart, TopicCompaction
from tidemill.maintenance.topics.compaction_pass import Bounds
from tidemill.maintenance.topics.l0_garbage import NEVER_WRITTEN, L0GarbageCollector, Place
from tidemill.maintenance.topics.rollups import RollupCollector
from tidemill.metastore.rows.l1 import L1CleanedRow, L1PartitionRow
from tidemill.objects.store import ObjectMeta
from tidemill.topics.partition.recovery import catch_up, parse_log_name, partition_log
from tidemill.topics.partition.state_machine.state import PartitionState
from tidemill.topics.partition.state_machine.transactions import AbortedIndex


class FirstRegion(L0GarbageCollector):
    """Planted fault first-region: the first partition in an object decides whether it is collected."""

    async def _read_footers(self, found: list[ObjectMeta], live: set[str], budget: StepBudget) -> bool:
        live.clear()  # The round uses the same set afterwards.
        return await super()._read_footers(found, live, budget)

    async def _checked_places(self, meta: ObjectMeta) -> tuple[Place, ...]:
        places = await super()._checked_places(meta)
        state = self._states.get(places[0])
        if state is not None and meta.key in state.live_objects():
            raise MissingError("the first partition needs it.")
        return places[:1]


class Undecided(L0GarbageCollector):
    """Planted fault undecided: an object that no log names yet is collected while its batches are in flight."""

    def _undecided_partitions(self, garbage: Any) -> list[Place]:
        return []


class OneReport(L0GarbageCollector):
    """Planted fault one-report: an unreadable log is taken for one that names nothing."""

    async def _read_changed_logs(self, topics: Mapping[str, int]) -> None:
        places = [(topic_id, partition) for topic_id, count in topics.items() for partition in range(count)]
        self._states = {place: self._states.get(place, NEVER_WRITTEN) for place in places}
        written = await self._logs.next_changed(lambda name: parse_log_name(name) in self._states)
        for name in sorted(written):
            place = parse_log_name(name)
            known = self._states[place]
            state = PartitionState() if known is NEVER_WRITTEN else known
            try:
                found = await catch_up(self._g.consensus, self._g.objects, partition_log(*place), state)
            except TidemillError:
                self._states.pop(place, None)
            else:
                self._states[place] = found[0]
                self._logs.done([name])


class CleanLast(TopicCompaction):
    """Planted fault clean-last: compaction removes the last batch like the others."""

    async def _measure_dirt(self, row: L1PartitionRow, cleaned: L1CleanedRow) -> DirtyPart:
        dirty = 0
        oldest_ms: int | None = None
        async for extent in self._rows.extents(row.topic_id, row.partition, cleaned.cleaned):
            dirty += extent.size_bytes
            if not extent.batch_count or (oldest_ms is not None and extent.last_offset + 1 != row.next):
                continue
            index = await self._reader.index(extent)
            if oldest_ms is None:
                first = index.find(cleaned.cleaned)
                dirty -= int(index.sizes[:first].sum())
                if first < len(index):
                    oldest_ms = int(index.timestamps[first])
        return DirtyPart(row.next, max(dirty, 0), max(row.size_bytes, 0), oldest_ms)


class AbortedSupersedes(TopicCompaction):
    """Planted fault aborted-supersedes: an aborted record supersedes an older record of its key."""

    async def _restrict_bounds(self, bounds: Bounds, holds: Mapping[int, int] | None) -> Bounds:
        return msgspec.structs.replace(await super()._restrict_bounds(bounds, holds), aborted=AbortedIndex())


class ForgottenLog(RollupCollector):
    """Planted fault forgotten-log: the log of a deleted topic is never ended."""

    async def _end_deleted_logs(self, heads: Mapping[str, LogHead], there: set[str], budget: StepBudget) -> bool:
        self._logs.done(heads)
        return False


COLLECTORS: dict[str, type[L0GarbageCollector]] = {
    "first-region": FirstRegion,
    "undecided": Undecided,
    "one-report": OneReport,
}
COMPACTIONS: dict[str, type[TopicCompaction]] = {"clean-last": CleanLast, "aborted-supersedes": AbortedSupersedes}
