"""Decoded columns → one command table: live rows, then deletions with key columns only; keys are normalized."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidemill.shards.api import TIME, ShardSchema
from tidemill.shards.parts.key_hash import normalize_keys
from tidemill.spark.decode.records import Records
from tidemill.spark.upsert.commands import LIVE, ORDER, PARTITION, command_schema


def build_command_table(
    schema: ShardSchema,
    live: Mapping[str, pa.Array],
    live_at: npt.NDArray[np.int64],
    absent: Mapping[str, pa.Array],
    absent_at: npt.NDArray[np.int64],
    records: Records,
) -> pa.Table:
    """Build the table. `live_at` and `absent_at` are places in `records`; the mappings hold their columns."""
    at = np.concatenate([live_at, absent_at])
    gone = len(absent_at)
    meta = {
        TIME: pa.array(records.times[at]),
        ORDER: pa.array(records.offsets[at]),
        PARTITION: pa.array(np.full(len(at), records.partition, dtype=np.int32)),
        LIVE: pa.array(np.concatenate([np.ones(len(live_at), dtype=bool), np.zeros(gone, dtype=bool)])),
    }
    target = command_schema(schema)
    arrays = []
    for field in target:
        if field.name in meta:
            arrays.append(meta[field.name])
            continue
        column = live[field.name]
        if gone:
            below = absent[field.name] if field.name in absent else pa.nulls(gone, field.type)
            column = pa.concat_arrays([column, below])
        arrays.append(column)
    return normalize_keys(pa.Table.from_arrays(arrays, schema=target), schema.key)
