"""Rows of docs/internals/capture-scenarios.md that end in a shape: routing, stitching, and the log in memory."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.shapes.consumer import COLUMNS, ENDLESS, OTHER, Bench, row
from support.shapes.world import Client, ShapeWorld
from tidemill.base.clock import ManualClock
from tidemill.capture.changes import Fragment
from tidemill.capture.delivery.collector import Collector
from tidemill.capture.delivery.consumers import FlushNotices, TapRegistry
from tidemill.capture.postgres.pg_snapshot import PgSnapshot
from tidemill.capture.postgres.standby_status import ReplicationStatus
from tidemill.shapes.definition.definition import ShapeDefinition, Source
from tidemill.shapes.live_shape import LiveShape
from tidemill.shapes.log.chunks import split_chunk
from tidemill.shapes.log.items import LogItem
from tidemill.shapes.log.log import LogLimits, ShapeLog
from tidemill.shapes.log.log_offset import BASE_END, LogOffset
from tidemill.shapes.log.row_writer import RowWriter
from tidemill.shapes.loop_share import LoopShare, Turn
from tidemill.shapes.tables.backlog import BacklogLimits
from tidemill.shapes.tables.capture_tap import ShapeTap
from tidemill.shapes.tables.table_consumer import TableConsumer


class Durable:
    """A sink that confirms everything immediately."""

    async def deliver(self, fragment: Fragment, notices: FlushNotices) -> list[str]:
        if fragment.commits:
            notices.report_flushed("c", fragment.last)
        return ["c"]

    async def aclose(self) -> None: ...


def consumer_of(sink: ShapeTap, handle: str) -> TableConsumer:
    """One more shape of Bench's table, which sees everything from its first fragment on."""
    shape = LiveShape(handle, ShapeDefinition(Source("table", "main", "public", "t"), ""), b"{}", ShapeLog())
    shape.log.seal_base()
    consumer = TableConsumer(
        shape, Bench().consumer.relation, None, RowWriter("public", "t", [c.name for c in COLUMNS], ["id"], ["open"])
    )
    sink.router.add(consumer)
    return consumer


def test_er2_a_commit_without_changes_of_a_shape_reaches_those_that_were_touched_and_no_other() -> None:
    bench = Bench()
    untouched = Bench("id = 9")
    fragments = bench.fragments(5, ("insert", None, row(1)), ("insert", None, row(2), OTHER), size=1)
    assert [[c.relation for c in f.changes] for f in fragments][1] == [OTHER], "the commit brings nothing for it"
    for fragment in fragments:
        bench.take(fragment)
        untouched.take(fragment)
    assert bench.operations == ["insert 1"]
    assert bench.items[0]["headers"]["last"] is True
    assert bench.shape.last_seen == untouched.sink.last_seen_by(untouched.consumer) == fragments[-1].commit_lsn
    assert (untouched.items, untouched.shape.last_seen) == ([], 0)


def test_er3_a_shape_added_in_the_middle_of_a_transaction_has_it_from_its_snapshot_and_joins_the_next_one() -> None:
    bench = Bench()
    first, second = bench.fragments(5, ("insert", None, row(1)), ("insert", None, row(2)), size=1)
    bench.take(first)
    late = consumer_of(bench.sink, "late")
    must_see = bench.sink.recent
    assert must_see == {5}, "its snapshot is taken once this transaction is visible"
    bench.take(second)
    late.set_snapshot(PgSnapshot(6, 6, frozenset(), lsn=1 << 40))
    while late.publish_waiting(ENDLESS):
        pass
    late.shape.mark_ready()
    bench.commit(6, ("insert", None, row(3)))
    assert [bytes(i).count(b'"id":"3"') for i in late.shape.log.read(BASE_END).items] == [1]
    assert bench.operations == ["insert 1", "insert 2", "insert 3"]


async def test_c11_a_replay_past_a_collector_that_knows_nothing_adds_nothing_to_a_shape() -> None:
    """Taps outlive sessions: the next one's collector begins before everything, the shape does not."""
    bench = Bench()
    first = bench.fragments(5, ("insert", None, row(1)), ("insert", None, row(2)), size=1)
    second = bench.fragments(6, ("update", row(1), row(1, "later")))
    third = bench.fragments(7, ("insert", None, row(3)))

    async def session(taps: TapRegistry, fragments: list[Fragment]) -> int:
        collector = Collector([Durable()], ReplicationStatus(0), ManualClock(), taps=taps)
        task = asyncio.ensure_future(collector.run())
        for fragment in fragments:
            await collector.put(fragment)
        while collector.status.flushed < fragments[-1].commit_lsn:
            await asyncio.sleep(0)
            assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while bench.sink.run_slice(ENDLESS):
            pass
        return collector.status.flushed

    taps = TapRegistry(ManualClock())
    taps.add(bench.sink)
    await session(taps, [*first, *second])
    assert await session(taps, [*first, *second, *third]) == third[-1].commit_lsn, "acknowledged all the same"
    assert bench.operations == ["insert 1", "insert 2", "update 1", "insert 3"]


def late_and_young() -> tuple[ManualClock, ShapeTap, TableConsumer, TableConsumer]:
    """Two shapes with a transaction each that was routed but not evaluated to its end: one 11 s old, one 9 s."""
    clock = ManualClock()
    sink = ShapeTap(clock, LoopShare(clock), BacklogLimits(age_s=10.0))
    wedged = consumer_of(sink, "wedged")
    bench = Bench()
    nothing = Turn(clock, 0.0)
    sink.process_fragment(bench.fragments(5, ("insert", None, row(1)), ("insert", None, row(3)))[0])
    sink.run_slice(nothing)
    sink.turns._ready.clear()  # simulate a hanging consumer: it never gets a turn again
    clock.advance(2_000)
    working = consumer_of(sink, "working")
    sink.process_fragment(bench.fragments(6, ("insert", None, row(2)), ("insert", None, row(4)))[0])
    sink.run_slice(nothing)
    clock.advance(9_000)
    return clock, sink, wedged, working


def test_slc8_a_shape_that_hangs_ends_when_its_oldest_change_is_too_old_and_holds_nothing_any_more() -> None:
    _, sink, wedged, _ = late_and_young()
    sink.end_late_shapes()
    assert wedged.shape.has_ended and "it fell behind: age_s=10" in wedged.shape.end_reason
    assert wedged not in sink.router.consumers()
    assert sink.fell_behind == 1


def test_slc9_a_shape_that_works_or_waits_for_its_snapshot_is_kept_however_long_that_takes() -> None:
    clock, sink, _, working = late_and_young()
    for _ in range(3):  # a few of those that are late end at a time
        sink.end_late_shapes()
    assert not working.shape.has_ended
    while sink.run_slice(ENDLESS):
        pass
    assert not working.inbox and working.pending_bytes > 0, "evaluated, and kept until its snapshot is known"
    clock.advance(3_600_000)
    sink.end_late_shapes()
    assert not working.shape.has_ended
    working.set_snapshot(PgSnapshot(1, 1, frozenset(), lsn=1 << 40))
    while working.publish_waiting(ENDLESS):
        pass
    assert [b'"id":"2"' in i for i in working.shape.log.read(BASE_END).items] == [True, False], "both rows"


STEPS = st.lists(st.sampled_from(["stage", "publish", "unstage", "read"]), max_size=60)


@given(STEPS, st.integers(1, 90))
def test_st7_a_reader_between_any_two_steps_of_the_writer_has_every_shown_item_once(
    steps: list[str], chunk_bytes: int
) -> None:
    log = ShapeLog(LogLimits(chunk_bytes=chunk_bytes))
    log.seal_base()
    shown: list[bytes] = []
    staged: list[bytes] = []
    read: list[bytes] = []
    at, number = BASE_END, 0

    def once() -> bool:
        nonlocal at
        chunk = log.read(at)
        read.extend(split_chunk(chunk.items))
        at = chunk.end
        return chunk.complete

    for step in [*steps, "publish"]:
        if step == "stage":
            number += 1
            text = b'{"n":%d}' % number
            log.stage(LogItem(LogOffset(number, 0), text))
            staged.append(text)
        elif step == "publish":
            log.publish()
            shown += staged
            staged = []
        elif step == "unstage":
            log.unstage()
            staged = []
        else:
            once()
        assert read == shown[: len(read)]
    while not once():
        pass
    assert read == shown


@pytest.mark.postgres
async def test_st11_who_asks_while_the_base_is_read_gets_all_of_it(postgres_dsn: str) -> None:
    """Ten concurrent clients, the first of which creates the shape, a base of many chunks, and concurrent writes."""
    ddl = "CREATE TABLE item (id int PRIMARY KEY, name text); INSERT INTO item SELECT g, repeat('x', 400)"
    ddl += " FROM generate_series(1, 4000) g"
    async with ShapeWorld(postgres_dsn, ddl) as world:
        clients = [Client(world, {"table": "item"}) for _ in range(10)]
        reading = [asyncio.ensure_future(client.catch_up()) for client in clients]
        for n in range(4001, 4011):
            await world.db.execute(f"INSERT INTO item VALUES ({n}, 'y')")  # type: ignore[arg-type]
        await asyncio.gather(*reading)
        for client in clients:
            await client.follow_until(lambda client=client: len(client.rows) == 4010)  # type: ignore[misc]
            assert client.refetches == 0
        assert len({client.handle for client in clients}) == 1
