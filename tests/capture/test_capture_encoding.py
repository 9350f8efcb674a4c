"""A database with the encoding SQL_ASCII holds arbitrary bytes, and an application may write a logical message of any
size. Neither stops more than one table.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import psycopg
import pytest
from msgspec.structs import replace

from support.capture.world import GOOD, World, good_flows
from support.postgres import EmbeddedPostgres
from support.waiting import until
from tidemill.capture.changes import Fragment
from tidemill.capture.decode import undecodable
from tidemill.capture.decode.transaction_builder import TransactionBuilder
from tidemill.capture.decode.undecodable import feed_frame
from tidemill.capture.postgres import replication_stream
from tidemill.capture.postgres.replication_stream import FramedMessage, parse_frame
from tidemill.capture.postgres.standby_status import PAYLOAD_START

DATABASE = "any_bytes"


@pytest.fixture
def unchecked_dsn(postgres_server: EmbeddedPostgres) -> Iterator[str]:
    with psycopg.connect(postgres_server.dsn, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {DATABASE} ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
        yield postgres_server.dsn_for(DATABASE)
        connection.execute(f"DROP DATABASE {DATABASE} WITH (FORCE)")


async def raw(world: World, *statements: bytes) -> None:
    async with await psycopg.AsyncConnection.connect(world.dsn, autocommit=True) as connection:
        for statement in statements:
            await connection.execute(statement)


def plain(*names: str) -> list[str]:
    return [f"CREATE TABLE {name} (id int PRIMARY KEY, v text)" for name in names]


@pytest.mark.postgres
async def test_f487_bytes_that_are_not_utf8_cost_the_table_that_has_them_and_no_other(unchecked_dsn: str) -> None:
    async with World(unchecked_dsn) as world:
        await world.sql(
            *GOOD, *plain("copied", "indexed", "written", "grown", "defaulted", "moved", "typed", "renamed")
        )
        await world.sql("CREATE TABLE words (id int PRIMARY KEY, v text)", "INSERT INTO words VALUES (1, 'größe')")
        await raw(
            world,
            b"INSERT INTO copied VALUES (1, 'caf\xe9')",
            b'CREATE TABLE "caf\xe9" (id int PRIMARY KEY)',
            b'CREATE TABLE columns (id int PRIMARY KEY, "caf\xe9" int)',
            b'CREATE SCHEMA "caf\xe9"',
            b'CREATE TABLE "caf\xe9".x (id int PRIMARY KEY)',
            b'CREATE UNIQUE INDEX "caf\xe9s" ON indexed (id)',
            b'ALTER TABLE indexed REPLICA IDENTITY USING INDEX "caf\xe9s"',
            b"CREATE TYPE \"mood\xe9\" AS ENUM ('a')",
            b'CREATE TABLE moods (id int PRIMARY KEY, v "mood\xe9")',
            b"CREATE TABLE parted (id int PRIMARY KEY) PARTITION BY RANGE (id)",
            b'CREATE TABLE "part\xe9" PARTITION OF parted FOR VALUES FROM (0) TO (9)',
        )
        async with world.capture(tables=("*", "*.*"), table_poll_s=0.1):
            await good_flows(world)
            rows = await world.tables()
            odd = ("public.caf\\xe9", "public.columns", "caf\\xe9.x", "public.indexed", "public.moods", "public.parted")
            for name in odd:
                assert rows[name].state == "left" and "a name is not UTF-8" in rows[name].reason, name
            assert "a value is not UTF-8: bytes=e9" in (await world.paused("copied")).reason
            assert (await world.folded("words"))['{"id":1}']["v"] == "größe"

            publication = f"tidemill_{world.name}".encode()
            await raw(
                world,
                b"INSERT INTO written VALUES (1, 'caf\xe9')",
                b'ALTER TABLE grown ADD "caf\xe9" int', b"INSERT INTO grown VALUES (1)",
                b"ALTER TABLE defaulted ADD w text DEFAULT 'caf\xe9'", b"INSERT INTO defaulted VALUES (1)",
                b'ALTER TABLE moved RENAME v TO "caf\xe9"', b"INSERT INTO moved VALUES (1)",
                b'ALTER TABLE typed ADD w "mood\xe9"', b"INSERT INTO typed VALUES (1)",
                b'ALTER TABLE renamed RENAME TO "later\xe9"', b'INSERT INTO "later\xe9" VALUES (1)',
                b'ALTER PUBLICATION %s ADD TABLE "caf\xe9"' % publication, b'INSERT INTO "caf\xe9" VALUES (1)',
            )  # fmt: skip
            await good_flows(world)
            assert "a value is not UTF-8: bytes=e9" in (await world.paused("written")).reason
            for name in ("grown", "moved", "typed"):
                await world.paused(name, "not UTF-8")
            await world.paused("defaulted", "the default of column 'w' is not UTF-8")

            async def left() -> bool:
                row = await world.table("public.later\\xe9")
                return row is not None and row.state == "left"

            await until(left, "the renamed table is left")
            await good_flows(world)
        async with world.capture(tables=("*", "*.*")):
            await good_flows(world)


@pytest.mark.postgres
@pytest.mark.parametrize("identity", ["full", "as-is"])
async def test_an_index_or_a_partition_of_a_captured_table_that_gets_a_name_that_is_not_utf8_costs_that_table_alone(
    unchecked_dsn: str, identity: str
) -> None:
    async def reported(world: World) -> None:
        async def holds() -> bool:
            row = await world.table("public.indexed")
            return row is not None and row.identity == 'USING INDEX "caf\\xe9s"'

        await until(holds, "the identity is told")

    async with World(unchecked_dsn) as world:
        await world.sql(*GOOD, *plain("indexed"))
        await world.sql("CREATE TABLE parted (id int PRIMARY KEY) PARTITION BY RANGE (id)")
        settings = {"identity": identity, "table_poll_s": 0.1}
        async with world.capture(**settings) as capture:
            await world.flowing("good", "indexed", "parted")
            await raw(
                world,
                b'CREATE UNIQUE INDEX "caf\xe9s" ON indexed (id)',
                b'ALTER TABLE indexed REPLICA IDENTITY USING INDEX "caf\xe9s"',
                b'CREATE TABLE "part\xe9" PARTITION OF parted FOR VALUES FROM (0) TO (9)',
            )
            await world.paused("parted", "a name is not UTF-8")
            row = await world.paused("indexed", "a name is not UTF-8")
            session = capture._session
            await reported(world)
            await good_flows(world)
            assert capture._session is session and world.tracker.failure(capture.config.mark) is None
        async with world.capture(**settings):
            await good_flows(world)
            assert await world.table("public.indexed") == replace(row, identity='USING INDEX "caf\\xe9s"')


@pytest.mark.postgres
async def test_f488_a_logical_message_of_any_size_stops_nothing(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real limit is 200 MiB; PostgreSQL writes messages of up to 1 GiB."""
    for module in (replication_stream, undecodable):
        monkeypatch.setattr(module, "MESSAGE_BYTES", 1 << 20)
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD)
        async with world.capture() as capture:
            for transactional in ("true", "false"):
                for prefix in ("app", "tidemill", "", "x" * 100):
                    await world.transaction(
                        "INSERT INTO good SELECT max(id) + 1, 7 FROM good",
                        f"SELECT pg_logical_emit_message({transactional}, '{prefix}', repeat('x', 2000000))",
                        "INSERT INTO good SELECT max(id) + 1, 7 FROM good",
                    )
            await good_flows(world)
            assert capture.facts()["markers_left_out"] == 1
            assert world.tracker.failure(capture.config.mark) is None


def test_a_message_beyond_the_limit_is_passed_over_by_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication_stream, "MESSAGE_BYTES", 1_000)
    converter = TransactionBuilder({})

    def take_in(payload: bytes) -> Fragment | None:
        item = parse_frame(b"w" + bytes(PAYLOAD_START - 1) + payload)
        assert isinstance(item, FramedMessage)
        out = feed_frame(item, converter)
        assert out is None or isinstance(out, Fragment)
        return out

    take_in(b"B" + struct.pack(">qqI", 100, 0, 7))
    for prefix in (b"app", b"tidemill", b"tidemillion", b""):
        take_in(b"M" + struct.pack(">Bq", 1, 100) + prefix + b"\0" + struct.pack(">I", 2_000) + b"x" * 2_000)
    fragment = take_in(b"C" + struct.pack(">Bqqq", 0, 100, 108, 0))
    assert fragment is not None and not fragment.markers and converter.markers_left_out == 1
