"""The backlog of one database: fragments that not all shapes have evaluated, their size in memory, and its bounds.

A fragment is counted when it arrives, and released when the last consumer that it can match has evaluated it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import groupby

import msgspec

from tidemill.base.lsn import ChangePosition
from tidemill.capture.changes import Change, CommitColumns, Fragment
from tidemill.capture.decode.row_blocks import changes_of_relations, count_by_relation
from tidemill.shapes.log.items import LogItem, mark_last
from tidemill.shapes.log.log_offset import LogOffset
from tidemill.shapes.log.row_writer import Headers

CHANGE_BYTES = 600
BYTES_FACTOR = 3
"""Memory of a decoded change: its dictionaries and objects (CHANGE_BYTES), and its text as Python stores it (a factor
of its size)."""

PAUSE_S = 5.0
"""The age is checked once a second. After a longer gap the whole process was paused, and no shape was late because of
it."""


class BacklogLimits(msgspec.Struct, frozen=True):
    """Bounds of one database: size and age of changes that not all shapes have evaluated."""

    size_bytes: int = 64 << 20
    age_s: float = 10.0


class BacklogAge:
    """The limit of a backlog's age. Age counts only while the stream is live."""

    def __init__(self, age_s: float) -> None:
        self._age_s = age_s
        self._from_s = 0.0
        """No change counts as older than this time (age of live changes only)."""
        self._checked_s = 0.0

    def restart(self, now_s: float) -> None:
        self._from_s = now_s

    def find_late_before_s(self, now_s: float) -> float | None:
        """Return the time before which a change must have been routed to be late, None if none is. Called once a
        second."""
        if self._checked_s and now_s - self._checked_s > PAUSE_S:
            self._from_s = now_s
        self._checked_s = now_s
        before_s = now_s - self._age_s
        return before_s if before_s > self._from_s else None


class Transaction:
    """State that all shapes share of one delivery of a transaction."""

    __slots__ = ("commit_lsn", "headers", "xid")

    def __init__(self, xid: int, commit_lsn: int) -> None:
        self.xid = xid
        self.commit_lsn = commit_lsn
        self.headers: Headers = {"lsn": str(commit_lsn), "txids": [xid]}


class RenderedItems:
    """Items of a batch that several shapes have in common, by the position of their change."""

    __slots__ = ("_marked", "items")

    def __init__(self) -> None:
        self.items: dict[ChangePosition, list[LogItem]] = {}
        self._marked: dict[LogOffset, tuple[LogItem, LogItem]] = {}

    def mark_last(self, item: LogItem) -> LogItem:
        """Return the item marked as the last of its transaction."""
        made, marked = self._marked.get(item.offset, (None, item))
        if made is not item:
            marked = LogItem(item.offset, mark_last(item.json))
            self._marked[item.offset] = item, marked
        return marked


class TransactionBatch:
    """State that all shapes share of the transactions of a batch."""

    __slots__ = ("_rendered", "_transactions", "_xids")

    def __init__(self, commits: CommitColumns) -> None:
        self._xids = dict(zip(commits.lsns, commits.xids, strict=True))
        self._transactions: dict[int, Transaction] = {}
        self._rendered: dict[object, RenderedItems] = {}

    def rendered_as(self, rendering: object) -> RenderedItems:
        """Return the items of the shapes that render rows in the same way (RowWriter.rendering)."""
        found = self._rendered.get(rendering)
        if found is None:
            found = self._rendered[rendering] = RenderedItems()
        return found

    def transaction(self, commit_lsn: int) -> Transaction:
        found = self._transactions.get(commit_lsn)
        if found is None:
            found = self._transactions[commit_lsn] = Transaction(self._xids[commit_lsn], commit_lsn)
        return found


class Backlog:
    """Fragments of one database that not all shapes have evaluated. `arrivals` are not routed yet."""

    __slots__ = ("_works", "arrivals", "held_bytes")

    def __init__(self) -> None:
        self.held_bytes = 0
        self.arrivals: deque[tuple[Fragment, PendingFragment]] = deque()
        self._works: deque[PendingFragment] = deque()
        """Fragments in order of arrival; the first one has not been evaluated by all consumers."""

    def append(self, fragment: Fragment, before: int) -> None:
        """Append an arrival. `before`: as in PendingFragment."""
        work = PendingFragment(self, len(fragment.changes), memory_bytes(fragment), before)
        self.arrivals.append((fragment, work))
        self._works.append(work)

    def drop_evaluated(self) -> None:
        while self._works and not self._works[0].left:
            self._works.popleft()

    def evaluated_before(self, routed: int) -> int:
        """Return the newest transaction that, with all before it, was evaluated. `routed`: the last one routed."""
        self.drop_evaluated()
        return self._works[0].before if self._works else routed

    def part_of_relations(self, fragment: Fragment, oids: frozenset[int]) -> Fragment | None:
        """Return the part of a new fragment that concerns some relations; None if nothing of it does."""
        ends_arrived = bool(self.arrivals) and self.arrivals[-1][0].commit_lsn == fragment.commit_lsn
        return part_of_relations(fragment, oids, ends_arrived=ends_arrived)


class PendingFragment:
    """A fragment that at least one shape has not evaluated yet."""

    __slots__ = ("backlog", "before", "changes", "left", "size_bytes")

    def __init__(self, backlog: Backlog, changes: int, size_bytes: int, before: int) -> None:
        """Count a fragment in. `before`: the newest whole transaction that arrived before it."""
        self.backlog = backlog
        self.changes = changes
        self.size_bytes = size_bytes
        self.before = before
        self.left = 1
        """Number of consumers that have not evaluated it yet, plus one until it is routed."""
        backlog.held_bytes += size_bytes

    def shrink(self, size_bytes: int) -> None:
        """Reduce the size to what consumers hold after routing."""
        if size_bytes < self.size_bytes:
            self.backlog.held_bytes += size_bytes - self.size_bytes
            self.size_bytes = size_bytes

    def release(self) -> None:
        self.left -= 1
        if not self.left:
            self.backlog.held_bytes -= self.size_bytes


class InboxEntry:
    """Some changes of a transaction, for one or more consumers. `commits`: the transaction ends with them.

    With a `batch` they are changes of its whole transactions, and `transaction` is the last one of the batch.

    `offered_s`: time at which they were routed. The age of a shape's work counts from there: the time before that was
    spent on other tables, too.
    """

    __slots__ = ("batch", "changes", "commits", "offered_s", "size_bytes", "transaction", "work")

    def __init__(
        self,
        transaction: Transaction,
        work: PendingFragment,
        changes: Sequence[Change],
        commits: bool,
        offered_s: float,
        batch: TransactionBatch | None = None,
    ) -> None:
        self.batch = batch
        self.transaction = transaction
        self.work = work
        self.changes = changes
        self.commits = commits
        self.offered_s = offered_s
        self.size_bytes = work.size_bytes * len(changes) // max(1, work.changes)
        """Share of the fragment's size."""

    def divide(self, start: int) -> list[InboxEntry]:
        """Return the changes of a batch from this place on as one entry for each transaction."""
        batch = self.batch
        assert batch is not None
        groups = groupby(self.changes[start:], lambda change: change.position.commit_lsn)
        return [
            InboxEntry(batch.transaction(lsn), self.work, list(group), True, self.offered_s) for lsn, group in groups
        ]


def memory_bytes(fragment: Fragment) -> int:
    """Return the estimated memory of a decoded fragment."""
    return CHANGE_BYTES * (1 + len(fragment.changes)) + BYTES_FACTOR * fragment.size_bytes


def find_largest_relation(arrivals: Iterable[tuple[Fragment, PendingFragment]], oids: frozenset[int]) -> int:
    """Return which of the relations has the largest share of the backlog; 0 if none has any."""
    weights: dict[int, float] = {}
    for fragment, work in arrivals:
        for oid, count in count_by_relation(fragment.changes).items():
            if oid in oids:
                weights[oid] = weights.get(oid, 0) + work.size_bytes * count / len(fragment.changes)
    return max(weights, key=weights.__getitem__, default=0)


def part_of_relations(fragment: Fragment, oids: frozenset[int], *, ends_arrived: bool) -> Fragment | None:
    """Return the part of a fragment that concerns some relations: their changes, and the end of a transaction that has
    some. `ends_arrived`: the newest arrival belongs to the same transaction."""
    all_of_them = len(fragment.changes)
    count = sum(count for oid, count in count_by_relation(fragment.changes).items() if oid in oids)
    if 2 * count > all_of_them:
        return fragment
    if count:
        changes, size_bytes = (
            tuple(changes_of_relations(fragment.changes, oids)),
            fragment.size_bytes * count // all_of_them,
        )
        return msgspec.structs.replace(fragment, changes=changes, size_bytes=size_bytes)
    if fragment.commits and ends_arrived:
        return msgspec.structs.replace(fragment, changes=(), size_bytes=0)
    return None
