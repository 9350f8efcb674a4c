"""Schedule the reconciler's rounds: writes wake it, and each topic has its own interval.

A topic with nothing to move is not scheduled and costs nothing. A round that failed, with any exception, is repeated
after the topic's interval; other topics do not wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from heapq import heappop, heappush

import structlog

from tidemill.base.clock import Clock
from tidemill.base.runtime.tasks import Tasks, error_sentence, is_own_fault_of_await
from tidemill.topics.config.settings import TopicSettings
from tidemill.topics.l1.object_planner import moved_share, next_interval_s
from tidemill.topics.l1.reconciler import PartitionKey, Reconciler
from tidemill.topics.partition.leader import PartitionLeader

CONCURRENT_ROUNDS = 2
"""Limit of objects that are built concurrently: their bytes are in memory."""

_log = structlog.get_logger()


class ReconcileScheduler:
    def __init__(
        self,
        reconciler: Reconciler,
        clock: Clock,
        settings: TopicSettings,
        led: Mapping[PartitionKey, PartitionLeader],
    ) -> None:
        self._reconciler = reconciler
        self._clock = clock
        self._settings = settings
        self._led = led
        self._due: list[tuple[float, str]] = []
        self._listed: set[str] = set()
        """Topics in `_due` or in a running round."""
        self._moved: dict[str, set[int]] = {}
        """Topic id to its partitions that may have something to move."""
        self._interval_s: dict[str, float] = {}
        self._wake = asyncio.Event()

    def schedule(self, topic_id: str, partition: int) -> None:
        """Schedule the topic: its partition was written or opened here. A plain call."""
        self._moved.setdefault(topic_id, set()).add(partition)
        if topic_id not in self._listed:
            self._enqueue(topic_id)

    async def run(self) -> None:
        """Run rounds forever."""
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def fail(_: str, error: BaseException) -> None:
            if not failed.done():
                failed.set_exception(error)

        async with Tasks(fail) as tasks:
            for number in range(CONCURRENT_ROUNDS):
                tasks.spawn(self._run_worker(), name=f"reconcile {number}")
            await failed

    async def _run_worker(self) -> None:
        while True:
            topic_id = await self._next_topic()
            try:
                await self._run_round(topic_id)
            finally:
                self._listed.discard(topic_id)
                self._reschedule(topic_id)

    async def _next_topic(self) -> str:
        while True:
            now_s = self._clock.monotonic_s()
            if self._due and self._due[0][0] <= now_s:
                return heappop(self._due)[1]
            self._wake.clear()
            pause_s = self._due[0][0] - now_s if self._due else None
            try:
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _run_round(self, topic_id: str) -> None:
        settings, interval_s = self._settings, self._interval_of(topic_id)
        began_s = self._clock.monotonic_s()
        try:
            done = await self._reconciler.run_round(topic_id, sorted(self._moved.get(topic_id, ())))
        except BaseException as fault:
            if not is_own_fault_of_await(fault):
                raise
            _log.error("a topic's round failed", topic_id=topic_id, error=error_sentence(fault), exc_info=fault)
            return
        if done.failed is not None:
            _log.warning("a topic is not completely in L1 yet", topic_id=topic_id, cause=str(done.failed))
        self._interval_s[topic_id] = next_interval_s(
            interval_s,
            moved_share(done.size_bytes, settings.l1_object_bytes, done.batches),
            settings.reconcile_min_s,
            settings.reconcile_max_s,
            full=done.full and done.failed is None,
            took_s=self._clock.monotonic_s() - began_s,
        )

    def _reschedule(self, topic_id: str) -> None:
        """Schedule the topic again while anything is left to move."""
        left = {partition for partition in self._moved.pop(topic_id, ()) if self._has_more(topic_id, partition)}
        if left:
            self._moved[topic_id] = left
            self._enqueue(topic_id)
        else:
            self._interval_s.pop(topic_id, None)

    def _has_more(self, topic_id: str, partition: int) -> bool:
        """Return whether the partition has more to move. A closed one is scheduled again when it is opened."""
        led = self._led.get((topic_id, partition))
        return led is not None and led.is_open and led.last_stable > led.state.hot_start

    def _enqueue(self, topic_id: str) -> None:
        self._listed.add(topic_id)
        heappush(self._due, (self._clock.monotonic_s() + self._interval_of(topic_id), topic_id))
        self._wake.set()

    def _interval_of(self, topic_id: str) -> float:
        return self._interval_s.get(topic_id, self._settings.reconcile_min_s)
