"""Tables with `sequence_by` equal a batch job over the topic, for any order of records, steps, writers and kills."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.spark.sequence_world import (
    VALUES,
    Killed,
    Record,
    SequenceWorld,
    commands_of,
    fold,
    max_by,
    rank,
    schema_of,
)
from tidemill.shards.parts.row_hash import hash_rows
from tidemill.shards.parts.schema import arrow_type
from tidemill.spark import tombstones as tombstones_module
from tidemill.spark.merge.commands import Truncate
from tidemill.spark.merge.mirror import Mirror
from tidemill.spark.merge.resolve import KeyChanges, resolve_in_sequence
from tidemill.spark.merge.sequence import Sequence, SequenceRule, tombstone_schema
from tidemill.spark.merge.sequence_ranks import rank_rows

FOREVER_S = 1e9
TYPES = st.one_of(
    st.sampled_from([(name,) for name in VALUES]),
    st.lists(st.sampled_from(sorted(VALUES)), min_size=2, max_size=3).map(tuple),
)


@st.composite
def topics(draw: st.DrawFn, types: tuple[str, ...], steps: tuple[int, ...] = (0, 0, 1, 2)) -> list[Record]:
    """Return a topic of one partition: times never decrease. `steps`: of the time, in ms."""
    records, time = [], 0
    for number in range(draw(st.integers(0, 25))):
        time += draw(st.sampled_from(steps))
        sequence = tuple(draw(st.sampled_from(VALUES[name])) for name in types)
        deleted = draw(st.integers(0, 2)) == 0
        records.append((draw(st.integers(0, 3)), sequence, None if deleted else number, time))
    return records


SCHEDULES = st.lists(
    st.tuples(st.sampled_from(["step", "compute", "append", "restart"]), st.integers(0, 1), st.integers(1, 9),
              st.integers(0, 6)),
    max_size=25,
)  # fmt: skip
"""(action, driver, times in the step, durable operations after which the driver is killed)."""


def run(world: SequenceWorld, schedule: list[tuple[str, int, int, int]]) -> None:
    """Run two drivers by the schedule, and then one to the end."""
    drivers = [world.driver(), world.driver()]
    for action, who, width, fuse in schedule:
        world.fuse = fuse or -1
        try:
            if action == "restart":
                drivers[who] = world.driver()
            elif action == "append":
                drivers[who].append()
            elif action == "compute":
                drivers[who].compute(width)
            else:
                drivers[who].step(width)
        except Killed:
            world.fuse = -1
            drivers[who] = world.driver()
    world.fuse = -1
    while drivers[0].step(world.end // 4 + 1):
        pass


def pure(types: tuple[str, ...], records: list[Record], width: int, rule: SequenceRule) -> dict[int, int]:
    """Resolve the records in steps of `width` times, with a mirror of the tombstones instead of their shard."""
    schema, _ = schema_of(types)
    mirror, buried = Mirror(schema), Mirror(tombstone_schema(schema, rule))
    end = max((r[3] for r in records), default=0) + 1
    for lower in range(0, end, width):
        upper = min(end, lower + width)
        mine = [(at, r) for at, r in enumerate(records) if lower <= r[3] < upper]
        commands = commands_of(schema, mine)
        found = resolve_in_sequence(schema, commands, mirror, lower, upper, Sequence(rule, buried))
        mirror.advance(found.changes, lower, upper)
        if found.tombstones is not None:
            hashes = hash_rows(found.tombstones, ("k",))
            live = np.ones(len(hashes), dtype=bool)
            buried.advance(KeyChanges(found.tombstones, hashes, live), 0, 0)
    rows = mirror.live_rows()
    return dict(zip(rows.column("k").to_pylist(), rows.column("v").to_pylist(), strict=True))


@settings(max_examples=60)
@given(st.data(), st.integers(1, 50))
def test_steps_of_any_width_equal_a_batch_job_for_every_type_and_tuple(data: st.DataObject, width: int) -> None:
    types = data.draw(TYPES)
    records = data.draw(topics(types))
    names = tuple(f"s{n}" for n in range(len(types)))
    assert pure(types, records, width, SequenceRule(names, 10**15)) == max_by(records, 10**9)


@settings(max_examples=60)
@given(topics(("int64",), (0, 1, 300, 900, 1500)), st.integers(200, 3000))
def test_tombstones_expire_at_the_times_of_records_however_steps_are_cut(records: list[Record], width: int) -> None:
    assert pure(("int64",), records, width, SequenceRule(("s0",), 1000)) == fold(records, 10**9, 1000)


@settings(max_examples=40)
@given(st.data())
def test_a_table_equals_a_batch_job_at_every_time_for_any_drivers_and_kills(data: st.DataObject) -> None:
    records = data.draw(topics(("int64", "float64")))
    schedule = data.draw(SCHEDULES)
    with SequenceWorld(("int64", "float64"), records, keep_s=FOREVER_S) as world:
        run(world, schedule)
        for time, found in enumerate(world.contents(range(world.end))):
            assert found == max_by(records, time), time


@settings(max_examples=30)
@given(topics(("int64",), (0, 0, 1, 300, 900, 1500)), st.sets(st.integers(0, 24), max_size=2), SCHEDULES)
def test_expired_tombstones_and_truncations_are_the_same_for_any_drivers_and_kills(
    records: list[Record], places: set[int], schedule: list[tuple[str, int, int, int]]
) -> None:
    truncates = [Truncate(records[at][3], 0, at) for at in places if at < len(records)]
    records = [r if at not in places else (9, (0,), None, r[3]) for at, r in enumerate(records)]
    with (
        pytest.MonkeyPatch.context() as patch,
        SequenceWorld(("int64",), records, keep_s=1, truncates=truncates) as world,
    ):
        patch.setattr(tombstones_module, "SWEEP_PAUSE_S", 0.0)
        run(world, [(action, who, width * 250, fuse) for action, who, width, fuse in schedule])
        times = sorted({r[3] for r in records})
        for time, found in zip(times, world.contents(times), strict=True):
            assert found == fold(records, time, 1000, truncates), time


def test_a_driver_that_was_left_behind_appends_no_tombstone() -> None:
    """The driver reads the tombstones after the removal of one that its step needs, because the table was past it."""
    records: list[Record] = [
        (0, (9,), None, 0),
        (0, (5,), None, 500),  # late
        (1, (0,), 1, 1249),
        (0, (3,), 2, 1400),  # both tombstones: the first has expired, the second must not exist
    ]
    with pytest.MonkeyPatch.context() as patch, SequenceWorld(("int64",), records, keep_s=1) as world:
        patch.setattr(tombstones_module, "SWEEP_PAUSE_S", 0.0)
        world.driver().step(1)
        left_behind, peer = world.driver(), world.driver()
        assert [row[1] for row in world.tombstones()] == [9]
        peer.step(600)
        peer.step(649)
        assert world.tombstones() == []
        left_behind.step(600)
        assert world.tombstones() == []
        while peer.step(100):
            pass
        assert world.contents([1399, 1400]) == [{1: 1}, {0: 2, 1: 1}] == [fold(records, t, 1000) for t in (1399, 1400)]


def test_a_step_that_was_stored_but_not_appended_is_computed_again_by_any_driver() -> None:
    """The process ends between the two appends. The next one cuts its steps elsewhere."""
    records: list[Record] = [(0, (5,), 1, 0), (0, (7,), None, 1), (0, (6,), 2, 2), (0, (8,), 3, 3), (0, (7,), 4, 4)]
    with SequenceWorld(("int64",), records, keep_s=FOREVER_S) as world:
        world.driver().step(1)
        world.fuse = 2
        with pytest.raises(Killed):
            world.driver().step(2)
        assert [row[1] for row in world.tombstones()] == [7]
        world.fuse = -1
        driver = world.driver()
        assert driver.table.upper == 1
        for width in (1, 1, 9):
            driver.step(width)
        assert [row[1] for row in world.tombstones()] == [7]
        assert world.contents(range(5)) == [max_by(records, time) for time in range(5)]
        assert driver.table.late == 2


@pytest.mark.parametrize("idle", [False, True])
def test_a_restored_table_has_its_tombstones(idle: bool) -> None:
    """Twice, since each restore gives the shards new ids; `idle`: no driver ran between the two."""
    records: list[Record] = [(0, (5,), None, 0), (1, (7,), None, 1), (0, (4,), 1, 2), (1, (6,), 2, 3), (2, (1,), 3, 4)]
    with SequenceWorld(("int64",), records, keep_s=FOREVER_S) as world:
        world.driver().step(2)
        world.restore()
        if not idle:
            world.fuse = 1
            with pytest.raises(Killed):
                world.driver()  # between the creation of the shard and the copy
            world.fuse = -1
            world.driver().step(1)
        world.restore()
        driver = world.driver()
        while driver.step(1):
            pass
        assert world.contents([4]) == [{2: 3}] == [max_by(records, 4)]


def test_expired_tombstones_are_removed_and_records_after_them_are_counted() -> None:
    records: list[Record] = [(n, (9,), None, n) for n in range(20)] + [
        (3, (1,), 1, 1100),
        (4, (1,), 2, 1000),
        (5, (9,), 3, 5000),
    ]
    records.sort(key=lambda record: record[3])
    with pytest.MonkeyPatch.context() as patch, SequenceWorld(("int64",), records, keep_s=1) as world:
        patch.setattr(tombstones_module, "SWEEP_PAUSE_S", 0.0)
        driver = world.driver()
        driver.step(50)
        assert len(world.tombstones()) == 20
        while driver.step(400):
            pass
        assert world.tombstones() == [] and driver.table.tombstones is not None and driver.table.tombstones.empty
        assert world.contents([5000]) == [{3: 1, 5: 3}]
        assert (driver.table.late, driver.table.revived) == (1, 1)


def test_ranks_have_sparks_order_of_values() -> None:
    nan, other = np.array([0x7FF8000000000000, 0xFFF8000000000001], dtype=np.uint64).view(np.float64)
    values = [-np.inf, -1.0, -0.0, 0.0, 1e-300, np.inf, nan, other]
    rows = pa.table({"a": pa.array([*values, None]), "b": pa.array(["x"] * 9)})
    assert rank_rows(rows, ["a"]).tolist() == [0, 1, 2, 2, 3, 4, 5, 5, -1]
    assert rank_rows(rows, ["b", "a"]).tolist() == rank_rows(rows, ["a"]).tolist()
    for name, some in VALUES.items():
        found = rank_rows(pa.table({"v": pa.array(some, arrow_type(name))}), ["v"]).tolist()
        assert sorted(found) == found and found[-1] > found[0], name
    assert rank((float("nan"), "a")) > rank((float("inf"), "b"))
