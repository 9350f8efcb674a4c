"""Lost acknowledgements: the client reports an unknown outcome, and resolving it by nonce yields the true one, on both
durable engines.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from support.consensus.cutting_proxy import CuttingProxy, How
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import ConflictError, UnavailableError, UnknownOutcomeError
from tidemill.consensus.api import Consensus, resolve_append, resolve_cas
from tidemill.consensus.factory import open_consensus
from tidemill.consensus.sqlite import sockets
from tidemill.consensus.state_log.state_log import StateLog, StateMachine

MARK = CuttingProxy.MARK
Setup = Callable[[], AbstractAsyncContextManager[tuple[Consensus, Consensus, CuttingProxy]]]


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def setup(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    """Return a client behind a proxy, a second client without one, and the proxy."""
    if request.param == "postgres":
        dsn: str = request.getfixturevalue("postgres_dsn")
        parts = urlsplit(dsn)

        @asynccontextmanager
        async def over_tcp() -> AsyncIterator[tuple[Consensus, Consensus, CuttingProxy]]:
            proxy = CuttingProxy((str(parts.hostname), int(parts.port or 0)))
            port = await proxy.serve_tcp()
            other = await open_consensus(dsn, SystemClock(), Rand())
            behind = await open_consensus(dsn.replace(f":{parts.port}", f":{port}"), SystemClock(), Rand())
            yield behind, other, proxy
            await behind.aclose()
            await other.aclose()
            await proxy.aclose()

        return over_tcp

    direct = sockets.socket_paths
    detour: list[str] = []

    @contextlib.contextmanager
    def detoured(database: Path, *, create: bool) -> Iterator[list[str]]:
        with direct(database, create=create) as candidates:
            yield detour if detour and not create else candidates

    monkeypatch.setattr(sockets, "socket_paths", detoured)

    @asynccontextmanager
    async def over_unix() -> AsyncIterator[tuple[Consensus, Consensus, CuttingProxy]]:
        url = f"sqlite://{tmp_path}/consensus.db"
        other = await open_consensus(url, SystemClock(), Rand())
        proxy = CuttingProxy(f"{tmp_path}/consensus.db.sock")
        await proxy.serve_unix(f"{tmp_path}/proxy.sock")
        detour.append(f"{tmp_path}/proxy.sock")
        behind = await open_consensus(url, SystemClock(), Rand())
        yield behind, other, proxy
        await behind.aclose()
        await other.aclose()
        await proxy.aclose()

    return over_unix


@pytest.mark.parametrize("how", ["before", "after"])
async def test_a_lost_acknowledgement_of_an_append_is_unknown_and_resolves_to_the_truth(setup: Setup, how: How) -> None:
    async with setup() as (behind, other, proxy):
        await behind.append("log", 0, 0, [b"first"], "n0")
        proxy.how = how
        with pytest.raises(UnknownOutcomeError):
            await behind.append("log", 0, 1, [MARK], "n1")
        assert proxy.cuts == 1
        landed = await resolve_append(behind, "log", 1, "n1")
        assert landed == (how == "after")
        assert (await other.log_head("log")).next == (2 if landed else 1)
        # The client still works.
        await behind.append("log", 0, 2 if landed else 1, [b"next"], "n2")


@pytest.mark.parametrize("how", ["before", "after"])
async def test_a_lost_acknowledgement_of_a_register_write_is_unknown_and_resolves_to_the_truth(
    setup: Setup, how: How
) -> None:
    async with setup() as (behind, other, proxy):
        await behind.cas("key", 0, b"first", "n0")
        proxy.how = how
        with pytest.raises(UnknownOutcomeError):
            await behind.cas("key", 1, MARK, "n1")
        written = await resolve_cas(behind, "key", 1, "n1")
        assert (written is not None) == (how == "after")
        current = await other.head("key")
        assert current is not None and current.nonce == ("n1" if how == "after" else "n0")


async def test_an_attempt_that_was_told_unknown_and_resolved_as_lost_never_lands_later(setup: Setup) -> None:
    async with setup() as (behind, other, proxy):
        await behind.append("log", 0, 0, [b"first"], "n0")
        proxy.how = "late"
        with pytest.raises(UnknownOutcomeError):
            await behind.append("log", 0, 1, [MARK], "n1")
        landed = await resolve_append(behind, "log", 1, "n1")
        await proxy.late_delivered.wait()
        for _ in range(20):
            await asyncio.sleep(0.01)
            assert await resolve_append(other, "log", 1, "n1") == landed
        assert not landed


async def test_reads_are_asked_again_by_themselves(setup: Setup) -> None:
    async with setup() as (behind, other, proxy):
        key = MARK.decode()
        await other.cas(key, 0, b"x", "n")
        for how in ("before", "after"):
            proxy.how = how  # type: ignore[assignment]
            version = await behind.head(key)
            assert version is not None and version.data == b"x"
        assert proxy.cuts == 2


async def test_a_wait_survives_a_lost_connection(setup: Setup) -> None:
    async with setup() as (behind, other, proxy):
        waiting = asyncio.ensure_future(behind.wait("log", 0, 30))
        await asyncio.sleep(0.05)
        proxy.how = "before"
        with pytest.raises(UnknownOutcomeError):
            await behind.cas("key", 0, MARK, "n")
        await other.append("log", 0, 0, [b"x"], "n")
        assert await waiting


@pytest.mark.postgres
async def test_a_write_that_landed_is_told_so_when_its_neighbours_refusal_cannot_be_explained(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client queries after the commit why some writes were refused. A failure of that query must not change the
    outcome of the others.
    """
    from tidemill.consensus.postgres import sql

    consensus = await open_consensus(postgres_dsn, SystemClock(), Rand())
    await consensus.append("taken", 0, 0, [b"x"], "n0")
    await consensus.cas("held", 0, b"x", "n0")
    monkeypatch.setattr(sql, "HEADS_BY_ID", "SELECT 1 / 0 WHERE %b::int8[] IS NOT NULL")
    landed, written, refused, lost = await asyncio.gather(
        consensus.append("free", 0, 0, [b"y"], "n1"),
        consensus.cas("new", 0, b"y", "n1"),
        consensus.append("taken", 0, 0, [b"y"], "n2"),
        consensus.cas("held", 0, b"y", "n2"),
        return_exceptions=True,
    )
    assert (await consensus.log_head("free")).next == 1
    assert getattr(landed, "next", landed) == 1 and getattr(written, "seq", written) == 1
    assert isinstance(refused, UnavailableError) and isinstance(lost, UnavailableError)
    assert (await consensus.log_head("taken")).next == 1
    await consensus.aclose()


async def test_a_client_that_is_not_greeted_does_not_knock_without_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequencer of another version, or one that is shutting down, closes the connection immediately."""
    knocks = 0

    async def closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal knocks
        knocks += 1
        writer.close()

    @contextlib.contextmanager
    def elsewhere(database: Path, *, create: bool) -> Iterator[list[str]]:
        yield [f"{tmp_path}/closes.sock"]

    url = f"sqlite://{tmp_path}/consensus.db"
    other = await open_consensus(url, SystemClock(), Rand())
    server = await asyncio.start_unix_server(closes, f"{tmp_path}/closes.sock")
    monkeypatch.setattr(sockets, "socket_paths", elsewhere)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.5):
            await open_consensus(url, SystemClock(), Rand())
    server.close()
    await other.aclose()
    assert 0 < knocks < 60


async def test_a_state_log_counts_every_command_once_through_lost_acknowledgements(setup: Setup) -> None:
    def apply(state: list[int], command: bytes, position: int, term: int) -> list[int]:
        number = int(command.split(b" ")[0])
        if number in state:
            raise ConflictError("twice")
        return [*state, number]

    async with setup() as (behind, other, proxy):

        def log_of(consensus: Consensus) -> StateLog[list[int]]:
            return StateLog(
                consensus,
                "numbers",
                StateMachine(list, apply, lambda s: bytes(s), lambda b: list(b)),
                Rand(),
            )

        log = log_of(behind)
        for number in range(30):
            if number % 5 == 0:
                proxy.how = "after" if number % 2 else "before"
            await log.propose(b"%d " % number + MARK)
        assert proxy.cuts == 6
        assert await log_of(other).load() == list(range(30)) == log.state
        await log.aclose()


async def test_a_commit_that_failed_halfway_is_unknown_and_the_database_is_opened_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tidemill.consensus.sqlite.engine import CommitOutcomeUnknownError, SqliteEngine

    opened: list[SqliteEngine] = []
    commit, init = SqliteEngine.commit, SqliteEngine.__init__

    def counted(self: SqliteEngine, *args: object) -> None:
        opened.append(self)
        init(self, *args)  # type: ignore[arg-type]

    def failing(self: SqliteEngine, ops: list[object]) -> list[object]:
        outcomes = commit(self, ops)  # type: ignore[arg-type]
        if any(getattr(op, "records", ()) == (MARK,) for op in ops) and len(opened) == 1:
            raise CommitOutcomeUnknownError("disk I/O error")
        return outcomes

    monkeypatch.setattr(SqliteEngine, "__init__", counted)
    monkeypatch.setattr(SqliteEngine, "commit", failing)
    consensus = await open_consensus(f"sqlite://{tmp_path}/consensus.db", SystemClock(), Rand())
    await consensus.append("log", 0, 0, [b"first"], "n0")
    with pytest.raises(UnknownOutcomeError):
        await consensus.append("log", 0, 1, [MARK], "n1")
    assert await resolve_append(consensus, "log", 1, "n1")
    await consensus.append("log", 0, 2, [b"next"], "n2")
    assert len(opened) == 2
    await consensus.aclose()


async def test_a_commit_that_was_refused_is_unavailable_and_nothing_of_it_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import apsw

    from tidemill.consensus.sqlite.record_storage import RecordStorage

    insert = RecordStorage.insert
    full = [True]

    def failing(self: RecordStorage, records: list[object]) -> None:
        insert(self, records)  # type: ignore[arg-type]
        if full[0] and any(getattr(record, "data", b"") == MARK for record in records):
            raise apsw.FullError("database or disk is full")

    monkeypatch.setattr(RecordStorage, "insert", failing)
    consensus = await open_consensus(f"sqlite://{tmp_path}/consensus.db", SystemClock(), Rand())
    await consensus.append("log", 0, 0, [b"first"], "n0")
    with pytest.raises(UnavailableError, match="disk is full"):
        await consensus.append("log", 0, 1, [MARK], "n1")
    assert (await consensus.log_head("log")).next == 1
    full[0] = False
    await consensus.append("log", 0, 1, [MARK], "n2")
    assert [r.nonce for r in (await consensus.read("log", 0)).records] == ["n0", "n2"]
    await consensus.aclose()
