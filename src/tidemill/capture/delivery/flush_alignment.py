"""Deferral and alignment of flush notices, for every consumer that writes transactions fragment by fragment. Pure.

Storage flushes when its buffer is full or a timer fires, not when a transaction ends, and it reports the position of
the last *written* change. The tracker counts in commit boundaries: the last position of the whole transaction, most of
whose changes may belong to other consumers. This causes a race: a flush reported in the middle of a transaction is
below the boundary that the commit will register, and if the commit brings no further change for this consumer, no
further flush ever arrives. Two rules prevent it:

    defer   a flush seen while its transaction is open is stored (the greatest one) and processed when that
            transaction is closed
    align   `mapping` holds (last written position, commit boundary) of closed transactions whose flush is still
            outstanding. A flush o drops entries with written < o, and takes the boundary of the entry with
            written == o. The notice is max(o, greatest boundary dropped or taken).

A transaction that closes without a written change raises the boundary of the last entry, since it has nothing that will
be flushed. Without an entry there is nothing to wait for, and the boundary is reported immediately.

The caller registers with the tracker at the commit and sends what these methods return through the collector's queue,
which orders the notice after the registration.
"""

from __future__ import annotations

from collections import deque

from tidemill.base.lsn import ChangePosition


class FlushAlignment:
    """State of one consumer between its storage and the tracker. Methods return the position to report, or None."""

    def __init__(self) -> None:
        self._open_lsn: int | None = None
        self._open_written: ChangePosition | None = None
        self._deferred: ChangePosition | None = None
        self._mapping: deque[tuple[ChangePosition, ChangePosition]] = deque()

    @property
    def is_idle(self) -> bool:
        """True if nothing is open, mapped or deferred. Only then may the consumer be suspended."""
        return self._open_lsn is None and not self._mapping and self._deferred is None

    def record_fragment(
        self, written: ChangePosition | None, last: ChangePosition, *, commits: bool
    ) -> ChangePosition | None:
        """Note a fragment. `written`: its last change that went to storage, if any. `last`: its own last position."""
        if written is not None:
            self._open_lsn = last.commit_lsn
            self._open_written = written
        if not commits:
            return None
        written, self._open_written, self._open_lsn = self._open_written, None, None
        notice: ChangePosition | None = None
        if written is not None:
            self._mapping.append((written, last))
        elif self._mapping:
            # Never lower: a keepalive's position may be exactly the commit before it.
            self._mapping[-1] = (self._mapping[-1][0], max(self._mapping[-1][1], last))
        else:
            notice = last
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            aligned = self.align_to_boundary(deferred)
            notice = aligned if notice is None else max(notice, aligned)
        return notice

    def record_flush(self, position: ChangePosition) -> ChangePosition | None:
        """Note that storage has flushed everything written up to `position`."""
        if self._open_lsn is not None and position.commit_lsn >= self._open_lsn:
            self._deferred = position if self._deferred is None else max(self._deferred, position)
            return None
        return self.align_to_boundary(position)

    def align_to_boundary(self, position: ChangePosition) -> ChangePosition:
        """Raise a flushed position to the boundary that it completes."""
        aligned = position
        while self._mapping and self._mapping[0][0] <= position:
            _, boundary = self._mapping.popleft()
            aligned = max(aligned, boundary)
        return aligned
