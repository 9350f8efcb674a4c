"""Ranks of sequences: tuples of column values as integers with the same order. Pure.

numbers, dates, timestamps   by value; -0.0 equals 0.0, and NaN equals itself and is the greatest, as in Spark
string, binary               by their bytes; for UTF-8 that is by code point
several columns              by the first that differs

A sequence with a null has no rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.shards.parts.arrow_rows import Index, Mask, rows_at, to_mask

NO_RANK = -1
ORDERED_TYPES = frozenset(
    {"bool", "int16", "int32", "int64", "float32", "float64", "date", "timestamp", "timestamp_ntz", "string", "binary"}
)


def is_ordered(type_name: str) -> bool:
    """Return whether values of a type of a shard's column can be ordered."""
    return type_name in ORDERED_TYPES or type_name.startswith("decimal")


def rank_rows(rows: pa.Table, columns: Sequence[str]) -> Index:
    """Return dense ranks from 0 of the rows by these columns; NO_RANK for rows with a null."""
    nulls = np.zeros(rows.num_rows, dtype=bool)
    ranks = np.zeros(rows.num_rows, dtype=np.int64)
    for number, name in enumerate(columns):
        array = rows.column(name)
        array = array.chunk(0) if array.num_chunks == 1 else pa.concat_arrays([pa.nulls(0, array.type), *array.chunks])
        missing = to_mask(array.is_null())
        nulls |= missing
        found = _dense(_sort_keys(array, missing))
        ranks = found if number == 0 else _dense(ranks * (int(found.max(initial=0)) + 1) + found)
    ranks[nulls] = NO_RANK
    return ranks


def comparable_sequences(rows: pa.Table, at: Index, columns: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return the sequences of some rows, none of which has a null, as tuples that compare as their ranks do. For slow
    paths."""
    values = [rows_at(rows.select([name]), at).column(0).to_pylist() for name in columns]
    return [tuple(_comparable(value) for value in each) for each in zip(*values, strict=True)]


def _comparable(value: Any) -> Any:
    return (math.isnan(value), 0.0 if math.isnan(value) else value) if isinstance(value, float) else value


def _dense(values: Index) -> Index:
    return np.unique(values, return_inverse=True)[1].astype(np.int64).reshape(-1)


def _sort_keys(array: pa.Array, missing: Mask) -> Index:
    """Return integers with the order of the values; any for a null."""
    kind = array.type
    if pa.types.is_floating(kind):
        return _float_keys(np.asarray(array.cast(pa.float64()).fill_null(0.0).to_numpy(zero_copy_only=False)))
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return np.asarray(array.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False), dtype=np.int64)
    if pa.types.is_date32(kind):
        return np.asarray(array.view(pa.int32()).fill_null(0).to_numpy(zero_copy_only=False), dtype=np.int64)
    if pa.types.is_timestamp(kind):
        return np.asarray(array.view(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False), dtype=np.int64)
    ranks = pc.rank(array, sort_keys="ascending", tiebreaker="dense")
    return np.asarray(ranks.to_numpy(zero_copy_only=False)).astype(np.int64)


def _float_keys(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Index:
    """Return the bits of IEEE 754 numbers, mapped so that they have the order of the numbers."""
    bits = (values + 0.0).view(np.int64)  # -0.0 becomes 0.0
    keys = np.where(bits < 0, bits ^ np.int64(0x7FFF_FFFF_FFFF_FFFF), bits)
    return np.where(np.isnan(values), np.int64(0x7FFF_FFFF_FFFF_FFFF), keys)
