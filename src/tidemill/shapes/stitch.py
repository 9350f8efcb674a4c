"""Stitching a snapshot to the stream: which transactions a shape skips, because its initial rows hold them. Pure.

The rule itself is capture's (`capture/visibility.py`). Here is until when it is asked.

A transaction with xid ≥ xmax may come in the stream before one that the snapshot sees: of two that commit at the same
time, the first in the WAL need not be the first that becomes visible. Only a transaction that began after the snapshot
is later than all it sees, and one that is FAR_BEYOND xmax did. From there on nothing is skipped any more; the 2³¹
window of the widening therefore never has to hold for much longer than the snapshot.
"""

from __future__ import annotations

from tidemill.capture.visibility import PgSnapshot, widen

FAR_BEYOND = 1 << 24
"""No snapshot is taken while so many transactions are under way."""


class SnapshotFilter:
    """Decides for each transaction, in commit order, whether to apply it to a shape."""

    def __init__(self, snapshot: PgSnapshot | None) -> None:
        """None: it is passed."""
        self._snapshot = snapshot

    @property
    def passed(self) -> bool:
        return self._snapshot is None

    def admits(self, xid: int) -> bool:
        snapshot = self._snapshot
        if snapshot is None:
            return True
        if snapshot.sees(xid):
            return False
        if widen(xid, snapshot.xmax) >= snapshot.xmax + FAR_BEYOND:
            self._snapshot = None
        return True
