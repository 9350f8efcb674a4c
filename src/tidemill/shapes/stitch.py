"""Stitching a snapshot to the stream: which transactions a shape skips, because its initial rows hold them. Pure.

The rule itself is capture's (`capture/visibility.py`). Here is until when it is asked.

A transaction with xid ≥ xmax may come in the stream before one that the snapshot sees: of two that commit at the same
time, the first in the WAL need not be the first that becomes visible. But nothing that the snapshot sees comes at or
behind the end of the WAL of then: from there on nothing is skipped any more. A shape may be quiet for any number of
transactions, and its next one then has an xid outside of the 2³¹ window of the widening; its LSN says what it is.

Snapshots that were kept before the LSN was asked for lack it. Of these, a transaction that is FAR_BEYOND xmax began
after the snapshot, and is later than all it sees.
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

    def admits(self, xid: int, commit_lsn: int) -> bool:
        snapshot = self._snapshot
        if snapshot is None:
            return True
        if snapshot.lsn and commit_lsn >= snapshot.lsn:
            self._snapshot = None
            return True
        if snapshot.sees(xid):
            return False
        if not snapshot.lsn and widen(xid, snapshot.xmax) >= snapshot.xmax + FAR_BEYOND:
            self._snapshot = None
        return True
