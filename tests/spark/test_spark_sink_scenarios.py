"""Sink scenarios on the pure operator and a model shard: the appended rows and their times."""

from __future__ import annotations

import pytest

from support.spark.upsert_world import ModelShard, Set, Writer, commands, updates

SNAPSHOT: list[Set] = [(k, k, 1, k) for k in range(4)]
LATER: list[Set] = [(10 + n, n, 2 + n, 10 + n) for n in range(16)]
"""One row at each of the times 2 to 17."""


def drain_to(writer: Writer, frontier: int) -> None:
    writer.operator.advance(frontier)
    assert writer.commit(writer.operator.drain())


def test_m4301_six_intervals_that_are_all_ready_are_six_batches_with_their_own_rows() -> None:
    shard = ModelShard()
    writer = Writer(shard)
    writer.operator.ingest(commands([(t, t, t, t) for t in range(12)]))
    for upper in range(2, 13, 2):
        drain_to(writer, upper)
    assert [(lower, upper) for lower, upper, _ in shard.log] == [(t, t + 2) for t in range(0, 12, 2)]
    for lower, upper, rows in shard.log:
        assert updates(rows) == [(t, t, t, 1) for t in range(lower, upper)]


def test_m4303_a_snapshot_and_sixteen_later_times_one_by_one_are_one_batch_each() -> None:
    shard = ModelShard()
    writer = Writer(shard)
    writer.operator.advance(1)
    writer.operator.ingest(commands(SNAPSHOT + LATER))
    assert writer.commit(pinned := writer.operator.drain())
    assert pinned.updates.num_rows == 0, "what the source is not complete for is kept"
    for upper in range(2, 19):
        drain_to(writer, upper)
    assert [rows.num_rows for _, _, rows in shard.log] == [0, 4] + [1] * 16
    assert shard.contents(17) == {k: v for k, v, _, _ in SNAPSHOT + LATER}


def test_m4304_the_same_with_a_frontier_that_is_past_all_of_it_is_one_batch() -> None:
    shard = ModelShard()
    writer = Writer(shard)
    writer.operator.ingest(commands(SNAPSHOT + LATER))
    drain_to(writer, 18)
    assert [(lower, upper, rows.num_rows) for lower, upper, rows in shard.log] == [(0, 18, 20)]
    assert shard.contents(17) == {k: v for k, v, _, _ in SNAPSHOT + LATER}
    assert shard.contents(1) == {k: k for k in range(4)}


def follower_with_a_result_for_10_to_20(peer_upper: int) -> tuple[Writer, Writer]:
    """(a writer that holds [10, 20) and has not appended it, a peer that brought the shard to `peer_upper`)."""
    shard = ModelShard()
    follower, peer = Writer(shard), Writer(shard)
    peer.step([], 10)
    follower.sync()
    rows: list[Set] = [(1, 12, 12, 1), (1, 17, 17, 2)]
    follower.operator.ingest(commands(rows))
    follower.operator.advance(20)
    pending = follower.operator.drain()
    assert (pending.lower, pending.upper, updates(pending.updates)[0]) == (10, 20, (1, 12, 12, 1))
    if peer_upper > 10:
        peer.step([s for s in rows if s[2] < peer_upper], peer_upper)
    return follower, peer


@pytest.mark.parametrize(("peer_upper", "lower"), [(15, 15), (10, 10)])
def test_m4305_a_result_that_waits_moves_on_with_the_shard_and_only_with_it(peer_upper: int, lower: int) -> None:
    follower, _ = follower_with_a_result_for_10_to_20(peer_upper)
    follower.sync()
    pending = follower.operator.drain()
    assert (pending.lower, pending.upper) == (lower, 20)
    late = [(1, 12, 17, -1), (1, 17, 17, 1)]
    assert updates(pending.updates) == (late if lower == 15 else [(1, 12, 12, 1), *late])


@pytest.mark.parametrize("actual", [20, 15])
def test_m4306_what_a_peer_appended_is_told_as_the_upper_whoever_won(actual: int) -> None:
    follower, _ = follower_with_a_result_for_10_to_20(actual)
    assert not follower.commit(follower.operator.drain())
    assert follower.operator.upper == 10
    follower.sync()
    assert follower.operator.upper == actual
    rest = follower.operator.drain()
    assert (rest.lower, rest.upper) == (actual, 20)
    assert rest.updates.num_rows == (0 if actual == 20 else 2)
