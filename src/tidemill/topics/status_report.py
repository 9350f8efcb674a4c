"""Stage statuses of topics: one per topic. Each process reports a share, that of the partitions that it leads.

A process that leads more topics than OWN_STATUSES_MAX has one entry, `topics`, for all that are at their target. Topics
below theirs have their own entries, those furthest behind first.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from heapq import nlargest
from typing import NamedTuple

from tidemill.base.clock import Clock
from tidemill.base.status.status import StatusTracker
from tidemill.metastore.catalogue import TopicRow
from tidemill.topics.config.settings import TopicSettings
from tidemill.topics.l0.object_cache import ObjectCache, SharedReads
from tidemill.topics.l0.writer import L0Writer
from tidemill.topics.l1.read_ahead import ReadAhead
from tidemill.topics.partition.leader import PartitionLeader
from tidemill.topics.partition_supervisor import SHARED_STATUS, PartitionSupervisor
from tidemill.topics.topic_rows import TopicRows

OWN_STATUSES_MAX = 200
"""Limit of entries: about 30 kB of a process's report."""


class PartitionTotals:
    """Sums over `count` open partitions: position = high watermarks, target = reserved ends, memory_bytes = memory."""

    __slots__ = ("count", "memory_bytes", "position", "target")

    def __init__(self) -> None:
        self.position = self.target = self.memory_bytes = self.count = 0

    @property
    def lag(self) -> int:
        return self.target - self.position

    def add(self, position: int, target: int, memory_bytes: int, count: int) -> None:
        self.position += position
        self.target += target
        self.memory_bytes += memory_bytes
        self.count += count


class TopicStatusTotals:
    """Totals of one process's topics. Only partitions that were touched since the last update are counted again."""

    def __init__(self) -> None:
        self.topics: dict[str, PartitionTotals] = {}
        """Topic id to the totals of its open partitions here."""
        self.all = PartitionTotals()
        self.behind: set[str] = set()
        self._touched: set[PartitionLeader] = set()
        self._counted: dict[PartitionLeader, tuple[int, int, int]] = {}

    def touch(self, led: PartitionLeader) -> None:
        """Mark a partition that moved, opened or closed. A plain call, on the produce path."""
        self._touched.add(led)

    def update(self) -> None:
        touched, self._touched = self._touched, set()
        for led in touched:
            counted = self._counted.pop(led, None)
            if counted is not None:
                self._add(led.topic_id, *(-each for each in counted), -1)
            if led.is_open:
                position = led.state.high_watermark
                counted = self._counted[led] = (
                    position,
                    position + led.intake.live.reserved_records,
                    led.state.memory_bytes,
                )
                self._add(led.topic_id, *counted, 1)

    def _add(self, topic_id: str, *parts: int) -> None:
        found = self.topics.setdefault(topic_id, PartitionTotals())
        for each in (found, self.all):
            each.add(*parts)
        if found.lag:
            self.behind.add(topic_id)
        else:
            self.behind.discard(topic_id)
        if not found.count:
            del self.topics[topic_id]


def report_statuses(
    tracker: StatusTracker,
    sums: TopicStatusTotals,
    topics: Mapping[str, TopicRow],
    writer: L0Writer,
    now_ms: int,
    failing: Container[str] = (),
) -> set[str]:
    """Set the stage statuses and return their names; `held_by` names the oldest open upload.

    Entries of `failing` topics are not changed: progress of other partitions does not show that the failed ones work.
    """
    sums.update()
    own = list(sums.topics)
    if len(own) > OWN_STATUSES_MAX:
        own = nlargest(OWN_STATUSES_MAX, sorted(sums.behind), key=lambda topic_id: sums.topics[topic_id].lag)
    reported = {f"topic:{topics[topic_id].name}": sums.topics[topic_id] for topic_id in own if topic_id in topics}
    if len(own) < len(sums.topics):
        rest = reported[SHARED_STATUS] = PartitionTotals()
        rest.add(sums.all.position, sums.all.target, 0, 0)
        for topic_id in own:
            rest.add(-sums.topics[topic_id].position, -sums.topics[topic_id].target, 0, 0)
    oldest = writer.oldest_upload()
    for name, each in reported.items():
        if name in failing:
            continue
        held_by = f"upload:{oldest.key}" if each.lag and oldest is not None else ""
        reason = "records wait for their upload and commit" if each.lag else ""
        tracker.set(
            name,
            each.position,
            each.target,
            now_ms=now_ms,
            held_by=held_by,
            reason=reason,
            unit="records",
            share=True,
        )
    return set(reported)


class TopicStatuses:
    """Stage statuses `topic:<name>` of one process. `tracker`: where they are set; nothing is reported without it."""

    def __init__(
        self,
        tracker: StatusTracker | None,
        sums: TopicStatusTotals,
        rows: TopicRows,
        writer: L0Writer,
        supervision: PartitionSupervisor,
        clock: Clock,
    ) -> None:
        self.tracker = tracker if tracker is not None else StatusTracker()
        """Tracker of the topics and of the loops; a private one if none was given."""
        self._reports = tracker is not None
        self._sums = sums
        self._rows = rows
        self._writer = writer
        self._supervision = supervision
        self._clock = clock
        self._reported: set[str] = set()
        """Names in the tracker, as of the last update: those of topics without a partition here are removed."""

    def update(self) -> None:
        """Set the stage status of every topic with a partition led here."""
        if not self._reports or self._rows.is_closed:
            return
        failing = self._supervision.marks()
        now_ms = self._clock.now_ms()
        reported = report_statuses(self.tracker, self._sums, self._rows.topics, self._writer, now_ms, failing)
        for name in self._reported - reported:
            self.tracker.remove(name)
        self._reported = reported


class TopicMemory(NamedTuple):
    """Memory of one process's topics, as (bytes used, limit)."""

    writer: L0Writer
    settings: TopicSettings
    objects: ObjectCache
    shared: SharedReads
    ahead: ReadAhead
    sums: TopicStatusTotals

    @property
    def staged(self) -> tuple[int, int]:
        """Batches that wait for their upload or are being uploaded."""
        return self.writer.staged_bytes, self.settings.staged_bytes

    @property
    def partitions_bytes(self) -> int:
        """Estimated memory of the partitions that are open here. 0 without a tracker."""
        return self.sums.all.memory_bytes

    @property
    def cache(self) -> tuple[int, int]:
        """Recent L0 objects in memory, and cached reads from other nodes' objects."""
        shared = self.shared
        return self.objects.bytes_held + shared.held_bytes, self.settings.cache_bytes + shared.limit_bytes

    @property
    def read_ahead(self) -> tuple[int, int]:
        """Bytes that were read ahead from L1."""
        return self.ahead.held_bytes, self.ahead.limit_bytes
