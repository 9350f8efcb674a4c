"""Batches of whole transactions: split, seen partly before, registered once, and divided where a table is paused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from support.capture.fragments import OTHER, T, at, change, fragment
from support.waiting import until
from tidemill.base.clock import ManualClock, Rand
from tidemill.base.lsn import ChangePosition
from tidemill.capture.changes import Change, Fragment
from tidemill.capture.decode.batches import BatchBuilder, drop_replayed, split_batch
from tidemill.capture.decode.transaction_builder import TransactionBuilder
from tidemill.capture.delivery.collector import Collector
from tidemill.capture.delivery.flush_tracker import FlushTracker
from tidemill.capture.postgres.pgoutput import Begin, Commit, Insert, LogicalMessage
from tidemill.capture.postgres.standby_status import ReplicationStatus
from tidemill.capture.topics.batch_sender import SendPace
from tidemill.capture.topics.binder import CommitBoundary
from tidemill.capture.topics.captured_table import MAX_ROW_BYTES, CapturedTable
from tidemill.capture.topics.topic_writer import TopicWriter
from tidemill.metastore.catalogue import TopicRow
from tidemill.topics.api import ProduceResult


def batch_of(fragments: Iterable[Fragment]) -> Fragment:
    builder = BatchBuilder()
    for each in fragments:
        builder.add(each.xid, each.commit_lsn, each.commit_time_ms, list(each.changes), len(each.changes), 10)
    batch = builder.take_fragment()
    assert batch is not None
    return batch


THREE = (fragment(3, change(3), change(3, 2)), fragment(5), fragment(8, change(8)))


def test_a_batch_consists_of_its_transactions() -> None:
    batch = batch_of(THREE)
    assert (batch.first_lsn, batch.commit_lsn, batch.last, batch.size_bytes) == (3, 8, at(8), 30)
    found = [(f.xid, f.commit_lsn, f.commit_time_ms, tuple(f.changes), f.last) for f in split_batch(batch)]
    assert found == [(f.xid, f.commit_lsn, f.commit_time_ms, f.changes, f.last) for f in THREE]
    assert batch_of(THREE[:2]).last == at(5), "a transaction without changes ends at its commit"


def test_a_batch_that_was_seen_partly_loses_those_transactions() -> None:
    batch = batch_of(THREE)
    assert drop_replayed(batch, 2) is batch
    for lsn, left in ((3, [5, 8]), (4, [5, 8]), (5, [8])):
        rest = drop_replayed(batch, lsn)
        assert [f.commit_lsn for f in split_batch(rest)] == left
        assert [c.position for c in rest.changes] == [at(8)]


def test_only_whole_transactions_without_markers_join_a_batch() -> None:
    builder = TransactionBuilder({1: T}, max_changes=2)
    builder.batches = True

    def feed(lsn: int, rows: int, *more: Any) -> list[Any]:
        inserts = [Insert(1, (str(row), "x")) for row in range(rows)]
        return [builder.feed_message(m) for m in (Begin(lsn, 0, lsn), *inserts, *more, Commit(lsn, lsn + 1, 0))]

    assert feed(3, 1) == [None, None, None]
    marked = feed(5, 0, LogicalMessage(True, 5, "tidemill", b"tag"))[-1]
    assert marked.batch is None and [m.content for m in marked.markers] == ["tag"]
    before = builder.batch.take_fragment()
    assert before is not None and before.batch is not None and before.batch.lsns == [3]
    assert builder.batch.take_fragment() is None
    parts = [out for out in feed(7, 5) if out is not None]
    assert [f.batch for f in parts] == [None] * len(parts) and parts[-1].commits


def test_a_consumer_of_a_batch_has_nothing_of_it_before_it_flushes() -> None:
    tracker = FlushTracker()
    tracker.commit(fragment(2, change(2)), ["other"], 0)
    assert tracker.commit(batch_of(THREE), ["mine"], 0) is None
    assert tracker.record_flush("other", at(2), 0) == 1, "nothing from 3 on is durable"
    assert tracker.record_flush("mine", at(5), 0) == 4
    assert tracker.record_flush("mine", at(8), 0) == 8


async def test_a_batch_is_delivered_and_registered_once_without_what_was_processed() -> None:
    got: list[Fragment] = []

    class Sink:
        async def deliver(self, fragment: Fragment, notices: Any) -> list[str]:
            got.append(fragment)
            return ["c"]

        async def aclose(self) -> None: ...

    collector = Collector([Sink()], ReplicationStatus(0), ManualClock())
    task = asyncio.ensure_future(collector.run())
    await collector.put(fragment(3, change(3)))
    await collector.put(batch_of((fragment(3, change(3)), fragment(5, change(5)), fragment(8, change(8)))))
    await asyncio.sleep(0)
    collector.report_flushed("c", at(5))
    await asyncio.sleep(0)
    assert [[f.commit_lsn for f in split_batch(each)] for each in got] == [[3], [5, 8]]
    assert (collector.status.flushed, collector.status.received) == (4, 8)
    collector.report_flushed("c", at(8))
    await asyncio.sleep(0)
    assert collector.status.flushed == 8
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class CountingLog:
    """A topic log in which everything is durable in the next turn of the loop."""

    def __init__(self) -> None:
        self.ends: dict[str, int] = {}

    def produce_nowait(self, topic_id: str, partition: int, data: bytearray, **_: Any) -> asyncio.Future[ProduceResult]:
        future: asyncio.Future[ProduceResult] = asyncio.get_running_loop().create_future()
        base = self.ends.get(topic_id, 0)
        self.ends[topic_id] = base + int.from_bytes(data[57:61], "big")
        future.set_result(ProduceResult(base, -1, 0))
        return future


async def written(batch: Fragment, *, paused: tuple[int, int] | None = None) -> list[tuple[int, dict[str, int]]]:
    """Write a batch; return the LSN and offsets of each boundary."""
    done: list[CommitBoundary] = []
    tables = [CapturedTable(r.name, TopicRow(r.table, r.table, 1), 1 << 62, oid=r.oid) for r in (T, OTHER)]

    async def pause(table: CapturedTable, lsn: int, error: BaseException) -> None:
        await asyncio.sleep(0)
        writer.pause_table(table.oid, lsn)

    topics: Any = CountingLog()
    writer = TopicWriter("topics", tables, topics, Rand(1), done.extend, pause)
    for table in tables:
        table.writers[0].start_at(0, 0, None)
    if paused is not None:
        writer.pause_table(*paused)
    notices: Any = None
    assert await writer.deliver(batch, notices) == ["topics"]
    await writer.wait_drained()
    await writer.aclose()
    return [(b.lsn, {topic: offset for topic, _, offset in b.offsets}) for b in done]


async def test_a_server_that_requests_a_reply_ends_the_gap_between_rounds() -> None:
    table = CapturedTable(T.name, TopicRow(T.table, T.table, 1), 1 << 62, oid=T.oid)
    done: list[CommitBoundary] = []
    topics: Any = CountingLog()
    writer = TopicWriter("topics", [table], topics, Rand(1), done.extend, pace=SendPace(3600.0))
    table.writers[0].start_at(0, 0, None)
    notices: Any = None
    for lsn in (3, 5, 8):
        await writer.deliver(fragment(lsn, change(lsn)), notices)
        await asyncio.sleep(0.01)
    writer.record_keepalive(9)
    await asyncio.sleep(0.01)
    assert [b.lsn for b in done] == [3], "after silence; the others wait for an hour"
    writer.record_keepalive(9, reply_requested=True)
    await until(lambda: [b.lsn for b in done] == [3, 5, 8, 9])
    await writer.aclose()


def wide(position: ChangePosition) -> Change:
    return Change(OTHER, "insert", position, {"id": "1", "v": "x" * (MAX_ROW_BYTES + 1)})


async def test_a_batch_has_one_boundary() -> None:
    batch = batch_of((*THREE, fragment(9, change(9, 0, OTHER))))
    assert await written(batch) == [(9, {"t": 3, "other": 1})]


async def test_a_row_that_cannot_be_written_divides_its_batch_at_its_transaction() -> None:
    batch = batch_of(
        (
            fragment(3, change(3), change(3, 2, OTHER)),
            fragment(5, change(5, 0, OTHER), change(5, 2), wide(at(5, 4)), change(5, 6)),
            fragment(8, change(8), change(8, 2, OTHER)),
        )
    )
    assert await written(batch) == [(3, {"t": 1, "other": 1}), (5, {"t": 3}), (8, {"t": 4})]


async def test_a_table_that_is_paused_within_a_batch_stays_bound_up_to_there() -> None:
    batch = batch_of((fragment(3, change(3, 0, OTHER)), fragment(5, change(5, 0, OTHER)), fragment(8, change(8))))
    assert await written(batch, paused=(OTHER.oid, 5)) == [(3, {"other": 1}), (5, {}), (8, {"t": 1})]
