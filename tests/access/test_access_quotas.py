"""Quotas as a pure core: whose bucket, how long the silence, and what is kept of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.base.errors import InvalidError
from tidemill.security.quotas import (
    BUCKETS_MAX,
    BURST_S,
    CONSUME,
    DEFAULT,
    NOBODY,
    PRODUCE,
    REQUEST,
    THROTTLE_MAX_MS,
    Limits,
    Quota,
    check_quota,
    named,
)

ALICE, APP = named("alice"), named("app")
ORDER = [
    (ALICE, APP),
    (ALICE, DEFAULT),
    (ALICE, NOBODY),
    (DEFAULT, APP),
    (DEFAULT, DEFAULT),
    (DEFAULT, NOBODY),
    (NOBODY, APP),
    (NOBODY, DEFAULT),
]


@pytest.mark.parametrize("first", range(len(ORDER)))
def test_the_most_particular_quota_counts(first: int) -> None:
    """Each later one would be exceeded at once."""
    quotas = [Quota(*entity, PRODUCE, 1.0) for entity in ORDER[first + 1 :]]
    limits = Limits([*quotas, Quota(*ORDER[first], PRODUCE, 1e9)])
    assert limits.use(PRODUCE, "alice", "app", 1_000_000, 0.0) == 0
    assert Limits(quotas).use(PRODUCE, "alice", "app", 1_000_000, 0.0) == (THROTTLE_MAX_MS[PRODUCE] if quotas else 0)


def test_of_a_default_everyone_has_a_bucket_of_their_own() -> None:
    limits = Limits([Quota(DEFAULT, NOBODY, PRODUCE, 100.0)])
    assert limits.use(PRODUCE, "alice", "x", 200, 0.0) == 1_000
    assert limits.use(PRODUCE, "alice", "y", 0, 0.0) == 1_000, "whatever it calls itself"
    assert limits.use(PRODUCE, "bob", "x", 100, 0.0) == 0
    assert limits.use(CONSUME, "alice", "x", 10**9, 0.0) == 0, "another quota"


def test_time_has_a_rate_in_per_cent_and_a_silence_of_a_second_at_most() -> None:
    limits = Limits([Quota(ALICE, NOBODY, REQUEST, 5.0)])
    assert limits.of_time and not Limits([Quota(ALICE, NOBODY, PRODUCE, 5.0)]).of_time
    assert limits.use(REQUEST, "alice", "", 100 * 0.05, 0.0) == 0, "five per cent of a second"
    assert limits.use(REQUEST, "alice", "", 100 * 0.02, 0.0) == 400
    assert limits.use(REQUEST, "alice", "", 100 * 10.0, 0.0) == THROTTLE_MAX_MS[REQUEST] == 1_000
    assert limits.use(REQUEST, "alice", "", 0, 1.0) == 0


def test_a_name_that_is_spelt_like_a_default_is_a_name() -> None:
    limits = Limits([Quota(named("*"), NOBODY, PRODUCE, 1.0)])
    assert limits.use(PRODUCE, "alice", "", 10**6, 0.0) == 0
    assert limits.use(PRODUCE, "*", "", 10**6, 0.0) > 0


@given(
    st.floats(1, 1e6),
    st.lists(st.tuples(st.floats(0, 3), st.floats(0, 1e6)), min_size=1, max_size=40),
)
@settings(max_examples=200, deadline=None)
def test_a_client_that_keeps_silent_as_told_stays_within_its_rate(rate: float, uses: list[tuple[float, float]]) -> None:
    limits = Limits([Quota(ALICE, NOBODY, PRODUCE, rate)])
    now_s = total = 0.0
    for pause_s, amount in uses:
        amount = min(amount, rate * 20)
        now_s += pause_s
        total += amount
        throttle_ms = limits.use(PRODUCE, "alice", "", amount, now_s)
        assert 0 <= throttle_ms <= THROTTLE_MAX_MS[PRODUCE]
        now_s += throttle_ms / 1000
    assert total <= rate * (now_s + BURST_S) * 1.01 + 1


def test_what_was_used_stays_used_when_quotas_change_and_is_forgotten_in_bounds() -> None:
    limits = Limits([Quota(ALICE, NOBODY, PRODUCE, 100.0)])
    assert limits.use(PRODUCE, "alice", "", 200, 0.0) == 1_000
    limits.replace([Quota(ALICE, NOBODY, PRODUCE, 100.0), Quota(NOBODY, DEFAULT, PRODUCE, 1.0)])
    assert limits.use(PRODUCE, "alice", "", 0, 0.5) == 500
    for i in range(BUCKETS_MAX + 100):
        limits.use(PRODUCE, "", f"client {i}", 1, 0.0)
    assert len(limits._buckets) <= BUCKETS_MAX
    limits.replace([])
    assert limits.none and limits.use(PRODUCE, "alice", "", 10**9, 0.0) == 0


@pytest.mark.parametrize(
    "bad",
    [
        Quota(ALICE, NOBODY, "controller_mutation_rate", 1.0),
        Quota(ALICE, NOBODY, PRODUCE, 0.0),
        Quota(ALICE, NOBODY, PRODUCE, -1.0),
        Quota(ALICE, NOBODY, PRODUCE, float("nan")),
        Quota(ALICE, NOBODY, PRODUCE, float("inf")),
        Quota(NOBODY, NOBODY, PRODUCE, 1.0),
        Quota(named("x" * 300), NOBODY, PRODUCE, 1.0),
    ],
)
def test_a_quota_that_means_nothing_is_refused(bad: Quota) -> None:
    with pytest.raises(InvalidError):
        check_quota(bad)
