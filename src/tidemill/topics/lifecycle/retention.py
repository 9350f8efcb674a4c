"""Retention of topics by time and size: where a partition's log may start, and who moves it there.

    the leader       looks every `retention_check_s` at those of its partitions that were written to, or in which the
                     oldest batch has come to its time, and appends an Advance to their logs
    an idle one      that nobody has opened is read, not taken over; until something in it is due, nobody looks at it
    a hold           what a pipeline has not read yet stays, whatever the topic's config says

Kafka's rules: whole batches, oldest first, as long as the newest record of a batch is older than retention.ms, or as
what is left without the batch is still retention.bytes or more. Times are those of the records.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Protocol

import structlog
from msgspec.structs import replace

from tidemill.base.clock import Clock
from tidemill.base.runtime.tasks import is_fault, sentence
from tidemill.consensus.api import Consensus
from tidemill.consensus.change_cursor import ChangedLogs
from tidemill.metastore.catalogue import TopicRow
from tidemill.objects.store import ObjectStore
from tidemill.topics.api import RecordsStillNeededError
from tidemill.topics.config.configs import TopicConfig, stored_config
from tidemill.topics.config.settings import TopicSettings
from tidemill.topics.l1.extent_store import ExtentStore
from tidemill.topics.membership import Assignment
from tidemill.topics.partition.leader import PartitionLeader
from tidemill.topics.partition.recovery import LOG_PREFIX, catch_up, partition_log, place_of
from tidemill.topics.partition.state import PartitionState

_log = structlog.get_logger()

PartitionKey = tuple[str, int]

NEVER_MS = 1 << 62


class RetentionHolds(Protocol):
    async def __call__(self, topic: TopicRow) -> Mapping[int, int] | None:
        """partition → first offset somebody still has to read; None = all of it. Raises when it cannot be told."""
        ...


async def no_holds(topic: TopicRow) -> Mapping[int, int]:
    return {}


def kept_start(state: PartitionState, config: TopicConfig, now_ms: int) -> int:
    """Where the log may start, at or after where it does: not within an open transaction. Pure."""
    gone = 0
    if config.retention_ms >= 0:
        gone = bisect_right(state.highest_timestamps, now_ms - config.retention_ms - 1)
    if config.retention_bytes >= 0:
        left = state.size_bytes - sum(state.sizes[:gone])
        while gone < len(state) and left - state.sizes[gone] >= config.retention_bytes:
            left -= state.sizes[gone]
            gone += 1
    return max(state.log_start, min(state.next_base(gone - 1), state.last_stable)) if gone else state.log_start


def has_retention(row: TopicRow) -> TopicConfig | None:
    """The config of a topic that forgets. A captured table's never does: a later pipeline begins with its snapshot."""
    config = stored_config(row.config)
    return config if row.kind == "stream" and config.forgets else None


def is_compacted(row: TopicRow) -> bool:
    """By key."""
    return "cleanup.policy" in row.config and stored_config(row.config).compacts


def config_of(row: TopicRow) -> TopicConfig:
    """What whoever serves the topic keeps to."""
    return replace(stored_config(row.config), captured=row.kind == "capture")


class Retainer:
    """One node's rounds over the partitions that it leads or would lead."""

    def __init__(
        self,
        consensus: Consensus,
        objects: ObjectStore,
        clock: Clock,
        settings: TopicSettings,
        assignment: Assignment,
        led: Mapping[PartitionKey, PartitionLeader],
        leading: Callable[[str, int], PartitionLeader],
        l1: ExtentStore | None = None,
    ) -> None:
        self._consensus = consensus
        self._objects = objects
        self._clock = clock
        self._settings = settings
        self._assignment = assignment
        self._led = led
        self._leading = leading
        self._l1 = l1
        self._logs = ChangedLogs(consensus, LOG_PREFIX)
        self._due_ms: dict[PartitionKey, int] = {}
        """partitions that hold records → when something in them may be due"""
        self._topics: Mapping[str, TopicRow] = {}
        self._configs: dict[str, TopicConfig] = {}
        """Of the topics that forget."""
        self.holds: RetentionHolds = no_holds

    async def round(self, topics: Mapping[str, TopicRow]) -> None:
        """`topics`: those there are, read a moment ago; another mapping when they changed.

        A topic that fails is looked at in the next round; the others are not harmed. Raises Unavailable.
        """
        for led in list(self._led.values()):
            led.settle(self._settings.settle_after_s)
        self._note(topics)
        await self._look(topics)
        now_ms = self._clock.now_ms()
        due: dict[str, list[int]] = {}
        for (topic_id, partition), due_ms in self._due_ms.items():
            if due_ms <= now_ms and self._assignment.leader_of(topic_id, partition) == self._assignment.node:
                due.setdefault(topic_id, []).append(partition)
        for topic_id, partitions in due.items():
            try:
                await self._topic(topics[topic_id], self._configs[topic_id], partitions)
            except BaseException as error:
                if not is_fault(error):
                    raise
                _log.warning("retention of a topic waits", topic=topics[topic_id].name, cause=sentence(error))

    def _note(self, topics: Mapping[str, TopicRow]) -> None:
        """Topics came, went, or are to forget by another rule: what they hold is looked at anew."""
        if topics is self._topics:
            return
        self._topics = topics
        configs = {row.topic_id: config for row in topics.values() if (config := has_retention(row)) is not None}
        changed = {id for id in configs.keys() | self._configs.keys() if configs.get(id) != self._configs.get(id)}
        self._configs = configs
        self._due_ms = {
            key: self._at_once(key[0]) if key[0] in changed else due_ms
            for key, due_ms in self._due_ms.items()
            if key[0] in topics
        }

    def _at_once(self, topic_id: str) -> int:
        return 0 if topic_id in self._configs else NEVER_MS

    async def _look(self, topics: Mapping[str, TopicRow]) -> None:
        """What was written to since the last round."""

        def there(name: str) -> bool:
            topic_id, partition = place_of(name)
            row = topics.get(topic_id)
            return row is not None and partition < row.partitions

        written = await self._logs.look(there)
        for name, head in written.items():
            key = place_of(name)
            if head.next:
                self._due_ms[key] = self._at_once(key[0])
        self._logs.done(written)

    async def check_unread(self, row: TopicRow, partition: int, offset: int) -> None:
        """Raises RecordsStillNeededError when somebody has yet to read a record below `offset`, and what `holds`
        raises."""
        if row.kind == "capture":
            raise RecordsStillNeededError(
                f"a captured table's topic is never cut: later pipelines begin with it: topic={row.name}."
            )
        holds = await self.holds(row)
        held = 0 if holds is None else holds.get(partition, offset)
        if held < offset:
            raise RecordsStillNeededError(
                f"a pipeline has not read these records: topic={row.name} partition={partition}"
                f" offset={offset} read_to={held}.",
                fix=f"Wait for it (tidemill topic describe {row.name}), or delete the pipeline.",
            )

    async def _topic(self, row: TopicRow, config: TopicConfig, partitions: list[int]) -> None:
        holds: Mapping[int, int] | None = None
        asked = False
        for partition in partitions:
            led = await self._due(row, partition, config)
            if led is None:
                continue
            if not asked:
                holds, asked = await self.holds(row), True
            start, _ = await self._kept((row.topic_id, partition), led.state, config)
            if holds is not None:
                led.start_at(min(start, holds.get(partition, start)))

    async def _due(self, row: TopicRow, partition: int, config: TopicConfig) -> PartitionLeader | None:
        """The partition, led, if something of it may go."""
        key = (row.topic_id, partition)
        led = self._led.get(key)
        if led is not None and not led.is_open:
            return None
        if led is not None:
            state = led.state
        else:
            state, _ = await catch_up(self._consensus, self._objects, partition_log(*key), PartitionState())
        start, oldest_ms = await self._kept(key, state, config)
        if start <= state.log_start:
            # By size nothing goes before the next batch comes, and that is a change of the log.
            timed = config.retention_ms >= 0 and oldest_ms is not None
            self._due_ms[key] = oldest_ms + config.retention_ms + 1 if timed and oldest_ms is not None else NEVER_MS
            return None
        led = self._leading(*key)
        await led.opened()
        return led

    async def _kept(self, key: PartitionKey, state: PartitionState, config: TopicConfig) -> tuple[int, int | None]:
        """(where the log may start, the newest time in what goes next): extents, oldest first, then what is hot."""
        now_ms, start, hot_start, left = self._clock.now_ms(), state.log_start, state.hot_start, state.size_bytes
        hot, hot_ms = kept_start(state, config, now_ms), state.highest_timestamps[0] if len(state) else None
        if start == hot_start:
            return hot, hot_ms
        row = await self._l1.partition(*key, fresh=False) if self._l1 is not None else None
        if self._l1 is None or row is None:
            return start, None
        # Not the row's sum: until the keeper has trimmed it, that counts what has gone below the log's start.
        extents = [extent async for extent in self._l1.extents(*key, start, fresh=False)]
        left += sum(extent.size_bytes for extent in extents if extent.base_offset < hot_start)
        for extent in extents:
            old = config.retention_ms >= 0 and extent.max_timestamp_ms < now_ms - config.retention_ms
            left -= extent.size_bytes
            if extent.base_offset >= hot_start:
                break
            if not (old or 0 <= config.retention_bytes <= left):
                return max(start, extent.base_offset), extent.max_timestamp_ms
        return max(hot, hot_start), hot_ms
