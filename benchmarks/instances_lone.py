"""Contents that the many drivers wrote, at several times, and a single writer's run over the same topics and
bindings.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

import paths  # noqa: F401
from demo.runner import Runner
from instances_pipeline import LONE
from tidemill.shards.api import HistoryLostError

READER = "bench-instances"
WAIT_S = 10.0
DERIVED = "conversion_by_product"
CONVERSION = """
SELECT coalesce(c.product_id, s.product_id) AS product_id, coalesce(clicks, 0) AS clicks, coalesce(sold, 0) AS sold,
       coalesce(revenue, 0)::DECIMAL(18, 2) AS revenue
FROM (SELECT product_id, count(*) AS clicks FROM clicks GROUP BY product_id) c
FULL JOIN (SELECT product_id, sum(quantity)::BIGINT AS sold, sum(amount)::DECIMAL(18, 2) AS revenue
           FROM order_line GROUP BY product_id) s ON c.product_id = s.product_id
"""
"""The demo's derived table by another engine: what it should hold at a time that it was computed for."""


class Sample(msgspec.Struct):
    time_ms: int
    tables: list[str]


class Samples:
    """`take` while the many write: all tables at one time, kept as files. `compare` with the lone writer's."""

    def __init__(self, runner: Runner, directory: Path, tables: Sequence[str]) -> None:
        self.runner = runner
        self.directory = directory
        self.tables = tables
        self.taken: list[Sample] = []
        self.lost = 0

    async def take(self) -> None:
        """Take the contents at the last time of the derived table, if all are readable then; otherwise without it."""
        shards = {name: await self.runner._open_shard(name) for name in (*self.tables, DERIVED)}
        time_ms = (await shards[DERIVED].frontiers())[1] - 1
        for shard in shards.values():
            await shard.wait_upper(time_ms, WAIT_S)
        frontiers = {name: await shard.frontiers() for name, shard in shards.items()}
        chosen = list(shards)
        if not all(since <= time_ms < upper for since, upper in frontiers.values()):
            chosen = list(self.tables)
            time_ms = min(frontiers[name][1] for name in chosen) - 1
        if any(one.time_ms == time_ms for one in self.taken):
            return
        directory = self.directory / str(time_ms)
        directory.mkdir(parents=True, exist_ok=True)
        try:
            async with AsyncExitStack() as held:
                for name in chosen:
                    await held.enter_async_context(shards[name].hold_during(READER, time_ms))
                for name in chosen:
                    rows = await shards[name].snapshot(time_ms)
                    await asyncio.to_thread(pq.write_table, rows, directory / f"{name}.parquet")
        except HistoryLostError:
            self.lost += 1
            return
        self.taken.append(Sample(time_ms, chosen))

    @asynccontextmanager
    async def lone_held(self) -> AsyncIterator[None]:
        """Every time from where the lone writer is now stays readable inside."""
        async with AsyncExitStack() as held:
            for name in self.tables:
                shard = await self.runner._open_shard(LONE + name)
                since, upper = await shard.frontiers()
                await held.enter_async_context(shard.hold_during(READER, max(since, upper - 1)))
            yield

    async def compare(self) -> tuple[int, list[str]]:
        """(rows compared, differences in words) over all samples, the derived table and the dead letters."""
        rows, wrong = 0, []
        for sample in self.taken:
            lone = {}
            for name in sample.tables:
                theirs = pq.read_table(self.directory / str(sample.time_ms) / f"{name}.parquet")
                if name == DERIVED:
                    ours = duckdb.sql(CONVERSION, connection=_with(lone)).arrow().read_all()
                else:
                    ours = lone[name] = await (await self.runner._open_shard(LONE + name)).snapshot(sample.time_ms)
                rows += theirs.num_rows
                wrong += await asyncio.to_thread(differences, f"{name} at {sample.time_ms}", theirs, ours)
        for theirs_name, ours_name in ((DERIVED, LONE + DERIVED), ("shop.dead_letters", "lone.dead_letters")):
            theirs, ours = [await self._newest(name) for name in (theirs_name, ours_name)]
            rows += theirs.num_rows
            wrong += differences(theirs_name, theirs, ours)
        return rows, wrong

    async def _newest(self, name: str) -> pa.Table:
        shard = await self.runner._open_shard(name)
        _, upper = await shard.frontiers()
        return await shard.snapshot(upper - 1)


def differences(what: str, theirs: pa.Table, ours: pa.Table) -> list[str]:
    """Compare multisets of whole rows; return [] if they are equal."""
    connection = _with({"theirs": theirs, "ours": ours})
    columns = ", ".join(f'"{name}"' for name in theirs.column_names)
    counts = []
    for one, other in (("ours", "theirs"), ("theirs", "ours")):
        query = f"SELECT {columns} FROM {one} EXCEPT ALL SELECT {columns} FROM {other}"
        found = connection.execute(f"SELECT count(*) FROM ({query})").fetchone()
        counts.append(int(found[0]) if found else -1)
    if not any(counts):
        return []
    return [f"{what}: of {theirs.num_rows} rows missing {counts[0]}, extra {counts[1]}"]


def _with(tables: dict[str, pa.Table]) -> Any:
    connection = duckdb.connect()
    for name, rows in tables.items():
        connection.register(name, rows)
    return connection
