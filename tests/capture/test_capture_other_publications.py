"""Captures of tables that other publications contain: no statement of the application fails, and no row is omitted."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from support.capture.identity import exact, identity
from support.capture.servers import postgres_server
from support.capture.world import GOOD, World, good_flows
from support.waiting import until
from tidemill.base.errors import InvalidError
from tidemill.capture.session.teardown import drop_capture
from tidemill.capture.setup.privileges import check_capture
from tidemill.metastore.catalogue import CaptureTableRow

pytestmark = pytest.mark.postgres
__all__ = ["postgres_server"]

SOON: dict[str, Any] = {"table_poll_s": 0.1, "copy_again": True, "copy_again_pause_s": 0.0}
TABLES = (
    "CREATE SCHEMA apart",
    "CREATE TABLE t (id int PRIMARY KEY, v int, w int)",
    "INSERT INTO t (id, v) VALUES (1, 1), (2, 2)",
    "CREATE TABLE split (id int PRIMARY KEY, v int, w int) PARTITION BY RANGE (id)",
    "CREATE TABLE apart.low PARTITION OF split FOR VALUES FROM (0) TO (100)",
    "CREATE TABLE high PARTITION OF split FOR VALUES FROM (100) TO (1000)",
    "INSERT INTO split VALUES (1, 1), (200, 2)",
)
ROOT = "WITH (publish_via_partition_root = true)"
GENERATED = "ALTER TABLE t ADD g int GENERATED ALWAYS AS (v * 2) STORED"
OTHERS = {
    "a column list": ("t", "FOR TABLE t (id, v)", 15),
    "a list of all columns": ("t", "FOR TABLE t (id, v, w), good WITH (publish = 'delete')", 15),
    "the root's column list": ("split", f"FOR TABLE split (id, v) {ROOT}", 15),
    "a partition's column list": ("split", "FOR TABLE apart.low (id, v)", 15),
    "all tables": ("t", "FOR ALL TABLES", 18),
    "a schema": ("t", "FOR TABLES IN SCHEMA public", 18),
}
"""Contents of another publication → the table whose UPDATE or DELETE fails with FULL, from which version on."""


def version_of(dsn: str) -> int:
    with psycopg.connect(dsn) as connection:
        return connection.info.server_version // 10_000


async def refused_by_postgres(world: World, table: str) -> bool:
    """Return whether PostgreSQL rejects the application's UPDATE or DELETE of every part of the table."""
    try:
        await world.transaction(f"UPDATE {table} SET v = v + 1", f"DELETE FROM {table} WHERE id = -1")
    except (psycopg.errors.InvalidColumnReference, psycopg.errors.ObjectNotInPrerequisiteState):
        return True
    return False


async def works_again(world: World, table: str) -> None:
    async def works() -> bool:
        return not await refused_by_postgres(world, table)

    await until(works, f"UPDATE and DELETE of {table} work again")


async def objected(world: World, table: str, words: str = "publication=other") -> CaptureTableRow:
    """Wait until the table is refused or paused for that reason; return its row."""
    found: list[CaptureTableRow] = []

    async def refused() -> bool:
        row = await world.table(f"public.{table}")
        if row is not None and row.state in ("refused", "parked") and words in f"{row.reason} {row.fix}":
            found.append(row)
        return bool(found)

    await until(refused, f"{table} is refused or parked: {words}")
    return found[0]


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(what, marks=pytest.mark.since(OTHERS[what][2]))
        for what in ("a list of all columns", "the root's column list", "all tables", "a schema")
    ],
)
async def test_f490_a_table_that_another_publication_forbids_full_for_is_refused_and_left_as_it_is(
    postgres_dsn: str, what: str
) -> None:
    table, holds, since = OTHERS[what]
    async with World(postgres_dsn) as world:
        await world.sql(*TABLES, *GOOD, *[GENERATED] * (since >= 18), f"CREATE PUBLICATION other {holds}")
        with pytest.raises(InvalidError, match="publication=other"):
            await check_capture(world.config())
        async with world.capture(**SOON):
            row = await objected(world, table)
            assert row.state == "refused" and not row.identities
            assert await identity(world, table) == "d"
            assert not await refused_by_postgres(world, table)
            if "good" not in holds and what != "all tables":
                await good_flows(world)
            await world.sql("DROP PUBLICATION other")
            await world.flowing(table)
            await world.sql(f"UPDATE {table} SET v = v + 1", f"DELETE FROM {table} WHERE id = 1")
            await exact(world, table)


async def test_f490_a_publication_that_comes_later_gives_the_application_its_statements_back_and_parks_the_table(
    postgres_dsn: str,
) -> None:
    version = version_of(postgres_dsn)
    async with World(postgres_dsn) as world:
        await world.sql(*TABLES, *GOOD, *[GENERATED] * (version >= 18))
        async with world.capture(**SOON):
            for table, holds, since in OTHERS.values():
                if version < since:
                    continue
                await world.flowing(table, "good")
                await world.sql(f"CREATE PUBLICATION other {holds}")
                await works_again(world, table)
                row = await objected(world, table, "other")
                assert row.state == "parked" and "re-snapshotted automatically" in row.fix
                await world.sql(f"INSERT INTO {table} (id, v) SELECT max(id) + 1, 7 FROM {table}")
                await world.sql("DROP PUBLICATION other")
                await world.flowing(table)
                await world.sql(f"UPDATE {table} SET v = v + 1", f"DELETE FROM {table} WHERE id = 1")
                await exact(world, table)
            await good_flows(world)
        assert not (await drop_capture(world.config(), world.catalogue)).left
        assert await identity(world, "t") == "d"


@pytest.mark.since(15)
async def test_f490_a_paused_table_names_the_publication_that_blocks_it_now(postgres_dsn: str) -> None:
    """Regression: a dropped publication was named while a later one blocked the copy."""
    async with World(postgres_dsn) as world:
        await world.sql(*TABLES, *GOOD)
        async with world.capture(**SOON):
            await world.flowing("t", "good")
            await world.sql("CREATE PUBLICATION other_1 FOR TABLE t (id, v)")
            assert (await objected(world, "t", "publication=other_1")).state == "parked"
            await world.sql("CREATE PUBLICATION other_2 FOR TABLE t (id, w)", "DROP PUBLICATION other_1")
            row = await objected(world, "t", "publication=other_2")
            assert row.state == "parked" and row.again_ms and "other_1" not in f"{row.reason} {row.fix}"
            assert "re-snapshotted automatically" in row.fix and row.reason.count("parked_at=") == 1

            def reported() -> bool:  # reported after the row, which is stored first
                failure = world.tracker.failure(f"table:{world.name}/public.t")
                return failure is not None and "publication=other_2" in failure.error

            await until(reported, "the status names the present blocker")
            await world.sql("DROP PUBLICATION other_2")
            await world.flowing("t")
            await exact(world, "t")


async def test_f490_what_came_while_nothing_captured_is_seen_before_a_table_is_locked(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*TABLES, *GOOD)
        await world.sql("ALTER TABLE t REPLICA IDENTITY NOTHING")
        async with world.capture(**SOON):
            await world.flowing("t")
        await world.sql("CREATE PUBLICATION other FOR TABLE t (id, v)")
        assert await refused_by_postgres(world, "t")
        async with world.capture(**SOON):
            # NOTHING fails with either publication; the default identity works.
            await works_again(world, "t")
            await objected(world, "t", "other")
            assert await identity(world, "t") == "d"
            await good_flows(world)


async def test_f490_a_whole_identity_from_before_as_is_is_taken_back_and_the_table_flows_on(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*TABLES, *GOOD)
        async with world.capture(**SOON):
            await world.flowing("t")
        await world.sql("CREATE PUBLICATION other FOR TABLE t (id, v)")
        async with world.capture(identity="as-is", **SOON):
            await works_again(world, "t")
            await world.flowing("t", "good")
            await world.sql("UPDATE t SET v = v + 1", "DELETE FROM t WHERE id = 1")
            await exact(world, "t")
            assert await identity(world, "t") == "d"


@pytest.mark.since(18)
async def test_f490_a_virtual_column_is_no_fault_of_the_application_whichever_publication_holds_the_table(
    postgres_dsn: str,
) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(
            *TABLES, *GOOD, "CREATE PUBLICATION other FOR ALL TABLES WITH (publish_generated_columns = stored)"
        )
        async with world.capture(**SOON):
            await world.flowing("t", "good")
            await world.sql("ALTER TABLE t ADD x int GENERATED ALWAYS AS (v + 1) VIRTUAL")
            await works_again(world, "t")
            await objected(world, "t", "generated column")
            await good_flows(world)


async def test_f490_a_copy_gives_way_to_the_identity_that_its_table_must_have(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*TABLES, "INSERT INTO t (id, v) SELECT g, g FROM generate_series(10, 20000) g", *GOOD)
        slowly = {**SOON, "copy_rows_per_s": 2000}
        async with world.capture(wait=False, **slowly):

            async def copies() -> bool:
                return await identity(world, "t") == "f"

            await until(copies, "the table has a whole identity")
            await world.sql("CREATE PUBLICATION other FOR TABLE t (id, v)")
            await works_again(world, "t")
            row = await objected(world, "t")
            assert row.state == "refused" and row.snapshot is None
            await world.flowing("good", "split")


async def test_f491_an_identity_that_another_publication_needs_is_not_given_back(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*TABLES, *GOOD, "ALTER TABLE split REPLICA IDENTITY NOTHING")
        async with world.capture(**SOON):
            await world.flowing("t", "split")
            await world.sql("CREATE PUBLICATION other FOR TABLE t WHERE (v > 0), good")
        async with world.capture(tables=("split", "good"), **SOON) as capture:
            # The configuration leaves the table out; it retains the identity while that is needed.
            assert capture._session is not None and capture._session.adder is not None
            watching = capture._session.adder.watcher
            await until(lambda: bool(watching._kept_identities), "its identity was to be given back")
            await good_flows(world)
            assert await identity(world, "t") == "f" and not await refused_by_postgres(world, "t")
            assert (await world.tables())["public.t"].identities
        done = await drop_capture(world.config(), world.catalogue)
        (statement,) = [each for each in done.for_administrator if '"t"' in each]
        assert statement == 'ALTER TABLE "public"."t" REPLICA IDENTITY DEFAULT'
        assert "publications=other" in done.for_administrator[statement]
        assert await identity(world, "t") == "f" and not await refused_by_postgres(world, "t")
        assert not done.left and done.slot and done.publication
        assert '"public"."split"' in done.identities and await identity(world, "good") == "d"
        await world.sql("DROP PUBLICATION other", statement)
        assert not await refused_by_postgres(world, "t")


NARROWED = {
    "a row filter": "t WHERE (id > 1)",
    "a column list": "t (id, v)",
    "both": "t (id, v) WHERE (id > 1)",
}


@pytest.mark.parametrize(("what", "manual"), [("a row filter", True), ("a column list", False), ("both", True)])
async def test_f492_a_table_of_which_the_publication_leaves_something_out_is_refused_with_the_statement_that_mends_it(
    postgres_dsn: str, what: str, manual: bool
) -> None:
    async with World(postgres_dsn) as world:
        own = f"tidemill_{world.name}"
        options = ROOT.replace(")", ", publish_generated_columns = stored)") if version_of(world.dsn) >= 18 else ROOT
        await world.sql(
            *TABLES[:3], *GOOD, f"CREATE PUBLICATION {own} FOR TABLE {NARROWED[what]}, good {options}",
        )  # fmt: skip
        if manual:
            await world.sql("ALTER TABLE good REPLICA IDENTITY FULL")
        with pytest.raises(InvalidError, match="DROP TABLE ONLY"):
            await check_capture(world.config(manual=manual))
        async with world.capture(manual=manual, tables=("t", "good"), **SOON):
            row = await objected(world, "t", "is not complete")
            assert row.state == "refused" and row.snapshot is None
            assert await identity(world, "t") == "d" and not await refused_by_postgres(world, "t")
            await good_flows(world)
            await world.sql(*row.fix.removeprefix("Run ").rstrip(";").split("; "))
            if manual:
                await world.sql("ALTER TABLE t REPLICA IDENTITY FULL")
            await world.flowing("t")
            await world.sql("INSERT INTO t (id, v) VALUES (0, 5), (9, 9)", "DELETE FROM t WHERE id = 2")
            await exact(world, "t")
            # The same while it flows: it is paused, and copied again once it is complete.
            await world.transaction(
                f"ALTER PUBLICATION {own} DROP TABLE t", f"ALTER PUBLICATION {own} ADD TABLE ONLY {NARROWED[what]}"
            )
            row = await objected(world, "t", "is not complete")
            await world.sql("INSERT INTO t (id, v) VALUES (-5, 5)")
            if manual and what != "a row filter":
                await world.sql("ALTER TABLE t REPLICA IDENTITY DEFAULT")
            await works_again(world, "t")
            await world.sql("UPDATE t SET v = 8 WHERE id = 0")
            fix = row.fix.removeprefix("Run ").partition("; It is")[0]
            await world.sql(*fix.rstrip(";").split("; "))
            if manual:
                await world.sql("ALTER TABLE t REPLICA IDENTITY FULL")
            await world.flowing("t")
            await exact(world, "t")


async def test_f492_a_manual_capture_whose_publication_has_other_options_is_told_how_it_is_made(
    postgres_dsn: str,
) -> None:
    async with World(postgres_dsn) as world:
        own = f"tidemill_{world.name}"
        await world.sql(*GOOD, "ALTER TABLE good REPLICA IDENTITY FULL")
        await world.sql(f"CREATE PUBLICATION {own} FOR TABLE good WITH (publish = 'insert')")
        async with world.capture(manual=True, wait=False) as capture:

            def refused() -> bool:
                failure = world.tracker.failure(capture.config.mark)
                return failure is not None and "CREATE PUBLICATION" in failure.error

            await until(refused, "it says how the publication is made")
            failure = world.tracker.failure(capture.config.mark)
            assert failure is not None
            statements = failure.error.partition("Run ")[2].rstrip(";").split("; ")
            await world.sql(*statements, f"ALTER PUBLICATION {own} ADD TABLE ONLY good")
        async with world.capture(manual=True):
            await world.flowing("good")
            await good_flows(world)
