"""npm's unmodified @electric-sql/client follows a table and a shard; its rows are compared with the source."""

from __future__ import annotations

import random
from typing import Any

import pytest

from support.shapes.fake_shard import FakeShard
from support.shapes.node_client import NodeClient
from support.shapes.world import ShapeWorld
from support.waiting import until
from tidemill.shapes import LogLimits, ShapeSettings
from tidemill.shapes.tables.backlog import BacklogLimits
from tidemill.shards.api import Column, ShardSchema

pytestmark = [pytest.mark.node, pytest.mark.postgres]

DDL = """
CREATE TABLE account (id int PRIMARY KEY, owner text, balance bigint NOT NULL, open boolean, tags text[]);
INSERT INTO account SELECT n, 'o' || n, n * 1000, n % 3 = 0, ARRAY['a', 'b ' || n] FROM generate_series(1, 200) n;
"""


async def account_rows(world: ShapeWorld, where: str = "true") -> list[dict[str, Any]]:
    cursor = await world.db.execute(f"SELECT id, owner, balance, open, tags FROM account WHERE {where}")  # type: ignore[arg-type]
    rows = [
        {"id": i, "owner": owner, "balance": f"{balance}n", "open": is_open, "tags": tags}
        for i, owner, balance, is_open, tags in await cursor.fetchall()
    ]
    return sorted(rows, key=lambda row: str(row["id"]))


async def transact(world: ShapeWorld, rand: random.Random, steps: int) -> None:
    for _ in range(steps):
        async with world.db.transaction():
            for _ in range(rand.randint(1, 4)):
                key = rand.randint(1, 260)
                statement = rand.choice(
                    [
                        f"INSERT INTO account VALUES ({key}, 'é\"{key}', {key}, NULL, NULL) ON CONFLICT DO NOTHING",
                        f"UPDATE account SET balance = balance + {key}, open = NOT open WHERE id = {key}",
                        f"UPDATE account SET owner = NULL WHERE id BETWEEN {key} AND {key + 3}",
                        f"DELETE FROM account WHERE id = {key}",
                        f"UPDATE account SET id = id + 1000 WHERE id = {key}",
                    ]
                )
                await world.db.execute(statement)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["", "sse"])
async def test_the_stock_client_follows_a_table_through_inserts_updates_deletes_and_key_changes(
    postgres_dsn: str, mode: str
) -> None:
    async with ShapeWorld(postgres_dsn, DDL, fragment_changes=3) as world:
        url = f"{world.server.url}/v1/shape"
        everything = NodeClient(url, {"table": "account"}, mode)
        some = NodeClient(url, {"table": "public.account", "where": "open = true AND balance > 20000"}, mode)
        async with everything, some:
            await until(lambda: everything.last["upToDate"] and some.last["upToDate"])
            assert everything.rows == await account_rows(world)
            rand = random.Random(5)
            for _ in range(3):
                await transact(world, rand, 15)
                expected = await account_rows(world)
                await until(lambda: everything.rows == expected)  # noqa: B023
                matching = await account_rows(world, "open = true AND balance > 20000")
                await until(lambda: some.rows == matching)  # noqa: B023
            assert everything.last["refetches"] == 0


async def test_the_stock_client_starts_over_after_a_truncate_and_ends_equal(postgres_dsn: str) -> None:
    async with (
        ShapeWorld(postgres_dsn, DDL) as world,
        NodeClient(f"{world.server.url}/v1/shape", {"table": "account"}) as client,
    ):
        await until(lambda: client.last["upToDate"] and len(client.rows) == 200)
        await world.db.execute("TRUNCATE account; INSERT INTO account VALUES (7, 'seven', 7, true, '{}')")
        await until(lambda: client.last["upToDate"] and len(client.rows) == 1)
        assert client.rows == await account_rows(world)
        assert client.last["refetches"] >= 1


async def test_the_stock_client_reads_an_array_that_may_not_be_null_and_has_null_elements(postgres_dsn: str) -> None:
    ddl = "CREATE TABLE odd (id int PRIMARY KEY, tags text[] NOT NULL); INSERT INTO odd VALUES (1, '{a,NULL}')"
    async with (
        ShapeWorld(postgres_dsn, ddl) as world,
        NodeClient(f"{world.server.url}/v1/shape", {"table": "odd"}) as client,
    ):
        await until(lambda: client.last.get("upToDate") or "error" in client.last)
        assert client.rows == [{"id": 1, "tags": ["a", None]}], client.last


async def test_the_stock_client_reads_a_base_of_many_chunks(postgres_dsn: str) -> None:
    settings = ShapeSettings(long_poll_s=2, limits=LogLimits(chunk_bytes=2_000))
    async with (
        ShapeWorld(postgres_dsn, DDL, settings) as world,
        NodeClient(f"{world.server.url}/v1/shape", {"table": "account"}) as client,
    ):
        await until(lambda: client.last["upToDate"])
        assert client.rows == await account_rows(world)
        assert len(client.lines) > 5


async def test_the_stock_client_follows_a_shard(postgres_dsn: str) -> None:
    schema = ShardSchema((Column("id", "int64"), Column("name", "string"), Column("sum", "decimal(12,2)")), ("id",))
    shard = FakeShard("totals", schema)

    async def opener(name: str) -> FakeShard:
        return shard

    def row(key: int, name: str | None, amount: str) -> dict[str, Any]:
        from decimal import Decimal

        return {"id": key, "name": name, "sum": Decimal(amount)}

    async with ShapeWorld(postgres_dsn, DDL, shards=opener) as world:
        await shard.append(1000, *[(10, 1, row(n, f"n{n}", "1.50")) for n in range(50)])
        async with NodeClient(f"{world.server.url}/v1/shape", {"table": "shard.totals"}) as client:
            await until(lambda: client.last["upToDate"] and len(client.rows) == 50)
            await shard.append(
                2000,
                (1500, -1, row(3, "n3", "1.50")),
                (1500, 1, row(3, "three", "2.00")),
                (1500, -1, row(4, "n4", "1.50")),
                (1600, 1, row(99, None, "0.00")),
            )
            await until(lambda: len(client.rows) == 50 and any(r["id"] == "99n" for r in client.rows))
            rows = {r["id"]: r for r in client.rows}
            assert rows["3n"] == {"id": "3n", "name": "three", "sum": "2.00"}
            assert "4n" not in rows
            assert rows["99n"]["name"] is None
        await world.service.aclose()
        await until(lambda: shard.listeners == 0)


async def test_the_stock_client_goes_on_after_its_shape_fell_behind(postgres_dsn: str) -> None:
    settings = ShapeSettings(long_poll_s=2, backlog=BacklogLimits(size_bytes=200_000))
    async with (
        ShapeWorld(postgres_dsn, DDL, settings, fragment_changes=20) as world,
        NodeClient(f"{world.server.url}/v1/shape", {"table": "account"}) as client,
    ):
        await until(lambda: client.last["upToDate"] and len(client.rows) == 200)
        many = "INSERT INTO account SELECT n, 'x', n, true, '{}' FROM generate_series(1000, 6000) n"
        await world.db.execute(many)
        expected = await account_rows(world)
        await until(lambda: client.last["upToDate"] and client.rows == expected)
        assert client.last["refetches"] >= 1
        assert world.service.facts()["fell_behind"] >= 1


async def test_the_stock_client_waits_for_a_place_and_is_told_of_a_clause_that_failed(postgres_dsn: str) -> None:
    settings = ShapeSettings(long_poll_s=2, max_shapes=1, idle_s=1.0)
    async with ShapeWorld(postgres_dsn, DDL, settings) as world:
        await world.get(table="account", offset="-1", where="id = 1")
        url = f"{world.server.url}/v1/shape"
        async with NodeClient(url, {"table": "account", "where": "1000 / balance >= 0"}) as client:
            await until(lambda: client.last["upToDate"] and len(client.rows) == 200)
            await world.db.execute("INSERT INTO account VALUES (5000, 'zero', 0, true, '{}')")
            await until(lambda: "error" in client.last)
            assert client.last["status"] == 400
            assert "division by zero" in client.last["error"]
