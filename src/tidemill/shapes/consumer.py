"""One table shape's side of the stream: buffers until the snapshot is known, then makes items of changes. Synchronous.

C1  Until `open` the changes are kept as they came; `open` replays them through the snapshot filter.
C2  A transaction reaches the log whole, at its commit, or not at all; `begin` discards what an
    interrupted delivery of the same transaction left behind.
C3  A row that enters the filter is an insert, one that leaves it is a delete, a no-op is nothing.
C4  Where the stream cannot be followed row by row (truncate, changed columns, a filter that fails on a
    row) the shape ends at that commit, and its clients refetch.

Items are made as fragments arrive, so that the commit of a large transaction is short.
"""

from __future__ import annotations

from tidemill.capture.changes import Change, Relation, Row
from tidemill.shapes.items import LogItem, mark_last
from tidemill.shapes.live import LiveShape
from tidemill.shapes.offsets import LogOffset
from tidemill.shapes.rows import Headers, RowWriter
from tidemill.shapes.stitch import PgSnapshot, SnapshotFilter
from tidemill.shapes.where import EvaluationError, Where

BUFFER_CHANGES = 1_000_000
"""Changes kept while the initial snapshot runs; beyond that the shape ends, and starts over when asked for."""


class _Transaction:
    """`changes` while the snapshot is unknown, `items` afterwards; `failure` ends the shape at commit (C4)."""

    def __init__(self, xid: int, commit_lsn: int) -> None:
        self.xid = xid
        self.commit_lsn = commit_lsn
        self.headers: Headers = {"lsn": str(commit_lsn), "txids": [xid]}
        self.changes: list[Change] = []
        self.items: list[LogItem] = []
        self.skipped = False
        self.failure = ""


class TableConsumer:
    """Takes the changes of one relation for one shape. Calls: begin, take…, commit; `open` once in between."""

    def __init__(self, shape: LiveShape, relation: Relation, where: Where | None, writer: RowWriter) -> None:
        self.shape = shape
        self.oid = relation.oid
        self._relation = relation
        self._where = where
        self._writer = writer
        self._filter: SnapshotFilter | None = None
        self._current: _Transaction | None = None
        self._committed: list[_Transaction] = []
        self._buffered = 0

    def begin(self, xid: int, commit_lsn: int) -> None:
        """A transaction that touches this shape's relation starts, or is delivered again (C2)."""
        self._current = _Transaction(xid, commit_lsn)
        if self._filter is not None:
            self._current.skipped = not self._filter.admits(xid)

    def take(self, change: Change) -> None:
        assert self._current is not None, "take before begin"
        if self._filter is not None:
            self._convert(self._current, change)
            return
        self._current.changes.append(change)
        self._buffered += 1
        if self._buffered > BUFFER_CHANGES:
            self.shape.drop(f"too many changes during the initial snapshot: limit={BUFFER_CHANGES}")
            self._committed.clear()
            self._current.changes.clear()

    def commit(self) -> None:
        transaction, self._current = self._current, None
        assert transaction is not None, "commit before begin"
        if self._filter is not None:
            self._finish(transaction)
        else:
            self._committed.append(transaction)

    def open(self, snapshot: PgSnapshot) -> None:
        """The base is complete as of `snapshot`; apply what arrived meanwhile (C1)."""
        self._filter = SnapshotFilter(snapshot)
        committed, self._committed = self._committed, []
        for transaction in committed:
            self._replay(transaction, self._filter)
            self._finish(transaction)
        if self._current is not None:
            self._replay(self._current, self._filter)

    def _replay(self, transaction: _Transaction, snapshot: SnapshotFilter) -> None:
        transaction.skipped = not snapshot.admits(transaction.xid)
        for change in transaction.changes:
            self._convert(transaction, change)
        transaction.changes = []

    def _finish(self, transaction: _Transaction) -> None:
        if transaction.skipped or self.shape.gone:
            return
        if transaction.failure:
            self.shape.drop(transaction.failure)
            return
        if transaction.items:
            transaction.items[-1] = mark_last(transaction.items[-1])
        self.shape.append(transaction.items, transaction.commit_lsn)

    def _convert(self, transaction: _Transaction, change: Change) -> None:
        if transaction.skipped or transaction.failure or self.shape.gone:
            return
        transaction.failure = self._unfollowable(change)
        if transaction.failure:
            return
        try:
            self._items_of(change, transaction.headers, transaction.items)
        except (EvaluationError, KeyError) as error:
            transaction.failure = f"the where clause failed on a row: {error}"

    def _unfollowable(self, change: Change) -> str:
        if change.op == "truncate":
            return "the table was truncated"
        known, seen = self._relation, change.relation
        if seen is known:
            return ""
        if (seen.schema, seen.table) != (known.schema, known.table) or _layout(seen) != _layout(known):
            return "the table's definition changed"
        self._relation = seen
        return ""

    def _items_of(self, change: Change, headers: Headers, items: list[LogItem]) -> None:
        offset = LogOffset(change.position.commit_lsn, change.position.ordinal)
        writer, where = self._writer, self._where
        new, old = change.new, change.old
        if change.op == "insert":
            assert new is not None
            if where is None or where.matches(new):
                items.append(writer.insert(offset, new, headers))
        elif change.op == "delete":
            assert old is not None
            if where is None or where.matches(old):
                items.append(writer.delete(offset, old, headers))
        else:
            assert new is not None
            self._update(offset, old, new, headers, items)

    def _update(self, offset: LogOffset, old: Row | None, new: Row, headers: Headers, items: list[LogItem]) -> None:
        """Without the old row (no REPLICA IDENTITY FULL) it may have been in: an update or a delete is safe."""
        writer, where = self._writer, self._where
        after = where is None or where.matches(new)
        before = where is None or old is None or where.matches(old)
        if before and after:
            if old is not None and writer.key(old) != writer.key(new):
                moved_to, moved_from = {"key_change_to": writer.key(new)}, {"key_change_from": writer.key(old)}
                items.append(writer.delete(offset, old, {**headers, **moved_to}))
                items.append(writer.insert(LogOffset(offset.tx, offset.op + 1), new, {**headers, **moved_from}))
                return
            item = writer.update(offset, old, new, headers)
            if item is not None:
                items.append(item)
        elif after:
            items.append(writer.insert(offset, new, headers))
        elif before:
            items.append(writer.delete(offset, old if old is not None else new, headers))


def _layout(relation: Relation) -> list[tuple[str, int, int]]:
    return [(column.name, column.type_oid, column.key_index) for column in relation.columns]
