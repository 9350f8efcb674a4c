"""Memory backends, rows, a sequential model, and a consensus that loses answers, for all shard tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import pyarrow as pa

from tidemill.base.clock import ManualClock, Rand, SystemClock
from tidemill.base.errors import UnavailableError, UnknownOutcomeError
from tidemill.consensus.api import LogHead
from tidemill.consensus.memory import MemoryConsensus, MemoryState
from tidemill.objects.memory import MemoryObjects
from tidemill.shards.api import DIFF, TIME, Column, ShardSchema
from tidemill.shards.handle import LogShard
from tidemill.shards.registry import open_shard

T = TypeVar("T")

SCHEMA = ShardSchema((Column("k", "int64"), Column("v", "string")), ("k",))
Row = tuple[int | None, str | None, int, int]
"""k, v, time, diff"""


def updates(rows: Iterable[Row]) -> pa.Table:
    listed = list(rows)
    return pa.table(
        {
            "k": pa.array([r[0] for r in listed], pa.int64()),
            "v": pa.array([r[1] for r in listed], pa.string()),
            TIME: pa.array([r[2] for r in listed], pa.int64()),
            DIFF: pa.array([r[3] for r in listed], pa.int64()),
        }
    )


def tuples(table: pa.Table) -> list[Row]:
    """Sorted (k, v, time, diff) of a table of updates."""
    columns = [table.column(n).to_pylist() for n in ("k", "v", TIME, DIFF)]
    return sorted(zip(*columns, strict=True), key=repr)


def contents_of(table: pa.Table) -> Counter[tuple[Any, ...]]:
    return Counter(zip(table.column("k").to_pylist(), table.column("v").to_pylist(), strict=True))


def summed(rows: Iterable[Row], as_of: int) -> Counter[tuple[Any, ...]]:
    """The sequential model: the multiset at `as_of`."""
    out: Counter[tuple[Any, ...]] = Counter()
    for k, v, time, diff in rows:
        if time <= as_of:
            out[(k, v)] += diff
    assert all(n >= 0 for n in out.values())
    return +out


class FlakyConsensus(MemoryConsensus):
    """A consensus whose appends follow a script of (took effect, answered): all four combinations.

    `appends` counts requests that reached the engine, so a test can assert that none did. `interfere` runs between an
    append that took effect without an answer and the next call of its caller.
    """

    def __init__(self, state: MemoryState | None = None) -> None:
        super().__init__(SystemClock(), state)
        self.script: list[tuple[bool, bool]] = []
        self.appends = 0
        self.requests = 0

    async def _submit(self, op: Any) -> Any:
        self.requests += 1
        return await super()._submit(op)

    async def append(self, log: str, term: int, expected_next: int, records: Sequence[bytes], nonce: str) -> LogHead:
        self.appends += 1
        took_effect, reported = self.script.pop(0) if self.script else (True, True)
        if not took_effect:
            if reported:
                raise UnavailableError("refused on purpose")
            raise UnknownOutcomeError("lost before it happened")
        head = await super().append(log, term, expected_next, records, nonce)
        if not reported:
            raise UnknownOutcomeError("lost after it happened")
        return head


class World:
    """One set of durable backends; `open` gives another process's handle on the same shard."""

    def __init__(self, seed: int = 1) -> None:
        self.clock = ManualClock()
        self.wall = SystemClock()
        self.rand = Rand(seed)
        self.durable = MemoryState()
        self.objects = MemoryObjects(self.clock)

    def consensus(self) -> FlakyConsensus:
        return FlakyConsensus(self.durable)

    async def open(
        self,
        name: str = "t",
        schema: ShardSchema | None = SCHEMA,
        consensus: MemoryConsensus | None = None,
        writer: str = "",
    ) -> LogShard:
        backend = consensus or self.consensus()
        shard = await open_shard(backend, self.objects, self.wall, self.rand, name, schema)
        shard.writer = writer or shard.writer
        return shard


async def append(shard: LogShard, lower: int, upper: int, rows: Sequence[Row], token: str = "") -> int:
    parts = [await shard.write_part(updates(rows))] if rows else []
    return await shard.compare_and_append(lower, upper, parts, token)
