"""npm's unmodified @electric-sql/client asks for subsets while the table changes: requestSnapshot and fetchSnapshot."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from support.shapes.subset_client import SubsetClient
from support.shapes.world import ShapeWorld
from support.waiting import until
from tidemill.base.runtime.tasks import Tasks

pytestmark = [pytest.mark.node, pytest.mark.postgres]

DDL = """
CREATE TABLE todo (id int PRIMARY KEY, project int NOT NULL, title text, done boolean NOT NULL DEFAULT false);
INSERT INTO todo SELECT n, n % 5, 't' || n, false FROM generate_series(1, 100) n;
"""


async def table_rows(world: ShapeWorld, where: str = "true") -> dict[int, tuple[Any, ...]]:
    cursor = await world.db.execute(f"SELECT id, project, title, done FROM todo WHERE {where}")  # type: ignore[arg-type]
    return {row[0]: tuple(row[1:]) for row in await cursor.fetchall()}


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_the_stock_client_asks_for_pages_and_for_trees_of_conditions(postgres_dsn: str, method: str) -> None:

    def ref(name: str) -> dict[str, str]:
        return {"type": "ref", "column": name}

    async with ShapeWorld(postgres_dsn, DDL) as world:
        url = f"{world.server.url}/v1/shape"
        shape = {"table": "todo", "where": "project = $1", "params": {"1": "3"}}
        async with SubsetClient(url, shape, subsetMethod=method) as client:  # type: ignore[arg-type]
            page = await client.ask(where="id > $1", params={"1": 20}, orderBy="id DESC", limit=4, offset=1)
            assert page["ids"] == [93, 88, 83, 78], page
            assert set(client.rows) == {93, 88, 83, 78}
            fetched = await client.ask("fetch", where="id < 10", orderBy="id")
            assert fetched["ids"] == [3, 8]
            assert set(client.rows) == {93, 88, 83, 78}, "fetchSnapshot puts nothing into the stream"
            tree = {
                "type": "func",
                "name": "and",
                "args": [
                    {"type": "func", "name": "in", "args": [ref("id"), {"type": "val", "paramIndex": 1}]},
                    {
                        "type": "func",
                        "name": "not",
                        "args": [{"type": "func", "name": "isNull", "args": [ref("title")]}],
                    },
                ],
            }
            order = [{"column": "title", "direction": "desc", "nulls": "last"}]
            chosen = await client.ask(whereExpr=tree, params={"1": "{3,8,9,13}"}, orderByExpr=order, limit=2)
            assert chosen["ids"] == [8, 3], chosen
            assert set(client.rows) == {93, 88, 83, 78, 8, 3}
            refused = await client.ask(where="id = 1; DROP TABLE todo")
            assert refused["status"] == 400
            await world.db.execute("UPDATE todo SET title = 'changed' WHERE id IN (3, 88)")
            await until(lambda: client.rows[3][1] == client.rows[88][1] == "changed")
            assert not client.errors


@pytest.mark.parametrize(("method", "sse"), [("GET", False), ("POST", False), ("GET", True)])
async def test_snapshots_asked_for_while_the_table_changes_join_the_stream_exactly(
    postgres_dsn: str, method: str, sse: bool
) -> None:
    """Each change is shown once: in the rows of a snapshot, or by the stream; at the end the client has the table."""

    async def write(world: ShapeWorld, rand: random.Random) -> None:
        for step in range(150):
            async with world.db.transaction():
                for _ in range(rand.randint(1, 3)):
                    key = rand.randint(1, 110)
                    await world.db.execute(
                        rand.choice(  # type: ignore[arg-type]
                            [
                                f"INSERT INTO todo VALUES ({key}, 1, 'new {step}') ON CONFLICT DO NOTHING",
                                f"UPDATE todo SET title = 'u{step}', done = NOT done WHERE id = {key}",
                                f"DELETE FROM todo WHERE id = {key}",
                            ]
                        )
                    )
            await asyncio.sleep(0.01)

    rand = random.Random(11)
    async with ShapeWorld(postgres_dsn, DDL, fragment_changes=3) as world:
        url = f"{world.server.url}/v1/shape"
        client = SubsetClient(url, {"table": "todo", "replica": "full"}, subsetMethod=method, liveSse=sse)
        async with client, Tasks(print) as tasks:
            writing = tasks.spawn(write(world, rand), name="writer")
            for start in range(0, 100, 10):
                answer = await client.ask(where=f"id > {start} AND id <= {start + 10}", orderBy="id", limit=10)
                assert "error" not in answer, answer
                await client.gone_on(answer)
            await writing
            rest = await client.ask(where="id > 100")
            assert "error" not in rest
            expected = await table_rows(world)
            await until(lambda: client.rows == expected)
            assert client.last["duplicates"] == []
            assert client.last["refetches"] == 0
            assert not client.errors


async def test_changes_that_a_snapshot_shows_are_dropped_when_the_stream_brings_them(postgres_dsn: str) -> None:
    """The stream is paused, so that the same transactions are in the snapshot and later in the stream."""
    async with (
        ShapeWorld(postgres_dsn, DDL) as world,
        SubsetClient(f"{world.server.url}/v1/shape", {"table": "todo"}) as client,
    ):
        await client.ask(where="id = 1")
        await until(lambda: client.last["upToDate"])
        world.hold()
        await world.db.execute("INSERT INTO todo VALUES (500, 1, 'new')")
        await world.db.execute("UPDATE todo SET title = 'once' WHERE id = 7")
        await world.db.execute("UPDATE todo SET title = 'twice' WHERE id = 7")
        shown = await client.ask(where="id IN (7, 500)", orderBy="id")
        assert shown["ids"] == [7, 500]
        await world.db.execute("UPDATE todo SET title = 'later' WHERE id = 500")
        world.release()
        await until(lambda: client.rows[500][1] == "later")
        titles = [row["title"] for batch in client.batches for row in batch["rows"].values() if row["id"] == 7]
        assert set(titles) == {"twice"}, "what came before the snapshot is not shown after it"
        assert client.last["duplicates"] == []


async def test_a_shape_that_started_over_while_a_snapshot_is_asked_for_is_refetched_and_nothing_is_missed(
    postgres_dsn: str,
) -> None:

    def streamed(client: SubsetClient) -> bool:
        return client.last["offset"] not in ("-1", "now")

    async with (
        ShapeWorld(postgres_dsn, DDL) as world,
        SubsetClient(f"{world.server.url}/v1/shape", {"table": "todo"}) as client,
    ):
        assert (await client.ask(where="id <= 2", orderBy="id"))["ids"] == [1, 2]
        for step in range(3):
            # At a place of the log, not at its start: there a new handle is taken without a loss.
            await world.db.execute("UPDATE todo SET title = %s WHERE id = 1", (f"seen {step}",))
            await until(lambda: client.rows[1][1] == f"seen {step}" and streamed(client))  # noqa: B023
            refetches = client.last["refetches"]
            world.service.suspend_database("main", "test")
            world.sink = world.service.add_database("main", world.dsn, lambda: world.relations.values())
            asked = await client.ask(where="id <= 2", orderBy="id")
            assert asked.get("ids") == [1, 2], asked
            await until(lambda: client.last["refetches"] > refetches)  # noqa: B023
            assert "error" not in await client.ask(where="id <= 3")
        await until(lambda: streamed(client))
        await world.db.execute("UPDATE todo SET title = 'after' WHERE id <= 3")
        await until(lambda: [client.rows.get(n, ("", ""))[1] for n in (1, 2, 3)] == ["after"] * 3)
