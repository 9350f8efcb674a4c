"""Retention of topics by time and size: where a partition's log may start, and who moves it there.

    the leader       looks at its partitions every `retention_check_s` and appends an Advance to their logs
    an idle one      that nobody has opened is read, not taken over, and left alone until something in it is due
    a hold           what a pipeline has not read yet stays, whatever the topic's config says

Kafka's rules: whole batches, oldest first, as long as the newest record of a batch is older than retention.ms, or as
what is left without the batch is still retention.bytes or more. Times are those of the records.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Protocol

import structlog

from tidemill.base.clock import Clock
from tidemill.base.tasks import is_fault, sentence
from tidemill.consensus.api import Consensus
from tidemill.metastore.catalogue import TopicRow
from tidemill.objects.store import ObjectStore
from tidemill.topics.configs import TopicConfig, stored_config
from tidemill.topics.leadership import Assignment
from tidemill.topics.partition.machine import LedPartition
from tidemill.topics.partition.replay import catch_up, partition_log
from tidemill.topics.partition.state import PartitionState
from tidemill.topics.settings import TopicSettings

_log = structlog.get_logger()

LOOK_AGAIN_MS = 3_600_000
"""A partition that nobody has opened is looked at again after this long at most: another node may have written it."""

PartitionKey = tuple[str, int]


class Holds(Protocol):
    async def __call__(self, topic: TopicRow) -> Mapping[int, int] | None:
        """partition → first offset somebody still has to read; None = all of it. Raises when it cannot be told."""
        ...


async def no_holds(topic: TopicRow) -> Mapping[int, int]:
    return {}


def kept_start(state: PartitionState, config: TopicConfig, now_ms: int) -> int:
    """Where the log may start, at or after where it does. Pure."""
    gone = 0
    if config.retention_ms >= 0:
        gone = bisect_right(state.highest_timestamps, now_ms - config.retention_ms - 1)
    if config.retention_bytes >= 0:
        left = state.size_bytes - sum(state.sizes[:gone])
        while gone < len(state) and left - state.sizes[gone] >= config.retention_bytes:
            left -= state.sizes[gone]
            gone += 1
    return max(state.log_start, state.next_base(gone - 1)) if gone else state.log_start


def has_retention(row: TopicRow) -> TopicConfig | None:
    """The config of a topic that forgets. A captured table's never does: a later pipeline begins with its snapshot."""
    config = stored_config(row.config)
    return config if row.kind == "stream" and (config.retention_ms >= 0 or config.retention_bytes >= 0) else None


class Retainer:
    """One node's rounds over the partitions that it leads or would lead."""

    def __init__(
        self,
        consensus: Consensus,
        objects: ObjectStore,
        clock: Clock,
        settings: TopicSettings,
        assignment: Assignment,
        led: Mapping[PartitionKey, LedPartition],
        leading: Callable[[str, int], LedPartition],
    ) -> None:
        self._consensus = consensus
        self._objects = objects
        self._clock = clock
        self._settings = settings
        self._assignment = assignment
        self._led = led
        self._leading = leading
        self._due_ms: dict[PartitionKey, int] = {}
        """partitions nobody has opened here → when something in them may be due"""
        self.holds: Holds = no_holds

    async def round(self, topics: Mapping[str, TopicRow]) -> None:
        """A topic that fails is looked at in the next round; the others are not harmed."""
        for led in list(self._led.values()):
            led.settle(self._settings.settle_after_s)
        for row in list(topics.values()):
            config = has_retention(row)
            if config is None:
                continue
            try:
                await self._topic(row, config)
            except BaseException as error:
                if not is_fault(error):
                    raise
                _log.warning("retention of a topic waits", topic=row.name, cause=sentence(error))
        for key in [key for key in self._due_ms if key[0] not in topics]:
            del self._due_ms[key]

    async def _topic(self, row: TopicRow, config: TopicConfig) -> None:
        holds: Mapping[int, int] | None = None
        asked = False
        for partition in range(row.partitions):
            if self._assignment.leader_of(row.topic_id, partition) != self._assignment.node:
                continue
            led = await self._due(row, partition, config)
            if led is None:
                continue
            start = kept_start(led.state, config, self._clock.now_ms())
            if start <= led.state.log_start:
                continue
            if not asked:
                holds, asked = await self.holds(row), True
            if holds is not None:
                led.start_at(min(start, holds.get(partition, start)))

    async def _due(self, row: TopicRow, partition: int, config: TopicConfig) -> LedPartition | None:
        key = (row.topic_id, partition)
        led = self._led.get(key)
        if led is not None:
            self._due_ms.pop(key, None)
            return led if led.is_open else None
        now_ms = self._clock.now_ms()
        if now_ms < self._due_ms.get(key, 0):
            return None
        log = partition_log(*key)
        state, _ = await catch_up(self._consensus, self._objects, log, PartitionState())
        if kept_start(state, config, now_ms) <= state.log_start:
            due_ms = now_ms + LOOK_AGAIN_MS
            if config.retention_ms >= 0 and len(state):
                due_ms = min(due_ms, state.highest_timestamps[0] + config.retention_ms + 1)
            self._due_ms[key] = max(due_ms, now_ms + 1)
            return None
        led = self._leading(*key)
        await led.opened()
        return led
