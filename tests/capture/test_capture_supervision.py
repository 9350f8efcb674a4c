"""Every error that ends a session is reported under the capture's stage, with an age that survives restarts, and clears
after recovery.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import psycopg
import pytest

from support.capture.world import World, mark_of
from support.postgres import EmbeddedPostgres
from support.waiting import until
from tidemill.base.status.status import RESTARTS_MAX, StageState, StatusTracker
from tidemill.capture.decode import undecodable
from tidemill.capture.decode.transaction_builder import TransactionBuilder
from tidemill.capture.decode.undecodable import UndecodableMessageError
from tidemill.capture.postgres import pgoutput, replication_stream
from tidemill.capture.postgres.replication_stream import FramedMessage
from tidemill.capture.session import capture as capture_module
from tidemill.capture.session import session
from tidemill.capture.session.capture import Capture
from tidemill.capture.topics.topic_writer import TopicWriter

pytestmark = pytest.mark.postgres


class NobodyListed(BaseException):
    """An exception as native code raises it, which does not derive from `Exception`."""


async def test_f427_an_error_of_a_type_nobody_listed_ends_the_session_alone_and_its_age_survives(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repeated deaths at one LSN make the stage stuck, with the error of the last try, and it recovers after the
    repair.
    """
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE a (id int PRIMARY KEY)")
        broken = False
        real = session.prepare_session

        async def prepare(*args: Any) -> Any:
            if broken:
                raise NobodyListed("panic in native code")
            return await real(*args)

        monkeypatch.setattr(session, "prepare_session", prepare)
        async with world.capture(budget_ms=1000) as capture:
            await world.sql("INSERT INTO a VALUES (1)")
            await world.caught_up()
            broken = True
            await world.sql(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
                f" WHERE slot_name = 'tidemill_{world.name}'"
            )
            await until(lambda: mark_of(world, capture)[0].tries >= 3, "it is tried again")
            failing_since_ms = mark_of(world, capture)[0].failing_since_ms
            await until(lambda: mark_of(world, capture)[1] is StageState.STUCK, "restarting at one LSN is stuck")
            mark, _ = mark_of(world, capture)
            assert mark.error == "NobodyListed: panic in native code"
            assert mark.failing_since_ms == failing_since_ms and not mark.parked
            broken = False
            await world.sql("INSERT INTO a VALUES (2)")
            await world.caught_up()
            await until(lambda: mark_of(world, capture)[0].error == "", "it heals when it moves on")
            assert [r.key for r in await world.records("a")] == [b'{"id":1}', b'{"id":2}']


async def test_f428_a_message_that_cannot_be_read_parks_the_capture_and_says_where_and_what(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE a (id int PRIMARY KEY, v text)", "CREATE TABLE b (id int PRIMARY KEY)")
        readable = poisoned = False

        def decode(payload: bytes) -> pgoutput.Message:
            nonlocal poisoned
            poisoned = poisoned or b"poison" in payload
            if payload[:1] == b"C" and poisoned and not readable:
                raise RecursionError("nested too deep")
            return pgoutput.decode_message(payload)

        monkeypatch.setattr(undecodable, "decode_message", decode)
        async with world.capture() as capture:
            await world.sql("INSERT INTO a VALUES (1, 'good')")
            await world.caught_up()
            await world.transaction("INSERT INTO b VALUES (1)", "INSERT INTO a VALUES (2, 'poison')")
            await until(lambda: mark_of(world, capture)[0].parked, "the capture is parked")
            mark, state = mark_of(world, capture)
            assert state is StageState.STUCK and mark.held_by == "operator"
            for words in ("lsn=", "commit=", "ordinal=4", "kind=commit", "nested too deep"):
                assert words in mark.error
            assert await world.confirmed() <= await world.wal_end()
            assert len(await world.records("b")) == 0, "nothing of the transaction passes"
            readable = True
            await until(lambda: mark_of(world, capture)[0].error == "", "it heals without a restart")
            await world.caught_up()
            assert [r.key for r in await world.records("a")] == [b'{"id":1}', b'{"id":2}']
            assert len(await world.records("b")) == 1


async def test_f429_an_unreadable_message_of_one_table_parks_it_and_the_stream_goes_on(postgres_dsn: str) -> None:
    """A realistic case: without REPLICA IDENTITY FULL, a DELETE carries only its key."""
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE a (id int PRIMARY KEY, v text)", "CREATE TABLE b (id int PRIMARY KEY)")
        async with world.capture() as capture:
            current = capture._session
            await world.sql("INSERT INTO a VALUES (1, 'x'), (2, 'y')")
            await world.caught_up()
            await world.transaction(
                "ALTER TABLE a REPLICA IDENTITY DEFAULT",
                "INSERT INTO b VALUES (1)",
                "DELETE FROM a WHERE id = 1",
                "INSERT INTO b VALUES (2)",
            )
            binding = await world.caught_up()
            row = await world.paused("a", "old row")
            assert "kind=delete" in row.reason and "resnapshot" in row.fix
            assert row.paused_lsn < binding.lsn
            found = await world.records("b")
            assert [r.key for r in found] == [b'{"id":1}', b'{"id":2}']
            # The skipped change keeps its ordinal, so that later changes keep their final positions.
            assert dict(found[1].headers)["tm.pos"] == f"{row.paused_lsn}_4".encode()
            assert capture._session is current, "the session went on"


async def test_f429_a_row_too_large_to_be_carried_parks_its_table_without_being_decoded(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replication_stream, "MESSAGE_BYTES", 10_000)
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE a (id int PRIMARY KEY, v text)", "CREATE TABLE b (id int PRIMARY KEY)")
        async with world.capture() as capture:
            await world.caught_up()
            monkeypatch.setattr(undecodable, "decode_message", _decode_small)
            await world.transaction("INSERT INTO a VALUES (1, repeat('x', 20000))", "INSERT INTO b VALUES (1)")
            await world.caught_up()
            failure = world.tracker.failure(capture.config.table_mark("public.a"))
            assert failure is not None and failure.parked
            assert "too large to be carried" in failure.error
            assert "kind=insert" in failure.error and "size=20" in failure.error
            assert [r.key for r in await world.records("b")] == [b'{"id":1}']


def _decode_small(payload: bytes) -> pgoutput.Message:
    assert len(payload) < 10_000, "it was looked into"
    return pgoutput.decode_message(payload)


def test_what_is_about_no_single_table_is_not_blamed_on_one() -> None:
    for payload in (b"B", b"", b"Z123", b"T" + bytes(9), b"M\x01"):
        found = undecodable.explain_decode_failure(FramedMessage(7, payload), TransactionBuilder(), ValueError("x"))
        assert isinstance(found, UndecodableMessageError) and found.table == "" and found.position is None


def test_f430_a_server_that_is_down_is_named_with_host_and_port(tmp_path_factory: pytest.TempPathFactory) -> None:
    settings = {"fsync": "off", "shared_buffers": "16MB"}
    with EmbeddedPostgres(tmp_path_factory.mktemp("down") / "data", settings=settings) as server:
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            connection.execute("CREATE DATABASE down")

        async def scenario() -> None:
            world = World(server.dsn_for("down"))
            async with world:
                await world.sql("CREATE TABLE a (id int PRIMARY KEY)")
                async with world.capture(budget_ms=1000) as capture:
                    await world.caught_up()
                    await world.connection.close()
                    await asyncio.to_thread(server.stop)
                    await until(
                        lambda: mark_of(world, capture)[1] is StageState.STUCK, "stuck within budget + 5 s", 6.0
                    )
                    mark, _ = mark_of(world, capture)
                    at = psycopg.conninfo.conninfo_to_dict(server.dsn)
                    assert f"server={at['host']}:{at['port']}" in mark.error
                    assert mark.held_by == f"postgres:{at['host']}:{at['port']}"
                    await asyncio.to_thread(server.start)
                    world.connection = await psycopg.AsyncConnection.connect(world.dsn, autocommit=True)
                    await world.sql("INSERT INTO a VALUES (1)")
                    await world.caught_up()
                    assert mark_of(world, capture)[0].error == ""

        asyncio.run(scenario())


async def test_a_large_transaction_and_a_first_copy_are_moving_and_never_stuck(postgres_dsn: str) -> None:
    """No LSN can be confirmed for seconds, while rows are copied or a transaction is written."""
    async with World(postgres_dsn) as world:
        rows = "g, repeat('x', 50) FROM generate_series({}, {}) g"
        await world.sql("CREATE TABLE a (id int PRIMARY KEY, v text)")
        await world.sql("INSERT INTO a SELECT " + rows.format(1, 150_000))
        seen: set[StageState] = set()
        longest_ms = 0

        async def watch(capture: Capture, until_done: asyncio.Future[Any]) -> None:
            nonlocal longest_ms
            while not until_done.done():
                mark, state = mark_of(world, capture)
                seen.add(state)
                longest_ms = max(
                    longest_ms, world.clock.now_ms() - mark.since_ms if state is not StageState.IDLE else 0
                )
                await asyncio.sleep(0.02)

        async with world.capture(wait=False, budget_ms=1500) as capture:
            copied = asyncio.ensure_future(until(lambda: capture.streaming, "it streams"))
            await watch(capture, copied)
            await world.sql("INSERT INTO a SELECT " + rows.format(200_001, 450_000))
            tagged = asyncio.ensure_future(world.caught_up())
            await watch(capture, tagged)
        assert StageState.MOVING in seen
        assert StageState.STUCK not in seen, f"stood for {longest_ms} ms"


async def test_a_process_that_dies_in_each_first_copy_is_stuck_with_an_age_that_restarts_keep(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process creates its own slot at another LSN and shows progress, yet the capture gets nowhere."""
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE a (id int PRIMARY KEY, v text)")
        await world.sql("INSERT INTO a SELECT g, repeat('x', 500) FROM generate_series(1, 3000) g")
        bursts, may_write = 0, asyncio.Event()
        write_rows = TopicWriter.write_copied_rows

        async def slowly(self: TopicWriter, *args: Any) -> None:
            nonlocal bursts
            bursts += 1
            if bursts > 1:
                await may_write.wait()
            await write_rows(self, *args)

        def copies(capture: Capture) -> bool:
            return bursts > 1 and mark_of(world, capture)[0].progress > 0

        monkeypatch.setattr(TopicWriter, "write_copied_rows", slowly)
        ages = []
        for life in range(RESTARTS_MAX + 2):
            bursts = 0
            async with world.capture(wait=False) as capture:
                await until(partial(copies, capture), "rows are copied")
                mark, _ = mark_of(world, capture)
                assert mark.restarts == life
                ages.append(mark.since_ms)
                last = world.tracker.report("p", world.clock.now_ms())
            world.tracker = StatusTracker()  # killed: nothing was cleaned up
            world.tracker.adopt_last_report(last)
            await world.sql(f"INSERT INTO a VALUES ({10_000 + life})")
        assert ages[:RESTARTS_MAX] == sorted(set(ages[:RESTARTS_MAX])), "some restarts in a long copy are no failure"
        assert set(ages[RESTARTS_MAX:]) == {ages[RESTARTS_MAX - 1]}
        assert f"restarted {RESTARTS_MAX + 1} times" in mark.reason
        may_write.set()
        async with world.capture() as capture:
            await until(lambda: mark_of(world, capture)[0].restarts == 0, "it goes on once a copy ends")


async def test_a_restart_leaves_a_capture_that_streamed_where_it_stood(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        before = StatusTracker()
        before.set("capture:" + world.name, 77, 90, now_ms=1_000, unit="lsn")
        before.fail("capture:" + world.name, "OSError: away", now_ms=2_000)
        world.tracker.adopt_last_report(before.report("p", 3_000))
        capture = world.new_capture()
        mark, _ = mark_of(world, capture)
        assert (mark.position, mark.since_ms, mark.restarts) == (77, 1_000, 1)
        world.tracker.fail(capture.config.mark, "OSError: away", now_ms=world.clock.now_ms())
        mark, state = mark_of(world, capture)
        assert (mark.failing_since_ms, mark.tries, state) == (2_000, 2, StageState.STUCK)


async def test_a_mark_that_cannot_be_published_ends_the_capture_and_is_told_to_its_owner(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statuses that are no longer updated would look healthy."""
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE a (id int PRIMARY KEY)")

        def broken(_: Capture) -> None:
            raise NobodyListed("no marks")

        monkeypatch.setattr(capture_module.Capture, "_publish_status", broken)
        capture = world.new_capture()
        with pytest.raises(NobodyListed):
            await asyncio.wait_for(capture.run(), 20)
        await capture.aclose()
