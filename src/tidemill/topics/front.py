"""The fronts of `topics`: what the Kafka endpoint, the capture sink and Spark may call.

T1  Offsets are contiguous, and follow reservation order.
T2  Readers see only what is durable. An acknowledgement follows T2.

Record bytes are Kafka record batches, format v2 (magic 2), never decoded on this path; base offset and
partition leader epoch are patched in place (outside the CRC, which covers byte 21 onward).
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from typing import Protocol

import msgspec

from tidemill.base.errors import Corrupt, Fenced, Invalid, Unavailable
from tidemill.objects.store import Buffer


class NotLeader(Unavailable):
    """This node does not lead the partition; `leader` is the node name that does, or ""."""

    def __init__(self, message: str, *, leader: str = "") -> None:
        super().__init__(message)
        self.leader = leader


class OutOfOrderSequence(Invalid):
    """A gap in a producer's sequence numbers, seen by a linearizable check (Kafka OUT_OF_ORDER_SEQUENCE_NUMBER)."""


class InvalidProducerEpoch(Fenced):
    """A newer epoch of this producer id has written here (Kafka INVALID_PRODUCER_EPOCH)."""


class CorruptBatch(Invalid):
    """The producer's bytes are not what it sent: size or checksum are wrong (Kafka CORRUPT_MESSAGE: sent again)."""


class InvalidRecords(CorruptBatch):
    """The producer sent what is no well-formed record batch v2 (Kafka INVALID_RECORD: never sent again).

    `record_errors`: (index in the batch, what is wrong with that record), as Kafka answers them; may be empty.
    """

    def __init__(self, message: str, *, fix: str = "", record_errors: tuple[tuple[int, str], ...] = ()) -> None:
        super().__init__(message, fix=fix)
        self.record_errors = record_errors


class BatchTooLarge(CorruptBatch):
    """More than the topic takes, or than is ever decompressed (Kafka MESSAGE_TOO_LARGE: clients may split it)."""


class BadBatch(Corrupt):
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


def _bad_batch(reason: str, base_offset: int, last_offset: int) -> BadBatch:
    return BadBatch(reason, base_offset=base_offset, last_offset=last_offset)


class OffsetOutOfRange(Invalid):
    """The asked offset is below log start or above the high watermark."""


class ProduceResult(msgspec.Struct, frozen=True):
    """Inclusive offsets of the batch, its original ones when the batch was a duplicate."""

    base_offset: int
    last_offset: int
    log_start_offset: int
    duplicate: bool = False


class FetchRead(msgspec.Struct, frozen=True):
    topic_id: str
    partition: int
    offset: int
    max_bytes: int


class Fetched(msgspec.Struct, frozen=True):
    """Whole batches, the first one containing the asked offset; `error` set means no batches."""

    high_watermark: int
    log_start_offset: int
    batches: list[Buffer]
    error: Exception | None = None


class PartitionOffsets(msgspec.Struct, frozen=True):
    log_start_offset: int
    high_watermark: int


class TopicLog(Protocol):
    """One process's access to all partitions: the writer front (when it leads them) and the serving reader."""

    def produce_nowait(
        self, topic_id: str, partition: int, batch: Buffer, *, sender: Hashable = None
    ) -> asyncio.Future[ProduceResult]:
        """Reserve the place in line now, in a plain call; the future ends when the batch is durable and committed.

        Calls for one producer id and partition take effect in call order, though their uploads overlap; so do those
        without a producer id that name one `sender` (a connection; None is this process itself). The batch is checked
        whole before anything of it is stored.
        The future fails with NotLeader, OutOfOrderSequence, InvalidProducerEpoch, CorruptBatch, Missing,
        Unavailable (did not happen: retry) or Unknown (may have: retry with the same sequence). Cancelling
        the future never cancels reserved work. The buffer must stay unchanged until the future ends.
        """
        ...

    async def fetch(
        self, reads: Sequence[FetchRead], *, max_wait_s: float, min_bytes: int, max_bytes: int
    ) -> list[Fetched]:
        """One answer per read, in order. Waits (event-driven) until min_bytes are there or max_wait_s passed.

        At least one whole batch is returned when any is there, even past the byte limits.
        """
        ...

    async def offsets(self, topic_id: str, partition: int) -> PartitionOffsets: ...

    async def offset_for_time(self, topic_id: str, partition: int, timestamp_ms: int) -> tuple[int, int] | None:
        """(offset, timestamp) of the first record at or after timestamp_ms, or None. Decodes one batch, off the loop.

        Raises NotLeader, Missing, Unavailable.
        """
        ...

    def leader_of(self, topic_id: str, partition: int) -> str:
        """Node name of the current leader as known here, or "" while there is none."""
        ...


class BatchRef(msgspec.Struct, frozen=True):
    """Where one record batch lies: enough for an executor to read it with nothing but the bucket."""

    object_key: str
    first_byte: int
    size_bytes: int
    base_offset: int
    record_count: int
    max_timestamp_ms: int


class PartitionReader(Protocol):
    """The reader front for other processes (Spark drivers plan, executors read): no server needed."""

    async def high_watermark(self, topic_id: str, partition: int) -> int: ...

    async def plan(self, topic_id: str, partition: int, start: int, end: int) -> list[BatchRef]:
        """Batches that overlap offsets [start, end) and are still there (retention), in order. Raises OffsetOutOfRange
        when end passes the log."""
        ...

    async def read(self, refs: Sequence[BatchRef]) -> list[bytes]:
        """The record batches, base offsets patched, in order; ranges of one object are coalesced."""
        ...
