"""Subsets of shapes over shards: equal to PostgreSQL's answers for a table with the same rows, and consistent with the
stream."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from support.shapes.fake_shard import FakeShard, Update
from support.shapes.subset_client import SubsetClient
from support.shapes.world import ShapeWorld
from support.waiting import until
from tidemill.base.runtime.tasks import Tasks
from tidemill.shapes import ShapeSettings
from tidemill.shards.api import Column, ShardSchema

pytestmark = pytest.mark.postgres

NOW_MS = 1_764_000_000_000
TODO = ShardSchema(
    (Column("id", "int32"), Column("project", "int32"), Column("title", "string"), Column("done", "bool")), ("id",)
)
WIDE = ShardSchema(
    (
        Column("id", "int32"),
        Column("grp", "int16"),
        Column("n", "decimal(20,3)"),
        Column("f", "float64"),
        Column("s", "string"),
        Column("d", "date"),
        Column("b", "bool"),
        Column("x", "binary"),
    ),
    ("id",),
)
DDL = """
CREATE TABLE t (id int PRIMARY KEY, grp smallint, n numeric(20, 3), f float8, s text COLLATE "C", d date, b boolean,
                x bytea);
INSERT INTO t SELECT i, nullif(i % 7, 3), (i * 37 % 101) / 8.0, CASE i % 11 WHEN 0 THEN 'NaN' WHEN 1 THEN NULL
    WHEN 2 THEN '-Infinity' ELSE i % 13 / 4.0 END, CASE WHEN i % 5 > 0 THEN chr(65 + i * 7 % 60) || i % 3 END,
    date '2024-01-01' + i * 17 % 90, nullif(i % 3, 2) = 1, 'x' FROM generate_series(1, 700) i;
"""


def opened(shard: FakeShard) -> Any:
    async def opener(_: str) -> FakeShard:
        return shard

    return opener


async def same_rows(world: ShapeWorld, shard: FakeShard, at_ms: int) -> None:
    """Copy the rows of the table into the shard."""
    cursor = await world.db.execute("SELECT id, grp, n, f, s, d, b, x FROM t")
    names = [column.name for column in WIDE.columns]
    rows = [dict(zip(names, row, strict=True)) for row in await cursor.fetchall()]
    await shard.append(at_ms + 1, *((at_ms, 1, row) for row in rows))


async def test_a_subset_of_a_shard_is_what_postgresql_answers_for_a_table_with_the_same_rows(postgres_dsn: str) -> None:
    rand = random.Random(5)
    wheres = [
        "",
        "grp = $1",
        "s > 'M' OR s IS NULL",
        "f > 1.5",
        "b IS NOT TRUE AND n < 6",
        "d = '2024-02-14'",
        "id < 0",
    ]
    orders = [
        "id",
        "grp, n DESC",
        "f DESC NULLS LAST, s",
        "s",
        "s DESC",
        "b NULLS FIRST, d DESC",
        "n * -1, grp + 1",
        "lower(s)",
    ]
    shard = FakeShard("t", WIDE)
    async with ShapeWorld(postgres_dsn, DDL, shards=opened(shard)) as world:
        await same_rows(world, shard, NOW_MS)
        for own in ("", "id > 100"):
            for order in orders:
                where = rand.choice(wheres)
                asked = {"subset__order_by": order, "subset__where": where}
                asked |= {"subset__limit": str(rand.choice([1, 7, 600]))} if rand.random() < 0.8 else {}
                asked |= {"subset__offset": str(rand.choice([0, 3, 350]))} if rand.random() < 0.5 else {}
                if "$1" in where:
                    asked["subset__params"] = '{"1": "4"}'
                asked |= {"offset": "now", "log": "changes_only"} | ({"where": own} if own else {})
                # Ties are ordered by the key, whose order as text is another one: here it is said.
                asked["subset__order_by"] += ", id"
                table, found = await world.get(table="t", **asked), await world.get(table="shard:t", **asked)
                assert (table.status, found.status) == (200, 200), (asked, table.body, found.body)
                assert [r["value"] for r in found.json["data"]] == [r["value"] for r in table.json["data"]], asked
        whole = await world.get(table="shard:t", offset="now", subset__where="b")
        assert len(whole.json["data"]) == len(await world.select("t", "b"))


async def test_a_subset_of_a_shard_refuses_what_it_cannot_do_and_gives_memory_back(postgres_dsn: str) -> None:
    shard = FakeShard("t", WIDE)
    settings = ShapeSettings(subset_bytes=30_000)
    async with ShapeWorld(postgres_dsn, DDL, settings, shards=opened(shard)) as world:
        await same_rows(world, shard, NOW_MS)
        for field, asked in {
            "subset__order_by": {"subset__order_by": "x"},
            "subset__limit": {"subset__limit": "-1"},
            "subset__where": {"subset__where": "x = 'y'"},
            "subset": {"subset__where": "1 / (id - 400) > 0"},
            "table": {"subset__where": "id < 690", "table": "shard:t"},
        }.items():
            answer = await world.get(**{"table": "shard:t", "offset": "now", "log": "changes_only", **asked})
            assert answer.status == 400, (asked, answer.body)
            assert field in answer.json["errors"] or "too large" in str(answer.json), answer.json
        hidden = await world.get(
            table="shard:t", offset="now", queryable_columns="id,s", subset__where="n > 1", subset__order_by="id"
        )
        assert hidden.json["errors"].keys() == {"subset__where"}
        used = world.service.budget.used_bytes
        page = {"subset__order_by": "f DESC", "subset__limit": "5", "offset": "now", "log": "changes_only"}
        answer = await world.get(table="shard:t", **page)
        assert len(answer.json["data"]) == 5
        await until(lambda: world.service.budget.used_bytes == used)
        assert world.service.subsets.used_bytes == 0


async def test_a_row_that_a_shard_without_a_key_holds_twice_is_in_a_subset_once(postgres_dsn: str) -> None:
    shard = FakeShard("bag", ShardSchema(TODO.columns, ()))
    row = {"id": 1, "project": 1, "title": "a", "done": False}
    async with ShapeWorld(postgres_dsn, "SELECT 1", shards=opened(shard)) as world:
        await shard.append(NOW_MS + 1, (NOW_MS, 1, row), (NOW_MS, 1, row), (NOW_MS, 1, {**row, "id": 2}))
        for asked in ({"subset__where": "id < 9"}, {"subset__order_by": "id"}):
            answer = await world.get(table="shard:bag", offset="now", **asked)
            assert [each["value"]["id"] for each in answer.json["data"]] == ["1", "2"]


async def test_a_subset_of_a_shard_names_its_time_and_the_changes_name_theirs(postgres_dsn: str) -> None:
    shard = FakeShard("todo", TODO)
    async with ShapeWorld(postgres_dsn, "SELECT 1", shards=opened(shard)) as world:
        row = {"id": 1, "project": 1, "title": "a", "done": False}
        await shard.append(NOW_MS + 1, (NOW_MS, 1, row))
        first = await world.get(table="shard:todo", offset="now", log="changes_only", subset__where="id = 1")
        assert first.json["metadata"]["xmin"] == first.json["metadata"]["xmax"] == str(NOW_MS + 1)
        assert first.json["metadata"]["database_lsn"] == str(NOW_MS + 1), "above all that it shows"
        await shard.append(NOW_MS + 9, (NOW_MS + 5, -1, row), (NOW_MS + 5, 1, {**row, "title": "b"}))
        second = await world.post({"where": "id = 1"}, table="shard:todo", offset="now", log="changes_only")
        assert [each["value"]["title"] for each in second.json["data"]] == ["b"]
        xmax = int(second.json["metadata"]["xmax"])
        assert xmax == NOW_MS + 9
        later = await world.get(
            table="shard:todo", offset=first.offset, handle=first.handle, log="changes_only", live="true"
        )
        assert [item["headers"]["txids"] for item in later.items] == [[NOW_MS + 5]]
        assert later.items[0]["headers"]["txids"][0] < xmax, "the second subset shows it, the first does not"


@pytest.mark.node
async def test_the_stock_client_joins_subsets_of_a_shard_to_its_changes_exactly(postgres_dsn: str) -> None:
    """Each change is shown once: in the rows of a snapshot, or by the stream. At the end the client equals the
    shard."""

    async def write(shard: FakeShard, held: dict[int, dict[str, Any]], rand: random.Random) -> None:
        for step in range(1, 120):
            at, updates = NOW_MS + 10 * step, list[Update]()
            for key in rand.sample(range(1, 111), 3):
                old = held.pop(key, None)
                if old is not None:
                    updates.append((at, -1, old))
                if old is None or rand.random() < 0.7:
                    held[key] = {"id": key, "project": 1, "title": f"u{step}", "done": step % 2 == 0}
                    updates.append((at, 1, held[key]))
            await shard.append(at + 1, *updates)
            await asyncio.sleep(0.01)

    rand = random.Random(3)
    shard = FakeShard("todo", TODO)
    held: dict[int, dict[str, Any]] = {
        n: {"id": n, "project": n % 5, "title": f"t{n}", "done": False} for n in range(1, 101)
    }
    async with ShapeWorld(postgres_dsn, "SELECT 1", shards=opened(shard)) as world:
        await shard.append(NOW_MS + 1, *((NOW_MS, 1, row) for row in held.values()))
        url = f"{world.server.url}/v1/shape"
        client = SubsetClient(url, {"table": "shard.todo", "replica": "full"})
        async with client, Tasks(print) as tasks:
            writing = tasks.spawn(write(shard, held, rand), name="writer")
            for start in range(0, 100, 20):
                answer = await client.ask(where=f"id > {start} AND id <= {start + 20}", orderBy="id", limit=20)
                assert "error" not in answer, answer
                await client.gone_on(answer)
            await writing
            rest = await client.ask(where="id > 100")
            assert "error" not in rest
            expected = {row["id"]: (row["project"], row["title"], row["done"]) for row in held.values()}
            await until(lambda: client.rows == expected)
            assert client.last["duplicates"] == []
            assert client.last["refetches"] == 0
            assert not client.errors
