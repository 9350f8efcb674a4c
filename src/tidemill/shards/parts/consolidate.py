"""Sums of updates, vectorised: the contents of a shard at a time, and the updates of a compacted batch. Pure.

There are three ways to one answer. The first two are for rows sorted by (hash, time, diff), and check their
assumptions:

    newest   the newest update of each key decides. Only for shards with a key whose updates are ±1 and complete from
             the beginning. Returns None if something is off (a hash shared by two keys, a sum other than 0 or 1).
    cancel   an insertion and a later retraction of the same row cancel. After that, the only row of its hash, or a
             retraction before an insertion of another row, is already a sum. The third way sums all other rows.
    general  Arrow's group-by over whole rows

Rows are equal bit by bit: NaN equals NaN, 0.0 differs from -0.0, null equals null.

A negative multiplicity means that an absent row was retracted: CorruptError, never hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.base.errors import CorruptError
from tidemill.base.limits import MIB
from tidemill.shards.api import DIFF, HASH, TIME, ShardSchema
from tidemill.shards.parts.arrow_rows import (
    CHUNK_BYTES,
    Index,
    Mask,
    combine_columns,
    format_scalar,
    rows_at,
    rows_equal,
    with_numbered_values,
)
from tidemill.shards.parts.parts import sort_updates
from tidemill.shards.parts.row_hash import U64, bucket_of, hash_rows
from tidemill.shards.parts.schema import contents_schema, hash_columns, part_schema

_PLACE = "_place"
COMPARED_ROWS = 1 << 16
COMPARED_BYTES = 32 * MIB
"""Rows compared at a time, by their mean size. Their copies are the memory of a merge in addition to input and result.
"""


def sum_contents(schema: ShardSchema, updates: pa.Table) -> pa.Table:
    """Return the multiset to which `updates` (all, from the beginning) sum: the shard's columns, in hash order.

    A row of multiplicity n appears n times. Raises CorruptError for a negative multiplicity.
    """
    if updates.num_rows == 0:
        return contents_schema(schema).empty_table()
    if schema.key:
        found = newest_contents(schema, updates)
        if found is not None:
            return found
    summed = _sum_groups(schema, updates, contents_schema(schema).names)
    counts = summed.column(DIFF).to_numpy()
    if (counts < 0).any():
        at = int(np.nonzero(counts < 0)[0][0])
        named = ", ".join(f"{n}={format_scalar(summed.column(n)[at])}" for n in hash_columns(schema))
        raise CorruptError(f"a row was retracted more often than inserted: {named} count={int(counts[at])}.")
    out = summed.select(contents_schema(schema).names)
    if (counts > 1).any():
        out = rows_at(out, np.repeat(np.arange(len(counts)), counts))
    order = np.argsort(hash_rows(out, hash_columns(schema)), kind="stable")
    return combine_columns(rows_at(out, order))


def merge_updates(schema: ShardSchema, updates: pa.Table, advance_to: int) -> pa.Table:
    """Return updates with the same meaning from `advance_to` on: earlier times become it, then equal rows are summed.

    Input: columns, `_time`, `_diff`, perhaps `_hash`. Output: these four (`part_schema`), in hash order. Updates later
    than `advance_to` keep their times. Zero sums vanish; others have their count in `_diff`.
    """
    hashes = _hashes(schema, updates)
    order = _order(updates, hashes)
    times, diffs = updates.column(TIME).to_numpy()[order], updates.column(DIFF).to_numpy()[order]
    hashes = hashes[order]
    rows = combine_columns(updates.select(contents_schema(schema).names))
    late = times > advance_to
    alone, others = _cancel_pairs(rows, order, hashes, diffs, ~late)
    np.maximum(times, advance_to, out=times)

    def stored(at: Index) -> pa.Table:
        columns = rows_at(rows, order[at]).columns
        return pa.Table.from_arrays(
            [*columns, *map(pa.array, (times[at], diffs[at], hashes[at]))], schema=part_schema(schema)
        )

    found = stored(np.flatnonzero(late | alone))
    if not others.any():
        return found
    summed = _sum_groups(schema, stored(np.flatnonzero(others)), [n for n in part_schema(schema).names if n != DIFF])
    found = pa.concat_tables([found, summed.select(part_schema(schema).names)])
    return rows_at(found, np.argsort(found.column(HASH).to_numpy(), kind="stable"))


def _cancel_pairs(rows: pa.Table, order: Index, hashes: U64, diffs: Index, summed: Mask) -> tuple[Mask, Mask]:
    """Return masks of the rows in `summed` that are already sums, and of those to sum with others of their hash.

    All masks are by position in `order`, which is by (hash, time, diff). The remaining rows of `summed` cancel: two
    equal rows of opposite diffs may always be removed, independent of the rows around them, so only their equality is
    checked.
    """

    step = max(1, min(COMPARED_ROWS, COMPARED_BYTES * rows.num_rows // max(1, rows.nbytes)))

    def equal(first: Index, second: Index) -> Mask:
        pieces = [slice(at, at + step) for at in range(0, len(first), step)]
        found = [rows_equal(rows, order[first[p]], rows, order[second[p]], rows.column_names) for p in pieces]
        return np.concatenate([np.zeros(0, dtype=bool), *found])

    left = summed.copy()
    opposite = (hashes[1:] == hashes[:-1]) & (diffs[:-1] > 0) & (diffs[1:] == -diffs[:-1])
    pairs = np.flatnonzero(opposite & summed[:-1] & summed[1:])
    pairs = pairs[equal(pairs, pairs + 1)]
    left[pairs] = left[pairs + 1] = False
    at = np.flatnonzero(left)
    starts = np.flatnonzero(np.diff(hashes[at], prepend=~hashes[at[:1]]))
    counts = np.diff(starts, append=len(at))
    alone, others = np.zeros_like(left), left
    single = at[starts[counts == 1]]
    alone[single], others[single] = diffs[single] != 0, False
    first, second = at[starts[counts == 2]], at[starts[counts == 2] + 1]
    replaced = (diffs[first] < 0) & (diffs[second] > 0)
    first, second = first[replaced], second[replaced]
    same = equal(first, second)
    nothing = same & (diffs[first] == -diffs[second])
    for place in (first, second):
        alone[place[~same]] = True
        others[place[~same | nothing]] = False
    return alone, others


def _sum_groups(schema: ShardSchema, updates: pa.Table, names: Sequence[str]) -> pa.Table:
    """Group by the columns `names`; return the non-zero sums of the diffs: columns…, `_diff`."""
    count = 1 + updates.nbytes // CHUNK_BYTES
    if count == 1:
        return _sum_equal_rows(updates, names)
    # Arrow returns the texts of all groups as one array, so the rows are divided by hash until that array is small
    # enough.
    numbers = bucket_of(_hashes(schema, updates), count)
    return pa.concat_tables([_sum_equal_rows(updates.filter(pa.array(numbers == n)), names) for n in range(count)])


def _sum_equal_rows(updates: pa.Table, names: Sequence[str]) -> pa.Table:
    if any(pa.types.is_nested(updates.schema.field(name).type) for name in names):
        return _sum_equal_nested(updates.select([*names, DIFF]))
    # One thread, so that the result is in the order of first appearance, the same in every run.
    summed = updates.select([*names, DIFF]).group_by(list(names), use_threads=False).aggregate([(DIFF, "sum")])
    summed = summed.rename_columns([*names, DIFF] if summed.column_names[-1] == f"{DIFF}_sum" else [DIFF, *names])
    summed = summed.select([*names, DIFF])
    return summed.filter(pc.not_equal(summed.column(DIFF), 0))


def _sum_equal_nested(updates: pa.Table) -> pa.Table:
    """Group rows with nested columns, which Arrow cannot group by: their distinct values are numbered."""
    rows = updates.drop_columns([DIFF])
    numbered = with_numbered_values(rows).append_column(DIFF, updates.column(DIFF))
    numbered = numbered.append_column(_PLACE, pa.array(np.arange(rows.num_rows)))
    groups = numbered.group_by(rows.column_names, use_threads=False).aggregate([(DIFF, "sum"), (_PLACE, "min")])
    groups = groups.filter(pc.not_equal(groups.column(f"{DIFF}_sum"), 0))
    found = rows_at(rows, np.asarray(groups.column(f"{_PLACE}_min").to_numpy(), dtype=np.int64))
    return found.append_column(DIFF, groups.column(f"{DIFF}_sum"))


def _hashes(schema: ShardSchema, updates: pa.Table) -> U64:
    if HASH in updates.column_names:
        return np.asarray(updates.column(HASH).to_numpy())
    return hash_rows(updates, hash_columns(schema))


def _order(updates: pa.Table, hashes: U64) -> Index:
    """Return the positions of the updates by (hash, time, diff)."""
    order = sort_updates(updates, hashes)
    return np.arange(len(hashes)) if order is None else order


def newest_contents(schema: ShardSchema, updates: pa.Table) -> pa.Table | None:
    """Compute `sum_contents` from the newest update of each key, comparing only key columns.

    None if whole rows must be compared: a hash is shared by two keys, or a sum is not 0 or 1.
    """
    diffs = updates.column(DIFF).to_numpy()
    if not bool((np.abs(diffs) == 1).all()):
        return None
    hashes = _hashes(schema, updates)
    order = _order(updates, hashes)
    hashes, diffs = hashes[order], diffs[order]
    first = np.empty(len(hashes), dtype=bool)
    first[0] = True
    np.not_equal(hashes[1:], hashes[:-1], out=first[1:])
    starts = np.nonzero(first)[0]
    repeats = np.nonzero(~first)[0]
    if not rows_equal(updates, order[repeats - 1], updates, order[repeats], schema.key).all():
        return None
    last = np.append(starts[1:], len(hashes)) - 1
    live = diffs[last] == 1
    if not np.array_equal(np.add.reduceat(diffs, starts), live.astype(diffs.dtype)):
        return None
    return combine_columns(rows_at(updates.select(contents_schema(schema).names), order[last[live]]))
