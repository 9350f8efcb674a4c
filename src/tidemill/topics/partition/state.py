"""State of one partition. Owned: only `apply` writes it.

Batches lie in parallel compact arrays (36 bytes a batch), ascending by base offset; object keys are
interned, since one object usually holds several of a partition's batches.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right

import msgspec
import numpy as np

from tidemill.topics.front import BatchRef, OffsetOutOfRange
from tidemill.topics.partition.idempotence import PRODUCER_EXPIRY_MS, Producer

PRODUCERS_LIMIT = 20_000
"""Producers remembered per partition; the longest idle goes first (I4 makes forgetting harmless but for retries)."""

_RECENT_KEYS = 16


def running_maximum(times: array[int]) -> array[int]:
    return array("q", np.maximum.accumulate(np.frombuffer(times, np.int64)).tobytes())


class Settled(msgspec.Struct, frozen=True, array_like=True):
    """Where the newest `commands.Advance` stands, and what it says."""

    position: int = -1
    writer: str = ""
    below: int = 0

    def covers(self, writer: str, number: int, seen_at: int) -> bool:
        """Is everything decided that an object of `writer` holds for this partition? `seen_at`: the log's end, read
        after the object was seen. Its own writer says so by number. Of another one, whatever it made before the record
        it never places: it leads no more, or its next append finds that record where it expects the end."""
        return number < self.below if writer == self.writer else self.position >= seen_at


class PartitionState:
    """
    applied         the next position of the fenced log: every record before it is in this state
    log_start       first Kafka offset that may be read
    high_watermark  next Kafka offset; everything below is durable
    terms           (term, first offset placed in it), ascending: Kafka's leader epochs
    last_at_ms      the newest proposer's time seen; the only clock of this state
    """

    def __init__(self) -> None:
        self.applied = 0
        self.log_start = 0
        self.high_watermark = 0
        self.last_at_ms = 0
        self.settled = Settled()
        self.terms: list[tuple[int, int]] = []
        self.producers: dict[int, Producer] = {}
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

    def producer(self, producer_id: int, at_ms: int) -> Producer | None:
        """The live state of a producer; one idle for longer than PRODUCER_EXPIRY_MS is unknown."""
        found = self.producers.get(producer_id)
        if found is None or at_ms - found.updated_ms >= PRODUCER_EXPIRY_MS:
            return None
        return found

    def intern(self, object_key: str) -> int:
        keys = self.object_keys
        for index in range(len(keys) - 1, max(-1, len(keys) - 1 - _RECENT_KEYS), -1):
            if keys[index] == object_key:
                return index
        keys.append(object_key)
        return len(keys) - 1

    def start_at(self, log_start: int) -> None:
        """Forget the batches that lie wholly below, their objects, and the leader epochs that wrote them alone."""
        self.log_start = log_start
        gone = bisect_right(self.bases, log_start) - 1
        if log_start == self.high_watermark:
            gone = len(self.bases)
        if gone > 0:
            for column in (self.bases, self.objects, self.first_bytes, self.sizes, self.max_timestamps):
                del column[:gone]
            # An index may go back by _RECENT_KEYS, so the least one is looked for.
            unused = min(self.objects) if self.objects else len(self.object_keys)
            del self.object_keys[:unused]
            self.objects = array("I", (np.frombuffer(self.objects, np.uint32) - np.uint32(unused)).tobytes())
            self.highest_timestamps = running_maximum(self.max_timestamps)
        while len(self.terms) > 1 and self.terms[1][1] <= log_start:
            del self.terms[0]

    def live_objects(self) -> set[str]:
        """Keys of the objects that hold a batch from the log's start on."""
        return {self.object_keys[index] for index in set(self.objects)}

    @property
    def size_bytes(self) -> int:
        return sum(self.sizes)

    # reading --------------------------------------------------------------------------------------
    def first_batch(self, offset: int) -> int:
        """Index of the batch that contains `offset`; len(self) at the high watermark. Raises OffsetOutOfRange."""
        if not self.log_start <= offset <= self.high_watermark:
            raise OffsetOutOfRange(
                f"offset out of range: offset={offset} log_start={self.log_start} high_watermark={self.high_watermark}."
            )
        if offset == self.high_watermark:
            return len(self.bases)
        return bisect_right(self.bases, offset) - 1

    def end_batch(self, offset: int) -> int:
        """Index after the last batch that starts below `offset`."""
        return bisect_left(self.bases, offset)

    def next_base(self, index: int) -> int:
        return self.bases[index + 1] if index + 1 < len(self.bases) else self.high_watermark

    def ref(self, index: int) -> BatchRef:
        base = self.bases[index]
        return BatchRef(
            object_key=self.object_keys[self.objects[index]],
            first_byte=self.first_bytes[index],
            size_bytes=self.sizes[index],
            base_offset=base,
            record_count=self.next_base(index) - base,
            max_timestamp_ms=self.max_timestamps[index],
        )

    def batch_for_time(self, timestamp_ms: int) -> int | None:
        """Index of the first batch whose max timestamp ≥ timestamp_ms."""
        index = bisect_left(self.highest_timestamps, timestamp_ms)
        return index if index < len(self.bases) else None
