"""State of one partition of a captured table's topic, of which this is the only writer. Synchronous; topic_writer does
the I/O.

Invariant (one landing): the n-th record that capture decides to write has offset n. Offsets are assigned here, in
stream order, and the batch carries them as its producer sequence (offset mod 2³¹). So the topic accepts a batch only at
its place: a batch that is sent twice, or by a predecessor that was believed dead, is recognised as a duplicate or
rejected, and is never appended a second time.

Invariant (replays): records below `held` were in the log when the writer was opened. They are counted, not written: the
stream replays them because their transactions were not confirmed, and yields the same records again.

Invariant (epochs of copies): a copy has its own producer id, and each session that resumes it uses the next higher
epoch. The writer is opened by a first record of that epoch, with sequence 0 (topic_writer). From there on no batch of
an earlier session can land.

The count starts at `next`, the partition's offset in the newest binding (or where the snapshot ended).
"""

from __future__ import annotations

from collections import deque

import structlog

from tidemill.base.errors import CorruptError
from tidemill.base.lsn import ChangePosition
from tidemill.base.runtime.tasks import error_sentence
from tidemill.capture.topics.batch_builder import (
    BatchEntry,
    RowRange,
    cut_batches,
    encode_columns_trailer,
    encode_entries_batch,
    record_size_bytes,
)
from tidemill.topics.batch import Record

log = structlog.get_logger()

SEQUENCE_MODULUS = 1 << 31
BATCH_BYTES = 512 << 10


class SendRound:
    """Everything that was waiting when the round was closed: all records up to `position`, of all partitions."""

    __slots__ = ("left", "position")

    def __init__(self, position: ChangePosition) -> None:
        self.position = position
        self.left = 0


class PartitionBatch:
    """An encoded batch of the offsets [start, end)."""

    __slots__ = ("data", "done", "end", "in_flight", "round", "start", "trailer")

    def __init__(self, start: int, end: int, data: bytes, trailer: bytes, round_: SendRound) -> None:
        self.start = start
        self.end = end
        self.data = data
        self.trailer = trailer
        self.round = round_
        self.in_flight = False
        self.done = False

    @property
    def size_bytes(self) -> int:
        return len(self.data) + len(self.trailer)


class PartitionWriter:
    def __init__(self, topic: str, topic_id: str, partition: int, producer_id: int, epoch: int = 0) -> None:
        self.topic = topic
        self.topic_id = topic_id
        self.partition = partition
        self.next = 0
        self.held = 0
        self.tail: ChangePosition | None = None
        self.pending: deque[PartitionBatch] = deque()
        self.failures = 0
        self.producer_id = producer_id
        self.epoch = epoch
        self._first = 0
        """Offset of sequence 0."""
        self._open: list[BatchEntry] = []
        self._open_count = 0
        self.made_bytes = 0
        """Total size of the batches that it has encoded."""

    def start_at(self, base: int, high_watermark: int, tail: ChangePosition | None) -> None:
        """Set the start of the count. `base`: next offset according to the newest binding. `tail`: position of the
        record before the high watermark. Raises CorruptError if bound records are missing.
        """
        if high_watermark < base:
            raise CorruptError(
                f"the topic is shorter than its newest binding: topic={self.topic} partition={self.partition}"
                f" high_watermark={high_watermark} bound={base}.",
                fix="Restore the topic, or start the capture over.",
            )
        self.next, self.held, self.tail = base, high_watermark, tail

    def start_behind(self, opened: int) -> None:
        """Set the start of the count behind the record that opened its epoch, whose offset is `opened`."""
        self.next = self.held = opened + 1
        self._first = opened

    def assign_offset(self, position: ChangePosition) -> bool:
        """Assign an offset to the record at `position`; return True if it still has to be written (call `add`)."""
        offset = self.next
        self.next = offset + 1
        if offset >= self.held:
            return True
        if offset == self.held - 1:
            self._check_tail(offset, position)
        return False

    def assign_offsets(self, rows: RowRange) -> int:
        """Assign offsets to the records of these rows; return the first row that still has to be written."""
        offset = self.next
        self.next = offset + len(rows)
        if offset >= self.held:
            return rows.start
        fresh = rows.start + self.held - offset
        if fresh <= rows.end:
            self._check_tail(self.held - 1, rows.position(fresh - 1))
        return min(fresh, rows.end)

    def _check_tail(self, offset: int, position: ChangePosition) -> None:
        if self.tail is not None and self.tail != position:
            raise CorruptError(
                f"the stream does not match the topic's tail: topic={self.topic} partition={self.partition}"
                f" offset={offset} expected={position} found={self.tail}.",
                fix="Start the capture over: another client wrote to its topic, or its tables changed unseen.",
            )

    def add(self, record: Record) -> int:
        """Queue the record that `assign_offset` has just assigned an offset to; return its size in bytes."""
        self._open.append(record)
        self._open_count += 1
        return record_size_bytes(record)

    def add_rows(self, rows: RowRange) -> int:
        """Queue rows that `assign_offsets` has just assigned offsets to; return the size of their records in bytes."""
        last = self._open[-1] if self._open else None
        if isinstance(last, RowRange) and last.is_followed_by(rows):
            self._open[-1] = last.subrange(last.start, rows.end)
        else:
            self._open.append(rows)
        self._open_count += len(rows)
        return rows.size_bytes

    def close_batches(self, round_: SendRound) -> list[PartitionBatch]:
        """Encode the queued records in batches of about BATCH_BYTES, and append them to `pending`."""
        start = self.next - self._open_count
        entries, self._open, self._open_count = self._open, [], 0
        batches: list[PartitionBatch] = []
        for batch, count in cut_batches(entries, BATCH_BYTES):
            sequence = (start - self._first) % SEQUENCE_MODULUS
            data = encode_entries_batch(
                batch, count, producer_id=self.producer_id, base_sequence=sequence, epoch=self.epoch
            )
            self.made_bytes += len(data)
            batches.append(PartitionBatch(start, start + count, data, self._encode_trailer(batch, count), round_))
            start += count
        self.pending.extend(batches)
        round_.left += len(batches)
        return batches

    def _encode_trailer(self, batch: list[BatchEntry], count: int) -> bytes:
        try:
            return encode_columns_trailer(batch, count)
        except Exception as error:
            # A trailer only repeats its records, so no error of it may stop them.
            log.warning(
                "a batch is sent without columns", topic=self.topic, cause=error_sentence(error), exc_info=error
            )
            return b""

    def remove_landed(self, high_watermark: int) -> list[PartitionBatch]:
        """Remove and return the batches that the log contains after all. Called after a failure, with nothing in
        flight.
        """
        out = []
        while self.pending and self.pending[0].end <= high_watermark:
            out.append(self.pending.popleft())
        return out

    @property
    def is_quiet(self) -> bool:
        """True if nothing is queued or pending: all its records are in the log."""
        return not self._open and not self.pending

    @property
    def expected_high_watermark(self) -> int:
        """High watermark according to this writer: no pending batch is below it."""
        return self.pending[0].start if self.pending else self.next - self._open_count
