"""Retention of topics by time and size: determine where a partition's log may start, and advance it.

    led partitions    every `retention_check_s` the leader examines those that were written to, or whose oldest batch
                      has expired, and appends an Advance to their logs
    idle partitions   that are not open are read without taking them over; they are not examined until something is due
    holds             records that a pipeline has not read yet are retained, regardless of the topic's config

Kafka's rules: whole batches are deleted, oldest first, while the newest record of a batch is older than retention.ms,
or while the rest without the batch is at least retention.bytes. Times are those of the records. Records without a time
(−1) are as old as the newest append, or as their extent: Kafka takes the time of the segment's file
(`LogSegment.largestTimestamp`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Protocol

import structlog
from msgspec.structs import replace

from tidemill.base.runtime.tasks import error_sentence, is_fault
from tidemill.consensus.change_journal import ChangedLogs
from tidemill.metastore.catalogue import TopicRow
from tidemill.topics.api import RecordsStillNeededError
from tidemill.topics.config.configs import TopicConfig, parse_stored_config
from tidemill.topics.l1.extent_store import ExtentStore
from tidemill.topics.l1.format import created_ms
from tidemill.topics.membership import Assignment
from tidemill.topics.partition.leader import LeaderDeps, PartitionLeader
from tidemill.topics.partition.recovery import LOG_PREFIX, catch_up, parse_log_name, partition_log
from tidemill.topics.partition.state_machine.state import PartitionState

_log = structlog.get_logger()

PartitionKey = tuple[str, int]

NEVER_MS = 1 << 62


class RetentionHolds(Protocol):
    async def __call__(self, topic: TopicRow) -> Mapping[int, int] | None:
        """Return partition to the first offset that some reader still needs; None = all records are needed.

        Raises if that cannot be determined.
        """
        ...


async def no_retention_holds(topic: TopicRow) -> Mapping[int, int]:
    return {}


def retained_start(state: PartitionState, config: TopicConfig, now_ms: int) -> int:
    """Return where the log may start: not before its current start, and not within an open transaction. Pure."""
    gone = 0
    if config.retention_ms >= 0:
        newest_ms = now_ms - config.retention_ms - 1
        gone = bisect_right(state.highest_timestamps, newest_ms)
        if gone and state.highest_timestamps[gone - 1] < 0 and state.last_at_ms > newest_ms:
            gone = 0
    if config.retention_bytes >= 0:
        left = state.size_bytes - sum(state.sizes[:gone])
        while gone < len(state) and left - state.sizes[gone] >= config.retention_bytes:
            left -= state.sizes[gone]
            gone += 1
    return max(state.log_start, min(state.next_base(gone - 1), state.last_stable)) if gone else state.log_start


def retention_config(row: TopicRow) -> TopicConfig | None:
    """Return the config of a topic with retention, else None.

    A captured table's topic has none: a later pipeline begins with its snapshot.
    """
    config = parse_stored_config(row.config)
    return config if row.kind == "stream" and config.has_retention else None


def is_compacted(row: TopicRow) -> bool:
    """Return whether the topic is compacted by key."""
    return "cleanup.policy" in row.config and parse_stored_config(row.config).is_compacted


def effective_config(row: TopicRow) -> TopicConfig:
    """Return the typed config that the leader applies."""
    return replace(parse_stored_config(row.config), captured=row.kind == "capture")


class RetentionRunner:
    """Retention rounds of one node, over the partitions that it leads or would lead."""

    def __init__(
        self,
        around: LeaderDeps,
        assignment: Assignment,
        led: Mapping[PartitionKey, PartitionLeader],
        leading: Callable[[str, int], PartitionLeader],
        l1: ExtentStore | None = None,
    ) -> None:
        self._consensus = around.consensus
        self._objects = around.objects
        self._clock = around.clock
        self._settings = around.settings
        self._assignment = assignment
        self._led = led
        self._leading = leading
        self._l1 = l1
        self._logs = ChangedLogs(around.consensus, LOG_PREFIX)
        self._due_ms: dict[PartitionKey, int] = {}
        """Partitions with records, to the time when something in them may be due."""
        self._topics: Mapping[str, TopicRow] = {}
        self._configs: dict[str, TopicConfig] = {}
        """Configs of the topics with retention."""
        self.holds: RetentionHolds = no_retention_holds

    async def run_round(self, topics: Mapping[str, TopicRow]) -> None:
        """Run one round. `topics`: a recent catalogue; a new mapping if it changed.

        A topic that fails is retried in the next round and does not affect the others. Raises UnavailableError.
        """
        for led in list(self._led.values()):
            led.settle_if_due(self._settings.settle_after_s)
        self._apply_catalogue(topics)
        await self._schedule_written(topics)
        now_ms = self._clock.now_ms()
        due: dict[str, list[int]] = {}
        for (topic_id, partition), due_ms in self._due_ms.items():
            if due_ms <= now_ms and self._assignment.leader_of(topic_id, partition) == self._assignment.node:
                due.setdefault(topic_id, []).append(partition)
        for topic_id, partitions in due.items():
            try:
                await self._apply_to_topic(topics[topic_id], self._configs[topic_id], partitions)
            except BaseException as error:
                if not is_fault(error):
                    raise
                _log.warning(
                    "retention of a topic is delayed", topic=topics[topic_id].name, cause=error_sentence(error)
                )

    def _apply_catalogue(self, topics: Mapping[str, TopicRow]) -> None:
        """Schedule the partitions of topics that were added, removed or reconfigured."""
        if topics is self._topics:
            return
        self._topics = topics
        configs = {row.topic_id: config for row in topics.values() if (config := retention_config(row)) is not None}
        changed = {id for id in configs.keys() | self._configs.keys() if configs.get(id) != self._configs.get(id)}
        self._configs = configs
        self._due_ms = {
            key: self._initial_due_ms(key[0]) if key[0] in changed else due_ms
            for key, due_ms in self._due_ms.items()
            if key[0] in topics
        }

    def _initial_due_ms(self, topic_id: str) -> int:
        return 0 if topic_id in self._configs else NEVER_MS

    async def _schedule_written(self, topics: Mapping[str, TopicRow]) -> None:
        """Schedule the partitions that were written to since the last round."""

        def exists(name: str) -> bool:
            topic_id, partition = parse_log_name(name)
            row = topics.get(topic_id)
            return row is not None and partition < row.partitions

        written = await self._logs.next_changed(exists)
        for name, head in written.items():
            key = parse_log_name(name)
            if head.next:
                self._due_ms[key] = self._initial_due_ms(key[0])
        self._logs.done(written)

    async def check_deletable(self, row: TopicRow, partition: int, offset: int) -> None:
        """Raise RecordsStillNeededError if records below `offset` may not be deleted: a reader needs one of them, or
        the topic retains the newest record of each key.

        Also raises the errors of `holds`.
        """
        if row.kind == "capture":
            raise RecordsStillNeededError(
                f"a captured table's topic is never truncated, because later pipelines need it: topic={row.name}."
            )
        config = parse_stored_config(row.config)
        if config.is_compacted and "delete" not in config.cleanup:
            raise RecordsStillNeededError(
                f"the cleanup policy of the topic retains the newest record of each key: topic={row.name}.",
                fix="Set cleanup.policy=compact,delete first.",
            )
        holds = await self.holds(row)
        held = 0 if holds is None else holds.get(partition, offset)
        if held < offset:
            raise RecordsStillNeededError(
                f"a pipeline has not read these records: topic={row.name} partition={partition}"
                f" offset={offset} read_to={held}.",
                fix=f"Wait for it (tidemill topic describe {row.name}), or delete the pipeline.",
            )

    async def _apply_to_topic(self, row: TopicRow, config: TopicConfig, partitions: list[int]) -> None:
        holds: Mapping[int, int] | None = None
        asked = False
        for partition in partitions:
            led = await self._led_if_due(row, partition, config)
            if led is None:
                continue
            if not asked:
                holds, asked = await self.holds(row), True
            start, _ = await self._retention_start((row.topic_id, partition), led.state, config)
            if holds is not None:
                led.advance_log_start(min(start, holds.get(partition, start)))

    async def _led_if_due(self, row: TopicRow, partition: int, config: TopicConfig) -> PartitionLeader | None:
        """Return the led partition if some of its records may be deleted, else None."""
        key = (row.topic_id, partition)
        led = self._led.get(key)
        if led is not None and not led.is_open:
            return None
        if led is not None:
            state = led.state
        else:
            state, _ = await catch_up(self._consensus, self._objects, partition_log(*key), PartitionState())
        start, oldest_ms = await self._retention_start(key, state, config)
        if start <= state.log_start:
            # By size, nothing is due before the next batch arrives, which changes the log.
            timed = config.retention_ms >= 0 and oldest_ms is not None
            self._due_ms[key] = oldest_ms + config.retention_ms + 1 if timed and oldest_ms is not None else NEVER_MS
            return None
        led = self._leading(*key)
        await led.wait_open()
        return led

    async def _retention_start(
        self, key: PartitionKey, state: PartitionState, config: TopicConfig
    ) -> tuple[int, int | None]:
        """Return (where the log may start, newest time of what is deleted next): extents, oldest first, then the hot
        state."""
        now_ms, start, hot_start, left = self._clock.now_ms(), state.log_start, state.hot_start, state.size_bytes
        hot, hot_ms = retained_start(state, config, now_ms), None
        if len(state):
            hot_ms = state.highest_timestamps[0] if state.highest_timestamps[0] >= 0 else state.last_at_ms
        if start == hot_start:
            return hot, hot_ms
        row = await self._l1.partition(*key, fresh=False) if self._l1 is not None else None
        if self._l1 is None or row is None:
            return start, None
        # Not the row's sum, which counts extents below the log start until the maintenance job has removed them.
        extents = [extent async for extent in self._l1.extents(*key, start, fresh=False)]
        left += sum(extent.size_bytes for extent in extents if extent.base_offset < hot_start)
        for extent in extents:
            at_ms = extent.max_timestamp_ms if extent.max_timestamp_ms >= 0 else created_ms(extent.object_id)
            old = config.retention_ms >= 0 and at_ms < now_ms - config.retention_ms
            left -= extent.size_bytes
            if extent.base_offset >= hot_start:
                break
            if not (old or 0 <= config.retention_bytes <= left):
                return max(start, extent.base_offset), at_ms
        return max(hot, hot_start), hot_ms
