"""Joins a snapshot to the stream: decides which transactions a shape skips, because its initial rows contain them.
Pure.

The visibility rule itself is in `capture/postgres/pg_snapshot.py`. This module decides until when to apply it.

A transaction with xid ≥ xmax may be streamed before one that the snapshot sees: of two that commit at the same time,
the first one in the WAL need not be the first to become visible. But nothing that the snapshot sees is at or after the
end of the WAL at that time. From that LSN on nothing is skipped. The LSN decides even if the shape was quiet for so
many transactions that the next xid is outside the 2³¹ window in which xids can be compared.

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
        """True if all further transactions are later than the snapshot."""

    def admits(self, xid: int, commit_lsn: int) -> bool:
        if self.passed:
            return True
        if commit_lsn >= self._snapshot.lsn:
            self.passed = True
            return True
        return not self._snapshot.is_visible(xid)
