"""Shapes on the real capture and real shards: connections break, and clients end equal to SELECT."""

from __future__ import annotations

import asyncio
import random

import pyarrow as pa
import pytest

from support.shapes.real_world import DDL, RealWorld, equal_in_the_end
from support.shapes.world import Client
from support.waiting import until
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import MissingError
from tidemill.shapes import ShapeSettings
from tidemill.shards.api import DIFF, TIME, Column, ShardSchema
from tidemill.shards.registry import open_shard

pytestmark = pytest.mark.postgres


async def test_clients_end_equal_to_select_while_the_replication_connection_breaks(postgres_dsn: str) -> None:
    async with RealWorld(postgres_dsn, DDL, ShapeSettings(long_poll_s=0.5)) as world:
        starting = await world.get(table="stock", offset="-1")
        assert starting.status in (200, 503)
        await until(lambda: world.capture.streaming)
        where = "qty < 95 AND w <> 2"
        everything, some = await world.sync(table="stock"), await world.sync(table="stock", where=where)
        rand = random.Random(11)

        async def load() -> None:
            for step in range(60):
                async with world.db.transaction():
                    for _ in range(rand.randint(1, 12)):
                        w, i = rand.randint(1, 3), rand.randint(1, 50)
                        await world.db.execute(
                            rand.choice(
                                [
                                    f"UPDATE stock SET qty = qty - {rand.randint(1, 4)} WHERE w = {w} AND i = {i}",
                                    f"DELETE FROM stock WHERE w = {w} AND i = {i}",
                                    f"INSERT INTO stock VALUES ({w}, {i}, 90, NULL) ON CONFLICT DO NOTHING",
                                    f"UPDATE stock SET w = 4 - w WHERE w = {w} AND i = {i} AND NOT EXISTS"
                                    f" (SELECT 1 FROM stock o WHERE o.w = 4 - {w} AND o.i = {i})",
                                ]
                            )  # type: ignore[arg-type]
                        )
                if step % 20 == 10:
                    await world.break_stream()

        loading = asyncio.ensure_future(load())
        late: list[Client] = []
        while not loading.done():
            await everything.step(live=True)
            await some.step(live=True)
            late.append(await world.sync(table="stock", where=f"qty > {len(late)}"))
        await loading
        await equal_in_the_end(world, everything, "true")
        await equal_in_the_end(world, some, where)
        for number, client in enumerate(late[:5]):
            await equal_in_the_end(world, client, f"qty > {number}")
        assert everything.refetches == 0


async def test_a_shape_over_a_real_shard_follows_its_appends(postgres_dsn: str) -> None:
    schema = ShardSchema((Column("k", "int64"), Column("v", "string")), ("k",))

    def rows(*updates: tuple[int, str, int, int]) -> pa.Table:
        k, v, time, diff = zip(*updates, strict=True)
        return pa.table({"k": pa.array(k, pa.int64()), "v": list(v), TIME: list(time), DIFF: list(diff)})

    async with RealWorld(postgres_dsn, DDL, ShapeSettings(long_poll_s=0.5)) as world:
        unknown = await world.get(table="shard.sums", offset="-1")
        assert unknown.status == 400
        with pytest.raises(MissingError):
            await open_shard(world.consensus, world.objects, SystemClock(), Rand(), "sums")
        shard = await open_shard(world.consensus, world.objects, SystemClock(), Rand(), "sums", schema)
        part = await shard.write_part(rows((1, "a", 10, 1), (2, "b", 10, 1)))
        await shard.compare_and_append(0, 100, [part], "t1")
        client = await world.sync(table="shard.sums")
        assert {row["k"]: row["v"] for row in client.rows.values()} == {"1": "a", "2": "b"}
        part = await shard.write_part(rows((1, "a", 150, -1), (1, "c", 150, 1), (2, "b", 160, -1)))
        await shard.compare_and_append(100, 200, [part], "t2")
        await shard.compare_and_append(200, 300, [], "t3")
        await client.follow_until(lambda: len(client.rows) == 1)
        assert [i["headers"]["operation"] for i in client.seen[2:]] == ["update", "delete"]
        assert {row["k"]: row["v"] for row in client.rows.values()} == {"1": "c"}
