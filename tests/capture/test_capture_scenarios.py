"""Rows of docs/internals/capture-scenarios.md that need no database: tracker, collector, binder and grammar."""

from __future__ import annotations

import asyncio

import pytest

from support.capture.fragments import T, at, change, fragment
from tidemill.base.clock import ManualClock, Rand
from tidemill.base.errors import CorruptError, UnavailableError
from tidemill.base.lsn import ChangePosition
from tidemill.capture.changes import Fragment
from tidemill.capture.decode.transaction_builder import TransactionBuilder, merge_relation
from tidemill.capture.delivery.collector import QUEUE_FRAGMENTS, Collector
from tidemill.capture.delivery.consumers import FlushNotices
from tidemill.capture.delivery.flush_tracker import FlushTracker
from tidemill.capture.postgres.pgoutput import Begin, Commit, Insert, RelationMessage, WireColumn
from tidemill.capture.postgres.standby_status import ReplicationStatus
from tidemill.capture.topics.binder import Binder, CommitBoundary
from tidemill.consensus.memory import MemoryConsensus
from tidemill.shards.bindings.remap import LogRemap


class Sink:
    """A sink that accepts fragments, raises at the positions of `poison`, and flushes immediately if it is `eager`."""

    def __init__(self, *, eager: bool = False, poison: frozenset[ChangePosition] = frozenset()) -> None:
        self.eager = eager
        self.poison = poison
        self.got: list[Fragment] = []

    async def deliver(self, fragment: Fragment, notices: FlushNotices) -> list[str]:
        if fragment.last in self.poison:
            raise RuntimeError("the sink died")
        self.got.append(fragment)
        if self.eager and fragment.commits:
            notices.report_flushed("c", fragment.last)
        return ["c"]

    async def aclose(self) -> None: ...


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def ended_with(collector: Collector) -> BaseException | None:
    """Return the error that ended the collector's task, or None while it still runs."""
    task = asyncio.ensure_future(collector.run())
    await settle()
    if task.done():
        return task.exception()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return None


def test_ft13_two_that_hang_are_freed_in_turn_and_the_acknowledgement_goes_step_by_step() -> None:
    tracker = FlushTracker()
    for lsn, consumer in ((3, "first"), (6, "second"), (9, "other")):
        assert tracker.commit(fragment(lsn), [consumer], 0) is None
    assert tracker.record_flush("other", at(9), 0) == 1, "held below the first one's transaction"
    assert tracker.blocking_consumer() == "first"
    assert tracker.record_flush("first", at(3), 0) == 4, "held below the second one's"
    assert tracker.blocking_consumer() == "second"
    assert tracker.record_flush("second", at(6), 0) == 9
    assert tracker.pending_positions == {}


async def test_slc5_a_sink_that_dies_on_a_later_fragment_leaves_no_entry_of_that_transaction() -> None:
    sink = Sink(poison=frozenset({at(5, 2)}))
    collector = Collector([sink], ReplicationStatus(0), ManualClock())
    await collector.put(fragment(5, change(5, 0), commits=False))
    await collector.put(fragment(5, change(5, 2), begins=False))
    assert isinstance(await ended_with(collector), UnavailableError)
    assert len(sink.got) == 1
    assert collector.tracker.pending_positions == {}
    assert (collector.status.flushed, collector.status.last_seen_txn) == (0, 0)


def test_slc11_a_table_that_is_gone_before_it_is_looked_up_has_all_columns_as_its_key() -> None:
    columns = (WireColumn("v", 25, -1, True), WireColumn("id", 23, -1, True))
    message = RelationMessage(77, "public", "gone", "f", columns)
    assert [c.name for c in merge_relation(message, None).key_columns] == ["v", "id"]


async def test_slc14_what_comes_before_the_collector_runs_waits_in_order_and_its_sender_beyond_the_bound() -> None:
    sink = Sink(eager=True)
    collector = Collector([sink], ReplicationStatus(0), ManualClock())
    for lsn in range(1, QUEUE_FRAGMENTS + 1):
        await collector.put(fragment(lsn, change(lsn)))
    sender = asyncio.ensure_future(collector.put(fragment(1000, change(1000))))
    await settle()
    assert not sender.done() and sink.got == []
    task = asyncio.ensure_future(collector.run())
    await asyncio.wait_for(sender, 20)
    while len(sink.got) <= QUEUE_FRAGMENTS:
        await asyncio.sleep(0)
    await settle()
    assert [f.commit_lsn for f in sink.got] == [*range(1, QUEUE_FRAGMENTS + 1), 1000]
    assert collector.status.flushed == 1000
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("commits", [False, True])
async def test_c13_a_fragment_of_no_open_transaction_is_an_error(commits: bool) -> None:
    sink = Sink(eager=True)
    collector = Collector([sink], ReplicationStatus(0), ManualClock())
    await collector.put(fragment(5, change(5)))
    await collector.put(fragment(7, change(7), begins=False, commits=commits))
    assert isinstance(await ended_with(collector), CorruptError)
    assert [f.commit_lsn for f in sink.got] == [5]


def test_c13_messages_of_no_open_transaction_are_an_error() -> None:
    for message in (Insert(T.oid, ["1", "x"]), Commit(100, 140, 0)):
        with pytest.raises(CorruptError):
            TransactionBuilder({T.oid: T}).feed_message(message)
    converter = TransactionBuilder({T.oid: T})
    converter.feed_message(Begin(100, 0, 7))
    with pytest.raises(CorruptError):
        converter.feed_message(Begin(200, 0, 8))


async def test_st6_what_became_durable_within_one_interval_is_one_notice() -> None:
    clock = ManualClock()
    bound: list[ChangePosition] = []
    remap = LogRemap(MemoryConsensus(clock), "capture/x", clock, Rand(1))
    binder = Binder(remap, clock, bound.append, interval_ms=0, idle_ms=10_000)
    await binder.open()
    binder.start_at({"t": [0]}, gate=0)
    for n in range(1, 51):
        binder.add_durable([CommitBoundary(n, at(n), True, n, [("t", 0, n)])])
    task = asyncio.ensure_future(binder.run())
    while not bound:
        await asyncio.sleep(0)
        assert not task.done()
    await settle()
    assert bound == [at(50)]
    assert [binding.offsets["t"] for binding in await remap.after(0)] == [(50,)]
    task.cancel()
