"""Rows of Arrow tables by their places: taken, compared bit by bit. Vectorised, pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Index = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def to_mask(array: Any) -> Mask:
    """A numpy mask of an Arrow boolean array; null counts as False."""
    array = whole(array)
    if array.null_count:
        array = array.fill_null(False)
    return np.asarray(array.to_numpy(zero_copy_only=False), dtype=bool)


def whole(array: Any) -> Any:
    """One contiguous array of a column."""
    if isinstance(array, pa.ChunkedArray):
        return array.combine_chunks() if array.num_chunks != 1 else array.chunk(0)
    return array


def int64s(table: pa.Table, name: str) -> Index:
    return np.asarray(table.column(name).to_numpy(), dtype=np.int64)


def rows_equal(left: pa.Table, at: Index, right: pa.Table, to: Index, columns: Sequence[str]) -> Mask:
    """For each i: are left[at[i]] and right[to[i]] the same in all columns?

    Floats are compared bit by bit, as shards do when they sum up: NaN is itself, 0.0 is not -0.0. Were two
    rows equal here and different there, a retraction could miss the row it means.
    """
    out = np.ones(len(at), dtype=bool)
    open_rows: Index | None = None  # None = all
    # Numbers first: where they differ the texts need not be looked at.
    for name in sorted(
        columns if len(at) else (), key=lambda name: not pa.types.is_primitive(left.schema.field(name).type)
    ):
        if open_rows is None and not out.all():
            open_rows = np.flatnonzero(out)
        elif open_rows is not None:
            open_rows = open_rows[out[open_rows]]
        if open_rows is not None and not len(open_rows):
            break
        a = values_at(whole(left.column(name)), at if open_rows is None else at[open_rows])
        b = values_at(whole(right.column(name)), to if open_rows is None else to[open_rows])
        a, b = bits_of(a), bits_of(b)
        equal = to_mask(pc.equal(a, b))
        if a.null_count or b.null_count:
            equal |= to_mask(pc.and_(pc.is_null(a), pc.is_null(b)))
        if open_rows is None:
            out = equal
        else:
            out[open_rows] = equal
    return out


def bits_of(array: pa.Array) -> pa.Array:
    """Floats as the integers of their bits, and anything else as it is."""
    if not pa.types.is_floating(array.type):
        return array
    return array.view({16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[array.type.bit_width])


def _range_of(at: Index) -> tuple[int, int] | None:
    """(first, count) where `at` counts up without a gap."""
    n = len(at)
    if not n or int(at[-1]) - int(at[0]) != n - 1 or not bool((at[1:] - at[:-1] == 1).all()):
        return None
    return int(at[0]), n


def values_at(array: pa.Array, at: Index) -> pa.Array:
    """The values at these places; a view where they follow each other."""
    found = _range_of(at)
    return array.take(pa.array(at)) if found is None else array.slice(*found)


def rows_at(table: pa.Table, at: Index) -> pa.Table:
    """The rows at these places; a view where they follow each other."""
    found = _range_of(at)
    return table.take(pa.array(at)) if found is None else table.slice(*found)


def one_chunk(table: pa.Table) -> pa.Table:
    """The table with contiguous columns, so that `take` and numpy views copy nothing twice."""
    if all(column.num_chunks <= 1 for column in table.columns):
        return table
    return table.combine_chunks()
