"""Histograms of durations: bounded error, constant size, and sums that do not depend on the order of addition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.base.status.histogram import BUCKETS, WINDOW_MS, Histogram, StageHistograms

DURATIONS = st.lists(st.one_of(st.integers(0, 3_000), st.integers(0, 100_000_000)), min_size=1, max_size=60)


def of(durations: list[int]) -> Histogram:
    made = Histogram()
    for each in durations:
        made.add(each)
    return made


@given(durations=DURATIONS, fraction=st.floats(0, 1))
def test_a_quantile_is_what_was_counted_or_up_to_a_fifth_more(durations: list[int], fraction: float) -> None:
    exact = sorted(durations)[int(fraction * (len(durations) - 1))]
    found = of(durations).quantile(fraction)
    assert found is not None and exact <= found + 1 and found <= min(max(durations), max(1, exact * 1.2))


@given(one=DURATIONS, other=DURATIONS)
def test_histograms_of_two_processes_are_that_of_both_also_by_way_of_a_report(one: list[int], other: list[int]) -> None:
    both = Histogram.from_plain(of(one).to_plain())
    both.merge(Histogram.from_plain(of(other).to_plain()))
    assert both.to_plain() == of(one + other).to_plain()
    assert both.count == len(one) + len(other)


def test_what_cannot_be_read_counts_as_nothing() -> None:
    for said in (None, 7, {"max": "x"}, {"max": 3, "counts": [[BUCKETS, 1], [-1, 1], ["a", 1], [1, -2], 5]}):
        assert Histogram.from_plain(said).count == 0
    assert Histogram().summary() == {"count": 0, "p50": None, "p95": None, "p99": None, "max": None}


def test_a_clock_that_is_ahead_counts_as_no_time_and_what_lasts_for_days_has_a_bucket() -> None:
    found = of([-50, 10**12])
    assert found.count == 2
    assert found.quantile(0) == 1 and found.summary()["max"] == 10**12


def test_stages_show_what_came_lately_and_stand_still_when_nothing_comes() -> None:
    stages = StageHistograms()
    stages.add("durable", [1_000, 0, 1_200], 2_000)
    assert stages.summary("durable")["count"] == 2, "what began at an unknown time is not counted"
    shown = stages.to_plain()
    assert shown == stages.to_plain()
    later = 2_000 + WINDOW_MS
    stages.add("durable", [later - 10], later)
    assert stages.summary("durable")["count"] == 3
    stages.add("durable", [later], later + WINDOW_MS)
    assert stages.summary("durable")["count"] == 2, "the first window is over"
    stages.add("durable", [5], 5)
    assert stages.summary("durable")["count"] == 2, "a clock that jumps back begins another"
    assert stages.summary("bound")["count"] == 0
