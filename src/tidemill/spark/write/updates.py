"""Updates of a write in one hash range: staged rows and the shard's contents → updates at one time. Pure."""

from __future__ import annotations

import pyarrow as pa

from tidemill.shards.api import ShardSchema
from tidemill.shards.parts.arrow_rows import to_mask
from tidemill.shards.parts.schema import conform_rows, contents_schema
from tidemill.spark.upsert.commands import LIVE, Commands
from tidemill.spark.upsert.diff import check_distinct, diff_commands, rows_as_commands
from tidemill.spark.upsert.mirror import Mirror
from tidemill.spark.upsert.resolve import resolve
from tidemill.spark.write.schema_match import WriteFrame


def compute_updates(
    frame: WriteFrame, schema: ShardSchema, rows: pa.Table, contents: pa.Table, lower: int, at: int
) -> pa.Table:
    """Return updates at time `at` for an append of [lower, at + 1), sorted by hash.

    `rows` have the DataFrame's columns and `_live`; `schema` is the shard's and contains them; `contents` are those at
    `lower` - 1. Raises InvalidError if a key occurs twice, CorruptError if a key has two live rows in the shard.
    """
    target = contents_schema(schema)
    for field in target:
        if frame.keys_only and field.name not in rows.column_names:
            rows = rows.append_column(field, pa.nulls(rows.num_rows, field.type))
    run = check_distinct(schema, conform_rows(rows, target.append(pa.field(LIVE, pa.bool_()))))
    mirror = Mirror.hydrate(schema, contents, lower)
    if frame.overwrite:
        commands = diff_commands(schema, run.rows.select(target.names), mirror, at)
    else:
        commands = Commands(rows_as_commands(schema, run.rows, at, to_mask(run.rows.column(LIVE))))
    return resolve(schema, commands, mirror, lower, at + 1).updates
