"""Stitching a snapshot to the stream: which transactions of the stream the snapshot already holds. Pure.

    xid < xmin                  in the snapshot: skip
    xid ≥ xmax                  not in it: keep, and from here on nothing is skipped any more
    else                        in it exactly when xid is not among those in progress

The stream carries 32-bit xids and the snapshot 64-bit ones. A stream xid is widened to the 64-bit xid
nearest to xmax before *every* comparison, also for membership among those in progress.

Once a transaction with xid ≥ xmax was seen, every later one committed after the snapshot was taken, so
filtering stops; the 2³¹ window of the widening therefore never has to hold for longer than the snapshot.
"""

from __future__ import annotations

from tidemill.base.errors import Invalid

_HALF = 1 << 31
_FULL = 1 << 32


def widen(xid: int, reference: int) -> int:
    """The 64-bit xid equal to `xid` modulo 2³² that lies nearest to `reference`."""
    return reference + ((xid - reference + _HALF) % _FULL) - _HALF


class PgSnapshot:
    """pg_current_snapshot(): xmin, xmax and the xids in progress, all 64-bit."""

    def __init__(self, xmin: int, xmax: int, in_progress: frozenset[int]) -> None:
        self.xmin = xmin
        self.xmax = xmax
        self.in_progress = in_progress

    @classmethod
    def parse(cls, text: str) -> PgSnapshot:
        """Read `xmin:xmax:xip,…`. Raises Invalid."""
        try:
            xmin, xmax, xips = text.split(":")
            return cls(int(xmin), int(xmax), frozenset(int(x) for x in xips.split(",") if x))
        except ValueError as error:
            raise Invalid(f"not a snapshot: snapshot={text!r}.") from error

    def sees(self, xid: int) -> bool:
        """Whether the effects of the stream's transaction `xid` are in the snapshot."""
        wide = widen(xid, self.xmax)
        if wide < self.xmin:
            return True
        if wide >= self.xmax:
            return False
        return wide not in self.in_progress


class SnapshotFilter:
    """Decides for each transaction, in commit order, whether to apply it to a shape."""

    def __init__(self, snapshot: PgSnapshot) -> None:
        self._snapshot: PgSnapshot | None = snapshot

    @property
    def passed(self) -> bool:
        return self._snapshot is None

    def admits(self, xid: int) -> bool:
        snapshot = self._snapshot
        if snapshot is None:
            return True
        if snapshot.sees(xid):
            return False
        if widen(xid, snapshot.xmax) >= snapshot.xmax:
            self._snapshot = None
        return True
