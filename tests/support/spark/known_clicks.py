"""A table whose contents the test knows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from tidemill.base.clock import Rand, SystemClock
from tidemill.maintenance.shards.upkeep import collect_garbage
from tidemill.shards.api import DIFF, TIME, Column, ShardSchema
from tidemill.shards.compaction.compaction import compact_once

SCHEMA = ShardSchema((Column("id", "int64"), Column("product", "int64"), Column("note", "string")), ("id",))


class Clicks:
    """A shard whose contents are known: id → product."""

    def __init__(self, harbour: Any, name: str = "clicks") -> None:
        self.harbour = harbour
        self.shard = harbour.portal.call(harbour.stores.shard(name, SCHEMA))
        self.rows: dict[int, int] = {}
        self.upper = 0

    def change(self, ids: Any, product: int | None) -> None:
        """All at one time: these rows are of the product, or gone. The shard's upper moves by 10."""
        time = self.upper
        self.upper += 10
        gone = {i: self.rows.pop(i) for i in map(int, ids) if i in self.rows}
        new = {} if product is None else {int(i): product + int(i) % 3 for i in ids}
        self.rows |= new
        keys = np.array([*gone, *new], dtype=np.int64)
        table = pa.table(
            {
                "id": keys,
                "product": np.array([*gone.values(), *new.values()], dtype=np.int64),
                "note": pa.array([f"note {i} " * 5 for i in keys], pa.string()),
                TIME: np.full(len(keys), time),
                DIFF: np.array([-1] * len(gone) + [1] * len(new), dtype=np.int64),
            }
        )

        async def run() -> None:
            parts = [await self.shard.write_part(table)] if len(keys) else []
            await self.shard.compare_and_append(time, self.upper, parts, "")

        self.harbour.portal.call(run())

    def merge(self, since: int) -> None:
        """Merge as the maintenance job does, immediately: history ends at `since`, and replaced parts without a
        hold are deleted.
        """

        async def run() -> None:
            stores = self.harbour.stores
            shard = await stores.shard(self.shard.name)
            await shard.downgrade_since("keeper", 1, since)
            await compact_once(shard, stores.objects, Rand())
            await collect_garbage(shard, stores.objects, SystemClock(), after_ms=-1, persisted=1 << 60)
            await shard.aclose()

        self.harbour.portal.call(run())

    def expected(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for product in self.rows.values():
            found[product] = found.get(product, 0) + 1
        return found
