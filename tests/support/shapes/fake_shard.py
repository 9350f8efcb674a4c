"""A Shard in memory, complete enough to be followed: updates by time, an upper, a snapshot, listen."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pyarrow as pa

from tidemill.shards.api import DIFF, TIME, Batch, Delta, HistoryLostError, Part, ShardSchema

ARROW = {
    "bool": pa.bool_(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.string(),
    "json": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}


def arrow_type(name: str) -> pa.DataType:
    if name.startswith("decimal("):
        precision, scale = name[8:-1].split(",")
        return pa.decimal128(int(precision), int(scale))
    return ARROW[name]


Update = tuple[int, int, dict[str, Any]]
"""(time, diff, row)"""


class FakeShard:
    def __init__(self, name: str, schema: ShardSchema) -> None:
        self.name = name
        self.shard_id = f"{name}-1"
        self.schema = schema
        self.since = 0
        self.upper = 0
        self.updates: list[Update] = []
        self._news = asyncio.Condition()
        self.listeners = 0
        self.stored_bytes = 1_000

    def table(self, updates: Sequence[Update]) -> pa.Table:
        columns: dict[str, Any] = {
            c.name: pa.array([row[c.name] for _, _, row in updates], arrow_type(c.type)) for c in self.schema.columns
        }
        columns[TIME] = pa.array([time for time, _, _ in updates], pa.int64())
        columns[DIFF] = pa.array([diff for _, diff, _ in updates], pa.int64())
        return pa.table(columns)

    async def append(self, upper: int, *updates: Update) -> None:
        assert all(self.upper <= time < upper for time, _, _ in updates)
        async with self._news:
            self.updates.extend(updates)
            self.upper = upper
            self._news.notify_all()

    async def frontiers(self, *, fresh: bool = True) -> tuple[int, int]:
        return self.since, self.upper

    async def snapshot(self, as_of: int, timeout_s: float | None = None) -> pa.Table:
        if not self.since <= as_of < self.upper:
            raise HistoryLostError(f"not readable: as_of={as_of}")
        counts: Counter[tuple[Any, ...]] = Counter()
        for time, diff, row in self.updates:
            if time <= as_of:
                counts[tuple(row[c.name] for c in self.schema.columns)] += diff
        names = [c.name for c in self.schema.columns]
        rows = [(0, 1, dict(zip(names, row, strict=True))) for row, n in counts.items() for _ in range(n)]
        return self.table(rows).select(names)

    async def listen(self, lower: int) -> AsyncIterator[Delta]:
        self.listeners += 1
        try:
            while True:
                async with self._news:
                    while self.upper <= lower:
                        await self._news.wait()
                    step = Delta(lower, self.upper, self.table([u for u in self.updates if u[0] >= lower]))
                yield step
                lower = step.upper
        finally:
            self.listeners -= 1

    async def write_part(self, rows: pa.Table, bucket: int = 0) -> Part:
        raise NotImplementedError

    async def compare_and_append(self, lower: int, upper: int, parts: Sequence[Part], token: str) -> int:
        raise NotImplementedError

    async def batches(self, lower: int) -> list[Batch]:
        raise NotImplementedError

    async def read_batch(self, batch: Batch, lower: int, upper: int) -> pa.Table:
        raise NotImplementedError

    async def batches_until(self, as_of: int, timeout_s: float | None = None) -> list[Batch]:
        return [Batch(0, as_of + 1, (Part(len(self.updates), self.stored_bytes),))]

    async def wait_upper(self, beyond: int, timeout_s: float) -> int:
        raise NotImplementedError
