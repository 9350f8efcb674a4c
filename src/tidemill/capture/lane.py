"""One partition of a captured table's topic, as its only writer sees it. Sync; the I/O is topic_writer's.

L1  The n-th record that capture decides to write has offset n: offsets are assigned here, in stream order, and
    the batch carries them as its producer sequence (offset mod 2³¹). So the topic accepts a batch only where it
    belongs: a batch sent twice, or by a predecessor that was believed dead, is recognised as a duplicate or
    refused, and can never be appended a second time.
L2  Records below `held` were in the log when the lane was opened. They are counted, not written: the stream
    replays them because their transactions were not confirmed, and yields the same records again.

The count starts at `next`, the partition's offset in the newest binding (or where the snapshot ended).
"""

from __future__ import annotations

from collections import deque

from tidemill.base.errors import Corrupt
from tidemill.base.frontier import ChangePosition
from tidemill.topics.batch import Record, encode_batch

SEQUENCE_MODULUS = 1 << 31
BATCH_BYTES = 512 << 10
RECORD_OVERHEAD_BYTES = 80


class Round:
    """Everything that was waiting when it was closed: all records up to `position`, of all lanes."""

    __slots__ = ("left", "position")

    def __init__(self, position: ChangePosition) -> None:
        self.position = position
        self.left = 0


class LaneBatch:
    """An encoded batch of the offsets [start, end)."""

    __slots__ = ("data", "done", "end", "in_flight", "round", "start")

    def __init__(self, start: int, end: int, data: bytes, round_: Round) -> None:
        self.start = start
        self.end = end
        self.data = data
        self.round = round_
        self.in_flight = False
        self.done = False


class Lane:
    def __init__(self, topic: str, topic_id: str, partition: int, producer_id: int) -> None:
        self.topic = topic
        self.topic_id = topic_id
        self.partition = partition
        self.next = 0
        self.held = 0
        self.tail: ChangePosition | None = None
        self.pending: deque[LaneBatch] = deque()
        self.repairing = False
        self.failures = 0
        self._producer_id = producer_id
        self._open: list[Record] = []
        self._open_bytes = 0

    def start_at(self, base: int, high_watermark: int, tail: ChangePosition | None) -> None:
        """`base`: next offset as of what is already bound; `tail`: position of the record before the high watermark.
        Raises Corrupt when bound records are gone."""
        if high_watermark < base:
            raise Corrupt(
                f"the topic is shorter than its newest binding: topic={self.topic} partition={self.partition}"
                f" high_watermark={high_watermark} bound={base}.",
                fix="Restore the topic, or start the capture over.",
            )
        self.next, self.held, self.tail = base, high_watermark, tail

    def take(self, position: ChangePosition) -> bool:
        """Give the record at `position` its offset; True when it has still to be written (call `add`)."""
        offset = self.next
        self.next = offset + 1
        if offset >= self.held:
            return True
        if offset == self.held - 1 and self.tail is not None and self.tail != position:
            raise Corrupt(
                f"the stream does not lead to the topic's tail: topic={self.topic} partition={self.partition}"
                f" offset={offset} expected={position} found={self.tail}.",
                fix="Start the capture over: somebody else wrote to its topic, or its tables changed unseen.",
            )
        return False

    def add(self, record: Record) -> int:
        """Queue the record whose offset `take` has just given; returns its size in bytes."""
        size = len(record.key or b"") + len(record.value or b"") + RECORD_OVERHEAD_BYTES
        self._open.append(record)
        self._open_bytes += size
        return size

    def close_batches(self, round_: Round) -> list[LaneBatch]:
        """Encode what waits, in batches of about BATCH_BYTES, and put them in line."""
        records, self._open, self._open_bytes = self._open, [], 0
        start = self.next - len(records)
        batches: list[LaneBatch] = []
        first, size = 0, 0
        for index, record in enumerate(records):
            size += len(record.key or b"") + len(record.value or b"") + RECORD_OVERHEAD_BYTES
            if size >= BATCH_BYTES or index == len(records) - 1:
                chunk = records[first : index + 1]
                data = encode_batch(
                    chunk,
                    producer_id=self._producer_id,
                    producer_epoch=0,
                    base_sequence=(start + first) % SEQUENCE_MODULUS,
                )
                batches.append(LaneBatch(start + first, start + index + 1, data, round_))
                first, size = index + 1, 0
        self.pending.extend(batches)
        round_.left += len(batches)
        return batches

    def landed(self, high_watermark: int) -> list[LaneBatch]:
        """After a failure, with nothing in flight: take out of line what the log holds after all."""
        out = []
        while self.pending and self.pending[0].end <= high_watermark:
            out.append(self.pending.popleft())
        return out

    @property
    def quiet(self) -> bool:
        """Nothing is queued or in line: whatever it took is in the log."""
        return not self._open and not self.pending

    @property
    def expected(self) -> int:
        """The high watermark as far as this lane wrote: nothing of what is left in line is below it."""
        return self.pending[0].start if self.pending else self.next - len(self._open)
