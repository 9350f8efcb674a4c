"""Slices of offsets, and record batches cut to a slice: columns of the records in [start, end), each with its time.

A record gets the smallest time whose binding of remap passes its offset. For [lower, upper) there is one slice per
partition:

    base      the binding in force at lower - 1: the offsets covered before
    bindings  those with lower ≤ time < upper, oldest first, contiguous

A batch that cannot be read for any reason is one letter for its range of offsets, at the time of its first offset.
Invariant (one letter per batch): the slice that holds the first offset reports it, so every writer reports it once,
independent of how slices are cut.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from tidemill.base.runtime.tasks import error_sentence, is_fault
from tidemill.objects.store import Buffer
from tidemill.shards.api import Binding
from tidemill.spark.decode.dead_letter_rows import DeadLetter
from tidemill.topics.api import BatchRef
from tidemill.topics.batch import RecordColumns, decode_opened, open_batch, parse_header
from tidemill.topics.batch.decode import OpenedBatch, has_user_records
from tidemill.topics.batch.records import Headers, empty_columns

BLOCK_RECORDS = 20_000
BLOCK_BYTES = 8 << 20
"""A block has at most this many records, and bytes of values (a larger record is a block)."""


class Slice(msgspec.Struct, frozen=True):
    """Offsets [start, end) of one partition; an offset below ends[i] (and not below ends[i-1]) has times[i].

    Both tuples increase strictly; ends[-1] == end. `begins_ms`: the time of the first binding that knows this topic, if
    it is in the interval: the table's contents before that time come from an earlier topic. Else -1.
    """

    topic: str
    topic_id: str
    partition: int
    start: int
    end: int
    ends: tuple[int, ...]
    times: tuple[int, ...]
    begins_ms: int = -1

    def times_of(self, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        at = np.searchsorted(np.array(self.ends, dtype=np.int64), offsets, side="right")
        return np.array(self.times, dtype=np.int64)[at]


class SliceDescriptor(msgspec.Struct, frozen=True):
    """A slice and the positions of its record batches: all that an executor needs apart from the bucket."""

    slice: Slice
    refs: tuple[BatchRef, ...]


def cut_slices(
    base: Binding | None, bindings: Sequence[Binding], topic: str, topic_id: str, *, begins_first: bool = True
) -> list[Slice]:
    """Return the non-empty slices of a topic, by partition; a topic that begins here without records has one empty
    slice.

    `begins_first`: the topic begins here even if no topic was bound before it. For a stream that is false: the contents
    of its table before that time do not come from an earlier topic but were written into it, and stay.
    """
    if not bindings:
        return []
    before = base.offsets.get(topic_id, ()) if base is not None else ()
    known = [b.time_ms for b in bindings if topic_id in b.offsets]
    begins_ms = known[0] if known and not before else -1
    if not begins_first and not any(b.offsets for b in (base, *bindings) if b is not None and b.time_ms < begins_ms):
        begins_ms = -1
    count = max(len(b.offsets.get(topic_id, ())) for b in bindings)
    out = []
    for partition in range(count):
        start = at = before[partition] if partition < len(before) else 0
        ends: list[int] = []
        times: list[int] = []
        for binding in bindings:
            offsets = binding.offsets.get(topic_id, ())
            end = offsets[partition] if partition < len(offsets) else at
            if end > at:
                ends.append(end)
                times.append(binding.time_ms)
                at = end
        if ends:
            out.append(Slice(topic, topic_id, partition, start, at, tuple(ends), tuple(times), begins_ms))
    if begins_ms >= 0 and not out:
        out.append(Slice(topic, topic_id, 0, 0, 0, (0,), (begins_ms,), begins_ms))
    return out


def record_count(slices: Sequence[Slice]) -> int:
    """Return an upper bound of the number of records (compacted topics have gaps)."""
    return sum(s.end - s.start for s in slices)


class Records(msgspec.Struct, frozen=True):
    """Records of one topic with their times, by partition, in offset order. `unread`: letters of whole batches, with or
    without records. `partitions`: the partition of each record if they are of several; then `partition` is arbitrary.
    """

    topic: str
    partition: int
    times: npt.NDArray[np.int64]
    columns: RecordColumns
    unread: tuple[DeadLetter, ...] = ()
    partitions: npt.NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        return self.columns.offsets

    @property
    def keys(self) -> list[bytes | None]:
        return self.columns.keys

    @property
    def values(self) -> list[bytes | None]:
        return self.columns.values

    @property
    def headers(self) -> list[Headers]:
        return self.columns.headers

    def partition_of(self, at: int) -> int:
        return self.partition if self.partitions is None else int(self.partitions[at])

    def partitions_at(self, at: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        if self.partitions is None:
            return np.full(len(at), self.partition, dtype=np.int32)
        return self.partitions[at]

    def by_partition(self) -> list[Records]:
        """Return the records, and the letters, of each partition."""
        if self.partitions is None:
            return [self]
        bounds = [0, *(np.flatnonzero(np.diff(self.partitions)) + 1).tolist(), len(self)]
        out = []
        for first, last in pairwise(bounds):
            partition = int(self.partitions[first])
            letters = tuple(letter for letter in self.unread if letter.partition == partition)
            out.append(Records(self.topic, partition, self.times[first:last], self.columns.select(slice(first, last)),
                letters))  # fmt: skip
        known = {one.partition for one in out}
        for partition in sorted({letter.partition for letter in self.unread} - known):
            letters = tuple(letter for letter in self.unread if letter.partition == partition)
            out.append(Records(self.topic, partition, self.times[:0], empty_columns(), letters))
        return out


SliceBatches = tuple[Slice, Sequence[Buffer], Sequence[BatchRef]]
"""A slice, its record batches, and the references that name their offsets, or ()."""


def cut_blocks(
    slices: Iterable[SliceBatches], *, block_records: int = BLOCK_RECORDS, block_bytes: int = BLOCK_BYTES
) -> Iterator[Records]:
    """Yield the records of the slices of one topic in blocks, by slice in offset order.

    A block may hold records of several slices: decoding costs the same for one record and for hundreds, and a small
    step has a few records of each partition.
    """
    unread: list[DeadLetter] = []
    runs: deque[tuple[Slice, int]] = deque()
    """Slice and number of records of each batch that was opened and not yet decoded."""
    last_slice: Slice | None = None
    for found in decode_opened(_open_all(slices, unread, runs)):
        if isinstance(found, tuple):
            opened, bad = found
            last_slice, _ = runs.popleft()
            unread += _unreadable_batch_letters(last_slice, opened.batch, bad.base_offset, bad.last_offset, bad)
            continue
        pieces = _take_runs(runs, len(found))
        last_slice = pieces[-1][0]
        columns, times, partitions = _cut_columns(found, pieces)
        for first, last in _block_ranges(columns, block_records, block_bytes):
            some = partitions[first:last]
            one = bool((some == some[0]).all())
            yield Records(
                last_slice.topic, int(some[0]), times[first:last], columns.select(slice(first, last)), tuple(unread),
                None if one else some,
            )  # fmt: skip
            unread.clear()
    if unread:
        letter = unread[0]
        none = np.zeros(0, dtype=np.int64)
        yield Records(letter.topic, letter.partition, none, empty_columns(), tuple(unread))


def _open_all(
    slices: Iterable[SliceBatches], unread: list[DeadLetter], runs: deque[tuple[Slice, int]]
) -> Iterator[OpenedBatch]:
    for piece, batches, refs in slices:
        for opened in _open_batches(piece, batches, refs, unread):
            runs.append((piece, opened.header.record_count))
            yield opened


def _take_runs(runs: deque[tuple[Slice, int]], count: int) -> list[tuple[Slice, int, int]]:
    """Take the batches of the next `count` records; return (slice, first, last) of the records of each slice."""
    out: list[tuple[Slice, int, int]] = []
    at = 0
    while True:  # a batch without records is decoded alone
        piece, records = runs.popleft()
        if out and out[-1][0] is piece:
            out[-1] = (piece, out[-1][1], at + records)
        else:
            out.append((piece, at, at + records))
        at += records
        if at >= count:
            return out


def _cut_columns(
    found: RecordColumns, pieces: Sequence[tuple[Slice, int, int]]
) -> tuple[RecordColumns, npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Return the records that are in their slices, with their times and partitions."""
    inside = np.empty(len(found), dtype=bool)
    times = np.empty(len(found), dtype=np.int64)
    partitions = np.empty(len(found), dtype=np.int32)
    for piece, first, last in pieces:
        offsets = found.offsets[first:last]
        inside[first:last] = (offsets >= piece.start) & (offsets < piece.end)
        times[first:last] = piece.times_of(np.clip(offsets, piece.start, piece.end - 1))
        partitions[first:last] = piece.partition
    if inside.all():
        return found, times, partitions
    kept = np.flatnonzero(inside)
    return found.select(kept), times[kept], partitions[kept]


def _open_batches(
    piece: Slice, batches: Sequence[Buffer], refs: Sequence[BatchRef], unread: list[DeadLetter]
) -> Iterator[OpenedBatch]:
    """Yield the opened batches that hold user records; letters of batches that cannot be opened are added to
    `unread`."""
    for number, batch in enumerate(batches):
        ref = refs[number] if refs else None
        try:
            opened = open_batch(batch, ref)
        except BaseException as error:
            if not is_fault(error):
                raise
            unread += _unreadable_batch_letters(piece, batch, *_offset_range(batch, ref), error)
        else:
            if has_user_records(opened.header, ref):
                yield opened


def _block_ranges(columns: RecordColumns, records: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of at most `records` records, and at most `size` bytes of values unless it is a single record."""
    ends = np.cumsum(np.maximum(columns.value_bytes, 0))
    first, before = 0, 0
    while first < len(columns):
        reached = int(np.searchsorted(ends, before + size, side="right"))
        last = min(len(columns), first + records, max(reached, first + 1))
        yield first, last
        first, before = last, int(ends[last - 1])


def _offset_range(batch: Buffer, ref: BatchRef | None) -> tuple[int, int]:
    """Return the first and last offset, inclusive."""
    if ref is not None:
        return ref.base_offset, ref.base_offset + ref.record_count - 1
    header = parse_header(batch)
    return header.base_offset, header.base_offset + max(1, header.record_count) - 1


def _unreadable_batch_letters(
    piece: Slice, batch: Buffer, base: int, last: int, error: BaseException
) -> list[DeadLetter]:
    if not piece.start <= base < piece.end:
        return []
    time_ms = int(piece.times_of(np.array([base], dtype=np.int64))[0])
    reason = f"batch of {last - base + 1} records cannot be read: {error_sentence(error)}"
    return [DeadLetter(piece.topic, piece.partition, base, last, time_ms, reason, bytes(batch[:4096]))]
