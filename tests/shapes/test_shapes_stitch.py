"""Until when a shape asks whether its snapshot holds a transaction."""

from __future__ import annotations

from tidemill.capture.visibility import PgSnapshot
from tidemill.shapes.stitch import FAR_BEYOND, SnapshotFilter

EPOCH = 1 << 32


def test_a_transaction_that_is_seen_may_come_after_one_that_is_not() -> None:
    """Two commits at once: 112 is first in the WAL, 105 is first to become visible. The snapshot has 105 only."""
    stitched = SnapshotFilter(PgSnapshot(100, 110, frozenset()))
    assert stitched.admits(112)
    assert not stitched.admits(105)


def test_once_a_transaction_that_began_after_the_snapshot_was_seen_nothing_is_skipped_any_more() -> None:
    """Two billion transactions later the widening would be ambiguous; by then the filter has ended."""
    stitched = SnapshotFilter(PgSnapshot(100, 110, frozenset({101})))
    assert not stitched.admits(99)
    assert stitched.admits(101)
    assert not stitched.admits(105)
    assert stitched.admits(110)
    assert not stitched.passed
    assert stitched.admits(110 + FAR_BEYOND)
    assert stitched.passed
    assert stitched.admits((110 + (1 << 31) + 5) % EPOCH)
    assert stitched.admits(99)
