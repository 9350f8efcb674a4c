"""Partitions that one reader fetches repeatedly: partitions without changes are not examined again.

    put ─► due ─► planned ─► nothing left to read ─► watched ── it moved ─► due
                     └─ batches or an error: stays due, after the others once it has returned batches

Invariant (no missed wake-up): a partition that is not due is watched, and had nothing for its reader in the plain call
that removed it from the due ones.

Offsets that differ from the last reported ones are reported with the next answer; they do not end a wait.

A watcher is called once and dropped, so a reader that never returns costs each partition one call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence

import msgspec

from tidemill.base.runtime.coop import CoopBudget
from tidemill.topics.api import Fetched, FetchRead
from tidemill.topics.fetch.fetch_planner import LeaderOrError, plan_fetch, read_planned
from tidemill.topics.l0.object_cache import ObjectCache, SharedReads
from tidemill.topics.l1.reader import L1Reader
from tidemill.topics.partition.leader import PartitionLeader

OffsetMarks = tuple[int, int, int]
"""High watermark, log start and last stable offset."""


class FetchDeps(msgspec.Struct, frozen=True):
    """Dependencies that all readers of one process share."""

    open_all: Callable[[Sequence[FetchRead], float], Awaitable[list[LeaderOrError]]]
    """Called with the reads and a deadline in the loop's time; returns the leader of each, or its error."""
    l0: SharedReads
    cache: ObjectCache
    l1: L1Reader | None
    pace: CoopBudget


class _SubscribedPartition:
    __slots__ = ("_owner", "key", "led", "marks", "read", "reported")

    def __init__(self, owner: LocalFetchSubscription, key: Hashable, read: FetchRead) -> None:
        self._owner = owner
        self.key = key
        self.read = read
        self.led: PartitionLeader | None = None
        """Leader that is being watched."""
        self.marks: OffsetMarks | None = None
        """Offsets when it was last planned."""
        self.reported: OffsetMarks | None = None

    def on_moved(self) -> None:
        self.led = None
        self._owner.mark_due(self)

    def watch(self, led: LeaderOrError) -> None:
        if led is self.led or not isinstance(led, PartitionLeader) or led.closed_error is not None:
            return
        self.unwatch()
        self.led = led
        led.watchers.add(self)

    def unwatch(self) -> None:
        if self.led is not None:
            self.led.watchers.discard(self)
            self.led = None

    @property
    def is_idle(self) -> bool:
        """True if there is nothing for its reader, and any change will wake it."""
        if self.led is None:
            return False
        state = self.led.state
        end = state.last_stable if self.read.committed else state.high_watermark
        return end <= self.read.offset <= state.high_watermark


class LocalFetchSubscription:
    """Partitions followed by one reader of this process. Implements `api.FetchSubscription`."""

    def __init__(self, serving: FetchDeps) -> None:
        self._serving = serving
        self._followed: dict[Hashable, _SubscribedPartition] = {}
        self._due: dict[_SubscribedPartition, None] = {}
        """Partitions to plan, in the order of their turns."""
        self._untold: dict[_SubscribedPartition, None] = {}
        self._woken: asyncio.Future[None] | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._followed)

    def reads(self) -> Iterator[tuple[Hashable, FetchRead]]:
        for each in list(self._followed.values()):
            yield each.key, each.read

    def read(self, key: Hashable) -> FetchRead | None:
        each = self._followed.get(key)
        return each.read if each is not None else None

    def put(self, key: Hashable, read: FetchRead) -> None:
        each = self._followed.get(key)
        if each is not None and (each.read.topic_id, each.read.partition) == (read.topic_id, read.partition):
            each.read = read
        else:
            self.drop(key)
            each = self._followed[key] = _SubscribedPartition(self, key, read)
        self._due.setdefault(each)

    def drop(self, key: Hashable) -> None:
        each = self._followed.pop(key, None)
        if each is not None:
            each.unwatch()
            self._due.pop(each, None)
            self._untold.pop(each, None)

    def close(self) -> None:
        self._closed = True
        for each in self._followed.values():
            each.unwatch()
        self._followed.clear()
        self._due.clear()
        self._untold.clear()
        self._wake()

    def mark_due(self, each: _SubscribedPartition) -> None:
        self._due.setdefault(each)
        self._wake()

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    async def fetch(self, *, max_wait_s: float, min_bytes: int, max_bytes: int) -> list[tuple[Hashable, Fetched]]:
        serving, loop = self._serving, asyncio.get_running_loop()
        until_s = loop.time() + max_wait_s
        while True:
            self._woken = loop.create_future()
            due = list(self._due)
            reads = [each.read for each in due]
            led = await serving.open_all(reads, until_s)
            # Watch first: planning may take several turns of the loop, in which batches arrive.
            for each, at in zip(due, led, strict=True):
                if each in self._due:
                    each.watch(at)
            plans, total, at_once = await plan_fetch(
                reads, led, max_bytes, serving.pace, serving.l1, serving.cache, serving.l0
            )
            asked: list[int] = []
            for number, (each, plan) in enumerate(zip(due, plans, strict=True)):
                if plan or not isinstance(plan, list):
                    asked.append(number)
                else:
                    self._record_empty(each, led[number])
                if serving.pace.is_used_up:
                    await serving.pace.wait_for_turn()
            remaining_s = until_s - loop.time()
            waits = not at_once and total < min_bytes and remaining_s > 0 and not self._closed
            if waits and await _wait_until_moved(self._woken, remaining_s):
                continue
            found = await read_planned(
                serving.l0,
                serving.cache,
                [reads[number] for number in asked],
                [led[number] for number in asked],
                [plans[number] for number in asked],
                serving.pace,
                serving.l1.ahead if serving.l1 is not None else None,
            )
            return self._build_answers([(due[number], got) for number, got in zip(asked, found, strict=True)])

    def _record_empty(self, each: _SubscribedPartition, led: LeaderOrError) -> None:
        if each not in self._due or not isinstance(led, PartitionLeader):
            return
        each.marks = (led.state.high_watermark, led.state.log_start, led.state.last_stable)
        if each.marks != each.reported:
            self._untold.setdefault(each)
        if each.is_idle:
            del self._due[each]

    def _build_answers(self, found: list[tuple[_SubscribedPartition, Fetched]]) -> list[tuple[Hashable, Fetched]]:
        answers: list[tuple[Hashable, Fetched]] = []
        for each, got in found:
            self._untold.pop(each, None)
            each.reported = None
            if got.error is None:
                each.reported = (got.high_watermark, got.log_start_offset, got.last_stable)
                if each in self._due:
                    self._due[each] = self._due.pop(each)
            answers.append((each.key, got))
        for each in self._untold:
            if each.marks is not None:
                high_watermark, log_start, stable = each.reported = each.marks
                answers.append((each.key, Fetched(high_watermark, log_start, [], None, stable)))
        self._untold.clear()
        return answers


async def _wait_until_moved(woken: asyncio.Future[None], within_s: float) -> bool:
    """Return False if no partition moved in this time, so that the plan is still valid."""
    try:
        async with asyncio.timeout(within_s):
            await woken
    except TimeoutError:
        return False
    return True
