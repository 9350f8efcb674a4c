"""Staging: store the rows of a task, sorted by hash, in chunks that a commit reads by hash range.

    object   chunk ‖ chunk ‖ …    each an Arrow IPC stream, lz4: the DataFrame's columns, `_live` bool, `_hash` uint64;
                                  followed by its CRC32C

A chunk holds the rows of one of `count` equal hash ranges. `count` is a power of two, so ranges nest: a reader of a
range of any size reads only the bytes of an object that it needs. Small chunks are inlined in the message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
import numpy as np
import pyarrow as pa

from tidemill.base.errors import CorruptError, InvalidError
from tidemill.base.limits import INLINE_PART_BYTES, MIB
from tidemill.shards.api import HASH
from tidemill.shards.parts.arrow_rows import Index, combine_columns, rows_at, to_mask
from tidemill.shards.parts.checksums import seal_bytes, unseal_bytes
from tidemill.shards.parts.row_hash import bucket_of, hash_rows
from tidemill.shards.parts.schema import conform_rows, contents_schema
from tidemill.spark.merge.commands import LIVE
from tidemill.spark.merge.range_mirror import HashRange
from tidemill.spark.write.schema_match import WriteFrame

STAGE_ROWS = 256 << 10
STAGE_BYTES = 32 * MIB
"""A task buffers at most this many rows, or this many bytes of them, before it stages them."""
CHUNK_ROWS = 4 << 10
CHUNKS_MAX = 64

Put = Callable[[bytes], str]
"""Store an object and return its key."""
Get = Callable[[str, int, int], bytes]
"""Read bytes [start, end) of an object."""


class Staged(msgspec.Struct, frozen=True, array_like=True):
    """Rows of a task that are staged. `ends[i]` is the end of chunk i, the ith of len(ends) equal hash ranges; a chunk
    starts where the one before ends."""

    rows: int
    size_bytes: int
    """Size of the rows in memory."""
    object_key: str
    inline: bytes
    ends: tuple[int, ...]


def stage_rows(frame: WriteFrame, batches: Iterable[pa.RecordBatch], put: Put) -> Iterator[Staged]:
    """Stage all rows of one task. Raises InvalidError (a null in the key, or a row without all columns that is not a
    deletion), and as `put`."""
    held: list[pa.RecordBatch] = []
    rows = size_bytes = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        held.append(batch)
        rows, size_bytes = rows + batch.num_rows, size_bytes + batch.nbytes
        if rows >= STAGE_ROWS or size_bytes >= STAGE_BYTES:
            yield _stage_chunk(frame, held, put)
            held, rows, size_bytes = [], 0, 0
    if held:
        yield _stage_chunk(frame, held, put)


def read_staged_rows(frame: WriteFrame, staged: Sequence[Staged], part: HashRange, get: Get) -> pa.Table:
    """Return all rows of one hash range (`part.count` is a power of two), sorted by hash within each chunk.

    Raises CorruptError, and as `get`.
    """
    found = [staged_schema(frame).empty_table()]
    for one in staged:
        count = len(one.ends)
        fine = count >= part.count
        first = part.number * count // part.count
        after = first + (count // part.count if fine else 1)
        start, end = (one.ends[first - 1] if first else 0), one.ends[after - 1]
        if start == end:
            continue
        data = one.inline[start:end] if one.inline else get(one.object_key, start, end)
        bounds = [e - start for e in one.ends[first:after]]
        for begin, until in zip([0, *bounds], bounds, strict=False):
            if begin < until:
                rows = _decode_chunk(data[begin:until], one)
                found.append(rows if fine else rows.filter(part.mask(rows.column(HASH).to_numpy())))
    return pa.concat_tables(found)


def staged_schema(frame: WriteFrame) -> pa.Schema:
    return contents_schema(frame.stored).append(pa.field(LIVE, pa.bool_())).append(pa.field(HASH, pa.uint64()))


def _stage_chunk(frame: WriteFrame, batches: Sequence[pa.RecordBatch], put: Put) -> Staged:
    given = pa.Table.from_batches(batches)
    size_bytes = given.nbytes
    rows = combine_columns(conform_rows(given, contents_schema(frame.stored)))
    for name in frame.key:
        if rows.column(name).null_count:
            raise InvalidError(
                f"a key column is null: table={frame.shard} column={name}.",
                fix="Filter out such rows, or provide a value.",
            )
    live = ~to_mask(given.column(frame.delete)) if frame.delete else np.ones(rows.num_rows, dtype=bool)
    if frame.keys_only and live.any():
        raise InvalidError(
            f"a row that is not a deletion lacks columns: table={frame.shard} delete={frame.delete}.",
            fix="Provide every column of the table, or only rows to delete.",
        )
    hashes = hash_rows(rows, frame.key)
    order: Index = np.argsort(hashes)
    target = staged_schema(frame)
    arrays = [*rows.columns, pa.array(live), pa.array(hashes)]
    ordered = rows_at(pa.Table.from_arrays(arrays, schema=target), order)
    count = _chunk_count(rows.num_rows)
    cuts = np.searchsorted(bucket_of(hashes[order], count), np.arange(count + 1)).tolist()
    data = bytearray()
    ends: list[int] = []
    for at in range(count):
        if cuts[at] < cuts[at + 1]:
            data += _encode_chunk(ordered.slice(cuts[at], cuts[at + 1] - cuts[at]))
        ends.append(len(data))
    inline = len(data) <= INLINE_PART_BYTES
    key = "" if inline else put(bytes(data))
    return Staged(rows.num_rows, size_bytes, key, bytes(data) if inline else b"", tuple(ends))


def _chunk_count(rows: int) -> int:
    return int(min(CHUNKS_MAX, 1 << max(0, (rows // CHUNK_ROWS).bit_length() - 1)))


def _encode_chunk(rows: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(rows)
    return seal_bytes(sink.getvalue())


def _decode_chunk(data: bytes, staged: Staged) -> pa.Table:
    where = f"object={staged.object_key or 'inline'}"
    body = unseal_bytes(data, f"staged chunk: {where}")
    try:
        return pa.ipc.open_stream(pa.py_buffer(body)).read_all()
    except (pa.ArrowException, OSError) as error:
        raise CorruptError(f"staged rows are unreadable: {where} ({error}).") from error
