"""Build a mirror from the parts of a shard: follow its batches one by one, a row group at a time.

Compacted parts are already sorted by hash and become a run unchanged. Memory holds a row group, or a batch of at most
ADOPT_BYTES, and the runs that are too small for a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from tidemill.base.errors import CorruptError
from tidemill.shards.api import DIFF, Batch, ShardSchema
from tidemill.shards.parts.arrow_rows import int64s
from tidemill.shards.parts.schema import part_schema
from tidemill.shards.read.hash_ranges import FetchPart, read_batch_ordered
from tidemill.spark.upsert.mirror import Mirror

ADOPT_BYTES = 4 << 20
"""Encoded size of a batch. A larger batch is written into a file of the mirror piece by piece."""


def build_mirror(
    schema: ShardSchema, batches: Sequence[Batch], upper: int, fetch: FetchPart, directory: Path
) -> Mirror:
    """Return the contents at upper - 1 of a shard; `batches` are all its batches with any time below `upper`.

    Raises CorruptError if a key has two live rows, SchemaEvolvedError, and as `fetch`.
    """
    mirror = Mirror(schema, directory=directory)
    count = 0

    def updates(batch: Batch) -> Iterator[pa.Table]:
        nonlocal count
        for table in read_batch_ordered(schema, batch, upper - 1, fetch):
            count += int(int64s(table, DIFF).sum())
            yield table

    for batch in batches:
        end = min(batch.upper, upper)
        if sum(part.size_bytes for part in batch.parts) > ADOPT_BYTES:
            mirror.adopt(updates(batch), mirror.upper, end)
        else:
            mirror.apply(pa.concat_tables([part_schema(schema).empty_table(), *updates(batch)]), mirror.upper, end)
    # A run has each key once even if the shard does not, so an insertion of a live key shows only in the sum.
    if count != (live := mirror.count_live()):
        raise CorruptError(f"a key has two live rows in the shard: upper={upper} rows={count} keys={live}.")
    return mirror
