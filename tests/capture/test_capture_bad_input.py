"""Errors that only the operator can repair: one sentence with the fix, and no half-made state left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import psycopg
import pytest

from support.capture.world import World
from support.postgres import EmbeddedPostgres
from support.waiting import until
from tidemill.base.errors import InvalidError, MissingError, UnavailableError
from tidemill.capture.config import CaptureConfig
from tidemill.capture.postgres.connection import PgConnection, describe_dsn
from tidemill.capture.postgres.errors import SlotLostError
from tidemill.capture.setup.inspection import inspect_database
from tidemill.capture.setup.privileges import check_database, diagnose_capture
from tidemill.capture.setup.server_checks import find_stream_problems
from tidemill.metastore.catalogue import CaptureRow, TopicRow

pytestmark = pytest.mark.postgres


async def refused(world: World, kind: type[InvalidError], words: str, **settings: object) -> None:
    """A session raises `kind` with `words`, and neither slot, publication, row nor topic exists afterwards."""
    with pytest.raises(kind) as error:
        await asyncio.wait_for(world.new_capture(**settings).run_sessions(), 20)
    assert words in str(error.value)
    assert error.value.fix
    assert await world.catalogue.list(CaptureRow) == []
    assert await world.catalogue.list(TopicRow) == []
    assert await world.select(f"SELECT FROM pg_replication_slots WHERE slot_name = 'tidemill_{world.name}'") == []
    assert await world.select("SELECT FROM pg_publication") == []


@pytest.mark.parametrize(
    ("dsn", "kind", "words"),
    [
        ("not a dsn", InvalidError, "cannot be read"),
        ("postgresql://postgres@127.0.0.1:1/x", UnavailableError, "does not answer"),
    ],
)
def test_a_wrong_dsn(dsn: str, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        asyncio.run(check_database(dsn))


def test_a_wrong_database_or_user(postgres_dsn: str) -> None:
    with pytest.raises(InvalidError, match="does not exist"):
        asyncio.run(check_database(postgres_dsn.rpartition("/")[0] + "/no_such_database"))
    with pytest.raises(InvalidError, match="does not exist"):
        asyncio.run(check_database(postgres_dsn.replace("postgres@", "nobody_here@")))


def test_messages_never_hold_the_password() -> None:
    with pytest.raises(UnavailableError) as error:
        asyncio.run(check_database("postgresql://me:hunter2@127.0.0.1:1/x"))
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("password", ["hun/ter2", "hun@ter2", "hun:t/er2", "hun?t@er2"])
def test_a_password_with_a_reserved_character_is_named_as_the_cause_and_not_shown(password: str) -> None:
    with pytest.raises(InvalidError, match=r"reserved character.*Percent-encode") as error:
        describe_dsn(f"postgresql://me:{password}@127.0.0.1:1/x")
    assert "er2" not in str(error.value)
    assert describe_dsn("postgresql://me:hun%40ter2@127.0.0.1:1/x") == "server=127.0.0.1:1 dbname=x user=me"
    assert "dbname=my@x" in describe_dsn("postgresql://me:hunter2@127.0.0.1:1/my%40x")


async def test_a_missing_table(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await refused(world, MissingError, "table=orders", tables=("orders",))


async def test_patterns_without_a_table(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await refused(world, MissingError, "table=public.*")


async def test_a_capture_whose_every_table_is_refused_says_why(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE keyless (id int)", "CREATE UNLOGGED TABLE quick (id int PRIMARY KEY)")
        await refused(world, InvalidError, "table=public.keyless", tables=("keyless",))
        await refused(world, InvalidError, "no WAL", tables=("quick",))


async def test_a_role_without_rights(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        role = f"poor_{world.name}"
        dsn = world.dsn
        await world.sql("CREATE TABLE a (id int PRIMARY KEY)", f"CREATE ROLE {role} LOGIN")
        try:
            world.dsn = dsn.replace("postgres@", f"{role}@")
            await refused(world, InvalidError, "lacks the REPLICATION attribute")
            await world.sql(f"ALTER ROLE {role} REPLICATION")
            await refused(world, InvalidError, "publication cannot be created")
            await world.sql(f'GRANT CREATE ON DATABASE "{world.name}" TO {role}')
            await refused(world, InvalidError, "cannot be published")
        finally:
            await world.sql(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def test_bad_names_are_refused_before_anything_is_asked() -> None:
    for name in ("", "Shop", "a-b", "x" * 42):
        with pytest.raises(InvalidError):
            CaptureConfig(name=name, dsn="")
    with pytest.raises(InvalidError):
        CaptureConfig(name="x", dsn="", tables=())


async def test_a_dropped_slot_is_an_error_not_a_gap(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE a (id int PRIMARY KEY)", "INSERT INTO a VALUES (1)")
        async with world.capture():
            await world.caught_up()
        await until(world.slot_dropped, "the slot is free and dropped")
        await world.sql("INSERT INTO a VALUES (2)")
        drop = f'DROP PUBLICATION "tidemill_{world.name}"'
        with pytest.raises(SlotLostError, match="does not exist") as caught:
            await asyncio.wait_for(world.new_capture().run_sessions(), 20)
        # The fix in the error is sufficient.
        assert drop in caught.value.fix
        await world.sql(drop)
        async with world.capture():
            await world.caught_up()
            assert [r.key for r in await world.records("a")] == [b'{"id":1}', b'{"id":2}']


async def test_another_cluster_under_the_same_name_is_refused(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE a (id int PRIMARY KEY)")
        async with world.capture():
            await world.caught_up()
        row = await world.row()
        await world.catalogue.put(
            type(row)(**{**{f: getattr(row, f) for f in row.__struct_fields__}, "system_id": "1"})
        )
        with pytest.raises(InvalidError, match="another database cluster"):
            await asyncio.wait_for(world.new_capture().run_sessions(), 20)


async def test_a_topic_of_kafka_producers_is_not_taken_over(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE a (id int PRIMARY KEY)")
        await world.catalogue.create_topic(f"{world.name}.public.a", 1)
        with pytest.raises(InvalidError, match="belongs to Kafka producers"):
            await asyncio.wait_for(world.new_capture().run_sessions(), 20)
        assert await world.catalogue.list(CaptureRow) == []
        assert await world.select("SELECT FROM pg_publication") == []


@pytest.fixture(scope="module")
def replica_level_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    data_dir: Path = tmp_path_factory.mktemp("replica") / "data"
    settings = {"wal_level": "replica", "fsync": "off", "shared_buffers": "16MB", "max_replication_slots": "0"}
    with EmbeddedPostgres(data_dir, settings=settings) as server:
        yield server


@pytest.fixture
def replica_level_dsn(replica_level_server: EmbeddedPostgres) -> Iterator[str]:
    """A separate database for each test."""
    with psycopg.connect(replica_level_server.dsn, autocommit=True) as connection:
        connection.execute("CREATE DATABASE inspected")
        yield replica_level_server.dsn_for("inspected")
        connection.execute("DROP DATABASE inspected WITH (FORCE)")


def test_wal_level_and_slots(replica_level_dsn: str) -> None:
    with pytest.raises(InvalidError) as error:
        asyncio.run(check_database(replica_level_dsn))
    assert "wal_level=replica" in str(error.value)
    assert "ALTER SYSTEM SET wal_level = 'logical'" in error.value.fix
    config = CaptureConfig(name="shop", dsn=replica_level_dsn)
    _, problems = asyncio.run(diagnose_capture(config))
    assert [str(problem).partition(":")[0] for problem in problems] == [
        "PostgreSQL does not log logical changes",
        "no replication slot is free",
        "the capture's patterns match no table",
    ]


def test_an_inspection_reports_every_problem_of_the_server_and_the_switches_of_managed_services(
    replica_level_dsn: str,
) -> None:
    def problems(user: str = "postgres") -> list[str]:
        dsn = replica_level_dsn.replace("postgres@", f"{user}@")
        found = asyncio.run(inspect_database("shop", dsn))
        return [error.fix for error in found.problems] + [s for s in found.statements if "ROLE" in s or "rds_" in s]

    with psycopg.connect(replica_level_dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        connection.execute("CREATE ROLE reader LOGIN")
        level, slots, role, statement = problems("reader")
        assert "ALTER SYSTEM SET wal_level" in level and "max_replication_slots" in slots
        assert role == f"Run {statement}." and statement == 'ALTER ROLE "reader" REPLICATION'
        connection.execute("CREATE ROLE rds_replication")
        connection.execute("ALTER DATABASE inspected SET rds.logical_replication = 'off'")
        level, _, role, statement = problems("reader")
        assert "parameter group" in level and statement == 'GRANT rds_replication TO "reader"'
        connection.execute(statement)
        assert len(problems("reader")) == 2
        connection.execute("ALTER DATABASE inspected RESET rds.logical_replication")
        connection.execute("ALTER DATABASE inspected SET cloudsql.logical_decoding = 'off'")
        fixes = problems()
        assert "cloudsql.logical_decoding" in fixes[0]


async def test_rc9_an_invalidated_slot_is_an_error_and_its_way_out_copies_all_anew(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The server removes WAL that the slot still needs (max_slot_wal_keep_size)."""
    data_dir: Path = tmp_path_factory.mktemp("small") / "data"
    settings = {
        "fsync": "off", "shared_buffers": "16MB", "max_slot_wal_keep_size": "1MB", "min_wal_size": "32MB",
        "max_wal_size": "32MB", "max_wal_senders": "3",
    }  # fmt: skip

    async def stream_problems(world: World) -> list[str]:
        wire = await PgConnection.connect(world.dsn, purpose="test")
        try:
            return [str(problem).partition(".")[0] for problem in await find_stream_problems(wire, world.config())]
        finally:
            await wire.aclose()

    async def use_wal_senders(world: World, count: int, using: AsyncExitStack) -> None:
        for _ in range(count):
            connecting = psycopg.AsyncConnection.connect(world.dsn, autocommit=True, replication="database")
            await using.enter_async_context(await connecting)

    async def scenario(world: World) -> None:
        await world.sql("CREATE TABLE a (id int PRIMARY KEY, v text)")
        assert await stream_problems(world) == []
        async with AsyncExitStack() as using:
            await use_wal_senders(world, 3, using)
            assert await stream_problems(world) == ["no WAL sender is free: max_wal_senders=3 used=3"]

        async def senders_are_free() -> bool:
            return await world.select("SELECT FROM pg_stat_replication") == []

        await until(senders_are_free, "the senders have ended")
        async with world.capture(), AsyncExitStack() as using:
            await world.caught_up()
            await use_wal_senders(world, 2, using)
            assert await stream_problems(world) == []  # the capture has the third sender
        for _ in range(4):
            await world.sql(
                "SELECT pg_logical_emit_message(false, 'x', repeat('y', 1000000))", "SELECT pg_switch_wal()"
            )
            await world.sql("CHECKPOINT")

        async def lost() -> bool:
            found = await world.select("SELECT wal_status FROM pg_replication_slots")
            return found == [("lost",)]

        await until(lost, "the slot is invalidated")
        await until(senders_are_free, "the senders have ended")
        (problem,) = await stream_problems(world)
        assert problem.startswith("PostgreSQL invalidated the replication slot") and "reason=wal_removed" in problem
        with pytest.raises(SlotLostError, match="invalidated") as caught:
            await asyncio.wait_for(world.new_capture().run_sessions(), 20)
        drop = f'DROP PUBLICATION "tidemill_{world.name}"'
        assert drop in caught.value.fix and "Raise max_slot_wal_keep_size" in caught.value.fix
        assert "reason=wal_removed" in str(caught.value)
        await world.sql("INSERT INTO a VALUES (1, 'missed')", drop)
        async with world.capture():
            await world.caught_up()
            assert await world.folded("a") == {'{"id":1}': {"id": 1, "v": "missed"}}

    with EmbeddedPostgres(data_dir, settings=settings) as server:
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            connection.execute("CREATE DATABASE small")
        async with World(server.dsn_for("small")) as world:
            await scenario(world)
