"""Health of an object store, derived from the calls of this process: whether it answers, and whether it accepts writes.

- Evidence: a write that was not done is evidence against the store, whichever error it has. The exception is the
  ConflictError of a create that another writer won, proven by reading the object back. A read that was not done is
  evidence too, unless the object is missing, confirmed by a second request.
- Pending requests: a request without an answer is evidence from its beginning, long before its timeout.
- Trouble: evidence becomes trouble if no request of its kind succeeds for CONFIRM_S. One failed write among successes,
  or a pause of a second, is only a notice: it is reported for NOTICE_S, and the node stays ready.
- Recovery: a success of the same kind ends trouble. A read or a deletion proves nothing about writes, and vice versa.

Attempts count, not calls: a call retries for seconds before it fails, and an operator needs to know earlier.
"""

from __future__ import annotations

import asyncio
from typing import Literal

from tidemill.base.clock import Clock
from tidemill.base.errors import ClosedError, ConflictError, MissingError
from tidemill.base.runtime.tasks import error_sentence

CONFIRM_S = 2.0
"""Time of evidence without any success after which it is trouble: longer than a failover of a gateway's front end."""
UNANSWERED_S = 1.0
"""Time after which an unanswered attempt is evidence."""
NOTICE_S = 10.0

AttemptKind = Literal["write", "read", "delete"]
REQUIRED_KINDS: tuple[AttemptKind, ...] = ("write", "read")
"""Kinds that must work. Objects that cannot be deleted only take space, which is a notice but no trouble."""


class _KindHealth:
    """Attempts of one kind."""

    def __init__(self) -> None:
        self.under_way: dict[int, float] = {}
        """Number to start time. Insertion order is age."""
        self.succeeded_s = float("-inf")
        self.since_s: float | None = None
        """Start of the first attempt that failed after the last success."""
        self.error = ""
        self.error_s = float("-inf")

    def suspect_since_s(self, now_s: float) -> float | None:
        """Return since when there is evidence without a success, or None."""
        oldest_s = next(iter(self.under_way.values()), None)
        if oldest_s is not None:
            oldest_s = max(oldest_s, self.succeeded_s)
            if now_s - oldest_s <= UNANSWERED_S:
                oldest_s = None
        if self.since_s is None or oldest_s is None:
            return oldest_s if self.since_s is None else self.since_s
        return min(self.since_s, oldest_s)


class StoreHealth:
    """Health of one store. Plain calls that take a few hundred nanoseconds per attempt."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._number = 0
        self._sides: dict[AttemptKind, _KindHealth] = {kind: _KindHealth() for kind in (*REQUIRED_KINDS, "delete")}
        self._noticed = ""
        self._noticed_s = float("-inf")

    def begin_attempt(self, kind: AttemptKind) -> int:
        self._number = number = self._number + 1
        self._sides[kind].under_way[number] = self._clock.monotonic_s()
        return number

    def end_attempt(self, number: int, kind: AttemptKind, error: BaseException | None) -> None:
        """Record the end of an attempt; `error` None: it succeeded.

        An attempt cancelled before UNANSWERED_S proves nothing.
        """
        side = self._sides[kind]
        began_s = side.under_way.pop(number, None)
        now_s = self._clock.monotonic_s()
        if began_s is None:
            began_s = now_s
        if error is None or _is_store_success(error, kind):
            side.succeeded_s, side.since_s, side.error = now_s, None, ""
        elif isinstance(error, asyncio.CancelledError):
            if now_s - began_s > UNANSWERED_S:
                self._record_evidence(side, began_s, now_s, _no_answer_text(kind, now_s - began_s))
        elif not isinstance(error, ClosedError):
            self._record_evidence(side, began_s, now_s, error_sentence(error))

    def record_notice(self, what: str) -> None:
        """Record a fault although the store did its work."""
        self._noticed, self._noticed_s = what, self._clock.monotonic_s()

    def trouble(self) -> str:
        """Return what does not work now, or "". Writes come first, because callers wait for them."""
        now_s = self._clock.monotonic_s()
        for kind in REQUIRED_KINDS:
            side = self._sides[kind]
            since_s = side.suspect_since_s(now_s)
            if since_s is not None and now_s - since_s > CONFIRM_S:
                return self._describe(kind, side, now_s)
        return ""

    def recent_fault(self) -> str:
        """Return what failed recently although the store works, or is not proven to fail yet, or ""."""
        now_s = self._clock.monotonic_s()
        for kind in REQUIRED_KINDS:
            if self._sides[kind].suspect_since_s(now_s) is not None:
                return self._describe(kind, self._sides[kind], now_s)
        if self._noticed and now_s - self._noticed_s <= NOTICE_S:
            return self._noticed
        for kind, side in self._sides.items():
            oldest_s = next(iter(side.under_way.values()), now_s)
            if now_s - oldest_s > CONFIRM_S:
                return _no_answer_text(kind, now_s - oldest_s)
        return ""

    def is_suspected(self, kind: AttemptKind) -> bool:
        """Return whether there is enough evidence to justify a probe."""
        now_s = self._clock.monotonic_s()
        since_s = self._sides[kind].suspect_since_s(now_s)
        return since_s is not None and now_s - since_s > UNANSWERED_S

    def _record_evidence(self, side: _KindHealth, began_s: float, now_s: float, error: str) -> None:
        if side.since_s is None:
            side.since_s = max(began_s, side.succeeded_s)
        side.error, side.error_s = error, now_s
        self.record_notice(error)

    def _describe(self, kind: AttemptKind, side: _KindHealth, now_s: float) -> str:
        """Return the last error, unless requests that began after it are still unanswered."""
        oldest_s = next(iter(side.under_way.values()), now_s)
        if side.error and (oldest_s < side.error_s or now_s - oldest_s <= CONFIRM_S):
            return side.error
        return _no_answer_text(kind, now_s - oldest_s)


def _is_store_success(error: BaseException, kind: AttemptKind) -> bool:
    """Return whether the store worked despite the error: a lost create, an object that is missing.

    For a write that was not done, only the proven ConflictError counts as an answer. A rejected read is evidence: if
    only this request was wrong, the next read that succeeds ends it.
    """
    return isinstance(error, MissingError if kind == "read" else ConflictError)


def _no_answer_text(kind: AttemptKind, waited_s: float) -> str:
    return f"the object store does not answer: operation={kind} oldest_request_s={waited_s:.0f}."
