"""Vectorised helpers on Arrow tables: aligned comparison, and grouping of rows by key where hashes may collide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

U64 = npt.NDArray[np.uint64]
Index = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def to_mask(array: Any) -> Mask:
    """A numpy mask of an Arrow boolean array; null counts as False."""
    array = _whole(array)
    if array.null_count:
        array = array.fill_null(False)
    return np.asarray(array.to_numpy(zero_copy_only=False), dtype=bool)


def _whole(array: Any) -> Any:
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
    for name in sorted(columns, key=lambda name: not pa.types.is_primitive(left.schema.field(name).type)):
        if open_rows is None and not out.all():
            open_rows = np.flatnonzero(out)
        elif open_rows is not None:
            open_rows = open_rows[out[open_rows]]
        if open_rows is not None and not len(open_rows):
            break
        a = values_at(_whole(left.column(name)), at if open_rows is None else at[open_rows])
        b = values_at(_whole(right.column(name)), to if open_rows is None else to[open_rows])
        if pa.types.is_floating(a.type):
            bits = {16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[a.type.bit_width]
            a, b = a.view(bits), b.view(bits)
        equal = to_mask(pc.equal(a, b))
        if a.null_count or b.null_count:
            equal |= to_mask(pc.and_(pc.is_null(a), pc.is_null(b)))
        if open_rows is None:
            out = equal
        else:
            out[open_rows] = equal
    return out


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


def key_tuples(table: pa.Table, at: Index, key: Sequence[str]) -> list[tuple[Any, ...]]:
    """The keys of some rows as Python tuples: for the slow path of hash collisions only."""
    columns = [table.column(name).take(pa.array(at)).to_pylist() for name in key]
    return list(zip(*columns, strict=True))


def group_by_key(table: pa.Table, hashes: U64, key: Sequence[str], *minor: npt.NDArray[Any]) -> tuple[Index, Mask]:
    """Sort rows by (hash, key, minor…), the most significant minor first; without minors they keep their order.

    Returns (order, starts): row numbers in sorted order, and where in that order a new key begins.
    A hash only nominates: neighbours of equal hash are compared by their real keys, and where two keys
    share a hash those rows (only) are told apart through a dictionary.
    """
    n = len(hashes)
    lesser = tuple(reversed(minor))
    # Stable is linear on what consists of sorted runs, and five times as long as the other on what is in no order.
    runs = not lesser or bool((hashes[1:] >= hashes[:-1]).all())
    order = np.argsort(hashes, kind="stable" if runs else None)
    sorted_hashes = hashes[order]
    starts = np.ones(n, dtype=bool)
    if n < 2:
        return order.astype(np.int64), starts
    same = sorted_hashes[1:] == sorted_hashes[:-1]
    pairs = np.nonzero(same)[0]
    if lesser and len(pairs):
        _order_ties(order, hashes, same, lesser)
    if len(pairs):
        equal = rows_equal(table, order[pairs], table, order[pairs + 1], key)
        if not equal.all():
            collided = np.unique(sorted_hashes[pairs[~equal]])
            apart = _tell_apart(table, hashes, collided, key)
            order = np.lexsort((*lesser, apart, hashes))
            sorted_hashes, sorted_apart = hashes[order], apart[order]
            same = (sorted_hashes[1:] == sorted_hashes[:-1]) & (sorted_apart[1:] == sorted_apart[:-1])
    starts[1:] = ~same
    return order.astype(np.int64), starts


def _order_ties(order: Index, hashes: U64, same: Mask, lesser: Sequence[npt.NDArray[Any]]) -> None:
    """Put rows of equal hash in the order of their minors, then of their places. They are few where keys are many."""
    tied = np.zeros(len(order), dtype=bool)
    tied[1:] = same
    tied[:-1] |= same
    among = order[tied]
    order[tied] = among[np.lexsort((among, *(m[among] for m in lesser), hashes[among]))]


def _tell_apart(table: pa.Table, hashes: U64, collided: U64, key: Sequence[str]) -> Index:
    """A small number per row: 0 where the hash is unambiguous, else one number per distinct key of that hash."""
    apart = np.zeros(len(hashes), dtype=np.int64)
    at = np.nonzero(np.isin(hashes, collided))[0].astype(np.int64)
    numbers: dict[tuple[Any, ...], int] = {}
    for row, found in zip(at.tolist(), key_tuples(table, at, key), strict=True):
        apart[row] = numbers.setdefault(found, len(numbers) + 1)
    return apart


def one_chunk(table: pa.Table) -> pa.Table:
    """The table with contiguous columns, so that `take` and numpy views copy nothing twice."""
    if all(column.num_chunks <= 1 for column in table.columns):
        return table
    return table.combine_chunks()
