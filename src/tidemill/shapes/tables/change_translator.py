"""Translates a change of a captured table into the log items of one shape. Synchronous, no I/O.

- Invariant (filter transitions): a row that enters the filter is an insert, a row that leaves it is a delete, an update
  without effect makes no item.
- Invariant (end if not followable): a shape ends at a change that the stream does not allow to follow row by row: a
  truncate; a change of a column that the shape needs; an incomplete old row with a filter or replica=full; a changed
  key with a value that the stream does not carry.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.base.errors import InvalidError
from tidemill.capture.changes import Change, Relation, Row
from tidemill.capture.decode.transaction_builder import is_key_changed
from tidemill.shapes.log.items import LogItem
from tidemill.shapes.log.log_offset import FIRST_OP, LogOffset
from tidemill.shapes.log.row_writer import Headers, RowWriter
from tidemill.shapes.tables.backlog import TransactionBatch
from tidemill.shapes.tables.remote_evaluation import EvaluationRequest, Verdict, WhereWithVerdicts
from tidemill.shapes.where import Equality, EvaluationError, Where

Filter = Where | WhereWithVerdicts


class ChangeTranslator:
    """`relation`: the table as the last change had it. `needed`: the columns that the shape must know, None = all."""

    __slots__ = ("_where", "_writer", "needed", "relation")

    def __init__(self, relation: Relation, shown: Sequence[str], where: Where | None, writer: RowWriter) -> None:
        self.relation = relation
        self.needed = needed_columns(relation, shown, where)
        self._where: Filter | None = where
        self._writer = writer

    @property
    def equality(self) -> Equality | None:
        return self._where.equality if isinstance(self._where, Where) else None

    def unfollowable_reason(self, change: Change) -> str:
        """Return why the shape cannot follow a change of its table, "" if it can."""
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

    def translate(
        self, change: Change, headers: Headers, items: list[LogItem], verdicts: Sequence[tuple[Row, Verdict]] = ()
    ) -> None:
        """Add the items of a change. `verdicts`: PostgreSQL's, on rows on which the filter fails. Raises
        EvaluationError."""
        if not verdicts:
            self._make_items(change, headers, items, self._where)
            return
        where = self._where
        assert isinstance(where, Where)
        self._where = WhereWithVerdicts(where, verdicts)
        try:
            self._make_items(change, headers, items, self._where)
        finally:
            self._where = where

    def translate_whole(
        self, changes: Sequence[Change], headers: Headers, items: list[LogItem], batch: TransactionBatch
    ) -> bool:
        """Add the items of one transaction, the last of them marked as its last. Return False, and add none, if one of
        its changes cannot be translated without a failure.
        """
        rendered = batch.rendered_as(self._writer.rendering)
        start = len(items)
        try:
            for change in changes:
                if self.unfollowable_reason(change):
                    del items[start:]
                    return False
                if not self._is_independent(change):
                    self._make_items(change, headers, items, self._where)
                elif self._where is None or self._matches_row_of(change):
                    shared = rendered.items.get(change.position)
                    if shared is None:
                        shared = rendered.items[change.position] = []
                        self._make_items(change, headers, shared, None)
                    items += shared
        except EvaluationError:
            del items[start:]
            return False
        if len(items) > start:
            items[-1] = rendered.mark_last(items[-1])
        return True

    def _matches_row_of(self, change: Change) -> bool:
        row = change.new if change.op == "insert" else change.old
        assert row is not None
        return self._matches(row)

    def _is_independent(self, change: Change) -> bool:
        """Return whether the filter only decides whether the items of a change are shown, not which."""
        if self._where is None:
            return True
        return (
            change.op in ("insert", "delete") and change.over is None and change.stays is None and not change.replaced
        )

    def request_evaluation(self, change: Change) -> EvaluationRequest:
        """Return the question to PostgreSQL: the rows of the change on which the filter fails."""
        where, failing = self._where, list[Row]()
        assert isinstance(where, Where)
        for row in (change.old, change.new, change.stays, change.over):
            if row is not None:
                try:
                    where.matches(row)
                except EvaluationError:
                    failing.append(row)
        return EvaluationRequest(change.relation, where, tuple(failing))

    def _make_items(self, change: Change, headers: Headers, items: list[LogItem], where: Filter | None) -> None:
        offset = LogOffset(change.position.commit_lsn, FIRST_OP + change.position.ordinal)
        writer = self._writer
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
