"""Locks of the set-up and transactions of the application: PostgreSQL aborts none of these because of the set-up."""

from __future__ import annotations

import asyncio

import psycopg
import pytest

from support.capture.world import World
from support.waiting import until
from tidemill.capture.catalog.table_discovery import list_tables
from tidemill.capture.postgres.connection import PgConnection
from tidemill.capture.setup.publication import Identities, PublishRequest, create_publication, publish_tables

pytestmark = pytest.mark.postgres

TABLES = {
    "plain": ("CREATE TABLE t (id int PRIMARY KEY, v int)",),
    "partitioned": (
        "CREATE TABLE t (id int PRIMARY KEY, v int) PARTITION BY RANGE (id)",
        "CREATE TABLE t_low PARTITION OF t FOR VALUES FROM (0) TO (100)",
    ),
}
ATTEMPTS = 30


@pytest.mark.parametrize("kind", TABLES)
async def test_a_transaction_that_has_read_a_table_and_writes_it_then_goes_on_while_the_table_is_published(
    postgres_dsn: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL immediately ends a session that starts to wait for a holder of SHARE which itself waits for more (its
    proc.c).
    """
    monkeypatch.setattr("tidemill.capture.setup.publication.LOCK_PAUSE_S", 0.02)
    async with World(postgres_dsn) as world:
        await world.sql(*TABLES[kind], "INSERT INTO t VALUES (1, 0)")
        wire = await PgConnection.connect(world.dsn, purpose="test")

        class Store:
            async def store_identities(self, name: str, identities: Identities) -> None:
                """Store nothing."""

            store_asked_identities = store_identities

        try:
            config = world.config()
            await create_publication(wire, config.publication)
            waiting = (
                f"SELECT 1 FROM pg_locks WHERE NOT granted AND pid = {await wire.value('SELECT pg_backend_pid()')}"
            )
            async with await psycopg.AsyncConnection.connect(world.dsn) as application:
                await application.execute("SELECT v FROM t")
                publishing = asyncio.ensure_future(
                    publish_tables(
                        wire, config, PublishRequest(await list_tables(wire), {}, attempts=ATTEMPTS), Store()
                    )
                )

                async def waits() -> bool:
                    return bool(await world.select(waiting))

                # a check may come just after a wait timed out
                for _ in range(5):
                    await until(waits, "the set-up waits for the reader")
                    await application.execute("UPDATE t SET v = v + 1")
                await application.commit()
                assert not (await publishing).failed
        finally:
            await wire.aclose()
        assert await world.select("SELECT v FROM t") == [(5,)]
