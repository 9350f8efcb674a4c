"""Shapes over a table with a DEFERRABLE primary key: a client has one row per key, despite moves in one transaction."""

from __future__ import annotations

import random
from typing import Any

import pytest

from support.shapes.real_world import RealWorld
from support.shapes.world import Client
from support.waiting import until

pytestmark = pytest.mark.postgres

DDL = """
CREATE TABLE d (id int PRIMARY KEY DEFERRABLE, v text);
INSERT INTO d SELECT g, 'v' || g FROM generate_series(1, 12) g;
CREATE TABLE mark (id int PRIMARY KEY);
"""
SHAPES: list[dict[str, str]] = [
    {},
    {"replica": "full"},
    {"where": "v > 'v5'"},
    {"where": "id < 9"},
    {"where": "v = 'v3'"},
]


async def test_a_client_that_takes_every_operation_literally_has_what_select_has(postgres_dsn: str) -> None:
    """Real clients refuse an insert of a key that they have, and fold an update into the row before. A fragment of
    this world has five changes."""
    rand = random.Random(7)
    async with RealWorld(postgres_dsn, DDL) as world:
        await until(lambda: world.capture.streaming)
        clients = [await world.sync(table="d", **shape) for shape in SHAPES]
        for statements in (
            ["UPDATE d SET id = id + 1"],
            ["UPDATE d SET id = 14 - id"],
            [f"UPDATE d SET id = {k} WHERE v = 'v{n}'" for n, k in enumerate(rand.sample(range(1, 20), 12), 1)],
            ["INSERT INTO d VALUES ((SELECT id FROM d WHERE v = 'v7'), 'v99')", "DELETE FROM d WHERE v = 'v7'"],
            [
                "UPDATE d SET id = 50 WHERE v = 'v9'",
                "UPDATE d SET id = 51 WHERE v = 'v9'",
                "UPDATE d SET id = id + 1",
            ],
            ["UPDATE d SET id = id + 1, v = v || 'x'", "DELETE FROM d WHERE v = 'v3x'", "UPDATE d SET id = id - 1"],
            # Rows of equal content, of which the stream does not say which one left a key.
            ["UPDATE d SET v = 'v7'", "UPDATE d SET id = id + 1"],
            ["UPDATE d SET id = id + 1", "UPDATE d SET id = id + 1"],
            ["UPDATE d SET id = 70 - id", "UPDATE d SET v = 'v8' WHERE id % 3 = 0", "UPDATE d SET id = id - 3"],
        ):
            async with world.db.transaction():
                await world.db.execute("SET CONSTRAINTS ALL DEFERRED")
                for statement in statements:
                    await world.db.execute(statement)
            for client, shape in zip(clients, SHAPES, strict=True):
                rows = await world.db.execute(f"SELECT id::text, v FROM d WHERE {shape.get('where', 'true')}")
                wanted = {(i, v) for i, v in await rows.fetchall()}
                await client.follow_until(lambda client=client, wanted=wanted: held(client) == wanted)  # type: ignore[misc]
        assert not any(client.refetches for client in clients)


def held(client: Client) -> set[tuple[Any, ...]]:
    return {(row["id"], row["v"]) for row in client.rows.values()}
