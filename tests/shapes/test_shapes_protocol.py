"""Details of Electric's protocol that its own clients and test suites check."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.shapes.real_world import RealWorld
from support.shapes.world import ShapeWorld
from support.waiting import until
from tidemill.shapes import ShapeSettings

pytestmark = pytest.mark.postgres

DDL = "CREATE TABLE item (id int PRIMARY KEY, v text); INSERT INTO item VALUES (1, 'a'), (2, 'b')"


@pytest.mark.parametrize("kept", ["memory", "disk"])
async def test_the_offset_behind_the_only_chunk_of_initial_rows_is_answered_with_what_follows(
    postgres_dsn: str, tmp_path: Path, kept: str
) -> None:
    directory = tmp_path if kept == "disk" else None
    async with ShapeWorld(postgres_dsn, DDL, ShapeSettings(long_poll_s=1.0, directory=directory)) as world:
        if directory is not None:
            world.sink.begin_session([])
            world.sink.begin_stream(_Deaf(), 0)
        client = await world.sync(table="item")
        before = await world.get(table="item", handle=client.handle, offset="0_0")
        assert (before.items, before.controls) == ([], ["up-to-date"])
        await world.db.execute("INSERT INTO item VALUES (3, 'c'); UPDATE item SET v = 'd' WHERE id = 1")
        await client.follow_until(lambda: len(client.rows) == 3 and client.rows['"public"."item"/"1"']["v"] == "d")
        for more in ({}, {"live": "true"}):
            answer = await world.get(table="item", handle=client.handle, offset="0_0", **more)
            operations = [(i["headers"]["operation"], i["value"]["id"]) for i in answer.items]
            assert operations == [("insert", "3"), ("update", "1")]
            assert answer.offset == client.offset and answer.controls == ["up-to-date"]


class _Deaf:
    def report_flushed(self, *_: object) -> None: ...

    async def store_tap_names(self) -> None: ...


async def test_the_snapshot_that_a_shape_follows_is_named_also_without_its_rows(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL, ShapeSettings(long_poll_s=1.0)) as world:
        for log in ("full", "changes_only"):
            answer = await world.get(table="item", offset="-1", log=log)
            ends = [i["headers"] for i in answer.json if i["headers"].get("control") == "snapshot-end"]
            assert len(ends) == 1 and ends[0].keys() == {"control", "xmin", "xmax", "xip_list"}
            assert len(answer.items) == (2 if log == "full" else 0)


class Unpolled(RealWorld):
    table_poll_s = 600.0


async def test_a_database_without_tables_is_active_once_that_is_known_and_serves_the_first_one(
    postgres_dsn: str,
) -> None:
    async with Unpolled(postgres_dsn, "SELECT 1", ShapeSettings(long_poll_s=0.5)) as world:

        async def active() -> bool:
            answer = await world.request("/v1/health", {})
            assert (answer.status, answer.json["status"]) in ((202, "starting"), (200, "active"))
            return answer.status == 200

        await until(active)
        assert (await world.get(table="none", offset="-1")).status in (400, 503)
        await world.db.execute(DDL)

        async def served() -> bool:
            answer = await world.get(table="item", offset="-1")
            assert answer.status in (200, 503)
            return answer.status == 200

        await until(served, 100)
        client = await world.sync(table="item")
        assert {(row["id"], row["v"]) for row in client.rows.values()} == await world.select("item")


async def test_a_shape_without_the_column_that_came_or_was_widened_continues_and_others_are_409(
    postgres_dsn: str,
) -> None:
    ddl = "CREATE TABLE wide (id int PRIMARY KEY, v text, n int); INSERT INTO wide VALUES (1, 'a', 1)"
    async with RealWorld(postgres_dsn, ddl, ShapeSettings(long_poll_s=0.5)) as world:
        await until(lambda: world.capture.streaming)
        chosen = await world.sync(table="wide", columns="id,v")
        listed = await world.sync(table="wide", columns="id,v,n")
        asking = await world.sync(table="wide", columns="id,v", where="n > 0")
        whole = await world.sync(table="wide")
        await world.db.execute("ALTER TABLE wide ADD COLUMN later text")
        await world.db.execute("INSERT INTO wide VALUES (2, 'b', 2, 'x')")
        for client in (chosen, listed, asking, whole):
            await client.follow_until(lambda c=client: len(c.rows) == 2)  # type: ignore[misc]
        assert [c.refetches for c in (chosen, listed, asking, whole)] == [0, 0, 0, 1]
        await world.db.execute("ALTER TABLE wide ALTER n TYPE bigint")
        await world.db.execute("UPDATE wide SET v = 'c' WHERE id = 1")
        for client in (chosen, listed, asking, whole):
            await client.follow_until(lambda c=client: {r["v"] for r in c.rows.values()} == {"b", "c"})  # type: ignore[misc]
        assert [c.refetches for c in (chosen, listed, asking, whole)] == [0, 1, 1, 2]
        for client, columns in ((chosen, "id, v"), (listed, "id, v, n")):
            cursor = await world.db.execute(f"SELECT {columns} FROM wide")  # type: ignore[arg-type]
            rows = {tuple(map(str, row)) for row in await cursor.fetchall()}
            assert {tuple(row.values()) for row in client.rows.values()} == rows


async def test_a_column_that_came_a_moment_ago_is_never_400(postgres_dsn: str) -> None:
    async with Unpolled(postgres_dsn, DDL, ShapeSettings(long_poll_s=0.5)) as world:
        await until(lambda: world.capture.streaming)
        await world.sync(table="item", columns="id,v")
        await world.db.execute("ALTER TABLE item ADD COLUMN n int DEFAULT 7")
        asked: list[dict[str, str]] = [
            {"columns": "id,n", "offset": "-1"},
            {"where": "n = 7", "offset": "-1"},
            {"offset": "now", "subset__where": "n = 7"},
        ]
        for params in asked:

            async def served(params: dict[str, str] = params) -> bool:
                answer = await world.get(table="item", **params)
                assert answer.status in (200, 503), answer.body
                return answer.status == 200

            await until(served)
        wrong = await world.get(table="item", offset="-1", columns="id,m")
        assert (wrong.status, wrong.json["errors"].keys()) == (400, {"columns"})
