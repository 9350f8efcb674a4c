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
    take_left, take_right = pa.array(at), pa.array(to)
    for name in columns:
        a = _whole(left.column(name)).take(take_left)
        b = _whole(right.column(name)).take(take_right)
        if pa.types.is_floating(a.type):
            bits = {16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[a.type.bit_width]
            a, b = a.view(bits), b.view(bits)
        equal = to_mask(pc.equal(a, b))
        if a.null_count or b.null_count:
            equal |= to_mask(pc.and_(pc.is_null(a), pc.is_null(b)))
        out &= equal
    return out


def key_tuples(table: pa.Table, at: Index, key: Sequence[str]) -> list[tuple[Any, ...]]:
    """The keys of some rows as Python tuples: for the slow path of hash collisions only."""
    columns = [table.column(name).take(pa.array(at)).to_pylist() for name in key]
    return list(zip(*columns, strict=True))


def group_by_key(table: pa.Table, hashes: U64, key: Sequence[str], *minor: npt.NDArray[Any]) -> tuple[Index, Mask]:
    """Sort rows by (hash, key, minor…), the most significant minor first.

    Returns (order, starts): row numbers in sorted order, and where in that order a new key begins.
    A hash only nominates: neighbours of equal hash are compared by their real keys, and where two keys
    share a hash those rows (only) are told apart through a dictionary.
    """
    n = len(hashes)
    lesser = tuple(reversed(minor))
    order = np.lexsort((*lesser, hashes)) if lesser else np.argsort(hashes, kind="stable")
    sorted_hashes = hashes[order]
    starts = np.ones(n, dtype=bool)
    if n < 2:
        return order.astype(np.int64), starts
    same = sorted_hashes[1:] == sorted_hashes[:-1]
    pairs = np.nonzero(same)[0]
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
