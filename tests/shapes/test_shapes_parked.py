"""A table that is parked will go on: who asks for its shape is told to come again, and is served once it does."""

from __future__ import annotations

import pytest
from real_world import RealWorld
from shape_world import eventually, run

from tidemill.capture import recopy
from tidemill.shapes import ShapeSettings

pytestmark = pytest.mark.postgres

DDL = "CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t VALUES (1, 'a')"


class Asked(RealWorld):
    """A parked table is copied again only when somebody says so."""

    table_poll_s = 0.2
    copy_again = False


def test_a_parked_table_is_503_for_as_long_as_it_is_and_its_clients_go_on_afterwards(postgres_dsn: str) -> None:
    async def main() -> None:
        async with Asked(postgres_dsn, DDL, ShapeSettings(long_poll_s=0.5)) as world:
            await eventually(lambda: world.capture.streaming)
            client = await world.sync(table="t")
            await world.db.execute("ALTER TABLE t RENAME v TO w")
            await world.db.execute("INSERT INTO t VALUES (2, 'b')")

            async def parked() -> bool:
                rows = await world.catalogue.all_tables()
                return [row.state for row in rows] == ["parked"]

            await eventually(parked)
            for offset in ("-1", "now"):
                answer = await world.get(table="t", offset=offset)
                assert answer.status == 503 and int(answer.headers["retry-after"]) > 0
                assert "parked" in answer.json["message"] and "public.t" in answer.json["message"]
            assert (await world.get(table="none", offset="-1")).status == 400, "there is no other one, too"

            await recopy.ask(world.catalogue, world.capture.config.name, "public.t")
            world.capture.look()
            await eventually(lambda: [c.name for r in world.capture.relations() for c in r.columns] == ["id", "w"])
            await client.follow_until(lambda: len(client.rows) == 2)
            assert sorted(row["w"] for row in client.rows.values()) == ["a", "b"]
            assert client.refetches == 1

    run(main())
