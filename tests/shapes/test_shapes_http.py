"""The protocol over real Postgres changes; tests named by their rows of notes/electric.md §4."""

from __future__ import annotations

import pytest
from shape_world import ShapeWorld, run

pytestmark = pytest.mark.postgres

DDL = """
CREATE TABLE item (id int PRIMARY KEY, name text, price numeric(10,2), done boolean NOT NULL DEFAULT false);
INSERT INTO item SELECT n, 'n' || n, n * 1.5, n % 2 = 0 FROM generate_series(1, 20) n;
"""


def test_h1_initial_then_tail_then_live_gives_each_item_once_in_order(postgres_dsn: str) -> None:
    async def main() -> None:
        async with ShapeWorld(postgres_dsn, DDL) as world:
            first = await world.get(table="item", offset="-1")
            assert first.status == 200
            print(first.headers, first.body[:300])
            client = await world.sync(table="item")
            assert len(client.rows) == 20
            await world.db.execute("UPDATE item SET name = 'x' WHERE id = 3")
            await world.db.execute("DELETE FROM item WHERE id = 4")
            await world.db.execute("INSERT INTO item VALUES (100, NULL, 1, true)")
            await client.follow_until(lambda: '"public"."item"/"100"' in client.rows)
            assert len(client.rows) == 20
            print(client.seen[20:])

    run(main())
