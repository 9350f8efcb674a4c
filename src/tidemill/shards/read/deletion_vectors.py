"""Deletion vectors of a plan: positions of rows of settled parts that later updates supersede.

A part is sorted by hash, so the superseded hashes are searched in those of a row group, which is the only column read:
m superseded hashes cost m log n steps in n rows.

Equal hashes of different keys are possible. The plan knows how many settled rows each of its keys supersedes. Where
more rows than that have the hash, the keys of these rows are read and compared. Otherwise all of them are the key's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tidemill.base.errors import CorruptError
from tidemill.shards.api import HASH, TIME, Part, ShardSchema
from tidemill.shards.parts.arrow_rows import Index, int64s, rows_equal
from tidemill.shards.parts.checksums import open_part
from tidemill.shards.parts.stored_types import hash_bounds, hashes_of
from tidemill.shards.read.hash_ranges import FetchPart
from tidemill.shards.read.read_plan import ReadPlan, column_bounds

DeletionVectors = Mapping[str, Index]
"""Positions of rows in a part's file, ascending, by object key. A part without superseded rows is absent."""


class _Candidates(NamedTuple):
    """Rows `places` of one row group whose hash is that of rows `of` of `plan.gone`, and which are older.

    `first_row` is the position of the row group in the part.
    """

    part: Part
    group: int
    first_row: int
    places: Index
    of: Index


def deletion_vectors(plan: ReadPlan, schema: ShardSchema, fetch: FetchPart) -> DeletionVectors:
    """Return the deletion vectors of the plan. Raises as `fetch`, CorruptError."""
    if not plan.gone.num_rows:
        return {}
    found = [each for part in plan.settled for each in _part_candidates(plan, part, fetch)]
    counts = np.zeros(plan.gone.num_rows, dtype=np.int64)
    for each in found:
        counts += np.bincount(each.of, minlength=len(counts))
    ambiguous = counts > plan.gone_counts
    if ambiguous.any():
        found = [_without_other_keys(plan, schema.key, each, ambiguous, fetch) for each in found]
    places: dict[str, list[Index]] = {}
    for each in found:
        if len(each.places):
            places.setdefault(each.part.object_key, []).append(np.sort(each.places) + each.first_row)
    return {object_key: np.concatenate(several) for object_key, several in places.items()}


def _part_candidates(plan: ReadPlan, part: Part, fetch: FetchPart) -> list[_Candidates]:
    low = int(np.searchsorted(plan.gone_hashes, np.uint64(part.min_hash), side="left"))
    high = int(np.searchsorted(plan.gone_hashes, np.uint64(part.max_hash), side="right"))
    if low == high:
        return []
    until = plan.gone.columns[-1].to_numpy()
    found: list[_Candidates] = []
    after = 0
    try:
        file = open_part(part, fetch(part))
        older = column_bounds(file, TIME)[1] < until[low:high].min()  # then all rows of the part are
        for group in range(file.metadata.num_row_groups):
            first_row, after = after, after + file.metadata.row_group(group).num_rows
            if not _may_hold_any(file, group, plan.gone_hashes[low:high]):
                continue
            hashes = hashes_of(file.read_row_group(group, columns=[HASH], use_threads=False).column(HASH))
            places, of = _equal_hashes(hashes, plan.gone_hashes[low:high])
            of += low
            if not older and len(places):
                times = int64s(file.read_row_group(group, columns=[TIME], use_threads=False), TIME)
                left = times[places] < until[of]
                places, of = places[left], of[left]
            found.append(_Candidates(part, group, first_row, places, of))
    except (pa.ArrowException, OSError) as error:
        raise CorruptError(f"part is unreadable: object={part.object_key} ({error}).") from error
    return found


def _may_hold_any(file: pq.ParquetFile, group: int, wanted: Any) -> bool:
    """Return whether one of the hashes is within the statistics of a row group's hashes."""
    bounds = hash_bounds(file, group)
    if bounds is None:
        return True
    low, high = np.array(bounds, dtype=np.uint64)
    return bool(np.searchsorted(wanted, low, side="left") < np.searchsorted(wanted, high, side="right"))


def _equal_hashes(hashes: Any, wanted: Any) -> tuple[Index, Index]:
    """Return all pairs (position in `hashes`, position in `wanted`) of equal hashes; both are sorted."""
    first = np.searchsorted(hashes, wanted, side="left")
    counts = np.searchsorted(hashes, wanted, side="right") - first
    of = np.repeat(np.arange(len(wanted)), counts)
    offset_in_run = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(first, counts) + offset_in_run, of


def _without_other_keys(
    plan: ReadPlan, key: Sequence[str], found: _Candidates, ambiguous: Any, fetch: FetchPart
) -> _Candidates:
    open_rows = ambiguous[found.of]
    if not open_rows.any():
        return found
    try:
        file = open_part(found.part, fetch(found.part))
        rows = file.read_row_group(found.group, columns=list(key), use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise CorruptError(f"part is unreadable: object={found.part.object_key} ({error}).") from error
    same = ~open_rows
    same[open_rows] = rows_equal(rows, found.places[open_rows], plan.gone, found.of[open_rows], key)
    return found._replace(places=found.places[same], of=found.of[same])
