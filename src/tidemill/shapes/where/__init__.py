"""where: filters of shapes, in PostgreSQL's own grammar, evaluated on text rows with three-valued logic.

Owns parsing (libpg_query through postgast), the list of supported expressions, type resolution of literals, and the
evaluator. Does not own the source of the rows. Unsupported expressions are rejected with the reason; supported ones
give exactly what PostgreSQL gives for `SELECT (expression)`.
"""

from __future__ import annotations

from tidemill.shapes.where.clause import Where, combine, combined_sql, param_numbers
from tidemill.shapes.where.compiler import compile_where
from tidemill.shapes.where.expressions import Equality
from tidemill.shapes.where.order_by import Ordering, compile_order_by
from tidemill.shapes.where.types import EvaluationError, Type, Value, WhereError

__all__ = [
    "Equality",
    "EvaluationError",
    "Ordering",
    "Type",
    "Value",
    "Where",
    "WhereError",
    "combine",
    "combined_sql",
    "compile_order_by",
    "compile_where",
    "param_numbers",
]
