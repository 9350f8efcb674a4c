"""Quotas as a pure core: the bucket that counts, the throttle time, and bounded memory."""

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
    NO_ENTITY,
    PRODUCE,
    REQUEST,
    THROTTLE_MAX_MS,
    Quota,
    QuotaLimits,
    check_quota,
    stored_name,
)

ALICE, APP = stored_name("alice"), stored_name("app")
ORDER = [
    (ALICE, APP),
    (ALICE, DEFAULT),
    (ALICE, NO_ENTITY),
    (DEFAULT, APP),
    (DEFAULT, DEFAULT),
    (DEFAULT, NO_ENTITY),
    (NO_ENTITY, APP),
    (NO_ENTITY, DEFAULT),
]


@pytest.mark.parametrize("first", range(len(ORDER)))
def test_the_most_particular_quota_counts(first: int) -> None:
    """Every less specific quota would be exceeded by the first request."""
    quotas = [Quota(*entity, PRODUCE, 1.0) for entity in ORDER[first + 1 :]]
    limits = QuotaLimits([*quotas, Quota(*ORDER[first], PRODUCE, 1e9)])
    assert limits.record_usage(PRODUCE, "alice", "app", 1_000_000, 0.0) == 0
    assert QuotaLimits(quotas).record_usage(PRODUCE, "alice", "app", 1_000_000, 0.0) == (
        THROTTLE_MAX_MS[PRODUCE] if quotas else 0
    )


def test_of_a_default_everyone_has_a_bucket_of_their_own() -> None:
    limits = QuotaLimits([Quota(DEFAULT, NO_ENTITY, PRODUCE, 100.0)])
    assert limits.record_usage(PRODUCE, "alice", "x", 200, 0.0) == 1_000
    assert limits.record_usage(PRODUCE, "alice", "y", 0, 0.0) == 1_000, "whatever it calls itself"
    assert limits.record_usage(PRODUCE, "bob", "x", 100, 0.0) == 0
    assert limits.record_usage(CONSUME, "alice", "x", 10**9, 0.0) == 0, "another quota"


def test_time_has_a_rate_in_per_cent_and_a_silence_of_a_second_at_most() -> None:
    limits = QuotaLimits([Quota(ALICE, NO_ENTITY, REQUEST, 5.0)])
    assert limits.of_time and not QuotaLimits([Quota(ALICE, NO_ENTITY, PRODUCE, 5.0)]).of_time
    assert limits.record_usage(REQUEST, "alice", "", 100 * 0.05, 0.0) == 0, "five per cent of a second"
    assert limits.record_usage(REQUEST, "alice", "", 100 * 0.02, 0.0) == 400
    assert limits.record_usage(REQUEST, "alice", "", 100 * 10.0, 0.0) == THROTTLE_MAX_MS[REQUEST] == 1_000
    assert limits.record_usage(REQUEST, "alice", "", 0, 1.0) == 0


def test_a_name_that_is_spelt_like_a_default_is_a_name() -> None:
    limits = QuotaLimits([Quota(stored_name("*"), NO_ENTITY, PRODUCE, 1.0)])
    assert limits.record_usage(PRODUCE, "alice", "", 10**6, 0.0) == 0
    assert limits.record_usage(PRODUCE, "*", "", 10**6, 0.0) > 0


@given(
    st.floats(1, 1e6),
    st.lists(st.tuples(st.floats(0, 3), st.floats(0, 1e6)), min_size=1, max_size=40),
)
@settings(max_examples=200, deadline=None)
def test_a_client_that_keeps_silent_as_told_stays_within_its_rate(rate: float, uses: list[tuple[float, float]]) -> None:
    limits = QuotaLimits([Quota(ALICE, NO_ENTITY, PRODUCE, rate)])
    now_s = total = 0.0
    for pause_s, amount in uses:
        amount = min(amount, rate * 20)
        now_s += pause_s
        total += amount
        throttle_ms = limits.record_usage(PRODUCE, "alice", "", amount, now_s)
        assert 0 <= throttle_ms <= THROTTLE_MAX_MS[PRODUCE]
        now_s += throttle_ms / 1000
    assert total <= rate * (now_s + BURST_S) * 1.01 + 1


def test_what_was_used_stays_used_when_quotas_change_and_is_forgotten_in_bounds() -> None:
    limits = QuotaLimits([Quota(ALICE, NO_ENTITY, PRODUCE, 100.0)])
    assert limits.record_usage(PRODUCE, "alice", "", 200, 0.0) == 1_000
    limits.replace([Quota(ALICE, NO_ENTITY, PRODUCE, 100.0), Quota(NO_ENTITY, DEFAULT, PRODUCE, 1.0)])
    assert limits.record_usage(PRODUCE, "alice", "", 0, 0.5) == 500
    for i in range(BUCKETS_MAX + 100):
        limits.record_usage(PRODUCE, "", f"client {i}", 1, 0.0)
    assert len(limits._buckets) <= BUCKETS_MAX
    limits.replace([])
    assert limits.is_empty and limits.record_usage(PRODUCE, "alice", "", 10**9, 0.0) == 0


@pytest.mark.parametrize(
    "bad",
    [
        Quota(ALICE, NO_ENTITY, "controller_mutation_rate", 1.0),
        Quota(ALICE, NO_ENTITY, PRODUCE, 0.0),
        Quota(ALICE, NO_ENTITY, PRODUCE, -1.0),
        Quota(ALICE, NO_ENTITY, PRODUCE, float("nan")),
        Quota(ALICE, NO_ENTITY, PRODUCE, float("inf")),
        Quota(NO_ENTITY, NO_ENTITY, PRODUCE, 1.0),
        Quota(stored_name("x" * 300), NO_ENTITY, PRODUCE, 1.0),
    ],
)
def test_a_quota_that_means_nothing_is_refused(bad: Quota) -> None:
    with pytest.raises(InvalidError):
        check_quota(bad)
