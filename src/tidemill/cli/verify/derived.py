"""Expected contents of a derived table: its function run again, in batch, on its inputs at the table's newest time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from tidemill.base.errors import UnavailableError
from tidemill.cli.verify.compare import Row
from tidemill.cli.verify.spool import Spool
from tidemill.shards.api import DIFF, Shard
from tidemill.spark.definition import DerivedTable
from tidemill.spark.derived.function_result import is_frame, not_a_frame_error, stored_rows
from tidemill.spark.types import local_frame, spark_schema

ATTEMPTS = 20


class RecomputedTable:
    """Recomputation of one derived table. `time_ms` is the compared time: the newest at which the table and all its
    inputs are final."""

    def __init__(self, spark: Any, table: DerivedTable, output: Shard, inputs: list[Shard]) -> None:
        self._spark = spark
        self._table = table
        self._output = output
        self._inputs = inputs
        self.time_ms = 0

    async def choose_comparison_time(self) -> int:
        """Return the last time that the table has reached. Raises UnavailableError while an input lags."""
        _, upper = await self._output.frontiers()
        self.time_ms = upper - 1
        for _ in range(ATTEMPTS):
            behind = [s.name for s in self._inputs if await s.wait_upper(self.time_ms, 1.0) <= self.time_ms]
            if not behind:
                return self.time_ms
        raise UnavailableError(
            f"inputs are behind the derived table: table={self._table.name} inputs={','.join(behind)}."
        )

    async def rows(self, scratch: Path) -> AsyncIterator[list[Row]]:
        """Yield the expected rows in key order, as `verify_expected` needs them."""
        contents = [await shard.snapshot(self.time_ms) for shard in self._inputs]
        result = await asyncio.to_thread(self._compute, contents)
        spool = Spool(scratch, "derived", self._output.schema)
        try:
            ones = pa.array([1] * result.num_rows, pa.int64())
            await spool.add_updates(result.append_column(DIFF, ones))
            async for chunk in spool.contents():
                yield chunk
        finally:
            await spool.aclose()

    def _compute(self, contents: list[pa.Table]) -> pa.Table:
        frames = [
            local_frame(self._spark, table, spark_schema(shard.schema.columns))
            for table, shard in zip(contents, self._inputs, strict=True)
        ]
        result = self._table.function(self._spark, *frames)
        if not is_frame(result):
            raise not_a_frame_error(self._table.name, result)
        return stored_rows(self._table.name, result.toArrow(), self._output.schema)
