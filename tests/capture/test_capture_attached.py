"""Attached partitions: the rows that a partition brings along are in no change of its root."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import psycopg
import pytest
from msgspec.structs import replace

from support.capture.evolving import equal
from support.capture.rights import missing, reader_of
from support.capture.world import AGAIN, PARTITIONED, World, generation
from support.waiting import until
from tidemill.capture.catalog import table_discovery
from tidemill.capture.catalog.table_discovery import find_rows_before_attachment, list_partitions
from tidemill.capture.postgres.connection import PgConnection, SqlRow
from tidemill.capture.postgres.errors import SqlError
from tidemill.capture.tables import catalog_watcher

pytestmark = pytest.mark.postgres

ROWS = "INSERT INTO p VALUES (2, 2), (3, 3)"


class Aged:
    """A connection that substitutes these transaction ids for those of a partition's rows and of its attachment."""

    def __init__(self, wire: PgConnection, written: int, attached: int) -> None:
        self._wire = wire
        self._instead = {"r.xmin": f"'{written}'::xid", "i.xmin": f"'{attached}'::xid"}

    async def query(self, sql: str) -> list[SqlRow]:
        return await self._wire.query(sql)

    async def value(self, sql: str) -> str | None:
        for column, xid in self._instead.items():
            assert column in sql
            sql = sql.replace(column, xid)
        return await self._wire.value(sql)


async def test_a_row_is_older_than_the_attachment_of_its_partition_whenever_it_was_written(postgres_dsn: str) -> None:
    """age() is a difference of 32 bits with a sign."""
    async with World(postgres_dsn) as world:
        await world.sql(*PARTITIONED, ROWS)
        ((oid, now),) = await world.select("SELECT 'p1'::regclass::oid, pg_current_xact_id()::text::bigint")
        wire = await PgConnection.connect(world.dsn, purpose="test")

        async def came(ago: int) -> bool:
            aged: Any = Aged(wire, (now - ago) % (1 << 32), (now - 50) % (1 << 32))
            return await find_rows_before_attachment(cast(PgConnection, aged), oid) == "public.p1"

        try:
            for ago in (50, 51, 10_000, (1 << 31) - 100, (1 << 31) + 100, 3 << 30, (1 << 32) - 200):
                assert await came(ago), ago
            for ago in (0, 1, 49):
                assert not await came(ago), ago
        finally:
            await wire.aclose()


AWAY = ("ALTER TABLE p DETACH PARTITION p1", "DELETE FROM p1 WHERE id = 1")
BACK = "ALTER TABLE p ATTACH PARTITION p1 FOR VALUES FROM (0) TO (100)"


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_partition_that_was_away_and_is_back_before_anybody_looks_is_noticed(
    postgres_dsn: str, at_once: bool
) -> None:
    """The partition is unchanged in its oid, columns and files. It was away within one transaction, or between two
    sessions.
    """
    async with World(postgres_dsn) as world:
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


async def test_attachments_that_an_older_tidemill_did_not_note_are_those_that_are_found(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
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
            await until(lambda: known(world, 2), "the new partition is known")
            await equal(world, "p", "good")
            assert await generation(world, "p") == 0, "it was not copied again"


async def test_a_partition_that_is_being_detached_concurrently_is_none_any_more(postgres_dsn: str) -> None:
    """The first transaction of DETACH CONCURRENTLY has ended; the second waits for transactions that used the table
    earlier.
    """
    async with World(postgres_dsn) as world:
        await world.sql(*PARTITIONED, ROWS)
        wire = await PgConnection.connect(world.dsn, purpose="test")
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


async def copied(world: World) -> bool:
    return await generation(world, "p") > 0


async def test_a_partition_that_the_role_may_not_read_is_copied_and_doctor_grants_it(postgres_dsn: str) -> None:
    """A right to the root does not extend to a partition alone. An empty partition does not need one."""
    async with World(postgres_dsn) as world:
        await world.sql(*PARTITIONED, ROWS)
        async with reader_of(world):
            for statement in await missing(world):
                await world.sql(statement)
            role = f"reader_{world.name}"
            assert await world.select(f"SELECT has_table_privilege('{role}', 'p1', 'SELECT')") == [(True,)]
            async with world.capture(table_poll_s=0.1):
                await world.caught_up()
                await world.sql(*new("p2", 100))
                await until(lambda: known(world, 2), "an empty one flows on")
                await world.transaction(*new("p3", 200, 201))
                row = await world.paused("p", "it is unknown whether")
                grant = f'GRANT SELECT ON "public"."p3" TO "{role}"'
                assert "the role may not read it" in row.reason and f"Run {grant};" in row.fix
                assert grant in await missing(world)


async def test_f423_rows_that_a_policy_hides_in_an_attached_partition_do_not_count_as_none(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*PARTITIONED, ROWS)
        async with reader_of(world) as dsn:
            for statement in await missing(world):
                await world.sql(statement)
            *created, attached = new("p2", 100, 101)
            role = dsn.partition("//")[2].partition("@")[0]
            await world.sql(
                *created, "ALTER TABLE p2 ENABLE ROW LEVEL SECURITY", "CREATE POLICY none ON p2 USING (false)",
                f"GRANT SELECT ON p2 TO {role}",
            )  # fmt: skip
            async with world.capture(table_poll_s=0.1):
                await world.caught_up()
                await world.sql(attached)
                row = await world.paused("p", "row-level security")
                assert "BYPASSRLS" in row.fix


@pytest.mark.parametrize("sqlstate", ["57014", "55P03"])
async def test_a_partition_that_cannot_be_looked_into_masks_no_other_one(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch, sqlstate: str
) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*PARTITIONED, *new("p2", 100)[:-1])
        ((slow,),) = await world.select("SELECT 'p2'::regclass::oid")

        async def looked(wire: PgConnection, partition: int) -> str:
            if partition == slow:
                raise SqlError("a statement failed.", sqlstate=sqlstate)
            return await find_rows_before_attachment(wire, partition)

        monkeypatch.setattr(catalog_watcher, "find_rows_before_attachment", looked)
        async with world.capture(table_poll_s=0.1):
            await world.caught_up()
            await world.transaction(new("p2", 100)[-1], *new("p3", 200, 201))
            await world.paused("p", "partition=public.p3")


async def test_a_look_that_takes_too_long_again_and_again_is_in_doubt(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*PARTITIONED)
        tries = 0

        async def looked(wire: PgConnection, partition: int) -> str:
            nonlocal tries
            tries += 1
            raise SqlError("a statement was cancelled.", sqlstate="57014")

        monkeypatch.setattr(catalog_watcher, "find_rows_before_attachment", looked)
        async with world.capture(table_poll_s=0.1, **AGAIN):
            await world.caught_up()
            await world.transaction(*new("p2", 100, 101))
            await until(lambda: copied(world), "it is copied")
            assert tries == catalog_watcher.MAX_PARTITION_CHECKS
            await world.flowing("p")
            await equal(world, "p", "good")
            assert await known(world, 2) and tries == catalog_watcher.MAX_PARTITION_CHECKS


async def test_a_look_waits_for_who_holds_the_lock_however_often_it_is_tried(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder locks the partition before the first check, as soon as the attachment is committed."""
    async with World(postgres_dsn) as world:
        await world.sql(*PARTITIONED)
        failed = 0
        holder = await psycopg.AsyncConnection.connect(world.dsn)

        async def looked(wire: PgConnection, partition: int) -> str:
            nonlocal failed
            if not failed:
                await holder.execute("LOCK TABLE p2")
            try:
                return await find_rows_before_attachment(wire, partition)
            except SqlError:
                failed += 1
                raise

        monkeypatch.setattr(catalog_watcher, "find_rows_before_attachment", looked)
        monkeypatch.setattr(table_discovery, "PARTITION_CHECK_TIMEOUT_MS", 10)
        async with holder, world.capture(table_poll_s=0.1, identity="as-is"):
            await world.caught_up()
            await world.transaction(*new("p2", 100))
            await until(lambda: failed > 2 * catalog_watcher.MAX_PARTITION_CHECKS, "it is tried")
            await holder.rollback()
            await until(lambda: known(world, 2), "it is looked into")
            row = await world.table("public.p")
            assert row is not None and row.is_streaming


def new(name: str, start: int, *ids: int) -> list[str]:
    """The statements that attach a table with these rows."""
    return [
        f"CREATE TABLE {name} (id int PRIMARY KEY, v int)",
        *[f"INSERT INTO {name} VALUES ({n}, 1)" for n in ids],
        f"ALTER TABLE p ATTACH PARTITION {name} FOR VALUES FROM ({start}) TO ({start + 100})",
    ]


async def known(world: World, count: int) -> bool:
    row = await world.table("public.p")
    return row is not None and len(row.partitions or ()) == count
