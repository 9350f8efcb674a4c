"""LocalTopics: one process's access to all partitions. Implements `api.TopicLog`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence

import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import TidemillError
from tidemill.base.runtime.coop import CoopBudget
from tidemill.base.runtime.tasks import Tasks
from tidemill.base.status.status import StatusTracker
from tidemill.consensus.api import Consensus
from tidemill.metastore.catalogue import Catalogue, TopicRow
from tidemill.metastore.metastore import Metastore
from tidemill.objects.store import Buffer, ObjectStore
from tidemill.topics.api import (
    ConfirmTransaction,
    CorruptBatchError,
    Fetched,
    FetchRead,
    Marker,
    OffsetOutOfRangeError,
    PartitionOffsets,
    ProduceResult,
    ProducerStatus,
    ProduceTransaction,
    TransactionSnapshot,
)
from tidemill.topics.batch.header import parse_header
from tidemill.topics.config.settings import TopicSettings
from tidemill.topics.fetch.fetch_interest import FetchDeps, LocalFetchSubscription
from tidemill.topics.fetch.timestamp_lookup import TimestampLookup
from tidemill.topics.housekeeping.loops import TopicLoops
from tidemill.topics.housekeeping.reconciliation import Reconciliation
from tidemill.topics.l0.object_cache import ObjectCache, SharedReads
from tidemill.topics.l0.writer import L0Writer
from tidemill.topics.l1.read_ahead import ReadAhead
from tidemill.topics.l1.reader import open_l1_reader
from tidemill.topics.l1.reconcile_scheduler import ReconcileScheduler
from tidemill.topics.l1.reconciler import Reconciler
from tidemill.topics.led_partitions import LedPartitions
from tidemill.topics.lifecycle.retention import RetentionRunner
from tidemill.topics.membership import Assignment, SingleNodeAssignment
from tidemill.topics.partition.append_plan import producer_status
from tidemill.topics.partition.leader import LeaderDeps
from tidemill.topics.partition.pending_batch import fail_future
from tidemill.topics.partition.sequence_gaps import SequenceGaps
from tidemill.topics.partition.transaction_verification import reject_without_coordinator
from tidemill.topics.produce.validator_pool import BatchValidator
from tidemill.topics.status_report import TopicMemory, TopicStatuses, TopicStatusTotals
from tidemill.topics.topic_rows import REFRESH_TASK, TopicRows, Topics

_log = structlog.get_logger()

MovedCallback = Callable[[str, int], None]
ListedCallback = Callable[[Mapping[str, TopicRow]], None]
SHUTDOWN_S = 5.0


class LocalTopics:
    """Partitions assigned to this node: opened at first use, and served until the assignment moves them."""

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
        tracker: StatusTracker | None = None,
        metastore: Metastore | None = None,
    ) -> None:
        """Create the topics of one process. `metastore`: holds the rows of L1; without it nothing is read from L1."""
        self._objects = objects
        self._clock = clock
        self._assignment: Assignment = assignment if assignment is not None else SingleNodeAssignment()
        self._settings = settings if settings is not None else TopicSettings()
        self._pace = CoopBudget(clock)
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
        self._checker = BatchValidator()
        self._commits = Tasks(self._on_task_failed)
        self._tasks = Tasks(self._on_task_failed)
        self._shared = SharedReads(objects, self._tasks)
        self._ahead = ReadAhead(objects, self._tasks)
        self._l1 = open_l1_reader(metastore, objects, clock, rand, self._ahead) if metastore is not None else None
        self._lookup = TimestampLookup(self._shared, self._cache, self._checker, self._l1, self._settings)
        self._rows = TopicRows(catalogue, self._tasks, self._apply_catalogue)
        self._sums = TopicStatusTotals()
        self._around = LeaderDeps(
            consensus, objects, self._writer, self._checker, clock, rand, self._settings, self._commits,
            asyncio.Semaphore(self._settings.appends_at_once), self._on_moved, self._ask_coordinator,
            self._sums.touch if tracker is not None else lambda _: None,
        )  # fmt: skip
        self._partitions = LedPartitions(
            self._around, self._assignment, tracker, self._tasks, self._pace, self._rows
        )  # fmt: skip
        self._led = self._partitions.led
        self._confirm: ConfirmTransaction = reject_without_coordinator
        self.retainer = RetentionRunner(
            self._around, self._assignment, self._led, self._partitions.led_partition,
            self._l1.rows if self._l1 is not None else None,
        )  # fmt: skip
        self._watchers: list[tuple[MovedCallback, ListedCallback]] = []
        self.reconciliation: Reconciliation | None = None
        if self._l1 is not None:
            rows = self._l1.rows
            self.reconciler = Reconciler(rows, self._around, self._shared, self._cache, self._led)
            self.reconciliation = Reconciliation(
                self.reconciler, ReconcileScheduler(self.reconciler, clock, self._settings, self._led),
                rows, self._rows, self._partitions, self._settings,
            )  # fmt: skip
        self.statuses = TopicStatuses(
            tracker, self._sums, self._rows, self._writer, self._partitions.supervision, clock
        )
        self.memory = TopicMemory(self._writer, self._settings, self._cache, self._shared, self._ahead, self._sums)
        self._loops = TopicLoops(
            self._rows, self._partitions, self.retainer, self.reconciliation, self.statuses, self._settings, clock
        )
        self._assignment.on_change(self._partitions.close_moved)

    async def start(self) -> None:
        """Read the catalogue and keep following it. Optional: without it topics are looked up at first use."""
        await self.refresh()
        self._loops.start(self._tasks)

    async def aclose(self) -> None:
        """Stop leading. Appends in flight get a moment to end, then all waiting calls end."""
        if self._rows.is_closed:
            return
        self._rows.is_closed = True
        self._ahead.close()
        self._partitions.close()
        await self._commits.drain(SHUTDOWN_S)
        self._checker.close()
        await self._writer.aclose()
        await self._commits.aclose()
        await self._tasks.aclose()

    # TopicLog -------------------------------------------------------------------------------------
    def produce_nowait(
        self,
        topic_id: str,
        partition: int,
        batch: Buffer,
        *,
        sender: Hashable = None,
        within: ProduceTransaction | None = None,
        trailer: bytes = b"",
    ) -> asyncio.Future[ProduceResult]:
        try:
            led = self._partitions.led_partition(topic_id, partition)
        except TidemillError as error:
            self._record_refused_gap(topic_id, partition, batch)
            future: asyncio.Future[ProduceResult] = asyncio.get_running_loop().create_future()
            fail_future(future, error)
            return future
        return led.intake.produce_nowait(batch, sender, within, trailer)

    async def transaction_snapshot(self, topic_id: str, partition: int, producer_id: int) -> TransactionSnapshot:
        return (await self._partitions.opened(topic_id, partition)).intake.transaction_snapshot(producer_id)

    async def mark(
        self, topic_id: str, partition: int, marker: Marker, here: TransactionSnapshot | None = None
    ) -> None:
        await self._partitions.led_partition(topic_id, partition).intake.write_marker_nowait(marker, here)

    async def producers(self, topic_id: str, partition: int) -> list[ProducerStatus]:
        state = (await self._partitions.opened(topic_id, partition)).state
        return [producer_status(state, producer_id) for producer_id, _ in state.live_producers()]

    def _record_refused_gap(self, topic_id: str, partition: int, batch: Buffer) -> None:
        """Record a sequence gap also for a batch refused before this node leads. Later batches of the connection may
        arrive when it leads, and would be accepted from a producer without state."""
        with contextlib.suppress(CorruptBatchError):
            header = parse_header(batch)
            if header.producer_id >= 0:
                self._partitions.holes.setdefault((topic_id, partition), SequenceGaps()).failed(
                    header.producer_id, header.producer_epoch, header.base_sequence, self._clock.monotonic_s()
                )

    async def fetch(
        self, reads: Sequence[FetchRead], *, max_wait_s: float, min_bytes: int, max_bytes: int
    ) -> list[Fetched]:
        following = self.subscribe()
        try:
            for number, read in enumerate(reads):
                following.put(number, read)
            found = dict(await following.fetch(max_wait_s=max_wait_s, min_bytes=min_bytes, max_bytes=max_bytes))
            return [found[number] for number in range(len(reads))]
        finally:
            following.close()

    def subscribe(self) -> LocalFetchSubscription:
        return LocalFetchSubscription(
            FetchDeps(self._partitions.open_all, self._shared, self._cache, self._l1, self._pace)
        )

    async def offsets(self, topic_id: str, partition: int, *, proved: bool = False) -> PartitionOffsets:
        """Return the offsets; see `api.TopicLog`. Raises NotLeaderError, MissingError, UnavailableError."""
        led = await self._partitions.opened(topic_id, partition)
        if proved:
            await led.prove_leadership()
            if led.closed_error is not None:
                raise led.closed_error
        state = led.state
        return PartitionOffsets(state.log_start, state.high_watermark, state.last_stable)

    async def offset_for_time(self, topic_id: str, partition: int, timestamp_ms: int) -> tuple[int, int] | None:
        led = await self._partitions.opened(topic_id, partition)
        return await self._lookup.first_at(led, timestamp_ms, led.state.log_start)

    async def newest_timestamp(self, topic_id: str, partition: int) -> tuple[int, int] | None:
        led = await self._partitions.opened(topic_id, partition)
        return await self._lookup.newest(led)

    async def delete_records(self, topic_id: str, partition: int, before_offset: int) -> int:
        led = await self._partitions.opened(topic_id, partition)
        high_watermark = led.state.high_watermark
        wanted = high_watermark if before_offset == -1 else before_offset
        if not 0 <= wanted <= high_watermark:
            raise OffsetOutOfRangeError(f"the offset is outside the log: offset={before_offset} end={high_watermark}.")
        if wanted > led.state.log_start:
            await self.retainer.check_deletable(self._rows.topics[topic_id], partition, wanted)
            await led.advance_log_start_durably(wanted)
        return led.state.log_start

    def last_stable(self, topic_id: str, partition: int) -> int | None:
        """Return the last stable offset of a partition that is open here, else None. Makes no request."""
        led = self._led.get((topic_id, partition))
        return led.state.last_stable if led is not None and led.is_open else None

    def set_coordinator(self, confirm: ConfirmTransaction) -> None:
        self._confirm = confirm

    async def _ask_coordinator(
        self, within: ProduceTransaction, producer_id: int, epoch: int, topic_id: str, partition: int
    ) -> None:
        await self._confirm(within, producer_id, epoch, topic_id, partition)

    def watch(self, moved: MovedCallback, listed: ListedCallback) -> None:
        """Register two plain calls. `moved(topic id, partition)`: a last stable offset moved, or a partition was opened
        here. `listed(topic id → row)`: the catalogue has changed; also called once now."""
        self._watchers.append((moved, listed))
        listed(self._rows.topics)

    def _on_moved(self, topic_id: str, partition: int) -> None:
        if self.reconciliation is not None:
            self.reconciliation.schedule(topic_id, partition)
        for moved, _ in self._watchers:
            moved(topic_id, partition)

    @property
    def leadership_version(self) -> int:
        return self._partitions.leadership_version

    def leader_of(self, topic_id: str, partition: int) -> str:
        return self._assignment.leader_of(topic_id, partition)

    # catalogue ------------------------------------------------------------------------------------
    async def refresh(self) -> None:
        """Read the catalogue: topics created before this call are seen, partitions of deleted topics close with
        MissingError."""
        await self._rows.refresh()

    def _apply_catalogue(self, before: Topics, compacted_before: set[str]) -> None:
        if self.reconciliation is not None and self._rows.compacted - compacted_before:
            for topic_id, partition in self._led:
                self.reconciliation.schedule(topic_id, partition)
        self._partitions.reconfigure(before)
        for _, listed in self._watchers:
            listed(self._rows.topics)
        self._partitions.close_deleted()

    def _on_task_failed(self, name: str, error: BaseException) -> None:
        if name != REFRESH_TASK:  # Raised to the callers that wait for it.
            self._partitions.close_failed(name, error)
