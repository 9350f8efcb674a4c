"""Stitching a snapshot to the stream: which transactions a shape skips, because its initial rows hold them. Pure.

The rule itself is capture's (`capture/postgres/pg_snapshot.py`). Here is until when it is asked.

A transaction with xid ≥ xmax may come in the stream before one that the snapshot sees: of two that commit at the same
time, the first in the WAL need not be the first that becomes visible. But nothing that the snapshot sees comes at or
behind the end of the WAL of then: from there on nothing is skipped any more. A shape may be quiet for any number of
transactions, and its next one then has an xid outside of the 2³¹ window of the widening; its LSN says what it is.

`passed` is valid within one session and never stored. After a restart the stream begins at an earlier position. It
repeats transactions that the snapshot contains and that left no item in the log of the shape.
"""

from __future__ import annotations

from tidemill.capture.postgres.pg_snapshot import PgSnapshot


class SnapshotFilter:
    """Decides for each transaction, in commit order, whether to apply it to a shape. `snapshot` has its LSN."""

    def __init__(self, snapshot: PgSnapshot) -> None:
        self._snapshot = snapshot
        self.passed = False
        """All further transactions are later than the snapshot."""

    def admits(self, xid: int, commit_lsn: int) -> bool:
        if self.passed:
            return True
        if commit_lsn >= self._snapshot.lsn:
            self.passed = True
            return True
        return not self._snapshot.sees(xid)
