"""Assignment of time to stream topics: bindings of `topic/<name>` from the last stable offsets of the partitions that
this node leads. No binding covers a transaction before it has ended.

    an append of this node     its partition moved: one binding with it, at most every BUSY_S per topic
    a partition opened here    another node may have appended and died before it minted: likewise
    a new topic, or            no node may have minted for it: its partitions are read once, wherever they
    other members              are led

Every append belongs to one node, so no node polls and none waits for another: a binding states what its minter leads
and carries the rest on (`shards.bindings.minter`). An idle topic costs nothing. A fault ends the minting of one topic
only: it is reported under `binding:topic/NAME` and tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from tidemill.base.clock import Clock
from tidemill.base.runtime.tasks import Tasks, error_sentence, run_unit
from tidemill.base.status.status import StatusTracker
from tidemill.metastore.catalogue import TopicRow
from tidemill.shards.api import Remap
from tidemill.shards.bindings.minter import BindingMinter
from tidemill.topics.api import PartitionReader

BINDING_INTERVAL_S = 0.05
CONCURRENT_READS = 8
"""Number of topics whose partitions are read concurrently when all are read: at the start, and when members change."""


class LedTopics(Protocol):
    """Interface of the binder to the topics of its process (`topics.local_topics.LocalTopics`)."""

    def watch(self, moved: Callable[[str, int], None], listed: Callable[[Mapping[str, TopicRow]], None]) -> None: ...

    def last_stable(self, topic_id: str, partition: int) -> int | None: ...


class _TopicBinding:
    """State of one topic: the partitions that moved since the last binding."""

    def __init__(self, row: TopicRow) -> None:
        self.row = row
        self.moved: set[int] = set()
        self.look = True
        self.task: asyncio.Task[None] | None = None

    @property
    def mark(self) -> str:
        return f"binding:topic/{self.row.name}"


class TopicBinder:
    """Binder of all stream topics of one node."""

    def __init__(
        self,
        topics: LedTopics,
        open_reader: Callable[[], PartitionReader],
        open_remap: Callable[[str], Awaitable[Remap]],
        clock: Clock,
        tracker: StatusTracker,
    ) -> None:
        self._topics = topics
        self._open_reader = open_reader
        self._open_remap = open_remap
        self._clock = clock
        self._tracker = tracker
        self._tasks = Tasks(self._task_ended)
        self._bound: dict[str, _TopicBinding] = {}
        """State by topic id."""
        self._looks = asyncio.Semaphore(CONCURRENT_READS)
        self._closed = False

    def start(self) -> None:
        self._topics.watch(self._partition_moved, self._update_topics)

    async def aclose(self) -> None:
        self._closed = True
        await self._tasks.aclose()

    def recheck_all_topics(self) -> None:
        """Read all topics again after members changed: the last append of a member may have no time yet. A plain
        call."""
        for bound in self._bound.values():
            bound.look = True
            self._start_binding(bound)

    def _update_topics(self, rows: Mapping[str, TopicRow]) -> None:
        """Update the list of topics. A topic that was re-created under its name has another id."""
        if self._closed:
            return
        for topic_id in self._bound.keys() - rows.keys():
            gone = self._bound.pop(topic_id)
            if gone.task is not None:
                gone.task.cancel()
            self._tracker.clear_failure(gone.mark)
        for topic_id, row in rows.items():
            if topic_id in self._bound:
                self._bound[topic_id].row = row  # it may have grown; no partition is appended to before it is listed
            elif row.kind == "stream":
                self._bound[topic_id] = _TopicBinding(row)
                self._start_binding(self._bound[topic_id])

    def _partition_moved(self, topic_id: str, partition: int) -> None:
        bound = self._bound.get(topic_id)
        if bound is not None:
            bound.moved.add(partition)
            self._start_binding(bound)

    def _start_binding(self, bound: _TopicBinding) -> None:
        if not self._closed and (bound.task is None or bound.task.done()):
            keeping = run_unit(bound.mark, lambda: self._bind_topic(bound), tracker=self._tracker, clock=self._clock)
            bound.task = self._tasks.spawn(keeping, name=bound.mark)

    async def _bind_topic(self, bound: _TopicBinding) -> None:
        """Bind until no part of the topic is left to bind. Partitions that move in the meantime are in the next
        binding."""
        minter = BindingMinter(
            await self._open_remap(f"topic/{bound.row.name}"), self._clock, interval_ms=round(BINDING_INTERVAL_S * 1000)
        )
        await minter.open()
        while bound.look or bound.moved:
            look, moved = bound.look, frozenset(bound.moved)
            bound.look, bound.moved = False, set()
            try:
                offsets = await self._stable_offsets(bound.row, moved, look)
                await minter.mint_missing({bound.row.topic_id: offsets}, self._clock.now_ms())
            except BaseException:
                bound.look |= look
                bound.moved |= moved
                raise
            self._tracker.clear_failure(bound.mark)
            # The pause comes after the binding, so that the first record after an idle time gets its time immediately.
            await minter.wait_until_due()

    async def _stable_offsets(self, row: TopicRow, moved: frozenset[int], look: bool) -> tuple[int, ...]:
        """Return the next offset of each partition; 0 where no move is known."""
        found = [0] * row.partitions
        elsewhere: list[int] = []
        for partition in range(row.partitions) if look else sorted(moved):
            here = self._topics.last_stable(row.topic_id, partition)
            if here is None:
                elsewhere.append(partition)
            else:
                found[partition] = here
        if elsewhere:
            async with self._looks:
                reader = self._open_reader()  # a fresh reader each time: it retains what it replays
                for partition in elsewhere:
                    found[partition] = await reader.last_stable(row.topic_id, partition)
        return tuple(found)

    def _task_ended(self, name: str, error: BaseException) -> None:
        """Record the error of a task. `keep` catches every fault, so only an intended end of the process gets here."""
        self._tracker.fail(name, error_sentence(error), now_ms=self._clock.now_ms())
