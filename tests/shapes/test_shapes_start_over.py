"""Shapes whose capture starts over in the same process: their logs have a gap from there on."""

from __future__ import annotations

import asyncio

import pytest

from support.shapes.real_world import RealWorld
from support.shapes.world import ShapeSettings
from support.waiting import until

pytestmark = pytest.mark.postgres

DDL = "CREATE TABLE a (id int PRIMARY KEY, v int); INSERT INTO a VALUES (1, 1)"
KEY = '"public"."a"/"{}"'


async def paused(world: RealWorld) -> None:
    """Stop the session, as while the server is unreachable; the process and its shapes continue."""
    await world.capture.aclose()
    await asyncio.gather(world._running, return_exceptions=True)
    world.capture._closed = False


def resumed(world: RealWorld) -> None:
    world._running = asyncio.ensure_future(world.capture.run())


@pytest.mark.parametrize("lost", ["publication", "slot"])
async def test_rc1_a_new_publication_makes_the_slot_anew_and_shapes_that_missed_changes_are_409(
    postgres_dsn: str, lost: str
) -> None:
    async with RealWorld(postgres_dsn, DDL, ShapeSettings(long_poll_s=0.5)) as world:
        await until(lambda: world.capture.streaming)
        client = await world.sync(table="a")
        first, other = client.handle, await world.sync(table="a", where="id > 100")
        await paused(world)
        slot = f"pg_replication_slots WHERE slot_name = '{world.slot}'"
        before = await (await world.db.execute(f"SELECT restart_lsn FROM {slot}")).fetchone()  # type: ignore[arg-type]
        if lost == "slot":
            await until(world.drop_slot, "the server saw the session end")
        await world.db.execute(f'DROP PUBLICATION "tidemill_{world.capture.config.name}"')  # type: ignore[arg-type]
        await world.db.execute("INSERT INTO a VALUES (2, 2), (200, 200)")
        resumed(world)
        await until(lambda: world.capture.streaming)
        await world.db.execute("INSERT INTO a VALUES (3, 3)")
        await client.follow_until(lambda: set(client.rows) == {KEY.format(n) for n in (1, 2, 3, 200)})
        await other.follow_until(lambda: set(other.rows) == {KEY.format(200)})
        assert (client.refetches, other.refetches) == (1, 1) and client.handle != first
        after = await (await world.db.execute(f"SELECT restart_lsn FROM {slot}")).fetchone()  # type: ignore[arg-type]
        assert before != after, "the slot is another one"
        answer = await world.get(table="a", offset="0_inf", handle=first)
        assert answer.status == 409


async def test_a_table_that_starts_over_alone_ends_its_own_shapes_and_no_others(postgres_dsn: str) -> None:
    """The table was removed from the publication and written while the capture was stopped."""
    ddl = DDL + "; CREATE TABLE b (id int PRIMARY KEY, v int); INSERT INTO b VALUES (1, 1)"
    async with RealWorld(postgres_dsn, ddl, ShapeSettings(long_poll_s=0.5)) as world:
        await until(lambda: world.capture.streaming)
        gone, kept = await world.sync(table="a"), await world.sync(table="b")
        await paused(world)
        publication = f'"tidemill_{world.capture.config.name}"'
        await world.db.execute(f"ALTER PUBLICATION {publication} DROP TABLE a")  # type: ignore[arg-type]
        await world.db.execute("INSERT INTO a VALUES (2, 2); INSERT INTO b VALUES (2, 2)")
        resumed(world)

        async def taken_in() -> bool:
            return (await world.get(table="a", offset="-1")).status == 200

        await until(lambda: world.capture.streaming)
        await until(taken_in)
        for client, table in ((gone, "a"), (kept, "b")):
            await client.follow_until(
                lambda client=client, table=table: (
                    set(client.rows)  # type: ignore[misc]
                    == {f'"public"."{table}"/"{n}"' for n in (1, 2)}
                )
            )
        assert (gone.refetches, kept.refetches) == (1, 0)


async def test_what_was_written_while_no_session_ran_is_what_the_next_one_catches_up_with(postgres_dsn: str) -> None:
    async with RealWorld(postgres_dsn, DDL, ShapeSettings(long_poll_s=0.5)) as world:
        await until(lambda: world.capture.streaming)
        client = await world.sync(table="a")
        await paused(world)
        await world.db.execute("INSERT INTO a SELECT n, n FROM generate_series(2, 300) n")
        cursor = await world.db.execute("SELECT (pg_current_wal_lsn() - '0/0')::bigint")
        written = (await cursor.fetchone())[0]  # type: ignore[index]
        resumed(world)
        await client.follow_until(lambda: len(client.rows) == 300)
        (sink,) = world.service._tables.taps().values()
        assert sink._catch_up_lsn >= written > 0 and client.refetches == 0
