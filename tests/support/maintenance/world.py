"""A few shards on memory stores under a clock that tests advance, and a metastore with prescribed answers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

import pyarrow as pa

from tidemill.base.clock import ManualClock, Rand
from tidemill.base.status.status import StatusTracker
from tidemill.consensus.memory import MemoryConsensus, MemoryState
from tidemill.maintenance.scheduler import JobContext, Retention, StepBudget
from tidemill.maintenance.shards.orphans import OrphanCollector
from tidemill.maintenance.shards.upkeep import ShardUpkeep
from tidemill.metastore.rows import SHARDS
from tidemill.metastore.rows.shards import ShardRow
from tidemill.objects.memory import MemoryObjects
from tidemill.shards.api import DIFF, TIME, Column, ShardSchema
from tidemill.shards.compaction.compaction import OldestVersion, any_version
from tidemill.shards.handle import LogShard
from tidemill.shards.registry import open_shard

T = TypeVar("T")
SCHEMA = ShardSchema((Column("k", "int64"), Column("v", "binary")), ("k",))
KEYS = range(100)
Update = tuple[int, bytes, int, int]
"""k, v, time, diff"""


class Row:
    def __init__(self, seqno: int, value: bytes) -> None:
        self.seqno, self.value = seqno, value


ALL = 1 << 50
"""An upper that says: the newest manifest holds all of the shard."""


class Rows:
    """The part of the metastore that the shard jobs read: rows of the checkpoint, as far as `versions` contains
    them.
    """

    def __init__(self) -> None:
        self.versions: dict[str, tuple[str, int]] = {}
        """shard → (id, version) as persisted"""
        self.since: dict[str, int] = {}
        self.uppers: dict[str, int] = {}
        self.listed: dict[str, list[Any]] = {}
        """family → rows of the catalogue"""

    async def get_row(self, key: bytes, *, fresh: bool = True) -> Row | None:
        (name,) = SHARDS.decode_key(key)
        if name not in self.versions:
            return None
        shard_id, version = self.versions[name]
        row = ShardRow(name, shard_id, self.since.get(name, 0), self.uppers.get(name, ALL), version)
        return Row(version, SHARDS.encode(row)[1])

    async def rows(self, family: Any, *, fresh: bool = True) -> list[Any]:
        if family is not SHARDS:
            return self.listed.get(family.name, [])
        return [ShardRow(name, shard_id, 0, 0) for name, (shard_id, _) in self.versions.items()]

    async def domains(self) -> Sequence[object]:
        return [object()]


class World:
    def __init__(self, retention: Retention | None = None, oldest_version: OldestVersion = any_version) -> None:
        self.clock = ManualClock(1_700_000_000_000)
        self.rand = Rand(1)
        self.random = random.Random(1)
        self.durable = MemoryState()
        self.objects = MemoryObjects(self.clock)
        self.rows = Rows()
        self.tracker = StatusTracker()
        metastore: Any = self.rows
        self.context = JobContext(
            self.consensus(), self.objects, metastore, self.clock, self.rand, retention or Retention(),
            oldest_version=oldest_version,
        )  # fmt: skip
        self.upkeep = ShardUpkeep(self.context, self.tracker)
        self.orphans = OrphanCollector(self.context)
        self.updates: list[Update] = []
        self.live: dict[int, bytes] = {}

    def consensus(self) -> MemoryConsensus:
        return MemoryConsensus(self.clock, self.durable)

    async def open(self, name: str = "t") -> LogShard:
        return await open_shard(self.consensus(), self.objects, self.clock, self.rand, name, SCHEMA)

    def change(self, keys: Sequence[int], time: int, size_bytes: int = 300) -> pa.Table:
        """Every key gets a new value: a retraction of the old one, if there is one, and an insertion."""
        rows: list[Update] = []
        for key in keys:
            if key in self.live:
                rows.append((key, self.live[key], time, -1))
            self.live[key] = self.random.randbytes(size_bytes)
            rows.append((key, self.live[key], time, 1))
        self.updates += rows
        columns = list(zip(*rows, strict=True))
        types = {"k": pa.int64(), "v": pa.binary(), TIME: pa.int64(), DIFF: pa.int64()}
        return pa.table({name: pa.array(c, t) for (name, t), c in zip(types.items(), columns, strict=True)})

    async def write(self, shard: LogShard, keys: Sequence[int], size_bytes: int = 300) -> None:
        """One batch up to and including now, or the first free time if that is later."""
        upper = shard.state.upper
        time = max(self.clock.now_ms(), upper)
        part = await shard.write_part(self.change(keys, time, size_bytes))
        await shard.compare_and_append(upper, time + 1, [part], "")

    async def tend(self, *, persisted: bool = True) -> None:
        """Run one step of the job, by default after a checkpoint of everything."""
        if persisted:
            for tended in self.upkeep._tended.values():
                state = tended.shard.state
                self.rows.versions[state.name] = (state.shard_id, state.version)
                self.rows.since[state.name] = state.since
        for tended in self.upkeep._tended.values():
            tended.next_s = 0.0
        await self.upkeep.run(StepBudget(self.clock, 1))

    async def tend_for(self, seconds: int, *, persisted: bool = True) -> None:
        for _ in range(0, seconds, 10):
            self.clock.advance(10_000)
            await self.tend(persisted=persisted)

    def at(self, as_of: int) -> Counter[tuple[int, bytes]]:
        """The sequential model: the multiset at `as_of`."""
        out: Counter[tuple[int, bytes]] = Counter()
        for key, value, time, diff in self.updates:
            if time <= as_of:
                out[key, value] += diff
        return +out

    def stored(self, prefix: str = "shards/") -> dict[str, int]:
        return {key: len(data) for key, (data, _) in self.objects._objects.items() if key.startswith(prefix)}


def contents(table: pa.Table) -> Counter[tuple[int, bytes]]:
    return Counter(zip(table.column("k").to_pylist(), table.column("v").to_pylist(), strict=True))
