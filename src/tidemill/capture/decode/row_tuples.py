"""Decode one message to one change: the per-row functions, which are the reference for the columnar ones
(row_blocks.py).

    identity of the row's table   old tuple of an UPDATE             of a DELETE
    FULL                          O: every column                    O
    DEFAULT, USING INDEX          K: the identity's columns, if      K
                                  they changed or are TOASTed; or none

The new tuple does not contain an unchanged TOASTed value. Such a value is never NULL, so the old tuple has it exactly
if it is not NULL there. Only then it is used, independently of the kind of the old tuple (for a partitioned table
pgoutput names the kind after the root's identity, and fills the tuple by the partition's). Otherwise the change marks
the column as without a value.
"""

from __future__ import annotations

from typing import cast

from tidemill.base.errors import CorruptError, InvalidError
from tidemill.base.lsn import ChangePosition
from tidemill.capture.changes import Change, Relation, Row
from tidemill.capture.postgres.pgoutput import UNCHANGED, Delete, Insert, Tuple, Update, decode_message


def build_change(
    relation: Relation, names: tuple[str, ...], message: Insert | Update | Delete, position: ChangePosition
) -> Change:
    """Return the change of a message, of `relation` with columns `names`. Raises CorruptError if a tuple does not match
    the columns, InvalidError if the old row is missing, or has less than `relation.old_rows` demands.
    """
    match message:
        case Insert():
            new, unchanged = _new_row(names, relation, message.new, None)
            if unchanged:
                raise old_row_missing(relation, "unchanged TOASTed value")
            return Change(relation, "insert", position, new=new)
        case Update():
            before = _old_tuple_by_name(names, relation, message.old_kind, message.old, "UPDATE")
            new, unchanged = _new_row(names, relation, message.new, before)
            old = _usable_old_row(relation, message.old_kind, before, "UPDATE") if before is not None else None
            return Change(relation, "update", position, new=new, old=old, unchanged=unchanged)
        case Delete():
            before = _old_tuple_by_name(names, relation, message.old_kind, message.old, "DELETE")
            assert before is not None
            return Change(
                relation, "delete", position, old=_usable_old_row(relation, message.old_kind, before, "DELETE")
            )


def decode_change(relation: Relation, payload: bytes, position: ChangePosition) -> Change:
    """Decode the change of a message that is known to be whole. Raises CorruptError if it is no row change."""
    message = decode_message(payload)
    if not isinstance(message, Insert | Update | Delete):
        raise CorruptError(f"not a change of a row: kind={payload[:1]!r}.")
    return build_change(relation, tuple(column.name for column in relation.columns), message, position)


def _check_column_count(names: tuple[str, ...], relation: Relation, values: Tuple | None) -> Tuple:
    if values is None or len(values) != len(names):
        found = -1 if values is None else len(values)
        raise CorruptError(f"tuple does not fit: relation={relation.name} columns={len(names)} values={found}.")
    return values


def _old_tuple_by_name(
    names: tuple[str, ...], relation: Relation, kind: str, values: Tuple | None, what: str
) -> Row | None:
    """Return the old tuple by name, unchanged; None if none is required."""
    if relation.old_rows == "lacking" or (relation.old_rows == "whole" and (kind != "O" or not values)):
        raise old_row_missing(relation, what)
    if not kind:
        return None
    if UNCHANGED in _check_column_count(names, relation, values):
        raise old_row_missing(relation, "unchanged TOASTed value")
    return cast(Row, dict(zip(names, values or (), strict=True)))


def _usable_old_row(relation: Relation, kind: str, before: Row, what: str) -> Row:
    """Return the usable part of an old tuple: all of it, or the key."""
    if relation.old_rows == "whole":
        return before
    key = {column.name: before[column.name] for column in relation.key_columns}
    if None in key.values():  # no column of a primary key is NULL: the identity does not have it
        raise old_row_missing(relation, what)
    return before if kind == "O" else key


def _new_row(
    names: tuple[str, ...], relation: Relation, values: Tuple, before: Row | None
) -> tuple[Row, tuple[str, ...]]:
    """Return the new tuple by name, and the columns that it lacks because their values are unknown."""
    if UNCHANGED not in _check_column_count(names, relation, values):
        return cast(Row, dict(zip(names, values, strict=True))), ()
    row: Row = {}
    unchanged = []
    for name, value in zip(names, values, strict=True):
        if value is not UNCHANGED:
            row[name] = cast("str | None", value)
        elif before is not None and before[name] is not None:
            row[name] = before[name]
        else:
            unchanged.append(name)
    if unchanged and (relation.old_rows == "whole" or any(c.name in unchanged for c in relation.key_columns)):
        raise old_row_missing(relation, "unchanged TOASTed value")
    return row, tuple(unchanged)


class OldRowMissingError(InvalidError):
    """The row that a change replaces or deletes is unknown: only a copy of the table shows its present rows."""


def old_row_missing(relation: Relation, what: str) -> OldRowMissingError:
    return OldRowMissingError(
        f"the stream lacks an old row: relation={relation.name} at={what}.",
        fix=f"Run ALTER TABLE {relation.name} REPLICA IDENTITY FULL, then start this capture over.",
    )
