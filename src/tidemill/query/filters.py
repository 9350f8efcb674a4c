"""Filter of a read: an Arrow expression, and what it implies about the key. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set
from datetime import datetime
from typing import Any, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.base.errors import InvalidError
from tidemill.shards.api import ShardSchema
from tidemill.shards.parts.key_hash import key_hashes
from tidemill.shards.parts.schema import contents_schema

Condition = tuple[str, str, Any]
Where: TypeAlias = "pc.Expression | Sequence[Condition] | Sequence[Sequence[Condition]]"
"""An expression of `pyarrow.compute`, or conditions as for `pyarrow.parquet.read_table(filters=…)`:
`[("status", "=", "open"), ("total", ">", 5)]`, all of which must hold; in a list of such lists, those of one must."""


class Filter(msgspec.Struct, frozen=True):
    """Filter of rows. `names`: the columns that it uses. `hashes`: of the only keys that may match; None = any may."""

    expression: Any
    names: tuple[str, ...]
    hashes: list[int] | None

    def matching_rows(self, rows: pa.Table) -> pa.Table:
        """Return the matching rows. Raises InvalidError if the filter cannot be evaluated on one of them (a division by
        zero, a text that is not a number)."""
        try:
            return rows.filter(self.expression)
        except pa.ArrowException as error:
            raise InvalidError(
                f"the filter cannot be evaluated on a row: {_error_text(error)}.",
                fix="Write a filter that has a result for every row of the table.",
            ) from error


def _error_text(error: BaseException) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")


def parse_filter(schema: ShardSchema, where: Where) -> Filter:
    """Return the filter. Raises InvalidError for an unknown column, or a comparison or value that Arrow does not
    support."""
    conditions: list[Condition] = []
    try:
        if isinstance(where, pc.Expression):
            expression = where
        else:
            from pyarrow.parquet import filters_to_expression

            clocks = {c.name for c in schema.columns if c.type == "timestamp_ntz"}
            given = [_check_condition(c, clocks) for c in where]
            expression = filters_to_expression(given)
            conditions = [c for c in given if isinstance(c, tuple) and len(c) == 3 and isinstance(c[0], str)]
        if "FieldPath(" in _QUOTED.sub("", str(expression)):
            raise ValueError("it names a column by its position")
        empty = contents_schema(schema).empty_table()
        empty.filter(expression)
        names = tuple(n for n in empty.column_names if _uses_missing_column(expression, empty.drop_columns([n])))
        only = {column: value if op == "in" else [value] for column, op, value in conditions if op in ("=", "==", "in")}
        return Filter(expression, names, key_hashes(schema, only) if conditions else None)
    except Exception as error:  # values are the caller's objects: comparing or converting one may raise any type
        have = ", ".join(contents_schema(schema).names)
        raise InvalidError(
            f"the filter cannot be applied: {_error_text(error)}.",
            fix=f'Write [("column", "=", value)] or an expression of pyarrow.compute, with the columns {have}.',
        ) from error


_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')


def _check_condition(condition: Any, clocks: Set[str]) -> Any:
    """Check a condition and return it. A filter is evaluated several times, so iterators are rejected.

    `clocks`: columns without a zone, which Arrow would compare with a zoned time as if both were UTC. Raises
    ValueError.
    """
    if isinstance(condition, list):
        return [_check_condition(one, clocks) for one in condition]
    if not isinstance(condition, tuple) or len(condition) != 3:
        return condition
    name, _, value = condition
    if isinstance(value, Iterator):
        raise ValueError("the values of a comparison must be a list")
    values = value if isinstance(value, list | tuple | set | frozenset) else [value]
    if isinstance(name, str) and name in clocks and any(_has_time_zone(one) for one in values):
        raise ValueError(f"column {name} is a time without a zone: compare it with another such time")
    return condition


def _has_time_zone(value: Any) -> bool:
    """Return whether a datetime or an Arrow scalar has a time zone."""
    if isinstance(value, pa.Scalar):
        return pa.types.is_timestamp(value.type) and value.type.tz is not None
    return isinstance(value, datetime) and value.tzinfo is not None


def _uses_missing_column(expression: pc.Expression, without: pa.Table) -> bool:
    """Return whether the expression uses a column, by evaluating it without that column: Arrow does not list them."""
    try:
        without.filter(expression)
    except pa.ArrowInvalid:
        return True
    return False
