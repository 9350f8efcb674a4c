"""Tests that run on every PostgreSQL that capture supports."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import psycopg
import pytest

from support.capture.identity import exact, identity, left_in_database
from support.capture.rights import NAMED, NAMED_TABLES, missing, reader_of
from support.capture.world import (
    GOOD,
    World,
    assert_no_position_twice,
    good_flows,
    header,
    is_reported,
    plain,
    positions,
    stuck,
    table_as_folded,
)
from support.waiting import until
from tidemill.base.errors import ConflictError, MissingError
from tidemill.capture.session.teardown import drop_capture
from tidemill.metastore.catalogue import CaptureRow, TopicRow
from tidemill.topics.batch import Record


class Writer:
    """Random small transactions over two tables, on a separate connection, until stopped."""

    def __init__(self, dsn: str, seed: int) -> None:
        self._dsn = dsn
        self._random = random.Random(seed)
        self._stop = False
        self.transactions = 0

    async def run(self) -> None:
        connection = await psycopg.AsyncConnection.connect(self._dsn, autocommit=True)
        async with connection:
            while not self._stop:
                try:
                    async with connection.transaction():
                        for _ in range(self._random.randint(1, 6)):
                            await connection.execute(self._statement())
                except psycopg.errors.DeadlockDetected:
                    continue
                self.transactions += 1
                if self._random.random() < 0.2:
                    await asyncio.sleep(self._random.random() * 0.01)

    def stop(self) -> None:
        self._stop = True

    def _statement(self) -> str:
        table = self._random.choice(("a", "b"))
        key, value = self._random.randint(1, 40), self._random.randint(1, 10**6)
        roll = self._random.random()
        if roll < 0.15:
            return f"DELETE FROM {table} WHERE id = {key}"
        if roll < 0.25:
            # A key change, when the new key is free.
            new = self._random.randint(1000, 10**8)
            return (
                f"UPDATE {table} SET id = {new} WHERE id = {key} AND NOT EXISTS (SELECT FROM {table} WHERE id = {new})"
            )
        if roll < 0.26:
            return f"TRUNCATE {table}"
        return f"INSERT INTO {table} VALUES ({key}, {value}) ON CONFLICT (id) DO UPDATE SET v = excluded.v"


TWO_TABLES = ("CREATE TABLE a (id int PRIMARY KEY, v int)", "CREATE TABLE b (id int PRIMARY KEY, v int)")


async def test_captures_cut_off_at_random_moments_resume_exactly_once(postgres_dsn: str) -> None:
    """Each round abandons a capture as a crash would (no clean close of its work) and opens another one."""
    async with World(postgres_dsn) as world:
        rng = random.Random(7)
        await world.sql(*TWO_TABLES)
        writers = [Writer(world.dsn, seed) for seed in range(2)]
        running = [asyncio.ensure_future(writer.run()) for writer in writers]
        for _ in range(8):
            async with world.capture(wait=False, fragment_changes=2):
                await asyncio.sleep(rng.random() * 0.5)
        for writer in writers:
            writer.stop()
        await asyncio.gather(*running)
        async with world.capture(fragment_changes=3):
            await world.flowing("a", "b")  # a round on a slow machine may end before a table is copied
            await world.caught_up()
            for table in "ab":
                assert await world.folded(table) == await table_as_folded(world, table)
                assert_no_position_twice(await world.records(table))
        bindings = await world.remap().after(0)
        assert [b.lsn for b in bindings] == sorted(b.lsn for b in bindings)


async def test_h14_a_transaction_open_across_the_set_up_is_not_lost(postgres_dsn: str) -> None:
    """electric #4773: it wrote before the table was published and commits after everything is set up."""
    async with World(postgres_dsn) as world:
        await world.sql(*TWO_TABLES)
        open_writer = await psycopg.AsyncConnection.connect(world.dsn)
        async with open_writer:
            await open_writer.execute("INSERT INTO a VALUES (1, 1)")
            async with world.capture(wait=False) as capture:
                await asyncio.sleep(0.5)
                assert not capture.streaming
                await world.sql("INSERT INTO b VALUES (7, 7)")
                await open_writer.commit()
                await until(lambda: capture.streaming, "the set-up ends after the writer")
                await world.caught_up()
                for table in "ab":
                    assert await world.folded(table) == await table_as_folded(world, table)
                    assert_no_position_twice(await world.records(table))


IDENTITY_TABLES = (
    "CREATE TABLE plain (id int PRIMARY KEY, v text)",
    "CREATE TABLE quiet (id int PRIMARY KEY, v text)",
    "ALTER TABLE quiet REPLICA IDENTITY NOTHING",
    'CREATE TABLE "By index" (id int PRIMARY KEY, code text NOT NULL)',
    'CREATE UNIQUE INDEX "the code" ON "By index" (code)',
    'ALTER TABLE "By index" REPLICA IDENTITY USING INDEX "the code"',
    "CREATE TABLE whole (id int PRIMARY KEY, v text)",
    "ALTER TABLE whole REPLICA IDENTITY FULL",
    "CREATE TABLE split (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
    "CREATE TABLE split_low PARTITION OF split FOR VALUES FROM (0) TO (100)",
)

IDENTITIES = {"plain": "d", "quiet": "n", "By index": "i", "whole": "f", "split": "d", "split_low": "d"}


async def identities(world: World) -> dict[str, str]:
    rows = await world.select(
        "SELECT relname, relreplident FROM pg_class"
        " WHERE relkind IN ('r', 'p') AND relnamespace = 'public'::regnamespace"
    )
    return {name: found.decode() if isinstance(found, bytes) else found for name, found in rows}


async def test_all_that_a_capture_changed_is_as_it_was(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*IDENTITY_TABLES)
        before = await identities(world)
        assert before == IDENTITIES
        async with world.capture():
            assert set((await identities(world)).values()) == {"f"}
            # A partition that comes later is given one, too, and gives it back.
            await world.sql("CREATE TABLE split_high PARTITION OF split FOR VALUES FROM (100) TO (200)")

            async def whole() -> bool:
                return (await identities(world))["split_high"] == "f"

            await until(whole, "the new partition has a whole identity")
            with pytest.raises(ConflictError, match="is running"):
                await drop_capture(world.config(), world.catalogue)
        noted = {row.table: len(row.identities) for row in await world.catalogue.tables(world.name)}
        assert noted == {
            "public.plain": 1,
            "public.quiet": 1,
            "public.By index": 1,
            "public.whole": 0,
            "public.split": 3,
        }
        done = await drop_capture(world.config(), world.catalogue)
        assert not done.left and done.publication and done.slot and len(done.topics) == 5
        assert await identities(world) == {**before, "split_high": "d"}
        assert await left_in_database(world) == []
        assert await world.catalogue.tables(world.name) == []
        assert await world.catalogue.get(CaptureRow, world.name) is None
        assert await world.catalogue.list(TopicRow) == []
        await world.sql("UPDATE quiet SET v = 'x'", "DELETE FROM split")
        with pytest.raises(MissingError):
            await drop_capture(world.config(), world.catalogue)
        # Re-created under its name, it captures as before.
        await world.sql("INSERT INTO plain VALUES (1, 'a')")
        async with world.capture():
            assert (await identities(world))["plain"] == "f"


AS_IS: dict[str, Any] = {"identity": "as-is", "table_poll_s": 0.1}

WIDE = (
    "CREATE TABLE wide (id int PRIMARY KEY, v int, body text, note text)",
    "ALTER TABLE wide ALTER body SET STORAGE EXTERNAL, ALTER note SET STORAGE EXTERNAL",
    "INSERT INTO wide SELECT g, g, repeat('b' || g, 2000), repeat('n' || g, 2000) FROM generate_series(1, 20) g",
)


def unchanged(record: Record) -> list[str]:
    return json.loads(dict(record.headers).get("tm.unchanged") or b"[]")


async def test_an_unchanged_toasted_value_is_named_and_left_out_and_each_identity_is_right_when_it_is_switched(
    postgres_dsn: str,
) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*WIDE)
        async with world.capture(**AS_IS):
            assert await identity(world, "wide") == "d"
            row = await world.table("public.wide")
            assert row is not None and row.identity == "DEFAULT" and not row.identities
            start = len(await world.records("wide"))
            await world.sql(
                "UPDATE wide SET v = 100 WHERE id = 1",
                "UPDATE wide SET note = NULL WHERE id = 1",
                "UPDATE wide SET id = 1000 WHERE id = 2",
                "DELETE FROM wide WHERE id = 3",
                "INSERT INTO wide VALUES (21, 1, repeat('x', 5000), 'short')",
            )
            await exact(world, "wide")
            records = (await world.records("wide"))[start:]
            assert [header(r, "tm.op") for r in records] == ["update", "update", "delete", "update", "delete", "insert"]
            assert [unchanged(r) for r in records] == [["body", "note"], ["body"], [], ["body", "note"], [], []]
            assert json.loads(records[1].value or b"") == {"id": 1, "v": 100, "note": None}
            assert header(records[3], "tm.was") == '{"id":2}'
            # By hand, within one transaction even: FULL, and back.
            await world.transaction(
                "UPDATE wide SET v = 5 WHERE id = 5",
                "ALTER TABLE wide REPLICA IDENTITY FULL",
                "UPDATE wide SET v = 6 WHERE id = 6",
                "UPDATE wide SET id = 1007 WHERE id = 7",
                "ALTER TABLE wide REPLICA IDENTITY DEFAULT",
                "UPDATE wide SET v = 8 WHERE id = 8",
            )
            await exact(world, "wide")
            switched = [unchanged(r) for r in (await world.records("wide"))[start + 6 :]]
            assert switched == [["body", "note"], [], [], [], ["body", "note"]]
            await world.sql("ALTER TABLE wide REPLICA IDENTITY FULL")

            async def reported() -> bool:
                found = await world.table("public.wide")
                return found is not None and found.identity == "FULL"

            await until(reported, "the list shows the identity in use")
        done = await drop_capture(world.config(), world.catalogue)
        assert done.publication and done.slot and done.identities == {}
        assert await identity(world, "wide") == "f", "what was not taken is not given back"


async def test_what_doctor_prints_is_all_that_an_administrator_has_to_run(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*NAMED_TABLES)
        assert await missing(world) == []  # the owner needs no administrator
        async with reader_of(world):
            statements = await missing(world)
            assert statements[0].startswith('GRANT USAGE ON SCHEMA "Other one"')
            # Run one by one: none is printed that is not needed, or before what it needs.
            for left in range(len(statements), 0, -1):
                assert len(await missing(world)) == left
                await world.sql(statements[-left])
            assert await missing(world) == []
            # As a role without rights to anything else, beginning with the copy.
            async with world.capture(tables=NAMED):
                await world.caught_up()
                await world.sql(
                    "UPDATE a SET v = 'y'", "INSERT INTO a VALUES (2, 'z')", "INSERT INTO split VALUES (7, 's')"
                )
                await world.caught_up()
                assert await world.folded("a") == await plain(world, "a")
                assert await world.folded("split") == await plain(world, "split")
                assert {row.state for row in (await world.tables()).values()} == {"captured"}


DEFERRABLE_TABLES = (
    "CREATE TABLE {} (id int PRIMARY KEY DEFERRABLE, v text)",
    "CREATE TABLE {} (a int, b text, v text, PRIMARY KEY (b, a) DEFERRABLE INITIALLY DEFERRED)",
    "CREATE TABLE {} (id int PRIMARY KEY DEFERRABLE)",
)


async def as_selected(world: World, *tables: str) -> None:
    await world.caught_up()
    for table in tables:
        rows = [json.loads(row) for (row,) in await world.select(f"SELECT row_to_json(t)::text FROM {table} t")]
        held = list((await world.folded(table)).values())
        assert sorted(map(str, held)) == sorted(map(str, rows)), table


@pytest.mark.postgres
@pytest.mark.parametrize("identity", ["full", "as-is"])
async def test_f486_keys_that_move_within_a_statement_leave_the_topic_as_select_has_the_table(
    postgres_dsn: str, identity: str
) -> None:
    async with World(postgres_dsn) as world:
        for n, table in enumerate(DEFERRABLE_TABLES):
            await world.sql(table.format(f"d{n}"), f"ALTER TABLE d{n} REPLICA IDENTITY FULL")
        await world.sql(
            "INSERT INTO d0 SELECT g, 'v' || g FROM generate_series(1, 5) g",
            "INSERT INTO d1 SELECT g, 'k', 'same' FROM generate_series(1, 900) g",
            "INSERT INTO d2 SELECT g FROM generate_series(1, 5) g",
        )
        async with world.capture(identity=identity, partitions=3, fragment_changes=50):
            await world.sql("UPDATE d0 SET id = id + 1", "UPDATE d1 SET a = a + 1", "UPDATE d2 SET id = id + 1")
            await as_selected(world, "d0", "d1", "d2")
            await world.sql("UPDATE d0 SET id = 9 - id", "UPDATE d1 SET a = 1000 - a", "UPDATE d2 SET id = 9 - id")
            await world.transaction(  # a row passes over others, one is replaced by hand, two are swapped
                "SET CONSTRAINTS ALL DEFERRED", "UPDATE d0 SET id = 4 WHERE id = 3",
                "UPDATE d0 SET id = 8 WHERE v = 'v5'",
                "INSERT INTO d0 VALUES (5, 'new')", "DELETE FROM d0 WHERE id = 5 AND v <> 'new'",
                "INSERT INTO d2 VALUES (77)", "DELETE FROM d2 WHERE id = 77", "UPDATE d2 SET id = 99 WHERE id = 3",
                "UPDATE d2 SET id = 100 WHERE id = 99",
            )  # fmt: skip
            await as_selected(world, "d0", "d1", "d2")
            for table in ("d0", "d1", "d2"):
                row = await world.table(f"public.{table}")
                assert row is not None and row.state == "captured"


async def test_a_key_change_is_a_tombstone_then_an_upsert_at_the_next_ordinal(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE t (a int, b text, v int, PRIMARY KEY (b, a))")
        async with world.capture():
            await world.sql("INSERT INTO t VALUES (1, 'x', 1)", "UPDATE t SET a = 2, v = 9 WHERE a = 1")
            await world.caught_up()
            records = await world.records("t")
        # Key columns in the order of the primary key, value columns in the order of the table.
        assert [r.key for r in records] == [b'{"b":"x","a":1}', b'{"b":"x","a":1}', b'{"b":"x","a":2}']
        assert records[1].value is None
        assert records[2].value == b'{"a":2,"b":"x","v":9}'
        tombstone, upsert = positions(records)[1:]
        assert (tombstone.commit_lsn, tombstone.ordinal + 1) == (upsert.commit_lsn, upsert.ordinal)


async def test_truncate_is_one_record_without_key_and_empties_the_table(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE a (id int PRIMARY KEY)", "CREATE TABLE b (id int PRIMARY KEY)")
        async with world.capture():
            await world.sql(
                "INSERT INTO a VALUES (1), (2)",
                "INSERT INTO b VALUES (1)",
                "TRUNCATE a, b",
                "INSERT INTO a VALUES (3)",
            )
            await world.caught_up()
            assert await world.folded("a") == {'{"id":3}': {"id": 3}}
            assert await world.folded("b") == {}
            truncate = (await world.records("a"))[2]
            assert (truncate.key, truncate.value, header(truncate, "tm.op")) == (None, None, "truncate")


async def test_an_unchanged_toasted_value_is_filled_in_from_the_old_row(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(
            "CREATE TABLE notes (id int PRIMARY KEY, n int, body text)",
            "ALTER TABLE notes ALTER body SET STORAGE EXTERNAL",
        )
        async with world.capture():
            await world.sql(
                "INSERT INTO notes VALUES (1, 0, repeat('long ', 5000))", "UPDATE notes SET n = 1", "DELETE FROM notes"
            )
            await world.caught_up()
            records = await world.records("notes")
        assert json.loads(records[1].value or b"") == {"id": 1, "n": 1, "body": "long " * 5000}
        assert records[2].key == b'{"id":1}'


async def test_a_large_transaction_of_several_tables_is_one_boundary(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE a (id int PRIMARY KEY, v text)", "CREATE TABLE b (id int PRIMARY KEY, v text)")
        async with world.capture(fragment_changes=100, queue_changes=500):
            await world.transaction(
                "INSERT INTO a SELECT g, repeat('x', 50) FROM generate_series(1, 12000) g",
                "INSERT INTO b SELECT g, repeat('y', 50) FROM generate_series(1, 3000) g",
                "UPDATE a SET v = 'z' WHERE id <= 10",
            )
            await world.caught_up()
            a, b = await world.topic_id("a"), await world.topic_id("b")
            seen = {(x.offsets[a][0], x.offsets[b][0]) for x in await world.remap().after(0)}
            assert seen == {(0, 0), (12010, 3000)}
            rows = await world.folded("a")
        assert len(rows) == 12000
        assert sum(row["v"] == "z" for row in rows.values()) == 10


async def test_partitions_of_a_table_are_captured_as_their_root(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(
            "CREATE TABLE p (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
            "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (100)",
            "CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (100) TO (200)",
            "INSERT INTO p VALUES (1, 'a'), (101, 'b')",
        )
        async with world.capture():
            await world.sql("UPDATE p SET v = 'c' WHERE id = 101", "DELETE FROM p WHERE id = 1")
            await world.caught_up()
            assert await world.folded("p") == {'{"id":101}': {"id": 101, "v": "c"}}


async def test_f402_tables_that_cannot_be_captured_are_told_and_stop_nothing_now_or_later(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(
            *GOOD,
            "CREATE TABLE keyless (id int)",
            "CREATE UNLOGGED TABLE quick (id int PRIMARY KEY)",
            "CREATE EXTENSION file_fdw",
            "CREATE SERVER files FOREIGN DATA WRAPPER file_fdw",
            "CREATE FOREIGN TABLE far (id int) SERVER files OPTIONS (filename '/dev/null')",
        )
        for tables in (("public.*",), ("public.*", "quick", "nowhere", "keyless")):
            async with world.capture(tables=tables, table_poll_s=0.1):
                await good_flows(world)
                rows = await world.tables()
                asked = len(tables) > 1
                assert "needs a primary key" in rows["public.keyless"].reason and rows["public.keyless"].fix
                for name in ("quick", "keyless"):
                    assert rows[f"public.{name}"].state == ("refused" if asked else "left")
                    assert is_reported(world, name) == asked, "a table that is skipped makes nothing stuck"
                assert rows["public.far"].state == "left" and "foreign" in rows["public.far"].reason
                if asked:
                    assert "needs a primary key" in await stuck(world, "keyless")
                    assert "no WAL" in await stuck(world, "quick")
                    assert "no such table" in await stuck(world, "nowhere")
                # Nothing of theirs was touched.
                await world.sql("INSERT INTO keyless VALUES (1)", "UPDATE keyless SET id = 2", "DELETE FROM keyless")
        async with world.capture(table_poll_s=0.1):
            await world.sql("ALTER TABLE keyless ADD PRIMARY KEY (id)", "ALTER TABLE keyless ADD v int")
            await world.flowing("keyless")
            await world.sql("INSERT INTO keyless VALUES (5, 5)")
            await world.caught_up()
            assert await world.folded("keyless") == await plain(world, "keyless")
            await world.sql("DROP TABLE quick")

            async def forgotten() -> bool:
                return "public.quick" not in await world.tables()

            await until(forgotten, "what is gone is forgotten")


async def test_f406_a_table_whose_identity_is_taken_away_gets_it_back(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD, "CREATE TABLE t (id int PRIMARY KEY, v int)", "INSERT INTO t VALUES (1, 1)")
        async with world.capture(table_poll_s=30):
            await world.caught_up()
            for identity in ("NOTHING", "DEFAULT"):
                await world.sql(f"ALTER TABLE t REPLICA IDENTITY {identity}")

                async def full() -> bool:
                    return await world.select("SELECT relreplident FROM pg_class WHERE relname = 't'") == [("f",)]

                await until(full, "the identity is whole again", 4.0)
                await world.sql("UPDATE t SET v = v + 1")
            await world.caught_up()
            assert await world.folded("t") == await plain(world, "t")
