"""Health of a capture on its node, which decides whether the node keeps it."""

from __future__ import annotations

import psycopg
import pytest

from support.capture.world import World
from support.waiting import until
from tidemill.capture.session import capture as capture_module
from tidemill.capture.setup.server_checks import ADVISORY_CLASS, advisory_lock_key

pytestmark = pytest.mark.postgres


async def test_one_that_streams_works_one_without_its_database_fails_and_one_that_waits_does_neither(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(world: World) -> None:
        await world.sql("CREATE TABLE a (id int PRIMARY KEY)")
        away = world.config()
        world.dsn, dsn = "postgresql://postgres@127.0.0.1:1/postgres", world.dsn
        async with world.capture(wait=False) as capture:
            assert capture.health() == "", "it begins"
            await until(lambda: bool(capture.health()), "its sessions fail")
            assert "127.0.0.1:1" in (capture.health() or "")
        world.dsn = dsn
        async with world.capture() as capture:
            assert capture.health() is None
        other = await psycopg.AsyncConnection.connect(dsn, autocommit=True)
        await other.execute(f"SELECT pg_advisory_lock({ADVISORY_CLASS}, {advisory_lock_key(away)})")
        async with world.capture(wait=False) as waits:
            world.tracker.fail(waits.config.mark, "a session before it failed", now_ms=world.clock.now_ms())
            await until(lambda: "another session" in str(waits.facts()["phase"]), "it waits for the lock")
            assert waits.health() == "a session before it failed"
            monkeypatch.setattr(capture_module, "WAITING_SESSION_S", 0.0)

            def lets_be() -> bool:
                return waits.health() == ""

            await until(lets_be, "the database answers it: somebody else is in its way")
            await other.close()
            await until(lambda: waits.health() is None, "it streams")

    async with World(postgres_dsn) as world:
        await scenario(world)
