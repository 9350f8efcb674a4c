"""A slot that is created while other transactions rewrite tables: PostgreSQL's first catalogue snapshot can lack one of
them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import psycopg
import pytest
from msgspec.structs import replace

from support.capture.world import World
from support.waiting import until
from tidemill.capture.postgres.connection import PgConnection
from tidemill.capture.session.bootstrap import start_over_undecodable
from tidemill.capture.setup import server_checks
from tidemill.metastore.catalogue import CaptureRow

pytestmark = pytest.mark.postgres


async def rewritten_while_the_slot_is_made(world: World, during: Callable[[], Awaitable[None]]) -> None:
    """Run the schedule of setup.create_slot's docstring. `during` starts the creation of the slot."""
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
        # The writer waits for no lock before the rewriter has ended. It outlasts the creation of this slot, or the next
        # slot waits for it. It ends before the stream starts: only the operator may give up a slot that has confirmed
        # something.
        await writer.execute("INSERT INTO a VALUES (7, 70)")
        waits = f"{writer.info.backend_pid} = ANY(pg_blocking_pids(pid))"
        making = "FROM pg_stat_activity WHERE state = 'active' AND query LIKE 'SELECT pg_create_logical%'"

        async def made() -> bool:
            return not await world.select(f"SELECT {making} AND NOT {waits}")

        await until(made, "the slot is made")
        await writer.commit()


@pytest.mark.parametrize("attempts", [1, 5], ids=["found by its failure", "found when it is made"])
async def test_a_slot_that_cannot_be_decoded_is_made_again(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch, attempts: int
) -> None:
    monkeypatch.setattr(server_checks, "SLOT_ATTEMPTS", attempts)
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


async def test_a_capture_that_was_confirmed_does_not_start_over_by_itself_for_a_table_that_was_copied_just_now(
    postgres_dsn: str,
) -> None:
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE a (id int PRIMARY KEY)")
        async with world.capture(tables=("public.a",)):
            table = await world.catalogue.table(world.name, "public.a")
            assert table is not None and table.snapshot is not None
            copied = table.snapshot
            config, wire = world.config(tables=("public.a",)), await PgConnection.connect(world.dsn, purpose="test")

            async def confirmed() -> bool:
                await world.sql("INSERT INTO a SELECT coalesce(max(id), 0) + 1 FROM a")
                slot = await server_checks.read_slot_state(wire, config.slot)
                return slot is not None and slot.confirmed_lsn > copied.lsn

            await until(confirmed, "the slot is confirmed beyond the copy")
            young = replace(table, table="public.b", snapshot=replace(copied, lsn=1 << 62))
            await start_over_undecodable(wire, config, [table, young])
            await wire.aclose()
            assert await world.select(f"SELECT FROM pg_publication WHERE pubname = '{config.publication}'")


async def test_a_frozen_row_of_two_thousand_million_transactions_ago_is_not_young(postgres_dsn: str) -> None:
    async with await psycopg.AsyncConnection.connect(postgres_dsn) as connection:
        found = await connection.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())::text")
        (began,) = await found.fetchone() or ("",)
        young = {}
        for ago in (-1, 0, 1, 1000, (1 << 31) - 10, (1 << 31) + 10, (1 << 32) - 1000):
            xid = (int(began) - ago) % (1 << 32)
            condition = server_checks.xid_condition(f"'{xid}'::xid", began)
            asked = await connection.execute(f"SELECT {condition}")  # type: ignore[call-overload]
            young[ago] = (await asked.fetchone() or (None,))[0]
        assert [ago for ago, is_young in young.items() if is_young] == [0]
