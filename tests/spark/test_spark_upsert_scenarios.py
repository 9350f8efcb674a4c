"""Scenarios of the upsert operator, named after their rows, and a few additional ones."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from sim.scenarios.shard_upserts import RestashingOperator
from support.spark.upsert_world import SCHEMA, ModelShard, Writer, commands, oracle, updates
from tidemill.base.errors import CorruptError, InvalidError
from tidemill.shards.api import Column, ShardSchema
from tidemill.shards.parts.consolidate import sum_contents
from tidemill.shards.parts.schema import contents_schema
from tidemill.spark.merge.commands import Commands, Truncate, command_schema, no_commands
from tidemill.spark.merge.diff import check_distinct
from tidemill.spark.merge.mirror import Mirror
from tidemill.spark.merge.operator import UpsertOperator
from tidemill.spark.merge.resolve import resolve


def fed(*rows: tuple[int, int, int, int]) -> pa.Table:
    """Feedback: (key, value, time, diff)."""
    names = ("k", "v", "_time", "_diff")
    return pa.table({n: pa.array([r[i] for r in rows], pa.int64()) for i, n in enumerate(names)})


def lagging(operator_type: type[UpsertOperator], *, feedback_first: bool) -> UpsertOperator:
    """Seed 001's exact shape: the upper jumps to 10 without output of ours; rows at 5 and 7; source frontier 11."""
    operator = operator_type(SCHEMA, Mirror(SCHEMA))
    late = commands([(0, 1, 5, 1), (1, 2, 7, 2)])
    if feedback_first:
        operator.apply_peer(fed(), 0, 10)
        operator.ingest(late)
    else:
        operator.ingest(late)
        operator.apply_peer(fed(), 0, 10)
    operator.advance(11)
    return operator


@pytest.mark.parametrize("feedback_first", [True, False])
def test_m4101_lagging_replacement_below_upper_strands_data(feedback_first: bool) -> None:
    operator = lagging(UpsertOperator, feedback_first=feedback_first)
    pending = operator.drain()
    assert updates(pending.updates) == []
    assert (pending.lower, pending.upper) == (10, 11)
    assert operator.output_frontier == 11
    assert operator.stashed == 0
    assert operator.dropped == 2


@pytest.mark.parametrize("feedback_first", [True, False])
def test_m4101_the_planted_fault_pins_the_output_frontier_at_5(feedback_first: bool) -> None:
    operator = lagging(RestashingOperator, feedback_first=feedback_first)
    assert operator.drain().upper == 5
    operator.advance(1_000)
    assert operator.output_frontier == 5, "the fault is permanent: more input does not move it"
    assert operator.upper == 10


def test_m4102_lagging_replacement_below_upper_is_dropped() -> None:
    shard = ModelShard()
    lag, peer = Writer(shard), Writer(shard)
    lag.operator.ingest(commands([(0, 1, 5, 1), (1, 2, 7, 2)]))
    peer.step([(0, 1, 5, 1), (1, 2, 7, 2)], 10)
    lag.sync()
    assert lag.step([(2, 3, 10, 3)], 11) == [(2, 3, 10, 1)]
    assert shard.contents(10) == {0: 1, 1: 2, 2: 3}


def test_m4103_gh_9160_repro() -> None:
    shard = ModelShard()
    writer = Writer(shard)
    assert writer.step([(0, 0, 0, 0)], 1) == [(0, 0, 0, 1)]
    writer.operator.ingest(commands([(1, None, 2, 2), (0, 1, 3, 3), (0, 2, 3, 4)]))
    assert shard.append(1, 3, fed())  # a peer moves the upper to 3 without data
    writer.sync()
    writer.operator.advance(4)
    pending = writer.operator.drain()
    assert updates(pending.updates) == [(0, 0, 3, -1), (0, 2, 3, 1)]
    assert updates(writer.operator.drain().updates) == updates(pending.updates), "draining twice emits nothing twice"
    assert writer.commit(pending)
    assert updates(writer.operator.drain().updates) == []
    assert shard.contents(3) == {0: 2}


def test_m4104_rehydration_then_update() -> None:
    mirror = Mirror.hydrate(SCHEMA, pa.table({"k": [42], "v": [100]}), 1)
    operator = UpsertOperator(SCHEMA, mirror)
    operator.ingest(commands([(42, 200, 1, 1)]))
    operator.advance(2)
    assert updates(operator.drain().updates) == [(42, 100, 1, -1), (42, 200, 1, 1)]


def test_m4105_multi_batch_rehydration() -> None:
    operator = UpsertOperator(SCHEMA, Mirror(SCHEMA))
    operator.apply_peer(fed((1, 10, 0, 1), (1, 10, 0, -1), (1, 20, 0, 1)), 0, 1)
    operator.ingest(commands([(1, 30, 1, 1)]))
    operator.advance(2)
    assert updates(operator.drain().updates) == [(1, 20, 1, -1), (1, 30, 1, 1)]


def test_m4106_delete_existing_key() -> None:
    writer = Writer(ModelShard())
    assert writer.step([(1, 77, 0, 0), (1, None, 1, 1)], 2) == [(1, 77, 0, 1), (1, 77, 1, -1)]


def test_m4107_delete_nonexistent_key() -> None:
    assert Writer(ModelShard()).step([(1, None, 1, 1)], 2) == []


def test_m4108_reinsert_after_delete() -> None:
    writer = Writer(ModelShard())
    sets = [(1, 10, 0, 0), (1, None, 1, 1), (1, 20, 2, 2)]
    assert writer.step(sets, 3) == [(1, 10, 0, 1), (1, 10, 1, -1), (1, 20, 2, 1)]


def test_m4108_reinsert_after_delete_in_batches_of_one_time() -> None:
    writer = Writer(ModelShard())
    found = writer.step([(1, 10, 0, 0)], 1) + writer.step([(1, None, 1, 1)], 2) + writer.step([(1, 20, 2, 2)], 3)
    assert found == [(1, 10, 0, 1), (1, 10, 1, -1), (1, 20, 2, 1)]


def test_m4109_idempotent_update() -> None:
    assert Writer(ModelShard()).step([(1, 50, 0, 0), (1, 50, 1, 1)], 2) == [(1, 50, 0, 1)]


def test_m4109_idempotent_update_across_batches() -> None:
    writer = Writer(ModelShard())
    assert writer.step([(1, 50, 0, 0)], 1) == [(1, 50, 0, 1)]
    assert writer.step([(1, 50, 1, 1)], 2) == []


def test_m4110_out_of_order_keys_across_timestamps() -> None:
    writer = Writer(ModelShard())
    found = writer.step([(99, 1, 0, 0), (1, 2, 1, 1), (1, 3, 2, 2), (99, 4, 2, 3)], 3)
    expected = [(99, 1, 0, 1), (1, 2, 1, 1), (1, 2, 2, -1), (1, 3, 2, 1), (99, 1, 2, -1), (99, 4, 2, 1)]
    assert found == expected


def test_m4111_drain_crosses_probe_window() -> None:
    writer = Writer(ModelShard())
    writer.step([(k, k, 0, k) for k in range(1500)], 1)
    found = writer.step([(k, k + 1, 1, 1500 + k) for k in range(1500)], 2)
    assert [u for u in found if u[3] < 0] == [(k, k, 1, -1) for k in range(1500)]
    assert [u for u in found if u[3] > 0] == [(k, k + 1, 1, 1) for k in range(1500)]


def test_m4112_drain_reads_spilled_chunks(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("tidemill.spark.merge.mirror.SPILL_BYTES", 1)
    mirror = Mirror(SCHEMA, directory=tmp_path)
    shard = ModelShard()
    writer = Writer(shard)
    writer.operator.mirror = mirror
    writer.step([(k, k, 0, k) for k in range(1500)], 1)
    assert list(tmp_path.glob("run-*.arrow")), "the state is in files"
    found = writer.step([(k, k + 1, 1, 1500 + k) for k in range(1500)], 2)
    assert len(found) == 3000
    assert shard.contents(1) == {k: k + 1 for k in range(1500)}


def test_the_highest_order_wins_within_a_key_and_time_whatever_the_batch_order() -> None:
    writer = Writer(ModelShard())
    assert writer.step([(1, 30, 5, 3), (1, 10, 5, 1), (1, 20, 5, 2)], 6) == [(1, 30, 5, 1)]


def test_a_duplicate_record_of_one_key_and_time_is_one_row() -> None:
    writer = Writer(ModelShard())
    assert writer.step([(7, 1, 3, 10), (7, 1, 3, 11), (7, 1, 4, 12)], 5) == [(7, 1, 3, 1)]


def test_commands_above_the_source_frontier_are_kept() -> None:
    operator = UpsertOperator(SCHEMA, Mirror(SCHEMA))
    operator.ingest(commands([(1, 1, 0, 0), (1, 2, 9, 1)]))
    operator.advance(5)
    pending = operator.drain()
    assert (pending.lower, pending.upper) == (0, 5)
    assert updates(pending.updates) == [(1, 1, 0, 1)]
    operator.committed(pending)
    operator.advance(10)
    assert updates(operator.drain().updates) == [(1, 1, 9, -1), (1, 2, 9, 1)]


def test_an_idle_tick_moves_the_frontier_without_rows() -> None:
    writer = Writer(ModelShard())
    assert writer.step([], 100) == []
    assert writer.operator.upper == 100 == writer.shard.upper


def test_a_lost_race_is_recomputed_and_not_trimmed() -> None:
    """The peer saw another value at time 1 (log compaction took one away): our time 2 must retract the peer's row."""
    shard = ModelShard()
    ours, peer = Writer(shard), Writer(shard)
    ours.operator.ingest(commands([(1, 10, 1, 1), (1, 20, 2, 2)]))
    ours.operator.advance(3)
    pending = ours.operator.drain()
    peer.step([(1, 11, 1, 0)], 2)
    assert not ours.commit(pending)
    ours.sync()
    again = ours.operator.drain()
    assert updates(again.updates) == [(1, 11, 2, -1), (1, 20, 2, 1)]
    assert ours.commit(again)
    assert shard.contents(2) == {1: 20}


def test_truncate_deletes_all_live_keys_at_its_place_in_the_order() -> None:
    shard = ModelShard()
    writer = Writer(shard)
    writer.step([(1, 1, 0, 0), (2, 2, 0, 1)], 1)
    sets = [(3, 3, 1, 2), (2, 9, 1, 4), (4, 4, 2, 5)]
    cut = [Truncate(1, 0, 3)]
    found = writer.step(sets, 3, cut)
    assert found == [(1, 1, 1, -1), (2, 2, 1, -1), (2, 9, 1, 1), (4, 4, 2, 1)]
    everything = [(1, 1, 0, 0), (2, 2, 0, 1), *sets]
    assert all(shard.contents(t) == oracle(everything, t, cut) for t in range(3))


@pytest.mark.parametrize(
    ("kind", "bits"),
    [
        ("float64", [0, -(2**63), 0x7FF8 << 48, (0x7FF8 << 48) + 1]),
        ("timestamp", [2**63 - 1, -(2**63) + 1, 0]),
        ("date", [2**31 - 1, -(2**31) + 1, 0]),
    ],
)
def test_truncate_reaches_keys_that_python_takes_for_one_or_has_none_of(kind: str, bits: list[int]) -> None:
    schema = ShardSchema((Column("k", kind), Column("n", "int64")), ("k",))
    target = contents_schema(schema)
    integers = pa.array(bits, pa.int32() if kind == "date" else pa.int64())
    rows = pa.table([integers.view(target.field("k").type), pa.array(range(len(bits)), pa.int64())], schema=target)
    mirror = Mirror.hydrate(schema, rows, 5)
    found = resolve(schema, Commands(no_commands(schema).rows, (Truncate(5, 3, 0),)), mirror, 5, 6)
    assert sorted(found.updates.column("n").to_pylist()) == list(range(len(bits)))
    assert set(found.updates.column("_diff").to_pylist()) == {-1}
    with pytest.raises(InvalidError, match="a key occurs twice: k="):
        check_distinct(schema, pa.concat_tables([rows, rows.slice(0, 1)]))
    twice = rows.append_column("_time", pa.array([1] * len(bits))).append_column("_diff", pa.array([-1] * len(bits)))
    with pytest.raises(CorruptError, match="a row was retracted more often than inserted: k="):
        sum_contents(schema, twice)


def test_errors_are_rows_that_occupy_their_key_until_a_good_value_or_tombstone() -> None:
    columns = (Column("k", "string"), Column("v", "int64"), Column("_error", "string"))
    schema = ShardSchema(columns, ("k",))
    operator = UpsertOperator(schema, Mirror(schema))

    def say(time: int, value: int | None, error: str | None, live: bool = True) -> list[tuple[object, ...]]:
        row = {"k": ["a"], "v": [value], "_error": [error], "_time": [time], "_order": [time]}
        table = pa.table({**row, "_partition": [0], "_live": [live]}, schema=command_schema(schema))
        operator.ingest(Commands(table))
        operator.advance(time + 1)
        pending = operator.drain()
        operator.committed(pending)
        return sorted((r["_diff"], r["v"], r["_error"]) for r in pending.updates.to_pylist())

    assert say(0, 5, None) == [(1, 5, None)]
    assert say(1, None, "not a number") == [(-1, 5, None), (1, None, "not a number")]
    assert say(2, None, "not a number") == []
    assert say(3, 6, None) == [(-1, None, "not a number"), (1, 6, None)]
    assert say(4, None, "again") == [(-1, 6, None), (1, None, "again")]
    assert say(5, None, None, live=False) == [(-1, None, "again")]


def test_null_and_composite_keys_are_keys() -> None:
    schema = ShardSchema((Column("a", "string"), Column("b", "int32"), Column("v", "float64")), ("a", "b"))
    operator = UpsertOperator(schema, Mirror(schema))
    rows = [("x", 1, 1.0), (None, 1, 2.0), (None, None, float("nan")), ("x", None, 4.0)]
    for time, factor in ((0, 1.0), (1, 1.0), (2, 2.0)):
        table = pa.table(
            {
                "a": [r[0] for r in rows],
                "b": [r[1] for r in rows],
                "v": [r[2] * factor for r in rows],
                "_time": [time] * 4,
                "_order": [time] * 4,
                "_partition": [0] * 4,
                "_live": [True] * 4,
            },
            schema=command_schema(schema),
        )
        operator.ingest(Commands(table))
        operator.advance(time + 1)
        pending = operator.drain()
        operator.committed(pending)
        # NaN equals NaN: that row does not change; the other three do at time 2.
        assert pending.updates.num_rows == {0: 4, 1: 0, 2: 6}[time]
    assert operator.mirror.live_rows().num_rows == 4


def test_colliding_hashes_take_the_slow_path_and_stay_exact() -> None:
    def weak(rows: pa.Table, columns: tuple[str, ...]) -> np.ndarray:  # type: ignore[type-arg]
        return np.asarray(rows.column("k").to_numpy() % 3, dtype=np.uint64)

    shard = ModelShard()
    writer = Writer(shard, hasher=weak)
    sets = [(k, 100 * t + k, t, 10 * t + k) for t in range(6) for k in range(10) if (k + t) % 3]
    sets += [(k, None, t, 1000 + t) for t, k in ((2, 4), (3, 7), (5, 1))]
    for t in range(6):
        writer.step([s for s in sets if s[2] == t], t + 1)
    assert all(shard.contents(t) == oracle(sets, t) for t in range(6))
    assert {r["k"]: r["v"] for r in writer.operator.mirror.live_rows().to_pylist()} == oracle(sets, 5)
