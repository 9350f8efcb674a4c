"""LocalTopics: one process's access to all partitions. Implements `front.TopicLog`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from functools import partial

import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import Closed, Missing, TidemillError, Unavailable
from tidemill.base.marks import Tracker
from tidemill.base.pace import Pace
from tidemill.base.tasks import Tasks, keep, sentence
from tidemill.consensus.api import Consensus
from tidemill.metastore.catalogue import Catalogue, TopicRow
from tidemill.objects.store import Buffer, ObjectStore
from tidemill.topics.batch.header import parse_header
from tidemill.topics.checking import THREADS, Checker
from tidemill.topics.configs import stored_config
from tidemill.topics.fetch import read_batches
from tidemill.topics.front import CorruptBatch, Fetched, FetchRead, NotLeader, PartitionOffsets, ProduceResult
from tidemill.topics.l0.cache import ObjectCache
from tidemill.topics.l0.writer import L0Writer
from tidemill.topics.leadership import Alone, Assignment
from tidemill.topics.marks import report_marks
from tidemill.topics.partition.holes import Holes
from tidemill.topics.partition.machine import LedPartition, Surroundings
from tidemill.topics.partition.pending import fail_future
from tidemill.topics.retention import Holds, Retainer
from tidemill.topics.serve import materialise, plan_fetch
from tidemill.topics.settings import TopicSettings
from tidemill.topics.supervision import PartitionKey, Supervision
from tidemill.topics.times import first_at

_log = structlog.get_logger()

Moved = Callable[[str, int], None]
Listed = Callable[[Mapping[str, TopicRow]], None]
SHUTDOWN_S = 5.0


REFRESH = "topics refresh"

OPENINGS_AT_ONCE = 32
"""Partitions that fence and replay their logs at the same time: a request may name thousands."""

APPENDS_AT_ONCE = 64
"""Some 5 ms of the loop when one group commit answers them all."""


class LocalTopics:
    """Partitions that the assignment gives this node are opened at first use and served until it takes them away."""

    def __init__(
        self,
        consensus: Consensus,
        objects: ObjectStore,
        catalogue: Catalogue,
        *,
        clock: Clock,
        rand: Rand,
        assignment: Assignment | None = None,
        settings: TopicSettings | None = None,
        tracker: Tracker | None = None,
    ) -> None:
        self._objects = objects
        self._catalogue = catalogue
        self._clock = clock
        self._assignment: Assignment = assignment if assignment is not None else Alone()
        self._settings = settings if settings is not None else TopicSettings()
        self._tracker = tracker
        self._pace = Pace(clock)
        self._cache = ObjectCache(self._settings.cache_bytes)
        self._writer = L0Writer(
            objects,
            self._cache,
            node=self._assignment.node,
            epoch=self._assignment.epoch,
            clock=clock,
            rand=rand,
            settings=self._settings,
        )
        self._checker = Checker()
        self._time_lookups = asyncio.Semaphore(THREADS)
        self._openings = asyncio.Semaphore(OPENINGS_AT_ONCE)
        self._commits = Tasks(self._partition_broke)
        self._tasks = Tasks(self._partition_broke)
        self._supervision = Supervision(clock, tracker, self._tasks, self._mark_of, self._reopen)
        self._marked: set[str] = set()
        self._around = Surroundings(
            consensus, objects, self._writer, self._checker, clock, rand, self._settings, self._commits,
            asyncio.Semaphore(APPENDS_AT_ONCE), self._moved,
        )  # fmt: skip
        self._led: dict[PartitionKey, LedPartition] = {}
        self._holes: dict[PartitionKey, Holes] = {}
        self._topics: dict[str, TopicRow] = {}
        self._refresh: asyncio.Task[None] | None = None
        self._closed = False
        self._retainer = Retainer(
            consensus, objects, clock, self._settings, self._assignment, self._led, self._leading
        )  # fmt: skip
        self._watchers: list[tuple[Moved, Listed]] = []
        self._assignment.on_change(self._reassigned)

    @property
    def staged(self) -> tuple[int, int]:
        """(bytes of batches that wait for their upload or are in it, limit)."""
        return self._writer.staged_bytes, self._settings.staged_bytes

    @property
    def cached(self) -> tuple[int, int]:
        """(held, limit) of recent L0 objects in memory, in bytes."""
        return self._cache.bytes_held, self._settings.cache_bytes

    async def start(self) -> None:
        """Read the catalogue and keep following it. Optional: without it topics are looked up when first used."""
        await self.refresh()
        self._keep("topics:catalogue", self._follow_catalogue)
        self._keep("topics:retention", self._retain)
        self._keep("topics:marks", self._publish_marks)

    async def aclose(self) -> None:
        """Stop leading; appends under way get a moment to end. Everything that waits ends."""
        if self._closed:
            return
        self._closed = True
        for led in list(self._led.values()):
            led.close(NotLeader("the node is shutting down."))
        await self._commits.drain(SHUTDOWN_S)
        self._checker.close()
        await self._writer.aclose()
        await self._commits.aclose()
        await self._tasks.aclose()

    # TopicLog -------------------------------------------------------------------------------------
    def produce_nowait(
        self, topic_id: str, partition: int, batch: Buffer, *, sender: Hashable = None
    ) -> asyncio.Future[ProduceResult]:
        try:
            led = self._leading(topic_id, partition)
        except TidemillError as error:
            self._remember_refused(topic_id, partition, batch)
            future: asyncio.Future[ProduceResult] = asyncio.get_running_loop().create_future()
            fail_future(future, error)
            return future
        return led.produce_nowait(batch, sender)

    def _remember_refused(self, topic_id: str, partition: int, batch: Buffer) -> None:
        """A batch refused before this node leads leaves a hole too: those behind it on the same connection may
        arrive after it has come to lead, and would be accepted from a producer it does not know."""
        with contextlib.suppress(CorruptBatch):
            header = parse_header(batch)
            if header.producer_id >= 0:
                self._holes.setdefault((topic_id, partition), Holes()).failed(
                    header.producer_id, header.producer_epoch, header.base_sequence, self._clock.monotonic_s()
                )

    async def fetch(
        self, reads: Sequence[FetchRead], *, max_wait_s: float, min_bytes: int, max_bytes: int
    ) -> list[Fetched]:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + max_wait_s
        pace = self._pace
        while True:
            led = await self._open_all(reads, until_s, pace)
            woken: asyncio.Future[None] = loop.create_future()
            # The watchers first: planning may take several turns of the loop, in which batches arrive.
            watched = [each for each in led if isinstance(each, LedPartition)] if max_wait_s > 0 else []
            for each in watched:
                each.watch(woken)
            try:
                plans, total, failed = await plan_fetch(reads, led, max_bytes, pace)
                remaining_s = until_s - loop.time()
                if not failed and total < min_bytes and remaining_s > 0:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(remaining_s):
                            await woken
                    continue
            finally:
                for each in watched:
                    each.unwatch(woken)
            return await materialise(self._objects, self._cache, led, plans, pace)

    async def offsets(self, topic_id: str, partition: int) -> PartitionOffsets:
        """Raises NotLeader, Missing, Unavailable."""
        state = (await self._opened(topic_id, partition)).state
        return PartitionOffsets(state.log_start, state.high_watermark)

    async def offset_for_time(self, topic_id: str, partition: int, timestamp_ms: int) -> tuple[int, int] | None:
        state = (await self._opened(topic_id, partition)).state
        index = state.batch_for_time(timestamp_ms)
        if index is None:
            return None
        ref = state.ref(index)
        async with self._time_lookups:
            (found,) = await read_batches(self._objects, [[ref]], self._cache)
            if isinstance(found, TidemillError):
                raise found
            return await self._checker.run("by time", partial(first_at, found[0], ref, timestamp_ms))

    def high_watermark(self, topic_id: str, partition: int) -> int | None:
        """Of a partition that is open here, else None. Asks nobody."""
        led = self._led.get((topic_id, partition))
        return led.state.high_watermark if led is not None and led.is_open else None

    def watch(self, moved: Moved, listed: Listed) -> None:
        """`moved(topic id, partition)` when a high watermark moved or a partition was opened here; `listed(topic id →
        row)` after every read of the catalogue, and now. Plain calls."""
        self._watchers.append((moved, listed))
        listed(self._topics)

    def _moved(self, topic_id: str, partition: int) -> None:
        for moved, _ in self._watchers:
            moved(topic_id, partition)

    def leader_of(self, topic_id: str, partition: int) -> str:
        return self._assignment.leader_of(topic_id, partition)

    # catalogue ------------------------------------------------------------------------------------
    async def refresh(self) -> None:
        """Read the catalogue: what was made before this call is seen; partitions of deleted topics close with Missing.

        Concurrent calls share a read that begins after them. One under way may have passed by what they look for.
        """
        under_way = self._refresh
        if under_way is not None:
            await asyncio.wait([under_way])
        if self._closed:
            raise Closed("the topics of this node were closed.")
        if self._refresh is None:
            self._refresh = self._tasks.spawn(self._read_catalogue(), name=REFRESH)
        await asyncio.shield(self._refresh)

    async def _read_catalogue(self) -> None:
        try:
            rows = await self._catalogue.list(TopicRow)
        finally:
            self._refresh = None
        self._topics = {row.topic_id: row for row in rows}
        for _, listed in self._watchers:
            listed(self._topics)
        for (topic_id, partition), led in list(self._led.items()):
            if led.is_open and topic_id not in self._topics:
                led.close(Missing(f"the topic was deleted: topic_id={topic_id} partition={partition}."))

    async def _follow_catalogue(self) -> None:
        while True:
            await asyncio.sleep(self._settings.catalogue_poll_s)
            try:
                await self.refresh()
            except TidemillError as error:
                _log.warning("catalogue not read", cause=str(error))
            else:
                self._works("topics:catalogue")

    def hold(self, holds: Holds) -> None:
        """Ask `holds` before anything is taken from a topic."""
        self._retainer.holds = holds

    async def _retain(self) -> None:
        while True:
            await asyncio.sleep(self._settings.retention_check_s)
            await self._retainer.round(self._topics)
            self._works("topics:retention")

    # leadership -----------------------------------------------------------------------------------
    def _leading(self, topic_id: str, partition: int) -> LedPartition:
        """The led partition, opening if need be. Plain: what it reserves next keeps its place. Raises NotLeader."""
        led = self._led.get((topic_id, partition))
        if led is not None:
            return led
        if self._closed:
            raise NotLeader("the node is shutting down.")
        leader = self._assignment.leader_of(topic_id, partition)
        if leader != self._assignment.node:
            self._assignment.poke()
            raise NotLeader(f"another node leads: partition={topic_id}/{partition} leader={leader}.", leader=leader)
        self._supervision.check((topic_id, partition))
        return self._lead(topic_id, partition)

    def _lead(self, topic_id: str, partition: int) -> LedPartition:
        holes = self._holes.setdefault((topic_id, partition), Holes())
        led = LedPartition(topic_id, partition, self._around, holes, self._stopped)
        self._led[topic_id, partition] = led
        self._tasks.spawn(self._open(led), name=f"open {topic_id}/{partition}")
        return led

    async def _open(self, led: LedPartition) -> None:
        try:
            if not self._exists(led):
                await self.refresh()
        except TidemillError as error:
            led.fault = error
            led.close(Unavailable(f"the catalogue cannot be read: cause={error}", fix="Retry."))
            return
        except asyncio.CancelledError:
            led.close(NotLeader("the node is shutting down."))
            raise
        if not self._exists(led):
            led.close(Missing(f"no such partition: topic_id={led.topic_id} partition={led.partition}."))
        elif led.closed_error is None:
            led.batch_bytes_max = stored_config(self._topics[led.topic_id].config).max_message_bytes
            async with self._openings:
                await led.open()
            if led.is_open:
                self._supervision.opened((led.topic_id, led.partition))

    def _exists(self, led: LedPartition) -> bool:
        row = self._topics.get(led.topic_id)
        return row is not None and 0 <= led.partition < row.partitions

    async def _opened(self, topic_id: str, partition: int) -> LedPartition:
        led = self._leading(topic_id, partition)
        await led.opened()
        return led

    def _stopped(self, led: LedPartition, error: TidemillError) -> None:
        key = (led.topic_id, led.partition)
        if self._led.get(key) is led:
            del self._led[key]
        if led.fault is not None and not self._closed:
            self._supervision.failed(key, led.fault)
            return
        self._supervision.healed(key)
        if isinstance(error, NotLeader):
            self._assignment.poke()
        if isinstance(error, Missing):
            self._holes.pop(key, None)

    def _reopen(self, key: PartitionKey) -> None:
        if self._assignment.leader_of(*key) != self._assignment.node:
            self._supervision.healed(key)  # it is somebody else's now
        elif key not in self._led and not self._closed:
            self._lead(*key)

    def _mark_of(self, key: PartitionKey) -> str:
        row = self._topics.get(key[0])
        return f"topic:{row.name if row is not None else key[0]}"

    def _partition_broke(self, name: str, error: BaseException) -> None:
        """A task that works for one partition ended as none may: "<what> topic/<id>/<partition>"."""
        if name == REFRESH:
            return  # raised to whoever waits for it
        _log.error("a partition's task broke", task=name, error=sentence(error), exc_info=error)
        topic_id, _, partition = name.rpartition(" ")[2].removeprefix("topic/").rpartition("/")
        led = self._led.get((topic_id, int(partition))) if partition.isdigit() else None
        if led is not None:
            led.fault = error
            led.close(Unavailable(f"the partition failed: task={name} cause={error!r}", fix="Retry."))

    def _keep(self, mark: str, body: Callable[[], Awaitable[None]]) -> None:
        tracker = self._tracker if self._tracker is not None else Tracker()
        self._tasks.spawn(keep(mark, body, tracker=tracker, clock=self._clock), name=mark)

    def _reassigned(self) -> None:
        for (topic_id, partition), led in list(self._led.items()):
            leader = self._assignment.leader_of(topic_id, partition)
            if leader != self._assignment.node:
                led.close(NotLeader(f"the partition moved: partition={topic_id}/{partition}.", leader=leader))

    # fetch ----------------------------------------------------------------------------------------
    async def _open_all(
        self, reads: Sequence[FetchRead], until_s: float, pace: Pace
    ) -> list[LedPartition | TidemillError]:
        """The led partitions, opened side by side. A takeover outlasts a short poll; an error would make the client
        look for a leader in vain."""
        found: list[LedPartition | TidemillError] = []
        for read in reads:
            try:
                found.append(self._leading(read.topic_id, read.partition))
            except TidemillError as error:
                found.append(error)
            if pace.due:
                await pace.rest()
        limit_s = max(until_s, asyncio.get_running_loop().time() + 1.0)
        for index, led in enumerate(found):
            if isinstance(led, LedPartition) and not led.is_open:
                try:
                    async with asyncio.timeout_at(limit_s):
                        await led.opened()
                except TimeoutError:
                    found[index] = Unavailable(f"the partition is being opened: {led.topic_id}/{led.partition}.")
                except TidemillError as error:
                    found[index] = error
        return found

    def _works(self, mark: str) -> None:
        if self._tracker is not None:
            self._tracker.heal(mark)

    async def _publish_marks(self) -> None:
        while True:
            self.update_marks()
            self._works("topics:marks")
            await asyncio.sleep(self._settings.mark_interval_s)

    def update_marks(self) -> None:
        """Set `topic:<name>` for every topic with a partition led here."""
        if self._tracker is not None and not self._closed:
            now_ms = self._clock.now_ms()
            failing = self._supervision.marks()
            marked = report_marks(self._tracker, self._led.values(), self._topics, self._writer, now_ms, failing)
            for name in self._marked - marked:
                self._tracker.remove(name)
            self._marked = marked
