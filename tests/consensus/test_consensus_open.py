from __future__ import annotations

import os
import socket
from pathlib import Path

import apsw
import psycopg
import pytest

from support.postgres import EmbeddedPostgres
from support.waiting import run
from tidemill.base.clock import ManualClock, Rand, SystemClock
from tidemill.base.errors import ConflictError, CorruptError, InvalidError, TidemillError, UnavailableError
from tidemill.cli.context import _redacted_url
from tidemill.consensus.factory import open_consensus
from tidemill.consensus.operations import Acquire, Leases
from tidemill.consensus.sqlite import schema, sockets
from tidemill.consensus.sqlite.engine import SqliteEngine


def refused(url: str, kind: type[TidemillError]) -> str:
    message = ""

    async def body() -> None:
        nonlocal message
        with pytest.raises(kind) as caught:
            await open_consensus(url, SystemClock(), Rand())
        assert type(caught.value) is kind
        assert caught.value.fix
        message = str(caught.value)

    run(body())
    return message


@pytest.mark.parametrize(
    "url", ["", "redis://x", "sqlite:", "sqlite://", "sqlite://host/x.db", "sqlite:///", "memory://x"]
)
def test_a_url_that_names_no_engine_is_refused_by_its_key(url: str) -> None:
    assert "consensus.url" in refused(url, InvalidError)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql:/u:s3cret@127.0.0.1/db",
        "postgres:u:s3cret@127.0.0.1/db",
        "postgresql//u:s3cret@127.0.0.1/db",
        "postgresql://u:s3cret%zz@127.0.0.1/db",
        "postgresql://u:s3cret/x@127.0.0.1/db",
        "postgresql://127.0.0.1:1/s3cret@127.0.0.1/db",
        "s3:AK:s3cret@bucket",
    ],
)
def test_a_malformed_url_is_reported_without_its_password(url: str) -> None:
    with pytest.raises(TidemillError) as raised:
        run(open_consensus(url, SystemClock(), Rand()))
    assert "consensus.url" in str(raised.value) and "s3cret" not in str(raised.value)
    assert "s3cret" not in _redacted_url(url)


@pytest.mark.parametrize("url", ["postgres+psycopg://u:s3cret@h/db", "sqlite://u:s3cret@h/", "password=s3cret host=h"])
def test_a_url_that_is_refused_is_shown_without_its_password(url: str) -> None:
    assert "s3cret" not in refused(url, InvalidError)


async def test_a_relative_path_and_missing_directories_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    consensus = await open_consensus("sqlite:deep/er/consensus.db", SystemClock(), Rand())
    await consensus.cas("k", 0, b"v", "n")
    await consensus.aclose()
    assert (tmp_path / "deep/er/consensus.db").exists()
    assert not (tmp_path / "deep/er/consensus.db.sock").exists()


async def test_a_path_too_long_for_a_socket_works(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["directory-with-a-long-name"] * 8)
    url = f"sqlite://{deep}/consensus.db"
    one = await open_consensus(url, SystemClock(), Rand())
    two = await open_consensus(url, SystemClock(), Rand())
    await one.cas("k", 0, b"v", "n")
    assert await two.head("k") is not None
    await one.aclose()
    await two.aclose()
    with sockets.socket_paths(deep / "consensus.db", create=False) as candidates:
        assert all(len(os.fsencode(path)) <= sockets.SUN_PATH_BYTES for path in candidates)


def test_a_database_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "consensus.url" in refused(f"sqlite://{tmp_path}/file/consensus.db", InvalidError)
    (tmp_path / "consensus.db").mkdir()
    assert "consensus.url" in refused(f"sqlite://{tmp_path}/consensus.db", InvalidError)


def test_a_file_that_is_no_database_is_corrupt_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "consensus.db").write_bytes(b"something else" * 1000)
    refused(f"sqlite://{tmp_path}/consensus.db", CorruptError)
    assert (tmp_path / "consensus.db").read_bytes() == b"something else" * 1000


def test_another_layout_is_refused(tmp_path: Path) -> None:
    SqliteEngine(tmp_path / "consensus.db", SystemClock()).close()
    connection = apsw.Connection(str(tmp_path / "consensus.db"))
    connection.execute("UPDATE meta SET layout = 99")
    connection.close()
    refused(f"sqlite://{tmp_path}/consensus.db", InvalidError)


def test_an_sqlite_with_the_wal_reset_bug_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema.apsw, "sqlite_lib_version", lambda: "3.51.2")
    with pytest.raises(InvalidError, match=r"3\.51\.3"):
        schema.check_library()


def test_the_engines_clock_never_goes_back_across_restarts(tmp_path: Path) -> None:
    first = SqliteEngine(tmp_path / "consensus.db", ManualClock(now_ms=5_000_000))
    first.commit([Acquire("lease", "h1", 1_000, b"")])
    first.close()
    second = SqliteEngine(tmp_path / "consensus.db", ManualClock(now_ms=1_000_000))
    (lease,) = second.execute_read(Leases(""))
    assert (lease.live, lease.remaining_ms) == (True, 1_000)
    (outcome,) = second.commit([Acquire("lease", "h2", 1_000, b"")])
    assert isinstance(outcome, ConflictError)
    second.close()


def test_the_wall_clock_jumping_does_not_expire_a_lease_early(tmp_path: Path) -> None:
    class Jumping(ManualClock):
        jump_ms = 0

        def now_ms(self) -> int:
            return super().now_ms() + self.jump_ms

    clock = Jumping()
    engine = SqliteEngine(tmp_path / "consensus.db", clock)
    engine.commit([Acquire("lease", "h1", 1_000, b"")])
    clock.jump_ms = 3_600_000
    assert engine.execute_read(Leases(""))[0].live
    clock.jump_ms = -3_600_000
    clock.advance(1_001)
    assert not engine.execute_read(Leases(""))[0].live
    engine.close()


@pytest.mark.postgres
def test_a_wrong_dsn_is_refused_in_a_sentence_without_the_password(postgres_dsn: str) -> None:
    message = refused(postgres_dsn.replace("/test_", "/absent_"), InvalidError)
    assert "consensus.url" in message
    secret = postgres_dsn.replace("postgres@", "nobody:s3cret@")
    assert "s3cret" not in refused(secret, InvalidError)
    refused("postgresql://127.0.0.1:notaport/x", InvalidError)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        message = refused(f"postgresql://x@127.0.0.1:{taken.getsockname()[1]}/x", UnavailableError)
    assert "consensus.url" in message


@pytest.mark.postgres
def test_a_role_without_rights_is_told_what_to_grant(postgres_dsn: str) -> None:
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute("DROP ROLE IF EXISTS weak")
        connection.execute("CREATE ROLE weak LOGIN")
    assert "GRANT" in refused(postgres_dsn.replace("postgres@", "weak@"), InvalidError)


@pytest.mark.postgres
async def test_many_processes_may_open_an_empty_database_at_once(postgres_dsn: str) -> None:
    import asyncio

    opened = await asyncio.gather(*[open_consensus(postgres_dsn, SystemClock(), Rand()) for _ in range(8)])
    assert len({id(consensus) for consensus in opened}) == 8
    for consensus in opened:
        await consensus.aclose()


@pytest.mark.postgres
async def test_a_database_with_the_encoding_sql_ascii_holds_a_cluster(postgres_server: EmbeddedPostgres) -> None:
    """initdb chooses this encoding where no locale is set, as in a container."""
    with psycopg.connect(postgres_server.dsn, autocommit=True) as connection:
        connection.execute("CREATE DATABASE plain_bytes ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
    consensus = await open_consensus(postgres_server.dsn_for("plain_bytes"), SystemClock(), Rand())
    try:
        await consensus.cas("k", 0, b"v", "n")
        assert [key for key, _ in await consensus.scan("")] == ["k"]
        await consensus.fence("log", 1)
        await consensus.append("log", 1, 0, [b"record"], "m")
        assert [record.data for record in (await consensus.read("log", 0)).records] == [b"record"]
        assert [name for name, _ in (await consensus.changed("")).heads] == ["log"]
        await consensus.acquire("lease", "a", 10_000)
        assert [(lease.name, lease.holder) for lease in await consensus.leases("")] == [("lease", "a")]
    finally:
        await consensus.aclose()
        with psycopg.connect(postgres_server.dsn, autocommit=True) as connection:
            connection.execute("DROP DATABASE plain_bytes WITH (FORCE)")
