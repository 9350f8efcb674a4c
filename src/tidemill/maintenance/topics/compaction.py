"""The job `topic-compaction`: topics with `cleanup.policy=compact` retain the newest record of each key (RFC 0005 §8).

A partition is compacted when enough of it is dirty (`min.cleanable.dirty.ratio`), when some dirty record is old
(`max.compaction.lag.ms`), or when tombstones have been there for long enough (`delete.retention.ms`). A pass handles as
many keys as fit its map. Records that a pipeline has not read, or that are younger than `min.compaction.lag.ms`, stay.

- One pass runs at a time: its map and the object it writes are the job's whole memory.
- A partition that cannot be compacted is reported and skipped for a while. It delays no other partition.
- Replaced extents may be read for as long as their objects stay (`collect_after_s`), and such reads need the list of
  aborted transactions. A later pass records the end of that time (`settled`), and the partition's log forgets the
  aborted transactions there.
- The marker of an abort is removed once the log has forgotten the transaction and the checkpoint's row confirms that.
  No fetch names the transaction then, nor would one after a restore. A consumer that learns of an aborted transaction
  and never meets its marker would skip the producer's later records.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tidemill.base.errors import ConflictError, TidemillError
from tidemill.base.limits import L1_OBJECT_BYTES
from tidemill.maintenance.scheduler import JobContext, MaintenanceJob, StepBudget
from tidemill.maintenance.topics.compaction_pass import Bounds, CompactionPass
from tidemill.metastore.rows import L1_PARTITIONS, PARTITIONS, TOPICS
from tidemill.metastore.rows.l1 import L1CleanedRow, L1PartitionRow
from tidemill.topics.config.configs import TopicConfig, parse_stored_config
from tidemill.topics.l1.extent_store import ExtentStore
from tidemill.topics.l1.reader import L1Reader
from tidemill.topics.lifecycle.retention import NEVER_MS, RetentionHolds, is_compacted
from tidemill.topics.partition.recovery import catch_up, partition_log
from tidemill.topics.partition.state_machine.state import PartitionState
from tidemill.topics.partition.state_machine.transactions import AbortedIndex

KEYS_PER_PASS = 1 << 20
"""Number of keys in one pass: 24 MiB, twice that while some are added."""

RETRY_AFTER_MS = 60_000
"""Time after which a partition that could not be compacted is tried again."""

Place = tuple[str, int]


class CompactionCounters(msgspec.Struct):
    """Counters since this process started."""

    passes: int = 0
    written_bytes: int = 0
    removed_bytes: int = 0
    left_out: int = 0


class DirtyPart(msgspec.Struct, frozen=True):
    """Dirty part of a partition. `last` is the base offset of the last batch in L1. Bytes are those below it;
    `oldest_ms` is the time of the oldest dirty record."""

    last: int
    dirty_bytes: int
    total_bytes: int
    oldest_ms: int | None


class TopicCompaction(MaintenanceJob):
    """The job `topic-compaction`."""

    def __init__(
        self,
        context: JobContext,
        holds: RetentionHolds,
        *,
        room: int = KEYS_PER_PASS,
        target_bytes: int = L1_OBJECT_BYTES,
    ) -> None:
        self._g = context
        self._holds = holds
        self._room = room
        self._target_bytes = target_bytes
        self._rows = ExtentStore(context.metastore, context.clock, context.rand)
        self._reader = L1Reader(self._rows, context.objects, cache_bytes=0)
        self._pass: CompactionPass | None = None
        self._looked: dict[Place, tuple[L1PartitionRow, TopicConfig, int]] = {}
        """Partition → its row and config when nothing was to be done, and until when that stays true while they do
        not change."""
        self._cleaned: dict[Place, tuple[int, float]] = {}
        """Partition → how far it is clean beyond what is settled, and since when that is known (monotonic clock)."""
        self._failing: dict[Place, TidemillError] = {}
        """Errors of partitions, reported as long as there is nothing else to do."""
        self._after: Place = ("", -1)
        """The partition that had the last pass: the others come first."""
        self._figures: CompactionCounters = CompactionCounters()

    async def run(self, budget: StepBudget) -> bool:
        """Run one step of the current pass, or of the next partition that is due. Return False when none is due."""
        if self._pass is None:
            self._pass = await self._next_pass()
            if self._pass is None:
                return False
        running, more = self._pass, False
        try:
            more = await running.step(budget)
        except ConflictError:
            self._figures.left_out += 1  # another node compacts it
        except TidemillError as error:
            self._failing[running.topic_id, running.partition] = error
            self._postpone(running)
            raise
        finally:
            if not more:
                self._pass = None
        if not more:
            self._figures.passes += running.moved
            self._figures.written_bytes += running.written_bytes
            self._figures.removed_bytes += running.removed_bytes
            if not running.moved:
                self._postpone(running)
        return True

    def _postpone(self, running: CompactionPass) -> None:
        place = (running.topic_id, running.partition)
        if place in self._looked:
            row, config, _ = self._looked[place]
            self._looked[place] = row, config, self._g.clock.now_ms() + RETRY_AFTER_MS

    async def _next_pass(self) -> CompactionPass | None:
        """Return a pass for the next partition that is due; partitions after the last one come first."""
        topics = {row.topic_id: row for row in await self._g.metastore.rows(TOPICS) if is_compacted(row)}
        rows: dict[Place, L1PartitionRow] = {}
        for topic_id in topics:
            rows |= {(topic_id, row.partition): row for row in await self._g.metastore.rows(L1_PARTITIONS, topic_id)}
        self._looked = {place: seen for place, seen in self._looked.items() if place in rows}
        self._cleaned = {place: seen for place, seen in self._cleaned.items() if place in rows}
        held: dict[str, Mapping[int, int] | None] = {}
        self._failing = {place: error for place, error in self._failing.items() if place in rows}
        for place in sorted(rows, key=lambda place: (place <= self._after, place)):
            topic, row, now_ms = topics[place[0]], rows[place], self._g.clock.now_ms()
            config = parse_stored_config(topic.config)
            seen = self._looked.get(place)
            if seen is not None and seen[:2] == (row, config) and now_ms < seen[2]:
                continue
            try:
                found, again_ms = await self._due_bounds(row, config, now_ms)
                self._looked[place] = row, config, again_ms
                if found is None:
                    self._failing.pop(place, None)
                    continue
                if topic.topic_id not in held:
                    held[topic.topic_id] = await self._holds(topic)
                bounds = await self._restrict_bounds(found, held[topic.topic_id])
                self._failing.pop(place, None)
            except TidemillError as failed:
                self._failing[place] = failed
                self._figures.left_out += 1
                self._looked[place] = row, config, now_ms + RETRY_AFTER_MS
                continue
            self._after = place
            return CompactionPass(
                self._g, self._reader, bounds, room=self._room, target_bytes=self._target_bytes,
                captured=topic.kind == "capture",
            )  # fmt: skip
        for error in self._failing.values():
            raise error
        return None

    async def _due_bounds(self, row: L1PartitionRow, config: TopicConfig, now_ms: int) -> tuple[Bounds | None, int]:
        """Return what may be compacted now by its config, and when to check again if nothing changes."""
        cleaned, seqno = await self._rows.compaction_progress(row.topic_id, row.partition)
        clean, since_s = self._cleaned.get((row.topic_id, row.partition), (0, 0.0))
        if clean <= cleaned.settled:
            clean, since_s = cleaned.cleaned, self._g.clock.monotonic_s()
            self._cleaned[row.topic_id, row.partition] = clean, since_s
        expired = [
            below
            for below, at_ms, _ in cleaned.tombstones
            if below > row.start and at_ms + config.delete_retention_ms <= now_ms
        ]
        due_ms = [at_ms + config.delete_retention_ms for below, at_ms, _ in cleaned.tombstones if below > row.start]
        dirt = await self._measure_dirt(row, cleaned)
        if dirt.oldest_ms is not None:
            due_ms.append(dirt.oldest_ms + config.compaction_lag_max_ms)
        ratio = dirt.dirty_bytes / max(dirt.total_bytes, 1)
        late = dirt.oldest_ms is not None and dirt.oldest_ms + config.compaction_lag_max_ms <= now_ms
        if not expired and not late and (not dirt.dirty_bytes or ratio < config.dirty_ratio):
            return None, min(due_ms, default=NEVER_MS)
        younger_ms = now_ms - config.compaction_lag_ms if config.compaction_lag_ms else None
        settled = clean if self._g.clock.monotonic_s() - since_s >= self._g.retention.collect_after_s else 0
        bounds = Bounds(cleaned, seqno, dirt.last, younger_ms, max(expired, default=0), settled, AbortedIndex())
        return bounds, 0

    async def _measure_dirt(self, row: L1PartitionRow, cleaned: L1CleanedRow) -> DirtyPart:
        """Compute the dirty part. The rows give the sizes of whole extents; indexes give those of the partly clean
        extent and the last one."""
        last, last_bytes = row.start, 0
        dirty = 0
        oldest_ms: int | None = None
        async for extent in self._rows.extents(row.topic_id, row.partition, cleaned.cleaned):
            ends = extent.last_offset + 1 == row.next
            dirty += extent.size_bytes
            if not extent.batch_count:
                continue
            index = None
            if ends or oldest_ms is None:
                index = await self._reader.index(extent)
            if index is not None and oldest_ms is None:
                first = index.find(cleaned.cleaned)
                dirty -= int(index.sizes[:first].sum())
                if first < len(index) - ends:
                    oldest_ms = int(index.timestamps[first])
            if index is not None and ends:
                last, last_bytes = int(index.bases[-1]), int(index.sizes[-1])
        return DirtyPart(last, max(dirty - last_bytes, 0), max(row.size_bytes - last_bytes, 0), oldest_ms)

    async def _restrict_bounds(self, bounds: Bounds, holds: Mapping[int, int] | None) -> Bounds:
        """Restrict the bounds to what every reader has read, and to what is settled for good."""
        topic_id, partition = bounds.cleaned.topic_id, bounds.cleaned.partition
        log = partition_log(topic_id, partition)
        state, _ = await catch_up(self._g.consensus, self._g.objects, log, PartitionState())
        # Invariant: abort markers are removed only below the checkpoint's row. The log is ahead of that row, and what
        # the pass writes is ordered after it.
        stored = await self._g.metastore.get(PARTITIONS, topic_id, partition)
        held = 0 if holds is None else holds.get(partition, bounds.below)
        return msgspec.structs.replace(
            bounds,
            below=min(bounds.below, held, state.last_stable),
            delete_below=min(bounds.delete_below, held),
            aborted=state.aborted,
            markers_below=stored.aborted_start if stored is not None else 0,
        )
