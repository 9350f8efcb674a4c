"""FT1-FT18 of the acceptance list: the flush tracker alone."""

from __future__ import annotations

import pytest

from sim.scenarios.capture_plants import EqualityTracker
from support.capture.fragments import at, change, fragment
from tidemill.base.errors import InvalidError
from tidemill.base.lsn import ChangePosition
from tidemill.capture.delivery.flush_tracker import FlushTracker


def commit(tracker: FlushTracker, lsn: int, *consumers: str, ordinal: int = 0, now_ms: int = 0) -> int | None:
    found = tracker.commit(fragment(lsn, last=at(lsn, ordinal)), consumers, now_ms)
    tracker.check_invariants()
    return found


def flush(tracker: FlushTracker, consumer: str, position: ChangePosition, now_ms: int = 0) -> int | None:
    found = tracker.record_flush(consumer, position, now_ms)
    tracker.check_invariants()
    return found


def test_ft1_a_commit_without_consumers_is_confirmed_at_once() -> None:
    assert commit(FlushTracker(), 5) == 5


def test_ft2_a_commit_with_a_consumer_is_silent() -> None:
    assert commit(FlushTracker(), 5, "a") is None


def test_ft3_a_fragment_that_does_not_commit_is_refused() -> None:
    with pytest.raises(InvalidError):
        FlushTracker().commit(fragment(5, change(5), commits=False), ["a"], 0)


def test_ft4_the_last_consumer_to_reach_what_it_was_sent_confirms_the_last_seen() -> None:
    tracker = FlushTracker()
    commit(tracker, 5, "a", "b", ordinal=8)
    # b still holds its first position, (5 − 1, 0): everything before 4 is certain.
    assert flush(tracker, "a", at(5, 8)) == 3
    assert flush(tracker, "b", at(5, 8)) == 5
    assert tracker.pending_positions == {}


def test_ft5_catching_up_after_later_transactions_confirms_the_last_seen_not_its_own() -> None:
    tracker = FlushTracker()
    commit(tracker, 5, "a")
    assert commit(tracker, 6) is None
    assert commit(tracker, 7) is None
    assert flush(tracker, "a", at(5)) == 7


def test_ft6_a_consumer_new_at_5_holds_the_acknowledgement_at_3() -> None:
    tracker = FlushTracker()
    commit(tracker, 1, "a")
    commit(tracker, 5, "b")
    assert flush(tracker, "a", at(1)) == 3


def test_ft7_a_partial_flush_at_5_confirms_4() -> None:
    tracker = FlushTracker()
    commit(tracker, 5, "a", ordinal=8)
    commit(tracker, 6, "a")
    assert flush(tracker, "a", at(5, 4)) == 4


def test_ft8_uneven_flushes_are_confirmed_in_order_without_repeats() -> None:
    tracker = FlushTracker()
    for lsn in (5, 6, 7):
        commit(tracker, lsn, "a", "b")
    notices = [flush(tracker, c, at(lsn)) for c, lsn in (("a", 6), ("b", 6), ("a", 7), ("b", 7))]
    # a at 6 frees nothing above b's start (4, 0); b at 6 frees 5; then a is done and b holds 6; then everything is
    # free.
    assert notices == [3, 5, None, 7]


def test_ft9_a_then_b_confirm_10_then_12_and_never_11() -> None:
    tracker = FlushTracker()
    notices = [commit(tracker, 10, "a"), commit(tracker, 11), commit(tracker, 12, "b")]
    assert notices == [None, None, None]
    assert flush(tracker, "a", at(10)) == 10
    assert flush(tracker, "b", at(12)) == 12


def test_ft10_transactions_that_always_overlap_do_not_stop_progress() -> None:
    tracker = FlushTracker()
    commit(tracker, 1, "a")
    confirmed = []
    for lsn in range(2, 40):
        newer, older = ("b", "a") if lsn % 2 == 0 else ("a", "b")
        commit(tracker, lsn, newer)
        confirmed.append(flush(tracker, older, at(lsn - 1)))
    assert tracker.pending_positions
    seen = [c for c in confirmed if c is not None]
    assert seen == sorted(set(seen))
    assert seen[-1] == 37


def test_ft11_when_the_slowest_is_done_the_next_minimum_holds() -> None:
    tracker = FlushTracker()
    commit(tracker, 3, "slow")
    commit(tracker, 9, "b")
    assert tracker.blocking_consumer() == "slow"
    assert flush(tracker, "slow", at(3)) == 7
    assert tracker.blocking_consumer() == "b"


def test_ft12_a_dead_consumer_pins_whatever_the_others_flush() -> None:
    tracker = FlushTracker()
    commit(tracker, 3, "dead")
    for lsn in range(4, 20):
        commit(tracker, lsn, "b")
        assert flush(tracker, "b", at(lsn)) in (None, 1)
    assert tracker.global_flushed == at(2)
    assert tracker.blocking_consumer() == "dead"


def test_ft14_unknown_consumers_change_nothing() -> None:
    tracker = FlushTracker()
    commit(tracker, 3, "a")
    assert flush(tracker, "ghost", at(99)) is None
    assert list(tracker.pending_positions) == ["a"]


def test_ft15_stalled_is_strictly_older_than_the_grace_time() -> None:
    tracker = FlushTracker()
    commit(tracker, 3, "a", now_ms=1000)
    assert tracker.stalled_consumers(1060, 60) == []
    assert tracker.stalled_consumers(1061, 60) == ["a"]


def test_ft16_a_new_transaction_is_no_progress() -> None:
    tracker = FlushTracker()
    commit(tracker, 3, "a", now_ms=0)
    commit(tracker, 4, "a", now_ms=90)
    assert tracker.stalled_consumers(100, 60) == ["a"]


def test_ft17_a_partial_flush_gives_a_fresh_grace_time() -> None:
    tracker = FlushTracker()
    commit(tracker, 3, "a", ordinal=8, now_ms=0)
    assert tracker.stalled_consumers(100, 60) == ["a"]
    flush(tracker, "a", at(3, 2), now_ms=100)
    assert tracker.stalled_consumers(150, 60) == []
    assert tracker.stalled_consumers(161, 60) == ["a"]


def test_ft18_a_flush_above_what_was_sent_completes() -> None:
    tracker = FlushTracker()
    commit(tracker, 3, "a", ordinal=4)
    assert flush(tracker, "a", at(3, 5)) == 3
    assert tracker.pending_positions == {}
    planted = EqualityTracker()
    planted.commit(fragment(3, last=at(3, 4)), ["a"], 0)
    planted.record_flush("a", at(3, 5), 0)
    # with ==, the entry stays pinned permanently
    assert planted.pending_positions


def test_a_pinned_minimum_does_not_let_the_order_grow() -> None:
    tracker = FlushTracker()
    commit(tracker, 1, "dead")
    for lsn in range(2, 2000):
        commit(tracker, lsn, "b")
        flush(tracker, "b", at(lsn))
    assert len(tracker._ordered) < 200


def test_a_flushed_position_above_every_commit_breaks_an_invariant() -> None:
    tracker = FlushTracker()
    commit(tracker, 3, "a")
    tracker.check_invariants()
    tracker.global_flushed = at(4)
    with pytest.raises(AssertionError):
        tracker.check_invariants()
