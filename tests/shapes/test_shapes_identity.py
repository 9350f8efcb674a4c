"""Shapes over tables whose REPLICA IDENTITY is left unchanged: exact where keys suffice, otherwise a clear 400."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from support.shapes.world import ShapeWorld
from support.waiting import until
from tidemill.shapes.tables import captured_database

pytestmark = pytest.mark.postgres

DDL = """
CREATE TABLE wide (id int PRIMARY KEY, v int, body text);
ALTER TABLE wide ALTER body SET STORAGE EXTERNAL;
INSERT INTO wide SELECT g, g, repeat('b' || g, 2000) FROM generate_series(1, 5) g;
"""


class AsIs(ShapeWorld):
    """A world whose relations are reported as by a capture with identity = "as-is"."""

    def learn(self) -> None:
        super().learn()
        self.relations = {oid: replace(each, old_rows="key") for oid, each in self.relations.items()}


def held(client: Any) -> set[tuple[Any, ...]]:
    return {(row["id"], row["v"], row["body"]) for row in client.rows.values()}


async def follows(world: ShapeWorld, client: Any) -> None:
    async def same() -> bool:
        await client.step()
        return held(client) == await world.select("wide")

    await until(same)


async def test_an_update_leaves_out_what_nobody_said_and_a_client_that_merges_it_holds_the_table(
    postgres_dsn: str,
) -> None:
    async with AsIs(postgres_dsn, DDL) as world:
        await world.db.execute("ALTER TABLE wide REPLICA IDENTITY DEFAULT")
        client = await world.sync(table="wide")
        await world.db.execute("UPDATE wide SET v = 100 WHERE id = 1")
        await world.db.execute("UPDATE wide SET body = 'short' WHERE id = 2")
        await world.db.execute("DELETE FROM wide WHERE id = 3")
        await world.db.execute("UPDATE wide SET id = 22 WHERE id = 2")
        await follows(world, client)
        changes = [(c["headers"]["operation"], c["value"]) for c in client.seen[5:]]
        assert changes == [
            ("update", {"id": "1", "v": "100"}),
            ("update", {"id": "2", "v": "2", "body": "short"}),
            ("delete", {"id": "3"}),
            ("delete", {"id": "2"}),
            ("insert", {"id": "22", "v": "2", "body": "short"}),
        ]
        # The key changes, and the stream lacks a value that an insert needs.
        await world.db.execute("UPDATE wide SET id = 44 WHERE id = 4")
        await follows(world, client)
        assert client.refetches == 1
        narrow = await world.sync(table="wide", columns="id,v")
        await world.db.execute("UPDATE wide SET id = 55 WHERE id = 5")
        await until(lambda: _moved(narrow))
        assert narrow.refetches == 0


async def _moved(client: Any) -> bool:
    await client.step()
    return any(row["id"] == "55" for row in client.rows.values())


async def test_f112_a_shape_that_needs_old_rows_is_refused_with_full_as_the_way_and_served_once_it_is_gone(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured_database, "IDENTITY_INTERVAL_S", 0.0)
    async with AsIs(postgres_dsn, DDL) as world:
        await world.db.execute("ALTER TABLE wide REPLICA IDENTITY DEFAULT")
        for more, field in (({"where": "v > 2"}, "where"), ({"replica": "full"}, "replica")):
            answer = await world.get(table="wide", offset="-1", **more)
            assert answer.status == 400 and field in answer.json["errors"]
            assert "REPLICA IDENTITY FULL" in answer.body.decode()
        await world.db.execute("ALTER TABLE wide REPLICA IDENTITY FULL")
        client = await world.sync(table="wide", where="v > 2")
        await world.db.execute("UPDATE wide SET v = 0 WHERE id = 3")
        await until(lambda: _holds(client, {"4", "5"}))
        # The identity is removed: rows that leave the shape can no longer be reported, so the shape ends.
        await world.db.execute("ALTER TABLE wide REPLICA IDENTITY DEFAULT")
        await world.db.execute("UPDATE wide SET v = 0 WHERE id = 4")

        async def refused() -> bool:
            answer = await world.get(table="wide", offset=client.offset, handle=client.handle, where="v > 2")
            return answer.status == 400

        await until(refused)


async def _holds(client: Any, ids: set[str]) -> bool:
    await client.step()
    return {row["id"] for row in client.rows.values()} == ids
