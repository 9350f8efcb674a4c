"""Settled rows without those that a difference touches, plus its result, equal the sum over all updates."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.shards.histories import histories
from support.shards.world import SCHEMA, Row, contents_of, summed, updates
from tidemill.shards.api import DIFF, HASH, TIME
from tidemill.shards.parts.consolidate import merge_updates
from tidemill.shards.parts.row_hash import hash_rows
from tidemill.shards.read.read_plan import UNTIL_COLUMN, last_states


def hashed(rows: pa.Table) -> pa.Table:
    return rows.append_column(HASH, pa.array(hash_rows(rows, SCHEMA.key)))


def read(parts: list[pa.Table], as_of: int) -> Counter[Any] | None:
    """Read like the plan: parts with insertions alone are settled, all others form the difference."""
    parts = [hashed(p.filter(pc.less_equal(p.column(TIME), as_of))) for p in parts]
    settled = [p for p in parts if set(p.column(DIFF).to_pylist()) == {1}]
    rest = pa.concat_tables([hashed(updates([])), *(p for p in parts if p not in settled)])
    found = last_states(SCHEMA, rest)
    assert found is not None
    gone, live = found.gone, found.live
    until = dict(zip(gone.column("k").to_pylist(), gone.column(UNTIL_COLUMN).to_pylist(), strict=True))
    kept = contents_of(live)
    for part in settled:
        for k, v, time in zip(*(part.column(n).to_pylist() for n in ("k", "v", TIME)), strict=True):
            kept[(k, v)] += time >= until.get(k, 0)
    return +kept


@settings(max_examples=50, deadline=None)
@given(histories(True), st.integers(0, 3), st.integers(1, 4), st.integers(0, 30))
def test_settled_rows_and_the_difference_are_the_contents_at_every_time(
    history: list[list[list[Row]]], start: int, end: int, since: int
) -> None:
    flat = [row for pieces in history for piece in pieces for row in piece]
    run = [row for pieces in history[start:end] for piece in pieces for row in piece]
    # A merge of some batches: sums at since, or at their last time.
    moved_to = min(since, max((row[2] for row in run), default=0))
    parts = [merge_updates(SCHEMA, updates(run), moved_to).drop_columns([HASH])]
    parts += [updates(piece) for pieces in [*history[:start], *history[max(start, end) :]] for piece in pieces]
    for as_of in range(moved_to, max((row[2] for row in flat), default=0) + 1):
        assert read(parts, as_of) == summed(flat, as_of), as_of


@pytest.mark.parametrize(
    "rows",
    [
        [(1, "a", 1, 2)],
        [(1, "a", 1, 1), (1, "b", 2, 1)],
        [(1, "a", 1, 1), (1, "a", 2, 1), (1, "a", 3, -1)],
    ],
)
def test_a_key_with_several_rows_is_no_difference_of_this_kind(rows: list[Row]) -> None:
    assert last_states(SCHEMA, hashed(updates(rows))) is None


def test_two_keys_of_one_hash_are_no_difference_of_this_kind() -> None:
    rows = updates([(1, "a", 1, -1), (2, "b", 2, 1)])
    assert last_states(SCHEMA, rows.append_column(HASH, pa.array([7, 7], pa.uint64()))) is None


def test_a_row_that_was_retracted_before_and_inserted_again_elsewhere_stays() -> None:
    found = last_states(SCHEMA, hashed(updates([(1, "a", 5, -1), (1, "b", 9, -1), (2, "c", 5, 1)])))
    assert found is not None
    gone, live = found.gone, found.live
    assert sorted(zip(gone.column("k").to_pylist(), gone.column(UNTIL_COLUMN).to_pylist(), strict=True)) == [
        (1, 9),
        (2, 6),
    ]
    assert live.to_pylist() == [{"k": 2, "v": "c"}]
