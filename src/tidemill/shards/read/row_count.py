"""Number of rows of a shard at a time: the sum of all diffs up to it. Pure, except for `fetch`."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from tidemill.base.errors import CorruptError
from tidemill.shards.api import DIFF, TIME, Batch
from tidemill.shards.parts.checksums import open_part
from tidemill.shards.parts.parts import rows_within
from tidemill.shards.read.hash_ranges import FetchPart


def count_rows(batches: Sequence[Batch], as_of: int, fetch: FetchPart) -> int:
    """Return the number of rows at `as_of`; a row of multiplicity n counts n times. Raises as `fetch`, CorruptError.

    Reads two columns of each part, which are tiny: their values repeat.
    """
    count = 0
    for batch in batches:
        for part in batch.parts:
            try:
                file = open_part(part, fetch(part))
                for group in range(file.metadata.num_row_groups):
                    rows = file.read_row_group(group, columns=[TIME, DIFF], use_threads=False)
                    rows = rows_within(rows, batch.lower, min(batch.upper, as_of + 1))
                    count += pc.sum(rows.column(DIFF)).as_py() or 0
            except (pa.ArrowException, OSError) as error:
                raise CorruptError(f"part is unreadable: object={part.object_key or 'inline'} ({error}).") from error
    return count
