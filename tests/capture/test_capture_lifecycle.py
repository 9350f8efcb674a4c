"""Messages to the operator when a capture starts, lacks rights, and is dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from support.capture.identity import identity, left_in_database
from support.capture.rights import NAMED_TABLES, missing, reader_of, statements_in
from support.capture.world import World, plain
from support.waiting import until
from tidemill.base.config.config import load
from tidemill.base.errors import InvalidError, TidemillError
from tidemill.capture.session.teardown import drop_capture
from tidemill.capture.setup.privileges import check_capture, check_database
from tidemill.cli.cluster import capture_checks
from tidemill.metastore.catalogue import CaptureRow

pytestmark = pytest.mark.postgres


async def test_f495_drop_as_a_role_with_few_rights_takes_the_slot_and_hands_the_rest_to_an_administrator(
    postgres_dsn: str,
) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*NAMED_TABLES[:2], "CREATE TABLE c (id int PRIMARY KEY, v text)")
        await world.sql("ALTER TABLE c REPLICA IDENTITY NOTHING")
        async with reader_of(world):
            for statement in await missing(world):
                await world.sql(statement)
            async with world.capture():
                await world.flowing("a", "c")
            done = await drop_capture(world.config(), world.catalogue)
            assert done.slot and done.publication_left and not done.publication and not done.left
            assert await left_in_database(world) == [(f"tidemill_{world.name}",)]
            assert await world.catalogue.tables(world.name) == []
            assert await world.catalogue.get(CaptureRow, world.name) is None
            assert f'DROP PUBLICATION "tidemill_{world.name}"' in done.for_administrator


async def test_f495_what_doctor_asks_an_administrator_for_is_printed_kept_and_told_back_with_the_drop(
    postgres_dsn: str, tmp_path: Path
) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*NAMED_TABLES[:2], "CREATE TABLE c (id int PRIMARY KEY, v text)")
        await world.sql("ALTER TABLE c REPLICA IDENTITY NOTHING")
        kept: dict[str, object] = {}

        async def keep(asked: dict[str, dict[int, tuple[str, str]]]) -> None:
            kept.update(asked)

        with pytest.raises(InvalidError) as reported:
            await check_capture(world.config(manual=True), keep)
        assert 'ALTER TABLE "public"."c" REPLICA IDENTITY NOTHING' in reported.value.fix
        assert set(kept) == {"public.a", "public.c"}

        # A manual capture that meets such a table stores its former identity, too.
        own = f"tidemill_{world.name}"
        statements = statements_in(reported.value.fix)
        await world.sql(*[s for s in statements if '"c"' not in s])
        async with world.capture(manual=True, table_poll_s=0.1):
            row = await world.paused("c", "not prepared")
            assert list(row.identities_asked.values()) == [('"public"."c"', "NOTHING")] and not row.identities
            await world.sql(*[s for s in statements if '"c"' in s])
            await world.flowing("a", "c")
            row_of_a = await world.table("public.a")
            # it was complete when the capture first saw it
            assert row_of_a is not None and not row_of_a.identities_asked
        done = await drop_capture(world.config(manual=True), world.catalogue)
        back = [s for s in done.for_administrator if s.startswith("ALTER TABLE")]
        assert back == ['ALTER TABLE "public"."c" REPLICA IDENTITY NOTHING']
        assert await identity(world, "a") == await identity(world, "c") == "f"
        await world.sql(f'DROP PUBLICATION "{own}"', *back)
        assert await identity(world, "c") == "n"


def test_f495_doctor_writes_what_it_asks_for_into_the_catalogue(postgres_dsn: str, tmp_path: Path) -> None:
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE a (id int PRIMARY KEY, v text)")
    (tmp_path / "tidemill.toml").write_text(
        f'[node]\ndata = "{tmp_path}/data"\n[capture.shop]\ndsn = "{postgres_dsn}"\nmanual = true\n'
    )
    config = load(tmp_path / "tidemill.toml")
    (result,) = capture_checks.check_capture(config, "shop")
    assert not result["ok"]
    assert str(result["fix"]).endswith('restore the tables:\n  ALTER TABLE "public"."a" REPLICA IDENTITY DEFAULT;')
    from tidemill.cli.context import open_stores

    with open_stores(tmp_path / "tidemill.toml", create=True) as opened:
        (row,) = opened.portal.call(opened.catalogue.all_tables())
    assert row.state == "refused" and list(row.identities_asked.values()) == [('"public"."a"', "DEFAULT")]


async def test_f496_a_table_that_comes_later_is_told_with_all_its_statements_at_once(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*NAMED_TABLES[:2])
        async with reader_of(world):
            for statement in await missing(world):
                await world.sql(statement)
            async with world.capture(table_poll_s=0.1, tables=("public.*", "late.*")):
                await world.sql("CREATE SCHEMA late", "CREATE TABLE late.c (id int PRIMARY KEY, v text)")
                found: list[str] = []

                async def reported() -> bool:
                    row = await world.table("late.c")
                    if row is not None and row.state == "refused" and "ADD TABLE" in row.fix:
                        found.append(row.fix)
                    return bool(found)

                await until(reported, "it is refused")
                await world.sql(*found[0].partition("run: ")[2].rstrip(";.").split("; "))
                await world.sql("INSERT INTO late.c VALUES (1, 'x')")
                seen: set[str] = set()

                async def flows() -> bool:
                    row = await world.table("late.c")
                    if row is not None and row.state == "refused":
                        seen.add(row.fix)
                    return row is not None and row.is_streaming

                await until(flows, "it flows")
                assert not any("GRANT" in fix for fix in seen - set(found)), seen


@pytest.fixture
def roles(postgres_dsn: str) -> Iterator[psycopg.Connection]:
    names = ("cannot_login", "cannot_connect", "cannot_replicate")
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        for name in names:
            connection.execute(f"CREATE ROLE {name} {'NOLOGIN' if name == 'cannot_login' else 'LOGIN'}")
        yield connection
        for name in names:
            connection.execute(f"DROP OWNED BY {name}")
            connection.execute(f"DROP ROLE {name}")


def test_f497_a_refused_connection_names_the_right_that_is_missing(
    postgres_dsn: str, roles: psycopg.Connection
) -> None:
    database = postgres_dsn.rpartition("/")[2]
    roles.execute(f"REVOKE CONNECT ON DATABASE {database} FROM PUBLIC")

    def fix(role: str) -> str:
        with pytest.raises(TidemillError) as reported:
            asyncio.run(check_database(postgres_dsn.replace("postgres@", f"{role}@")))
        return reported.value.fix

    assert "LOGIN" in fix("cannot_login") and "Create" not in fix("cannot_login")
    assert "GRANT CONNECT" in fix("cannot_connect") and "Create" not in fix("cannot_connect")
    assert "Create the role" in fix("nobody_of_this_name")
    with psycopg.connect(postgres_dsn.rpartition("/")[0] + "/template1", autocommit=True) as other:
        other.execute(f"ALTER DATABASE {database} ALLOW_CONNECTIONS false")
        assert "ALLOW_CONNECTIONS" in fix("postgres")
        other.execute(f"ALTER DATABASE {database} ALLOW_CONNECTIONS true")


async def test_f498_the_set_up_of_many_tables_is_progress(postgres_dsn: str) -> None:
    tables = 30
    async with World(postgres_dsn) as world:
        await world.sql(*[f"CREATE TABLE t{n} (id int PRIMARY KEY, v int)" for n in range(tables)])
        async with await psycopg.AsyncConnection.connect(world.dsn) as writer:
            # The slot waits for this transaction, so the set-up pauses before any row is copied.
            await writer.execute("INSERT INTO t0 VALUES (1, 1)")
            async with world.capture(wait=False) as capture:

                def mark() -> int:
                    found = world.tracker.mark(capture.config.mark)
                    return found.progress if found is not None else 0

                await until(lambda: mark() >= tables - 1, "each table that is published counts")
                before = mark()
                await writer.commit()
                await until(lambda: capture.streaming, "the capture streams")
                assert capture._session is not None
                assert capture._session.progress.steps.count >= before + 3 * tables
                await world.flowing(*[f"t{n}" for n in range(tables)])
                assert await world.folded("t0") == await plain(world, "t0")
