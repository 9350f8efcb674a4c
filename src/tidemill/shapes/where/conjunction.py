"""Combines two clauses, outer and inner: rows must match both, and the inner one reveals nothing of rows that the outer
one excludes.

- Invariant (no leak by errors): the inner clause is evaluated only on rows that match the outer one, here and in the
  database. A failure on another row would reveal something of that row. PostgreSQL may evaluate the clauses of an AND
  in any order.
- Invariant (trees, not texts): the combination is built from two trees, so that no parenthesis in one clause can close
  the other.
"""

from __future__ import annotations

from tidemill.shapes.where.compiler import WHERE_PREFIX, Where
from tidemill.shapes.where.expressions import BOOL, Expression, Row, fewest_values
from tidemill.shapes.where.parser import parse_clause
from tidemill.shapes.where.types import Value


def combine(outer: Where, inner: Where) -> Where:
    """Combine two clauses. `inner` was compiled with a `first_param` that follows the values of `outer`."""

    def evaluate(row: Row) -> Value:
        return inner.evaluate(row) if outer.matches(row) else False

    return Where(
        combined_sql(outer, inner),
        (*outer.params, *inner.params),
        outer.columns | inner.columns,
        Expression(BOOL, evaluate, equality=fewest_values(outer.equality, inner.equality)),
        given=(*outer.given, *inner.given),
        may_fail=outer.may_fail or inner.may_fail,
    )


def combined_sql(outer: Where, inner: Where) -> str:
    """Return the SQL of both. If the inner clause may fail, the outer one appears twice: alone, so that it can use an
    index."""
    if inner.may_fail:
        return f"({outer.sql}) AND CASE WHEN ({outer.sql}) THEN ({inner.sql}) ELSE false END"
    return f"({outer.sql}) AND ({inner.sql})"


def param_numbers(text: str) -> set[int]:
    """Return the numbers n of all `$n` in a clause. Raises WhereError for an invalid clause."""
    numbers: set[int] = set()
    nodes = [parse_clause(WHERE_PREFIX, text, "where clause", "where_clause")]
    while nodes:
        node = nodes.pop()
        if node.DESCRIPTOR.name == "ParamRef":
            numbers.add(node.number)
        for field, value in node.ListFields():
            if field.message_type is not None:
                nodes += value if field.is_repeated else [value]
    return numbers
