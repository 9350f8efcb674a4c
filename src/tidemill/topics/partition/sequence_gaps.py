"""Remember batches of idempotent producers that failed here and that their client has not retried yet.

The queue poisons the batches behind a failed one. But a later batch that arrives after the failure, and before the
client's retry, finds an empty queue. If its producer has no state, any sequence would be accepted, and the retry would
then be refused forever. So the first failed batch of a producer is remembered, and later batches are answered with a
retriable error until it has been retried, its epoch is superseded, or the entry expires.
"""

from __future__ import annotations

from tidemill.topics.batch.header import MAX_SEQUENCE

GAP_EXPIRY_S = 60.0
GAPS_LIMIT = 10_000


class SequenceGaps:
    """Sequence gaps of one partition on this node; outlives the leadership in which they arose.

    Pure: time is passed in.
    """

    def __init__(self) -> None:
        self._holes: dict[int, tuple[int, int, int, float]] = {}
        """Producer id to (epoch, first and last missing batch's first sequence, time of the first failure)."""

    def __len__(self) -> int:
        return len(self._holes)

    def failed(self, producer_id: int, epoch: int, first_sequence: int, now_s: float) -> None:
        """Record a batch that did not, or may not have, reached the log.

        The earliest batch of an epoch counts. Uploads end in any order, so a later batch may fail before an earlier
        one.
        """
        first = last = first_sequence
        known = self._holes.get(producer_id)
        if known is not None and now_s - known[3] < GAP_EXPIRY_S:
            if epoch < known[0]:
                return
            if epoch == known[0]:
                first = known[1] if _precedes(known[1], first) else first
                last = known[2] if _precedes(last, known[2]) else last
                now_s = known[3]  # A producer that retries repeatedly must not renew its gap forever.
        if len(self._holes) >= GAPS_LIMIT and known is None:
            del self._holes[next(iter(self._holes))]
        self._holes[producer_id] = (epoch, first, last, now_s)

    def is_blocked(self, producer_id: int, epoch: int, first_sequence: int, now_s: float) -> bool:
        """Return whether this batch must wait for the retry of an earlier one.

        A batch before the gap never waits for it.
        """
        known = self._holes.get(producer_id)
        if known is None:
            return False
        if now_s - known[3] >= GAP_EXPIRY_S:
            del self._holes[producer_id]
            return False
        return epoch == known[0] and _precedes(known[1], first_sequence)

    def record_appended(self, producer_id: int, epoch: int, first_sequence: int, count: int) -> None:
        """Record that this batch of `count` records is in the log.

        Batches that failed after it are still missing: the gap then begins where this batch ends.
        """
        known = self._holes.get(producer_id)
        if known is None or epoch < known[0]:
            return
        following = (first_sequence + count) & MAX_SEQUENCE
        if epoch > known[0] or _precedes(known[2], following):
            del self._holes[producer_id]
        elif not _precedes(first_sequence, known[1]):
            self._holes[producer_id] = (epoch, following, known[2], known[3])


def _precedes(earlier: int, later: int) -> bool:
    """Compare sequences that wrap at 2³¹: the earlier one is less than half the circle behind."""
    return 0 < ((later - earlier) & MAX_SEQUENCE) < MAX_SEQUENCE // 2
