"""LocalTopics: one process's access to all partitions. Implements `front.TopicLog`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import Closed, Missing, TidemillError, Unavailable
from tidemill.base.marks import Tracker
from tidemill.base.tasks import Tasks
from tidemill.consensus.api import Consensus
from tidemill.metastore.catalogue import Catalogue, TopicRow
from tidemill.objects.store import Buffer, ObjectStore
from tidemill.topics.batch.header import parse_header
from tidemill.topics.front import CorruptBatch, Fetched, FetchRead, NotLeader, PartitionOffsets, ProduceResult
from tidemill.topics.l0.cache import ObjectCache
from tidemill.topics.l0.writer import L0Writer
from tidemill.topics.leadership import Alone, Assignment
from tidemill.topics.marks import report_marks
from tidemill.topics.partition.holes import Holes
from tidemill.topics.partition.machine import LedPartition, Surroundings
from tidemill.topics.partition.pending import fail_future
from tidemill.topics.serve import materialise, plan_fetch
from tidemill.topics.settings import TopicSettings

_log = structlog.get_logger()

PartitionKey = tuple[str, int]
SHUTDOWN_S = 5.0
REFRESH = "topics refresh"


def _task_failed(name: str, error: BaseException) -> None:
    if name != REFRESH:  # its error is raised to whoever waits for it
        _log.error("a task of the topics room failed", task=name, error=repr(error))


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
        self._commits = Tasks()
        self._tasks = Tasks(_task_failed)
        self._marked: set[str] = set()
        self._around = Surroundings(consensus, objects, self._writer, clock, rand, self._settings, self._commits)
        self._led: dict[PartitionKey, LedPartition] = {}
        self._holes: dict[PartitionKey, Holes] = {}
        self._topics: dict[str, TopicRow] = {}
        self._refresh: asyncio.Task[None] | None = None
        self._closed = False
        self._assignment.on_change(self._reassigned)

    async def start(self) -> None:
        """Read the catalogue and keep following it. Optional: without it topics are looked up when first used."""
        await self.refresh()
        self._tasks.spawn(self._follow_catalogue(), name="topics catalogue")
        if self._tracker is not None:
            self._tasks.spawn(self._publish_marks(), name="topics marks")

    async def aclose(self) -> None:
        """Stop leading; appends under way get a moment to end. Everything that waits ends."""
        if self._closed:
            return
        self._closed = True
        for led in list(self._led.values()):
            led.close(NotLeader("the node is shutting down."))
        await self._commits.drain(SHUTDOWN_S)
        await self._writer.aclose()
        await self._commits.aclose()
        await self._tasks.aclose()

    # TopicLog -------------------------------------------------------------------------------------
    def produce_nowait(self, topic_id: str, partition: int, batch: Buffer) -> asyncio.Future[ProduceResult]:
        try:
            led = self._leading(topic_id, partition)
        except TidemillError as error:
            self._remember_refused(topic_id, partition, batch)
            future: asyncio.Future[ProduceResult] = asyncio.get_running_loop().create_future()
            fail_future(future, error)
            return future
        return led.produce_nowait(batch)

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
        while True:
            led = await self._open_all(reads, until_s)
            woken: asyncio.Future[None] = loop.create_future()
            plans, total, failed = plan_fetch(reads, led, max_bytes)
            remaining_s = until_s - loop.time()
            if failed or total >= min_bytes or remaining_s <= 0:
                return await materialise(self._objects, self._cache, led, plans)
            watched = [each for each in led if isinstance(each, LedPartition)]
            for each in watched:
                each.watch(woken)
            try:
                async with asyncio.timeout(remaining_s):
                    await woken
            except TimeoutError:
                pass
            finally:
                for each in watched:
                    each.unwatch(woken)

    async def offsets(self, topic_id: str, partition: int) -> PartitionOffsets:
        """Raises NotLeader, Missing, Unavailable."""
        state = (await self._opened(topic_id, partition)).state
        return PartitionOffsets(state.log_start, state.high_watermark)

    async def offset_for_time(self, topic_id: str, partition: int, timestamp_ms: int) -> tuple[int, int] | None:
        state = (await self._opened(topic_id, partition)).state
        index = state.batch_for_time(timestamp_ms)
        return None if index is None else (state.bases[index], state.max_timestamps[index])

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
            led.close(Unavailable(f"the catalogue cannot be read: cause={error}", fix="Retry."))
            return
        except asyncio.CancelledError:
            led.close(NotLeader("the node is shutting down."))
            raise
        if not self._exists(led):
            led.close(Missing(f"no such partition: topic_id={led.topic_id} partition={led.partition}."))
        elif led.closed_error is None:
            await led.open()

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
        if isinstance(error, NotLeader):
            self._assignment.poke()
        if isinstance(error, Missing):
            self._holes.pop(key, None)

    def _reassigned(self) -> None:
        for (topic_id, partition), led in list(self._led.items()):
            leader = self._assignment.leader_of(topic_id, partition)
            if leader != self._assignment.node:
                led.close(NotLeader(f"the partition moved: partition={topic_id}/{partition}.", leader=leader))

    # fetch ----------------------------------------------------------------------------------------
    async def _open_all(self, reads: Sequence[FetchRead], until_s: float) -> list[LedPartition | TidemillError]:
        """The led partitions, opened side by side. A takeover outlasts a short poll; an error would make the client
        look for a leader in vain."""
        found: list[LedPartition | TidemillError] = []
        for read in reads:
            try:
                found.append(self._leading(read.topic_id, read.partition))
            except TidemillError as error:
                found.append(error)
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

    async def _publish_marks(self) -> None:
        while True:
            self.update_marks()
            await asyncio.sleep(self._settings.mark_interval_s)

    def update_marks(self) -> None:
        """Set `topic:<name>` for every topic with a partition led here."""
        if self._tracker is not None and not self._closed:
            now_ms = self._clock.now_ms()
            marked = report_marks(self._tracker, self._led.values(), self._topics, self._writer, now_ms)
            for name in self._marked - marked:
                self._tracker.remove(name)
            self._marked = marked
