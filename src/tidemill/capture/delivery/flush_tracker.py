"""The flush tracker: computes up to which commit *every* consumer has made everything durable.

Problem. One replication slot feeds many consumers. PostgreSQL may recycle WAL only below the position that all of them
have stored durably. Consumers flush at their own pace, most transactions touch few of them, and an untouched consumer
must not block the others.

State. Positions are (commit LSN, ordinal), compared as tuples.

    G   greatest global flushed position that was derived so far, at first (−1, 0)
    S   position of the last commit seen
    P   consumer → (sent, flushed, progress time): consumers with something sent and not yet flushed.
        sent     the last commit boundary delivered to the consumer
        flushed  the position it has flushed; for a new entry (commit LSN − 1, 0): everything before this commit, or
                 before the first commit of a batch, which is registered once, at its last position
    T   the `record_flush` values of P in order, for access to their minimum (here a heap with lazy deletion)

Algorithm.

    commit(position, consumers)   A tracked consumer gets a new `sent`, nothing else. An untracked one enters P with
                                  flushed = (commit LSN − 1, 0). S = position. If P is empty, everything is flushed:
                                  G = S, notify(S's LSN).
    flushed(consumer, position)   Untracked: ignored. position ≥ sent: the consumer leaves P. Otherwise its flushed
                                  value moves. Then update.
    update                        P empty: G = S, notify(S's LSN), even if nothing changed. Otherwise
                                  G' = max(G, min T). Only if that is new: notify(G's LSN − 1), because a part of the
                                  transaction at G may be missing.

Only commits are registered, never fragments before them (electric #3985, #4063). A consumer that wrote part of a
transaction defers its notice and aligns it at the commit (`flush_alignment.py`).

Completion is position ≥ sent, not ==. A consumer may report further than it was sent, and a near miss must not block
the slot indefinitely (electric #4744).

Invariant (members): P and T have the same consumers, and every entry of P is incomplete.

Invariant (monotonic): G never goes back. Every notified LSN is ≤ S's LSN and below the commit LSN of any unflushed
commit.

Invariant (completion): when every consumer has flushed everything that it was sent, P is empty.

Time is passed in and used for one purpose: `stalled_consumers` names consumers without progress. New transactions do
not count as progress.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from tidemill.base.errors import InvalidError
from tidemill.base.lsn import BEFORE_ALL, ChangePosition
from tidemill.capture.changes import Fragment


class _PendingConsumer:
    __slots__ = ("flushed", "progress_at_ms", "sent")

    def __init__(self, sent: ChangePosition, flushed: ChangePosition, progress_at_ms: int) -> None:
        self.sent = sent
        self.flushed = flushed
        self.progress_at_ms = progress_at_ms


class FlushTracker:
    """Flush positions of all consumers. Every method returns the commit LSN to confirm upstream, or None if nothing new
    is known.
    """

    def __init__(self) -> None:
        self.global_flushed = BEFORE_ALL
        self.last_seen = BEFORE_ALL
        self._pending: dict[str, _PendingConsumer] = {}
        self._ordered: list[tuple[int, int, str]] = []

    def commit(self, fragment: Fragment, consumers: Iterable[str], now_ms: int) -> int | None:
        """Register the consumers that received the transaction that `fragment` commits. Raises InvalidError for a
        fragment that does not commit.
        """
        if not fragment.commits:
            raise InvalidError(f"only a commit can be registered: xid={fragment.xid} last={fragment.last}.")
        position = fragment.last
        for consumer in sorted(set(consumers)):
            entry = self._pending.get(consumer)
            if entry is not None:
                entry.sent = position
            else:
                before = ChangePosition(fragment.first_lsn - 1, 0)
                self._pending[consumer] = _PendingConsumer(position, before, now_ms)
                self._push_position(consumer, before)
        self.last_seen = max(self.last_seen, position)
        return None if self._pending else self._advance_to_last_seen()

    def record_flush(self, consumer: str, position: ChangePosition, now_ms: int) -> int | None:
        entry = self._pending.get(consumer)
        if entry is None:
            return None
        if position >= entry.sent:
            del self._pending[consumer]
        elif position > entry.flushed:
            entry.flushed = position
            entry.progress_at_ms = now_ms
            self._push_position(consumer, position)
        return self._advance()

    def stalled_consumers(self, now_ms: int, grace_ms: int) -> list[str]:
        """Return the consumers without progress for strictly longer than `grace_ms`, in name order."""
        return sorted(c for c, e in self._pending.items() if now_ms - e.progress_at_ms > grace_ms)

    @property
    def pending_positions(self) -> dict[str, ChangePosition]:
        """Flushed position of each incomplete consumer; the lowest one holds the slot."""
        return {consumer: entry.flushed for consumer, entry in self._pending.items()}

    def blocking_consumer(self) -> str:
        """Return the consumer with the lowest flushed position, or "" if nothing is pending."""
        self._drop_stale_positions()
        return self._ordered[0][2] if self._ordered else ""

    def check_invariants(self) -> None:
        """Assert that every member of P is incomplete and has its place in T, and that G is at most S."""
        live = {(e.flushed.commit_lsn, e.flushed.ordinal, c) for c, e in self._pending.items()}
        assert live <= set(self._ordered), "an entry is missing from the order"
        assert all(e.flushed < e.sent for e in self._pending.values()), "a complete entry is still pending"
        assert self.global_flushed <= self.last_seen, "a position is flushed that no commit has reached"

    def _advance(self) -> int | None:
        if not self._pending:
            return self._advance_to_last_seen()
        self._drop_stale_positions()
        commit_lsn, ordinal, _ = self._ordered[0]
        least = ChangePosition(commit_lsn, ordinal)
        if least <= self.global_flushed:
            return None
        self.global_flushed = least
        return least.commit_lsn - 1

    def _advance_to_last_seen(self) -> int:
        self._ordered.clear()
        self.global_flushed = max(self.global_flushed, self.last_seen)
        return self.last_seen.commit_lsn

    def _push_position(self, consumer: str, position: ChangePosition) -> None:
        heapq.heappush(self._ordered, (position.commit_lsn, position.ordinal, consumer))
        # A pinned minimum prevents stale entries of others from ever reaching the top: rebuild before they pile up.
        if len(self._ordered) > 64 + 2 * len(self._pending):
            self._ordered = [(e.flushed.commit_lsn, e.flushed.ordinal, c) for c, e in self._pending.items()]
            heapq.heapify(self._ordered)

    def _drop_stale_positions(self) -> None:
        """Drop heap entries that no longer describe a pending consumer."""
        ordered = self._ordered
        while ordered:
            commit_lsn, ordinal, consumer = ordered[0]
            entry = self._pending.get(consumer)
            if entry is not None and entry.flushed == ChangePosition(commit_lsn, ordinal):
                return
            heapq.heappop(ordered)
