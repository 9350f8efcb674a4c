"""Captures that use the existing REPLICA IDENTITY, and captures that alter nothing at all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from support.capture.identity import exact, identity
from support.capture.on_every_server import (
    AS_IS,
    WIDE,
    test_an_unchanged_toasted_value_is_named_and_left_out_and_each_identity_is_right_when_it_is_switched,
    unchanged,
)
from support.capture.rights import statements_in
from support.capture.world import World, header
from support.waiting import until
from tidemill.base.errors import InvalidError
from tidemill.capture.catalog import columns, relations
from tidemill.capture.session.teardown import drop_capture
from tidemill.capture.setup.privileges import check_capture

__all__ = [
    "test_an_unchanged_toasted_value_is_named_and_left_out_and_each_identity_is_right_when_it_is_switched",
]

pytestmark = pytest.mark.postgres


async def test_an_index_serves_where_it_has_the_whole_key_and_a_toasted_key_is_said(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(
            "CREATE TABLE t (id text PRIMARY KEY, tenant int NOT NULL, body text)",
            "ALTER TABLE t ALTER id SET STORAGE EXTERNAL, ALTER body SET STORAGE EXTERNAL",
            "CREATE UNIQUE INDEX t_by_tenant ON t (tenant, id)",
            "ALTER TABLE t REPLICA IDENTITY USING INDEX t_by_tenant",
            "INSERT INTO t SELECT g::text || repeat('k', 2200), g, repeat('b' || g, 3000) FROM generate_series(1, 5) g",
        )
        async with world.capture(**AS_IS):
            row = await world.table("public.t")
            assert row is not None and row.identity == "USING INDEX t_by_tenant"
            await world.sql(
                "UPDATE t SET tenant = 100 WHERE tenant = 1",  # the key stays, the index's column does not
                "UPDATE t SET id = 'short' WHERE tenant = 2",
                "UPDATE t SET tenant = tenant WHERE tenant = 3",
                "DELETE FROM t WHERE tenant = 4",
            )
            await exact(world, "t")
            assert [unchanged(r) for r in (await world.records("t"))[5:]] == [["body"], [], ["body"], ["body"], []]


REFUSED = {
    "nothing": ("CREATE TABLE {} (id int PRIMARY KEY, v int)", "ALTER TABLE {} REPLICA IDENTITY NOTHING"),
    "by_code": (
        "CREATE TABLE {} (id int PRIMARY KEY, code int NOT NULL UNIQUE)",
        "ALTER TABLE {} REPLICA IDENTITY USING INDEX by_code_code_key",
    ),
    "deferred": ("CREATE TABLE {} (id int PRIMARY KEY DEFERRABLE, v int)",),
}


INCLUDING = "CREATE TABLE t (id int, v int, tenant int NOT NULL DEFAULT 0, PRIMARY KEY (id) INCLUDE (v))"


async def test_f471_an_identity_that_does_not_say_the_key_is_refused_with_the_statement_that_does(
    postgres_dsn: str,
) -> None:
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE fine (id int PRIMARY KEY, v int)")
        for name, statements in REFUSED.items():
            await world.sql(*[statement.format(name) for statement in statements])
        async with world.capture(tables=("fine", *REFUSED), **AS_IS):
            for name in REFUSED:
                row = await world.paused(name, "does not include the primary key")
                assert row.state == "refused"
                # No statement of the application fails while the table is refused, and nothing was altered.
                await world.sql(f"INSERT INTO {name} VALUES (1, 1)", f"UPDATE {name} SET id = 2", f"DELETE FROM {name}")
                await world.sql(row.fix.removeprefix("Run "))
            await world.flowing("fine", *REFUSED)
            for name in REFUSED:
                await world.sql(f"INSERT INTO {name} VALUES (1, 1)", f"UPDATE {name} SET id = 2")
                await exact(world, name)


@pytest.mark.parametrize("identity", ["DEFAULT", "USING INDEX t_by_tenant"])
async def test_the_included_columns_of_a_primary_key_are_no_key(postgres_dsn: str, identity: str) -> None:
    """Regression: an UPDATE of such a column wrote a tombstone and a row under another key, and `as-is` refused the
    table."""
    async with World(postgres_dsn) as world:
        await world.sql(
            INCLUDING,
            "CREATE UNIQUE INDEX t_by_tenant ON t (tenant, id)",
            f"ALTER TABLE t REPLICA IDENTITY {identity}",
            "INSERT INTO t VALUES (1, NULL), (2, 1)",
        )
        async with world.capture(**AS_IS):
            await world.flowing("t")
            await world.sql("INSERT INTO t VALUES (3, NULL)", "UPDATE t SET v = 2 WHERE id < 3")
            await world.sql("UPDATE t SET id = 4 WHERE id = 3", "DELETE FROM t WHERE id = 2")
            await exact(world, "t")
            ops = [(r.key, header(r, "tm.op")) for r in (await world.records("t"))[3:]]
            one, two, three, four = (b'{"id":%d}' % n for n in range(1, 5))
            assert ops[:2] == [(one, "update"), (two, "update")]
            assert [key for key, _ in ops[2:]] == [three, four, two]


async def test_a_key_that_gets_an_included_column_as_its_own_is_another_key(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(INCLUDING)
        async with world.capture(table_poll_s=0.1):
            await world.flowing("t")
            await world.sql("ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (id, v)")
            await world.paused("t", "primary key (id) is now (id, v)")


async def test_a_table_that_was_captured_with_included_columns_in_its_key_waits_for_an_operator_and_continues(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(INCLUDING, "INSERT INTO t VALUES (1, 1)")
        former = " AND k.place <= i.indnkeyatts"
        with monkeypatch.context() as patched:
            patched.setattr(relations, "_COLUMNS_SQL", relations._COLUMNS_SQL.replace(former, ""))
            patched.setattr(columns, "_ATTRIBUTES_SQL", columns._ATTRIBUTES_SQL.replace(former, ""))
            async with world.capture():
                await world.flowing("t")
            assert list(await world.folded("t")) == ['{"id":1,"v":1}']
        async with world.capture():
            row = await world.paused("t", "primary key (id, v) is now (id)")
            assert "tidemill capture accept" in row.fix
            await world.sql("UPDATE t SET v = 2")
            await world.catalogue.change_table(world.name, row.table, asked)
            await world.flowing("t")
            await world.sql("UPDATE t SET v = 3")
            await exact(world, "t")
            assert list(await world.folded("t")) == ['{"id":1}']


@pytest.mark.parametrize("identity", ["NOTHING", "USING INDEX t_code_key"])
async def test_f471_a_captured_table_that_gets_such_an_identity_is_parked_before_its_first_row(
    postgres_dsn: str, identity: str
) -> None:
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE t (id int PRIMARY KEY, code int NOT NULL UNIQUE)", "INSERT INTO t VALUES (1, 1)")
        async with world.capture(**AS_IS):
            await world.sql("UPDATE t SET id = 2", f"ALTER TABLE t REPLICA IDENTITY {identity}")
            if identity != "NOTHING":
                await world.sql(
                    "UPDATE t SET id = 3"
                    # it does not carry the old key: no tombstone of 2 may be missing
                )
            row = await world.paused("t", "primary key" if identity != "NOTHING" else "")

            async def moved() -> bool:
                return set(await world.folded("t")) == {'{"id":2}'}

            await until(moved, "the topic holds the update before the identity changed, and nothing after it")

            async def unharmed() -> bool:
                return not await world.select("SELECT FROM pg_publication_tables WHERE tablename = 't'")

            await until(unharmed, "it is not published any more")
            await world.sql("UPDATE t SET id = 4", "ALTER TABLE t REPLICA IDENTITY DEFAULT")
            await world.catalogue.change_table(world.name, row.table, asked)
            await world.flowing("t")
            await world.sql("UPDATE t SET id = 5")
            await exact(world, "t")


def asked(row: Any) -> Any:
    return replace(row, recopy=True)


async def test_the_identity_of_a_partition_is_what_counts(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(
            "CREATE TABLE t (id int PRIMARY KEY, v int, body text) PARTITION BY RANGE (id)",
            "ALTER TABLE t ALTER body SET STORAGE EXTERNAL",
            "CREATE TABLE low PARTITION OF t FOR VALUES FROM (0) TO (100)",
            "CREATE TABLE high PARTITION OF t FOR VALUES FROM (100) TO (1000)",
            "ALTER TABLE t REPLICA IDENTITY FULL",
            "INSERT INTO t SELECT g, g, repeat('b' || g, 2000) FROM generate_series(1, 200) g",
            "CREATE UNIQUE INDEX high_v ON high (v)",
        )
        async with world.capture(**AS_IS):
            # The names follow the root's identity, the values the partition's: such an old row only looks complete.
            await world.sql(
                "UPDATE t SET id = 0 WHERE id = 1", "UPDATE t SET v = 0 WHERE id = 2", "DELETE FROM t WHERE id = 3"
            )
            await exact(world, "t")
            assert [unchanged(r) for r in (await world.records("t"))[200:]] == [[], ["body"], ["body"], []]
            await world.sql(
                "ALTER TABLE high ALTER v SET NOT NULL",
                "ALTER TABLE high REPLICA IDENTITY USING INDEX high_v",
                "UPDATE t SET id = 900 WHERE id = 150",
            )
            await world.paused("t", "the replica identity of public.high")


async def test_f472_a_manual_capture_alters_nothing_and_says_what_is_missing_until_it_is_there(
    postgres_dsn: str,
) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*WIDE, "CREATE TABLE later (id int PRIMARY KEY, v int)")
        manual: dict[str, Any] = {"manual": True, "table_poll_s": 0.1}
        with pytest.raises(InvalidError, match="must not do") as reported:
            await check_capture(world.config(**manual))
        statements = statements_in(reported.value.fix)
        capture = world.new_capture(**manual)
        running = asyncio.ensure_future(capture.run())
        try:

            async def paused() -> bool:
                failure = world.tracker.failure(capture.config.mark)
                return failure is not None and "CREATE PUBLICATION" in failure.error

            await until(paused, "it says that there is no publication")
        finally:
            await capture.aclose()
            await asyncio.gather(running, return_exceptions=True)
        assert await identity(world, "wide") == "d" and not await world.select("SELECT FROM pg_publication")
        await world.sql(*[s for s in statements if "later" not in s])
        async with world.capture(**manual):
            row = await world.paused("later", "not prepared")
            assert row.state == "refused" and [s for s in statements if "later" in s] == row.fix[4:-1].split("; ")
            await world.sql(*row.fix[4:-1].split("; "))
            await world.flowing("wide", "later")
            await world.sql("UPDATE wide SET v = 5 WHERE id = 5", "INSERT INTO later VALUES (1, 1)")
            await exact(world, "wide")
            await exact(world, "later")
            # A table that loses its identity is reported and not changed.
            await world.sql("ALTER TABLE later REPLICA IDENTITY NOTHING")
            row = await world.paused("later", "makes its UPDATE and DELETE fail")
            assert "DROP TABLE ONLY" in row.fix and await identity(world, "later") == "n"
        done = await drop_capture(world.config(), world.catalogue)
        assert done.publication_left and done.slot and done.identities == {} and not done.left
        assert await identity(world, "wide") == "f" and len(await world.select("SELECT FROM pg_publication")) == 1
