"""Partitions that are attached: rows that came with one are in no change of its root."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import psycopg
import pytest
from capture_world import World, until
from evolving import equal
from msgspec.structs import replace
from test_capture_again import AGAIN, generation
from test_capture_tables import PARTITIONED, in_world

from tidemill.capture.tables import came_with_rows, list_partitions
from tidemill.capture.wire.connection import SqlRow, Wire

pytestmark = pytest.mark.postgres

ROWS = "INSERT INTO p VALUES (2, 2), (3, 3)"


class Aged:
    """A connection that reads these transaction ids in the rows of a partition and of its attachment."""

    def __init__(self, wire: Wire, written: int, attached: int) -> None:
        self._wire = wire
        self._instead = {"r.xmin": f"'{written}'::xid", "i.xmin": f"'{attached}'::xid"}

    async def query(self, sql: str) -> list[SqlRow]:
        return await self._wire.query(sql)

    async def value(self, sql: str) -> str | None:
        for column, xid in self._instead.items():
            assert column in sql
            sql = sql.replace(column, xid)
        return await self._wire.value(sql)


def test_a_row_is_older_than_the_attachment_of_its_partition_whenever_it_was_written(postgres_dsn: str) -> None:
    """age() is a difference of 32 bits with a sign."""

    async def scenario(world: World) -> None:
        await world.sql(*PARTITIONED, ROWS)
        ((oid, now),) = await world.select("SELECT 'p1'::regclass::oid, pg_current_xact_id()::text::bigint")
        wire = await Wire.connect(world.dsn, purpose="test")

        async def came(ago: int) -> bool:
            aged: Any = Aged(wire, (now - ago) % (1 << 32), (now - 50) % (1 << 32))
            return await came_with_rows(cast(Wire, aged), oid) == "public.p1"

        try:
            for ago in (50, 51, 10_000, (1 << 31) - 100, (1 << 31) + 100, 3 << 30, (1 << 32) - 200):
                assert await came(ago), ago
            for ago in (0, 1, 49):
                assert not await came(ago), ago
        finally:
            await wire.aclose()

    in_world(postgres_dsn, scenario)


AWAY = ("ALTER TABLE p DETACH PARTITION p1", "DELETE FROM p1 WHERE id = 1")
BACK = "ALTER TABLE p ATTACH PARTITION p1 FOR VALUES FROM (0) TO (100)"


@pytest.mark.parametrize("at_once", [True, False])
def test_a_partition_that_was_away_and_is_back_before_anybody_looks_is_noticed(
    postgres_dsn: str, at_once: bool
) -> None:
    """By its oid, columns and files it is the same. In one transaction, or between two sessions."""

    async def scenario(world: World) -> None:
        await world.sql(*PARTITIONED, ROWS, "ALTER TABLE p1 ADD CHECK (id >= 0)")
        async with world.capture(table_poll_s=0.1, **AGAIN):
            await world.caught_up()
            if at_once:
                await world.transaction(*AWAY, BACK)
                await until(lambda: copied(world), "it is copied")
        if not at_once:
            await world.sql(*AWAY, BACK)
        async with world.capture(table_poll_s=0.1, **AGAIN):
            await until(lambda: copied(world), "it is copied")
            await world.flowing("p")
            await equal(world, "p", "good")

    in_world(postgres_dsn, scenario)


def test_attachments_that_an_older_tidemill_did_not_note_are_those_that_are_found(postgres_dsn: str) -> None:
    async def scenario(world: World) -> None:
        await world.sql(*PARTITIONED, ROWS)
        async with world.capture(table_poll_s=0.1, **AGAIN):
            await world.caught_up()
        row = await world.table("public.p")
        assert row is not None and len(row.attached) == 1
        await world.catalogue.change_table(
            world.name, "public.p", lambda found: replace(found, attached=()) if found is not None else None
        )
        async with world.capture(table_poll_s=0.1, **AGAIN):

            async def noted() -> bool:
                return (await world.table("public.p")) == row

            await until(noted, "they are noted")
            await world.sql("VACUUM FREEZE p1", "VACUUM FREEZE pg_inherits", "VACUUM FULL pg_inherits")
            await world.sql(
                "INSERT INTO p VALUES (4, 4)", "CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (100) TO (200)"
            )

            async def known() -> bool:
                row = await world.table("public.p")
                return row is not None and len(row.attached) == 2

            await until(known, "the new partition is known")
            await equal(world, "p", "good")
            assert await generation(world, "p") == 0, "it was not copied again"

    in_world(postgres_dsn, scenario)


def test_a_partition_that_is_being_detached_concurrently_is_none_any_more(postgres_dsn: str) -> None:
    """Its first transaction ends, its second one waits for whoever used the table before."""

    async def scenario(world: World) -> None:
        await world.sql(*PARTITIONED, ROWS)
        wire = await Wire.connect(world.dsn, purpose="test")
        ((oid,),) = await world.select("SELECT 'p'::regclass::oid")
        try:
            assert len(await list_partitions(wire, oid)) == 1
            async with await psycopg.AsyncConnection.connect(world.dsn) as user:
                await user.execute("SELECT FROM p")
                detaching = asyncio.ensure_future(world.sql("ALTER TABLE p DETACH PARTITION p1 CONCURRENTLY"))

                async def pending() -> bool:
                    return not await list_partitions(wire, oid)

                await until(pending, "it is none any more")
                assert not detaching.done()
                await user.commit()
                await detaching
            assert await list_partitions(wire, oid) == {}
        finally:
            await wire.aclose()

    in_world(postgres_dsn, scenario)


async def copied(world: World) -> bool:
    return await generation(world, "p") > 0
