"""C1-C5, C15 and the race between flush notices and commits: consumer, tracker and the ordering axiom together."""

from __future__ import annotations

from sim.scenarios.capture_plants import RawNotices
from support.capture.fragments import at, fragment
from tidemill.base.lsn import ChangePosition
from tidemill.capture.delivery.flush_alignment import FlushAlignment
from tidemill.capture.delivery.flush_tracker import FlushTracker


class Harness:
    """One consumer and a tracker: notices wait in the queue until the end of the step that sent them."""

    def __init__(self, alignment: type[FlushAlignment] = FlushAlignment) -> None:
        self.consumer = alignment()
        self.tracker = FlushTracker()
        self.queue: list[ChangePosition] = []
        self.confirmed: list[int] = []

    def deliver(self, lsn: int, written: ChangePosition | None, last: ChangePosition, *, commits: bool) -> None:
        self._cast(self.consumer.record_fragment(written, last, commits=commits))
        if commits:
            self._note(self.tracker.commit(fragment(lsn, last=last), ["c"], 0))
        self._drain()

    def flush(self, position: ChangePosition) -> None:
        self._cast(self.consumer.record_flush(position))
        self._drain()

    def _cast(self, position: ChangePosition | None) -> None:
        if position is not None:
            self.queue.append(position)

    def _drain(self) -> None:
        for position in self.queue:
            self._note(self.tracker.record_flush("c", position, 0))
        self.queue.clear()

    def _note(self, lsn: int | None) -> None:
        if lsn is not None:
            self.confirmed.append(lsn)


def test_c1_a_flush_before_the_commit_lets_the_acknowledgement_advance_after_it() -> None:
    """electric #3985"""
    h = Harness()
    h.deliver(100, at(100, 4), at(100, 4), commits=False)
    h.flush(at(100, 4))
    assert h.confirmed == []
    h.deliver(100, None, at(100, 6), commits=True)
    assert h.confirmed == [100]


def seed_002(h: Harness) -> None:
    """A row of 70 KB for the consumer at ordinal 0, another table's rows after it, the last at 47520."""
    h.deliver(100, at(100, 0), at(100, 50), commits=False)
    h.flush(at(100, 0))
    assert h.confirmed == []
    h.deliver(100, None, at(100, 47520), commits=True)


def test_c2_the_race_of_seed_002_gives_silence_and_then_one_aligned_notice() -> None:
    """electric #4063"""
    h = Harness()
    seed_002(h)
    assert h.confirmed == [100]
    assert h.tracker.pending_positions == {}
    assert h.consumer.is_idle


def test_c2_without_deferral_the_race_pins_the_slot() -> None:
    h = Harness(RawNotices)
    seed_002(h)
    assert 100 not in h.confirmed
    assert list(h.tracker.pending_positions) == ["c"]


def test_c3_a_timer_flush_between_fragments_is_the_same() -> None:
    h = Harness()
    h.deliver(100, at(100, 2), at(100, 50), commits=False)
    h.flush(at(100, 2))
    h.deliver(100, at(100, 60), at(100, 90), commits=False)
    h.flush(at(100, 60))
    assert h.confirmed == []
    h.deliver(100, None, at(100, 120), commits=True)
    assert h.confirmed == [100]


def test_c4_a_commit_without_changes_and_nothing_mapped_reports_at_once() -> None:
    consumer = FlushAlignment()
    assert consumer.record_fragment(None, at(7), commits=True) == at(7)


def test_c5_a_commit_without_changes_raises_the_boundary_of_what_is_still_to_be_flushed() -> None:
    consumer = FlushAlignment()
    assert consumer.record_fragment(at(5, 2), at(5, 8), commits=True) is None
    assert consumer.record_fragment(None, at(7), commits=True) is None
    assert consumer.record_flush(at(5, 2)) == at(7)
    assert consumer.is_idle


def test_c15_align_exact_none_and_empty() -> None:
    consumer = FlushAlignment()
    assert consumer.align_to_boundary(at(3, 3)) == at(3, 3)  # nothing mapped: unchanged
    consumer.record_fragment(at(5, 2), at(5, 8), commits=True)
    assert consumer.align_to_boundary(at(4)) == at(4)  # below the entry: unchanged
    assert consumer.align_to_boundary(at(5, 2)) == at(5, 8)  # the entry: its boundary
    assert consumer.align_to_boundary(at(5, 2)) == at(5, 2)


def test_c15_a_flush_past_several_entries_reports_the_greatest_boundary_dropped() -> None:
    """electric #4744"""
    consumer = FlushAlignment()
    consumer.record_fragment(at(5, 2), at(5, 8), commits=True)
    consumer.record_fragment(at(6, 0), at(6, 4), commits=True)
    assert consumer.align_to_boundary(at(6, 2)) == at(6, 4)


def test_a_flush_of_an_earlier_transaction_is_reported_while_another_one_is_open() -> None:
    consumer = FlushAlignment()
    consumer.record_fragment(at(5, 2), at(5, 8), commits=True)
    consumer.record_fragment(at(6, 0), at(6, 0), commits=False)
    assert consumer.record_flush(at(5, 2)) == at(5, 8)
    assert consumer.record_flush(at(6, 0)) is None


def test_c14_what_is_open_mapped_or_deferred_is_not_idle() -> None:
    consumer = FlushAlignment()
    assert consumer.is_idle
    consumer.record_fragment(at(5, 2), at(5, 2), commits=False)
    assert not consumer.is_idle
    consumer.record_flush(at(5, 2))
    assert not consumer.is_idle  # the deferred flush is still to be reported
    assert consumer.record_fragment(None, at(5, 9), commits=True) == at(5, 9)
    assert consumer.is_idle


def test_a_keepalive_at_the_commit_itself_does_not_lower_its_boundary() -> None:
    """Found by the simulation, seed 341: the notice stayed below the registered position, and no later one followed."""
    consumer = FlushAlignment()
    consumer.record_fragment(at(5, 2), at(5, 8), commits=True)
    assert consumer.record_fragment(None, at(5, 0), commits=True) is None
    assert consumer.record_flush(at(5, 2)) == at(5, 8)
