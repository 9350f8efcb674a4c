"""A table with a column of several types, appended and merged in parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from tidemill.shards.api import DIFF, TIME, Column, ShardSchema
from tidemill.shards.compaction.compaction import compact_once

COLUMNS = (
    Column("k", "int64"), Column("v", "string"), Column("x", "float64"), Column("at", "timestamp"),
    Column("d", "date"), Column("m", "decimal(12,2)"), Column("b", "binary"), Column("s", "int16"),
)  # fmt: skip

SCHEMA = ShardSchema(COLUMNS, ("k",))


def rows(keys: Any, version: int, time: int, diff: int) -> pa.Table:
    """Return the row of each key for one version, always the same; -1 is the key null."""
    keys = np.asarray(keys)
    n = len(keys)
    odd = keys % 7 == 0
    columns = {
        "k": pa.array(keys, mask=keys == -1),
        "v": pa.array([f"{k}-{version}" for k in keys], pa.string()),
        "x": pa.array(np.where(odd, np.where(keys % 2 == 0, np.nan, -0.0), keys * 1.5)),
        "at": pa.array(np.where(odd, -(2**63) + 1, keys * 10**9), pa.timestamp("us", "UTC")),
        "d": pa.array((keys % 40_000 - 20_000).astype(np.int32), pa.int32()).cast(pa.date32()),
        "m": pa.array(keys).cast(pa.decimal128(21, 2)).cast(pa.decimal128(12, 2)),
        "b": pa.array([b"\0" * (k % 3) for k in keys], pa.binary()),
        "s": pa.array((keys % 100).astype(np.int16), mask=odd),
    }
    return pa.table({**columns, TIME: np.full(n, time), DIFF: np.full(n, diff)})


def append(harbour: Any, name: str, upper: int, *parts: pa.Table, schema: ShardSchema = SCHEMA) -> None:
    async def run() -> None:
        shard = await harbour.stores.shard(name, schema)
        lower = (await shard.frontiers())[1]
        await shard.compare_and_append(lower, upper, [await shard.write_part(p) for p in parts], "")

    harbour.portal.call(run())


def merge(harbour: Any, name: str, since: int) -> None:
    """Merge as the maintenance job does: earlier updates become one part, encoded as merged parts are."""

    async def run() -> None:
        shard = await harbour.stores.shard(name)
        await shard.downgrade_since("keeper", 1, since)
        found = await compact_once(shard, harbour.stores.objects, harbour.stores.rand)
        assert found is not None and found.shown

    harbour.portal.call(run())


def holds(harbour: Any, name: str) -> list[str]:
    shard = harbour.shard(name)
    harbour.portal.call(shard.frontiers())
    return [h.reader.partition("/")[0] for h in shard.state.holds if h.reader != "keeper"]


def same(harbour: Any, name: str, frame: Any, as_of: int) -> int:
    """Check that the rows equal the shard's own snapshot, bit for bit. Return their number."""
    want = harbour.portal.call(harbour.shard(name).snapshot(as_of, 10))
    found = frame.toArrow().cast(want.schema)
    order = [("k", "ascending")]
    # As bytes: NaN is NaN, and 0.0 is not -0.0.
    assert [c.to_pylist() for c in _bits(found.sort_by(order)).columns] == [
        c.to_pylist() for c in _bits(want.sort_by(order)).columns
    ]
    return found.num_rows


def _bits(table: pa.Table) -> pa.Table:
    for name, kind in (("x", pa.int64()), ("at", pa.int64()), ("d", pa.int32())):
        column = table.column(name).combine_chunks().view(kind)
        table = table.set_column(table.column_names.index(name), name, column)
    return table


def explained(spark: Any, frame: Any, mode: str = "formatted") -> str:
    said: str = spark._jvm.PythonSQLUtils.explainString(frame._jdf.queryExecution(), mode)
    return said
