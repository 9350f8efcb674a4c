"""Predicate: a boolean SQL expression over named columns, compiled once and evaluated by columns.

Invariant (one row, one value): the value of a row depends on that row alone, so it is the same in every block, however
records are cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.base.errors import InvalidError, unknown_name_fix
from tidemill.shards.api import Column
from tidemill.shards.parts.schema import arrow_type
from tidemill.spark.predicates.operators import Columns, Operand, PredicateError, column_operand
from tidemill.spark.predicates.parser import parse_predicate

SUBSET = (
    "Use comparisons, AND, OR, NOT, IS NULL, IS TRUE, IN, BETWEEN, LIKE, + - *, length, abs, coalesce, and literals."
)


class Predicate:
    """Compiled expression. `columns`: the names that it uses."""

    def __init__(self, text: str, columns: frozenset[str], condition: Operand) -> None:
        self.text = text
        self.columns = columns
        self._condition = condition

    def evaluate(self, arrays: Columns, rows: int) -> pa.BooleanArray:
        """Return true, false or null (unknown) for each row. `arrays` have `rows` values each."""
        found = self._condition.evaluate(arrays)
        if isinstance(found, pa.Scalar):
            return pa.repeat(found, rows)
        return found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found

    def false_mask(self, arrays: Columns, rows: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the rows for which it is false: neither true nor unknown, as SQL's CHECK rejects them."""
        return _to_mask(pc.invert(self.evaluate(arrays, rows)))

    def true_mask(self, arrays: Columns, rows: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the rows for which it is true, as SQL's WHERE selects them."""
        return _to_mask(self.evaluate(arrays, rows))


def compile_predicate(text: str, columns: Sequence[Column]) -> Predicate:
    """Compile an expression over these columns of a table.

    An unquoted name matches in any case, a quoted one exactly. Raises InvalidError with the place of what is not
    supported.
    """
    exact = {column.name: column for column in columns}
    shown = "".join(char if char.isprintable() else " " for char in text)  # one line, and no character moves
    used: set[str] = set()

    def find(name: str, quoted: bool) -> Operand:
        column = exact.get(name)
        if column is None and not quoted:
            alike = [c for c in columns if c.name.lower() == name.lower()]
            if len(alike) > 1:
                raise PredicateError(f"column {name} is ambiguous, quote it")
            column = alike[0] if alike else None
        if column is None:
            fix = unknown_name_fix(name, sorted(exact))
            raise InvalidError(f"the table has no such column: column={name} expression=[{shown}].", fix=fix)
        used.add(column.name)
        return column_operand(column.name, column.type, arrow_type(column.type))

    try:
        condition = parse_predicate(text, find)
        condition.evaluate({name: pa.array([], arrow_type(exact[name].type)) for name in used})
    except PredicateError as error:
        raise InvalidError(f"invalid expression: expression=[{shown}] error=[{error}].", fix=SUBSET) from error
    except pa.ArrowException as error:
        raise InvalidError(
            f"expression cannot be evaluated: expression=[{shown}] error=[{error}].", fix=SUBSET
        ) from error
    return Predicate(text, frozenset(used), condition)


def _to_mask(array: pa.BooleanArray) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = np.asarray(pc.fill_null(array, False).to_numpy(zero_copy_only=False), dtype=bool)
    return found
