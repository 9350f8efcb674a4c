"""The job `topic-rollups`: a partition has one rollup, at which its log begins; a deleted topic has neither.

A key holds the position p of the copied state; the record that names the rollup is at p or later.

    named by the log's first record   it stays
    p before the log's start          deleted: it was replaced, or never named, and its writer will not name it any more
    p inside the log                  its record may not be written yet: it stays. If a record names it, the truncation
                                      was interrupted: the log is truncated to the newest such record, and the others
                                      are deleted later
    p beyond the log's end            deleted: it belongs to a log that a restore replaced, because the end is read
                                      after the listing
    of a topic that is gone           deleted, after its log

A deleted topic's log is ended when its rows are gone, and again if a node that did not know of the deletion took the
partition over and appended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from tidemill.consensus.api import LogHead
from tidemill.consensus.change_journal import ChangedLogs
from tidemill.maintenance.scheduler import JobContext, MaintenanceJob, StepBudget
from tidemill.metastore.rows import PARTITIONS, TOPICS
from tidemill.topics.lifecycle.deletion import truncate_deleted_log
from tidemill.topics.partition.recovery import LOG_PREFIX, parse_log_name, partition_log
from tidemill.topics.partition.state_machine.codec import decode_command
from tidemill.topics.partition.state_machine.commands import Rollup

PREFIX = "rollup/topic/"


class RollupCollector(MaintenanceJob):
    """The job `topic-rollups`."""

    def __init__(self, context: JobContext) -> None:
        self._g = context
        self._logs = ChangedLogs(context.consensus, LOG_PREFIX)
        self._written: defaultdict[str, set[int]] = defaultdict(set)
        """Topic id → its partitions whose logs hold records."""
        self._deleted = self._ended = self._truncated = 0

    def facts(self) -> dict[str, object]:
        return {"deleted_objects": self._deleted, "ended_logs": self._ended, "truncated_logs": self._truncated}

    async def run(self, budget: StepBudget) -> bool:
        """Check all rollups and the logs of deleted topics. Return True when the budget ended before the last one."""
        by_place: dict[tuple[str, int], list[tuple[int, str]]] = defaultdict(list)
        async for meta in self._g.objects.list(PREFIX):
            topic_id, partition, name = [*meta.key.removeprefix(PREFIX).split("/"), "", ""][:3]
            position = name.partition("-")[0]
            if partition.isdigit() and position.isdigit():  # foreign objects are ignored
                by_place[topic_id, int(partition)].append((int(position), meta.key))
        heads = await self._logs.next_changed(lambda _: True)
        # Read after the listings: a topic's row exists before its first log and rollup.
        topics = {row.topic_id for row in await self._g.metastore.rows(TOPICS)}
        rows = {row.topic_id for row in await self._g.metastore.rows(PARTITIONS)}
        # While a topic has rows, the checkpoint has not followed its deletion yet.
        if await self._end_deleted_logs(heads, topics | rows, budget):
            return True
        for place, found in sorted(by_place.items()):
            if not budget.has_budget:
                return True
            if place[0] not in topics:
                if place[0] not in rows:
                    await self._delete_objects([key for _, key in found])
            elif len(found) > 1:
                await self._collect_log_rollups(partition_log(*place), sorted(found))
        return False

    async def _end_deleted_logs(self, heads: Mapping[str, LogHead], there: set[str], budget: StepBudget) -> bool:
        """End the logs of topics that are not `there`. Return True when the budget ended before the last of them."""
        for name, head in heads.items():
            if head.start < head.next:
                topic_id, partition = parse_log_name(name)
                self._written[topic_id].add(partition)
        self._logs.done(heads)
        for topic_id in sorted(self._written.keys() - there):
            for partition in sorted(self._written[topic_id]):
                if not budget.has_budget:
                    return True
                await truncate_deleted_log(self._g.consensus, topic_id, partition)
                self._written[topic_id].remove(partition)
                self._ended += 1
            del self._written[topic_id]
        return False

    async def _collect_log_rollups(self, log: str, found: list[tuple[int, str]]) -> None:
        head = await self._g.consensus.log_head(log)
        first = (await self._g.consensus.read(log, head.start, limit_records=1)).records
        named = _rollup_key(first[0].data) if first else ""
        others = [(position, key) for position, key in found if key != named]
        if any(head.start <= position <= head.next for position, _ in others):
            await self._truncate_to_newest_rollup(log, head)
        await self._delete_objects([key for position, key in others if not head.start <= position <= head.next])

    async def _truncate_to_newest_rollup(self, log: str, head: LogHead) -> None:
        newest, at = head.start, head.start
        while at < head.next:
            records = (await self._g.consensus.read(log, at)).records
            if not records:
                break
            newest = max([newest, *(record.position for record in records if _rollup_key(record.data))])
            at = records[-1].position + 1
        if newest > head.start:
            await self._g.consensus.truncate(log, newest)
            self._truncated += 1

    async def _delete_objects(self, keys: list[str]) -> None:
        for key in keys:
            await self._g.objects.delete(key)
            self._deleted += 1


def _rollup_key(record: bytes) -> str:
    """Return the object that a record of a partition's log names as its rollup, or ""."""
    command = decode_command(record)
    return command.object_key if isinstance(command, Rollup) else ""
