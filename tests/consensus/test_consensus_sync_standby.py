"""A PostgreSQL whose commits wait for a synchronous standby: nothing that a failover would lose is acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from support.lagging_standby import Pair, until
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import UnavailableError, UnknownOutcomeError
from tidemill.consensus.api import Consensus, resolve_append
from tidemill.consensus.factory import open_consensus
from tidemill.consensus.postgres import connections, lost_writes

pytestmark = pytest.mark.postgres

ONE_WAITS = "SELECT count(*) = 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
NOT_CONFIRMED = "synchronous standby does not confirm"


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    made.require_standby()
    yield made
    made.close()


async def opened(url: str) -> Consensus:
    return await open_consensus(url, SystemClock(), Rand())


async def until_resolved(client: Consensus) -> bool:
    async with asyncio.timeout(60):
        while True:
            try:
                return await resolve_append(client, "log", 1, "second")
            except UnavailableError:
                await asyncio.sleep(0.1)


async def test_a_commit_that_its_standby_does_not_confirm_stays_invisible_and_is_not_acknowledged(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "WORK_TIMEOUT_S", 1.0)
    monkeypatch.setattr(connections, "UNAVAILABLE_AFTER_S", 1.0)
    writer, other = await opened(pair.url), await opened(pair.url)
    await writer.append("log", 1, 0, [b"first"], "first")
    pair.cut_off()
    with pytest.raises(UnknownOutcomeError):
        await writer.append("log", 1, 1, [b"second"], "second")
    with pytest.raises(UnavailableError, match=NOT_CONFIRMED):
        await resolve_append(writer, "log", 1, "second")
    assert (await other.log_head("log")).next == 1
    until(pair.primary.dsn, ONE_WAITS)

    pair.fail_over()
    assert not await until_resolved(writer)
    assert (await writer.append("log", 1, 1, [b"again"], "again")).next == 2
    for client in (writer, other):
        await client.aclose()


async def test_a_commit_whose_wait_for_the_standby_was_ended_is_acknowledged_once_the_standby_has_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "UNAVAILABLE_AFTER_S", 1.0)
    monkeypatch.setattr(lost_writes, "REPLICATION_TIMEOUT_S", 1.0)
    writer = await opened(pair.url)
    await writer.append("log", 1, 0, [b"first"], "first")
    pair.cut_off()
    writing = asyncio.ensure_future(writer.append("log", 1, 1, [b"second"], "second"))
    await asyncio.to_thread(until, pair.primary.dsn, ONE_WAITS)
    with psycopg.connect(pair.primary.dsn, autocommit=True) as connection:
        # As a restart of the server: the commit becomes visible, and the standby lacks it.
        connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
    with pytest.raises(UnknownOutcomeError):
        await writing
    until(pair.primary.dsn, "SELECT next = 2 FROM tidemill.logs WHERE name = 'log'")
    for _ in range(2):
        with pytest.raises(UnavailableError, match=NOT_CONFIRMED):
            await resolve_append(writer, "log", 1, "second")

    pair.rejoin()
    assert await until_resolved(writer)
    pair.fail_over()
    assert await until_resolved(writer)
    await writer.aclose()


async def test_a_client_that_closes_does_not_end_the_wait_of_a_commit(pair: Pair) -> None:
    writer, other = await opened(pair.url), await opened(pair.url)
    await writer.append("log", 1, 0, [b"first"], "first")
    pair.cut_off()
    writing = asyncio.ensure_future(writer.append("log", 1, 1, [b"second"], "second"))
    await asyncio.to_thread(until, pair.primary.dsn, ONE_WAITS)
    await writer.aclose()
    with pytest.raises(UnknownOutcomeError):
        await writing
    assert (await other.log_head("log")).next == 1
    until(pair.primary.dsn, ONE_WAITS)
    pair.rejoin()
    async with asyncio.timeout(30):
        while (await other.log_head("log")).next == 1:
            await asyncio.sleep(0.05)
    await other.aclose()
