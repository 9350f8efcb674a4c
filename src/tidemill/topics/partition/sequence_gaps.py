"""Batches of idempotent producers that failed here and whose retry is still to come (F2).

The queue poisons what was in line behind a failed batch. A later batch that arrives after the failure and
before the client's retry finds an empty queue; for a producer without state any sequence would be accepted
(I4), and the retry refused for ever. So the first failed batch of a producer is remembered, and later ones
are told to come again until it has been retried, its epoch is superseded, or the memory expires.
"""

from __future__ import annotations

from tidemill.topics.batch.header import MAX_SEQUENCE

HOLE_EXPIRY_S = 60.0
HOLES_LIMIT = 10_000


class SequenceGaps:
    """One partition's holes on this node; outlives the leadership in which they arose. Pure: time passed in."""

    def __init__(self) -> None:
        self._holes: dict[int, tuple[int, int, int, float]] = {}
        """producer id → epoch, the first and the last sequence that is missing at the start of a batch, since when"""

    def __len__(self) -> int:
        return len(self._holes)

    def failed(self, producer_id: int, epoch: int, first_sequence: int, now_s: float) -> None:
        """A batch certainly did not, or may not have, reached the log. The earliest of an epoch counts: uploads end
        in any order, so a later batch may fail before an earlier one does."""
        first = last = first_sequence
        known = self._holes.get(producer_id)
        if known is not None and now_s - known[3] < HOLE_EXPIRY_S:
            if epoch < known[0]:
                return
            if epoch == known[0]:
                first = known[1] if _precedes(known[1], first) else first
                last = known[2] if _precedes(last, known[2]) else last
                now_s = known[3]  # else who comes again and again would keep it for ever
        if len(self._holes) >= HOLES_LIMIT and known is None:
            del self._holes[next(iter(self._holes))]
        self._holes[producer_id] = (epoch, first, last, now_s)

    def blocks(self, producer_id: int, epoch: int, first_sequence: int, now_s: float) -> bool:
        """Must this batch wait for the retry of an earlier one? A batch before the hole never waits for it."""
        known = self._holes.get(producer_id)
        if known is None:
            return False
        if now_s - known[3] >= HOLE_EXPIRY_S:
            del self._holes[producer_id]
            return False
        return epoch == known[0] and _precedes(known[1], first_sequence)

    def filled(self, producer_id: int, epoch: int, first_sequence: int, count: int) -> None:
        """This batch of `count` records stands in the log. What failed later is missing still: the hole begins where
        the batch ends."""
        known = self._holes.get(producer_id)
        if known is None or epoch < known[0]:
            return
        following = (first_sequence + count) & MAX_SEQUENCE
        if epoch > known[0] or _precedes(known[2], following):
            del self._holes[producer_id]
        elif not _precedes(first_sequence, known[1]):
            self._holes[producer_id] = (epoch, following, known[2], known[3])


def _precedes(earlier: int, later: int) -> bool:
    """Sequences wrap at 2³¹: of two, the one less than half the circle behind came first."""
    return 0 < ((later - earlier) & MAX_SEQUENCE) < MAX_SEQUENCE // 2
