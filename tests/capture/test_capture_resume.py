"""Restarts and snapshots: nothing is lost and nothing is doubled after an interruption at any point."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import pytest

from support.capture.gate import Gate
from support.capture.on_every_server import (
    TWO_TABLES,
    Writer,
    test_captures_cut_off_at_random_moments_resume_exactly_once,
    test_h14_a_transaction_open_across_the_set_up_is_not_lost,
)
from support.capture.world import World, assert_no_position_twice, positions, table_as_folded
from support.waiting import until
from tidemill.base.errors import UnavailableError, UnknownOutcomeError
from tidemill.metastore.catalogue import TopicRow
from tidemill.topics.partition.recovery import partition_log

__all__ = [
    "test_captures_cut_off_at_random_moments_resume_exactly_once",
    "test_h14_a_transaction_open_across_the_set_up_is_not_lost",
]

pytestmark = pytest.mark.postgres


async def test_a_snapshot_beside_running_writers_loses_and_doubles_nothing(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*TWO_TABLES, *[f"INSERT INTO {t} SELECT g, g FROM generate_series(100, 20000) g" for t in "ab"])
        writers = [Writer(world.dsn, seed) for seed in range(3)]
        running = [asyncio.ensure_future(writer.run()) for writer in writers]
        await until(lambda: sum(w.transactions for w in writers) > 20, "writers write")
        async with world.capture():
            await until(lambda: sum(w.transactions for w in writers) > 200, "writers go on")
            # A table whose lock was not free immediately is added while streaming.
            await world.flowing("a", "b")
            for writer in writers:
                writer.stop()
            await asyncio.gather(*running)
            await world.caught_up()
            for table in "ab":
                assert await world.folded(table) == await table_as_folded(world, table)
                assert_no_position_twice(await world.records(table))
            row = await world.row()
            assert row.snapshot_done and row.generation == 1


async def test_appends_of_an_abandoned_session_that_land_late_are_counted_or_refused(postgres_dsn: str) -> None:
    """Every append to a topic's log takes up to 0.3 s, so each abandoned session leaves appends in flight. Its
    successor opens, counts and writes while they land.
    """
    async with World(postgres_dsn) as world:
        rng = random.Random(13)
        append = world.consensus.append

        async def slow(log: str, *args: Any, **kwargs: Any) -> Any:
            if log.startswith("topic/"):
                await asyncio.sleep(rng.random() * 0.3)
            return await append(log, *args, **kwargs)

        await world.sql(*TWO_TABLES)
        async with world.capture():
            await world.caught_up()
        world.consensus.append = slow
        writer = Writer(world.dsn, 4)
        running = asyncio.ensure_future(writer.run())
        for _ in range(8):
            capture = world.new_capture(fragment_changes=2)
            task = asyncio.ensure_future(capture.run())
            await until(lambda c=capture: c.streaming, "the capture streams")  # type: ignore[misc]
            await asyncio.sleep(0.1 + rng.random() * 0.3)
            await capture.aclose()
            await asyncio.gather(task, return_exceptions=True)
        writer.stop()
        await running
        async with world.capture():
            await world.caught_up()
            for table in "ab":
                assert await world.folded(table) == await table_as_folded(world, table)
                assert_no_position_twice(await world.records(table))


async def test_restart_without_news_writes_nothing_again(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*TWO_TABLES, "INSERT INTO a VALUES (1, 1)")
        async with world.capture():
            await world.sql("INSERT INTO a VALUES (2, 2)")
            await world.caught_up()
        before = await world.records("a")
        async with world.capture():
            await world.caught_up()
        assert await world.records("a") == before
        assert (await world.row()).generation == 1


async def test_c11_records_that_landed_unconfirmed_are_not_written_twice(postgres_dsn: str) -> None:
    """The remap is down: records are durable, nothing is bound, nothing may be confirmed. The next session counts."""
    async with World(postgres_dsn) as world:
        await world.sql(*TWO_TABLES)
        async with world.capture():
            await world.caught_up()
        capture = world.new_capture()
        remap = world.remap()

        async def refuse(_: object) -> Any:
            raise UnavailableError("the remap is down.")

        remap.mint = refuse  # type: ignore[method-assign,assignment]
        capture._session_context = msgspec.structs.replace(capture._session_context, remap=remap)
        confirmed = await world.confirmed()
        task = asyncio.ensure_future(capture.run())
        await until(lambda: capture.streaming, "the capture streams")
        for i in range(20):
            await world.transaction(
                f"INSERT INTO a VALUES ({i}, {i})", f"SELECT pg_logical_emit_message(true, 'tidemill', 'mark-{i}')"
            )

        async def landed() -> bool:
            return len(await world.records("a")) == 20

        await until(landed, "the records are durable")
        commit = positions(await world.records("a"))[0].commit_lsn
        assert confirmed <= await world.confirmed() <= commit
        await capture.aclose()
        await asyncio.gather(task, return_exceptions=True)
        async with world.capture():
            await world.sql("INSERT INTO a VALUES (100, 100)")
            await world.caught_up()
            records = await world.records("a")
            assert len(records) == 21
            assert_no_position_twice(records)
            # Markers of transactions whose records were there already are still bound exactly at their commits.
            a = await world.topic_id("a")
            for i in range(20):
                assert (await world.tagged(f"mark-{i}")).offsets[a] == (i + 1,)


async def test_st10_a_snapshot_that_was_cut_off_starts_over_on_new_topics(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*TWO_TABLES, "INSERT INTO a SELECT g, g FROM generate_series(1, 30000) g")
        gate = Gate(world.topics)
        gate.closed = True  # copied rows do not become durable, so the copy does not end
        capture = world.new_capture(topics=gate)
        task = asyncio.ensure_future(capture.run())
        await until(lambda: int(capture.facts().get("snapshot_rows", 0)) > 0, "rows are copied")  # type: ignore[call-overload]
        await capture.aclose()
        await asyncio.gather(task, return_exceptions=True)
        row = await world.row()
        assert not row.snapshot_done
        assert await world.remap().latest() is None
        old = await world.topic_id("a")
        async with world.capture():
            await world.caught_up()
            assert (await world.row()).generation == 2
            assert await world.topic_id("a") != old
            assert await world.folded("a") == await table_as_folded(world, "a")
            assert len(await world.records("a")) == 30000


async def test_a_table_added_later_is_copied_and_joins_the_bindings(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*TWO_TABLES, "INSERT INTO b VALUES (1, 1), (2, 2)")
        async with world.capture(tables=("a",)):
            await world.sql("INSERT INTO a VALUES (1, 1)")
            await world.caught_up()
        a = await world.topic_id("a")
        await world.sql("INSERT INTO b VALUES (3, 3)", "INSERT INTO a VALUES (2, 2)")
        async with world.capture(tables=("a", "b")):
            await world.flowing("b")
            await world.sql("UPDATE b SET v = 30 WHERE id = 3")
            binding = await world.caught_up()
            assert await world.topic_id("a") == a
            assert await world.folded("a") == await table_as_folded(world, "a")
            assert await world.folded("b") == await table_as_folded(world, "b")
            assert binding.offsets == {a: (2,), await world.topic_id("b"): (4,)}
        async with world.capture(tables=("a",)):
            await world.sql("INSERT INTO b VALUES (4, 4)")
            await world.caught_up()
        async with world.capture(tables=("a", "b")):
            await world.flowing("b")
            await world.caught_up()
            assert await world.folded("b") == await table_as_folded(world, "b")


async def test_unknown_and_failed_appends_are_sent_again_and_land_once(postgres_dsn: str) -> None:
    """The store of appends returns "unknown" (with or without effect) and "unavailable" at random."""
    async with World(postgres_dsn) as world:
        rng = random.Random(3)
        append = world.consensus.append
        faults = 0

        async def flaky(log: str, *args: Any, **kwargs: Any) -> Any:
            nonlocal faults
            roll = rng.random()
            if (not log.startswith(("topic/", "partition/")) and "remap" not in log) or roll > 0.2:
                return await append(log, *args, **kwargs)
            faults += 1
            if roll < 0.08:
                await append(log, *args, **kwargs)
                raise UnknownOutcomeError("the answer was lost.")
            if roll < 0.14:
                raise UnknownOutcomeError("the request was lost.")
            raise UnavailableError("the store is away.")

        await world.sql(*TWO_TABLES)
        world.consensus.append = flaky
        writer = Writer(world.dsn, 1)
        running = asyncio.ensure_future(writer.run())
        async with world.capture():
            # A busy machine gathers more transactions into each append.
            await until(lambda: writer.transactions > 150 and faults > 3, "the writer goes on, and appends fail")
            writer.stop()
            await running
            await world.caught_up()
            for table in "ab":
                assert await world.folded(table) == await table_as_folded(world, table)
                assert_no_position_twice(await world.records(table))


async def test_topics_that_lose_their_leader_over_and_over_get_every_record_once(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*TWO_TABLES)
        writer = Writer(world.dsn, 5)
        running = asyncio.ensure_future(writer.run())

        async def usurp() -> None:
            """A newer term on every partition: the leader's next append is fenced, and it reopens."""
            for _ in range(12):
                await asyncio.sleep(0.08)
                for row in await world.catalogue.list(TopicRow):
                    log = partition_log(row.topic_id, 0)
                    await world.consensus.fence(log, (await world.consensus.log_head(log)).term + 1)

        async with world.capture():
            await usurp()
            writer.stop()
            await running
            await world.caught_up()
            for table in "ab":
                assert await world.folded(table) == await table_as_folded(world, table)
                assert_no_position_twice(await world.records(table))


async def test_a_lost_server_connection_ends_the_session_and_the_next_one_goes_on(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*TWO_TABLES)
        async with world.capture():
            await world.sql("INSERT INTO a VALUES (1, 1)")
            await world.sql(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
                f" WHERE slot_name = 'tidemill_{world.name}'"
            )
            await world.sql("INSERT INTO a VALUES (2, 2)")
            await world.caught_up()
            assert [r.key for r in await world.records("a")] == [b'{"id":1}', b'{"id":2}']


async def test_rc10_two_captures_of_one_name_take_turns(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*TWO_TABLES)
        async with world.capture() as first:
            second = world.new_capture(topics=world.topics)
            waiting = asyncio.ensure_future(second.run())
            await until(lambda: "another session" in str(second.facts()["phase"]), "the second waits for the lock")
            assert not second.streaming
            await world.sql("INSERT INTO a VALUES (1, 1)")
            await world.caught_up()
            await first.aclose()
            await until(lambda: second.streaming, "the second takes over")
            await world.sql("INSERT INTO a VALUES (2, 2)")
            await world.caught_up()
            await second.aclose()
            await asyncio.gather(waiting, return_exceptions=True)
        assert len(await world.records("a")) == 2


async def test_a_table_made_anew_and_a_new_table_are_taken_in_while_running(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*TWO_TABLES, "INSERT INTO a VALUES (1, 1)")
        async with world.capture(table_poll_s=0.05):
            await world.caught_up()
            old = await world.topic_id("a")
            await world.sql("DROP TABLE a", TWO_TABLES[0], "INSERT INTO a VALUES (2, 2)")
            await world.sql("CREATE TABLE c (id int PRIMARY KEY, v int)", "INSERT INTO c VALUES (3, 3)")
            await world.sql("INSERT INTO b VALUES (1, 1)")

            async def taken_in() -> bool:
                """Return whether the new topic exists; the old one is deleted first."""
                row = await world.catalogue.get(TopicRow, f"{world.name}.public.a")
                return row is not None and row.topic_id != old

            await until(taken_in, "the table is copied again")
            await world.flowing("a", "c")
            await world.caught_up()
            for table in "abc":
                assert await world.folded(table) == await table_as_folded(world, table)
            # A keyless table must not stop a running capture.
            await world.sql("CREATE TABLE keyless (id int)", "INSERT INTO b VALUES (2, 2)")
            await asyncio.sleep(0.2)
            await world.caught_up()
            assert await world.folded("b") == await table_as_folded(world, "b")
