"""SLC rows of the acceptance list that concern routing, replays and the ordering axiom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from support.capture.fragments import at, change, fragment
from tidemill.base.clock import ManualClock
from tidemill.base.errors import CorruptError, UnavailableError
from tidemill.capture.changes import Fragment
from tidemill.capture.delivery.collector import Collector
from tidemill.capture.delivery.consumers import FlushNotices
from tidemill.capture.postgres.standby_status import Keepalive, ReplicationStatus


class RecordingSink:
    """A sink with one consumer name that accepts everything. It flushes on request, or while it receives the commit."""

    def __init__(self, name: str = "c", *, eager: bool = False, fails: bool = False) -> None:
        self.name = name
        self.eager = eager
        self.fails = fails
        self.got: list[Fragment] = []
        self.notices: FlushNotices | None = None

    async def deliver(self, fragment: Fragment, notices: FlushNotices) -> list[str]:
        if self.fails:
            raise RuntimeError("the sink died")
        self.got.append(fragment)
        self.notices = notices
        if self.eager and fragment.commits:
            notices.report_flushed(self.name, fragment.last)
        return [self.name]

    async def aclose(self) -> None: ...


@asynccontextmanager
async def running_collector(*sinks: RecordingSink) -> AsyncIterator[Collector]:
    collector = Collector(sinks, ReplicationStatus(0), ManualClock())
    task = asyncio.ensure_future(collector.run())
    try:
        yield collector
        await settle()
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_slc1_a_replayed_transaction_is_dropped_and_still_acknowledged() -> None:
    sink = RecordingSink(eager=True)
    async with running_collector(sink) as collector:
        await collector.put(fragment(5, change(5)))
        await collector.put(fragment(7, change(7)))
        await settle()
        await collector.put(fragment(5, change(5)))
        await settle()
        assert [f.commit_lsn for f in sink.got] == [5, 7]
        assert collector.status.flushed == 7
        assert collector.tracker.pending_positions == {}


async def test_slc2_a_fragment_that_straddles_what_was_processed_is_an_error() -> None:
    async def straddle() -> None:
        async with running_collector(RecordingSink()) as collector:
            await collector.put(fragment(5, change(5, 0), change(5, 2), commits=False))
            await collector.put(fragment(5, change(5, 2), change(5, 4), begins=False))

    with pytest.raises(CorruptError):
        await straddle()


async def test_slc3_nothing_is_registered_or_seen_before_the_commit() -> None:
    async with running_collector(RecordingSink()) as collector:
        for n in range(3):
            await collector.put(fragment(5, change(5, 2 * n), begins=n == 0, commits=False))
        await settle()
        assert collector.tracker.pending_positions == {} and collector.status.last_seen_txn == 0
        await collector.put(fragment(5, change(5, 6), begins=False))
        await settle()
        assert list(collector.tracker.pending_positions) == ["c"] and collector.status.last_seen_txn == 5


async def test_a_notice_sent_while_the_commit_is_handled_comes_after_its_registration() -> None:
    async with running_collector(RecordingSink(eager=True)) as collector:
        await collector.put(fragment(5, change(5)))
        await settle()
        assert collector.tracker.pending_positions == {}
        assert collector.status.flushed == 5


async def test_slc4_a_sink_that_dies_while_it_is_served_is_not_registered() -> None:
    async def serve() -> None:
        async with running_collector(RecordingSink(fails=True)) as collector:
            await collector.put(fragment(5, change(5)))
            await settle()
            assert collector.tracker.pending_positions == {}
            assert collector.status.flushed == 0

    with pytest.raises(UnavailableError, match=r"commit=0/5 .*tables=public.t error='RuntimeError: the sink died'"):
        await serve()


async def test_a_keepalive_behind_an_undelivered_commit_does_not_confirm_it() -> None:
    """K2: a notice that is read after the commit is handled after the commit."""
    progress: list[int] = []
    collector = Collector(
        [RecordingSink()], ReplicationStatus(0), ManualClock(), on_keepalive=lambda lsn, _: progress.append(lsn)
    )
    await collector.put(fragment(5, change(5)))
    collector.put_keepalive(Keepalive(50, False), inside_txn=False)
    task = asyncio.ensure_future(collector.run())
    await settle()
    assert collector.status.flushed == 0
    collector.report_flushed("c", at(5))
    await settle()
    assert collector.status.flushed == 49
    assert progress == [49]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_put_waits_while_the_queue_is_full_and_notices_do_not() -> None:
    sink = RecordingSink(eager=True)
    collector = Collector([sink], ReplicationStatus(0), ManualClock(), queue_changes=2)
    await collector.put(fragment(5, change(5)))
    blocked = asyncio.ensure_future(collector.put(fragment(7, change(7))))
    await settle()
    assert not blocked.done()
    collector.report_flushed("c", at(1))
    task = asyncio.ensure_future(collector.run())
    await asyncio.wait_for(blocked, 40)
    await settle()
    assert len(sink.got) == 2
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
