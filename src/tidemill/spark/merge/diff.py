"""Contents as commands: make a table hold given rows at one time, independent of its previous contents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tidemill.base.errors import InvalidError
from tidemill.shards.api import TIME, ShardSchema
from tidemill.shards.parts.arrow_rows import Mask, combine_columns, format_scalar, rows_at
from tidemill.shards.parts.key_hash import normalize_keys
from tidemill.shards.parts.row_hash import hash_rows
from tidemill.spark.merge.commands import LIVE, ORDER, PARTITION, Commands, command_schema
from tidemill.spark.merge.key_grouping import group_by_key
from tidemill.spark.merge.resolve import MirrorLookup
from tidemill.spark.merge.sorted_runs import SortedRun


def check_distinct(schema: ShardSchema, rows: pa.Table) -> SortedRun:
    """Return rows with normalized keys, sorted by hash; columns other than the key's may be any.

    Raises InvalidError if a key is null or occurs twice.
    """
    key = schema.key
    for name in key:
        if rows.column(name).null_count:
            raise InvalidError(f"a key column is null: column={name}.", fix="Filter out such rows, or provide a value.")
    rows = combine_columns(normalize_keys(rows, key))
    hashes = hash_rows(rows, key)
    order, starts = group_by_key(rows, hashes, key)
    if not starts.all():
        again = int(order[np.flatnonzero(~starts)[0]])
        values = " ".join(f"{name}={format_scalar(rows.column(name)[again]):.100}" for name in key)
        raise InvalidError(
            f"a key occurs twice: {values} rows={rows.num_rows} keys={int(starts.sum())}.",
            fix="Group by the key, or name more key columns.",
        )
    return SortedRun(rows_at(rows, order), hashes[order], np.ones(len(order), dtype=bool))


def diff_commands(schema: ShardSchema, wanted: pa.Table, now: MirrorLookup, time_ms: int) -> Commands:
    """Return the commands that make the contents `now` equal to `wanted` at `time_ms`. Raises InvalidError as
    `check_distinct`.

    Rows that exist already yield commands too; `resolve` finds that they change nothing.
    """
    run, key = check_distinct(schema, wanted), list(schema.key)
    live = now.live_rows()
    at = run.find(live.select(key), hash_rows(live, key), key) if live.num_rows else np.zeros(0, np.int64)
    gone = live.filter(pa.array(at < 0))
    changed = rows_as_commands(schema, run.rows, time_ms, run.live)
    deleted = rows_as_commands(schema, gone, time_ms, np.zeros(gone.num_rows, bool))
    return Commands(pa.concat_tables([changed, deleted]))


def rows_as_commands(schema: ShardSchema, rows: pa.Table, time_ms: int, live: Mask) -> pa.Table:
    """Return rows of the shard's columns as commands of one time; where not `live`, as deletions of their keys."""
    n = rows.num_rows
    extra: dict[str, Any] = {
        TIME: pa.array(np.full(n, time_ms, dtype=np.int64)),
        ORDER: pa.array(np.zeros(n, dtype=np.int64)),
        PARTITION: pa.array(np.zeros(n, dtype=np.int32)),
        LIVE: pa.array(live),
    }
    target = command_schema(schema)
    arrays: Sequence[Any] = [extra[f.name] if f.name in extra else rows.column(f.name) for f in target]
    return pa.Table.from_arrays(list(arrays), schema=target)
