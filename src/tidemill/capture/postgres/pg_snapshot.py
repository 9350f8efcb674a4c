"""Determine which transactions of the stream a snapshot already contains: the one rule, for topics and shapes alike.
Pure.

    xid < xmin                  in the snapshot
    xid ≥ xmax                  not in it
    otherwise                   in it exactly if xid is not among those in progress

The stream carries 32-bit xids and the snapshot 64-bit ones. A stream xid is widened to the 64-bit xid nearest to xmax
before *every* comparison, also for membership among those in progress. So the answer holds only for transactions within
2³¹ of the snapshot, which every caller has to ensure.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from tidemill.base.errors import InvalidError

_HALF = 1 << 31
_FULL = 1 << 32


def widen_xid(xid: int, reference: int) -> int:
    """Return the 64-bit xid that is equal to `xid` modulo 2³² and nearest to `reference`."""
    return reference + ((xid - reference + _HALF) % _FULL) - _HALF


def is_xid_visible(xid: int, xmin: int, xmax: int, in_progress: Collection[int]) -> bool:
    """Return whether the effects of the stream's transaction `xid` are in the snapshot."""
    wide = widen_xid(xid, xmax)
    return wide < xmin or (wide < xmax and wide not in in_progress)


class PgSnapshot(msgspec.Struct, frozen=True):
    """pg_current_snapshot(): xmin, xmax and the xids in progress, all 64-bit. `lsn`: above every commit that it sees, 0
    = not determined.
    """

    xmin: int
    xmax: int
    in_progress: frozenset[int]
    lsn: int = 0

    @classmethod
    def parse(cls, text: str) -> PgSnapshot:
        """Parse `xmin:xmax:xip,…`, and the output of `str`, which appends the LSN. Raises InvalidError."""
        try:
            seen, at, lsn = text.partition("@")
            xmin, xmax, xips = seen.split(":")
            in_progress = frozenset(int(x) for x in xips.split(",") if x)
            return cls(int(xmin), int(xmax), in_progress, int(lsn) if at else 0)
        except ValueError as error:
            raise InvalidError(f"not a snapshot: snapshot={text!r}.") from error

    def __str__(self) -> str:
        text = f"{self.xmin}:{self.xmax}:{','.join(map(str, sorted(self.in_progress)))}"
        return f"{text}@{self.lsn}" if self.lsn else text

    def is_visible(self, xid: int) -> bool:
        return is_xid_visible(xid, self.xmin, self.xmax, self.in_progress)


def xid_condition(column: str, xid: str) -> str:
    """Return the SQL condition that the transaction id in a column is not older than `xid`. A frozen row keeps the id
    with which it was written, and an id of more than 2^31 transactions ago has a negative age.
    """
    return f"age({column}) BETWEEN 0 AND age('{xid}'::xid8::xid)"
