"""Mints time for stream topics: bindings of `topic/<name>` from the high watermarks, by tick.

Any number of nodes may run a binder for one topic: minting is compare-and-append, the first wins and
the others sync. While records arrive a binding is minted every `busy_s`; without data one every
`idle_s`, so that time (and every shard fed by the topic) moves on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import Conflict, TidemillError, Unavailable, Unknown
from tidemill.base.tasks import Tasks
from tidemill.metastore.catalogue import Catalogue, TopicRow
from tidemill.shards.front import Binding, Remap
from tidemill.topics.front import PartitionReader

BUSY_S = 0.05
IDLE_S = 0.5
DISCOVER_S = 1.0

log = structlog.get_logger()


class Binder:
    """Keeps one task per stream topic in the catalogue."""

    def __init__(
        self,
        catalogue: Catalogue,
        reader: PartitionReader,
        open_remap: Callable[[str], Awaitable[Remap]],
        clock: Clock,
        *,
        discover_s: float = DISCOVER_S,
    ) -> None:
        self._catalogue = catalogue
        self._reader = reader
        self._open_remap = open_remap
        self._clock = clock
        self._discover_s = discover_s
        self._tasks = Tasks(self._task_failed)
        self._bound: dict[str, asyncio.Task[None]] = {}
        """topic id → the task that binds it"""

    def start(self) -> None:
        self._tasks.spawn(self._discover(), name="binder-discover")

    async def aclose(self) -> None:
        await self._tasks.aclose()

    async def _discover(self) -> None:
        while True:
            try:
                rows = await self._catalogue.list(TopicRow)
            except TidemillError as error:
                # Without this task no new topic would ever get a time.
                log.warning("topics not read, looking again", error=str(error))
            else:
                self._follow(rows)
            await asyncio.sleep(self._discover_s)

    def _follow(self, rows: Iterable[TopicRow]) -> None:
        """One running task for every stream topic there is, none for one that is gone; a failed one starts anew."""
        streams = {row.topic_id: row for row in rows if row.kind == "stream"}
        for topic_id in self._bound.keys() - streams.keys():
            log.info("topic is gone, its binder ends", topic_id=topic_id)
            self._bound.pop(topic_id).cancel()
        for topic_id, row in streams.items():
            running = self._bound.get(topic_id)
            if running is None or running.done():
                self._bound[topic_id] = self._tasks.spawn(self._bind(row), name=f"binder-{row.name}")

    async def _bind(self, row: TopicRow) -> None:
        remap = await self._open_remap(f"topic/{row.name}")
        while True:
            try:
                await asyncio.sleep(await self._tick(row, remap))
            except (Unavailable, Unknown) as error:
                log.warning("binding not minted, retrying", topic=row.name, error=str(error))
                await asyncio.sleep(IDLE_S)

    def _task_failed(self, name: str, error: BaseException) -> None:
        log.error("a binder failed", task=name, error=repr(error))

    async def _tick(self, row: TopicRow, remap: Remap) -> float:
        """Mint if due; returns how long to wait until the next look."""
        latest = await remap.latest()
        offsets = tuple(
            [await self._reader.high_watermark(row.topic_id, partition) for partition in range(row.partitions)]
        )
        now_ms = self._clock.now_ms()
        if latest is not None:
            known = latest.offsets.get(row.topic_id, ())
            # A re-created topic starts a new life under a new id; offsets of one id never go back.
            offsets = tuple(max(o, k) for o, k in zip(offsets, known, strict=False)) if known else offsets
            if offsets == known and now_ms - latest.time_ms < IDLE_S * 1000:
                return BUSY_S
        time_ms = now_ms if latest is None else max(now_ms, latest.time_ms + 1)
        try:
            await remap.mint(Binding(time_ms, {row.topic_id: offsets}, source_time_ms=now_ms))
        except Conflict:
            log.debug("another minter was first", topic=row.name)
        return BUSY_S
