"""Record batches cut to a slice: columns of the records in [start, end), each with its time.

A batch that cannot be read for any reason is one letter for its range of offsets, at the time of its first offset.
Invariant (one letter per batch): the slice that holds the first offset reports it, so every writer reports it once,
independent of how slices are cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tidemill.base.runtime.tasks import error_sentence, is_fault
from tidemill.objects.store import Buffer
from tidemill.spark.decode.dead_letter_rows import DeadLetter
from tidemill.spark.decode.offset_slices import Slice
from tidemill.topics.api import BatchRef
from tidemill.topics.batch import RecordColumns, decode_opened, open_batch, parse_header
from tidemill.topics.batch.columns import empty_columns
from tidemill.topics.batch.decode import OpenedBatch, has_user_records
from tidemill.topics.batch.records import Headers

BLOCK_RECORDS = 20_000
BLOCK_BYTES = 8 << 20
"""A block has at most this many records, and bytes of values (a larger record is a block)."""


class Records(msgspec.Struct, frozen=True):
    """Records of a slice with their times. `unread`: letters of whole batches, with or without records."""

    topic: str
    partition: int
    times: npt.NDArray[np.int64]
    columns: RecordColumns
    unread: tuple[DeadLetter, ...] = ()

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


def cut_blocks(
    piece: Slice,
    batches: Sequence[Buffer],
    refs: Sequence[BatchRef] = (),
    *,
    block_records: int = BLOCK_RECORDS,
    block_bytes: int = BLOCK_BYTES,
) -> Iterator[Records]:
    """Yield the records of the slice in blocks, in offset order. `refs[i]` names the offsets of `batches[i]`."""
    unread: list[DeadLetter] = []
    for found in decode_opened(_open_batches(piece, batches, refs, unread)):
        if isinstance(found, tuple):
            opened, bad = found
            unread += _unreadable_batch_letters(piece, opened.batch, bad.base_offset, bad.last_offset, bad)
            continue
        inside = np.flatnonzero((found.offsets >= piece.start) & (found.offsets < piece.end))
        columns = found if len(inside) == len(found) else found.select(inside)
        for first, last in _block_ranges(columns, block_records, block_bytes):
            yield _block(piece, columns.select(slice(first, last)), unread)
    if unread:
        yield _block(piece, empty_columns(), unread)


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


def _block(piece: Slice, columns: RecordColumns, unread: list[DeadLetter]) -> Records:
    """Return a block with the letters so far, each of which is reported once."""
    told = tuple(unread)
    unread.clear()
    return Records(piece.topic, piece.partition, piece.times_of(columns.offsets), columns, told)


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
