"""Types of a part's file, where they differ from those in memory, so that every Parquet reader can read the file.

    int16            stored as int32: some engines have no smaller integer
    `_hash` uint64   stored as int64, less 2^63: some engines refuse unsigned integers, also in columns that are not
                     read. The difference keeps the order, so the file stays sorted and its statistics compare

Parts of earlier versions store the types in memory. Every function here reads either form.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidemill.shards.api import HASH, ShardSchema
from tidemill.shards.parts.schema import part_schema

Hashes = npt.NDArray[np.uint64]

_SIGN = np.uint64(1 << 63)


@lru_cache(maxsize=256)
def stored_schema(schema: ShardSchema) -> pa.Schema:
    """Return the Arrow schema of a new part's file."""
    return pa.schema([stored_field(field) for field in part_schema(schema)])


def stored_field(field: pa.Field) -> pa.Field:
    """Return a column of rows in memory as a file has it."""
    if field.name == HASH:
        return field.with_type(pa.int64())
    return field.with_type(pa.int32()) if field.type == pa.int16() else field


def stored_rows(schema: ShardSchema, updates: pa.Table, hashes: Hashes) -> pa.Table:
    """Return updates and their hashes as the file stores them. The cast to a wider integer is exact."""
    target = stored_schema(schema)
    columns = [pc.cast(each, field.type) for each, field in zip(updates.columns, target, strict=False)]
    return pa.Table.from_arrays([*columns, pa.array((hashes ^ _SIGN).view(np.int64))], schema=target)


def hashes_of(column: pa.ChunkedArray) -> Hashes:
    """Return the hashes of the column `_hash` of a file, or of rows in memory."""
    values = column.to_numpy()
    return np.asarray(values) if column.type == pa.uint64() else np.asarray(values).view(np.uint64) ^ _SIGN


def hash_bounds(file: pq.ParquetFile, group: int) -> tuple[int, int] | None:
    """Return the least and greatest hash of a row group from the footer, or None."""
    place = file.schema_arrow.get_field_index(HASH)
    statistics = file.metadata.row_group(group).column(place).statistics
    return bounds_of_hashes(statistics, file.schema_arrow.field(place).type)


def bounds_of_hashes(statistics: Any, stored: pa.DataType) -> tuple[int, int] | None:
    """Return the least and greatest hash by the statistics of the column `_hash`, which is stored with this type."""
    if statistics is None or not statistics.has_min_max:
        return None
    shift = 0 if stored == pa.uint64() else 1 << 63
    return int(statistics.min) + shift, int(statistics.max) + shift


def has_types_of(stored: pa.Schema, schema: ShardSchema) -> bool:
    """Return whether a file has exactly the columns of this version of the schema, in either form."""
    return bool(stored.equals(stored_schema(schema)) or stored.equals(part_schema(schema)))


def restored_rows(rows: pa.Table, target: pa.Schema) -> pa.Table:
    """Return rows of a file with the types of `target`, which has their columns. Raises pa.ArrowInvalid."""
    if rows.schema.equals(target):
        return rows
    columns = [restored_column(field.name, rows.column(field.name), field.type) for field in target]
    return pa.Table.from_arrays(columns, schema=target)


def restored_column(name: str, column: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray:
    """Return a column of a file in its type in memory, and other columns unchanged.

    Raises pa.ArrowInvalid for a number that `wanted` cannot hold.
    """
    if name == HASH and column.type == pa.int64():
        return pa.chunked_array([pa.array(hashes_of(column))])
    if wanted == pa.int16() and column.type == pa.int32():
        return pc.cast(column, wanted)
    return column
