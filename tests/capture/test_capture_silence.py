"""A PostgreSQL that does not answer is never taken for an idle one, and the blocker is named."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from support.capture.proxy import Proxy
from support.capture.world import World, mark_of
from support.waiting import slowness, until
from tidemill.base.clock import ManualClock, SystemClock
from tidemill.base.errors import UnavailableError
from tidemill.base.limits import FRESHNESS_BUDGET_MS
from tidemill.base.status.status import StageState
from tidemill.capture.postgres import control_connection
from tidemill.capture.postgres.control_connection import OpenQueries
from tidemill.capture.session import bootstrap, server_watch
from tidemill.capture.setup.blockers import Blocker
from tidemill.capture.setup.server_checks import ADVISORY_CLASS, advisory_lock_key

pytestmark = pytest.mark.postgres

GRACE_S = 5.0
"""Fraction of the freshness budget within which the blocker has to be named."""
BUDGET_MS = 3_000


async def until_in_time(check: Callable[[], object], otherwise: str, budget_ms: int) -> None:
    """Like `until`, but fail if it takes longer than promised."""
    began_s = time.monotonic()
    await until(check, otherwise)
    assert time.monotonic() - began_s < (budget_ms / 1000 + GRACE_S) * slowness(), otherwise


class JumpingClock(ManualClock):
    """A manual clock whose wall clock can be set."""

    wall_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.wall_ms

    def monotonic_s(self) -> float:
        return super().now_ms() / 1000


def test_a_wall_clock_that_jumps_makes_no_question_old() -> None:
    clock = JumpingClock()
    answers = OpenQueries(clock)
    with answers.track("a question"):
        clock.wall_ms = 3_600_000
        assert answers.oldest_overdue() is None
        clock.advance(control_connection.OVERDUE_AFTER_MS + 1000)
        assert answers.oldest_overdue() == ("a question", clock.now_ms() - control_connection.OVERDUE_AFTER_MS - 1000)
    assert answers.oldest_overdue() is None


def test_a_question_that_is_given_up_stays_open_for_its_age_to_go_on() -> None:
    """Statuses are written between the end of the query and that of its session. The reported failure must not clear in
    between.
    """
    clock = ManualClock()
    answers = OpenQueries(clock)

    def asked(what: str, ends: UnavailableError) -> None:
        with answers.track(what):
            clock.advance(10_000)
            raise ends

    with pytest.raises(UnavailableError, match="does not answer"):
        asked("a question", control_connection.no_answer_error("server", "a question", 10))
    assert answers.oldest_overdue() == ("a question", clock.now_ms() - 10_000)
    with pytest.raises(UnavailableError, match="too many"):
        asked("another", UnavailableError("too many clients."))
    assert answers.oldest_overdue() == ("a question", clock.now_ms() - 20_000)


async def walsender_of(world: World) -> int:
    ((pid,),) = await world.select(
        f"SELECT active_pid FROM pg_replication_slots WHERE slot_name = 'tidemill_{world.name}'"
    )
    return int(pid)


def test_a_stream_is_not_given_up_where_walsenders_have_no_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A walsender without a timeout sends nothing while it skips a large transaction: its stream would be closed again
    and again.
    """
    monkeypatch.setattr(server_watch, "ASK_AFTER_S", 0.01)
    monkeypatch.setattr(server_watch, "SILENCE_S", 0.02)

    async def main(timeout_ms: int) -> int:
        asked = 0

        def ask() -> None:
            nonlocal asked
            asked += 1

        async def busy() -> Blocker:
            """A walsender that always looks busy."""
            return Blocker(1, "", "", "replication streaming", 0, "")

        answers = OpenQueries(SystemClock())
        stream = server_watch.StreamWatch(
            "server", SystemClock(), answers, ask, timeout_ms, busy=busy, tell=lambda _: None
        )
        stream.record_wait()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stream.run(), 0.2)
        return asked

    assert asyncio.run(main(0)) > 3
    with pytest.raises(UnavailableError, match="does not answer: server"):
        asyncio.run(main(20))


async def test_f431_a_server_behind_a_black_hole_is_stuck_and_named_within_its_budget(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE a (id int PRIMARY KEY)")
        async with Proxy(postgres_dsn) as proxy:
            straight, world.dsn = world.dsn, proxy.dsn
            async with world.capture(budget_ms=BUDGET_MS) as capture:
                await world.caught_up()
                await until(lambda: mark_of(world, capture)[1] is StageState.IDLE, "it is idle")
                proxy.swallow()
                stuck = "stuck within budget + 5 s"
                await until_in_time(lambda: mark_of(world, capture)[1] is StageState.STUCK, stuck, BUDGET_MS)
                mark, _ = mark_of(world, capture)
                assert mark.held_by == f"postgres:127.0.0.1:{proxy.port}"
                assert f"server=127.0.0.1:{proxy.port}" in mark.error and "does not answer" in mark.error
                assert mark.target > mark.position, "never idle"
                # Its age continues while the session is closed and the reconnect hangs as well.
                since_ms = mark.failing_since_ms
                await until(lambda: mark_of(world, capture)[0].tries >= 2, "the session is given up")
                assert mark_of(world, capture)[0].failing_since_ms == since_ms
                assert mark_of(world, capture)[1] is StageState.STUCK
                proxy.flow()
                await world.sql("INSERT INTO a VALUES (1)")
                await world.caught_up()
                await until(lambda: mark_of(world, capture)[0].error == "", "it heals")
            world.dsn = straight


async def test_f432_a_walsender_that_is_frozen_is_told_and_heals(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control connection answers and only the stream is silent, since its process is stopped."""
    monkeypatch.setattr(server_watch, "ASK_AFTER_S", 1.0)
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE a (id int PRIMARY KEY)")
        async with world.capture(budget_ms=BUDGET_MS) as capture:
            await world.caught_up()
            pid = await walsender_of(world)
            os.kill(pid, signal.SIGSTOP)
            try:

                def reported() -> bool:
                    mark, state = mark_of(world, capture)
                    return state is StageState.STUCK and "a keepalive of the stream" in mark.error

                await until_in_time(reported, "stuck, and the silent stream is named", BUDGET_MS)
                assert mark_of(world, capture)[0].held_by.startswith("postgres:")
            finally:
                os.kill(pid, signal.SIGCONT)
            await until(lambda: mark_of(world, capture)[0].error == "", "it heals, in the same session")
            await world.sql("INSERT INTO a VALUES (1)")
            await world.caught_up()


async def test_f432_wal_that_is_not_sent_is_named_with_its_server_before_anything_is_overdue(postgres_dsn: str) -> None:
    """A status below its target names its blocker immediately, and a working walsender is recognised within
    the budget.
    """
    assert server_watch.ASK_AFTER_S * 2 * 1000 < FRESHNESS_BUDGET_MS
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE a (id int PRIMARY KEY)")
        async with world.capture(budget_ms=BUDGET_MS) as capture:
            await world.caught_up()
            pid = await walsender_of(world)
            os.kill(pid, signal.SIGSTOP)
            try:
                await world.sql("INSERT INTO a VALUES (1)")

                def names_the_server() -> bool:
                    """Return whether the server is the blocker. WAL that was read may still wait for its topics."""
                    mark, _ = mark_of(world, capture)
                    assert mark.target <= mark.position or (mark.held_by and (mark.reason or mark.error)), mark
                    return mark.target > mark.position and mark.held_by.startswith("postgres:")

                await until_in_time(names_the_server, "the server is named", BUDGET_MS)
            finally:
                os.kill(pid, signal.SIGCONT)
            await world.caught_up()


async def test_f432_a_stream_that_stays_silent_ends_its_session(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_watch, "ASK_AFTER_S", 0.2)
    monkeypatch.setattr(server_watch, "SILENCE_S", 1.0)
    monkeypatch.setattr(server_watch, "SILENCE_OF_TIMEOUT", 0.0)
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE a (id int PRIMARY KEY)")
        async with world.capture() as capture:
            await world.caught_up()
            first = capture._session
            pid = await walsender_of(world)
            os.kill(pid, signal.SIGSTOP)
            try:
                await until(lambda: capture._session is not first, "another session begins")
                await until(lambda: f"pid={pid}" in str(capture.facts()["phase"]), "the old walsender is named")
                assert f"slot=tidemill_{world.name}" in str(capture.facts()["phase"])
                assert mark_of(world, capture)[0].held_by == f"postgres-pid:{pid}"
            finally:
                os.kill(pid, signal.SIGCONT)
            await world.sql("INSERT INTO a VALUES (1)")
            await world.caught_up()


async def test_f432_a_walsender_that_works_through_what_nobody_captures_is_not_told_as_silent(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A walsender reads its input once half of wal_sender_timeout has passed, and no sooner."""
    monkeypatch.setattr(server_watch, "ASK_AFTER_S", 0.1)
    monkeypatch.setattr(control_connection, "OVERDUE_AFTER_MS", 0)
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE a (id int PRIMARY KEY)", "CREATE TABLE other (id int)")
        async with world.capture(tables=("a",)) as capture:
            await world.caught_up()
            seen: set[str] = set()

            async def passed() -> bool:
                mark, _ = mark_of(world, capture)
                if "the walsender works" in mark.reason:
                    seen.add(mark.held_by)
                    assert "a keepalive" not in mark.error, "who works does not fail to answer"
                return binding.done()

            await world.sql("INSERT INTO other SELECT generate_series(1, 1000000)")
            binding = asyncio.ensure_future(world.caught_up())
            await until(passed, "the stream goes on behind it")
            await binding
            pid = await walsender_of(world)
            assert f"postgres-pid:{pid}" in seen, "and it is named while it works"
            await until(lambda: mark_of(world, capture)[0].held_by == "", "it holds nothing any more")


async def test_f433_whoever_has_the_captures_name_is_named_with_pid_application_client_and_state(
    postgres_dsn: str,
) -> None:
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE a (id int PRIMARY KEY)")
        other = await psycopg.AsyncConnection.connect(world.dsn, autocommit=True, application_name="bobs psql")
        await other.execute(f"SELECT pg_advisory_lock({ADVISORY_CLASS}, {advisory_lock_key(world.config())})")
        pid = other.info.backend_pid
        async with world.capture(wait=False, budget_ms=1000) as capture:
            await until_in_time(lambda: mark_of(world, capture)[1] is StageState.STUCK, "stuck within its budget", 1000)
            mark, _ = mark_of(world, capture)
            assert mark.held_by == f"postgres-pid:{pid}"
            named = f"pid={pid} application='bobs psql' client=127.0.0.1 state='idle'"
            assert named in mark.reason, mark.reason
            await other.close()
            await until(lambda: capture.streaming, "it goes on when the other ends")
            await world.caught_up()


@pytest.mark.parametrize("table", ["a", "other"])
async def test_f434_a_transaction_that_the_set_up_waits_for_is_named_with_pid_and_query(
    postgres_dsn: str, table: str
) -> None:
    """Two waits: for the captured table's lock, and for the slot, which waits for every writing transaction."""
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE a (id int PRIMARY KEY)", "CREATE TABLE other (id int)")
        writer = await psycopg.AsyncConnection.connect(world.dsn, application_name="nightly job")
        await writer.execute(f"INSERT INTO {table} VALUES (1)")
        pid, query = writer.info.backend_pid, f"query='INSERT INTO {table} VALUES (1)'"
        async with world.capture(wait=False, budget_ms=1000, tables=("a",)) as capture:

            def reported() -> bool:
                mark, state = mark_of(world, capture)
                named = "application='nightly job' client=127.0.0.1 state='idle in transaction'"
                by_pid = mark.held_by == f"postgres-pid:{pid}"
                return state is StageState.STUCK and by_pid and named in mark.reason and query in mark.reason

            await until_in_time(reported, f"stuck, and the writer of {table} is named", 1000)
            await writer.rollback()
            await until(lambda: capture.streaming, "it goes on when the writer ends")
            await world.caught_up()
        await writer.close()


async def test_f434_a_transaction_that_the_first_copy_waits_for_is_named(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transaction locks the table between its publication and its snapshot, which runs in a separate session."""
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE a (id int PRIMARY KEY)")
        other = await psycopg.AsyncConnection.connect(world.dsn, application_name="migration")
        real = bootstrap.copy_tables

        async def take_snapshot(*args: Any) -> Any:
            await other.execute("LOCK TABLE a IN ACCESS EXCLUSIVE MODE")
            return await real(*args)

        monkeypatch.setattr(bootstrap, "copy_tables", take_snapshot)
        async with world.capture(wait=False, budget_ms=1000) as capture:

            def reported() -> bool:
                mark, state = mark_of(world, capture)
                return state is StageState.STUCK and mark.held_by == f"postgres-pid:{other.info.backend_pid}"

            await until_in_time(reported, "stuck, and the migration is named", 1000)
            assert "application='migration'" in mark_of(world, capture)[0].reason
            await other.rollback()
            await until(lambda: capture.streaming, "it goes on when the migration ends")
            await world.caught_up()
        await other.close()


async def test_a_synchronous_standby_that_is_away_holds_neither_set_up_nor_heartbeats(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits of other sessions wait for the standby, yet the stream contains them."""
    monkeypatch.setattr(control_connection, "ANSWER_DEADLINE_S", 1.0)
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE a (id int PRIMARY KEY)", "SET synchronous_commit = local")
        try:
            await world.sql("ALTER SYSTEM SET synchronous_standby_names = 'nobody'", "SELECT pg_reload_conf()")
            async with world.capture(heartbeat_s=0.1) as capture:
                await world.caught_up()
                first, confirmed = capture._session, await world.confirmed()
                beats_s = time.monotonic() + 2 * control_connection.ANSWER_DEADLINE_S

                async def went_on() -> bool:
                    return time.monotonic() > beats_s and await world.confirmed() > confirmed

                await until(went_on, "heartbeats are confirmed")
                assert capture._session is first, "none of them ended the session"
                await world.sql("INSERT INTO a VALUES (1)")
                await world.caught_up()
                assert await world.folded("a") == {'{"id":1}': {"id": 1}}
        finally:
            await world.sql("ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")
