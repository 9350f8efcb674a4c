"""Rows of a planned read (`read_plan`), for readers in this process.

    settled part   per row group: the columns asked for, without the rows of its deletion vector
    live           the difference, as the plan has it

The deletion vector of a row group is the positions of rows that later updates supersede. A part is sorted by hash, so
the superseded hashes are searched in the row group's hashes. A row group without any of them is read without `_hash`,
`_time` and the key. Equal hashes of different keys are possible, so the keys are compared, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tidemill.base.errors import CorruptError
from tidemill.shards.api import HASH, TIME, Part, ShardSchema
from tidemill.shards.parts.arrow_rows import Index, int64s, rows_equal
from tidemill.shards.parts.checksums import open_part
from tidemill.shards.read.hash_ranges import FetchPart
from tidemill.shards.read.read_plan import ReadPlan


def read_planned(plan: ReadPlan, schema: ShardSchema, fetch: FetchPart, columns: Sequence[str]) -> Iterator[pa.Table]:
    """Yield `columns` of all rows of the plan, one row group at a time. Raises as `fetch`, CorruptError."""
    for part in plan.settled:
        yield from _read_settled(plan, part, schema.key, fetch, list(columns))
    if plan.live.num_rows:
        yield plan.live.select(columns)


def _read_settled(
    plan: ReadPlan, part: Part, key: Sequence[str], fetch: FetchPart, columns: list[str]
) -> Iterator[pa.Table]:
    low = int(np.searchsorted(plan.gone_hashes, np.uint64(part.min_hash), side="left"))
    superseded = range(low, int(np.searchsorted(plan.gone_hashes, np.uint64(part.max_hash), side="right")))
    try:
        file = open_part(part, fetch(part))
        for group in range(file.metadata.num_row_groups):
            rows = _read_row_group(file, group, plan, superseded, key, columns)
            if rows.num_rows:
                yield rows
    except (pa.ArrowException, OSError) as error:
        raise CorruptError(f"part is unreadable: object={part.object_key} ({error}).") from error


def _read_row_group(
    file: pq.ParquetFile, group: int, plan: ReadPlan, superseded: range, key: Sequence[str], columns: list[str]
) -> pa.Table:
    column = file.schema_arrow.get_field_index(HASH)
    if not superseded or not _may_hold_any(file.metadata.row_group(group).column(column).statistics, plan, superseded):
        return file.read_row_group(group, columns=columns, use_threads=False).select(columns)
    hashes = file.read_row_group(group, columns=[HASH], use_threads=False).column(HASH).to_numpy()
    places, of = _equal_hashes(hashes, plan.gone_hashes, superseded)
    if not len(places):
        return file.read_row_group(group, columns=columns, use_threads=False).select(columns)
    read = list(dict.fromkeys([*columns, TIME, *key]))
    rows = file.read_row_group(group, columns=read, use_threads=False)
    until = plan.gone.columns[-1].to_numpy()
    deleted = int64s(rows, TIME)[places] < until[of]
    deleted &= rows_equal(rows, places, plan.gone, of, key)
    remaining = np.ones(rows.num_rows, dtype=bool)
    remaining[places[deleted]] = False
    return rows.select(columns).filter(pa.array(remaining))


def _may_hold_any(statistics: Any, plan: ReadPlan, superseded: range) -> bool:
    """Return whether a superseded hash lies within the statistics of a row group's hashes."""
    if statistics is None or not statistics.has_min_max:
        return True
    bounds = np.array([statistics.min, statistics.max], dtype=np.uint64)
    wanted = plan.gone_hashes[superseded.start : superseded.stop]
    return bool(np.searchsorted(wanted, bounds[0], side="left") < np.searchsorted(wanted, bounds[1], side="right"))


def _equal_hashes(hashes: Any, gone_hashes: Any, superseded: range) -> tuple[Index, Index]:
    """Return all pairs (position in the row group, position in `gone_hashes`) of equal hashes; both are sorted."""
    wanted = gone_hashes[superseded.start : superseded.stop]
    first = np.searchsorted(hashes, wanted, side="left")
    counts = np.searchsorted(hashes, wanted, side="right") - first
    of = np.repeat(np.arange(len(wanted)), counts)
    offset_in_run = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(first, counts) + offset_in_run, of + superseded.start
