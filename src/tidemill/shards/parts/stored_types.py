"""Types of a part's file, where they differ from those in memory, so that every Parquet reader can read the file.

    all columns      with field ids (shards/nested/field_ids.py), also those within nested ones
    int16            stored as int32, also within nested values: some engines have no smaller integer
    `_hash` uint64   stored as int64, less 2^63: some engines refuse unsigned integers, also in columns that are not
                     read. The difference keeps the order, so the file stays sorted and its statistics compare

Parts of earlier versions store the types in memory. Every function here reads either form.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidemill.shards.api import DIFF, HASH, TIME, ShardSchema
from tidemill.shards.nested.field_ids import DIFF_ID, FIRST_ID, HASH_ID, TIME_ID, ids_within, with_field_ids
from tidemill.shards.nested.values import inner_fields, map_leaf_types
from tidemill.shards.parts.schema import part_schema

Hashes = npt.NDArray[np.uint64]

_SIGN = np.uint64(1 << 63)


@lru_cache(maxsize=256)
def stored_schema(schema: ShardSchema) -> pa.Schema:
    """Return the Arrow schema of a new part's file."""
    return file_schema(part_schema(schema), schema)


def file_schema(rows: pa.Schema, schema: ShardSchema) -> pa.Schema:
    """Return the Arrow schema of a file with these columns of a table, with field ids: some readers of Iceberg find
    columns only by them.
    """
    places = {column.name: at for at, column in enumerate(schema.columns)}
    of_file = {HASH: HASH_ID, TIME: TIME_ID, DIFF: DIFF_ID}
    return pa.schema(
        [
            with_field_ids(field, FIRST_ID + place, ids_within(place))
            if (place := places.get(field.name, -1)) >= 0
            else with_field_ids(field, of_file[field.name], iter(()))
            for field in map(stored_field, rows)
        ]
    )


def stored_field(field: pa.Field) -> pa.Field:
    """Return a column of rows in memory as a file has it."""
    if field.name == HASH:
        return field.with_type(pa.int64())
    return field.with_type(_stored_type(field.type))


def _stored_type(kind: pa.DataType) -> pa.DataType:
    return map_leaf_types(kind, lambda leaf: pa.int32() if leaf == pa.int16() else leaf)


def stored_rows(schema: ShardSchema, updates: pa.Table, hashes: Hashes) -> pa.Table:
    """Return updates and their hashes as the file stores them. The cast to a wider integer is exact."""
    target = stored_schema(schema)
    columns = [
        each if each.type == field.type else pc.cast(each, field.type)
        for each, field in zip(updates.columns, target, strict=False)
    ]
    return pa.Table.from_arrays([*columns, pa.array((hashes ^ _SIGN).view(np.int64))], schema=target)


def hashes_of(column: pa.ChunkedArray) -> Hashes:
    """Return the hashes of the column `_hash` of a file, or of rows in memory."""
    values = column.to_numpy()
    return np.asarray(values) if column.type == pa.uint64() else np.asarray(values).view(np.uint64) ^ _SIGN


def hash_bounds(file: pq.ParquetFile, group: int) -> tuple[int, int] | None:
    """Return the least and greatest hash of a row group from the footer, or None."""
    columns = file.schema_arrow
    statistics = file.metadata.row_group(group).column(chunk_places(columns)[HASH].start).statistics
    return bounds_of_hashes(statistics, columns.field(HASH).type)


def chunk_places(columns: pa.Schema) -> dict[str, range]:
    """Return the places in a row group of each column's chunks: one, or one for each leaf of a nested column."""
    places: dict[str, range] = {}
    end = 0
    for field in columns:
        places[field.name] = range(end, end := end + _leaf_count(field.type))
    return places


def _leaf_count(kind: pa.DataType) -> int:
    return sum(_leaf_count(field.type) for field in inner_fields(kind)) or 1


def leaf_paths(columns: pa.Schema) -> dict[str, list[str]]:
    """Return the paths in Parquet of each column's leaves, in the order of `chunk_places`."""
    return {field.name: list(_paths_within(field.type, field.name)) for field in columns}


def _paths_within(kind: pa.DataType, path: str) -> Iterator[str]:
    if not pa.types.is_nested(kind):
        yield path
        return
    group = ".list" if pa.types.is_list(kind) else ".key_value" if pa.types.is_map(kind) else ""
    for field in inner_fields(kind):
        yield from _paths_within(field.type, f"{path}{group}.{field.name}")


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
    if column.type != wanted and column.type == _stored_type(wanted):
        return pc.cast(column, wanted)
    return column
