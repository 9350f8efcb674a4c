"""Rows that count among all updates of some hashes. Vectorised, pure.

    insertions only                                  all count
    insertion, retraction, insertion, … alternating  the last one counts, if it is an insertion
    anything else                                    irregular: whole rows are summed

In the second case at most one row exists at each moment, so each retraction is of the row before it, whichever keys
have the hash. A multiplicity above the number of single insertions of a row is returned as further copies of the row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.base.errors import CorruptError
from tidemill.lake.vectors.part_files import Array
from tidemill.shards.api import DIFF
from tidemill.shards.parts.arrow_rows import Index, Mask, with_numbered_values

_ROW = "_row"


class Updates(NamedTuple):
    """All updates of some hashes: `place` is the row in the part of view `view`. Arrays of one length."""

    view: Index
    place: Index
    hash: Array
    time: Index
    diff: Index


def classify(updates: Updates) -> tuple[Mask, Mask]:
    """Return masks of the updates that count, and of the irregular ones."""
    count = len(updates.hash)
    counting, irregular = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)
    if not count:
        return counting, irregular
    order = np.lexsort((updates.diff, updates.time, updates.hash))
    hashes, diffs = updates.hash[order], updates.diff[order]
    same = hashes[1:] == hashes[:-1]
    starts = np.concatenate([[0], np.flatnonzero(~same) + 1])
    lengths = np.diff(starts, append=count)
    least, most = np.minimum.reduceat(diffs, starts), np.maximum.reduceat(diffs, starts)
    inserts = (least == 1) & (most == 1)
    broken = np.zeros(count, dtype=np.int64)
    broken[1:] = same & (diffs[1:] + diffs[:-1] != 0)
    alternates = (least >= -1) & (most == 1) & (diffs[starts] == 1) & (np.add.reduceat(broken, starts) == 0)
    last = np.zeros(count, dtype=bool)
    last[starts + lengths - 1] = True
    counting[order] = np.repeat(inserts, lengths) | (np.repeat(alternates, lengths) & last & (diffs == 1))
    irregular[order] = np.repeat(~(inserts | alternates), lengths)
    return counting, irregular


def sum_rows(rows: pa.Table, diffs: Index, newness: Index) -> tuple[Mask, Index]:
    """Sum irregular updates by whole rows; return a mask of those that count, and positions of further copies.

    Of equal single insertions the newest count. A position is repeated for each copy. Raises CorruptError for a
    negative sum.
    """
    counting = np.zeros(rows.num_rows, dtype=bool)
    names = [f"c{at}" for at in range(rows.num_columns)]
    table = with_numbered_values(rows.rename_columns(names)).append_column(DIFF, pa.array(diffs))
    table = table.append_column(_ROW, pa.array(np.arange(rows.num_rows)))
    # One thread, so that the groups are in order of first appearance.
    groups = table.group_by(names, use_threads=False).aggregate([(DIFF, "sum"), (_ROW, "list")])
    sums = groups.column(f"{DIFF}_sum").to_numpy()
    lists = groups.column(f"{_ROW}_list").combine_chunks()
    if (sums < 0).any():
        at = int(np.flatnonzero(sums < 0)[0])
        row = {name: str(rows.column(name)[lists[at].as_py()[0]]) for name in rows.column_names[:8]}
        raise CorruptError(f"a row was retracted more often than inserted: row={row} count={int(sums[at])}.")
    lengths = pc.list_value_length(lists).to_numpy()
    members, group = lists.flatten().to_numpy(), np.repeat(np.arange(len(sums)), lengths)
    first = members[np.cumsum(lengths) - lengths]
    single = diffs[members] == 1
    members, group = members[single], group[single]
    order = np.lexsort((-newness[members], group))
    members, group = members[order], group[order]
    per_group = np.bincount(group, minlength=len(sums))
    rank = np.arange(len(group)) - np.repeat(np.cumsum(per_group) - per_group, per_group)
    counting[members[rank < sums[group]]] = True
    further = np.maximum(sums - per_group, 0)
    return counting, np.repeat(first, further)
