"""One table shape's side of the stream: buffers until the snapshot is known, then makes items of changes. Synchronous.

C1  Until `open` the transactions are kept as they came; `open` replays them through the snapshot filter.
C2  A transaction reaches the log whole, at its commit, or not at all; `begin` discards what an
    interrupted delivery of the same transaction left behind.
C3  A row that enters the filter is an insert, one that leaves it is a delete, a no-op is nothing.
C4  Where the stream cannot be followed row by row (truncate, changed columns, a filter that fails on a
    row) the shape ends, and its clients refetch.
"""

from __future__ import annotations

import msgspec

from tidemill.capture.changes import Change, Relation
from tidemill.shapes.items import LogItem
from tidemill.shapes.live import LiveShape
from tidemill.shapes.offsets import LogOffset
from tidemill.shapes.rows import Headers, RowWriter
from tidemill.shapes.stitch import PgSnapshot, SnapshotFilter
from tidemill.shapes.where import EvaluationError, Where

BUFFER_CHANGES = 1_000_000
"""Changes kept while the initial snapshot runs; beyond that the shape gives up and starts over."""


class _Transaction:
    def __init__(self, xid: int, commit_lsn: int) -> None:
        self.xid = xid
        self.commit_lsn = commit_lsn
        self.changes: list[Change] = []


class TableConsumer:
    """Takes the changes of one relation for one shape. Calls: begin, take…, commit; `open` once in between."""

    def __init__(self, shape: LiveShape, relation: Relation, where: Where | None, writer: RowWriter) -> None:
        self.shape = shape
        self.relation = relation
        self._where = where
        self._writer = writer
        self._filter: SnapshotFilter | None = None
        self._current: _Transaction | None = None
        self._committed: list[_Transaction] = []
        self._buffered = 0

    def begin(self, xid: int, commit_lsn: int) -> None:
        """A transaction that touches this shape's relation starts, or is delivered again (C2)."""
        self._current = _Transaction(xid, commit_lsn)

    def take(self, change: Change) -> None:
        assert self._current is not None, "take before begin"
        self._current.changes.append(change)

    def commit(self) -> None:
        transaction, self._current = self._current, None
        assert transaction is not None, "commit before begin"
        if self._filter is not None:
            self._apply(transaction, self._filter)
            return
        self._committed.append(transaction)
        self._buffered += len(transaction.changes)
        if self._buffered > BUFFER_CHANGES:
            self.shape.drop(f"too many changes during the initial snapshot: limit={BUFFER_CHANGES}")
            self._committed.clear()

    def open(self, snapshot: PgSnapshot, snapshot_lsn: int) -> None:
        """The base is complete as of `snapshot`; apply what arrived meanwhile."""
        self._filter = SnapshotFilter(snapshot)
        self.shape.last_seen = max(self.shape.last_seen, 0)
        committed, self._committed = self._committed, []
        for transaction in committed:
            self._apply(transaction, self._filter)

    def _apply(self, transaction: _Transaction, snapshot: SnapshotFilter) -> None:
        if self.shape.gone or not snapshot.admits(transaction.xid):
            return
        items: list[LogItem] = []
        headers: Headers = {"lsn": str(transaction.commit_lsn), "txids": [transaction.xid]}
        for change in transaction.changes:
            reason = self._unfollowable(change)
            if reason:
                self.shape.drop(reason)
                return
            try:
                self._convert(change, headers, items)
            except (EvaluationError, KeyError) as error:
                self.shape.drop(f"the where clause failed on a row: {error}")
                return
        if items:
            items[-1] = _mark_last(items[-1])
        self.shape.append(items, transaction.commit_lsn)

    def _unfollowable(self, change: Change) -> str:
        if change.op == "truncate":
            return "the table was truncated"
        known, seen = self.relation, change.relation
        if seen is known:
            return ""
        same_columns = [(c.name, c.type_oid, c.key_index) for c in seen.columns] == [
            (c.name, c.type_oid, c.key_index) for c in known.columns
        ]
        if (seen.oid, seen.schema, seen.table) == (known.oid, known.schema, known.table) and same_columns:
            self.relation = seen
            return ""
        return "the table's definition changed"

    def _convert(self, change: Change, headers: Headers, items: list[LogItem]) -> None:
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

    def _update(
        self,
        offset: LogOffset,
        old: dict[str, str | None] | None,
        new: dict[str, str | None],
        headers: Headers,
        items: list[LogItem],
    ) -> None:
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


def _mark_last(item: LogItem) -> LogItem:
    """Add `last: true` to the headers of a transaction's final item; headers close every item's JSON."""
    import orjson

    decoded = orjson.loads(item.json)
    decoded["headers"]["last"] = True
    return msgspec.structs.replace(item, json=orjson.dumps(decoded))
