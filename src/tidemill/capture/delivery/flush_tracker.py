"""The flush tracker: up to which commit has *every* consumer made everything durable?

Problem. One replication slot feeds many consumers. PostgreSQL may forget WAL only below the position
that all of them hold durably. Consumers flush at their own pace, most transactions touch only few of
them, and a consumer that is not touched must not hold anything back.

State. Positions are (commit LSN, ordinal), compared as tuples.
    G   greatest global flushed position that was derived so far, at first (−1, 0)
    S   position of the last commit seen
    P   consumer → (sent, flushed, progress time): consumers that were sent something not yet flushed.
        sent     the last commit boundary delivered to the consumer
        flushed  what it is known to hold; for a new entry (commit LSN − 1, 0): all before this commit
    T   the `flushed` values of P in order, so that their minimum is at hand (here a heap with lazy deletion)

Algorithm.
    commit(position, consumers)   a tracked consumer gets a new `sent`, nothing else; an untracked one enters
                                  P with flushed = (commit LSN − 1, 0). S = position. If P is empty, all there
                                  is has been flushed: G = S, notify(S's LSN).
    flushed(consumer, position)   untracked: ignored. position ≥ sent: the consumer leaves P. Otherwise its
                                  flushed value moves. Then update.
    update                        P empty: G = S, notify(S's LSN), even when nothing changed. Otherwise
                                  G' = max(G, min T); only if that is new, notify(G's LSN − 1): of the
                                  transaction G lies in, some part may be missing.

Only commits are registered, never fragments before them (electric #3985, #4063): a consumer that wrote
part of a transaction defers and aligns its notice at the commit (`flush_alignment.py`).

Completion is position ≥ sent, not ==: a consumer may report further than it was told, and a near miss
must not hold the slot for ever (electric #4744).

Invariants.
    F1  P and T hold the same consumers, every entry of P is incomplete.
    F2  G never goes back; every notified LSN is ≤ S's LSN and below the commit LSN of any unflushed commit.
    F3  When every consumer has flushed what it was sent, P is empty.

Time is passed in and used for one purpose: `stalled` names consumers without progress. New transactions do not
count as progress.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from tidemill.base.errors import InvalidError
from tidemill.base.lsn import BEFORE_ALL, ChangePosition
from tidemill.capture.changes import Fragment


class _Entry:
    __slots__ = ("flushed", "progress_at_ms", "sent")

    def __init__(self, sent: ChangePosition, flushed: ChangePosition, progress_at_ms: int) -> None:
        self.sent = sent
        self.flushed = flushed
        self.progress_at_ms = progress_at_ms


class FlushTracker:
    """Every method returns the commit LSN to confirm upstream, or None when nothing new is known."""

    def __init__(self, *, exact_completion: bool = False) -> None:
        """`exact_completion` plants the fault of electric #4744 (== instead of ≥), for tests that must find it."""
        self.global_flushed = BEFORE_ALL
        self.last_seen = BEFORE_ALL
        self._pending: dict[str, _Entry] = {}
        self._ordered: list[tuple[int, int, str]] = []
        self._exact_completion = exact_completion

    def commit(self, fragment: Fragment, consumers: Iterable[str], now_ms: int) -> int | None:
        """Register those to whom the transaction that `fragment` commits was delivered. Raises InvalidError on a
        fragment that does not commit."""
        if not fragment.commits:
            raise InvalidError(f"only a commit is registered: xid={fragment.xid} last={fragment.last}.")
        position = fragment.last
        for consumer in sorted(set(consumers)):
            entry = self._pending.get(consumer)
            if entry is not None:
                entry.sent = position
            else:
                before = ChangePosition(position.commit_lsn - 1, 0)
                self._pending[consumer] = _Entry(position, before, now_ms)
                self._place(consumer, before)
        self.last_seen = max(self.last_seen, position)
        return None if self._pending else self._all_flushed()

    def flushed(self, consumer: str, position: ChangePosition, now_ms: int) -> int | None:
        entry = self._pending.get(consumer)
        if entry is None:
            return None
        complete = position == entry.sent if self._exact_completion else position >= entry.sent
        if complete:
            del self._pending[consumer]
        elif position > entry.flushed:
            entry.flushed = position
            entry.progress_at_ms = now_ms
            self._place(consumer, position)
        return self._update()

    def stalled(self, now_ms: int, grace_ms: int) -> list[str]:
        """Consumers without progress for strictly longer than `grace_ms`, in name order."""
        return sorted(c for c, e in self._pending.items() if now_ms - e.progress_at_ms > grace_ms)

    @property
    def pending(self) -> dict[str, ChangePosition]:
        """What each incomplete consumer holds; its argmin holds the slot."""
        return {consumer: entry.flushed for consumer, entry in self._pending.items()}

    def holder(self) -> str:
        """The consumer whose flushed position is the minimum, or "" when nothing is pending."""
        self._settle()
        return self._ordered[0][2] if self._ordered else ""

    def check(self) -> None:
        """Assert F1 and the order half of F2."""
        live = {(e.flushed.commit_lsn, e.flushed.ordinal, c) for c, e in self._pending.items()}
        assert live <= set(self._ordered), "F1: an entry without its place in the order"
        assert all(e.flushed < e.sent for e in self._pending.values()), "F1: a complete entry is still pending"
        assert self.global_flushed <= max(self.last_seen, self.global_flushed)

    def _update(self) -> int | None:
        if not self._pending:
            return self._all_flushed()
        self._settle()
        commit_lsn, ordinal, _ = self._ordered[0]
        least = ChangePosition(commit_lsn, ordinal)
        if least <= self.global_flushed:
            return None
        self.global_flushed = least
        return least.commit_lsn - 1

    def _all_flushed(self) -> int:
        self._ordered.clear()
        self.global_flushed = max(self.global_flushed, self.last_seen)
        return self.last_seen.commit_lsn

    def _place(self, consumer: str, position: ChangePosition) -> None:
        heapq.heappush(self._ordered, (position.commit_lsn, position.ordinal, consumer))
        # A pinned minimum keeps stale entries of others from ever reaching the top: rebuild before they pile up.
        if len(self._ordered) > 64 + 2 * len(self._pending):
            self._ordered = [(e.flushed.commit_lsn, e.flushed.ordinal, c) for c, e in self._pending.items()]
            heapq.heapify(self._ordered)

    def _settle(self) -> None:
        """Drop heap entries that no longer describe a pending consumer."""
        ordered = self._ordered
        while ordered:
            commit_lsn, ordinal, consumer = ordered[0]
            entry = self._pending.get(consumer)
            if entry is not None and entry.flushed == ChangePosition(commit_lsn, ordinal):
                return
            heapq.heappop(ordered)
