"""One table shape's side of the stream: an inbox of changes, from which it makes items. Synchronous, in slices.

C1  Changes are evaluated as they come, also before the snapshot of the initial rows is known; until then transactions
    wait, as items. `open` names the snapshot, `settle` lets go of what it had seen and stages the rest.
C2  Items are staged in the log as they are made, and shown at their commit, all at once; a delivery that begins the
    same transaction anew discards what an interrupted one left behind.
C3  A row that enters the filter is an insert, one that leaves it is a delete, a no-op is nothing.
C4  Where the stream cannot be followed row by row (truncate, another form of a column that the shape needs, a filter or
    replica=full and an old row that is not whole, a changed key and a value that nobody said) the shape ends at that
    commit, and its clients refetch. A filter that fails on a row ends it there too, and its clients are answered 400;
    where PostgreSQL can be asked, it fails only if PostgreSQL says so (remote_evaluation.py).
C5  `seen` never goes back, and never passes a transaction whose effect is not in the log.
C6  A log that comes from disk has whole transactions up to its end, and what the stream brings again of these is
    skipped. Of a later one that changes nothing in it nothing is known, and it is evaluated again, to the same end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tidemill.base.errors import InvalidError
from tidemill.capture.changes import Change, Relation, Row
from tidemill.capture.decode.transaction_builder import key_changed
from tidemill.capture.postgres.pg_snapshot import PgSnapshot
from tidemill.shapes.live_shape import LiveShape
from tidemill.shapes.log.items import LogItem
from tidemill.shapes.log.log_offset import FIRST_OP, LogOffset
from tidemill.shapes.log.row_writer import Headers, RowWriter
from tidemill.shapes.loop_share import Turn
from tidemill.shapes.memory_budget import OverBudgetError
from tidemill.shapes.tables.remote_evaluation import Judged, Question, Verdict
from tidemill.shapes.tables.snapshot_filter import SnapshotFilter
from tidemill.shapes.where import Equality, EvaluationError, Where


class Transaction:
    """What all shapes share of one delivery of a transaction."""

    __slots__ = ("commit_lsn", "headers", "xid")

    def __init__(self, xid: int, commit_lsn: int) -> None:
        self.xid = xid
        self.commit_lsn = commit_lsn
        self.headers: Headers = {"lsn": str(commit_lsn), "txids": [xid]}


class Backlog:
    """Of one database: bytes of fragments that not all shapes have evaluated."""

    __slots__ = ("held_bytes",)

    def __init__(self) -> None:
        self.held_bytes = 0


class Work:
    """A fragment on its way through the shapes: kept for as long as one of them has not evaluated it."""

    __slots__ = ("arrived_s", "backlog", "before", "changes", "left", "size_bytes")

    def __init__(self, backlog: Backlog, changes: int, size_bytes: int, arrived_s: float, before: int) -> None:
        """`before`: the newest whole transaction that arrived before it."""
        self.backlog = backlog
        self.changes = changes
        self.size_bytes = size_bytes
        self.arrived_s = arrived_s
        self.before = before
        self.left = 1
        """Consumers that have not evaluated it yet, and one until it is routed."""
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


class Entry:
    """Some changes of a transaction, for one or many consumers; `commits`: it ends there."""

    __slots__ = ("changes", "commits", "size_bytes", "transaction", "work")

    def __init__(self, transaction: Transaction, work: Work, changes: Sequence[Change], commits: bool) -> None:
        self.transaction = transaction
        self.work = work
        self.changes = changes
        self.commits = commits
        self.size_bytes = work.size_bytes * len(changes) // max(1, work.changes)
        """Its share of the fragment."""


class _Delivery:
    """Of one transaction to one shape. `items` wait for the snapshot; of one that follows they are in the log at once.
    `failure` ends the shape at its commit (C4): with `error` for good, else it starts over."""

    __slots__ = ("error", "failure", "items", "transaction")

    def __init__(self, transaction: Transaction) -> None:
        self.transaction = transaction
        self.items: deque[LogItem] | None = None
        self.failure = ""
        self.error: InvalidError | None = None


class TableConsumer:
    """Takes the changes of one relation for one shape. `offer` and `evaluate` by its sink; `open`, then `settle` until
    it returns False, by who loads the shape."""

    __slots__ = (
        "_asks", "_at", "_current", "_filter", "_following", "_has_lsn", "_spent_at", "_spent_s", "_staged",
        "_verdicts", "_waiting", "_where", "_writer", "floor", "inbox", "inbox_bytes", "needed", "pending_bytes",
        "question", "relation", "shape",
    )  # fmt: skip

    def __init__(
        self,
        shape: LiveShape,
        relation: Relation,
        where: Where | None,
        writer: RowWriter,
        *,
        has_lsn: int = 0,
        asks: bool = False,
    ) -> None:
        """`has_lsn`: of the newest transaction in a log that comes from disk (C6). `asks`: somebody answers what
        `question` says."""
        self.shape = shape
        self.relation = relation
        self.needed = needed_columns(relation, shape.definition.columns, where)
        self.inbox: deque[Entry] = deque()
        self.inbox_bytes = 0
        self.floor = 0
        """While something is in the inbox: the newest transaction before it."""
        self._spent_s, self._spent_at = 0.0, 0
        self._where: Where | Judged | None = where
        self._asks = asks
        self.question: Question | None = None
        """What it waits for; `answered` ends that."""
        self._verdicts: list[tuple[Row, Verdict]] = []
        """Of the change at hand."""
        self._writer = writer
        self._at = 0
        """Changes of the first entry that are done."""
        self._has_lsn = has_lsn
        self._filter: SnapshotFilter | None = None
        """The filter is: it is asked no more."""
        self._following = False
        self._current: _Delivery | None = None
        self._waiting: deque[_Delivery] | None = None
        self._staged: _Delivery | None = None
        """Whose items are staged in the log."""
        self.pending_bytes = 0
        """Of items that wait for the snapshot."""

    @property
    def oid(self) -> int:
        return self.relation.oid

    @property
    def equality(self) -> Equality | None:
        return self._where.equality if isinstance(self._where, Where) else None

    def spend(self, seconds: float, tick: int) -> None:
        if tick != self._spent_at:
            self._spent_s, self._spent_at = self.spent_s(tick), tick
        self._spent_s += seconds

    def spent_s(self, tick: int) -> float:
        """Time used lately, for choosing who is too dear: with each of the sink's ticks it is half of what it was."""
        return float(self._spent_s * 0.5 ** (tick - self._spent_at))

    # -- the stream, by the sink -------------------------------------------------------------------------------

    def offer(self, entry: Entry, before: int) -> None:
        """`before`: the newest transaction that is older than the entry's."""
        if not self.inbox:
            self.floor = max(self.floor, before)
        self.inbox.append(entry)
        self.inbox_bytes += entry.size_bytes
        entry.work.left += 1

    def evaluate(self, turn: Turn) -> bool:
        """Work the inbox off until it is empty or a question is open (False), or the turn is over (True)."""
        while self.inbox:
            entry = self.inbox[0]
            current, changes = self._current, entry.changes
            if current is None or current.transaction is not entry.transaction:
                self._discard(current)
                current = self._current = _Delivery(entry.transaction)
            while self._at < len(changes):
                self._convert(current, changes[self._at])
                if self.question is not None:
                    return False
                if self.shape.gone:
                    self.clear()
                    return False
                self._at += 1
                if self._at < len(changes) and turn.over:
                    return True
            self._next()
            if entry.commits:
                self._current = None
                self._commit(current)
                self.floor = max(self.floor, entry.transaction.commit_lsn)
            if self.inbox and turn.over:
                return True
        return False

    def _next(self) -> None:
        entry = self.inbox.popleft()
        self.inbox_bytes -= entry.size_bytes
        entry.work.release()
        self._at = 0

    def answered(self, verdicts: Sequence[Verdict]) -> None:
        """What PostgreSQL says of the question's rows."""
        if self.question is not None:
            self._verdicts += zip(self.question.rows, verdicts, strict=True)
            self.question = None

    def clear(self) -> None:
        """Let go of everything; the shape is over."""
        self.question = None
        while self.inbox:
            self._next()
        self._discard(self._current)
        self._current = None
        while self._waiting:
            self._discard(self._waiting.popleft())

    # -- the snapshot, by who loads ----------------------------------------------------------------------------

    def open(self, snapshot: PgSnapshot) -> None:
        """The base is complete as of `snapshot`."""
        self._filter = SnapshotFilter(snapshot)

    def follow(self) -> None:
        """Nothing waits for the snapshot: the log is an old one."""
        self._following = True

    def settle(self, turn: Turn) -> bool:
        """Show what committed meanwhile and the snapshot had not seen. False: all of it; from here on at once."""
        while self._waiting:
            if not self._stage(self._waiting[0], turn):
                return True
            self._show(self._waiting.popleft())
        if self._current is not None and not self._stage(self._current, turn):
            return True
        self._following, self._waiting = True, None
        return False

    def _stage(self, delivery: _Delivery, turn: Turn) -> bool:
        """Move what waits into the log; False when the turn was over before the end."""
        if not self._admits(delivery) or delivery.failure:
            self._discard(delivery)
            return True
        while delivery.items:
            self._staged = delivery
            item = delivery.items.popleft()
            self._forget(item)
            self.shape.stage(item)
            if turn.over and delivery.items:
                return False
        return True

    # -- transactions ------------------------------------------------------------------------------------------

    def _commit(self, delivery: _Delivery) -> None:
        if self._following:
            self._show(delivery)
        else:
            if self._waiting is None:
                self._waiting = deque()
            self._waiting.append(delivery)

    def _show(self, delivery: _Delivery) -> None:
        if not self._admits(delivery) or self.shape.gone:
            return
        if delivery.error is not None:
            self.shape.fail(delivery.error)
        elif delivery.failure:
            self.shape.drop(delivery.failure)
        else:
            self.shape.publish(delivery.transaction.commit_lsn, mark=True)
            self._staged = None

    def _admits(self, delivery: _Delivery) -> bool:
        if delivery.transaction.commit_lsn <= self._has_lsn:
            return False
        assert self._filter is not None, "settle before open"
        return self._filter.admits(delivery.transaction.xid, delivery.transaction.commit_lsn)

    def _discard(self, delivery: _Delivery | None) -> None:
        """Let go of a delivery that will not be shown."""
        if delivery is None:
            return
        while delivery.items:
            self._forget(delivery.items.popleft())
        if delivery is self._staged:
            self.shape.log.unstage()
            self._staged = None

    def _forget(self, item: LogItem) -> None:
        self.pending_bytes -= item.size_bytes
        self.shape.log.budget.give(item.size_bytes)

    def _convert(self, current: _Delivery, change: Change) -> None:
        # Taken here, used or not: while a change was asked about, the snapshot may have come, which had seen it.
        verdicts, self._verdicts = self._verdicts, []
        if current.failure:
            return
        if self._following and not self._admits(current):
            return
        current.failure = self._unfollowable(change)
        if current.failure:
            return
        made: list[LogItem] = []
        try:
            if verdicts:
                self._judged(verdicts, change, current.transaction.headers, made)
            else:
                self._items_of(change, current.transaction.headers, made)
        except EvaluationError as error:
            if self._asks and not verdicts:
                self._ask(change)
                return
            current.failure = f"the where clause failed on a row: {error}"
            current.error = failed_on_a_row(self.shape.definition.where, error)
            return
        for item in made:
            if self._following:
                self._staged = current
                self.shape.stage(item)
            else:
                self._wait(current, item)

    def _ask(self, change: Change) -> None:
        """About each row of the change on which the filter fails."""
        where, failing = self._where, list[Row]()
        assert isinstance(where, Where)
        for row in (change.old, change.new, change.stays, change.over):
            if row is not None:
                try:
                    where.matches(row)
                except EvaluationError:
                    failing.append(row)
        self.question = Question(change.relation, where, tuple(failing))

    def _judged(
        self, verdicts: Sequence[tuple[Row, Verdict]], change: Change, headers: Headers, items: list[LogItem]
    ) -> None:
        where = self._where
        assert isinstance(where, Where)
        self._where = Judged(where, verdicts)
        try:
            self._items_of(change, headers, items)
        finally:
            self._where = where

    def _wait(self, current: _Delivery, item: LogItem) -> None:
        try:
            self.shape.log.budget.take(item.size_bytes)
        except OverBudgetError as error:
            self.shape.drop(str(error))
            return
        self.pending_bytes += item.size_bytes
        if current.items is None:
            current.items = deque()
        current.items.append(item)
        limit = self.shape.log.limit_bytes
        if self.pending_bytes > limit:
            self.shape.drop(f"changes during the initial snapshot outgrew the log: log_bytes={limit}")

    def _unfollowable(self, change: Change) -> str:
        if change.op == "truncate":
            return "the table was truncated"
        known, seen = self.relation, change.relation
        if seen is not known and not same_layout(seen, known, self.needed):
            return "the table's definition changed"
        self.relation = seen
        return "" if seen.old_rows == "whole" else self._unsaid(change)

    def _unsaid(self, change: Change) -> str:
        """What this shape would have to know of a row, and an identity that is not FULL does not say."""
        old = change.old
        asked = (self._where is not None or self._writer.full) and change.op != "insert"
        if asked and (old is None or len(old) < len(change.relation.columns)):
            return "the table's REPLICA IDENTITY is not FULL any more"
        if key_changed(change) and self._writer.shows(change.unchanged):
            return "a row got another key, and the stream does not say all its values"
        return ""

    def _items_of(self, change: Change, headers: Headers, items: list[LogItem]) -> None:
        offset = LogOffset(change.position.commit_lsn, FIRST_OP + change.position.ordinal)
        writer, where = self._writer, self._where
        new, old = change.new, change.old
        if change.over is not None or change.stays is not None or change.replaced:
            self._rival(change, offset, headers, items)
        elif change.op == "insert":
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

    def _rival(self, change: Change, offset: LogOffset, headers: Headers, items: list[LogItem]) -> None:
        """Two rows hold a key of it at once (capture/delivery/deferrable_keys.py): a client has one row a key, so the
        key is updated."""
        writer, matches = self._writer, self._matches
        old, new, stays = change.old, change.new, change.stays
        after = LogOffset(offset.tx, offset.op + 1)
        if old is not None and not change.replaced:
            if stays is not None and matches(stays):
                items += _made(writer.update(offset, None, stays, headers))
            elif matches(old):
                items.append(writer.delete(offset, old, headers))
        if new is None:
            return
        over = change.over if change.over is not None and matches(change.over) else None
        if over is None:
            items += [writer.insert(after, new, headers)] if matches(new) else []
        elif matches(new):
            items += _made(writer.update(after, over, new, headers))
        else:
            items.append(writer.delete(after, over, headers))

    def _matches(self, row: Row) -> bool:
        return self._where is None or self._where.matches(row)

    def _update(self, offset: LogOffset, old: Row | None, new: Row, headers: Headers, items: list[LogItem]) -> None:
        """Without the old row (C4: and without a filter) every column counts as changed but those that nobody said."""
        writer, where = self._writer, self._where
        after = where is None or where.matches(new)
        before = where is None or (old is not None and where.matches(old))
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
            assert old is not None
            items.append(writer.delete(offset, old, headers))


def _made(item: LogItem | None) -> list[LogItem]:
    return [] if item is None else [item]


def failed_on_a_row(where: str, error: EvaluationError) -> InvalidError:
    shown = where if len(where) <= SHOWN_CHARS else where[:SHOWN_CHARS] + "…"
    return InvalidError(
        f"the where clause failed on a row: {error} where={shown!r}.", fix="Write a clause that holds for every row."
    )


SHOWN_CHARS = 200


def needed_columns(relation: Relation, shown: Sequence[str], where: Where | None) -> frozenset[str] | None:
    """What a shape must know of a row, where its client chose what is `shown`; None: all columns there are."""
    if not shown:
        return None
    key = [column.name for column in relation.key_columns]
    return frozenset((*shown, *key, *(where.columns if where is not None else ())))


def same_layout(one: Relation, other: Relation, needed: frozenset[str] | None = None) -> bool:
    """Whether rows of both look alike to a client of these columns (None = all)."""
    return (one.schema, one.table, _layout(one, needed)) == (other.schema, other.table, _layout(other, needed))


def _layout(relation: Relation, needed: frozenset[str] | None) -> list[tuple[str, int, int]]:
    return [
        (column.name, column.type_oid, column.key_index)
        for column in relation.columns
        if needed is None or column.name in needed or column.key_index >= 0
    ]
