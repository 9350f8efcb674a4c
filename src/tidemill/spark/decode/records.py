"""Record batches cut to a slice: parallel columns of what lies in [start, end), each record with its time.

A batch that cannot be read, for whatever reason, is one letter for its range of offsets, at the time of its first
one: told by the slice that holds this first offset, whatever the slices, so that every writer tells it once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tidemill.base.tasks import is_fault, sentence
from tidemill.objects.store import Buffer
from tidemill.spark.decode.letters import Letter
from tidemill.spark.decode.slices import Slice
from tidemill.topics.batch import decode_columns
from tidemill.topics.batch.decode import Columns
from tidemill.topics.batch.header import parse_header
from tidemill.topics.front import BatchRef, CorruptBatch

CONTROL_BATCH = 0x20
"""Attribute bit of transaction markers (Kafka protocol, record batch): no user records inside."""

BLOCK_RECORDS = 20_000
BLOCK_BYTES = 8 << 20
"""Records are turned into columns in blocks of at most this much (a record larger than that is a block): Python
objects of a whole step at once were most of the memory of catching up."""

Headers = tuple[tuple[str, bytes | None], ...]


class Records(msgspec.Struct, frozen=True):
    """`unread`: letters of whole batches; with records beside them or alone."""

    topic: str
    partition: int
    offsets: npt.NDArray[np.int64]
    times: npt.NDArray[np.int64]
    keys: list[bytes | None]
    values: list[bytes | None]
    headers: list[Headers]
    unread: tuple[Letter, ...] = ()

    def __len__(self) -> int:
        return len(self.values)


def blocks_of(
    piece: Slice,
    batches: Sequence[Buffer],
    refs: Sequence[BatchRef] = (),
    *,
    block_records: int = BLOCK_RECORDS,
    block_bytes: int = BLOCK_BYTES,
) -> Iterator[Records]:
    """The records of the slice in blocks, in offset order. `refs[i]` says which offsets `batches[i]` has."""
    held = _Gathered()
    for number, batch in enumerate(batches):
        ref = refs[number] if refs else None
        try:
            columns, first, last = _read(piece, batch, ref)
        except BaseException as error:
            if not is_fault(error):
                raise
            held.unread += _unread(piece, batch, ref, error)
            continue
        while first < last:
            first = held.take(columns, first, last, block_records, block_bytes)
            if held.full(block_records, block_bytes):
                yield _block(piece, held)
                held = _Gathered()
    if held.offsets or held.unread:
        yield _block(piece, held)


class _Gathered:
    def __init__(self) -> None:
        self.offsets: list[int] = []
        self.keys: list[bytes | None] = []
        self.values: list[bytes | None] = []
        self.headers: list[Headers] = []
        self.unread: list[Letter] = []
        self.bytes = 0

    def full(self, records: int, size: int) -> bool:
        return len(self.offsets) >= records or self.bytes >= size

    def take(self, columns: Columns, first: int, last: int, records: int, size: int) -> int:
        """Take from `first` on until the block is full; where it stopped."""
        last = min(last, first + max(1, records - len(self.offsets)))
        sizes = [len(v) if v is not None else 0 for v in columns.values[first:last]]
        if self.bytes + sum(sizes) > size:
            reached = np.searchsorted(np.cumsum(sizes), size - self.bytes)
            last = first + min(len(sizes), int(reached) + 1)
            sizes = sizes[: last - first]
        self.bytes += sum(sizes)
        self.offsets += columns.offsets[first:last]
        self.keys += columns.keys[first:last]
        self.values += columns.values[first:last]
        self.headers += columns.headers[first:last]
        return last


def _block(piece: Slice, held: _Gathered) -> Records:
    positions = np.array(held.offsets, dtype=np.int64)
    times = piece.times_of(positions)
    return Records(
        piece.topic, piece.partition, positions, times, held.keys, held.values, held.headers, tuple(held.unread)
    )


def _read(piece: Slice, batch: Buffer, ref: BatchRef | None) -> tuple[Columns, int, int]:
    """The batch's columns and which of its records are in the slice. Raises for a batch that is not what it says."""
    header, columns = decode_columns(batch)
    if header.attributes & CONTROL_BATCH:
        return columns, 0, 0
    if not columns.offsets:
        return columns, 0, 0
    offsets = np.array(columns.offsets, dtype=np.int64)
    base, count = header.base_offset, ref.record_count if ref is not None else header.record_count
    if offsets[0] < base or offsets[-1] >= base + count or (np.diff(offsets) <= 0).any():
        raise CorruptBatch(f"offsets of records are not those of their batch: base_offset={base} records={count}.")
    first, last = 0, len(offsets)
    if offsets[0] < piece.start or offsets[-1] >= piece.end:
        first = int(np.searchsorted(offsets, piece.start))
        last = int(np.searchsorted(offsets, piece.end))
    return columns, first, last


def _unread(piece: Slice, batch: Buffer, ref: BatchRef | None, error: BaseException) -> list[Letter]:
    if ref is not None:
        base, count = ref.base_offset, ref.record_count
    else:
        header = parse_header(batch)
        base, count = header.base_offset, max(1, header.record_count)
    if not piece.start <= base < piece.end:
        return []
    time_ms = int(piece.times_of(np.array([base], dtype=np.int64))[0])
    reason = f"batch of {count} records cannot be read: {sentence(error)}"
    return [Letter(piece.topic, piece.partition, base, base + count - 1, time_ms, reason, bytes(batch[:4096]))]
