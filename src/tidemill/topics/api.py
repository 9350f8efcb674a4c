"""The fronts of `topics`: what the Kafka endpoint, the capture sink and Spark may call.

T1  Offsets are contiguous, and follow reservation order.
T2  Readers see only what is durable. An acknowledgement follows T2.

Record bytes are Kafka record batches, format v2 (magic 2), never decoded on this path; base offset and
partition leader epoch are patched in place (outside the CRC, which covers byte 21 onward).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from typing import Protocol

import msgspec

from tidemill.base.errors import CorruptError, FencedError, InvalidError, UnavailableError
from tidemill.objects.store import Buffer


class NotLeaderError(UnavailableError):
    """This node does not lead the partition; `leader` is the node name that does, or ""."""

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
    """The producer's transaction before this one has not ended yet (Kafka CONCURRENT_TRANSACTIONS): call again."""


class CorruptBatchError(InvalidError):
    """The producer's bytes are not what it sent: size or checksum are wrong (Kafka CORRUPT_MESSAGE: sent again)."""


class InvalidRecordsError(CorruptBatchError):
    """The producer sent what is no well-formed record batch v2 (Kafka INVALID_RECORD: never sent again).

    `record_errors`: (index in the batch, what is wrong with that record), as Kafka answers them; may be empty.
    """

    def __init__(self, message: str, *, fix: str = "", record_errors: tuple[tuple[int, str], ...] = ()) -> None:
        super().__init__(message, fix=fix)
        self.record_errors = record_errors


class BatchTooLargeError(CorruptBatchError):
    """More than the topic takes, or than is ever decompressed (Kafka MESSAGE_TOO_LARGE: clients may split it)."""


class InvalidTimestampError(CorruptBatchError):
    """A record's time is beyond what the topic's config allows (Kafka INVALID_TIMESTAMP)."""


class UnreadableBatchError(CorruptError):
    """A stored batch cannot be read: what offsets [base_offset, last_offset] hold is lost, everything beside is not.

    Both offsets are inclusive, −1 where not even the header can be read and nobody said where the batch stands.
    """

    def __init__(self, reason: str, *, base_offset: int = -1, last_offset: int = -1) -> None:
        super().__init__(
            f"a stored record batch cannot be read: base_offset={base_offset} last_offset={last_offset} cause={reason}."
        )
        self.base_offset = base_offset
        self.last_offset = last_offset
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return _bad_batch, (self.reason, self.base_offset, self.last_offset)


def _bad_batch(reason: str, base_offset: int, last_offset: int) -> UnreadableBatchError:
    return UnreadableBatchError(reason, base_offset=base_offset, last_offset=last_offset)


class OffsetOutOfRangeError(InvalidError):
    """The asked offset is below log start or above the high watermark."""


class RecordsStillNeededError(InvalidError):
    """Somebody has yet to read records that were to be deleted (Kafka POLICY_VIOLATION)."""


class ProduceResult(msgspec.Struct, frozen=True):
    """Inclusive offsets of the batch, its original ones when the batch was a duplicate."""

    base_offset: int
    last_offset: int
    log_start_offset: int
    duplicate: bool = False
    append_time_ms: int = -1
    """−1 where records keep their producer's times."""


class ProduceTransaction(msgspec.Struct, frozen=True):
    """Whose transaction a produced batch is of. `adds`: it also adds its partition to it (KIP-890, version 2)."""

    transactional_id: str
    adds: bool = False


Confirm = Callable[[ProduceTransaction, int, int, str, int], Awaitable[None]]
"""(whose, producer id, epoch, topic id, partition): returns if the coordinator's transaction of this producer and epoch
is open and holds the partition, read after the call. Raises InvalidTransactionError, InvalidProducerEpochError,
UnavailableError."""


Here = tuple[int, object]
"""What a producer has in a partition at a moment, to be compared only: the first offset of its open transaction (−1:
none), and the coordinator's word by which one may begin."""


class Marker(msgspec.Struct, frozen=True):
    """The end of a transaction in one partition. `bumped`: its epoch is the one after that of the transaction, which it
    shares with what the producer does next: only an older one is ended by it (KIP-890)."""

    producer_id: int
    producer_epoch: int
    commit: bool
    coordinator_epoch: int = 0
    bumped: bool = False

    @property
    def below(self) -> int:
        """It ends transactions of epochs below this."""
        return self.producer_epoch + (not self.bumped)


class FetchRead(msgspec.Struct, frozen=True):
    """`committed`: nothing from the last stable offset on."""

    topic_id: str
    partition: int
    offset: int
    max_bytes: int
    committed: bool = False


class Fetched(msgspec.Struct, frozen=True):
    """Whole batches, the first one containing the asked offset; `error` set means no batches.

    `last_stable`: −1 where nobody knows it. `aborted`: (producer id, first offset) of the aborted transactions among
    the batches of a committed read, whose records its reader passes over from there to the producer's next marker.
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
    """What a partition knows of a producer; `last_sequence` −1 where it wrote nothing in this epoch, `open_since` −1
    without an open transaction, else its first offset."""

    producer_id: int
    epoch: int
    last_sequence: int
    last_timestamp_ms: int
    open_since: int


class Following(Protocol):
    """Partitions that one reader asks for again and again, under keys of its own. One `fetch` at a time."""

    def __len__(self) -> int: ...

    def reads(self) -> Iterator[tuple[Hashable, FetchRead]]:
        """All of them, as of now."""
        ...

    def read(self, key: Hashable) -> FetchRead | None: ...

    def put(self, key: Hashable, read: FetchRead) -> None:
        """Follow it, or go on with another offset. A partition that is new here is told with the next answer."""
        ...

    def drop(self, key: Hashable) -> None:
        """Idempotent."""
        ...

    async def fetch(self, *, max_wait_s: float, min_bytes: int, max_bytes: int) -> list[tuple[Hashable, Fetched]]:
        """As `TopicLog.fetch`, of those that have batches, an error, or other offsets than were told last. Batches are
        given again until `put` goes on behind them; who gave some waits for the others the next time."""
        ...

    def close(self) -> None:
        """Follow nothing; a `fetch` under way ends. Idempotent."""
        ...


class TopicLog(Protocol):
    """One process's access to all partitions: the writer front (when it leads them) and the serving reader."""

    def produce_nowait(
        self,
        topic_id: str,
        partition: int,
        batch: Buffer,
        *,
        sender: Hashable = None,
        within: ProduceTransaction | None = None,
    ) -> asyncio.Future[ProduceResult]:
        """Reserve the place in line now, in a plain call; the future ends when the batch is durable and committed.

        Calls for one producer id and partition take effect in call order, though their uploads overlap; so do those
        without a producer id that name one `sender` (a connection; None is this process itself). The batch is checked
        whole before anything of it is stored.
        `within`: the batch may be one of this transaction; it is placed only while the coordinator says it is open.
        The future fails with NotLeaderError, OutOfOrderSequenceError, InvalidProducerEpochError,
        InvalidTransactionError, CorruptBatchError, Missing, Unavailable (did not happen: retry) or Unknown (may have:
        retry with the same sequence). Cancelling the future never cancels reserved work. The buffer must stay unchanged
        until the future ends.
        """
        ...

    async def open_here(self, topic_id: str, partition: int, producer_id: int) -> Here:
        """Raises NotLeaderError, Missing, UnavailableError."""
        ...

    async def mark(self, topic_id: str, partition: int, marker: Marker, here: Here | None = None) -> None:
        """End the producer's transaction here; returns when the marker is durable, or there is nothing to end and never
        will be. Raises NotLeaderError, Missing, UnavailableError, Unknown: call again.

        `here`: what `open_here` said before the coordinator's word was read. Where it is something else by now nothing
        is ended, and it is Unavailable: the word may be of a transaction that ended since (X5)."""
        ...

    def coordinated_by(self, confirm: Confirm) -> None:
        """Ask `confirm` before a transaction begins in a partition."""
        ...

    async def producers(self, topic_id: str, partition: int) -> list[ProducerStatus]:
        """Raises NotLeaderError, Missing, UnavailableError."""
        ...

    async def fetch(
        self, reads: Sequence[FetchRead], *, max_wait_s: float, min_bytes: int, max_bytes: int
    ) -> list[Fetched]:
        """One answer per read, in order. Waits (event-driven) until min_bytes are there or max_wait_s passed.

        At least one whole batch is returned when any is there, even past the byte limits.
        """
        ...

    def follow(self) -> Following: ...

    async def offsets(self, topic_id: str, partition: int, *, proved: bool = False) -> PartitionOffsets:
        """`proved`: of whoever leads while this is asked. Else it may be one that was deposed and does not know it yet:
        its offsets were right a moment ago."""
        ...

    async def offset_for_time(self, topic_id: str, partition: int, timestamp_ms: int) -> tuple[int, int] | None:
        """(offset, timestamp) of the first record at or after timestamp_ms, or None. The index finds its batch; as in
        Kafka, one of several records is looked through for it, off the loop.

        Raises NotLeaderError, Missing, UnavailableError.
        """
        ...

    @property
    def leadership(self) -> int:
        """Grows whenever `leader_of` may have another answer than before."""
        ...

    async def newest_time(self, topic_id: str, partition: int) -> tuple[int, int] | None:
        """(offset, timestamp) of the first record with the greatest timestamp, or None. As `offset_for_time`."""
        ...

    async def delete_records(self, topic_id: str, partition: int, before_offset: int) -> int:
        """Let the log start at `before_offset`, −1 = the high watermark, when it does not start later; returns where it
        starts, which is durable then. Raises OffsetOutOfRangeError, RecordsStillNeededError, NotLeaderError, Missing,
        UnavailableError."""
        ...

    async def refresh(self) -> None:
        """When it returns, what the catalogue said of topics as it was called is followed here, their configs too."""
        ...

    def leader_of(self, topic_id: str, partition: int) -> str:
        """Node name of the current leader as known here, or "" while there is none."""
        ...


class BatchRef(msgspec.Struct, frozen=True):
    """Where one record batch lies: enough for an executor to read it with nothing but the bucket.

    `aborted`: a transactional batch of one of these producers was aborted, and has no records for anybody.
    """

    object_key: str
    first_byte: int
    size_bytes: int
    base_offset: int
    record_count: int
    max_timestamp_ms: int
    aborted: tuple[int, ...] = ()


class PartitionReader(Protocol):
    """The reader front for other processes (Spark drivers plan, executors read): no server needed."""

    async def last_stable(self, topic_id: str, partition: int) -> int:
        """The offset below which everything is committed, or aborted, for ever."""
        ...

    async def plan(self, topic_id: str, partition: int, start: int, end: int) -> list[BatchRef]:
        """Batches that overlap offsets [start, end) and are still there (retention), in order; which of them have no
        records (markers, aborted ones) their bytes and refs tell. Raises OffsetOutOfRangeError when end passes what is
        committed."""
        ...

    async def read(self, refs: Sequence[BatchRef]) -> list[bytes]:
        """The record batches, base offsets patched, in order; ranges of one object are coalesced."""
        ...
