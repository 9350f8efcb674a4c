"""A compiled where clause, and the combination of two, outer and inner: rows must match both, and the inner one reveals
nothing of rows that the outer one excludes.

- Invariant (no leak by errors): the inner clause is evaluated only on rows that match the outer one, here and in the
  database. A failure on another row would reveal something of that row. PostgreSQL may evaluate the clauses of an AND
  in any order.
- Invariant (trees, not texts): the combination is built from two trees, so that no parenthesis in one clause can close
  the other.
"""

from __future__ import annotations

from tidemill.base.runtime.tasks import error_sentence, is_fault
from tidemill.shapes.where.expressions import BOOL, Evaluate, Expression, Row, fewest_values, start_building
from tidemill.shapes.where.sql_tree import parse_clause
from tidemill.shapes.where.types import EvaluationError, Value

WHERE_PREFIX = "SELECT 1 WHERE "


def evaluate_checked(evaluate: Evaluate, row: Row) -> Value:
    """Evaluate an expression. Raises EvaluationError, as PostgreSQL would, and for any other exception."""
    start_building()
    try:
        return evaluate(row)
    except EvaluationError:
        raise
    except BaseException as error:
        raise _as_evaluation_error(error) from error


class Where:
    """A compiled filter.

    sql       the clause printed from the checked tree; safe to embed in a query
    params    values of the $n in `sql`. Each number is used only once: PostgreSQL gives a parameter one type, by its
              first use in the statement, whereas each use takes its own type here, as a literal would
    given     values of the $n as the client numbers them
    columns   names of the columns that it reads
    equality  a condition on one column without which no row matches, if the clause has one; see `Equality`
    may_fail  evaluation may fail on a row (a division, an overflow, a cast), which would reveal
              something of the row
    """

    def __init__(
        self,
        sql: str,
        params: tuple[str, ...],
        columns: frozenset[str],
        expression: Expression,
        *,
        given: tuple[str, ...],
        may_fail: bool = False,
    ) -> None:
        self.may_fail = may_fail
        self.equality = expression.equality
        self.sql = sql
        self.params = params
        self.given = given
        self.columns = columns
        self._evaluate = expression.evaluate

    def evaluate(self, row: Row) -> bool | None:
        """Return True, False or None (NULL). Raises EvaluationError, as PostgreSQL would, and for any other
        exception."""
        value: bool | None = evaluate_checked(self._evaluate, row)
        return value

    def matches(self, row: Row) -> bool:
        return self.evaluate(row) is True


def _as_evaluation_error(error: BaseException) -> BaseException:
    return EvaluationError(error_sentence(error)) if is_fault(error) else error


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
