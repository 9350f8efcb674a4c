"""A table that is parked will go on: who asks for its shape is told to come again, and is served once it does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from real_world import RealWorld
from shape_world import eventually, run

from tidemill.capture import recopy
from tidemill.capture.desk import Desk
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


def test_who_asks_while_a_table_is_being_parked_is_not_told_that_there_is_none(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shapes end, and wake their clients, before the catalogue says that it is parked."""
    parking, go_on, change = asyncio.Event(), asyncio.Event(), Desk.change

    async def slowly(desk: Desk, name: str, changed: Any) -> Any:
        if world.broken and not go_on.is_set():
            parking.set()
            await go_on.wait()
        return await change(desk, name, changed)

    monkeypatch.setattr(Desk, "change", slowly)
    world: Any = None

    async def main() -> None:
        nonlocal world
        world = Asked(postgres_dsn, f"{DDL}; CREATE TABLE other (id int PRIMARY KEY)", ShapeSettings(long_poll_s=30.0))
        world.broken = False
        async with world:
            await eventually(lambda: world.capture.streaming)
            client = await world.sync(table="t")
            live = asyncio.ensure_future(client.step(live=True))
            await asyncio.sleep(0.1)
            world.broken = True
            await world.db.execute("ALTER TABLE t RENAME v TO w")
            await world.db.execute("INSERT INTO t VALUES (2, 'b')")
            await parking.wait()
            young = asyncio.ensure_future(world.get(table="t", offset="-1"))
            done, _ = await asyncio.wait([live, young], timeout=3)
            assert not done, [each.exception() or each.result().body for each in done]
            go_on.set()
            assert (await young).status == 503
            with pytest.raises(AssertionError, match=r"is parked: .* table=public\.t"):
                await live

    run(main())
