"""One clause within another: rows that match both, and nothing of the inner one told of rows that the outer leaves out.

J1  The inner clause is asked of rows that match the outer one only, here and in the database: whether it failed on
    another row would tell of that row. PostgreSQL is free to ask the clauses of an AND in any order.
J2  Two trees are joined, never two texts: no parenthesis within one can end it.
"""

from __future__ import annotations

from tidemill.shapes.where.compiler import PREFIX, Where
from tidemill.shapes.where.expressions import BOOL, Expression, Row, narrower
from tidemill.shapes.where.parser import parse_clause
from tidemill.shapes.where.types import Value


def both(outer: Where, inner: Where) -> Where:
    """`inner` was compiled with `first_param` behind the values of `outer`."""

    def evaluate(row: Row) -> Value:
        return inner.evaluate(row) if outer.matches(row) else False

    return Where(
        both_sql(outer, inner),
        (*outer.params, *inner.params),
        outer.columns | inner.columns,
        Expression(BOOL, evaluate, equality=narrower(outer.equality, inner.equality)),
        given=(*outer.given, *inner.given),
        may_fail=outer.may_fail or inner.may_fail,
    )


def both_sql(outer: Where, inner: Where) -> str:
    """The outer clause is said twice where the inner may fail: alone it finds its index."""
    if inner.may_fail:
        return f"({outer.sql}) AND CASE WHEN ({outer.sql}) THEN ({inner.sql}) ELSE false END"
    return f"({outer.sql}) AND ({inner.sql})"


def params_of(text: str) -> set[int]:
    """The numbers n of every `$n` of a clause. Raises WhereError for text that is none."""
    numbers: set[int] = set()
    nodes = [parse_clause(PREFIX, text, "where clause", "where_clause")]
    while nodes:
        node = nodes.pop()
        if node.DESCRIPTOR.name == "ParamRef":
            numbers.add(node.number)
        for field, value in node.ListFields():
            if field.message_type is not None:
                nodes += value if field.is_repeated else [value]
    return numbers
