"""Batches of a captured table whose trailer has their rows as columns → commands, without reading the records.

    batches ─► trailers (topics/batch/row_columns.py) ─► groups of texts ─► casts by columns ─► a command table
        └─ no trailer └─ another version, other columns     └─ a text that its column does not hold
                          ─► all these batches are read as records, which find stops and dead letters

Invariant (same commands): a group is read as columns only if its records give the same commands, no stop and no dead
letter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidemill.spark.decode.records import BLOCK_BYTES, BLOCK_RECORDS, Slice, SliceBatches
from tidemill.topics.api import BatchRef
from tidemill.topics.batch.columns_trailer import ColumnsTrailer, read_trailer
from tidemill.topics.batch.row_columns import RowColumns, decode_row_columns


class ColumnBatch(msgspec.Struct, frozen=True):
    """A batch of a slice, with the columns of its trailer. `place`: of the slice, and of the batch in it."""

    place: tuple[int, int]
    slice: Slice
    ref: BatchRef
    trailer: ColumnsTrailer


class ColumnRows(msgspec.Struct, frozen=True):
    """Rows of several batches that are in their slices: the places of their records, and their texts by column."""

    times: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    partitions: npt.NDArray[np.int32]
    live: npt.NDArray[np.bool_]
    texts: dict[str, pa.Array]

    def partitions_at(self, at: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        return self.partitions[at]


def find_column_batches(slices: Sequence[SliceBatches]) -> list[ColumnBatch]:
    """Return the batches with an intact trailer."""
    found: list[ColumnBatch] = []
    for number, (piece, batches, refs) in enumerate(slices):
        for at, (batch, ref) in enumerate(zip(batches, refs, strict=bool(refs))):
            trailer = read_trailer(batch, ref.record_count)
            if trailer is not None:
                found.append(ColumnBatch((number, at), piece, ref, trailer))
    return found


def without_batches(slices: Sequence[SliceBatches], places: Collection[tuple[int, int]]) -> list[SliceBatches]:
    """Return the slices without the batches at these places, the others in order."""
    if not places:
        return list(slices)
    out: list[SliceBatches] = []
    for number, (piece, batches, refs) in enumerate(slices):
        left = [at for at in range(len(batches)) if (number, at) not in places]
        out.append((piece, [batches[at] for at in left], [refs[at] for at in left] if refs else refs))
    return out


def group_column_batches(batches: Sequence[ColumnBatch]) -> Iterator[list[ColumnBatch]]:
    """Yield groups that are decoded together, as large as blocks of records."""
    group: list[ColumnBatch] = []
    records = size = 0
    for each in batches:
        if group and (
            records + each.ref.record_count > BLOCK_RECORDS or size + each.trailer.memory_bytes > BLOCK_BYTES
        ):
            yield group
            group, records, size = [], 0, 0
        group.append(each)
        records, size = records + each.ref.record_count, size + each.trailer.memory_bytes
    if group:
        yield group


def read_column_rows(
    group: Sequence[ColumnBatch], version: int, names: set[str], wanted: Collection[str]
) -> ColumnRows | None:
    """Return the rows of a group, with the `wanted` columns. None: one of its batches has another version, or other
    columns than `names`."""
    decoded: list[RowColumns] = []
    for each in group:
        found = decode_row_columns(each.trailer.columns)
        if (
            found is None
            or found.version != version
            or found.texts.keys() != names
            or len(found.live) != each.ref.record_count
            or found.live.null_count
        ):
            return None
        decoded.append(found)
    offsets = [np.arange(each.ref.record_count, dtype=np.int64) + each.ref.base_offset for each in group]
    inside = [(at >= each.slice.start) & (at < each.slice.end) for each, at in zip(group, offsets, strict=True)]
    times = [each.slice.times_of(at[kept]) for each, at, kept in zip(group, offsets, inside, strict=True)]
    partitions = [np.full(len(at), each.slice.partition, np.int32) for each, at in zip(group, times, strict=True)]
    kept = np.concatenate(inside)
    live = np.concatenate([found.live.to_numpy(zero_copy_only=False) for found in decoded])
    texts = {name: pa.concat_arrays([found.texts[name] for found in decoded]) for name in wanted}
    if not kept.all():
        live, mask = live[kept], pa.array(kept)
        texts = {name: text.filter(mask) for name, text in texts.items()}
    return ColumnRows(np.concatenate(times), np.concatenate(offsets)[kept], np.concatenate(partitions), live, texts)
