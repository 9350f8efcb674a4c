"""The job `topic-l1-levels`: rewrite runs of small extents of a topic's partitions as large ones.

    rows of partitions that gained FANOUT extents ─► runs ─► read ─► register ─► put ─► replace, each partition or none

The extents of a run are replaced only if they are unchanged (`row_transitions.replace_extents`): a start that moved, or
another node that merges too, leaves that partition out. An interrupted step leaves a registration, which expires.
"""

from __future__ import annotations

import msgspec

from tidemill.base.errors import CorruptError, InvalidError, TidemillError
from tidemill.base.limits import L1_OBJECT_BYTES
from tidemill.maintenance.scheduler import JobContext, MaintenanceJob, StepBudget
from tidemill.metastore.rows import L1_PARTITIONS
from tidemill.metastore.rows.l1 import L1PartitionRow, l1_key
from tidemill.topics.l1.builder import ObjectBuilder
from tidemill.topics.l1.extent_merge import FANOUT, ExtentRun, find_mergeable_run, merge_run
from tidemill.topics.l1.extent_store import ExtentStore
from tidemill.topics.l1.format import object_id
from tidemill.topics.l1.reader import L1Reader
from tidemill.topics.l1.row_transitions import ReplaceRequest

EXTENTS_PER_READ = 5_000
"""Number of extents of one partition that are read, oldest first. Those beyond are read when these have become few."""

EXTENTS_PER_COMMIT = 5_000
"""Number of extents that one commit replaces."""


class L1MergeCounters(msgspec.Struct):
    """Counters since this process started."""

    objects: int = 0
    merged_extents: int = 0
    rewritten_bytes: int = 0
    left_out: int = 0


class L1Merger(MaintenanceJob):
    """The job `topic-l1-levels`."""

    def __init__(self, context: JobContext, *, target_bytes: int = L1_OBJECT_BYTES, fanout: int = FANOUT) -> None:
        self._g = context
        self._fanout = fanout
        self._target_bytes = target_bytes
        self._rows = ExtentStore(context.metastore, context.clock, context.rand)
        self._reader = L1Reader(self._rows, context.objects, cache_bytes=0)
        self._looked: dict[tuple[str, int], int] = {}
        """Partition → its number of extents when no run was found in it."""
        self._figures: L1MergeCounters = L1MergeCounters()

    async def run(self, budget: StepBudget) -> bool:
        """Write one object of each topic. Return True while some topics may have more."""
        grown: dict[str, list[L1PartitionRow]] = {}
        rows = await self._g.metastore.rows(L1_PARTITIONS, fresh=False)
        places = {(row.topic_id, row.partition) for row in rows}
        self._looked = {place: count for place, count in self._looked.items() if place in places}
        for row in rows:
            known = min(self._looked.get((row.topic_id, row.partition), 0), row.extent_count)
            if row.extent_count - known >= self._fanout:
                grown.setdefault(row.topic_id, []).append(row)
        more = False
        error: TidemillError | None = None
        for topic_id, some in grown.items():
            if not budget.has_budget:
                return True
            try:
                more = await self._merge_topic(topic_id, some, budget) or more
            except TidemillError as failed:
                error = failed
        if error is not None:
            raise error
        return more

    async def _merge_topic(self, topic_id: str, rows: list[L1PartitionRow], budget: StepBudget) -> bool:
        room = self._target_bytes
        build, epochs, runs = ObjectBuilder(topic_id), dict[int, int](), list[ExtentRun]()
        for row in rows:
            run = await self._find_run(row)
            if not run:
                continue
            size = sum(extent.size_bytes for extent in run)
            if runs and (size > room or sum(map(len, runs)) + len(run) > EXTENTS_PER_COMMIT):
                continue
            try:
                held = [(await self._reader.index(extent), await self._reader.data(extent)) for extent in run]
            except CorruptError:
                self._figures.left_out += 1  # the deep check reports it; its neighbours wait with it
                self._looked[topic_id, row.partition] = row.extent_count
                continue
            merge_run(build, run, held)
            runs.append(run)
            epochs[row.partition] = row.compaction_epoch
            room -= size
            budget.spend(2 * size)
        if not runs:
            return False
        parts, footer = build.finish()
        name = object_id(self._g.clock.now_ms(), self._g.rand.nonce())
        await self._rows.register(topic_id, name)
        await self._g.objects.put(l1_key(topic_id, name), parts)
        object_bytes = sum(len(part) for part in parts)
        try:
            stale = await self._rows.replace(ReplaceRequest(topic_id, name, object_bytes, footer.regions, epochs))
        except InvalidError:
            self._figures.left_out += len(runs)
            return False
        self._figures.objects += 1
        self._figures.merged_extents += sum(len(run) for run in runs)
        self._figures.rewritten_bytes += object_bytes
        self._figures.left_out += len(stale)
        return not stale  # partitions that changed concurrently are tried again after a while

    async def _find_run(self, row: L1PartitionRow) -> ExtentRun:
        extents = []
        async for extent in self._rows.extents(row.topic_id, row.partition, fresh=False):
            extents.append(extent)
            if len(extents) >= EXTENTS_PER_READ:
                break
        run = find_mergeable_run(extents, self._target_bytes, self._fanout)
        if not run:
            self._looked[row.topic_id, row.partition] = row.extent_count
        return run
