"""Rows of Arrow tables by position: taken, and compared bit by bit. Vectorised, pure.

An array of texts holds less than 2 GiB, and Arrow's own `take` first copies a whole column into one array, and its
result, too. The functions here read and return a larger column in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.shards.nested.values import leaf_bits, value_numbers, value_sizes, values_equal

Index = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

CHUNK_BYTES = 1 << 30
"""Limit for the texts of one array created here."""
COPIED_BYTES = 256 << 10
"""Size of a chunked table that may be copied to take rows from it: less work than a call for each column."""
NESTED_ROWS = 4096
"""Number of nested values that are compared at a time."""


def to_mask(array: Any) -> Mask:
    """Return a numpy mask of an Arrow boolean array; null counts as False."""
    array = _combine_chunks(array)
    if array.null_count:
        array = array.fill_null(False)
    return np.asarray(array.to_numpy(zero_copy_only=False), dtype=bool)


def _combine_chunks(array: Any, limit_bytes: int = CHUNK_BYTES) -> Any:
    """Return a column as one contiguous array, or unchanged if that array would be too large."""
    if not isinstance(array, pa.ChunkedArray):
        return array
    if array.num_chunks == 1:
        return array.chunk(0)
    return array if _data_bytes(array) > limit_bytes else array.combine_chunks()


def int64s(table: pa.Table, name: str) -> Index:
    return np.asarray(table.column(name).to_numpy(), dtype=np.int64)


def rows_equal(left: pa.Table, at: Index, right: pa.Table, to: Index, columns: Sequence[str]) -> Mask:
    """Return for each i whether left[at[i]] and right[to[i]] are equal in all columns.

    Floats are compared bit by bit, as shards do in sums: NaN equals itself, 0.0 differs from -0.0. If the two
    disagreed, a retraction could miss its row.
    """
    out = np.ones(len(at), dtype=bool)
    open_rows: Index | None = None  # None = all
    # Numbers first: if they differ, the texts need not be compared.
    for name in sorted(
        columns if len(at) else (), key=lambda name: not pa.types.is_primitive(left.schema.field(name).type)
    ):
        if open_rows is None and not out.all():
            open_rows = np.flatnonzero(out)
        elif open_rows is not None:
            open_rows = open_rows[out[open_rows]]
        if open_rows is not None and not len(open_rows):
            break
        a = values_at(left.column(name), at if open_rows is None else at[open_rows])
        b = values_at(right.column(name), to if open_rows is None else to[open_rows])
        if pa.types.is_nested(a.type):
            equal = _nested_equal(a, b)
        else:
            a, b = float_bits(a), float_bits(b)
            equal = to_mask(pc.equal(a, b))
            if a.null_count or b.null_count:
                equal |= to_mask(pc.and_(pc.is_null(a), pc.is_null(b)))
        if open_rows is None:
            out = equal
        else:
            out[open_rows] = equal
    return out


def _nested_equal(left: Any, right: Any) -> Mask:
    """Compare nested values piece by piece: a column may be too large for one array."""
    out = np.empty(len(left), dtype=bool)
    for start in range(0, len(left), NESTED_ROWS):
        pieces = [each.slice(start, NESTED_ROWS) for each in (left, right)]
        a, b = (p.combine_chunks() if isinstance(p, pa.ChunkedArray) else p for p in pieces)
        out[start : start + NESTED_ROWS] = values_equal(a, b)
    return out


def with_numbered_values(table: pa.Table) -> pa.Table:
    """Return the table with numbers instead of nested values, equal exactly if the values are: such a table can be
    grouped."""
    for at, field in enumerate(table.schema):
        if pa.types.is_nested(field.type):
            numbers = value_numbers(pa.concat_arrays(table.column(at).chunks or [pa.nulls(0, field.type)]))
            table = table.set_column(at, field.name, pa.array(numbers))
    return table


def float_bits(array: Any) -> Any:
    """Return floats and times as the integers of their bits, which exist for every value; others unchanged."""
    if not (pa.types.is_floating(array.type) or pa.types.is_temporal(array.type)):
        return array
    return leaf_bits(_combine_chunks(array))


def format_scalar(value: Any) -> str:
    """Format an Arrow scalar for people.

    A time without a Python object (infinity) is shown as its number since 1970.
    """
    try:
        return repr(value.as_py())
    except OverflowError:
        return str(value.cast(pa.int64() if value.type.bit_width == 64 else pa.int32()))


def _range_of(at: Index) -> tuple[int, int] | None:
    """Return (first, count) if `at` counts up without a gap."""
    n = len(at)
    if not n or int(at[-1]) - int(at[0]) != n - 1 or not bool((at[1:] - at[:-1] == 1).all()):
        return None
    return int(at[0]), n


def values_at(column: Any, at: Index, limit_bytes: int = CHUNK_BYTES) -> Any:
    """Return the values at these positions; a view if they are consecutive.

    More than `limit_bytes` of texts are returned in several chunks. Memory holds twice one such chunk in addition to
    the result.
    """
    found = _range_of(at)
    if found is not None:
        return column.slice(*found)
    column = _combine_chunks(column, limit_bytes)
    if not _has_offsets(column.type) or _fits_one_array(column, at, limit_bytes):
        return column.take(pa.array(at))
    if isinstance(column, pa.Array):
        sizes = _sizes(column, at)
        taken = [column.take(pa.array(at[a:b])) for a, b in pairwise(cut_positions(sizes, limit_bytes))]
    else:
        starts = np.cumsum([0, *map(len, column.chunks)])
        sizes = np.empty(len(at), dtype=np.int64)
        for number, mine in _by_chunk(starts, at):
            sizes[mine] = _sizes(column.chunk(number), at[mine] - starts[number])
        taken = [_take_from_chunks(column, starts, at[a:b]) for a, b in pairwise(cut_positions(sizes, limit_bytes))]
    return taken[0] if len(taken) == 1 else pa.chunked_array(taken, column.type)


def _fits_one_array(column: Any, at: Index, limit_bytes: int) -> bool:
    """Return whether the result certainly fits, without computing sizes: no position repeats, and the column is
    small.
    """
    if not isinstance(column, pa.Array) or not len(column):
        return False
    if pa.types.is_nested(column.type):
        return column.nbytes <= limit_bytes and bool((at[1:] > at[:-1]).all())
    offsets = _offsets(column)
    return int(offsets[-1]) - int(offsets[0]) <= limit_bytes and bool((at[1:] > at[:-1]).all())


def _by_chunk(starts: Index, at: Index) -> Iterator[tuple[int, Index]]:
    """Yield the number of each chunk that contains any of the positions, and their indexes in `at`."""
    numbers = np.searchsorted(starts, at, side="right") - 1
    order = np.argsort(numbers, kind="stable")
    ends = np.flatnonzero(np.diff(numbers[order], append=-1)) + 1
    for begin, end in zip([0, *ends.tolist()], ends.tolist(), strict=False):
        yield int(numbers[order[begin]]), order[begin:end]


def _take_from_chunks(column: pa.ChunkedArray, starts: Index, at: Index) -> pa.Array:
    """Return values that fit one array, taken from several chunks."""
    back, found = np.empty(len(at), dtype=np.int64), []
    end = 0
    for number, mine in _by_chunk(starts, at):
        found.append(column.chunk(number).take(pa.array(at[mine] - starts[number])))
        back[mine] = np.arange(end, end := end + len(mine))
    if len(found) == 1:
        return found[0]
    return pa.concat_arrays(found).take(pa.array(back)) if found else column.chunk(0).slice(0, 0)


def _sizes(array: pa.Array, at: Index) -> Index:
    if pa.types.is_nested(array.type):
        return value_sizes(array)[at]
    offsets = _offsets(array)
    return np.asarray(offsets[at + 1] - offsets[at], dtype=np.int64)


def cut_positions(sizes: Index, limit_bytes: int, limit_rows: int = 1 << 62) -> list[int]:
    """Return where to cut rows of these sizes, from 0 to the end. No piece exceeds a limit, except single rows."""
    sums = np.cumsum(sizes)
    cuts = [0]
    while cuts[-1] < len(sizes) or len(cuts) == 1:
        at = cuts[-1]
        before = int(sums[at - 1]) if at else 0
        end = max(at + 1, int(np.searchsorted(sums, before + limit_bytes, side="right")))
        cuts.append(min(end, at + limit_rows, len(sizes)))
    return cuts


def row_sizes(table: pa.Table) -> Index:
    """Estimate the size of each row in memory, in bytes."""
    sizes = np.zeros(table.num_rows, dtype=np.int64)
    for column in table.columns:
        if pa.types.is_nested(column.type):
            sizes += np.concatenate([np.zeros(0, dtype=np.int64), *map(value_sizes, column.chunks)])
        elif not _has_offsets(column.type):
            sizes += -(-column.type.bit_width // 8)
        elif column.num_chunks:
            sizes += 4 + np.concatenate([np.diff(_offsets(chunk)) for chunk in column.chunks])
    return sizes


def _has_offsets(kind: pa.DataType) -> bool:
    """Return whether the type has 32-bit offsets, so that an array of it holds less than 2 GiB."""
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_nested(kind))


def _offsets(array: Any) -> npt.NDArray[np.int32]:
    if not len(array):
        return np.zeros(1, dtype=np.int32)
    return np.frombuffer(array.buffers()[1], dtype=np.int32, count=len(array) + 1, offset=4 * array.offset)


def _data_bytes(column: pa.ChunkedArray) -> int:
    if pa.types.is_nested(column.type):
        return int(column.nbytes)
    if not _has_offsets(column.type):
        return 0
    ends = [_offsets(chunk)[[0, -1]] for chunk in column.chunks]
    return sum(int(last) - int(first) for first, last in ends)


def rows_at(table: pa.Table, at: Index, limit_bytes: int = CHUNK_BYTES) -> pa.Table:
    """Return the rows at these positions; a view if they are consecutive. Any size, like `values_at`."""
    found = _range_of(at)
    if found is not None:
        return table.slice(*found)
    if _fits_one_take(table, len(at), limit_bytes):
        return table.take(pa.array(at))
    return pa.Table.from_arrays([values_at(column, at, limit_bytes) for column in table.columns], schema=table.schema)


def _fits_one_take(table: pa.Table, rows: int, limit_bytes: int) -> bool:
    """Return whether one call of Arrow can take `rows` rows: the result is certainly small enough even if one row is
    taken again and again, and no large column is copied first to make it contiguous."""
    if table.get_total_buffer_size() * rows > limit_bytes:
        return False
    # Chunks may share buffers, so only `nbytes` limits the copy.
    return all(column.num_chunks <= 1 for column in table.columns) or table.nbytes <= COPIED_BYTES


def combine_columns(table: pa.Table) -> pa.Table:
    """Return the table with contiguous columns, so that numpy views copy nothing twice; too large columns stay
    chunked.
    """
    if all(column.num_chunks <= 1 for column in table.columns):
        return table
    if table.nbytes <= COPIED_BYTES:
        return table.combine_chunks()
    return pa.Table.from_arrays([_combine_chunks(column) for column in table.columns], schema=table.schema)
