"""The capture's rows about its tables: one each, of bounded size, and none of dropped tables."""

from __future__ import annotations

import pytest

from support.capture.world import GOOD, World, good_flows, plain, stuck
from support.waiting import until
from tidemill.base.limits import METASTORE_VALUE_BYTES
from tidemill.metastore.catalogue import CaptureTableRow, PipelineRow, TopicRow
from tidemill.metastore.rows import CAPTURE_TABLES, CAPTURES

pytestmark = pytest.mark.postgres


async def forgotten(world: World, table: str) -> None:
    async def holds() -> bool:
        return f"public.{table}" not in await world.tables()

    await until(holds, f"{table} is forgotten")


async def test_f419_a_dropped_table_ends_at_its_drop_and_leaves_nothing_once_no_pipeline_reads_it(
    postgres_dsn: str,
) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD)
        await world.catalogue.put(PipelineRow("p", {"kept": f"capture:{world.name}:public.kept"}))
        async with world.capture(table_poll_s=0.1):
            for table in ("kept", "gone"):
                await world.sql(f"CREATE TABLE {table} (id int PRIMARY KEY, v int)")
            await world.flowing("kept", "gone")
            await world.transaction("INSERT INTO kept VALUES (1, 1)", "INSERT INTO gone VALUES (1, 1)")
            await world.sql("DROP TABLE kept, gone")
            await forgotten(world, "gone")
            assert f"{world.name}.public.gone" not in {t.name for t in await world.catalogue.list(TopicRow)}
            row = await world.paused("kept", "dropped from the database")
            assert row.state == "dropped" and "the pipeline's table ends here" in await stuck(world, "kept")
            await good_flows(world)
            binding = await world.caught_up()
            end = sum(binding.offsets[await world.topic_id("kept")])
            assert await world.folded("kept", end) == {'{"id":1}': {"id": 1, "v": 1}}, "all before the drop is there"
            await world.catalogue.put(PipelineRow("p", {}))
            await forgotten(world, "kept")
            # A re-created table starts over under the same name.
            await world.sql("CREATE TABLE gone (id int PRIMARY KEY, v int)", "INSERT INTO gone VALUES (2, 2)")
            await world.flowing("gone")
            assert await world.folded("gone") == await plain(world, "gone")
        assert set(await world.tables()) == {"public.good", "public.gone"}


async def test_a_table_that_is_dropped_while_it_is_parked_says_so_and_not_how_to_mend_it(postgres_dsn: str) -> None:
    """`capture accept` would only answer that the table is dropped. Found by the oracle's worlds, seeds 23 and 28."""
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD, "CREATE TABLE kept (id int PRIMARY KEY, v int, w int)")
        await world.catalogue.put(PipelineRow("p", {"kept": f"capture:{world.name}:public.kept"}))
        async with world.capture(table_poll_s=0.1):
            await world.flowing("kept")
            await world.sql("ALTER TABLE kept DROP COLUMN w")
            before = await world.paused("kept", "is gone")
            await world.sql("DROP TABLE kept")
            row = await world.paused("kept", "dropped from the database")
            assert (row.state, row.paused_lsn, row.again_ms) == ("dropped", before.paused_lsn, 0)
            assert "accept" not in row.fix and "the pipeline's table ends here" in await stuck(world, "kept")
            await world.sql("CREATE TABLE kept (id int PRIMARY KEY, v int)", "INSERT INTO kept VALUES (2, 2)")
            await world.flowing("kept")
            assert await world.folded("kept") == await plain(world, "kept")


async def test_a_table_that_is_dropped_while_it_is_refused_says_so_and_not_what_refused_it(postgres_dsn: str) -> None:
    """A reader of its shape would otherwise wait permanently for the publication's owner."""
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD, "CREATE TABLE kept (id int PRIMARY KEY, v int)")
        await world.sql("CREATE PUBLICATION other FOR TABLE kept (id)")
        await world.catalogue.put(PipelineRow("p", {"kept": f"capture:{world.name}:public.kept"}))
        async with world.capture(table_poll_s=0.1):
            await world.paused("kept", "other")
            await world.sql("DROP TABLE kept")
            row = await world.paused("kept", "dropped from the database")
            assert (row.state, row.paused_lsn) == ("dropped", 0) and "other" not in await stuck(world, "kept")
            await world.sql("CREATE TABLE kept (id int PRIMARY KEY, v int)", "INSERT INTO kept VALUES (2, 2)")
            await world.flowing("kept")
            assert await world.folded("kept") == await plain(world, "kept")


async def test_a_stream_that_tells_of_before_the_copy_leaves_followers_no_older_columns(postgres_dsn: str) -> None:
    """The last description in the replayed stream has no row after the copy, so no shape would get the newest column.
    Found by the oracle's worlds, seed 4004.
    """
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD, "CREATE TABLE grown (id int PRIMARY KEY, v int)", "INSERT INTO grown VALUES (1, 1)")
        async with world.capture(table_poll_s=0.1):
            await world.flowing("grown")
        for statement in (
            "INSERT INTO grown VALUES (2, 2)",
            "ALTER TABLE grown ADD COLUMN a double precision DEFAULT random()",
            "UPDATE grown SET v = v + 1",
            "ALTER TABLE grown ADD COLUMN w int DEFAULT 7",
        ):
            await world.sql(statement)
        async with world.capture(table_poll_s=0.1, copy_again=True, copy_again_pause_s=0.1) as capture:

            async def copied() -> bool:
                row = await world.table("public.grown")
                return row is not None and row.is_streaming and [c.name for c in row.columns] == ["id", "v", "a", "w"]

            await until(copied, "the table is copied again")
            await world.caught_up()

            async def seen() -> bool:
                relation = capture.relation("public", "grown")
                return relation is not None and [c.name for c in relation.columns] == ["id", "v", "a", "w"]

            await until(seen, "the relation has the columns of the copy")


async def test_a_table_that_is_dropped_while_it_is_set_up_is_dropped_and_not_for_ever_taken_in(
    postgres_dsn: str,
) -> None:
    """The table's identity was recorded, but the table was dropped before its description was read. Found by the
    oracle's worlds, seed 3004.
    """
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD)
        await world.catalogue.put(PipelineRow("p", {"kept": f"capture:{world.name}:public.kept"}))
        async with world.capture(table_poll_s=0.1):
            await world.flowing("good")
        noted = CaptureTableRow(world.name, "public.kept", identities={7: ("kept", "DEFAULT")})
        await world.catalogue.change_table(world.name, "public.kept", lambda _: noted)
        async with world.capture(table_poll_s=0.1):
            assert (await world.paused("kept", "dropped from the database")).state == "dropped"
            assert "the pipeline's table ends here" in await stuck(world, "kept")
            await world.sql("CREATE TABLE kept (id int PRIMARY KEY, v int)", "INSERT INTO kept VALUES (2, 2)")
            await world.flowing("kept")
            assert await world.folded("kept") == await plain(world, "kept")


async def test_a_column_that_no_row_has_yet_is_in_what_followers_see_of_the_table(postgres_dsn: str) -> None:
    """The stream does not announce the column before the first row with it. Until then, shapes would show the table
    without it.
    """
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD, "CREATE TABLE grown (id int PRIMARY KEY, v int)", "INSERT INTO grown VALUES (1, 1)")
        async with world.capture(table_poll_s=0.1) as capture:
            await world.flowing("grown")
            await world.sql("ALTER TABLE grown ADD COLUMN w int DEFAULT 7")

            async def seen() -> bool:
                relation = capture.relation("public", "grown")
                return relation is not None and [c.name for c in relation.columns] == ["id", "v", "w"]

            await until(seen, "the relation has the column")
            relation = capture.relation("public", "grown")
            assert relation is not None
            assert (relation.version, relation.key_columns[0].name) == (
                (await world.tables())["public.grown"].version,
                "id",
            )
            await world.sql("INSERT INTO grown VALUES (2, 2, 2)")
            await world.caught_up()
            assert (await world.folded("grown"))['{"id":2}'] == {"id": 2, "v": 2, "w": 2}


async def test_f420_no_row_grows_with_the_number_of_tables_and_wide_ones_fit(postgres_dsn: str) -> None:
    """The limits hold for many concurrent tables, for many tables over time, and for PostgreSQL's widest table with its
    longest names.
    """
    async with World(postgres_dsn) as world:
        columns = ", ".join(f'"{"c" * 58}{n:04}" timestamp with time zone' for n in range(1590))
        await world.sql(*GOOD, f"CREATE TABLE wide (id int PRIMARY KEY, v int, {columns})")
        await world.sql(*[f"CREATE TABLE t{n} (id int PRIMARY KEY, v int)" for n in range(60)])
        async with world.capture(table_poll_s=0.2) as capture:
            await good_flows(world)
            await world.sql("INSERT INTO wide (id, v) VALUES (1, 1)")
            await world.caught_up()
            assert len(await world.records("wide")) == 1
            row = await world.row()
            before = len(CAPTURES.encode(row)[1])
            sizes = {name: len(CAPTURE_TABLES.encode(table)[1]) for name, table in (await world.tables()).items()}
            assert max(sizes.values()) == sizes["public.wide"] < METASTORE_VALUE_BYTES
            assert max(size for name, size in sizes.items() if name != "public.wide") < 500
            await world.sql(*[f"DROP TABLE t{n}" for n in range(60)])
            for round_ in range(3):
                names = [f"n{round_}_{n}" for n in range(20)]
                await world.sql(*[f"CREATE TABLE {name} (id int PRIMARY KEY, v int)" for name in names])
                await world.flowing(*names)
                await world.sql(*[f"DROP TABLE {name}" for name in names])
            await good_flows(world)

            async def the_rest_is_forgotten() -> bool:
                return set(await world.tables()) == {"public.good", "public.wide"}

            await until(the_rest_is_forgotten, "nothing is left of tables that are gone")
            assert {t.name for t in await world.catalogue.list(TopicRow)} == {
                f"{world.name}.public.good", f"{world.name}.public.wide",
            }  # fmt: skip
            assert len(CAPTURES.encode(await world.row())[1]) <= before + 8
            assert len(capture.relations()) == 2


async def test_f422_a_table_taken_out_of_the_publication_by_somebody_is_copied_again(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD, "CREATE TABLE b (id int PRIMARY KEY, v int)")
        async with world.capture(table_poll_s=0.1):
            await good_flows(world)
            old = await world.topic_id("b")
            await world.sql(f'ALTER PUBLICATION "tidemill_{world.name}" DROP TABLE b', "INSERT INTO b VALUES (1, 1)")

            async def anew() -> bool:
                return await world.topic_id("b") != old

            await until(anew, "it is copied again")
            await world.flowing("b")
            await world.sql("INSERT INTO b VALUES (2, 2)")
            await good_flows(world)
            assert await world.folded("b") == await plain(world, "b")


async def test_f423_a_table_whose_rows_a_role_may_not_all_see_is_refused_not_copied_in_part(postgres_dsn: str) -> None:
    """Row-level security omits rows silently, unless the session asks for an error."""
    async with World(postgres_dsn) as world:
        role = f"bound_{world.name}"
        await world.sql(
            f"CREATE ROLE {role} LOGIN REPLICATION", f'GRANT CREATE ON DATABASE "{world.name}" TO {role}', *GOOD,
            "CREATE TABLE hidden (id int PRIMARY KEY, v int)", "INSERT INTO hidden VALUES (1, 1), (2, 2)",
            "ALTER TABLE hidden ENABLE ROW LEVEL SECURITY", "ALTER TABLE hidden FORCE ROW LEVEL SECURITY",
            "CREATE POLICY one_row ON hidden USING (id = 1)",
            f"ALTER TABLE hidden OWNER TO {role}", f"ALTER TABLE good OWNER TO {role}",
        )  # fmt: skip
        owner, world.dsn = world.dsn, world.dsn.replace("postgres@", f"{role}@")
        try:
            async with world.capture(table_poll_s=0.1):
                await good_flows(world)
                said = await stuck(world, "hidden")
                assert "row-level security" in said and "NO FORCE ROW LEVEL SECURITY" in said
        finally:
            world.dsn = owner
            await until(world.slot_dropped, "the slot is dropped")
            await world.sql(f"DROP OWNED BY {role}", f"DROP ROLE {role}")
