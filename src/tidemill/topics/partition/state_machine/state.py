"""State of one partition. Only `apply` writes it.

Batches are stored in parallel compact arrays (36 bytes a batch), ascending by base offset. Object keys are interned,
since one object usually holds several batches of a partition.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator

import msgspec
import numpy as np

from tidemill.topics.api import BatchRef, OffsetOutOfRangeError
from tidemill.topics.partition.state_machine.producer_state import PRODUCER_EXPIRY_MS, ProducerState
from tidemill.topics.partition.state_machine.transactions import AbortedIndex, OpenTransaction, first_open

PRODUCERS_LIMIT = 20_000
"""Limit of remembered producers per partition. The longest idle is dropped first; it may then start at any sequence,
which harms nothing but the detection of its retries."""

_RECENT_KEYS = 16

PARTITION_BYTES = 4_096
BATCH_BYTES, KEY_BYTES, PRODUCER_BYTES = 36, 140, 900


def running_maximum(times: array[int]) -> array[int]:
    return array("q", np.maximum.accumulate(np.frombuffer(times, np.int64)).tobytes())


class SettledMark(msgspec.Struct, frozen=True, array_like=True):
    """Position and content of the newest `commands.Advance`."""

    position: int = -1
    writer: str = ""
    below: int = 0

    def is_settled(self, writer: str, number: int, seen_at: int) -> bool:
        """Return whether every batch for this partition in an object of `writer` is decided.

        `seen_at`: end of the log, read after the object was seen. The writer named in the record decides by number. Any
        other writer can no longer place what it made before the record: it no longer leads, or its next append fails
        because the record is at the expected position.
        """
        return number < self.below if writer == self.writer else self.position >= seen_at


class PartitionState:
    """State of one partition.

    applied         next position of the fenced log: every record before it is in this state
    log_start       first Kafka offset that may be read
    reconciled      offsets below it are in L1, or below the log start; their batches are not in this state
    high_watermark  next Kafka offset; everything below is durable
    terms           (term, first offset placed in it), ascending: Kafka's leader epochs
    last_at_ms      time of the newest append, by its proposer; the only clock of this state
    transactions    producer id → its open transaction, in the order in which they began
    aborted         aborted transactions that still have readable records
    aborted_start   compaction has removed all records of transactions that were aborted wholly below it
    """

    def __init__(self) -> None:
        self.applied = 0
        self.log_start = 0
        self.reconciled = 0
        self.high_watermark = 0
        self.last_at_ms = 0
        self.settled = SettledMark()
        self.terms: list[tuple[int, int]] = []
        self.producers: dict[int, ProducerState] = {}
        self.transactions: dict[int, OpenTransaction] = {}
        self.aborted = AbortedIndex()
        self.aborted_start = 0
        self.rollup_key = ""
        self.rollup_position = 0
        self.object_keys: list[str] = []
        self.bases = array("q")
        self.objects = array("I")
        self.first_bytes = array("I")
        self.sizes = array("I")
        self.max_timestamps = array("q")
        self.highest_timestamps = array("q")
        """Running maximum of max_timestamps: ascending, so a time is found by bisection."""

    def __len__(self) -> int:
        return len(self.bases)

    @property
    def hot_start(self) -> int:
        """First offset whose batch is in this state."""
        return max(self.log_start, self.reconciled)

    def live_producer(self, producer_id: int, at_ms: int) -> ProducerState | None:
        """Return the live state of a producer, or None if it was idle for PRODUCER_EXPIRY_MS and has no open
        transaction."""
        found = self.producers.get(producer_id)
        if found is not None and at_ms - found.updated_ms >= PRODUCER_EXPIRY_MS:
            return found if producer_id in self.transactions else None
        return found

    def live_producers(self) -> Iterator[tuple[int, ProducerState]]:
        """Yield the producers that have not expired, the longest idle first."""
        for producer_id, producer in self.producers.items():
            if self.last_at_ms - producer.updated_ms < PRODUCER_EXPIRY_MS or producer_id in self.transactions:
                yield producer_id, producer

    def drop_idle_producers(self) -> None:
        """Drop the longest idle producers beyond the limit, but none with an open transaction."""
        while len(self.producers) > PRODUCERS_LIMIT:
            del self.producers[next(each for each in self.producers if each not in self.transactions)]

    @property
    def last_stable(self) -> int:
        """Offset below which every transaction is committed or aborted."""
        first = first_open(self.transactions)
        return self.high_watermark if first is None else max(first, self.log_start)

    def intern(self, object_key: str) -> int:
        keys = self.object_keys
        recent = keys[-_RECENT_KEYS:]
        if object_key in recent:
            return len(keys) - len(recent) + recent.index(object_key)
        keys.append(object_key)
        return len(keys) - 1

    def set_log_start(self, log_start: int) -> None:
        """Set the log start and drop what is no longer needed.

        Drops the batches wholly below it or in L1, their objects, and leader epochs that wrote only below it.
        """
        self.log_start = log_start
        gone = bisect_right(self.bases, self.hot_start) - 1
        if self.hot_start == self.high_watermark:
            gone = len(self.bases)
        if gone > 0:
            for column in (self.bases, self.objects, self.first_bytes, self.sizes, self.max_timestamps):
                del column[:gone]
            # Indexes may go back by up to _RECENT_KEYS, so take the minimum.
            unused = min(self.objects) if self.objects else len(self.object_keys)
            del self.object_keys[:unused]
            self.objects = array("I", (np.frombuffer(self.objects, np.uint32) - np.uint32(unused)).tobytes())
            self.highest_timestamps = running_maximum(self.max_timestamps)
        while len(self.terms) > 1 and self.terms[1][1] <= log_start:
            del self.terms[0]
        self.aborted.set_log_start(max(log_start, self.aborted_start))

    def live_objects(self) -> set[str]:
        """Return the keys of the objects that hold a batch of this state."""
        return {self.object_keys[index] for index in set(self.objects)}

    @property
    def memory_bytes(self) -> int:
        """Estimated memory for leading this partition, with all its objects. Calibrated with 10,000 partitions."""
        batches = BATCH_BYTES * len(self.bases) + KEY_BYTES * len(self.object_keys)
        return PARTITION_BYTES + batches + PRODUCER_BYTES * len(self.producers)

    @property
    def size_bytes(self) -> int:
        """Total bytes of the batches in this state."""
        return sum(self.sizes)

    # reading --------------------------------------------------------------------------------------
    def batch_index(self, offset: int) -> int:
        """Return the index of the batch that contains `offset`, or len(self) at the high watermark.

        Raises OffsetOutOfRangeError, or ValueError if the batch is in L1.
        """
        self.check_range(offset)
        if offset < self.reconciled:
            raise ValueError(f"the batch is in L1: offset={offset} reconciled={self.reconciled}")
        if offset == self.high_watermark:
            return len(self.bases)
        return bisect_right(self.bases, offset) - 1

    def check_range(self, offset: int) -> None:
        """Raise OffsetOutOfRangeError unless log_start ≤ offset ≤ high_watermark."""
        if not self.log_start <= offset <= self.high_watermark:
            raise OffsetOutOfRangeError(
                f"offset out of range: offset={offset} log_start={self.log_start} high_watermark={self.high_watermark}."
            )

    def batch_end_index(self, offset: int) -> int:
        """Return the index after the last batch that starts below `offset`."""
        return bisect_left(self.bases, offset)

    def next_base(self, index: int) -> int:
        return self.bases[index + 1] if index + 1 < len(self.bases) else self.high_watermark

    def batch_ref(self, index: int) -> BatchRef:
        base = self.bases[index]
        return BatchRef(
            object_key=self.object_keys[self.objects[index]],
            first_byte=self.first_bytes[index],
            size_bytes=self.sizes[index],
            base_offset=base,
            record_count=self.next_base(index) - base,
            max_timestamp_ms=self.max_timestamps[index],
        )

    def committed_batch_ref(self, index: int) -> BatchRef:
        """Return `batch_ref` of the batch, with the producers of aborted transactions that overlap it."""
        return self.aborted.with_aborted(self.batch_ref(index))

    def batch_for_time(self, timestamp_ms: int, start: int = 0) -> int | None:
        """Return the index of the first batch at or after `start` whose max timestamp ≥ timestamp_ms, or None."""
        index = bisect_left(self.highest_timestamps, timestamp_ms)
        first = self.batch_index(max(start, self.hot_start))
        if index < first:
            late = np.flatnonzero(np.frombuffer(self.max_timestamps, np.int64)[first:] >= timestamp_ms)
            index = first + int(late[0]) if len(late) else len(self.bases)
        return index if index < len(self.bases) else None
