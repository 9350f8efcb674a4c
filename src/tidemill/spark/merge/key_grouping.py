"""Grouping of rows by key when hashes may collide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidemill.shards.parts.arrow_rows import Index, Mask, float_bits, rows_equal, values_at
from tidemill.shards.parts.row_hash import U64


def exact_keys(table: pa.Table, at: Index, key: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return the keys of some rows as tuples that are equal exactly if `rows_equal`: NaN equals itself, 0.0 is not
    -0.0.

    For slow paths only, and not for display: see `float_bits`.
    """
    columns = [float_bits(values_at(table.column(name), at)).to_pylist() for name in key]
    return list(zip(*columns, strict=True))


def group_by_key(table: pa.Table, hashes: U64, key: Sequence[str], *minor: npt.NDArray[Any]) -> tuple[Index, Mask]:
    """Sort rows by (hash, key, minor…), the most significant minor first; without minors they keep their order.

    Return (order, starts): row numbers in sorted order, and a mask of the sorted places at which a new key starts.
    Equal hashes only select candidates: neighbours of equal hash are compared by their real keys. Only rows of
    different keys that share a hash are numbered through a dictionary.
    """
    n = len(hashes)
    lesser = tuple(reversed(minor))
    # A stable sort is linear on input that consists of sorted runs, and five times slower than the default on unsorted
    # input.
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
            apart = _number_collisions(table, hashes, collided, key)
            order = np.lexsort((*lesser, apart, hashes))
            sorted_hashes, sorted_apart = hashes[order], apart[order]
            same = (sorted_hashes[1:] == sorted_hashes[:-1]) & (sorted_apart[1:] == sorted_apart[:-1])
    starts[1:] = ~same
    return order.astype(np.int64), starts


def _order_ties(order: Index, hashes: U64, same: Mask, lesser: Sequence[npt.NDArray[Any]]) -> None:
    """Sort rows of equal hash by their minors, then by their places. They are few if there are many keys."""
    tied = np.zeros(len(order), dtype=bool)
    tied[1:] = same
    tied[:-1] |= same
    among = order[tied]
    order[tied] = among[np.lexsort((among, *(m[among] for m in lesser), hashes[among]))]


def _number_collisions(table: pa.Table, hashes: U64, collided: U64, key: Sequence[str]) -> Index:
    """Return a small number per row: 0 where the hash is unambiguous, else one number per distinct key of that hash."""
    apart = np.zeros(len(hashes), dtype=np.int64)
    at = np.nonzero(np.isin(hashes, collided))[0].astype(np.int64)
    numbers: dict[tuple[Any, ...], int] = {}
    for row, found in zip(at.tolist(), exact_keys(table, at, key), strict=True):
        apart[row] = numbers.setdefault(found, len(numbers) + 1)
    return apart
