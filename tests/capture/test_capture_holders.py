"""The slot: it advances when all consumers flush, it never passes one that has not, and the blocking
consumer is named.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from support.capture.world import World
from support.waiting import slowness, until
from tidemill.base.status.status import StageState, derive_status
from tidemill.capture.changes import Change, Fragment
from tidemill.capture.decode.batches import split_batch
from tidemill.capture.delivery.consumers import FlushNotices

pytestmark = pytest.mark.postgres


class HoldingSink:
    """A sink that keeps fragments in memory and flushes on request."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.got: list[Fragment] = []
        self.notices: FlushNotices | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def deliver(self, fragment: Fragment, notices: FlushNotices) -> list[str]:
        await self.gate.wait()
        self.notices = notices
        self.got.append(fragment)
        return [self.name] if fragment.changes else []

    def flush(self) -> None:
        assert self.notices is not None
        self.notices.report_flushed(self.name, self.got[-1].last)

    async def aclose(self) -> None: ...


async def confirmed_reaches(world: World, lsn: int) -> None:
    async def reached() -> bool:
        return await world.confirmed() >= lsn

    await until(reached, f"confirmed reaches {lsn}")


async def test_slc7_an_unflushed_sink_holds_the_slot_and_is_named_and_its_flush_frees_it(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        sink = HoldingSink("shape:wedged")
        await world.sql("CREATE TABLE a (id int PRIMARY KEY)")
        async with world.capture(sinks=[sink], heartbeat_s=0.1) as capture:
            await world.caught_up()
            before = await world.wal_end()
            await confirmed_reaches(world, before)
            await world.sql("INSERT INTO a VALUES (1)")
            await world.caught_up()
            commit = next(f for f in sink.got if f.changes).commit_lsn
            # Time passes with heartbeats and keepalives: the commit stays unconfirmed.
            await world.bound(commit)
            for _ in range(3):
                await world.caught_up()
            assert await world.confirmed() <= commit
            capture._publish_status()
            mark = next(m for m in world.tracker.report("p", 0).marks if m.name == f"capture:{world.name}")
            assert mark.held_by == "shape:wedged"
            assert mark.position <= commit < mark.target
            stuck = derive_status(mark, "p", mark.since_ms + 20_000, mark.since_ms + 20_000)
            assert stuck.state is StageState.STUCK
            assert capture.facts()["pending"] != {}
            sink.flush()
            await confirmed_reaches(world, await world.wal_end())


def transactions(fragments: Sequence[Fragment]) -> list[tuple[int, int, tuple[Change, ...]]]:
    """Return the transactions with changes; those of one read are one batch, and another session reads others."""
    whole = [each for fragment in fragments for each in split_batch(fragment)]
    return [(each.xid, each.commit_lsn, tuple(each.changes)) for each in whole if each.changes]


async def test_rc2_what_was_not_flushed_is_delivered_again_after_a_restart(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        sink = HoldingSink("shape:slow")
        await world.sql("CREATE TABLE a (id int PRIMARY KEY)")
        async with world.capture(sinks=[sink]):
            await world.sql("INSERT INTO a VALUES (1)", "INSERT INTO a VALUES (2)")
            await world.caught_up()
        delivered = transactions(sink.got)
        assert len(delivered) == 2
        sink.got = []
        async with world.capture(sinks=[sink]):
            await world.caught_up()
            assert transactions(sink.got) == delivered
            assert len(await world.records("a")) == 2
            sink.flush()


async def test_rc3_the_connection_survives_a_sink_that_blocks_longer_than_wal_sender_timeout(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        sink, slow = HoldingSink("shape:blocked"), slowness()
        await world.sql(
            "CREATE TABLE a (id int PRIMARY KEY, v text)",
            f"ALTER ROLE postgres IN DATABASE \"{world.name}\" SET wal_sender_timeout = '{int(600 * slow)}ms'",
        )
        async with world.capture(sinks=[sink], queue_changes=100):
            await world.caught_up()
            pid = await world.select("SELECT active_pid FROM pg_replication_slots WHERE active_pid IS NOT NULL")
            sink.gate.clear()
            # More than the socket's and the queue's buffers hold, so that reading really stops.
            await world.sql("INSERT INTO a SELECT g, repeat('x', 1000) FROM generate_series(1, 20000) g")
            await asyncio.sleep(2.5 * slow)
            assert pid == await world.select("SELECT active_pid FROM pg_replication_slots WHERE active_pid IS NOT NULL")
            sink.gate.set()
            tag = asyncio.ensure_future(world.caught_up())
            await tag
            sink.flush()


async def test_what_was_held_for_a_copy_is_confirmed_once_it_is_over_though_nobody_writes_any_more(
    postgres_dsn: str,
) -> None:
    """Seed 201 of the oracle: the position was confirmed only with the next commit, heartbeat or status that was due
    anyway, up to fifteen seconds later, while the status showed no remaining work.
    """
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE a (id int PRIMARY KEY)")
        async with world.capture(heartbeat_s=600.0, table_poll_s=600.0) as capture:
            await world.caught_up()
            session = capture._session
            assert session is not None and session.adder is not None and session.collector is not None
            status = session.collector.status
            # Each check of the tables ends with no copy in progress. This one has ended; the next is ten minutes away.
            assert await session.adder.is_being_added("public.none") is False
            session.adder.wal_hold.set_copying(True)
            held = status.hold
            await world.sql("INSERT INTO a VALUES (1)")
            at = await world.wal_end()
            await world.caught_up()
            await until(lambda: status.flushed > at, "all of it is flushed")
            await until(
                lambda: session._reports.due.is_set() is False and status.sent == held, "the server is told of none"
            )
            capture._publish_status()
            assert (mark := world.tracker.mark(f"capture:{world.name}")) is not None and mark.position < mark.target
            session.adder.wal_hold.set_copying(False)
            assert session._reports.due.is_set(), "not with the next status that is due anyway"
            await confirmed_reaches(world, at)
