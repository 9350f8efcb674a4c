"""Evaluates changes for one table shape: an inbox of changes, from which it makes log items. Synchronous, in slices.

Changes are evaluated as they arrive, also before the snapshot of the initial rows is known. Until then transactions
wait as items. `set_snapshot` sets the snapshot; `publish_waiting` discards what the snapshot had seen, and stages the
rest.

- Invariant (whole transactions): items are staged in the log immediately, and become visible together at their commit.
  A delivery that begins the same transaction again discards what an interrupted one left.
- Invariant (filter transitions): a row that enters the filter is an insert, a row that leaves it is a delete, an update
  without effect makes no item.
- Invariant (end if not followable): a shape ends at the commit that the stream does not allow to follow row by row, and
  its clients refetch: a truncate; a change of a column that the shape needs; an incomplete old row with a filter or
  replica=full; a changed key with a value that the stream does not carry. A filter that fails on a row also ends the
  shape, and its clients get 400. If PostgreSQL can be queried, the filter fails only if PostgreSQL also fails
  (remote_evaluation.py).
- Invariant (monotonic progress): `floor` never decreases, and never passes a transaction whose effect is not in the
  log.
- Invariant (restored logs): a log from disk has whole transactions up to its end, and repeated ones are skipped. It
  does not record later transactions that changed nothing; these are evaluated again, with the same result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tidemill.base.errors import InvalidError
from tidemill.capture.changes import Change, Relation, Row
from tidemill.capture.decode.transaction_builder import is_key_changed
from tidemill.capture.postgres.pg_snapshot import PgSnapshot
from tidemill.shapes.live_shape import LiveShape
from tidemill.shapes.log.items import LogItem
from tidemill.shapes.log.log_offset import FIRST_OP, LogOffset
from tidemill.shapes.log.row_writer import Headers, RowWriter
from tidemill.shapes.loop_share import Turn
from tidemill.shapes.memory_budget import OverBudgetError
from tidemill.shapes.tables.backlog import InboxEntry, Transaction
from tidemill.shapes.tables.initial_snapshot import SnapshotFilter
from tidemill.shapes.tables.remote_evaluation import EvaluationRequest, Verdict, WhereWithVerdicts
from tidemill.shapes.where import Equality, EvaluationError, Where


class _Delivery:
    """One delivery of a transaction to one shape.

    `items` wait for the snapshot; once the consumer follows the stream they go directly to the log. `failure` ends the
    shape at the commit: with `error` permanently, otherwise it starts again.
    """

    __slots__ = ("error", "failure", "items", "transaction")

    def __init__(self, transaction: Transaction) -> None:
        self.transaction = transaction
        self.items: deque[LogItem] | None = None
        self.failure = ""
        self.error: InvalidError | None = None


class TableConsumer:
    """Processes the changes of one relation for one shape.

    The tap calls `offer` and `evaluate`. The loader of the shape calls `set_snapshot`, then `publish_waiting` until it
    returns False.
    """

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
        """Create a consumer.

        `has_lsn`: the newest transaction in a log that was restored from disk. `asks`: failing rows are sent to
        PostgreSQL as a `question`.
        """
        self.shape = shape
        self.relation = relation
        self.needed = needed_columns(relation, shape.definition.columns, where)
        self.inbox: deque[InboxEntry] = deque()
        self.inbox_bytes = 0
        self.floor = 0
        """Newest transaction before the first entry of the inbox; valid while there is one."""
        self._spent_s, self._spent_at = 0.0, 0
        self._where: Where | WhereWithVerdicts | None = where
        self._asks = asks
        self.question: EvaluationRequest | None = None
        """Rows that PostgreSQL must evaluate before work continues; cleared by `resume_with_verdicts`."""
        self._verdicts: list[tuple[Row, Verdict]] = []
        """PostgreSQL's verdicts on rows of the current change."""
        self._writer = writer
        self._at = 0
        """Number of processed changes of the first entry."""
        self._has_lsn = has_lsn
        self._filter: SnapshotFilter | None = None
        """Decides which transactions the snapshot contains; None until the snapshot is known."""
        self._following = False
        self._current: _Delivery | None = None
        self._waiting: deque[_Delivery] | None = None
        self._staged: _Delivery | None = None
        """The delivery whose items are staged in the log."""
        self.pending_bytes = 0
        """Bytes of the items that wait for the snapshot."""

    @property
    def oid(self) -> int:
        return self.relation.oid

    @property
    def equality(self) -> Equality | None:
        return self._where.equality if isinstance(self._where, Where) else None

    def add_spent_s(self, seconds: float, tick: int) -> None:
        if tick != self._spent_at:
            self._spent_s, self._spent_at = self.recent_spent_s(tick), tick
        self._spent_s += seconds

    def recent_spent_s(self, tick: int) -> float:
        """Return the time used lately; it halves with each tick of the tap. Used to select the most expensive
        shapes."""
        return float(self._spent_s * 0.5 ** (tick - self._spent_at))

    # -- the stream, called by the tap -------------------------------------------------------------------------------

    def offer(self, entry: InboxEntry, before: int) -> None:
        """Append an entry to the inbox. `before`: the newest transaction that is older than the entry's."""
        if not self.inbox:
            self.floor = max(self.floor, before)
        self.inbox.append(entry)
        self.inbox_bytes += entry.size_bytes
        entry.work.left += 1

    def evaluate(self, turn: Turn) -> bool:
        """Process the inbox. Return False if it is empty or a question is open, True if the turn ended before that."""
        while self.inbox:
            entry = self.inbox[0]
            current, changes = self._current, entry.changes
            if current is None or current.transaction is not entry.transaction:
                self._discard_delivery(current)
                current = self._current = _Delivery(entry.transaction)
            while self._at < len(changes):
                self._convert_change(current, changes[self._at])
                if self.question is not None:
                    return False
                if self.shape.has_ended:
                    self.clear()
                    return False
                self._at += 1
                if self._at < len(changes) and turn.is_over:
                    return True
            self._finish_entry()
            if entry.commits:
                self._current = None
                self._commit_delivery(current)
                self.floor = max(self.floor, entry.transaction.commit_lsn)
            if self.inbox and turn.is_over:
                return True
        return False

    def _finish_entry(self) -> None:
        entry = self.inbox.popleft()
        self.inbox_bytes -= entry.size_bytes
        entry.work.release()
        self._at = 0

    def resume_with_verdicts(self, verdicts: Sequence[Verdict]) -> None:
        """Continue with PostgreSQL's verdicts on the rows of the question."""
        if self.question is not None:
            self._verdicts += zip(self.question.rows, verdicts, strict=True)
            self.question = None

    def clear(self) -> None:
        """Release everything; the shape has ended."""
        self.question = None
        while self.inbox:
            self._finish_entry()
        self._discard_delivery(self._current)
        self._current = None
        while self._waiting:
            self._discard_delivery(self._waiting.popleft())

    # -- the snapshot, called by the loader --------------------------------------------------------------------------

    def set_snapshot(self, snapshot: PgSnapshot) -> None:
        """Set the snapshot as of which the base is complete."""
        self._filter = SnapshotFilter(snapshot)

    def follow_immediately(self) -> None:
        """Write directly to the log from now on: a restored log has its snapshot already."""
        self._following = True

    def publish_waiting(self, turn: Turn) -> bool:
        """Publish what committed since the snapshot. Return True if there is more; after False, items go directly to
        the log."""
        while self._waiting:
            if not self._stage_waiting(self._waiting[0], turn):
                return True
            self._publish_delivery(self._waiting.popleft())
        if self._current is not None and not self._stage_waiting(self._current, turn):
            return True
        self._following, self._waiting = True, None
        return False

    def _stage_waiting(self, delivery: _Delivery, turn: Turn) -> bool:
        """Move waiting items into the log; return False if the turn ended first."""
        if not self._admits(delivery) or delivery.failure:
            self._discard_delivery(delivery)
            return True
        while delivery.items:
            self._staged = delivery
            item = delivery.items.popleft()
            self._release_waiting_item(item)
            self.shape.stage(item)
            if turn.is_over and delivery.items:
                return False
        return True

    # -- transactions ------------------------------------------------------------------------------------------

    def _commit_delivery(self, delivery: _Delivery) -> None:
        if self._following:
            self._publish_delivery(delivery)
        else:
            if self._waiting is None:
                self._waiting = deque()
            self._waiting.append(delivery)

    def _publish_delivery(self, delivery: _Delivery) -> None:
        if not self._admits(delivery) or self.shape.has_ended:
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

    def _discard_delivery(self, delivery: _Delivery | None) -> None:
        """Release a delivery that will not be shown."""
        if delivery is None:
            return
        while delivery.items:
            self._release_waiting_item(delivery.items.popleft())
        if delivery is self._staged:
            self.shape.log.unstage()
            self._staged = None

    def _release_waiting_item(self, item: LogItem) -> None:
        self.pending_bytes -= item.size_bytes
        self.shape.log.budget.release(item.size_bytes)

    def _convert_change(self, current: _Delivery, change: Change) -> None:
        # Consumed even if unused: while PostgreSQL evaluated the change, a snapshot that contains it may have been
        # opened.
        verdicts, self._verdicts = self._verdicts, []
        if current.failure:
            return
        if self._following and not self._admits(current):
            return
        current.failure = self._unfollowable_reason(change)
        if current.failure:
            return
        made: list[LogItem] = []
        try:
            if verdicts:
                self._convert_with_verdicts(verdicts, change, current.transaction.headers, made)
            else:
                self._make_items(change, current.transaction.headers, made)
        except EvaluationError as error:
            if self._asks and not verdicts:
                self._ask_postgres(change)
                return
            current.failure = f"the where clause failed on a row: {error}"
            current.error = row_failure_error(self.shape.definition.where, error)
            return
        for item in made:
            if self._following:
                self._staged = current
                self.shape.stage(item)
            else:
                self._add_waiting_item(current, item)

    def _ask_postgres(self, change: Change) -> None:
        """Ask PostgreSQL about each row of the change on which the filter fails."""
        where, failing = self._where, list[Row]()
        assert isinstance(where, Where)
        for row in (change.old, change.new, change.stays, change.over):
            if row is not None:
                try:
                    where.matches(row)
                except EvaluationError:
                    failing.append(row)
        self.question = EvaluationRequest(change.relation, where, tuple(failing))

    def _convert_with_verdicts(
        self, verdicts: Sequence[tuple[Row, Verdict]], change: Change, headers: Headers, items: list[LogItem]
    ) -> None:
        where = self._where
        assert isinstance(where, Where)
        self._where = WhereWithVerdicts(where, verdicts)
        try:
            self._make_items(change, headers, items)
        finally:
            self._where = where

    def _add_waiting_item(self, current: _Delivery, item: LogItem) -> None:
        while True:
            try:
                self.shape.log.budget.reserve(item.size_bytes)
                break
            except OverBudgetError as error:
                if not self.shape.make_room(error):
                    return
        self.pending_bytes += item.size_bytes
        if current.items is None:
            current.items = deque()
        current.items.append(item)
        limit = self.shape.log.limit_bytes
        if self.pending_bytes > limit:
            self.shape.drop(f"changes during the initial snapshot outgrew the log: log_bytes={limit}")

    def _unfollowable_reason(self, change: Change) -> str:
        if change.op == "truncate":
            return "the table was truncated"
        known, seen = self.relation, change.relation
        if seen is not known and not has_same_layout(seen, known, self.needed):
            return "the table's definition changed"
        self.relation = seen
        return "" if seen.old_rows == "whole" else self._missing_values_reason(change)

    def _missing_values_reason(self, change: Change) -> str:
        """Return why the shape cannot follow this change without FULL identity, "" if it can: the stream omits
        something that the shape needs."""
        old = change.old
        asked = (self._where is not None or self._writer.full) and change.op != "insert"
        if asked and (old is None or len(old) < len(change.relation.columns)):
            return "the table's REPLICA IDENTITY is no longer FULL"
        if is_key_changed(change) and self._writer.shows_any(change.unchanged):
            return "the key of a row changed, and the stream does not carry all its values"
        return ""

    def _make_items(self, change: Change, headers: Headers, items: list[LogItem]) -> None:
        offset = LogOffset(change.position.commit_lsn, FIRST_OP + change.position.ordinal)
        writer, where = self._writer, self._where
        new, old = change.new, change.old
        if change.over is not None or change.stays is not None or change.replaced:
            self._make_rival_items(change, offset, headers, items)
        elif change.op == "insert":
            assert new is not None
            if where is None or where.matches(new):
                items.append(writer.insert_item(offset, new, headers))
        elif change.op == "delete":
            assert old is not None
            if where is None or where.matches(old):
                items.append(writer.delete(offset, old, headers))
        else:
            assert new is not None
            self._make_update_items(offset, old, new, headers, items)

    def _make_rival_items(self, change: Change, offset: LogOffset, headers: Headers, items: list[LogItem]) -> None:
        """Emit items for a change where two rows briefly have the same key (capture/delivery/deferrable_keys.py).

        Clients store one row per key, so the row with that key is updated.
        """
        writer, matches = self._writer, self._matches
        old, new, stays = change.old, change.new, change.stays
        after = LogOffset(offset.tx, offset.op + 1)
        if old is not None and not change.replaced:
            if stays is not None and matches(stays):
                items += _as_list(writer.update_item(offset, None, stays, headers))
            elif matches(old):
                items.append(writer.delete(offset, old, headers))
        if new is None:
            return
        over = change.over if change.over is not None and matches(change.over) else None
        if over is None:
            items += [writer.insert_item(after, new, headers)] if matches(new) else []
        elif matches(new):
            items += _as_list(writer.update_item(after, over, new, headers))
        else:
            items.append(writer.delete(after, over, headers))

    def _matches(self, row: Row) -> bool:
        return self._where is None or self._where.matches(row)

    def _make_update_items(
        self, offset: LogOffset, old: Row | None, new: Row, headers: Headers, items: list[LogItem]
    ) -> None:
        """Emit the items of an update. Without the old row (and so without a filter) every column counts as changed,
        except those that the stream omits."""
        writer, where = self._writer, self._where
        after = where is None or where.matches(new)
        before = where is None or (old is not None and where.matches(old))
        if before and after:
            if old is not None and writer.key(old) != writer.key(new):
                moved_to, moved_from = {"key_change_to": writer.key(new)}, {"key_change_from": writer.key(old)}
                items.append(writer.delete(offset, old, {**headers, **moved_to}))
                items.append(writer.insert_item(LogOffset(offset.tx, offset.op + 1), new, {**headers, **moved_from}))
                return
            item = writer.update_item(offset, old, new, headers)
            if item is not None:
                items.append(item)
        elif after:
            items.append(writer.insert_item(offset, new, headers))
        elif before:
            assert old is not None
            items.append(writer.delete(offset, old, headers))


def _as_list(item: LogItem | None) -> list[LogItem]:
    return [] if item is None else [item]


def row_failure_error(where: str, error: EvaluationError) -> InvalidError:
    shown = where if len(where) <= MAX_CLAUSE_CHARS_SHOWN else where[:MAX_CLAUSE_CHARS_SHOWN] + "…"
    return InvalidError(
        f"the where clause failed on a row: {error} where={shown!r}.", fix="Write a clause that holds for every row."
    )


MAX_CLAUSE_CHARS_SHOWN = 200


def needed_columns(relation: Relation, shown: Sequence[str], where: Where | None) -> frozenset[str] | None:
    """Return the columns that a shape must know if its client selected the `shown` ones; None = all."""
    if not shown:
        return None
    key = [column.name for column in relation.key_columns]
    return frozenset((*shown, *key, *(where.columns if where is not None else ())))


def has_same_layout(one: Relation, other: Relation, needed: frozenset[str] | None = None) -> bool:
    """Return whether rows of both relations look alike to a client of these columns (None = all)."""
    return (one.schema, one.table, _visible_layout(one, needed)) == (
        other.schema,
        other.table,
        _visible_layout(other, needed),
    )


def _visible_layout(relation: Relation, needed: frozenset[str] | None) -> list[tuple[str, int, int]]:
    return [
        (column.name, column.type_oid, column.key_index)
        for column in relation.columns
        if needed is None or column.name in needed or column.key_index >= 0
    ]
