"""Rows of a planned read (`read_plan`), for readers in this process.

    settled part   per row group: the columns asked for, without the rows of its deletion vector
    live           the difference, as the plan has it

Memory holds one row group, the difference and the deletion vectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from tidemill.base.errors import CorruptError
from tidemill.shards.api import Part
from tidemill.shards.parts.arrow_rows import Index
from tidemill.shards.parts.checksums import open_part
from tidemill.shards.parts.stored_types import restored_rows
from tidemill.shards.read.deletion_vectors import DeletionVectors
from tidemill.shards.read.hash_ranges import FetchPart
from tidemill.shards.read.read_plan import ReadPlan


def read_planned(
    plan: ReadPlan, vectors: DeletionVectors, fetch: FetchPart, columns: Sequence[str]
) -> Iterator[pa.Table]:
    """Yield `columns` of all rows of the plan, one row group at a time. Raises as `fetch`, CorruptError."""
    types = pa.schema([plan.live.schema.field(name) for name in columns])
    for part in plan.settled:
        yield from _read_settled(part, vectors, fetch, types)
    if plan.live.num_rows:
        yield plan.live.select(columns)


def _read_settled(part: Part, vectors: DeletionVectors, fetch: FetchPart, types: pa.Schema) -> Iterator[pa.Table]:
    deleted, after = vectors.get(part.object_key), 0
    try:
        file = open_part(part, fetch(part))
        for group in range(file.metadata.num_row_groups):
            rows = restored_rows(file.read_row_group(group, columns=types.names, use_threads=False), types)
            first_row, after = after, after + rows.num_rows
            if deleted is not None:
                rows = _without_rows(rows, deleted, first_row)
            if rows.num_rows:
                yield rows
    except (pa.ArrowException, OSError) as error:
        raise CorruptError(f"part is unreadable: object={part.object_key} ({error}).") from error


def _without_rows(rows: pa.Table, deleted: Index, first_row: int) -> pa.Table:
    """Return rows without those of a deletion vector; `first_row` is the position of the first one in its part."""
    low, high = np.searchsorted(deleted, [first_row, first_row + rows.num_rows])
    if low == high:
        return rows
    remaining = np.ones(rows.num_rows, dtype=bool)
    remaining[deleted[low:high] - first_row] = False
    return rows.filter(pa.array(remaining))
