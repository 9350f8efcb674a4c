"""Partitions that this node leads: opened at first use, and served until the assignment moves them.

request ─► led_partition (plain call) ─► open, in a task: catalogue ─► fence and replay ─► open
failed ─► partition_supervisor ─► opened again;  moved or overtaken ─► closed
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from tidemill.base.errors import MissingError, TidemillError, UnavailableError
from tidemill.base.runtime.coop import CoopBudget
from tidemill.base.runtime.tasks import Tasks, error_sentence
from tidemill.base.status.status import StatusTracker
from tidemill.metastore.catalogue import TopicRow
from tidemill.topics.api import FetchRead, NotLeaderError
from tidemill.topics.fetch.fetch_planner import LeaderOrError
from tidemill.topics.leader_check import LeaderCheck
from tidemill.topics.lifecycle.retention import effective_config
from tidemill.topics.membership import Assignment
from tidemill.topics.partition.leader import LeaderDeps, PartitionLeader
from tidemill.topics.partition.sequence_gaps import SequenceGaps
from tidemill.topics.partition_supervisor import PartitionKey, PartitionSupervisor
from tidemill.topics.topic_rows import TopicRows, Topics

_log = structlog.get_logger()

CONCURRENT_OPENINGS = 128
"""Limit of partitions that fence and replay their logs concurrently: one request may name thousands."""


class LedPartitions:
    """Partitions of one process."""

    def __init__(
        self,
        around: LeaderDeps,
        assignment: Assignment,
        tracker: StatusTracker | None,
        tasks: Tasks,
        pace: CoopBudget,
        rows: TopicRows,
    ) -> None:
        self.led: dict[PartitionKey, PartitionLeader] = {}
        self.holes: dict[PartitionKey, SequenceGaps] = {}
        self.leadership_version = 0
        self.supervision = PartitionSupervisor(around.clock, tracker, tasks, self._status_name, self._reopen)
        self.heads = LeaderCheck(around.consensus, self.led, assignment.lease_lapses)
        self._around = around
        self._assignment = assignment
        self._tasks = tasks
        self._rows = rows
        self._pace = pace
        self._openings = asyncio.Semaphore(CONCURRENT_OPENINGS)
        self._closed = False

    def close(self) -> None:
        """Stop leading all partitions, and lead none any more."""
        self._closed = True
        for led in list(self.led.values()):
            led.close(NotLeaderError("the node is shutting down."))

    def led_partition(self, topic_id: str, partition: int) -> PartitionLeader:
        """Return the led partition; open it if necessary. A plain call, so that the caller's next reservation has its
        place in order. Raises NotLeaderError."""
        led = self.led.get((topic_id, partition))
        if led is not None:
            return led
        if self._closed:
            raise NotLeaderError("the node is shutting down.")
        leader = self._assignment.leader_of(topic_id, partition)
        if leader != self._assignment.node:
            self._assignment.request_refresh()
            raise NotLeaderError(
                f"another node leads: partition={topic_id}/{partition} leader={leader}.", leader=leader
            )
        self.supervision.check_available((topic_id, partition))
        return self._start_leading(topic_id, partition)

    def _start_leading(self, topic_id: str, partition: int) -> PartitionLeader:
        holes = self.holes.setdefault((topic_id, partition), SequenceGaps())
        led = PartitionLeader(topic_id, partition, self._around, holes, self._on_closed)
        self.led[topic_id, partition] = led
        self._tasks.spawn(self._open(led), name=f"open {topic_id}/{partition}")
        return led

    async def _open(self, led: PartitionLeader) -> None:
        try:
            if self._find_row(led) is None:
                await self._rows.refresh()
        except TidemillError as error:
            led.fault = error
            led.close(UnavailableError(f"the catalogue cannot be read: cause={error}", fix="Retry."))
            return
        except asyncio.CancelledError:
            led.close(NotLeaderError("the node is shutting down."))
            raise
        row = self._find_row(led)
        if row is None:
            led.close(MissingError(f"no such partition: topic_id={led.topic_id} partition={led.partition}."))
        elif led.closed_error is None:
            led.config = effective_config(row)
            async with self._openings:
                # It may have moved while it waited. Its new leader must not be fenced.
                if led.closed_error is None:
                    await led.open()
            if led.is_open:
                self.supervision.report_opened((led.topic_id, led.partition))

    def _find_row(self, led: PartitionLeader) -> TopicRow | None:
        return self._rows.find_partition(led.topic_id, led.partition)

    def reconfigure(self, before: Topics) -> None:
        """Apply changed topic configs to open partitions. `before`: the topics before the change."""
        for topic_id, row in self._rows.topics.items():
            if topic_id in before and row.config != before[topic_id].config:
                config = effective_config(row)
                for partition in range(row.partitions):
                    if (led := self.led.get((topic_id, partition))) is not None:
                        led.config = config

    def close_deleted(self) -> None:
        """Close the open partitions of topics that are not in the catalogue any more."""
        for (topic_id, partition), led in list(self.led.items()):
            if led.is_open and topic_id not in self._rows.topics:
                led.close(MissingError(f"the topic was deleted: topic_id={topic_id} partition={partition}."))

    def is_assigned(self, topic_id: str, partition: int) -> bool:
        return self._assignment.leader_of(topic_id, partition) == self._assignment.node

    async def opened(self, topic_id: str, partition: int) -> PartitionLeader:
        await self.heads.confirm_leadership()
        led = self.led_partition(topic_id, partition)
        await led.wait_open()
        return led

    def _on_closed(self, led: PartitionLeader, error: TidemillError) -> None:
        key = (led.topic_id, led.partition)
        if self.led.get(key) is led:
            del self.led[key]
        if led.fault is not None and not self._closed:
            self.supervision.failed(key, led.fault)
            return
        self.supervision.clear_failure(key)
        if isinstance(error, NotLeaderError):
            self._assignment.request_refresh()
        if isinstance(error, MissingError):
            self.holes.pop(key, None)

    def _reopen(self, key: PartitionKey) -> None:
        if self._assignment.leader_of(*key) != self._assignment.node:
            self.supervision.clear_failure(key)  # Another node leads it now.
        elif key not in self.led and not self._closed:
            self._start_leading(*key)

    def _status_name(self, key: PartitionKey) -> str:
        row = self._rows.topics.get(key[0])
        return f"topic:{row.name if row is not None else key[0]}"

    def close_failed(self, task: str, error: BaseException) -> None:
        """Close the partition of a failed task, whose name is "<what> topic/<id>/<partition>"."""
        _log.error("a partition's task failed", task=task, error=error_sentence(error), exc_info=error)
        topic_id, _, partition = task.rpartition(" ")[2].removeprefix("topic/").rpartition("/")
        led = self.led.get((topic_id, int(partition))) if partition.isdigit() else None
        if led is not None:
            led.fault = error
            led.close(UnavailableError(f"the partition failed: task={task} cause={error!r}", fix="Retry."))

    def close_moved(self) -> None:
        self.leadership_version += 1
        for (topic_id, partition), led in list(self.led.items()):
            leader = self._assignment.leader_of(topic_id, partition)
            if leader != self._assignment.node:
                led.close(NotLeaderError(f"the partition moved: partition={topic_id}/{partition}.", leader=leader))

    async def open_all(self, reads: Sequence[FetchRead], until_s: float) -> list[LeaderOrError]:
        """Return the led partitions, opened concurrently. Waits for a takeover, which can outlast a short poll: an
        error would make the client search for another leader that does not exist."""
        await self.heads.confirm_leadership()
        pace = self._pace
        found: list[LeaderOrError] = []
        for read in reads:
            try:
                found.append(self.led_partition(read.topic_id, read.partition))
            except TidemillError as error:
                found.append(error)
            if pace.is_used_up:
                await pace.wait_for_turn()
        limit_s = max(until_s, asyncio.get_running_loop().time() + 1.0)
        for index, led in enumerate(found):
            if isinstance(led, PartitionLeader) and not led.is_open:
                try:
                    async with asyncio.timeout_at(limit_s):
                        await led.wait_open()
                except TimeoutError:
                    found[index] = UnavailableError(f"the partition is being opened: {led.topic_id}/{led.partition}.")
                except TidemillError as error:
                    found[index] = error
        return found
