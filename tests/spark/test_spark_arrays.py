"""Sorting and comparing rows without a look at those that need none: equal to the plain way."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from support.spark.upsert_world import SCHEMA, ModelShard, Writer
from tidemill.shards.parts.arrow_rows import rows_at, rows_equal, values_at
from tidemill.shards.parts.parts import sort_updates
from tidemill.shards.parts.row_hash import hash_rows
from tidemill.spark.merge.key_grouping import group_by_key
from tidemill.spark.merge.sorted_runs import SortedRun

ROWS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2), st.integers(0, 2)), max_size=30)
FLOATS = [0.0, -0.0, 1.5, float("nan"), None]
PAIRS = st.lists(st.tuples(st.sampled_from(FLOATS), st.sampled_from(["", "a", "b", None])), min_size=1, max_size=12)


@settings(deadline=None)
@given(rows=ROWS, collide=st.integers(1, 7), ascending=st.booleans())
def test_rows_are_grouped_by_key_in_the_order_of_their_minors(
    rows: list[tuple[int, int, int]], collide: int, ascending: bool
) -> None:
    """Keys share hashes when there are fewer hashes than keys."""
    rows = sorted(rows, key=lambda r: r[0] % collide) if ascending else rows
    keys, first, second = (np.array([r[i] for r in rows], dtype=np.int64) for i in range(3))
    table = pa.table({"k": pa.array(keys, pa.int64())})
    order, starts = group_by_key(table, (keys % collide).astype(np.uint64), ("k",), first, second)
    groups = [list(g) for g in np.split(order, np.flatnonzero(starts)[1:])] if rows else []
    assert sorted(order.tolist()) == list(range(len(rows)))
    assert len({int(keys[g[0]]) for g in groups}) == len(groups) == len(set(keys.tolist()))
    for group in groups:
        assert len({int(keys[at]) for at in group}) == 1
        assert group == sorted(group, key=lambda at: (first[at], second[at], at))


@settings(deadline=None)
@given(
    keys=st.lists(st.sampled_from(FLOATS), min_size=1, max_size=8), more=st.lists(st.sampled_from(FLOATS), max_size=4)
)
def test_keys_are_the_same_bit_by_bit_in_one_step_and_over_several(
    keys: list[float | None], more: list[float | None]
) -> None:
    table = pa.table({"f": pa.array(keys, pa.float64())})
    hashes = hash_rows(table, ("f",))
    order, starts = group_by_key(table, hashes, ("f",))
    groups = np.split(order, np.flatnonzero(starts)[1:])
    assert sorted(repr(keys[g[0]]) for g in groups) == sorted({repr(k) for k in keys})
    assert all(len({repr(keys[at]) for at in g}) == 1 for g in groups)
    firsts = np.array([g[0] for g in groups], dtype=np.int64)
    run = SortedRun(rows_at(table, firsts), hashes[firsts], np.ones(len(firsts), dtype=bool))
    asked = pa.table({"f": pa.array(more, pa.float64())})
    found = run.find(asked, hash_rows(asked, ("f",)), ("f",)).tolist()
    assert [repr(keys[firsts[at]]) if at >= 0 else None for at in found] == [
        repr(k) if repr(k) in {repr(each) for each in keys} else None for k in more
    ]


@settings(deadline=None)
@given(left=PAIRS, right=PAIRS, data=st.data())
def test_rows_are_equal_when_every_column_is_bit_by_bit(
    left: list[tuple[float | None, str | None]], right: list[tuple[float | None, str | None]], data: st.DataObject
) -> None:
    def table(rows: list[tuple[float | None, str | None]]) -> pa.Table:
        return pa.table(
            {"s": pa.array([r[1] for r in rows], pa.string()), "f": pa.array([r[0] for r in rows], pa.float64())}
        )

    count = data.draw(st.integers(0, 15))
    at = np.array([data.draw(st.integers(0, len(left) - 1)) for _ in range(count)], dtype=np.int64)
    to = np.array([data.draw(st.integers(0, len(right) - 1)) for _ in range(count)], dtype=np.int64)
    found = rows_equal(table(left), at, table(right), to, ["s", "f"])
    expected = [repr(left[a]) == repr(right[b]) for a, b in zip(at.tolist(), to.tolist(), strict=True)]
    assert found.tolist() == expected


@settings(deadline=None)
@given(at=st.one_of(st.lists(st.integers(0, 9)), st.integers(0, 9).map(lambda n: list(range(n, 10)))))
def test_rows_at_places_are_those_rows(at: list[int]) -> None:
    table = pa.table({"n": list(range(100, 110))})
    places = np.array(at, dtype=np.int64)
    assert rows_at(table, places).column("n").to_pylist() == [100 + place for place in at]
    assert values_at(table.column("n").chunk(0), places).to_pylist() == [100 + place for place in at]


def test_updates_come_in_the_order_of_a_part() -> None:
    """Updates have the order of a part: by hash, time and diff, with several times of a key. The writer of the part
    sorts nothing."""
    writer = Writer(ModelShard())
    writer.step([(k, k, 0, k) for k in range(200)], 1)
    sets = [(k % 250, None if k % 11 == 0 else k, 1 + k // 300, 1000 + k) for k in range(900)]
    writer.step(sets, 5)
    for _, _, rows in writer.shard.log:
        assert rows.num_rows > 100 and sort_updates(rows, hash_rows(rows, SCHEMA.key)) is None
