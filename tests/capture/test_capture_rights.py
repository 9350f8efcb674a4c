"""Captures of a role that may only read and replicate, after an administrator ran the statements of
`tidemill doctor`.
"""

from __future__ import annotations

import psycopg
import pytest

from support.capture.on_every_server import (
    test_what_doctor_prints_is_all_that_an_administrator_has_to_run,
)
from support.capture.rights import NAMED_TABLES, missing, reader_of
from support.capture.world import World, plain
from support.waiting import until

__all__ = [
    "test_what_doctor_prints_is_all_that_an_administrator_has_to_run",
]

pytestmark = pytest.mark.postgres


async def test_doctor_prints_the_identity_that_a_table_lacks_where_identities_are_taken_as_they_are(
    postgres_dsn: str,
) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(
            *NAMED_TABLES, "ALTER TABLE a REPLICA IDENTITY NOTHING", "ALTER TABLE split_low REPLICA IDENTITY NOTHING"
        )
        async with reader_of(world):
            statements = await missing(world, identity="as-is")
            lacking = [n for n, statement in enumerate(statements) if "REPLICA IDENTITY" in statement]
            published = [n for n, statement in enumerate(statements) if "ADD TABLE" in statement]
            assert len(lacking) == 2 and len(published) == 3 and max(lacking) < min(published)
            for left in range(len(statements), 0, -1):
                assert len(await missing(world, identity="as-is")) == left
                await world.sql(statements[-left])
        assert await missing(world, identity="as-is") == []


async def test_a_table_that_comes_later_is_refused_with_the_statements_and_taken_in_when_they_ran(
    postgres_dsn: str,
) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*NAMED_TABLES[:2])
        async with reader_of(world):
            for statement in await missing(world):
                await world.sql(statement)
            async with world.capture(table_poll_s=0.2):
                await world.sql("CREATE TABLE c (id int PRIMARY KEY, v text)")
                row = await world.paused("c", "")
                assert row.state == "refused" and "ADD TABLE ONLY" in row.fix and "REPLICA IDENTITY FULL" in row.fix
                await world.sql(
                    "ALTER TABLE c REPLICA IDENTITY FULL", *[s for s in await missing(world) if "GRANT" in s]
                )
                # Rows that a writer wrote before the table was published are in no stream: the copy waits for the
                # writer's end.
                async with await psycopg.AsyncConnection.connect(postgres_dsn) as writer:
                    await writer.execute("INSERT INTO c VALUES (1, 'before')")
                    await world.sql(f"ALTER PUBLICATION tidemill_{world.name} ADD TABLE ONLY c")
                    await writer.execute("INSERT INTO c VALUES (2, 'between')")
                    await blocked(world)
                    await world.sql("INSERT INTO c VALUES (3, 'beside')")
                    await writer.commit()
                await world.flowing("c")
                await world.caught_up()
                assert await world.folded("c") == await plain(world, "c")
                assert len(await world.folded("c")) == 3


async def blocked(world: World) -> None:
    """Wait until the table is reported as locked by others, because the copy waits for its writer."""

    async def reported() -> bool:
        row = await world.table("public.c")
        return row is not None and row.state == "refused" and "locked by others" in row.reason

    await until(reported, "the writer is named")
