"""One table in a directory, its publisher, and readers of what it publishes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa

from support.lake.readers import plain_types
from tidemill.base.clock import ManualClock, Rand
from tidemill.consensus.memory import MemoryConsensus, MemoryState
from tidemill.lake.pointer import load_table
from tidemill.lake.publish.stored import LakeStores, Stored
from tidemill.lake.publish.table_publisher import TablePublisher
from tidemill.lake.settings import LakeSettings
from tidemill.lake.vectors.part_columns import PartColumns
from tidemill.objects.local import LocalObjects
from tidemill.shards.api import ShardSchema
from tidemill.shards.handle import LogShard
from tidemill.shards.registry import open_shard

START_MS = 1_800_000_000_000


class LakeWorld:
    """Durable backends under a directory. `now_ms` is a clock that only moves on request."""

    def __init__(self, directory: Path, *, format: int = 3, keep_s: float = 3600.0, seed: int = 1) -> None:
        self.clock = ManualClock(START_MS)
        self.rand = Rand(seed)
        self.objects = LocalObjects.open(str(directory), self.clock, self.rand)
        self.durable = MemoryState()
        self.settings = LakeSettings(f"file://{directory}", format=format, keep_s=keep_s)

    def consensus(self) -> MemoryConsensus:
        return MemoryConsensus(self.clock, self.durable)

    def stores(self, settings: LakeSettings | None = None) -> LakeStores:
        return LakeStores(self.consensus(), self.objects, self.clock, self.rand, settings or self.settings)

    async def table(self, name: str = "t", schema: ShardSchema | None = None) -> LogShard:
        return await open_shard(self.consensus(), self.objects, self.clock, self.rand, name, schema)

    async def publisher(self, name: str = "t", settings: LakeSettings | None = None) -> TablePublisher:
        """Return the publisher of another process."""
        return TablePublisher(self.stores(settings), PartColumns(self.objects), await self.table(name))

    async def publish(self, publisher: TablePublisher, time_ms: int | None = None) -> Stored:
        _, upper = await publisher.shard.frontiers()
        return await publisher.publish(upper - 1 if time_ms is None else time_ms)

    async def location(self, name: str = "t") -> str:
        return (await load_table(self.consensus(), self.objects, name)).location


async def contents(shard: LogShard, time_ms: int) -> Counter[Any]:
    """Return the rows of the table at a time, by the product's own reader."""
    return rows_of(await shard.snapshot(time_ms))


def rows_of(table: pa.Table) -> Counter[Any]:
    """Return rows as a multiset of texts by which all values of all types differ."""
    columns = [[_text(value) for value in column] for column in plain_types(table).columns]
    return Counter(zip(*columns, strict=True) if columns else [])


def _text(value: Any) -> str:
    if not value.is_valid:
        return "null"
    kind = value.type
    if pa.types.is_temporal(kind) or pa.types.is_floating(kind):
        bits = {32: pa.int32(), 64: pa.int64()}[kind.bit_width]
        return f"{kind}:{pa.array([value], kind).view(bits)[0].as_py()}"
    return f"{kind}:{value.as_py()!r}"
