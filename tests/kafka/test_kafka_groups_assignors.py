"""Server-side assignors of the consumer protocol: every partition is assigned once, evenly, and without
needless moves.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tidemill.kafka.groups.consumer.assignors import ASSIGNORS, Assignor, assign_ranges, assign_uniform

SUBSCRIPTIONS = st.dictionaries(
    st.text("xyz", min_size=1, max_size=3), st.frozensets(st.sampled_from("abc")), max_size=7
)
COUNTS = st.fixed_dictionaries({"a": st.integers(0, 12), "b": st.integers(0, 5), "c": st.integers(0, 3)})


def sizes(found: dict[str, Any]) -> list[int]:
    return [sum(map(len, partitions.values())) for partitions in found.values()]


@pytest.mark.parametrize("assign", ASSIGNORS.values())
@settings(max_examples=200, deadline=None)
@given(SUBSCRIPTIONS, COUNTS, SUBSCRIPTIONS, COUNTS)
def test_each_partition_goes_to_one_who_wants_it(
    assign: Assignor,
    earlier: dict[str, frozenset[str]],
    then: dict[str, int],
    now: dict[str, Any],
    counts: dict[str, int],
) -> None:
    before = assign(earlier, then, {})
    for _ in range(2):
        found = assign(now, counts, before)
        given_out = [(t, p) for partitions in found.values() for t, ps in partitions.items() for p in ps]
        wanted = {t for topics in now.values() for t in topics}
        assert len(given_out) == len(set(given_out))
        assert set(given_out) == {(t, p) for t in wanted for p in range(counts[t])}
        assert all(t in now[m] and ps for m, partitions in found.items() for t, ps in partitions.items())
        assert list(found) == list(now)
        before = found


@settings(max_examples=300, deadline=None)
@given(SUBSCRIPTIONS, COUNTS, SUBSCRIPTIONS, COUNTS)
def test_uniform_is_level_and_whoever_has_a_partition_keeps_it(
    earlier: dict[str, frozenset[str]], then: dict[str, int], now: dict[str, frozenset[str]], counts: dict[str, int]
) -> None:
    before = assign_uniform(earlier, then, {})
    found = assign_uniform(now, counts, before)
    assert assign_uniform(now, counts, found) == found, "nothing moves without a reason"
    if len(set(now.values())) == 1:
        assert max(sizes(found)) - min(sizes(found)) <= 1
    loads = dict(zip(found, sizes(found), strict=True))
    for giver, partitions in found.items():
        for topic in partitions:
            for taker, topics in now.items():
                if topic in topics:
                    assert loads[giver] - loads[taker] <= 1, f"one of {topic} could go from {giver} to {taker}"


def test_a_member_that_leaves_moves_nothing_but_what_it_had() -> None:
    subscriptions = {f"m{n}": frozenset("a") for n in range(4)}
    before = assign_uniform(subscriptions, {"a": 12}, {})
    assert sizes(before) == [3, 3, 3, 3]
    del subscriptions["m2"]
    after = assign_uniform(subscriptions, {"a": 12}, before)
    assert sizes(after) == [4, 4, 4]
    assert all(before[member]["a"] <= after[member]["a"] for member in after)


def test_ranges_keep_partitions_of_one_number_together() -> None:
    found = assign_ranges({"y": frozenset("ab"), "x": frozenset("ab")}, {"a": 5, "b": 5}, {})
    assert found == {
        "y": {"a": frozenset({0, 1, 2}), "b": frozenset({0, 1, 2})},
        "x": {"a": frozenset({3, 4}), "b": frozenset({3, 4})},
    }
