"""Batches of whole transactions (changes.Fragment with `batch`), and the transactions of which they consist. Pure.

How transactions are put into batches depends on what a read of the socket delivered. A repetition of the stream may put
them into other batches, so a consumer that has seen some of the transactions of a batch takes the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from tidemill.base.lsn import ChangePosition
from tidemill.capture.changes import Change, CommitColumns, Fragment
from tidemill.capture.decode.row_blocks import ChangePart, LazyChanges, SegmentRows, parts_of


class BatchBuilder:
    """Whole transactions that are not handed on yet. A transaction is a slice of `_parts`."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._xids: list[int] = []
        self._lsns: list[int] = []
        self._times_ms: list[int] = []
        self._ends: list[int] = []
        self._parts: list[ChangePart] = []
        self.count = 0
        """Number of changes, plus one for each transaction."""
        self.size_bytes = 0

    def add(self, xid: int, lsn: int, time_ms: int, parts: list[ChangePart], count: int, size_bytes: int) -> None:
        """Add a transaction of `count` changes."""
        self._xids.append(xid)
        self._lsns.append(lsn)
        self._times_ms.append(time_ms)
        self._parts += parts
        self._ends.append((self._ends[-1] if self._ends else 0) + count)
        self.count += 1 + count
        self.size_bytes += size_bytes

    def take_fragment(self) -> Fragment | None:
        """Return everything that was added since the last call; None if there is nothing."""
        if not self._lsns:
            return None
        batch = CommitColumns(self._xids, self._lsns, self._times_ms, self._ends)
        lsn, end, before = batch.lsns[-1], batch.ends[-1], batch.ends[-2] if len(batch) > 1 else 0
        fragment = Fragment(
            xid=batch.xids[-1],
            commit_lsn=lsn,
            commit_time_ms=batch.times_ms[-1],
            begins=True,
            commits=True,
            changes=join_parts(self._parts),
            last=last_position(self._parts[-1]) if end > before else ChangePosition(lsn, 0),
            size_bytes=self.size_bytes,
            batch=batch,
        )
        self._clear()
        return fragment


def join_parts(parts: list[ChangePart]) -> LazyChanges | tuple[Change, ...]:
    for part in parts:
        if isinstance(part, SegmentRows):
            return LazyChanges(parts)
    return tuple(parts)  # type: ignore[arg-type]


def last_position(part: ChangePart) -> ChangePosition:
    return part.position(part.end - 1) if isinstance(part, SegmentRows) else part.position


def transaction_parts(fragment: Fragment) -> Iterator[tuple[int, int, int, Sequence[ChangePart]]]:
    """Yield (xid, commit LSN, commit time in ms, changes) of each transaction of a batch."""
    batch = fragment.batch
    assert batch is not None
    parts, at, done = list(parts_of(fragment.changes)), 0, 0
    for xid, lsn, time_ms, end in zip(batch.xids, batch.lsns, batch.times_ms, batch.ends, strict=True):
        first = at
        while done < end:
            part = parts[at]
            done += len(part) if isinstance(part, SegmentRows) else 1
            at += 1
        yield xid, lsn, time_ms, parts[first:at]


def split_batch(fragment: Fragment, after_lsn: int = -1) -> list[Fragment]:
    """Return the transactions of a batch above an LSN as one fragment each; another fragment is returned unchanged."""
    if fragment.batch is None:
        return [fragment]
    size_bytes = fragment.size_bytes // len(fragment.batch)
    return [
        Fragment(
            xid, lsn, time_ms, True, True, join_parts(list(parts)),
            last_position(parts[-1]) if parts else ChangePosition(lsn, 0), (), size_bytes,
        )
        for xid, lsn, time_ms, parts in transaction_parts(fragment)
        if lsn > after_lsn
    ]  # fmt: skip


def drop_replayed(fragment: Fragment, after_lsn: int) -> Fragment:
    """Return a batch without its transactions up to an LSN, which is below its last one."""
    batch = fragment.batch
    if batch is None or batch.lsns[0] > after_lsn:
        return fragment
    builder = BatchBuilder()
    for xid, lsn, time_ms, parts in transaction_parts(fragment):
        if lsn > after_lsn:
            count = sum(len(part) if isinstance(part, SegmentRows) else 1 for part in parts)
            builder.add(xid, lsn, time_ms, list(parts), count, 0)
    rest = builder.take_fragment()
    assert rest is not None
    return msgspec.structs.replace(rest, size_bytes=fragment.size_bytes)
