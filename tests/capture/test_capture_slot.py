"""WAL retained by the slot: its growth, the time at which it is full, and the open transaction that keeps confirmed
WAL.
"""

from __future__ import annotations

import psycopg
import pytest

from support.capture.world import World
from support.waiting import until
from tidemill.capture.config import CaptureConfig
from tidemill.capture.postgres.errors import SlotLostError
from tidemill.capture.session import server_watch
from tidemill.capture.session.server_watch import WalRetention
from tidemill.capture.setup.server_checks import SlotState, check_slot


def test_a_slot_that_grows_says_when_it_is_full() -> None:
    seen = WalRetention(window_s=60)
    assert seen.full_in_s is None
    for second in range(0, 200, 10):
        seen.record(float(second), second * 1_000, 1_000_000 - second * 1_000)
        if second < 30:
            assert seen.grows_bytes_per_s == 0.0  # too early to say
    assert seen.grows_bytes_per_s == 1_000
    assert seen.full_in_s == (1_000_000 - 190_000) // 1_000
    # A checkpoint recycled most of it: the retained WAL does not grow over the window.
    seen.record(200.0, 0, 1_000_000)
    assert seen.grows_bytes_per_s == 0.0 and seen.full_in_s is None


def test_growth_is_that_of_the_window_not_of_all_time() -> None:
    seen = WalRetention(window_s=60)
    for second in range(0, 600, 5):
        seen.record(float(second), min(second, 300) * 1_000, None)
    assert seen.grows_bytes_per_s == 0.0
    assert seen.full_in_s is None
    assert len(seen._seen) <= 14


def test_a_slot_beyond_its_limit_is_full_now() -> None:
    seen = WalRetention(window_s=60)
    seen.record(0.0, 0, 10)
    seen.record(60.0, 6_000, -5)
    assert seen.full_in_s == 0


def test_a_slot_that_was_idle_for_too_long_is_told_as_that() -> None:
    config = CaptureConfig("shop", "")
    idle = SlotState(1, None, "lost", 0, None, 1, invalidated="idle_timeout")
    with pytest.raises(SlotLostError, match="reason=idle_timeout") as caught:
        check_slot(config, idle)
    assert caught.value.fix.startswith("Raise idle_replication_slot_timeout.")


@pytest.mark.postgres
async def test_the_open_transaction_that_keeps_wal_is_named(postgres_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_watch, "PIN_BYTES", 1 << 20)
    monkeypatch.setattr(server_watch, "SLOT_POLL_IDLE_S", 0.2)
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
        async with world.capture() as capture, await psycopg.AsyncConnection.connect(postgres_dsn) as idler:
            assert capture.facts()["slot_pinned_by"] == ""
            await idler.execute("INSERT INTO t VALUES (0, 'open')")
            pid = idler.info.backend_pid
            await world.sql(
                "INSERT INTO t SELECT g, repeat(md5(g::text), 50) FROM generate_series(1, 3000) g", "CHECKPOINT"
            )
            await world.caught_up()

            def named() -> bool:
                facts = capture.facts()
                return f"pid={pid} " in str(facts["slot_pinned_by"]) and int(str(facts["slot_pinned_bytes"])) > 1 << 20

            await until(named, "who keeps the WAL is named")
            await idler.rollback()
            await world.sql("CHECKPOINT")

            async def let_go() -> bool:
                await world.sql("INSERT INTO t VALUES (-1, '') ON CONFLICT DO NOTHING", "DELETE FROM t WHERE id = -1")
                await world.sql("SELECT pg_log_standby_snapshot()")
                return capture.facts()["slot_pinned_by"] == ""

            await until(let_go, "nobody keeps it any more")


@pytest.mark.postgres
async def test_a_failover_slot_is_made_where_it_is_asked_for(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE t (id int PRIMARY KEY)")
        async with world.capture(failover=True):
            mine = f"FROM pg_replication_slots WHERE slot_name = 'tidemill_{world.name}'"
            assert await world.select(f"SELECT failover {mine}") == [(True,)]
