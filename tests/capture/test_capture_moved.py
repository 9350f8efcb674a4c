"""A captured database, its slot or its publication moves back. Topics equal SELECT afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from support.capture.copies import SMALL, as_folded, copy_of
from support.capture.proxy import Proxy
from support.capture.standbys import copied_files, cut_off, primary, promote, signalled, standby
from support.capture.world import World
from support.postgres import EmbeddedPostgres
from support.waiting import until
from tidemill.base.errors import CorruptError, InvalidError
from tidemill.capture.config import CaptureConfig
from tidemill.capture.postgres.timeline import find_fork, parse_history
from tidemill.capture.session import capture as capture_module
from tidemill.capture.session.capture import Capture
from tidemill.capture.setup.privileges import check_capture

TABLES = ("a", "b")


# histories ------------------------------------------------------------------------------------------
def test_two_histories_are_one_up_to_where_the_first_of_them_left_a_timeline() -> None:
    first, promoted, again = ((1, 0),), ((1, 500), (2, 0)), ((1, 500), (2, 900), (3, 0))
    assert find_fork(first, first) is None and find_fork(promoted, promoted) is None
    assert find_fork(first, promoted) == 500 and find_fork(promoted, first) == 500
    assert find_fork(promoted, again) == 900 and find_fork(first, again) == 500
    # Two servers with separate promotions, even to the same number, and two without a common history.
    assert find_fork(((1, 700), (2, 0)), promoted) == 500
    assert find_fork(again, ((1, 500), (3, 0))) == 500
    assert find_fork(((2, 0),), ((3, 0),)) == 0


def test_a_history_file_is_read_as_postgresql_writes_it() -> None:
    text = "1\t0/3000000\tno recovery target specified\n\n# a comment\n2\t1/A0\tbefore 2026-01-01 00:00:00+00\n"
    assert parse_history(text) == ((1, 0x3000000), (2, 0x1_0000_00A0))
    with pytest.raises(CorruptError, match="cannot be read"):
        parse_history("1\tnowhere\n")


# worlds ---------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    """A primary whose walsenders notice quickly that their client is gone."""
    with primary(tmp_path_factory.mktemp("primary"), wal_sender_timeout="5s") as made:
        yield made


@pytest.fixture
def database(server: EmbeddedPostgres, request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"moved_{abs(hash(request.node.nodeid)) % 10**9}"
    with psycopg.connect(server.dsn, autocommit=True) as control:
        control.execute(f"CREATE DATABASE {name}")
        yield name
        control.execute(f"DROP DATABASE {name} WITH (FORCE)") if not _slots(control, name) else None


def _slots(control: psycopg.Connection[Any], database: str) -> list[Any]:
    mine = f"FROM pg_replication_slots WHERE database = '{database}'"
    control.execute(f"SELECT pg_terminate_backend(active_pid) {mine} AND active_pid IS NOT NULL")
    control.execute(f"SELECT pg_drop_replication_slot(slot_name) {mine} AND active_pid IS NULL")
    return control.execute(f"SELECT {mine}").fetchall()


class Moving(World):
    """A world behind a proxy that later leads to another server."""

    def __init__(self, proxy: Proxy, name: str) -> None:
        super().__init__(proxy.dsn, name=name)
        self._proxy = proxy

    async def lead_to(self, server: EmbeddedPostgres) -> None:
        self._proxy.lead_to(server.dsn_for(self.name))
        await self.connection.close()
        self.connection = await psycopg.AsyncConnection.connect(self.dsn, autocommit=True)

    async def slot_dropped(self) -> bool:
        try:
            return await super().slot_dropped()
        except psycopg.OperationalError:
            return True  # its server is stopped, and the fixture of the first one drops the slots there

    async def same_as_select(self, *tables: str) -> None:
        """Check that each topic, at a binding of everything committed so far, equals the table."""
        binding = await self.caught_up()
        for table in tables:
            topic = await self.topic_id(table)
            assert topic in binding.offsets, f"{table} is bound"
            rows = {f'{{"id":{i}}}': {"id": i, "v": v} for i, v in await self.select(f"SELECT id, v FROM {table}")}
            assert await self.folded(table, binding.offsets[topic][0]) == rows


@asynccontextmanager
async def moving(server: EmbeddedPostgres, database: str) -> AsyncIterator[Moving]:
    async with Proxy(server.dsn_for(database)) as proxy, Moving(proxy, database) as world:
        for table in TABLES:
            await world.sql(
                f"CREATE TABLE {table} (id int PRIMARY KEY, v int)", f"INSERT INTO {table} VALUES (1, 1), (2, 2)"
            )
        yield world


@contextmanager
def follower(server: EmbeddedPostgres, directory: Path, **settings: str) -> Iterator[EmbeddedPostgres]:
    name = f"standby_{abs(hash(str(directory))) % 10**9}"
    with standby(server, directory, name, **settings) as made:
        yield made


async def in_step(world: Moving, made: EmbeddedPostgres) -> None:
    """Wait until the standby has replayed everything captured so far, and has the capture's slot."""
    lsn = await world.wal_end()
    slot = f"SELECT count(*) FROM pg_replication_slots WHERE slot_name = 'tidemill_{world.name}' AND NOT temporary"
    async with await psycopg.AsyncConnection.connect(made.dsn, autocommit=True) as there:

        async def holds() -> bool:
            await there.execute("SELECT 1")
            replayed = await (await there.execute("SELECT pg_last_wal_replay_lsn() - '0/0'")).fetchone()
            synced = await (await there.execute(slot)).fetchone()
            # its synchronisation needs WAL that advances, and a snapshot of the running transactions
            if synced == (0,):
                await world.sql("SELECT pg_log_standby_snapshot()")
            return replayed is not None and replayed[0] >= lsn and synced == (1,)

        await until(holds, "the standby is in step", 90)


async def recopied(world: World, words: str) -> None:
    async def reported() -> bool:
        return words in (await world.row()).recopied

    await until(reported, f"it is told: {words}")


def noticed(capture: Capture) -> str:
    return dict(capture._tracker.failures("capture:")).get(f"{capture.config.mark}/history", "")


SYNCED = {"sync_replication_slots": "on"}


# the database ---------------------------------------------------------------------------------------
@pytest.mark.postgres
async def test_f499_a_failover_to_a_standby_that_is_behind_copies_the_tables_it_lost_rows_of(
    server: EmbeddedPostgres, database: str, tmp_path: Path
) -> None:
    async with moving(server, database) as world:
        with follower(server, tmp_path, **SYNCED) as made:
            async with world.capture(failover=True) as capture:
                await world.same_as_select(*TABLES)
                await in_step(world, made)
                cut_off(made)
                before = {table: await world.topic_id(table) for table in TABLES}
                for number in range(20):
                    await world.sql(f"INSERT INTO a VALUES ({100 + number}, {number})")
                lost = await world.caught_up()
                promote(made)
                await world.lead_to(made)
                for number in range(30):
                    await world.sql(f"INSERT INTO a VALUES ({200 + number}, {number})")
                    await world.sql(f"INSERT INTO b VALUES ({200 + number}, {number})")
                await recopied(world, "went back to an earlier state")
                await until(lambda: "went back to an earlier state" in noticed(capture), "it is a notice")
                await world.flowing(*TABLES)
                await world.same_as_select(*TABLES)
                assert len(await world.folded("a")) == 32
                assert await world.topic_id("a") != before["a"]
                assert await world.topic_id("b") == before["b"], "nothing of it was lost"
                latest = await world.remap().latest()
                assert latest is not None and latest.era == lost.era + 1 == 1
                assert "fork=" in str(capture.facts()["recopied"])
                assert await world.select("SELECT 1 WHERE pg_is_in_recovery()") == []
            # Nothing is found after another restart.
            async with world.capture(failover=True):
                await world.sql("UPDATE a SET v = v + 1", "DELETE FROM b WHERE id = 1")
                await world.same_as_select(*TABLES)
                assert (await world.row()).era == 1


@pytest.mark.postgres
async def test_a_failover_that_loses_nothing_copies_nothing_and_is_a_notice(
    server: EmbeddedPostgres, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with moving(server, database) as world:
        with follower(server, tmp_path, **SYNCED) as made:
            async with world.capture(failover=True) as capture:
                await world.sql("INSERT INTO a VALUES (3, 3)")
                await world.same_as_select(*TABLES)
                before = {table: await world.topic_id(table) for table in TABLES}
                await in_step(world, made)
                promote(made)
                await world.lead_to(made)
                await world.sql("INSERT INTO a VALUES (4, 4)", "UPDATE b SET v = 7")
                await world.same_as_select(*TABLES)
                said = "failed over to another timeline, nothing that was captured is lost"
                await until(lambda: said in noticed(capture), "it is a notice")
                monkeypatch.setattr(capture_module, "HISTORY_NOTICE_MS", 0)
                await until(lambda: not noticed(capture), "the notice ends")
                assert {table: await world.topic_id(table) for table in TABLES} == before
                row = await world.row()
                assert (row.era, row.recopied, len(row.history)) == (1, "", 2)


@pytest.mark.postgres
async def test_a_failover_to_a_standby_without_the_slot_copies_all_tables(
    server: EmbeddedPostgres, database: str, tmp_path: Path
) -> None:
    async with moving(server, database) as world:
        with follower(server, tmp_path) as made:
            async with world.capture():
                await world.same_as_select(*TABLES)
                cut_off(made)
                await world.sql("INSERT INTO a VALUES (100, 100)", "DELETE FROM b")
                await world.caught_up()
                promote(made)
                await world.lead_to(made)
                await world.sql("INSERT INTO a VALUES (101, 101)")
                await recopied(world, "its slot is gone")
                await world.flowing(*TABLES)
                await world.same_as_select(*TABLES)


@pytest.mark.postgres
@pytest.mark.parametrize("recovered", [True, False], ids=["to a point in time", "as its files were"])
async def test_f482_a_database_that_is_restored_from_a_backup_is_copied_again(
    server: EmbeddedPostgres, database: str, tmp_path: Path, recovered: bool
) -> None:
    """Recovery `to a point in time` begins a new timeline; files that are put back unchanged continue the old one."""
    recovery = {"restore_command": "/bin/false", "recovery_target": "immediate", "recovery_target_action": "promote"}
    async with moving(server, database) as world:
        async with world.capture():
            await world.same_as_select(*TABLES)
            backup = copied_files(server, tmp_path, "backup", **(recovery if recovered else {}))
            for number in range(20):
                await world.sql(f"INSERT INTO a VALUES ({100 + number}, {number})", f"UPDATE b SET v = {number}")
            await world.caught_up()
        with signalled(backup, "recovery") if recovered else backup:
            await world.lead_to(backup)
            async with world.capture():  # possibly while it is still a standby
                await world.flowing(*TABLES)
                await world.same_as_select(*TABLES)
                assert len(await world.folded("a")) == 2
                said = "its slot is gone" if recovered else "an earlier copy of its files"
                assert said in (await world.row()).recopied
                await world.sql("INSERT INTO a VALUES (300, 300)")
                await world.same_as_select(*TABLES)


# the slot -------------------------------------------------------------------------------------------
def select_is(world: World, table: str) -> Callable[[], Awaitable[bool]]:
    async def holds() -> bool:
        rows = {f'{{"id":{i}}}': {"id": i, "v": v} for i, v in await world.select(f"SELECT id, v FROM {table}")}
        return await world.folded(table) == rows

    return holds


ONE = ("CREATE TABLE t (id int PRIMARY KEY, v int)", "INSERT INTO t VALUES (1, 1)")


@pytest.mark.postgres
@pytest.mark.parametrize("how", ["made again", "advanced"])
async def test_f483_a_slot_that_somebody_moved_while_nothing_captured_has_the_tables_copied_again(
    postgres_dsn: str, how: str
) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*ONE)
        async with world.capture():
            await world.caught_up()
        slot = f"tidemill_{world.name}"
        await world.sql("INSERT INTO t VALUES (2, 2)", "UPDATE t SET v = 5 WHERE id = 1")
        if how == "advanced":
            await world.sql(f"SELECT pg_replication_slot_advance('{slot}', pg_current_wal_lsn())")
        else:
            await until(world.slot_dropped, "the slot is dropped")
            await world.sql(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
        await world.sql("INSERT INTO t VALUES (3, 3)")
        async with world.capture():
            await world.caught_up()
            assert await select_is(world, "t")()
            assert "re-created or advanced" in (await world.row()).recopied


@pytest.mark.postgres
async def test_idle_wal_is_confirmed_only_once_it_is_bound_so_that_a_slot_beyond_was_moved(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*ONE, "CREATE TABLE other (id int)")
        async with world.capture(tables=("t",), idle_binding_ms=300) as capture:
            binding = await world.caught_up()
            for number in range(10):
                await world.sql(f"INSERT INTO other SELECT g FROM generate_series(1, 50) g -- {number}")
                confirmed = await world.confirmed()
                latest = await world.remap().latest()
                assert latest is not None and confirmed - 1 <= latest.lsn
            end = await world.wal_end()

            async def confirmed_all() -> bool:
                return await world.confirmed() >= end > binding.lsn

            await until(confirmed_all, "idle WAL is confirmed in its turn")
            assert capture.streaming
        # Killed at a random moment: nothing has moved, so nothing is copied.
        topic = await world.topic_id("t")
        async with world.capture(tables=("t",)):
            await world.caught_up()
            assert await world.topic_id("t") == topic


@pytest.mark.postgres
async def test_a_copy_on_a_slot_that_the_capture_made_anew_goes_on_after_its_session_broke(postgres_dsn: str) -> None:
    """The newest binding is still that of the earlier tables while the copy runs."""
    async with World(postgres_dsn) as world:
        await world.sql(
            "CREATE TABLE a (id int PRIMARY KEY, v int, w text)",
            "INSERT INTO a SELECT g, g, repeat('w', 100) FROM generate_series(1, 3000) g",
        )
        async with world.capture(**SMALL):
            await world.caught_up()
            before = await world.topic_id("a")
        latest = await world.remap().latest()
        await world.sql(f"DROP PUBLICATION tidemill_{world.name}", "UPDATE a SET v = -v WHERE id % 100 = 1")
        async with world.capture(wait=False, copy_rows_per_s=2000, **SMALL):
            await until(lambda: copied_partly(world), "chunks are told to be done")
        begun, topic = await copy_of(world), await world.topic_id("a")
        assert begun is not None and begun.done and topic != before
        assert latest is not None and await world.confirmed() - 1 > latest.lsn, "the slot is a new one"
        async with world.capture(**SMALL):
            await world.flowing("a")
            await world.sql("INSERT INTO a VALUES (9999, 1, 'x')")
            await world.caught_up()
        row = await world.table("public.a")
        assert await world.topic_id("a") == topic, "what was copied is kept"
        assert row is not None and row.snapshot is not None and row.snapshot.lsn == begun.lsn
        assert "the publication is missing" in (await world.row()).recopied
        assert await world.folded("a") == await as_folded(world)


async def copied_partly(world: World) -> bool:
    return await copy_of(world) is not None


@pytest.mark.postgres
async def test_a_table_that_is_parked_for_the_operator_stays_so_while_wal_is_confirmed_that_nobody_binds(
    postgres_dsn: str,
) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*ONE, "CREATE TABLE other (id int)")
        settings: dict[str, Any] = {"tables": ("t",), "table_poll_s": 0.2}
        async with world.capture(**settings) as capture:
            await world.caught_up()
            topic = await world.topic_id("t")
            await world.sql("ALTER TABLE t DROP COLUMN v", "INSERT INTO t VALUES (2)")
            paused = await world.paused("t", "its description changed")
            await until(lambda: passed(world, paused.paused_lsn), "the WAL up to there is confirmed")
        begins_unbound = False
        for _ in range(
            10
        ):  # until a session begins at WAL that the one before confirmed, before an idle binding was due
            latest = await world.remap().latest()
            assert latest is not None
            begins_unbound = await world.confirmed() - 1 > latest.lsn
            async with world.capture(**settings) as capture:
                await world.sql("INSERT INTO other VALUES (1)")
                end = await world.wal_end()
                await until(lambda end=end: passed(world, end), "WAL is confirmed")  # type: ignore[misc]
                assert capture.streaming
            if begins_unbound:
                break
        assert begins_unbound
        assert await world.table("public.t") == paused, "nobody asked to copy it"
        assert await world.topic_id("t") == topic and (await world.row()).recopied == ""


async def passed(world: World, lsn: int) -> bool:
    return await world.confirmed() >= lsn


# the publication ------------------------------------------------------------------------------------
ALTERED = {
    "publish": (
        "ALTER PUBLICATION {p} SET (publish = 'insert')",
        "UPDATE t SET v = 77 WHERE id = 1",
        "ALTER PUBLICATION {p} SET (publish = 'insert, update, delete, truncate')",
    ),
    "a table taken out and put in": (
        "BEGIN",
        "ALTER PUBLICATION {p} DROP TABLE t",
        "UPDATE t SET v = 77 WHERE id = 1",
        "ALTER PUBLICATION {p} ADD TABLE ONLY t",
        "COMMIT",
    ),
    "a row filter": (
        "ALTER PUBLICATION {p} SET TABLE ONLY t WHERE (id > 1), ONLY u",
        "UPDATE t SET v = 77 WHERE id = 1",
        "ALTER PUBLICATION {p} SET TABLE ONLY t, ONLY u",
    ),
}


@pytest.mark.postgres
@pytest.mark.parametrize("captures", [True, False], ids=["while it streams", "while nothing captures"])
@pytest.mark.parametrize("how", ALTERED)
async def test_f484_a_publication_that_is_altered_and_altered_back_has_the_table_copied_again(
    postgres_dsn: str, how: str, captures: bool
) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*ONE, "CREATE TABLE u (id int PRIMARY KEY, v int)")

        async def alter() -> None:
            """Alter the publication, in one transaction while a capture polls: otherwise it may see an intermediate
            state.
            """
            statements = ALTERED[how] if not captures or "BEGIN" in ALTERED[how] else ("BEGIN", *ALTERED[how], "COMMIT")
            async with await psycopg.AsyncConnection.connect(postgres_dsn, autocommit=True) as other:
                for statement in statements:
                    await other.execute(statement.format(p=f"tidemill_{world.name}"))

        async def copied_again() -> None:
            await until(select_is(world, "t"), "the topic is the table")
            assert "publication of the table was altered" in (await world.row()).recopied
            await world.sql("INSERT INTO t VALUES (9, 9)")
            await world.caught_up()
            await until(select_is(world, "t"), "the topic is the table")

        async with world.capture(table_poll_s=0.3):
            await world.caught_up()
            u = await world.topic_id("u")
            if captures:
                await alter()
                await copied_again()
        if not captures:
            await alter()
            async with world.capture(table_poll_s=0.3):
                await copied_again()
                if how == "a table taken out and put in":
                    assert await world.topic_id("u") == u, "nobody altered what is published of it"


# checks before the start ---------------------------------------------------------------------------
@pytest.mark.postgres
async def test_doctor_names_a_standby_that_may_be_behind_what_is_captured_when_it_is_promoted(
    server: EmbeddedPostgres, database: str
) -> None:
    async with moving(server, database) as world:
        slot = f"physical_{database}"
        others = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
        await world.sql(f"{others} WHERE slot_type = 'physical' AND active_pid IS NULL")
        config = world.config(failover=True)
        assert "2 tables" in await check_capture(config)
        await world.sql(f"SELECT pg_create_physical_replication_slot('{slot}')")
        try:
            with pytest.raises(InvalidError, match="may be behind the capture") as caught:
                await check_capture(config)
            assert f"synchronized_standby_slots = '{slot}'" in caught.value.fix
            await check_capture(world.config())
            await world.sql(f"ALTER SYSTEM SET synchronized_standby_slots = '{slot}'", "SELECT pg_reload_conf()")
            await until(lambda: passes(config), "it is well")
            await world.sql(f"SELECT pg_drop_replication_slot('{slot}')")
            with pytest.raises(InvalidError, match=f"missing={slot}"):
                await check_capture(config)
        finally:
            await world.sql("ALTER SYSTEM RESET synchronized_standby_slots", "SELECT pg_reload_conf()")


async def passes(config: CaptureConfig) -> bool:
    try:
        await check_capture(config)
    except InvalidError:
        return False
    return True
