"""A consensus that loses its newest commits: by a failover to a standby that is behind, or by an older copy of it."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from copy import deepcopy
from pathlib import Path

import psycopg
import pytest

from support.lagging_standby import Pair
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import StoreRolledBackError, UnavailableError, UnknownOutcomeError
from tidemill.consensus.api import Consensus
from tidemill.consensus.factory import open_consensus
from tidemill.consensus.memory import MemoryConsensus, MemoryState

pytestmark = pytest.mark.postgres


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.close()


async def opened(url: str) -> Consensus:
    return await open_consensus(url, SystemClock(), Rand())


async def insist(ask: Callable[[], Awaitable[object]]) -> object:
    """Repeat the call until consensus answers. During a failover outcomes are unknown."""
    while True:
        try:
            return await ask()
        except (UnavailableError, UnknownOutcomeError):
            await asyncio.sleep(0.1)


async def test_f518_a_failover_that_lost_commits_ends_every_client_that_had_seen_them_and_no_other(pair: Pair) -> None:
    writer, passer_by, reader = [await opened(pair.url) for _ in range(3)]
    await writer.append("log/a", 1, 0, [b"0", b"1"], "first")
    await writer.append("log/b", 1, 0, [b"0"], "b")
    await writer.cas("r", 0, b"v1", "r1")
    await passer_by.log_head("log/a")
    pair.caught_up()
    pair.cut_off()
    await writer.append("log/a", 1, 2, [b"lost"], "lost")
    await reader.read("log/a", 0)  # it reads the records that will be lost, and wrote none of them
    pair.fail_over()

    # A client that never saw the lost commits continues, and writes past the positions that the others saw.
    await insist(lambda: passer_by.log_head("log/b"))
    assert (await passer_by.append("log/a", 1, 2, [b"x", b"y"], "other")).next == 4
    for client in (writer, reader):
        with pytest.raises(StoreRolledBackError) as ended:
            await insist(lambda client=client: client.log_head("log/b"))  # type: ignore[misc]
        said = str(ended.value)
        assert f"consensus=postgresql://postgres@127.0.0.1,127.0.0.1:{pair.primary.port}" in said.replace("'", "")
        # A client that connects again to send or hear of wake-ups may find out before the passer-by has written.
        assert re.search(
            r"log='log/a' seen=term:1,start:0,next:3 found=term:1,start:0,next:(4 another_record_at=2|2)\.", said
        ), said
        assert "restart automatically" in said
        assert "synchronous_standby_names" in said
        assert client.trouble() in said
        # every further call fails too
        with pytest.raises(StoreRolledBackError):
            await client.append("log/b", 9, 1, [b"z"], "n")
    again = await opened(pair.url)
    assert [record.data for record in (await again.read("log/a", 0)).records] == [b"0", b"1", b"x", b"y"]
    for client in (writer, passer_by, reader, again):
        await client.aclose()


async def test_a_failover_that_lost_nothing_ends_nobody(pair: Pair) -> None:
    client = await opened(pair.url)
    await client.append("log/a", 1, 0, [b"0"], "n0")
    await client.truncate("log/a", 1)
    await client.cas("r", 0, b"v1", "r1")
    lease = await client.acquire("lease", "holder", 60_000)
    pair.caught_up()
    pair.fail_over()
    assert (await insist(lambda: client.append("log/a", 1, 1, [b"1"], "n1"))) is not None
    assert (await client.acquire("lease", "holder", 60_000)).term == lease.term
    assert client.trouble() == ""
    await client.aclose()


async def test_a_session_is_never_taken_from_a_standby_whose_answers_are_old(pair: Pair) -> None:
    """A client without target_session_attrs accepts the first host that answers: the standby, once the primary's host
    comes second.
    """
    client = await opened(pair.primary.dsn)
    await client.append("log/a", 1, 0, [b"0"], "n0")
    client._reads.lane._url = pair.standby.dsn  # type: ignore[attr-defined]
    client._reads.lane.request_new_session()  # type: ignore[attr-defined]
    with pytest.raises(UnavailableError, match="standby"):
        await client.log_head("log/a")
    client._reads.lane._url = pair.primary.dsn  # type: ignore[attr-defined]
    assert (await client.log_head("log/a")).next == 1
    await client.aclose()


def test_a_register_or_lease_that_another_history_holds_ends_the_client(postgres_dsn: str) -> None:
    """A restored database shows equal versions and terms that other clients wrote. The server's life is forged here."""

    async def scenario(lost: str, said: str) -> None:
        client = await opened(postgres_dsn)
        await client.cas("r", 0, b"v1", f"r-{lost}") if await client.head("r") is None else None
        await client.acquire("lease", f"holder-{lost}", 60_000)
        async with await psycopg.AsyncConnection.connect(postgres_dsn, autocommit=True) as connection:
            await connection.execute(lost)
        for line in (client._groups, client._singles, client._reads):  # type: ignore[attr-defined]
            line.lane.request_new_session()
        client._reads.lane._admit.__self__._life = "an earlier one"  # type: ignore[attr-defined]
        with pytest.raises(StoreRolledBackError, match=said):
            await client.log_head("any")
        await client.aclose()
        async with await psycopg.AsyncConnection.connect(postgres_dsn, autocommit=True) as connection:
            await connection.execute("DELETE FROM tidemill.registers; DELETE FROM tidemill.leases", prepare=False)

    for lost, said in (
        ("UPDATE tidemill.registers SET nonce = 'another'", "register='r' seen_version=1 found_version=1"),
        ("UPDATE tidemill.leases SET holder = 'another'", "lease='lease' seen_term=1"),
    ):
        asyncio.run(asyncio.wait_for(scenario(lost, said), 60))


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda c: c.append("log", 1, 1, [b"lost"], "lost"), "log='log' seen=term:1,start:0,next:2 found=term:1"),
        (lambda c: c.fence("log", 7), "seen=term:7,start:0,next:1 found=term:1"),
        (lambda c: c.truncate("log", 1), "seen=term:1,start:1,next:1 found=term:1,start:0"),
        (lambda c: c.cas("r", 1, b"v2", "r2"), "register='r' seen_version=2 found_version=1"),
        (lambda c: c.acquire("lease", "me", 10_000), "lease='lease' seen_term=2"),
    ],
)
async def test_any_answer_below_one_that_was_heard_ends_the_client(
    act: Callable[[Consensus], Awaitable[object]], said: str
) -> None:
    state = MemoryState()
    client = MemoryConsensus(SystemClock(), state)
    await client.append("log", 1, 0, [b"0"], "n0")
    await client.cas("r", 0, b"v1", "r1")
    await client.release("lease", "before", (await client.acquire("lease", "before", 10_000)).term)
    before = deepcopy({name: getattr(state, name) for name in ("registers", "heads", "records", "leases")})
    await act(client)
    for name, value in before.items():
        setattr(state, name, value)

    async def ask() -> None:
        await client.log_head("log")
        await client.head("r")
        await client.acquire("lease", "me too", 10_000)

    with pytest.raises(StoreRolledBackError, match=said):
        await ask()
    with pytest.raises(StoreRolledBackError):
        await client.wait("log", 0, 5.0)


@pytest.mark.parametrize("past", [False, True])
async def test_an_older_copy_of_the_sqlite_file_ends_the_client(tmp_path: Path, past: bool) -> None:
    """`past`: other processes wrote past all that the client had seen before it met the copy."""
    file = tmp_path / "consensus.db"
    url = f"sqlite:///{file}"
    first = await opened(url)
    await first.append("log", 1, 0, [b"0"], "n0")
    await first.aclose()
    copies = {path: path.read_bytes() for path in file.parent.glob("consensus.db*") if path.suffix != ".lock"}
    client = await opened(url)
    await client.append("log", 1, 1, [b"lost"], "lost")
    # The host ends, an older copy replaces the database, and another process serves it.
    client._seat.stop()  # type: ignore[attr-defined]
    for path in file.parent.glob("consensus.db-*"):
        path.unlink()
    for path, data in copies.items():
        path.write_bytes(data)
    if past:
        # In another process: the client of this one has to meet the copy afterwards.
        script = f"""
import asyncio
from tidemill.base.clock import Rand, SystemClock
from tidemill.consensus.factory import open_consensus

async def main():
    other = await open_consensus({url!r}, SystemClock(), Rand())
    await other.append("log", 1, 1, [b"1", b"2", b"3"], "n1")
    await other.aclose()

asyncio.run(main())
"""
        subprocess.run([sys.executable, "-c", script], check=True)
    with pytest.raises(StoreRolledBackError, match=f"consensus=sqlite:{file} log='log'"):
        await insist(lambda: client.log_head("log"))
    with pytest.raises(StoreRolledBackError):
        await client.append("log", 1, 4, [b"4"], "n4")
    await client.aclose()


async def test_a_sequencer_that_continues_the_database_ends_nobody(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/consensus.db"
    clients = [await opened(url) for _ in range(2)]
    first, second = clients
    for log in ("kept", "truncated"):
        await first.append(log, 1, 0, [b"0", b"1"], f"{log}-0")
        await second.read(log, 0)
    await first.truncate("truncated", 2)
    register = await first.cas("shard/a", 0, b"a", "r0")
    await second.head("shard/a")
    await first.drop("shard/a", register.seq)
    await first.acquire("lease", "holder", 60_000)
    await second.leases("lease")
    for _ in range(2):
        first._seat.stop()  # type: ignore[attr-defined]
        assert (await insist(lambda: second.log_head("kept"))).next == 2  # type: ignore[attr-defined]
        assert (await insist(lambda: first.log_head("truncated"))).start == 2  # type: ignore[attr-defined]
    await first.append("kept", 1, 2, [b"2"], "kept-2")
    assert [record.data for record in (await second.read("kept", 0)).records] == [b"0", b"1", b"2"]
    for client in clients:
        await client.aclose()
