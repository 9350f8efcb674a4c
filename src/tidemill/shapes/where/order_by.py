"""Compiles the text of an ORDER BY list to the same list, printed from its checked tree.

`SELECT 1 ORDER BY <text>` is parsed by PostgreSQL's own parser. Each item is a column, or an expression that a where
clause may have too and that reads a column. A bare number would be a position in the select list, and is rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidemill.shapes.where.clause import evaluate_checked
from tidemill.shapes.where.collations import decided_collation
from tidemill.shapes.where.compiler import TreeCompiler, table_qualifiers
from tidemill.shapes.where.expressions import Expression, Row, column
from tidemill.shapes.where.operators import comparator
from tidemill.shapes.where.sql_tree import compile_guarded, identifier, parse_clause, print_sql
from tidemill.shapes.where.types import Type, Value, WhereError

ORDER_BY_PREFIX = "SELECT 1 ORDER BY "
MAX_ITEMS = 32
_DIRECTIONS = {0: "", 1: "", 2: " ASC", 3: " DESC"}
_NULLS = {0: "", 1: "", 2: " NULLS FIRST", 3: " NULLS LAST"}
"""SortByDir and SortByNulls of the tree; 0 is not set."""
DESCENDING, NULLS_FIRST, NULLS_LAST = 3, 2, 3


class SortKey:
    """One item of the list, evaluated locally. NULLs come last in ascending order, unless the item states otherwise."""

    def __init__(self, expression: Expression, sort: Any) -> None:
        """Create a key. Raises WhereError for a type that cannot be ordered locally."""
        if expression.type.array or expression.type.name in ("enum", "unknown"):
            raise WhereError("values of this type cannot be ordered.")
        self._less = comparator("<", expression, expression, "")
        self._evaluate = expression.evaluate
        self._descending = sort.sortby_dir == DESCENDING
        self._nulls_first = sort.sortby_nulls == NULLS_FIRST or (self._descending and sort.sortby_nulls != NULLS_LAST)

    def evaluate(self, row: Row) -> Value:
        """Return the key's value. Raises EvaluationError, as a where clause does."""
        return evaluate_checked(self._evaluate, row)

    def compare(self, a: Value, b: Value) -> int:
        """Return a number below 0 if a comes before b, 0 if they are equal, above 0 otherwise."""
        if a is None or b is None:
            if a is None and b is None:
                return 0
            return -1 if (a is None) is self._nulls_first else 1
        if self._less(a, b):
            return 1 if self._descending else -1
        if self._less(b, a):
            return -1 if self._descending else 1
        return 0


class Ordering:
    """A compiled list.

    sql       the list as SQL; safe to embed in a query
    columns   names of the columns that it reads
    plain     columns that are items without an expression
    keys      the list for local evaluation; None if an item has a type or collation that only a database can order
    """

    def __init__(
        self, sql: str, columns: frozenset[str], plain: frozenset[str], keys: tuple[SortKey, ...] | None
    ) -> None:
        self.sql = sql
        self.columns = columns
        self.plain = plain
        self.keys = keys


def compile_order_by(text: str, columns: Mapping[str, Type], *, table: str = "", schema: str = "") -> Ordering:
    """Compile an ORDER BY list. Raises WhereError with the exact reason."""
    return compile_guarded(lambda: _compile(text, columns, schema, table))


def _compile(text: str, columns: Mapping[str, Type], schema: str, table: str) -> Ordering:
    select = parse_clause(ORDER_BY_PREFIX, text, "order by list", "sort_clause")
    if len(select.sort_clause) > MAX_ITEMS:
        raise WhereError(f"order by list is too long: limit={MAX_ITEMS}.")
    items: list[str] = []
    used: set[str] = set()
    plain: set[str] = set()
    keys: list[SortKey | None] = []
    for node in select.sort_clause:
        sort = node.sort_by
        if sort.use_op or sort.sortby_dir not in _DIRECTIONS or sort.sortby_nulls not in _NULLS:
            raise WhereError("USING is not supported in an order by list.", fix="Write ASC or DESC.")
        name = _plain_column(sort.node, columns, schema, table)
        if name is not None:
            plain.add(name)
            used.add(name)
            printed = identifier(name)
            keys.append(_column_sort_key(name, columns[name], sort))
        else:
            compiler = TreeCompiler((), columns, schema, table)
            expression = compiler.visit(sort.node, 0)
            if not compiler.used_columns:
                raise WhereError("each item of an order by list must read a column.")
            decided_collation(expression)
            used |= compiler.used_columns
            printed = print_sql(sort.node)
            keys.append(_sort_key(compiler.for_rows(expression), sort))
        items.append(printed + _DIRECTIONS[sort.sortby_dir] + _NULLS[sort.sortby_nulls])
    here = tuple(key for key in keys if key is not None)
    return Ordering(", ".join(items), frozenset(used), frozenset(plain), here if len(here) == len(keys) else None)


def _column_sort_key(name: str, type_: Type, sort: Any) -> SortKey | None:
    try:
        return _sort_key(column(name, type_.base_type), sort)
    except WhereError:
        return None


def _sort_key(expression: Expression, sort: Any) -> SortKey | None:
    try:
        return SortKey(expression, sort)
    except WhereError:
        return None


def _plain_column(node: Any, columns: Mapping[str, Type], schema: str, table: str) -> str | None:
    """Return the column if the item is a plain one, of any type: the database orders it, even if a where clause cannot
    read it."""
    if node.WhichOneof("node") != "column_ref":
        return None
    fields = node.column_ref.fields
    if any(field.WhichOneof("node") != "string" for field in fields):
        raise WhereError("* is not supported in an order by list.")
    *qualifier, name = [field.string.sval for field in fields]
    if qualifier not in table_qualifiers(schema, table):
        raise WhereError(f'missing FROM-clause entry for table "{".".join(qualifier)}"')
    if name not in columns:
        raise WhereError(f'unknown reference {name}: column "{name}" does not exist')
    return str(name)
