"""Parts: immutable Parquet runs of updates, sorted by (`_hash`, `_time`, `_diff`).

Types of the file are those of `stored_types`. Sorted by hash, so that readers that mirror a shard merge runs without
sorting; by time and diff within one hash, so that a key's history reads in order and its retraction precedes its
insertion. Fresh parts are lz4 (written once, read
soon), merged ones zstd (half the bytes). A part of at most INLINE_PART_BYTES is stored inside the log record instead of
an object.

An object to which no batch refers is an orphan. Its key contains when it was written, and maintenance sweeps it by age.
Nothing here deletes objects.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidemill.base.clock import Rand
from tidemill.base.errors import CorruptError, InvalidError
from tidemill.base.limits import INLINE_PART_BYTES, MIB
from tidemill.objects.store import ObjectStore
from tidemill.shards.api import DIFF, HASH, TIME, Part, RunCpuWork, ShardSchema, part_key, run_inline
from tidemill.shards.parts.arrow_rows import cut_positions, row_sizes, rows_at
from tidemill.shards.parts.checksums import checksums_of, open_part
from tidemill.shards.parts.row_hash import hash_rows
from tidemill.shards.parts.schema import FLOATS, conform_rows, hash_columns, part_schema, update_schema
from tidemill.shards.parts.schema_evolution import convert_to_schema
from tidemill.shards.parts.stored_types import leaf_paths, stored_rows

Codec = Literal["lz4", "zstd"]

ROW_GROUP_ROWS = 128 << 10
ROW_GROUP_BYTES = 32 * MIB
"""Limits of a row group: its rows, and their bytes in memory (unless it is a single row).

A read of one hash range decodes at least one row group. Encoded bytes would be no bound: a repeated long text takes few
of them.
"""


class EncodedPart:
    """One encoded part, not yet stored. `data` is a readable buffer."""

    __slots__ = ("data", "max_hash", "min_hash", "rows", "sums")

    def __init__(self, data: pa.Buffer, rows: int, min_hash: int, max_hash: int) -> None:
        self.data, self.rows, self.min_hash, self.max_hash = data, rows, min_hash, max_hash
        self.sums = checksums_of(data)

    def to_part(self, bucket: int = 0, object_key: str = "") -> Part:
        """Return the part as its shard's state refers to it; without a key it contains the bytes."""
        inline = b"" if object_key else self.data.to_pybytes()
        return Part(self.rows, self.data.size, bucket, object_key, inline, self.min_hash, self.max_hash, *self.sums)


def sort_updates(rows: pa.Table, hashes: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, Any] | None:
    """Return the row order by (hash, _time, _diff), or None if the rows are sorted. Usually one stable sort."""
    times = rows.column(TIME).to_numpy()
    diffs = rows.column(DIFF).to_numpy()
    if _is_ordered(hashes, times, diffs):
        return None
    order = np.argsort(hashes, kind="stable")
    if _is_ordered(hashes[order], times[order], diffs[order]):
        return order
    return np.lexsort((diffs, times, hashes))


def _is_ordered(hashes: Any, times: Any, diffs: Any) -> bool:
    if len(hashes) < 2:
        return True
    if not bool((hashes[1:] >= hashes[:-1]).all()):
        return False
    same = hashes[1:] == hashes[:-1]
    if not same.any():
        return True
    at = np.nonzero(same)[0]
    before, after = times[at], times[at + 1]
    return bool(((before < after) | ((before == after) & (diffs[at] <= diffs[at + 1]))).all())


def encode_part(schema: ShardSchema, rows: pa.Table, codec: Codec = "lz4") -> EncodedPart:
    """Sort and encode updates (columns, `_time`, `_diff`; a `_hash` column is recomputed). Raises InvalidError."""
    if rows.num_rows == 0:
        raise InvalidError("a part needs at least one row.", fix="Append without parts to publish progress.")
    updates = conform_rows(rows, update_schema(schema))
    if updates.column(TIME).null_count or updates.column(DIFF).null_count:
        raise InvalidError(f"{TIME} and {DIFF} may not be null.", fix="Give every update a time and a diff.")
    hashes = hash_rows(updates, hash_columns(schema))
    order = sort_updates(updates, hashes)
    if order is not None:
        updates = rows_at(updates, order)
        hashes = hashes[order]
    table = stored_rows(schema, updates, hashes)
    sink = pa.BufferOutputStream()
    few = table.num_rows <= ROW_GROUP_ROWS and table.get_total_buffer_size() <= ROW_GROUP_BYTES
    cuts = [0, table.num_rows] if few else cut_positions(row_sizes(table), ROW_GROUP_BYTES, ROW_GROUP_ROWS)
    # Float statistics exclude NaN, which most engines order as the greatest value when they skip row groups by them.
    compared = [c.name for c in schema.columns if c.name in schema.key and c.type not in FLOATS]
    with pq.ParquetWriter(
        sink,
        table.schema,
        compression=codec,
        # Fresh keys and values rarely repeat enough to pay for a dictionary; times and diffs always do.
        use_dictionary=[TIME, DIFF] if codec == "lz4" else _repeating_columns(schema, table.schema),
        column_encoding=None if codec == "lz4" else {HASH: "DELTA_BINARY_PACKED"},
        write_statistics=[TIME, DIFF, HASH, *compared],
        store_schema=False,  # the types follow from the Parquet schema; Arrow's takes a kilobyte of each part
        write_page_checksum=True,
    ) as writer:
        for start, end in pairwise(cuts):
            writer.write_table(table.slice(start, end - start), row_group_size=end - start)
    return EncodedPart(sink.getvalue(), table.num_rows, int(hashes[0]), int(hashes[-1]))


def _repeating_columns(schema: ShardSchema, columns: pa.Schema) -> list[str]:
    """Return the leaves of a merged part for which a dictionary is tried.

    Hashes, and the values of a key of one column, do not repeat: a dictionary of them is built, found too large, and
    dropped. Hashes are sorted, so their differences are smaller than they are (`./dev bench merge` and `scan_python`).
    """
    distinct = {HASH, *(schema.key if len(schema.key) == 1 else ())}
    return [path for name, paths in leaf_paths(columns).items() if name not in distinct for path in paths]


def decode_part(schema: ShardSchema, data: Any, part: Part) -> pa.Table:
    """Return the rows of a part under `schema`, with `_time`, `_diff`, `_hash`, in stored order.

    Raises CorruptError.
    """
    where = part.object_key or "inline"
    try:
        # Not read_table: it imports Arrow's data sets and pandas, which takes a second at process start.
        table = open_part(part, data).read(use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise CorruptError(f"part is unreadable: object={where} ({error}).") from error
    if table.num_rows != part.rows:
        raise CorruptError(f"part has another number of rows: object={where} rows={table.num_rows} want={part.rows}.")
    return convert_to_schema(schema, table, part_schema(schema))


def rows_within(rows: pa.Table, lower: int, upper: int) -> pa.Table:
    """Return the rows with lower ≤ `_time` < upper; the same table if all are."""
    if rows.num_rows == 0:
        return rows
    times = rows.column(TIME)
    bounds = pc.min_max(times).as_py()
    if lower <= bounds["min"] and bounds["max"] < upper:
        return rows
    return rows.filter(pc.and_(pc.greater_equal(times, lower), pc.less(times, upper)))


class PartTarget(msgspec.Struct, frozen=True):
    """Place and form of a new part. `now_ms` becomes part of its key: a part appended hours later may have been swept
    as an orphan, and is rejected. A part of at most `inline_bytes` becomes part of the state instead of an object.
    """

    shard_id: str
    writer: str
    now_ms: int
    bucket: int = 0
    codec: Codec = "lz4"
    inline_bytes: int = INLINE_PART_BYTES


async def store_part(
    objects: ObjectStore,
    schema: ShardSchema,
    rows: pa.Table,
    target: PartTarget,
    rand: Rand,
    *,
    cpu: RunCpuWork = run_inline,
) -> Part:
    """Encode and store updates. Nothing refers to the part until it is appended.

    Needs no shard handle, so executors call it with only the bucket's credentials. Raises InvalidError,
    UnavailableError, UnknownOutcomeError (the object may exist, as an orphan: write again, under a new key).
    """
    encoded = await cpu(lambda: encode_part(schema, rows, target.codec))
    size = encoded.data.size
    if size <= min(target.inline_bytes, INLINE_PART_BYTES):
        return encoded.to_part(target.bucket)
    key = part_key(target.shard_id, target.writer, target.now_ms, rand.nonce())
    await objects.put(key, memoryview(encoded.data))
    return encoded.to_part(target.bucket, key)
