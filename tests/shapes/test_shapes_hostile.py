"""Hostile requests: long and deep clauses, many parameters, expensive patterns, huge rows and huge tables.

The test measures the CPU time that the loop's thread spends without a pause, which is independent of other processes.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import time
import urllib.parse
from collections.abc import AsyncIterator

import pyarrow as pa
import pytest

from support.shapes.fake_shard import FakeShard
from support.shapes.world import ShapeWorld
from support.waiting import until
from tidemill.base.runtime.tasks import Tasks
from tidemill.shapes import ShapeSettings
from tidemill.shapes.loop_share import LoopShare, Step, Turn
from tidemill.shapes.where import Type, compile_where
from tidemill.shards.api import Column, Delta, ShardSchema

pytestmark = pytest.mark.postgres

STALL_S = 0.05

DDL = """
CREATE TABLE item (id int PRIMARY KEY, grp int NOT NULL, t text, n numeric, a int[]);
INSERT INTO item SELECT n, n % 100, repeat('a', 300), 1, '{1,2}' FROM generate_series(1, 20000) n;
INSERT INTO item VALUES (-1, 0, repeat('a', 3000000), 1, '{}'), (-2, 0, 'x', repeat('9', 15000)::numeric, NULL);
"""


def stall_s() -> float:
    """Return STALL_S, or five times the time of one update of the most expensive clause (3,000 sums a row) if that is
    longer. No piece of work is larger than that, and a slow machine slows it down like all others."""
    where = compile_where(CLAUSES[3], (), {"id": Type("int4")})
    spent_s = []
    for n in range(9):
        before_s = time.thread_time()
        assert not where.matches({"id": str(n)}) and not where.matches({"id": str(-n - 5)})
        spent_s.append(time.thread_time() - before_s)
    return max(STALL_S, 5 * statistics.median(spent_s))


class CpuWatch:
    """The longest time that the loop's thread worked between two turns of a task that does nothing."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def run(self) -> None:
        while True:
            before_s = time.thread_time()
            await asyncio.sleep(0)
            self.longest_s = max(self.longest_s, time.thread_time() - before_s)
            await asyncio.sleep(0.001)
            self.longest_s = max(self.longest_s, time.thread_time() - before_s)


class SliceWatch:
    """The longest slice of shapes' own work. (This world decodes the stream on its loop, which a capture does not.)"""

    def __init__(self, share: LoopShare) -> None:
        self.longest_s = 0.0
        work = share.run_step

        async def watched(step: Step) -> None:
            def measured(turn: Turn) -> bool:
                before_s = time.thread_time()
                try:
                    return step(turn)
                finally:
                    self.longest_s = max(self.longest_s, time.thread_time() - before_s)

            await work(measured)

        share.run_step = watched  # type: ignore[method-assign]


class Prebuilt(FakeShard):
    """A shard whose tables are built before the measurement."""

    def __init__(self, name: str, schema: ShardSchema) -> None:
        super().__init__(name, schema)
        names = [column.name for column in schema.columns]
        self.upper = 1_000
        base = [(10, 1, {"id": n, "v": "v" * 100}) for n in range(15_000)]
        self._contents = self.table(base).select(names)
        self._delta = Delta(1_000, 2_000, self.table([(1500, 1, {**row, "id": -row["id"]}) for _, _, row in base]))
        self.go = asyncio.Event()

    async def snapshot(self, as_of: int, timeout_s: float | None = None) -> pa.Table:
        return self._contents

    async def listen(self, lower: int) -> AsyncIterator[Delta]:
        await self.go.wait()
        yield self._delta
        await asyncio.Event().wait()


CLAUSES = [
    " AND ".join(["id > 0"] * 3_000),
    " OR ".join(f"id = {n}" for n in range(3_000)),
    "id IN (" + ",".join(str(n) for n in range(9_000)) + ")",
    "id IN (" + ",".join(["id + 1"] * 3_000) + ")",
    "id = ANY('{" + ",".join(str(n) for n in range(9_000)) + "}')",
    "(" * 3_000 + "id = 1" + ")" * 3_000,
    "NOT " * 4_000 + "true",
    "t LIKE '" + "%a" * 10_000 + "%b'",
    "t LIKE '%" + "_a" * 5_000 + "%b'",
    "t LIKE '%" + "a" * 20_000 + "b%'",
    "n * n * n * n > 1 AND n / 7 > 0 AND n % 7 > 0",
    "1e9000 * n > 1e-9000",
    "id = ANY(a)",
    "t || t || t || t > 'b' COLLATE \"C\"",
    "upper(lower(upper(t))) ILIKE '%b%'",
]


async def test_f110_no_request_keeps_the_loop_for_longer_than_a_moment(postgres_dsn: str) -> None:
    schema = ShardSchema((Column("id", "int32"), Column("v", "string")), ("id",))
    shard = Prebuilt("s", schema)

    async def opener(name: str) -> FakeShard:
        return shard

    settings = ShapeSettings(long_poll_s=1, load_timeout_s=20)
    async with ShapeWorld(postgres_dsn, DDL, settings, shards=opener) as world:
        await world.get(table="item", offset="-1", where="id = 7")  # what loads once is loaded
        gc.collect()
        gc.freeze()  # as a node does when it is assembled
        failures: list[BaseException] = []
        watch = CpuWatch()
        async with Tasks(lambda _, error: failures.append(error)) as tasks:
            tasks.spawn(watch.run(), name="watch")
            seen: dict[str, float] = {}

            async def ask(name: str, **params: str) -> None:
                watch.longest_s = 0.0
                answer = await world.get(offset="-1", **params)
                seen[f"{name}: {answer.status}"] = watch.longest_s
                assert answer.status in (200, 400, 503), answer.body[:200]

            for clause in CLAUSES:
                if len(urllib.parse.quote(clause)) < 60_000:
                    await ask(clause[:30], table="item", where=clause)
            many = {f"params[{n}]": str(n) for n in range(1, 1_001)}
            listed = "id IN (" + ",".join(f"${n}" for n in range(1, 1_001)) + ")"
            await ask("a thousand parameters", table="item", where=listed, **many)
            await ask("parameters as JSON", table="item", where="id = $1", params=json.dumps(["1"] * 5_000))
            await ask("columns", table="item", columns=",".join(["id"] * 9_000))
            await ask("the whole table", table="item")
            now = {"table": "item", "log": "changes_only"}
            for clause in CLAUSES:
                watch.longest_s = 0.0
                answer = await world.post({"where": clause, "order_by": "t, id", "limit": 100}, offset="now", **now)
                seen[f"a subset where {clause[:30]}: {answer.status}"] = watch.longest_s
                assert answer.status in (200, 400, 503), answer.body[:200]
            bodies: dict[str, dict[str, object]] = {
                "ordered by many": {"order_by": ",".join(["t || t || t"] * 5_000)},
                "parameters": {"where": "id = $1", "params": ["1"] * 200_000},
                "members": {f"k{n}": 1 for n in range(60_000)},
                "all rows": {},
            }
            for name, body in [(name, json.dumps(each).encode()) for name, each in bodies.items()]:
                await asyncio.sleep(0.01)  # what was made here is not the server's
                watch.longest_s = 0.0
                answer = await world.post(body, offset="now", **now)
                seen[f"a subset by {name}: {answer.status}"] = watch.longest_s
                assert answer.status in (200, 400), (name, answer.body[:200])
            await ask("a whole shard", table="shard.s")
            watch.longest_s = 0.0
            slices = SliceWatch(world.service.share)
            shard.go.set()
            await world.db.execute("UPDATE item SET t = t || 'z' WHERE id < 10000 AND id > 0")
            await until(lambda: world.delivered and world.sink.taken == world.delivered[-1].commit_lsn)
            await until(lambda: world.sink.held_bytes == 0)
            (followed,) = [s for s in world.service.shapes() if s["source"] == "shard:s"]
            await until(lambda: world.service.find_by_handle(str(followed["handle"])).last_seen == 1_999)  # type: ignore[union-attr]
            seen["10,000 updates for all of these, and 15,000 rows of a shard"] = slices.longest_s
        assert not failures
        limit_s = stall_s()
        too_long = {name: round(spent_s * 1000, 1) for name, spent_s in seen.items() if spent_s > limit_s}
        assert not too_long
