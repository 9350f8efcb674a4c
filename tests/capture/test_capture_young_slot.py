"""A slot made while other transactions rewrite tables: PostgreSQL's first picture of the catalogue can lack one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import psycopg
import pytest
from capture_world import World, until

from tidemill.capture import setup
from tidemill.metastore.catalogue import CaptureRow

pytestmark = pytest.mark.postgres


async def rewritten_while_the_slot_is_made(world: World, during: Callable[[], Awaitable[None]]) -> None:
    """The schedule of setup.create_slot's docstring. `during`: begins what makes the slot."""
    async with AsyncExitStack() as stack:
        first, rewriter, writer = [
            await stack.enter_async_context(await psycopg.AsyncConnection.connect(world.dsn)) for _ in range(3)
        ]

        async def waits_for(connection: psycopg.AsyncConnection) -> None:
            pid = connection.info.backend_pid
            making = "SELECT FROM pg_stat_activity WHERE query LIKE 'SELECT pg_create_logical%'"

            async def blocked() -> bool:
                return bool(await world.select(f"{making} AND {pid} = ANY(pg_blocking_pids(pid))"))

            await until(blocked, f"the slot waits for {pid}")

        await first.execute("INSERT INTO other VALUES (1)")
        await during()
        await waits_for(first)
        await rewriter.execute("TRUNCATE a")
        await first.commit()
        await waits_for(rewriter)
        await writer.execute("INSERT INTO other VALUES (2)")
        await rewriter.commit()
        # It has no lock to wait for before the rewriter is gone, and outlasts the set-up of this slot.
        await writer.execute("INSERT INTO a VALUES (7, 70)")
        await asyncio.sleep(0.2)
        await writer.commit()


@pytest.mark.parametrize("attempts", [1, 5], ids=["found by its failure", "found when it is made"])
def test_a_slot_that_cannot_be_decoded_is_made_again(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch, attempts: int
) -> None:
    monkeypatch.setattr(setup, "SLOT_ATTEMPTS", attempts)

    async def main() -> None:
        async with World(postgres_dsn) as world:
            await world.sql("CREATE TABLE a (id int PRIMARY KEY, v int)", "CREATE TABLE other (id int)")
            await world.sql("INSERT INTO a VALUES (1, 10)")
            async with AsyncExitStack() as stack:

                async def begin() -> None:
                    await stack.enter_async_context(world.capture(wait=False, tables=("public.a",)))

                await rewritten_while_the_slot_is_made(world, begin)
                await world.sql("INSERT INTO a VALUES (8, 80)")

                async def again() -> bool:
                    row = await world.catalogue.get(CaptureRow, world.name)
                    return row is not None and row.snapshot_done and row.generation == (2 if attempts == 1 else 1)

                await until(again, "the tables are copied from a good slot")
                await world.sql("INSERT INTO a VALUES (9, 90)")
                await world.caught_up()
                folded = await world.folded("a")
                assert {row["id"]: row["v"] for row in folded.values()} == {7: 70, 8: 80, 9: 90}

    asyncio.run(main())
