"""Interfaces of `topics` for the Kafka endpoint, the capture sink and Spark.

Offsets are contiguous and follow reservation order. Readers see only durable records; the acknowledgement follows.

Record bytes are Kafka record batches, format v2 (magic 2), never decoded on this path; base offset and partition leader
epoch are patched in place (outside the CRC, which covers byte 21 onward).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from typing import Protocol

import msgspec

from tidemill.base.errors import CorruptError, FencedError, InvalidError, UnavailableError
from tidemill.objects.store import Buffer


class NotLeaderError(UnavailableError):
    """The partition is not led by this node; `leader` is the name of the node that leads it, or ""."""

    def __init__(self, message: str, *, leader: str = "") -> None:
        super().__init__(message)
        self.leader = leader


class OutOfOrderSequenceError(InvalidError):
    """A gap in a producer's sequence numbers, seen by a linearizable check (Kafka OUT_OF_ORDER_SEQUENCE_NUMBER)."""


class InvalidProducerEpochError(FencedError):
    """A newer epoch of this producer id has written here (Kafka INVALID_PRODUCER_EPOCH)."""


class InvalidTransactionError(InvalidError):
    """The producer has no open transaction that this belongs to (Kafka INVALID_TXN_STATE)."""


class ConcurrentTransactionsError(UnavailableError):
    """The producer's previous transaction has not ended yet (Kafka CONCURRENT_TRANSACTIONS): retry."""


class CorruptBatchError(InvalidError):
    """A batch whose size or checksum is wrong: damaged in transit (Kafka CORRUPT_MESSAGE: clients retry)."""


class InvalidRecordsError(CorruptBatchError):
    """The bytes are not a well-formed record batch v2 (Kafka INVALID_RECORD: clients do not retry).

    `record_errors`: (index in the batch, error of that record), as in Kafka's response; may be empty.
    """

    def __init__(self, message: str, *, fix: str = "", record_errors: tuple[tuple[int, str], ...] = ()) -> None:
        super().__init__(message, fix=fix)
        self.record_errors = record_errors


class BatchTooLargeError(CorruptBatchError):
    """A batch larger than the topic or the decompression limit allows (Kafka MESSAGE_TOO_LARGE: may be split)."""


class InvalidTimestampError(CorruptBatchError):
    """A record's time is beyond what the topic's config allows (Kafka INVALID_TIMESTAMP)."""


class UnreadableBatchError(CorruptError):
    """A stored batch cannot be read: offsets [base_offset, last_offset] are lost, all others are not.

    Both offsets are inclusive. They are −1 if not even the header is readable and the caller gave no position.
    """

    def __init__(self, reason: str, *, base_offset: int = -1, last_offset: int = -1) -> None:
        super().__init__(
            f"a stored record batch cannot be read: base_offset={base_offset} last_offset={last_offset} cause={reason}."
        )
        self.base_offset = base_offset
        self.last_offset = last_offset
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_unreadable_batch_error, (self.reason, self.base_offset, self.last_offset)


def _rebuild_unreadable_batch_error(reason: str, base_offset: int, last_offset: int) -> UnreadableBatchError:
    return UnreadableBatchError(reason, base_offset=base_offset, last_offset=last_offset)


class OffsetOutOfRangeError(InvalidError):
    """The requested offset is below the log start or above the high watermark."""


class RecordsStillNeededError(InvalidError):
    """Records that were to be deleted still have a reader that needs them (Kafka POLICY_VIOLATION)."""


class ProduceResult(msgspec.Struct, frozen=True):
    """Inclusive offsets of the batch; for a duplicate those of the original."""

    base_offset: int
    last_offset: int
    log_start_offset: int
    duplicate: bool = False
    append_time_ms: int = -1
    """Append time of the records, or −1 if they have their producer's times."""


class ProduceTransaction(msgspec.Struct, frozen=True):
    """Transaction of a produced batch. `adds`: the batch also adds its partition to it (KIP-890, version 2)."""

    transactional_id: str
    adds: bool = False


ConfirmTransaction = Callable[[ProduceTransaction, int, int, str, int], Awaitable[None]]
"""Called as (transaction, producer id, epoch, topic id, partition); asks the coordinator after the call. Returns if its
transaction of this producer and epoch is open and includes the partition. Raises InvalidTransactionError,
InvalidProducerEpochError, UnavailableError."""


TransactionSnapshot = tuple[int, object]
"""Transaction state of a producer in a partition at one moment, only for comparison: the first offset of its open
transaction (−1: none), and the permit by which it may begin one."""


class Marker(msgspec.Struct, frozen=True):
    """End of a transaction in one partition.

    `bumped`: the marker's epoch is one above that of the transaction, and the producer uses it for its next
    transaction. Only transactions of lower epochs are then ended (KIP-890).
    """

    producer_id: int
    producer_epoch: int
    commit: bool
    coordinator_epoch: int = 0
    bumped: bool = False

    @property
    def ends_below(self) -> int:
        """First epoch whose transactions the marker does not end."""
        return self.producer_epoch + (not self.bumped)


class FetchRead(msgspec.Struct, frozen=True):
    """One partition to fetch from. `committed`: read only below the last stable offset."""

    topic_id: str
    partition: int
    offset: int
    max_bytes: int
    committed: bool = False


class Fetched(msgspec.Struct, frozen=True):
    """Whole batches, the first one containing the requested offset. If `error` is set there are no batches.

    `last_stable`: −1 if unknown.
    `aborted`: (producer id, first offset) of the aborted transactions among the batches of a committed read. The reader
    skips their records from there to the producer's next marker.
    """

    high_watermark: int
    log_start_offset: int
    batches: list[Buffer]
    error: Exception | None = None
    last_stable: int = -1
    aborted: Sequence[tuple[int, int]] = ()


class PartitionOffsets(msgspec.Struct, frozen=True):
    log_start_offset: int
    high_watermark: int
    last_stable: int


class ProducerStatus(msgspec.Struct, frozen=True):
    """State of a producer in a partition.

    `last_sequence`: −1 if it wrote nothing in this epoch.
    `open_since`: first offset of its open transaction, or −1.
    """

    producer_id: int
    epoch: int
    last_sequence: int
    last_timestamp_ms: int
    open_since: int


class FetchSubscription(Protocol):
    """Partitions that one reader fetches repeatedly, under keys that it chooses. One `fetch` at a time."""

    def __len__(self) -> int: ...

    def reads(self) -> Iterator[tuple[Hashable, FetchRead]]:
        """Yield all followed partitions."""
        ...

    def read(self, key: Hashable) -> FetchRead | None: ...

    def put(self, key: Hashable, read: FetchRead) -> None:
        """Follow a partition, or continue it at another offset. A new partition is reported by the next `fetch`."""
        ...

    def drop(self, key: Hashable) -> None:
        """Stop following a partition. Idempotent."""
        ...

    async def fetch(self, *, max_wait_s: float, min_bytes: int, max_bytes: int) -> list[tuple[Hashable, Fetched]]:
        """Fetch as `TopicLog.fetch`; return the partitions with batches, an error, or changed offsets.

        Batches are returned again until `put` moves past them. A partition that returned batches comes after the others
        in the next fetch.
        """
        ...

    def close(self) -> None:
        """Stop following all partitions and end a `fetch` in progress. Idempotent."""
        ...


class TopicLog(Protocol):
    """Access of one process to all partitions: produces to those that it leads, and serves reads."""

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
        """Reserve the queue slot now, in a plain call; the future ends when the batch is durable and committed.

        Calls for one producer id and partition take effect in call order, though their uploads overlap. The same holds
        for calls without a producer id that name the same `sender` (a connection; None is this process itself). The
        whole batch is validated before any of it is stored.
        `trailer`: stored behind the batch, with which it is read, moved and deleted (`batch/columns_trailer.py`).
        `within`: the batch may belong to this transaction; it is placed only while the coordinator reports it as open.
        The future fails with NotLeaderError, OutOfOrderSequenceError, InvalidProducerEpochError,
        InvalidTransactionError, CorruptBatchError, MissingError, UnavailableError (did not happen: retry) or
        UnknownOutcomeError (may have: retry with the same sequence). Cancelling the future never cancels reserved work.
        The buffer must stay unchanged until the future ends.
        """
        ...

    async def transaction_snapshot(self, topic_id: str, partition: int, producer_id: int) -> TransactionSnapshot:
        """Return the producer's transaction state. Raises NotLeaderError, MissingError, UnavailableError."""
        ...

    async def mark(
        self, topic_id: str, partition: int, marker: Marker, here: TransactionSnapshot | None = None
    ) -> None:
        """End the producer's transaction in this partition.

        Returns when the marker is durable, or when there is nothing to end and never will be. Raises NotLeaderError,
        MissingError, UnavailableError, UnknownOutcomeError: call again.

        `here`: result of `transaction_snapshot` from before the coordinator's register was read. If the state has
        changed since, nothing is ended and UnavailableError is raised: the register may describe a transaction that has
        ended in the meantime.
        """
        ...

    def set_coordinator(self, confirm: ConfirmTransaction) -> None:
        """Ask `confirm` before a transaction begins in a partition."""
        ...

    async def producers(self, topic_id: str, partition: int) -> list[ProducerStatus]:
        """List the live producers. Raises NotLeaderError, MissingError, UnavailableError."""
        ...

    async def fetch(
        self, reads: Sequence[FetchRead], *, max_wait_s: float, min_bytes: int, max_bytes: int
    ) -> list[Fetched]:
        """Return one answer per read, in order.

        Waits (event-driven) until min_bytes are available or max_wait_s passed.

        At least one whole batch is returned if there is any, even beyond the byte limits.
        """
        ...

    def subscribe(self) -> FetchSubscription: ...

    async def offsets(self, topic_id: str, partition: int, *, proved: bool = False) -> PartitionOffsets:
        """Return the offsets of a partition.

        `proved`: confirm during the call that this node leads. Without it the node may have been deposed without
        noticing; its offsets were correct a moment ago.
        """
        ...

    async def offset_for_time(self, topic_id: str, partition: int, timestamp_ms: int) -> tuple[int, int] | None:
        """Return (offset, timestamp) of the first record at or after timestamp_ms, or None.

        The index finds the batch. As in Kafka, a batch of several records is searched for the record, off the event
        loop.
        """
        ...

    @property
    def leadership_version(self) -> int:
        """Counter that grows whenever the answer of `leader_of` may have changed."""
        ...

    async def newest_timestamp(self, topic_id: str, partition: int) -> tuple[int, int] | None:
        """Return (offset, timestamp) of the first record with the greatest timestamp, or None.

        See `offset_for_time`.
        """
        ...

    async def delete_records(self, topic_id: str, partition: int, before_offset: int) -> int:
        """Advance the log start to `before_offset` (−1: the high watermark) and return the durable log start.

        Does nothing if the log already starts later. Raises OffsetOutOfRangeError, RecordsStillNeededError,
        NotLeaderError, MissingError, UnavailableError.
        """
        ...

    async def refresh(self) -> None:
        """Apply the catalogue's topics and configs, at least as fresh as the call."""
        ...

    def leader_of(self, topic_id: str, partition: int) -> str:
        """Return the node name of the current leader as known here, or "" without one."""
        ...


class BatchRef(msgspec.Struct, frozen=True):
    """Location of one record batch: enough for an executor to read it with access to the bucket only.

    `aborted`: producers whose transactional batch here was aborted; it has no visible records.
    """

    object_key: str
    first_byte: int
    size_bytes: int
    base_offset: int
    record_count: int
    max_timestamp_ms: int
    aborted: tuple[int, ...] = ()


class PartitionReader(Protocol):
    """Reader interface for other processes (Spark drivers plan, executors read). Needs no server."""

    async def last_stable(self, topic_id: str, partition: int) -> int:
        """Return the offset below which everything is finally committed or aborted."""
        ...

    async def log_start(self, topic_id: str, partition: int) -> int:
        """Return the first offset that retention has not deleted."""
        ...

    async def plan(self, topic_id: str, partition: int, start: int, end: int) -> list[BatchRef]:
        """Return the batches that overlap offsets [start, end) and that retention has not deleted, in order.

        The bytes and refs show which batches have no visible records (markers, aborted ones). Raises
        OffsetOutOfRangeError if `end` is above the last stable offset.
        """
        ...

    async def read(self, refs: Sequence[BatchRef]) -> list[bytes]:
        """Read the record batches, base offsets patched and without trailers, in order; ranges of one object are
        coalesced."""
        ...
