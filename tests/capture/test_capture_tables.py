"""Tables are units: a fault of one affects only that one and is reported; no statement of the application fails."""

from __future__ import annotations

import asyncio

import psycopg
import pytest

from support.capture.on_every_server import (
    test_f402_tables_that_cannot_be_captured_are_told_and_stop_nothing_now_or_later,
    test_f406_a_table_whose_identity_is_taken_away_gets_it_back,
)
from support.capture.world import GOOD, PARTITIONED, World, good_flows, plain, stuck
from support.waiting import slowness, until

__all__ = [
    "test_f402_tables_that_cannot_be_captured_are_told_and_stop_nothing_now_or_later",
    "test_f406_a_table_whose_identity_is_taken_away_gets_it_back",
]

pytestmark = pytest.mark.postgres


@pytest.mark.parametrize("name", ["a b", "a.b", 'q"uote', "été", "A_x20", "x" * 63, "ü" * 31])
async def test_f401_a_table_is_captured_whatever_its_name(postgres_dsn: str, name: str) -> None:
    quoted = '"' + name.replace('"', '""') + '"'
    async with World(postgres_dsn) as world:
        await world.sql(
            f"CREATE TABLE {quoted} (id int PRIMARY KEY, v int)", f"INSERT INTO {quoted} VALUES (1, 1)", *GOOD
        )
        async with world.capture():
            await world.sql(f"UPDATE {quoted} SET v = 2", f"INSERT INTO {quoted} VALUES (2, 2)")
            await good_flows(world)
            (row,) = [row for row in (await world.tables()).values() if row.table != "public.good"]
            assert row.state == "captured"
            topic = row.topic.removeprefix(f"{world.name}.public.")
            assert await world.folded(topic) == await plain(world, quoted)
        async with world.capture():
            await good_flows(world)


async def test_f403_generated_columns_never_make_a_statement_of_the_application_fail(postgres_dsn: str) -> None:
    """PostgreSQL 18: FULL with an unpublished generated column makes UPDATE and DELETE an error."""
    async with World(postgres_dsn) as world:
        await world.sql(
            *GOOD,
            "CREATE TABLE stored (id int PRIMARY KEY, v int, d int GENERATED ALWAYS AS (v * 2) STORED)",
            "CREATE TABLE virtual (id int PRIMARY KEY, v int, d int GENERATED ALWAYS AS (v * 2) VIRTUAL)",
            "INSERT INTO stored VALUES (1, 1)",
            "INSERT INTO virtual VALUES (1, 1)",
        )
        async with world.capture(table_poll_s=0.1):
            for table in ("stored", "virtual"):
                await world.sql(
                    f"UPDATE {table} SET v = 5",
                    f"INSERT INTO {table} VALUES (2, 2)",
                    f"DELETE FROM {table} WHERE id = 1",
                )
            await good_flows(world)
            assert await world.folded("stored") == {'{"id":2}': {"id": 2, "v": 2, "d": 4}}
            row = (await world.tables())["public.virtual"]
            assert row.state == "left" and "virtual generated column" in row.reason
            identity = "SELECT relreplident FROM pg_class WHERE relname = 'virtual'"
            assert await world.select(identity) == [("d",)]


async def test_f403_a_stored_generated_column_of_a_primary_key_is_part_of_the_captured_key(postgres_dsn: str) -> None:
    """A virtual column cannot be part of a key."""
    async with World(postgres_dsn) as world:
        with pytest.raises(psycopg.errors.FeatureNotSupported):
            await world.sql("CREATE TABLE bad (id int, d int GENERATED ALWAYS AS (id) VIRTUAL, PRIMARY KEY (id, d))")
        await world.sql(
            "CREATE TABLE docs (id int, lang text, tag text GENERATED ALWAYS AS (lower(lang)) STORED,"
            " PRIMARY KEY (id, tag))",
            "INSERT INTO docs (id, lang) VALUES (1, 'EN'), (1, 'DE')",
        )
        async with world.capture():
            await world.sql("INSERT INTO docs (id, lang) VALUES (1, 'FR')", "DELETE FROM docs WHERE lang = 'EN'")
            await world.caught_up()
            assert set(await world.folded("docs")) == {'{"id":1,"tag":"de"}', '{"id":1,"tag":"fr"}'}


async def test_f404_a_virtual_column_added_later_takes_the_table_out_of_the_publication(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD, "CREATE TABLE t (id int PRIMARY KEY, v int)", "INSERT INTO t VALUES (1, 1)")
        async with world.capture(table_poll_s=30):
            await world.caught_up()
            await world.sql("ALTER TABLE t ADD d int GENERATED ALWAYS AS (v * 2) VIRTUAL")

            async def works() -> bool:
                try:
                    await world.sql("UPDATE t SET v = v + 1")
                except Exception:
                    return False
                return True

            await until(works, "the application's UPDATE works again", 3.0)
            await world.paused("t")
            assert "generated" in await stuck(world, "t")
            await good_flows(world)


async def test_f405_a_table_that_inherits_is_not_published_without_an_identity(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD, "CREATE TABLE child (extra int) INHERITS (good)", "INSERT INTO child VALUES (9, 9, 9)")
        async with world.capture():
            await world.sql("UPDATE child SET v = 10", "DELETE FROM child")
            await good_flows(world)


async def test_f407_an_attached_partition_without_full_parks_its_table_alone(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(
            *GOOD,
            "CREATE TABLE p (id int PRIMARY KEY, v int) PARTITION BY RANGE (id)",
            "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (100)",
            "INSERT INTO p VALUES (1, 1)",
        )
        async with world.capture(table_poll_s=30):
            await world.caught_up()
            await world.transaction(
                "CREATE TABLE p2 (id int PRIMARY KEY, v int)",
                "INSERT INTO p2 VALUES (101, 1)",
                "ALTER TABLE p ATTACH PARTITION p2 FOR VALUES FROM (100) TO (200)",
                "UPDATE p SET v = 2 WHERE id = 101",
            )
            row = await world.paused("p")
            # Both are true: the update lacks its old row, and the check of partitions may find the attached row first.
            [said] = [words for words in ("old row", "attached with rows") if words in row.reason]
            assert "resnapshot" in row.fix
            await good_flows(world)
        async with world.capture():
            await good_flows(world)
            assert said in await stuck(world, "p")


async def test_f407_partitions_that_begin_empty_flow(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*PARTITIONED)
        async with world.capture(table_poll_s=0.1):
            await world.caught_up()
            await world.sql("CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (100) TO (200)")
            await world.sql("INSERT INTO p VALUES (101, 1)")
            await world.sql("CREATE TABLE p3 (id int PRIMARY KEY, v int)")
            await world.sql("ALTER TABLE p ATTACH PARTITION p3 FOR VALUES FROM (200) TO (300)")
            await world.sql("INSERT INTO p VALUES (201, 1)", "INSERT INTO p3 VALUES (202, 1)")

            async def known() -> bool:
                row = await world.table("public.p")
                full = "SELECT count(*) FROM pg_class WHERE relname LIKE 'p_' AND relkind = 'r' AND relreplident = 'f'"
                return row is not None and len(row.partitions or ()) == 3 and await world.select(full) == [(3,)]

            await until(known, "the partitions are looked into, and log whole old rows")
            await world.sql("UPDATE p SET v = 2", "DELETE FROM p WHERE id = 101")
            await good_flows(world)
            assert await world.folded("p") == await plain(world, "p")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            ("CREATE TABLE p2 AS SELECT 101 id, 1 v", "ALTER TABLE p2 ALTER id SET NOT NULL, ADD PRIMARY KEY (id)",
             "ALTER TABLE p ATTACH PARTITION p2 FOR VALUES FROM (100) TO (200)"),
            "attached with rows",
        ),
        (("ALTER TABLE p DETACH PARTITION p1",), "a partition is gone"),
        (("DROP TABLE p1",), "a partition is gone"),
    ],
)  # fmt: skip
async def test_f407_rows_that_come_or_go_with_a_partition_park_the_table(
    postgres_dsn: str, changes: tuple[str, ...], words: str
) -> None:
    """The stream has no message about these rows."""
    async with World(postgres_dsn) as world:
        await world.sql(*PARTITIONED)
        async with world.capture(table_poll_s=0.1):
            await world.caught_up()
            await world.sql(*changes)
            await world.paused("p", words)
            await good_flows(world)


async def test_f408_a_table_dropped_while_it_is_set_up_stops_nothing(postgres_dsn: str) -> None:
    """The table is listed, then dropped before its lock; and dropped again before the copy."""
    async with World(postgres_dsn) as world:
        from tidemill.capture.session import bootstrap
        from tidemill.capture.snapshot import exported_snapshot

        await world.sql(*GOOD, "CREATE TABLE early (id int PRIMARY KEY)", "CREATE TABLE late (id int PRIMARY KEY)")
        publish, begin = bootstrap.publish_tables, exported_snapshot.ExportedSnapshot.open_snapshot

        async def publish_late(*args, **kwargs):  # type: ignore[no-untyped-def]
            await world.sql("DROP TABLE IF EXISTS early")
            return await publish(*args, **kwargs)

        async def begin_late(self):  # type: ignore[no-untyped-def]
            await world.sql("DROP TABLE IF EXISTS late")
            return await begin(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bootstrap, "publish_tables", publish_late)
            patch.setattr(exported_snapshot.ExportedSnapshot, "open_snapshot", begin_late)
            async with world.capture(table_poll_s=0.1):
                await good_flows(world)

                async def forgotten() -> bool:
                    return set(await world.tables()) == {"public.good"}

                await until(forgotten, "what is gone is forgotten")
        async with world.capture():
            await good_flows(world)


async def test_f409_a_table_behind_an_open_transaction_names_it_and_keeps_nobody_waiting(postgres_dsn: str) -> None:
    import psycopg

    async with World(postgres_dsn) as world:
        await world.sql(*GOOD)
        async with world.capture(table_poll_s=0.1), await psycopg.AsyncConnection.connect(world.dsn) as holder:
            pid = holder.info.backend_pid
            # The capture may set a table up before the holder has its lock: then another table is tried.
            for number in range(100):
                t = f"t{number}"
                await world.sql(f"CREATE TABLE {t} (id int PRIMARY KEY, v int)")
                await holder.execute(f"INSERT INTO {t} VALUES (1, 1)")
                identity = f"SELECT relreplident::text FROM pg_class WHERE oid = '{t}'::regclass"
                if await world.select(identity) == [("d",)]:
                    break
                await holder.rollback()
            row = await world.paused(t, f"pid={pid}")
            assert f"INSERT INTO {t}" in row.reason
            await good_flows(world)
            # The lock is requested with short timeouts and long pauses, so that it hardly delays concurrent
            # writers.
            slow = 0.0
            async with await psycopg.AsyncConnection.connect(world.dsn, autocommit=True) as writer:
                loop = asyncio.get_running_loop()
                until_s = loop.time() + 4
                count = 1
                while loop.time() < until_s:
                    began_s = loop.time()
                    count += 1
                    await writer.execute(f"INSERT INTO {t} VALUES ({count}, 1)")
                    took_s = loop.time() - began_s
                    slow = max(slow, took_s)
            assert slow < 0.5 * slowness()
            await holder.commit()
            await world.flowing(t)
            await world.caught_up()
            assert await world.folded(t) == await plain(world, t)
