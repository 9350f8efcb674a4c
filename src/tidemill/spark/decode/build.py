"""Decoded columns → one command table: live rows, then deletions that carry their key columns only."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidemill.shards.front import TIME, ShardSchema
from tidemill.spark.upsert.commands import LIVE, ORDER, PARTITION, command_schema


def command_table(
    schema: ShardSchema,
    live: Mapping[str, pa.Array],
    live_at: npt.NDArray[np.int64],
    absent: Mapping[str, pa.Array],
    absent_at: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64],
    times: npt.NDArray[np.int64],
    partition: int,
) -> pa.Table:
    """`live_at` and `absent_at` are the records' places in `offsets` and `times`; the mappings hold their columns."""
    at = np.concatenate([live_at, absent_at])
    gone = len(absent_at)
    meta = {
        TIME: pa.array(times[at]),
        ORDER: pa.array(offsets[at]),
        PARTITION: pa.array(np.full(len(at), partition, dtype=np.int32)),
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
    return pa.Table.from_arrays(arrays, schema=target)
