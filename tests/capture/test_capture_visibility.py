"""Visibility of streamed transactions in a snapshot: the xid rules, with 32-bit wrap (rows C6 and C7)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.base.errors import InvalidError
from tidemill.capture.postgres.pg_snapshot import PgSnapshot, widen_xid

EPOCH = 1 << 32


def test_c6_a_transaction_below_xmin_is_in_the_snapshot() -> None:
    assert PgSnapshot(100, 110, frozenset()).is_visible(99)


def test_c7_a_transaction_in_progress_is_not_in_the_snapshot() -> None:
    snapshot = PgSnapshot.parse("100:110:100,105")
    assert not snapshot.is_visible(105)
    assert not snapshot.is_visible(100)
    assert snapshot.is_visible(104)
    assert not snapshot.is_visible(110)
    assert not snapshot.is_visible(111)


@pytest.mark.parametrize("text", ["", "1:2", "a:b:c", "1:2:3:4", "1:2:x"])
def test_a_malformed_snapshot_is_refused(text: str) -> None:
    with pytest.raises(InvalidError):
        PgSnapshot.parse(text)


def test_membership_is_compared_after_widening_too() -> None:
    """The stream has xid 5, the snapshot 3·2³² + 5: a raw membership test would call it finished and lose its rows."""
    snapshot = PgSnapshot(3 * EPOCH + 2, 3 * EPOCH + 9, frozenset({3 * EPOCH + 5}))
    assert not snapshot.is_visible(5)
    assert snapshot.is_visible(4)


def test_a_snapshot_around_the_wrap_orders_both_sides() -> None:
    snapshot = PgSnapshot(2 * EPOCH - 3, 2 * EPOCH + 4, frozenset({2 * EPOCH - 2, 2 * EPOCH + 1}))
    assert snapshot.is_visible(EPOCH - 4)
    assert snapshot.is_visible(EPOCH - 3)
    assert not snapshot.is_visible(EPOCH - 2)
    assert snapshot.is_visible(0)
    assert not snapshot.is_visible(1)
    assert snapshot.is_visible(3)
    assert not snapshot.is_visible(4)


@given(st.integers(3, 1 << 50), st.integers(-(1 << 31) + 1, (1 << 31) - 1))
def test_widening_finds_the_xid_within_half_an_epoch(reference: int, distance: int) -> None:
    xid = reference + distance
    if xid < 0:
        return
    assert widen_xid(xid % EPOCH, reference) == xid


@given(st.integers(EPOCH, 1 << 40), st.sets(st.integers(0, 40)), st.integers(1, 40), st.integers(-100, 100))
def test_the_32_bit_rule_agrees_with_the_64_bit_one(xmin: int, running: set[int], width: int, distance: int) -> None:
    in_progress = frozenset(xmin + r for r in running if r < width)
    snapshot = PgSnapshot(xmin, xmin + width, in_progress)
    xid = xmin + distance
    expected = xid < xmin or (xid < xmin + width and xid not in in_progress)
    assert snapshot.is_visible(xid % EPOCH) is expected
