"""A single bad request, answer or notification ends neither the client nor the sequencer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from support.waiting import DEADLINE_S, run, until
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import ConflictError, InvalidError, UnavailableError, UnknownOutcomeError
from tidemill.consensus.api import LogHead
from tidemill.consensus.factory import open_consensus
from tidemill.consensus.postgres.client import PostgresConsensus
from tidemill.consensus.sqlite import client, protocol, sockets
from tidemill.consensus.sqlite.engine import SqliteEngine

LARGE = 400_000
"""Bytes that the driver cannot send in one piece."""
FOREIGN = [
    "",
    "{",
    "[1, 2]",
    '[["log"]]',
    '[["log", 1e999]]',
    '{"a": 1}',
    "[" * 3_000,
    "\x01\x02",
    "ø" * 3_900,
    "[" + "9" * 7_000,
]


@pytest.mark.postgres
async def test_f501_a_foreign_notify_is_ignored_and_wake_ups_go_on(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tidemill.consensus.postgres import notifications

    monkeypatch.setattr(notifications, "POLL_INTERVAL_S", 600.0)  # so that only notifications wake waiters
    one = await open_consensus(postgres_dsn, SystemClock(), Rand())
    two = await open_consensus(postgres_dsn, SystemClock(), Rand())
    async with await psycopg.AsyncConnection.connect(postgres_dsn, autocommit=True) as foreign:
        for round_number in range(3):
            for payload in FOREIGN:
                await foreign.execute("SELECT pg_notify('tidemill', %s)", (payload,))
            await foreign.execute("NOTIFY tidemill")
            waiting = asyncio.ensure_future(one.wait("log", round_number, 20))
            await asyncio.sleep(0.2)
            started_s = asyncio.get_running_loop().time()
            await two.append("log", 0, round_number, [b"x"], f"n{round_number}")
            assert await waiting
            assert asyncio.get_running_loop().time() - started_s < 5
    assert one.trouble() == "" and two.trouble() == ""
    await one.aclose()
    await two.aclose()


@pytest.mark.postgres
async def test_f501_a_listener_that_meets_any_fault_listens_again(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tidemill.consensus.postgres import notifications

    class Odd(Exception):
        """An exception of a type that no handler lists."""

    faults = 3

    def decode(payload: str) -> Any:
        nonlocal faults
        if faults:
            faults -= 1
            raise Odd("from a library")
        return [("log", 1)]

    monkeypatch.setattr(notifications, "POLL_INTERVAL_S", 600.0)
    monkeypatch.setattr(notifications, "_decode", decode)
    one = await open_consensus(postgres_dsn, SystemClock(), Rand())
    async with await psycopg.AsyncConnection.connect(postgres_dsn, autocommit=True) as foreign:
        waiting = asyncio.ensure_future(one.wait("quiet", 0, 30))
        while not waiting.done():
            await foreign.execute("SELECT pg_notify('tidemill', 'x')")
            await asyncio.sleep(0.05)
            if faults == 0:
                await one.append("quiet", 0, 0, [b"x"], "n")
                break
        assert await waiting
    assert await one.head("any") is None and one.trouble() == ""
    await one.aclose()


@pytest.mark.postgres
async def test_f502_a_fault_of_one_group_fails_that_group_and_the_client_goes_on(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tidemill.consensus.postgres import group_commit

    commit, broken = group_commit.commit_group, [True]

    async def sometimes(*args: Any) -> Any:
        if broken[0]:
            raise ZeroDivisionError("a bug")
        return await commit(*args)

    monkeypatch.setattr(group_commit, "commit_group", sometimes)
    one = await open_consensus(postgres_dsn, SystemClock(), Rand())
    with pytest.raises(UnknownOutcomeError):
        await one.append("log", 0, 0, [b"x"], "n0")
    assert "ZeroDivisionError" in one.trouble()
    assert await one.head("key") is None  # other lanes still work
    broken[0] = False
    await one.append("log", 0, 0, [b"x"], "n1")
    assert one.trouble() == ""
    await one.aclose()


class FakeSequencer:
    """A sequencer that greets as the real one of this `life`, then answers every request with `garbage(request id)`."""

    def __init__(self, path: str, garbage: Any, life: str) -> None:
        self.path, self.garbage, self.life, self.connections = path, garbage, life, 0
        self.writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> FakeSequencer:
        self.server = await asyncio.start_unix_server(self._serve, self.path)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.server.close()
        for writer in self.writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                size = int.from_bytes(await reader.readexactly(4), "little")
                for request in protocol.decode_requests(await reader.readexactly(size)):
                    if isinstance(request.op, protocol.Hello):
                        writer.write(protocol.encode_frames([protocol.result_answer(request.id, self.life)]))
                    else:
                        writer.write(self.garbage(request.id))
        writer.close()


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of socket paths; while it is not empty, clients connect to them and there is no host."""
    direct, detour = sockets.socket_paths, []

    @contextlib.contextmanager
    def detoured(database: Path, *, create: bool) -> Iterator[list[str]]:
        with direct(database, create=create) as candidates:
            yield detour if detour and not create else candidates

    monkeypatch.setattr(sockets, "socket_paths", detoured)
    return detour


@pytest.mark.parametrize(
    "garbage",
    [
        lambda request: framed(b"\xc1\xc1"),
        lambda request: framed(b"\x93" * 10_000),
        lambda request: b"\xff\xff\xff\xff",
        lambda request: protocol.encode_frames([(request, 0, ["not", "a", "head"])]),
        lambda request: protocol.encode_frames([(request, 7, 5)]),
        lambda request: protocol.encode_frames([(request, 1, ("text", "", 5))]),
    ],
    ids=["no msgpack", "nested", "too long", "another type", "no error", "no current"],
)
async def test_f503_a_bad_answer_fails_its_calls_at_once_and_the_client_connects_again(
    tmp_path: Path, elsewhere: list[str], garbage: Any
) -> None:
    url = f"sqlite://{tmp_path}/consensus.db"
    one = await open_consensus(url, SystemClock(), Rand())
    assert isinstance(one, client.SqliteConsensus)
    await one.append("log", 0, 0, [b"x"], "n0")
    async with FakeSequencer(f"{tmp_path}/fake.sock", garbage, one._sequencer_life) as fake:
        elsewhere.append(fake.path)
        assert one._link is not None
        one._link.abort()
        await until(lambda: fake.connections)
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(UnknownOutcomeError):
                await one.append("log", 0, 1, [b"y"], "n1")
        knocks = fake.connections
        await asyncio.sleep(0.5)
        assert fake.connections - knocks < 60
    elsewhere.clear()
    assert (await one.log_head("log")).next == 1
    await one.append("log", 0, 1, [b"z"], "n2")
    assert one.trouble() == ""
    await one.aclose()


async def test_a_new_life_whose_history_cannot_be_read_is_left_and_tried_again(
    tmp_path: Path, elsewhere: list[str]
) -> None:
    one = await open_consensus(f"sqlite://{tmp_path}/consensus.db", SystemClock(), Rand())
    assert isinstance(one, client.SqliteConsensus)
    await one.append("log", 0, 0, [b"x"], "n0")
    # It says goodbye, too, and what follows is no answer.
    ended = protocol.encode_frames([protocol.GOODBYE]) + framed(b"\xc1")
    async with FakeSequencer(f"{tmp_path}/fake.sock", lambda request: ended, "another") as fake:
        elsewhere.append(fake.path)
        assert one._link is not None
        one._link.abort()
        waiting = asyncio.ensure_future(one.append("log", 0, 1, [b"y"], "n1"))
        await until(lambda: fake.connections > 2)
        assert not waiting.done(), "nothing was sent there"
    elsewhere.clear()
    assert (await waiting).next == 2
    assert not one._goodbye, "a lost write is sent again only after a goodbye on its own connection"
    await one.aclose()


async def test_f503_a_silent_sequencer_ends_a_read_at_its_deadline_and_says_so_before(
    tmp_path: Path, elsewhere: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await open_consensus(f"sqlite://{tmp_path}/consensus.db", SystemClock(), Rand())
    assert isinstance(one, client.SqliteConsensus)
    async with FakeSequencer(f"{tmp_path}/fake.sock", lambda request: b"", one._sequencer_life) as fake:
        elsewhere.append(fake.path)
        real = one._link
        assert real is not None
        real.abort()
        reading = asyncio.ensure_future(one.head("key"))
        # The limits are shortened only now: a slow machine needs its time to open the file and to connect.
        await until(lambda: one._link not in (None, real) and any(p.sent for p in one._pending.values()))
        with monkeypatch.context() as patience:
            patience.setattr(client, "ANSWER_TIMEOUT_S", 2.0)
            patience.setattr(client, "NO_SEQUENCER_TIMEOUT_S", 1.0)
            patience.setattr(client, "SLOW_AFTER_S", 0.5)
            await until(lambda: "slow to answer" in one.trouble())
            with pytest.raises(UnavailableError, match="does not answer"):
                await asyncio.wait_for(reading, DEADLINE_S)
    elsewhere.clear()
    assert await one.head("key") is None
    await one.aclose()


async def test_f504_a_request_that_breaks_the_engine_fails_alone_and_its_neighbours_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[SqliteEngine] = []
    init, decide, answer = SqliteEngine.__init__, SqliteEngine._apply, SqliteEngine.execute_read

    def counted(self: SqliteEngine, *args: Any) -> None:
        opened.append(self)
        init(self, *args)

    def breaks(self: SqliteEngine, op: Any, staged: Any) -> Any:
        if getattr(op, "nonce", "") == "poison":
            raise OverflowError("a bug")
        return decide(self, op, staged)

    def breaks_read(self: SqliteEngine, op: Any) -> Any:
        if getattr(op, "key", "") == "poison":
            raise RecursionError("a bug")
        return answer(self, op)

    monkeypatch.setattr(SqliteEngine, "__init__", counted)
    monkeypatch.setattr(SqliteEngine, "_apply", breaks)
    monkeypatch.setattr(SqliteEngine, "execute_read", breaks_read)
    one = await open_consensus(f"sqlite://{tmp_path}/consensus.db", SystemClock(), Rand())
    before, poison, after, read, fine = await asyncio.gather(
        one.append("a", 0, 0, [b"x"], "n0"),
        one.append("b", 0, 0, [b"x"], "poison"),
        one.append("c", 0, 0, [b"x"], "n1"),
        one.head("poison"),
        one.head("other"),
        return_exceptions=True,
    )
    assert getattr(before, "next", before) == 1 and getattr(after, "next", after) == 1
    assert isinstance(poison, UnavailableError) and "OverflowError" in str(poison)
    assert isinstance(read, UnavailableError) and fine is None
    assert (await one.log_head("b")).next == 0
    assert len(opened) == 1
    await one.aclose()


@pytest.mark.parametrize("name", ["nul\0", "\ud800"])
async def test_f504_a_name_that_cannot_travel_is_refused_before_it_meets_its_neighbours(
    tmp_path: Path, name: str
) -> None:
    one = await open_consensus(f"sqlite://{tmp_path}/consensus.db", SystemClock(), Rand())
    for ask in (one.head, one.scan, one.log_head, one.leases):
        with pytest.raises(InvalidError):
            await ask(name)
    with pytest.raises(InvalidError):
        await one.read("log", 1 << 63)
    with pytest.raises(InvalidError):
        await one.wait(name, 0, 1)
    assert await one.head("fine") is None
    await one.aclose()


@contextlib.contextmanager
def no_descriptors_left() -> Iterator[list[int]]:
    """Leave this process no free file descriptor until the block ends; the lowered limit keeps that cheap."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 40, hard))
    hoard: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                hoard.append(os.open(os.devnull, os.O_RDONLY))
        yield hoard
    finally:
        for fd in hoard:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_f505_the_sequencer_survives_a_process_without_descriptors_and_takes_clients_from_its_reserve(
    tmp_path: Path,
) -> None:
    import subprocess
    import sys

    url = f"sqlite://{tmp_path}/consensus.db"
    other = (
        "import asyncio, sys\n"
        "from tidemill.base.clock import Rand, SystemClock\n"
        "from tidemill.consensus.factory import open_consensus\n"
        "async def main():\n"
        "    one = await open_consensus(sys.argv[1], SystemClock(), Rand())\n"
        "    await one.cas('from-outside', 0, b'x', 'n')\n"
        "    await one.aclose()\n"
        "asyncio.run(main())\n"
    )
    one = await open_consensus(url, SystemClock(), Rand())
    await one.append("log", 0, 0, [b"x"], "n0")
    outside = subprocess.Popen([sys.executable, "-c", other, url])
    with no_descriptors_left():
        with pytest.raises(OSError):
            os.open(os.devnull, os.O_RDONLY)
        for position in range(1, 200):
            await one.append("log", 0, position, [b"x"], f"n{position}")
        # Another process connects and is served while this one has no free descriptor.
        await until(lambda: outside.poll() is not None)
        assert outside.returncode == 0
    assert await one.head("from-outside") is not None
    assert (await one.log_head("log")).next == 200 and one.trouble() == ""
    await one.aclose()


async def test_f505_a_database_is_opened_again_from_the_reserve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tidemill.consensus.sqlite.engine import CommitOutcomeUnknownError

    commit, doubtful = SqliteEngine.commit, [False]

    def failing(self: SqliteEngine, ops: Any) -> Any:
        if doubtful[0]:
            doubtful[0] = False
            raise CommitOutcomeUnknownError("disk I/O error")
        return commit(self, ops)

    monkeypatch.setattr(SqliteEngine, "commit", failing)
    one = await open_consensus(f"sqlite://{tmp_path}/consensus.db", SystemClock(), Rand())
    await one.append("log", 0, 0, [b"x"], "n0")
    with no_descriptors_left() as hoard:
        doubtful[0] = True
        with pytest.raises(UnknownOutcomeError):
            await one.append("log", 0, 1, [b"y"], "n1")

        async def again() -> LogHead:
            await one.log_head("log")  # a write on the old connection would be lost with it, with an unknown outcome
            return await one.append("log", 0, 1, [b"z"], "n2")

        waiting = asyncio.ensure_future(again())
        await asyncio.sleep(1.0)
        for fd in hoard[:25]:
            os.close(fd)
        del hoard[:25]
        async with asyncio.timeout(DEADLINE_S):
            assert (await waiting).next == 2
    assert one.trouble() == ""
    await one.aclose()


async def test_f505_more_clients_than_the_share_are_turned_away_and_those_within_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    from tidemill.base.runtime import file_descriptors

    monkeypatch.setattr(file_descriptors, "current_shares", lambda: file_descriptors.DescriptorShares(100, 10, 10, 5))
    one = await open_consensus(f"sqlite://{tmp_path}/consensus.db", SystemClock(), Rand())
    idle = []
    for _ in range(20):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(f"{tmp_path}/consensus.db.sock")
        idle.append(sock)
    await one.append("log", 0, 0, [b"x"], "n0")
    for sock in idle:
        sock.settimeout(0.2)
    turned_away = 0
    for sock in idle:
        with contextlib.suppress(TimeoutError):
            turned_away += sock.recv(1) == b""
    assert turned_away == 16  # the client itself has one of the five
    for sock in idle:
        sock.close()
    await one.aclose()


@pytest.mark.postgres
async def test_the_client_of_postgres_tells_its_trouble_while_the_server_is_away(postgres_dsn: str) -> None:
    from urllib.parse import urlsplit

    from support.consensus.cutting_proxy import CuttingProxy

    parts = urlsplit(postgres_dsn)
    proxy = CuttingProxy((str(parts.hostname), int(parts.port or 0)))
    port = await proxy.serve_tcp()
    one = await open_consensus(postgres_dsn.replace(f":{parts.port}", f":{port}"), SystemClock(), Rand())
    assert isinstance(one, PostgresConsensus) and one.trouble() == ""
    await proxy.aclose()
    reading = asyncio.ensure_future(one.head("key"))
    await until(lambda: "cannot be reached" in one.trouble())
    again = CuttingProxy((str(parts.hostname), int(parts.port or 0)))
    await again.serve_tcp(port)
    async with asyncio.timeout(DEADLINE_S):
        assert await reading is None
    assert one.trouble() == ""
    await one.aclose()
    await again.aclose()


async def test_f517_a_sequencer_thread_that_dies_of_anything_is_replaced_and_the_client_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tidemill.consensus.sqlite.sequencer import Sequencer

    class Panic(BaseException):
        """An exception of native code, which does not derive from `Exception`."""

    rounds, started = Sequencer._run_round, []
    dies = [0]

    def panics(self: Sequencer, *args: Any) -> None:
        rounds(self, *args)
        if dies[0]:
            dies[0] -= 1
            raise Panic("of native code")

    start = Sequencer.start
    monkeypatch.setattr(Sequencer, "_run_round", panics)
    monkeypatch.setattr(Sequencer, "start", lambda self: (started.append(self), start(self))[1])
    one = await open_consensus(f"sqlite://{tmp_path}/consensus.db", SystemClock(), Rand())
    other = await open_consensus(f"sqlite://{tmp_path}/consensus.db", SystemClock(), Rand())
    for number in range(5):
        head = await one.log_head("log")
        dies[0] = 1
        with contextlib.suppress(UnknownOutcomeError):
            await one.append("log", 0, head.next, [b"x"], f"n{number}")
        await until(lambda: not dies[0])
        assert (await other.log_head("log")).next in (head.next, head.next + 1)
    assert len(started) >= 5
    assert one.trouble() == "" and other.trouble() == ""
    await one.aclose()
    await other.aclose()


def test_f504_whatever_a_local_peer_sends_ends_its_own_connection_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import random
    import socket

    from tidemill.consensus.operations import Append, Cas, Read, Scan, Wait

    opened: list[SqliteEngine] = []
    init = SqliteEngine.__init__
    monkeypatch.setattr(SqliteEngine, "__init__", lambda self, *args: (opened.append(self), init(self, *args))[1])
    source = random.Random(7)
    sound = protocol.encode_frames(
        [
            (1, protocol.Hello(protocol.WIRE_VERSION, "c")),
            (2, Append("fuzz", 0, 0, (b"x" * 50,), "n")),
            (3, Cas("fuzz", 0, b"y" * 50, "n")),
            (4, Read("fuzz", 0, 10, 1000)),
            (5, Scan("")),
            (6, Wait("fuzz", 1 << 40)),
            (0, protocol.CancelWait(6)),
        ]
    )

    def mutated() -> bytes:
        data = bytearray(sound)
        for _ in range(source.randint(1, 12)):
            at = source.randrange(len(data))
            match source.randrange(3):
                case 0:
                    data[at] = source.randrange(256)
                case 1:
                    del data[at : at + source.randrange(1, 20)]
                case _:
                    data[at:at] = source.randbytes(source.randrange(1, 20))
            if not data:
                break
        return bytes(data)

    def attack() -> None:
        for number in range(400):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(f"{tmp_path}/consensus.db.sock")
                sock.settimeout(0.01)
                with contextlib.suppress(OSError):
                    # Half of the messages carry a correct length prefix, so that their bodies are parsed.
                    body = mutated()
                    sock.sendall(framed(body[4:]) if number % 2 else body)
                    sock.recv(4096)

    async def body() -> None:
        one = await open_consensus(f"sqlite://{tmp_path}/consensus.db", SystemClock(), Rand())
        attacking = asyncio.ensure_future(asyncio.to_thread(attack))
        position, slowest_s = 0, 0.0
        while not attacking.done():
            started_s = asyncio.get_running_loop().time()
            await one.append("sound", 0, position, [b"x"], f"n{position}")
            slowest_s = max(slowest_s, asyncio.get_running_loop().time() - started_s)
            position += 1
            await asyncio.sleep(0.002)
        await attacking
        assert position > 20 and slowest_s < 2
        assert (await one.log_head("sound")).next == position
        assert len(opened) == 1 and one.trouble() == ""
        await one.aclose()

    run(body())


@pytest.mark.postgres
async def test_a_process_that_is_frozen_while_it_sends_a_group_keeps_no_log_or_register_from_the_others(
    postgres_dsn: str,
) -> None:
    """Sent as two statements of one transaction, the group left the locks of the first one to a process that was
    stopped before the second.
    """
    from urllib.parse import urlsplit

    from support.consensus.cutting_proxy import CuttingProxy

    parts = urlsplit(postgres_dsn)
    proxy = CuttingProxy((str(parts.hostname), int(parts.port or 0)))
    port = await proxy.serve_tcp()
    frozen = await open_consensus(postgres_dsn.replace(f":{parts.port}", f":{port}"), SystemClock(), Rand())
    other = await open_consensus(postgres_dsn, SystemClock(), Rand())
    await frozen.append("log", 0, 0, [b"first"], "n0")
    made = await frozen.cas("key", 0, b"first", "n0")
    proxy.how = "after"  # nothing after the marked chunk is forwarded
    work = [
        asyncio.ensure_future(frozen.append("log", 0, 1, [bytes(LARGE) + proxy.MARK], "n1")),
        asyncio.ensure_future(frozen.cas("key", made.seq, bytes(LARGE), "n1")),
    ]
    await asyncio.wait_for(proxy.late_delivered.wait(), DEADLINE_S)
    async with asyncio.timeout(DEADLINE_S):
        for number in range(3):  # the frozen client's write may land in between, once
            try:
                await other.append("log", 0, (await other.log_head("log")).next, [b"third"], f"a{number}")
                break
            except ConflictError:
                continue
        for number in range(3):
            try:
                key = await other.head("key")
                await other.cas("key", key.seq if key is not None else 0, b"third", f"k{number}")
                break
            except ConflictError:
                continue
    found = await other.head("key")
    assert found is not None and found.data == b"third"
    for each in work:
        each.cancel()
    await asyncio.gather(*work, return_exceptions=True)
    await proxy.aclose()
    await other.aclose()
    await frozen.aclose()
