"""The backlog of one database: a limit ends the shapes that exceed it and no others, and age counts only while the
stream is live."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from support.shapes.consumer import COLUMNS, ENDLESS, OTHER, TABLE, row
from support.shapes.world import ShapeWorld
from support.waiting import until
from tidemill.base.clock import ManualClock
from tidemill.base.lsn import ChangePosition
from tidemill.capture.changes import Change, Fragment, Relation
from tidemill.capture.postgres.pg_snapshot import PgSnapshot
from tidemill.shapes import ShapeSettings
from tidemill.shapes.definition.definition import ShapeDefinition, Source
from tidemill.shapes.live_shape import LiveShape
from tidemill.shapes.log.log import ShapeLog
from tidemill.shapes.log.log_offset import BASE_END
from tidemill.shapes.log.row_writer import RowWriter
from tidemill.shapes.loop_share import LoopShare, Turn
from tidemill.shapes.tables.backlog import BacklogLimits
from tidemill.shapes.tables.capture_tap import ROUTED_PER_TAKE, ShapeTap
from tidemill.shapes.tables.table_consumer import TableConsumer
from tidemill.shapes.where import Type, compile_where

STREAM = SimpleNamespace(report_flushed=lambda *_: None)
WAL_END = 1_000
HOUSE_S = 1.0


@pytest.mark.postgres
async def test_f120_a_large_transaction_ends_no_shape_of_a_table_that_it_does_not_touch(postgres_dsn: str) -> None:
    ddl = (
        "CREATE TABLE big (id int PRIMARY KEY, v text); INSERT INTO big SELECT n, 'old' FROM generate_series(1, 5000) n"
        "; CREATE TABLE calm (id int PRIMARY KEY, v text); INSERT INTO calm VALUES (1, 'old')"
    )
    settings = ShapeSettings(long_poll_s=0.5, backlog=BacklogLimits(size_bytes=200_000))
    async with ShapeWorld(postgres_dsn, ddl, settings, fragment_changes=100) as world:
        calm = [await world.sync(table="calm", where=f"id > {-n}") for n in range(5)]
        touched = await world.sync(table="big", where="id % 50 = 0")
        await world.db.execute("UPDATE big SET v = 'new'")
        await world.db.execute("UPDATE calm SET v = 'new'")
        for client in calm:
            await client.follow_until(lambda c=client: _values(c.rows) == {"new"})  # type: ignore[misc]
            assert client.refetches == 0
        await touched.follow_until(lambda: _values(touched.rows) == {"new"} and len(touched.rows) == 100)
        assert world.service.facts()["fell_behind"] == touched.refetches == 1
        await until(lambda: world.sink.held_bytes == 0)


def _values(rows: dict[str, dict[str, str]]) -> set[str]:
    return {each["v"] for each in rows.values()}


class Backlog:
    """A tap with shapes of two tables, whose evaluation runs when the test asks."""

    def __init__(self, limits: BacklogLimits, *, restoring: bool = False, where: str = "") -> None:
        """`where`: clause of the shape of `TABLE`."""
        self.clock = ManualClock()
        self.sink = ShapeTap(self.clock, LoopShare(self.clock), limits)
        self.sink.restoring = restoring
        self.sink.set_carried_relations([TABLE.oid, OTHER.oid])
        self.of_table, self.of_other = self._consumer(TABLE, where), self._consumer(OTHER)
        self._lsn = 0

    def _consumer(self, relation: Relation, where: str = "") -> TableConsumer:
        definition = ShapeDefinition(Source("table", "main", "public", relation.table), where)
        compiled = compile_where(where, (), {"id": Type("int4")}) if where else None
        shape = LiveShape(relation.table, definition, b"{}", ShapeLog())
        shape.log.seal_base()
        writer = RowWriter("public", relation.table, [c.name for c in COLUMNS], ["id"], ["open"])
        consumer = TableConsumer(shape, relation, compiled, writer)
        self.sink.router.add(consumer)
        consumer.set_snapshot(PgSnapshot(1, 1, frozenset()))
        consumer.follow_immediately()
        shape.mark_ready()
        return consumer

    def commit(self, *changed: Relation, cut: int = 0, first_id: int = -1) -> int:
        """Deliver one transaction and return its LSN. With `cut`, each fragment has one relation. Ids count up from
        `first_id`, or from the LSN."""
        self._lsn += 10
        first_id = self._lsn if first_id < 0 else first_id
        changes = [
            Change(relation, "insert", ChangePosition(self._lsn, 2 * n), row(first_id + n))
            for n, relation in enumerate(changed)
        ]
        parts = [[each] for each in changes] if cut else [changes]
        for n, part in enumerate(parts):
            last = part[-1].position if part else ChangePosition(self._lsn, 0)
            fragment = Fragment(self._lsn, self._lsn, 0, n == 0, n == len(parts) - 1, tuple(part), last, (), 100)
            self.sink.process_fragment(fragment)
        return self._lsn

    def look_for(self, seconds: float) -> None:
        for _ in range(int(seconds / HOUSE_S)):
            self.clock.advance(int(HOUSE_S * 1000))
            self.sink.end_late_shapes()

    def route(self) -> None:
        self.sink.run_slice(Turn(self.clock, 0.0))


def test_catching_up_with_what_was_written_before_the_session_counts_as_no_age() -> None:
    world = Backlog(BacklogLimits(age_s=10.0))
    world.sink.begin_stream(STREAM, 0, WAL_END)  # type: ignore[arg-type]
    world.commit(TABLE, TABLE)
    world.route()
    for _ in range(20):
        world.look_for(5)
        world.commit(TABLE, TABLE)
    assert not world.of_table.shape.has_ended, "it is behind by what the stream brings at once"
    world.look_for(9)
    assert not world.of_table.shape.has_ended, "the last of it came nine seconds ago"
    world.look_for(3)
    assert world.of_table.shape.has_ended and "age_s=10" in world.of_table.shape.end_reason
    assert not world.of_other.shape.has_ended


def test_age_counts_while_the_stream_is_live_whatever_comes_meanwhile() -> None:
    world = Backlog(BacklogLimits(age_s=10.0))
    world.sink.begin_stream(STREAM, 0, 5)  # type: ignore[arg-type]
    world.commit(TABLE, TABLE)
    world.route()
    for _ in range(3):
        world.look_for(4)
        world.commit(OTHER)
    assert world.of_table.shape.has_ended


def test_the_time_before_a_change_is_routed_counts_as_no_age() -> None:
    """World 7003 of the oracle: changes waited ten seconds behind the fragments of 200,000 rows of another table. Then
    the shapes ended that had not even been offered them."""
    world = Backlog(BacklogLimits(age_s=10.0))
    world.sink.begin_stream(STREAM, 0, 5)  # type: ignore[arg-type]
    world.commit(OTHER, OTHER)
    world.look_for(12)
    world.route()
    assert world.of_other.inbox, "its turn was too short for both changes"
    world.look_for(9)
    assert not world.of_other.shape.has_ended
    world.look_for(3)
    assert world.of_other.shape.has_ended, "it had the changes for more than ten seconds"


def test_fragments_that_take_long_to_route_leave_half_of_the_time_to_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """World 7100 of the oracle: each slice routed one fragment of 200,000 rows, was over, and evaluated one change. So
    the shapes of other tables had their few changes for more than ten seconds, and ended."""
    world = Backlog(BacklogLimits(size_bytes=10_000_000))
    world.sink.begin_stream(STREAM, 0, 5)  # type: ignore[arg-type]
    world.commit(*[OTHER] * 20)
    for _ in range(50):
        world.commit(TABLE)
    route = world.sink.router.route

    def slow(changes: Sequence[Change]) -> Any:
        world.clock.advance(10)
        return route(changes)

    monkeypatch.setattr(world.sink.router, "route", slow)
    slices = 0
    while not slices or world.of_other.inbox:
        world.sink.run_slice(Turn(world.clock, world.clock.monotonic_s() + 0.004))
        slices += 1
    assert slices <= 3
    assert world.sink.held_bytes, "the rest of the fragments waits"
    while world.sink.run_slice(Turn(world.clock, world.clock.monotonic_s() + 0.004)):
        pass
    assert not world.of_table.inbox and not world.sink.held_bytes


def test_the_time_that_restoring_takes_counts_as_no_age() -> None:
    world = Backlog(BacklogLimits(age_s=10.0), restoring=True)
    world.sink.begin_stream(STREAM, 0, 5)  # type: ignore[arg-type]
    world.commit(TABLE, TABLE)
    world.look_for(30)
    world.sink.finish_restore()
    world.route()
    world.look_for(9)
    assert not world.of_table.shape.has_ended
    world.look_for(3)
    assert world.of_table.shape.has_ended


def test_a_pause_of_the_process_counts_as_no_age() -> None:
    world = Backlog(BacklogLimits(age_s=10.0))
    world.commit(TABLE, TABLE)
    world.route()
    world.look_for(2)
    world.clock.advance(60_000)
    world.sink.end_late_shapes()
    assert not world.of_table.shape.has_ended, "it had no turn either"
    world.look_for(12)
    assert world.of_table.shape.has_ended


def test_a_backlog_that_outgrows_its_bytes_while_logs_are_restored_ends_those_of_its_tables_alone() -> None:
    world = Backlog(BacklogLimits(size_bytes=20_000), restoring=True)
    world.sink.begin_stream(STREAM, 0, WAL_END)  # type: ignore[arg-type]
    mixed = world.commit(OTHER, TABLE, cut=1)
    for _ in range(40):
        world.commit(TABLE)
    assert world.of_table.shape.has_ended and not world.of_other.shape.has_ended
    assert world.sink.resumable == {OTHER.oid}
    world.sink.finish_restore()
    while world.sink.run_slice(ENDLESS):
        pass
    chunk = world.of_other.shape.log.read(BASE_END)  # type: ignore[attr-defined]
    assert [item.count(b'"last":true') for item in chunk.items] == [1], "its transaction is whole"
    assert world.sink.evaluated_position() == world.sink.taken > mixed, (
        "nothing that was left out holds the confirmation up"
    )
    assert world.sink.held_bytes == 0


def test_a_backlog_that_outgrows_its_bytes_ends_the_shape_that_holds_most_and_not_one_that_waits_for_its_turn() -> None:
    """World 4010 of the oracle: the older change of one shape was in the way of 200,000 others."""
    world = Backlog(BacklogLimits(size_bytes=20_000))
    world.sink.begin_stream(STREAM, 0, 5)  # type: ignore[arg-type]
    world.commit(OTHER, OTHER)
    world.route()
    assert world.of_other.inbox, "it has had a turn too short for both of its changes"
    for _ in range(40):
        world.commit(TABLE)
        assert world.sink.held_bytes <= 20_000
    assert world.of_table.shape.has_ended and not world.of_other.shape.has_ended
    while world.sink.run_slice(ENDLESS):
        pass
    chunk = world.of_other.shape.log.read(BASE_END)  # type: ignore[attr-defined]
    assert len(chunk.items) == 2
    assert world.sink.evaluated_position() == world.sink.taken
    assert world.sink.held_bytes == 0


def test_changes_that_match_no_shape_take_nothing_of_the_backlog_once_they_are_routed() -> None:
    """World 5026 of the oracle: a shape of one value of a column held whole fragments of a large transaction but was
    charged only for its own changes. Waiting shapes of other tables were ended instead."""
    world = Backlog(BacklogLimits(size_bytes=60_000), where="id = 7")
    world.sink.begin_stream(STREAM, 0, 5)  # type: ignore[arg-type]
    world.commit(*[OTHER] * 10)
    world.route()
    assert world.of_other.inbox, "it has had a turn too short for all of its changes"
    for _ in range(40):
        world.commit(*[TABLE] * 50, first_id=0)
    assert world.of_table.inbox and len(world.of_table.inbox[-1].changes) == 1
    assert not world.of_table.shape.has_ended and not world.of_other.shape.has_ended
    while world.sink.run_slice(ENDLESS):
        pass
    assert world.sink.held_bytes == 0


def test_a_large_transaction_on_a_table_without_shapes_ends_none_while_logs_are_restored() -> None:
    world = Backlog(BacklogLimits(size_bytes=60_000), restoring=True)
    world.sink.remove_consumer(world.of_table)
    world.sink.resumable = frozenset({OTHER.oid})
    world.sink.begin_stream(STREAM, 0, WAL_END)  # type: ignore[arg-type]
    mixed = 0
    for _ in range(40):
        mixed = world.commit(OTHER, *[TABLE] * 50)
    assert world.sink.resumable == {OTHER.oid} and not world.of_other.shape.has_ended
    assert world.sink.held_bytes <= 60_000
    world.sink.finish_restore()
    while world.sink.run_slice(ENDLESS):
        pass
    chunk = world.of_other.shape.log.read(BASE_END)  # type: ignore[attr-defined]
    assert len(chunk.items) == 40
    assert world.sink.evaluated_position() == world.sink.taken == mixed and world.sink.held_bytes == 0


def test_no_fragment_that_comes_has_more_than_a_few_others_routed_in_the_turn_of_the_capture() -> None:
    world = Backlog(BacklogLimits(size_bytes=200_000))
    world.sink.begin_stream(STREAM, 0, 5)  # type: ignore[arg-type]
    routed = [0]
    route = world.sink.router.route

    def counted(changes: Sequence[Change]) -> Any:
        routed[-1] += 1
        return route(changes)

    world.sink.router.route = counted  # type: ignore[method-assign]
    while not world.of_table.shape.has_ended:
        routed.append(0)
        world.commit(TABLE)
    assert len(routed) > 100 and max(routed) <= ROUTED_PER_TAKE
    assert sum(routed) == len(routed) - 1, "all of it was routed before the shape ended"
