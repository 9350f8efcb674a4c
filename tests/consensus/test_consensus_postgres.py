from __future__ import annotations

from typing import Any

import psycopg
import pytest

from contracts.consensus import ConsensusContract, OpenClient
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import ConflictError, UnavailableError
from tidemill.consensus.api import Consensus, LogHead, read_all_changes
from tidemill.consensus.factory import open_consensus
from tidemill.consensus.postgres.client import PostgresConsensus
from tidemill.consensus.postgres.connections import Connection, ConnectionLane
from tidemill.consensus.postgres.sql import PARTS

pytestmark = pytest.mark.postgres


class TestPostgres(ConsensusContract):
    @pytest.fixture
    def open_client(self, postgres_dsn: str) -> OpenClient:
        async def open_one() -> Consensus:
            return await open_consensus(postgres_dsn, SystemClock(), Rand())

        return open_one


@pytest.mark.parametrize(
    ("statement", "parameters"), [("SELECT %s::text", ["a\0b"]), ("SELECT 1 / %s::int8", [0])], ids=["driver", "server"]
)
async def test_a_write_that_the_driver_or_the_server_cannot_encode_had_no_effect_and_keeps_the_session(
    postgres_dsn: str, statement: str, parameters: list[object]
) -> None:
    lane = ConnectionLane(postgres_dsn, Rand(), writes=True)

    async def session(connection: Connection) -> int:
        return connection.info.backend_pid

    async def write(connection: Connection) -> None:
        await connection.execute(statement, parameters)

    before = await lane.run(session)
    with pytest.raises(UnavailableError) as caught:
        await lane.run(write)
    assert isinstance(caught.value.__cause__, psycopg.DataError)
    assert not lane.owing and not lane.away and await lane.run(session) == before
    await lane.aclose()


async def test_of_thousands_of_logs_only_those_beside_a_changed_one_are_read(postgres_dsn: str) -> None:
    client = await open_consensus(postgres_dsn, SystemClock(), Rand())
    assert isinstance(client, PostgresConsensus)
    async with await psycopg.AsyncConnection.connect(postgres_dsn, autocommit=True) as connection:
        await connection.execute(
            "INSERT INTO tidemill.logs (name, term, next) SELECT 't/' || n, 1, n FROM generate_series(1, 3000) n"
        )
    read, heads_after = 0, client._differences._heads_after

    async def counted(*asked: Any) -> list[tuple[str, LogHead]]:
        nonlocal read
        found = await heads_after(*asked)
        read += len(found)
        return found

    client._differences._heads_after = counted

    async def reported(since: str) -> tuple[dict[str, LogHead], str, int]:
        before = read
        heads, token = await read_all_changes(client, "t/", since)
        return heads, token, read - before

    heads, token, count = await reported("")
    assert len(heads) == count == 3000
    heads, token, count = await reported(token)
    assert (heads, count) == ({}, 0)
    await client.append("t/7", 1, 7, [b"r"], "n")
    await client.append("t/new", 0, 0, [b"r"], "n")
    await client.append("other", 0, 0, [b"r"], "n")
    heads, token, count = await reported(token)
    assert set(heads) == {"t/7", "t/new"} and heads["t/7"].next == 8 and count <= 2 * -(-3001 // PARTS)
    await client.fence("t/9", 5)
    await client.truncate("t/10", 3)
    heads, token, count = await reported(token)
    assert set(heads) == {"t/9", "t/10"}
    async with await psycopg.AsyncConnection.connect(postgres_dsn, autocommit=True) as connection:
        await connection.execute("UPDATE tidemill.logs SET next = next + 1 WHERE name ^@ 't/'")
    heads, token, count = await reported(token)
    assert len(heads) == count == 3001
    await client.aclose()


async def test_a_lease_of_a_clock_that_was_set_back_since_is_expired_until_its_holder_renews_it(
    postgres_dsn: str,
) -> None:
    client = await open_consensus(postgres_dsn, SystemClock(), Rand())

    async def set_back(by_ms: int) -> None:
        async with await psycopg.AsyncConnection.connect(postgres_dsn, autocommit=True) as connection:
            await connection.execute("UPDATE tidemill.leases SET expires_ms = expires_ms + %s", (by_ms,))

    await client.acquire("dead", "a", 60_000)
    await client.acquire("alive", "a", 60_000)
    await set_back(30_000)
    for lease in await client.leases(""):
        assert lease.live and lease.remaining_ms == 60_000
    with pytest.raises(ConflictError):
        await client.acquire("dead", "b", 60_000)

    await set_back(7_200_000)
    assert [(lease.live, lease.remaining_ms) for lease in await client.leases("")] == 2 * [(False, 0)]
    renewed = await client.acquire("alive", "a", 60_000)
    assert renewed.live and renewed.term == 1 and renewed.remaining_ms <= 60_000
    with pytest.raises(ConflictError):
        await client.acquire("alive", "b", 60_000)
    taken = await client.acquire("dead", "b", 60_000)
    assert taken.live and taken.term == 2
    with pytest.raises(ConflictError):
        await client.acquire("dead", "a", 60_000)
    await client.aclose()
