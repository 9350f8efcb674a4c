"""What a derived function returned: all of its columns, or a refusal; its rows as commands, but for some. Pure.

A row whose key is null, or is another row's too, ends nothing but itself: its key is absent, so that no old row stays
as if it were current, and `left_out` says so until a result has no such row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from tidemill.base.errors import Invalid
from tidemill.shards.front import ShardSchema
from tidemill.shards.hashing import hash_rows
from tidemill.shards.keys import normal_keys
from tidemill.shards.rows import Mask, one_chunk, shown, to_mask
from tidemill.shards.schema import conform, contents_schema
from tidemill.spark.upsert.arrays import group_by_key
from tidemill.spark.upsert.commands import Commands
from tidemill.spark.upsert.contents import difference
from tidemill.spark.upsert.lookup import Lookup

LEFT_OUT = "rows of the result have no key of their own"


def is_frame(result: Any) -> bool:
    """Of Spark's DataFrames, classic or Connect."""
    return hasattr(result, "schema") and hasattr(result, "toArrow")


def no_frame(table: str, result: Any) -> Invalid:
    kind = type(result)
    return Invalid(
        f"derived function returned no DataFrame: table={table} returned={kind.__module__}.{kind.__qualname__}.",
        fix="Return a DataFrame of Spark; spark.createDataFrame(rows) makes one.",
    )


def stored_rows(table: str, rows: pa.Table, schema: ShardSchema) -> pa.Table:
    """The rows under the table's schema. Raises Invalid: a column that the table does not have, or of another type."""
    known = {column.name for column in schema.columns}
    if more := [name for name in rows.column_names if name not in known]:
        raise Invalid(
            f"derived function returned more columns than for empty inputs: table={table} more={','.join(more)[:300]}.",
            fix="Make its columns independent of the rows, e.g. by pivot with a list of values.",
        )
    return conform(rows, contents_schema(schema))


def commands_of(table: str, schema: ShardSchema, wanted: pa.Table, now: Lookup, time_ms: int) -> tuple[Commands, str]:
    """Commands that make the contents `now` equal to the rows at `time_ms`; and what was left out, or ""."""
    try:
        return difference(schema, wanted, now, time_ms), ""
    except Invalid:
        good, left_out = _sifted(table, schema, wanted)
        return difference(schema, good, now, time_ms), left_out


def _sifted(table: str, schema: ShardSchema, rows: pa.Table) -> tuple[pa.Table, str]:
    """The rows that have a key of their own, and one sentence on the others."""
    null: Mask = np.zeros(rows.num_rows, dtype=bool)
    for name in schema.key:
        null |= to_mask(rows.column(name).is_null())
    keyed = one_chunk(normal_keys(rows.filter(pa.array(~null)), schema.key))
    order, starts = group_by_key(keyed, hash_rows(keyed, schema.key), schema.key)
    groups = np.cumsum(starts) - 1
    twice = np.zeros(len(order), dtype=bool)
    twice[order] = np.bincount(groups, minlength=1)[groups] > 1
    said = f"{LEFT_OUT}: table={table} null={int(null.sum())} twice={int(twice.sum())}"
    if twice.any():
        at = int(np.flatnonzero(twice)[0])
        said += "".join(f" {name}={shown(keyed.column(name)[at]):.100}" for name in schema.key)
    return keyed.filter(pa.array(~twice)), said
