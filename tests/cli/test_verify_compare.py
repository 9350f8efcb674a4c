"""The merge of two sorted streams: counts equal set arithmetic for any chunk size."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.base.errors import CorruptError
from tidemill.cli.verify.compare import NAN, Comparison, Outcome, Row, sort_key

KEYS = st.none() | st.integers(0, 12)
SIDE = st.dictionaries(KEYS, st.sampled_from(["a", "b", None, NAN]), max_size=12)


def rows_of(side: dict[Any, Any]) -> list[Row]:
    return sorted(((k, v) for k, v in side.items()), key=lambda r: sort_key(r[:1]))


def compared(source: list[Row], shard: list[Row], chunk: int) -> Outcome:
    comparison = Comparison(1)
    left: list[Row] = []
    right: list[Row] = []
    while source or shard or left or right:
        if not left:
            left, source = source[:chunk], source[chunk:]
        if not right:
            right, shard = shard[: chunk + 1], shard[chunk + 1 :]
        i, j = comparison.compare_chunks(left, right, not source and not left, not shard and not right)
        if not i and not j and not source and not shard:
            i, j = comparison.compare_chunks(left, right, not source, not shard)
        left, right = left[i:], right[j:]
    return comparison.outcome()


@given(SIDE, SIDE, st.integers(1, 5))
def test_counts_equal_set_arithmetic_for_any_chunks(source: Any, shard: Any, chunk: int) -> None:
    outcome = compared(rows_of(source), rows_of(shard), chunk)
    assert outcome.rows == len(source) and outcome.shard_rows == len(shard)
    assert outcome.missing == len(source.keys() - shard.keys())
    assert outcome.extra == len(shard.keys() - source.keys())
    assert outcome.different == sum(source[k] != shard[k] for k in source.keys() & shard.keys())
    assert outcome.clean == (source == shard)
    assert (outcome.source_hash == outcome.shard_hash) == (source == shard)


def test_a_key_that_comes_twice_is_one_row_too_many() -> None:
    assert compared([(1, "a")], [(1, "a"), (1, "a")], 5).extra == 1
    assert compared([(1, "a"), (1, "b")], [(1, "a")], 5).missing == 1


def test_a_stream_out_of_order_is_reported() -> None:
    with pytest.raises(CorruptError, match="out of order"):
        compared([(2, "a"), (1, "a")], [(1, "a"), (2, "a")], 5)


def test_examples_name_the_first_keys() -> None:
    outcome = compared([(1, "a"), (2, "b"), (3, "c")], [(2, "x"), (3, "c"), (4, "d")], 2)
    assert outcome.examples == ("missing 1", "different 2", "extra 4")
