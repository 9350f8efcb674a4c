"""Typed expressions, which filters compile to, and how literals take a type (PostgreSQL's rule for unknown).

An expression is a type and a function from a row (column → text) to a value; None is SQL's NULL. A literal or parameter
has type `unknown` until the other side of an operator, a cast or a context determines its type. It is then parsed once,
when the filter is compiled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import msgspec

from tidemill.base.pgtypes.text import InvalidTextError
from tidemill.shapes.where.types import TEXT_ONLY, EvaluationError, Type, Value, WhereError, reader_of

Row = Mapping[str, str | None]
Evaluate = Callable[[Row], Value]

UNKNOWN = Type("unknown")
BOOL = Type("bool")
TEXT = Type("text")


BUILT_CHARS = 4 << 20
"""Characters that one evaluation may build, in all its parts together: parts that wait for others are held in memory,
and a clause can have thousands of them."""
ELEMENT_CHARS = 4
"""Characters that an element of an array counts as."""


class _Built(threading.local):
    chars = 0


_built = _Built()


def start_building() -> None:
    """Start counting for an evaluation, or for a compilation, which evaluates constants."""
    _built.chars = 0


def count_built(chars: int) -> None:
    """Count characters before they are built. Raises EvaluationError beyond BUILT_CHARS."""
    _built.chars += chars
    if _built.chars > BUILT_CHARS:
        raise EvaluationError(f"texts and arrays that a clause builds are limited to {BUILT_CHARS} characters")


class Equality(msgspec.Struct, frozen=True):
    """A necessary condition for the expression to be true: the column's value, read as `kind`, is one of `values`.

    An index may offer a row only to filters that have its value here. The rest of the filter must still be evaluated.
    """

    column: str
    kind: str
    read: Evaluate
    values: frozenset[Value]


class Expression(msgspec.Struct, frozen=True):
    """A type and a function from a row to a value.

    literal    text of an unresolved literal, for type unknown
    constant   evaluate does not depend on the row
    column     name, if this is a bare column reference
    collated   has an explicit COLLATE
    equality   for conditions: a necessary condition on one column, if there is one
    """

    type: Type
    evaluate: Evaluate
    literal: str | None = None
    constant: bool = False
    column: str = ""
    collated: bool = False
    equality: Equality | None = None


def creates_value(expression: Expression) -> bool:
    """Return whether evaluating creates a value, rather than returns one of the row or of the clause."""
    return not expression.constant and (not expression.column or expression.type.array)


def count_waiting(value: Value) -> None:
    """Count a created value that waits until others are evaluated. Raises EvaluationError beyond BUILT_CHARS."""
    if isinstance(value, str):
        count_built(len(value))
    elif isinstance(value, list):
        count_built(ELEMENT_CHARS * len(value))


def narrowest_equality(parts: Sequence[Expression]) -> Equality | None:
    """Return the equality with the fewest values, for conditions that must all be true."""
    return fewest_values(*(part.equality for part in parts))


def fewest_values(*parts: Equality | None) -> Equality | None:
    found = [part for part in parts if part is not None]
    return min(found, key=lambda equality: len(equality.values)) if found else None


def union_equality(parts: Sequence[Expression]) -> Equality | None:
    """Return the union of the equalities if all parts have one, on the same column; for conditions of which one must be
    true."""
    found = [part.equality for part in parts if part.equality is not None]
    if not found or len(found) != len(parts) or len({(each.column, each.kind) for each in found}) != 1:
        return None
    values = frozenset[Value]().union(*(each.values for each in found))
    return Equality(found[0].column, found[0].kind, found[0].read, values)


def constant(type_: Type, value: Value) -> Expression:
    return Expression(type_, lambda row: value, constant=True)


def unknown_literal(text: str | None) -> Expression:
    """Return the expression of a quoted literal, a parameter, or NULL (None)."""
    return Expression(UNKNOWN, lambda row: text, literal=text, constant=True)


def column(name: str, type_: Type) -> Expression:
    """Return the expression of a column. Raises WhereError if the column's type cannot be evaluated."""
    if type_.name == "text" and not type_.array:
        return Expression(type_, lambda row: row[name], column=name)
    read = reader_of(type_)

    def evaluate(row: Row) -> Value:
        text = row[name]
        return None if text is None else read(text)

    return Expression(type_, evaluate, column=name)


def column_text(name: str, type_: Type) -> Expression:
    """Return the expression of a column for IS NULL and casts to text, which types without operators also have. Raises
    WhereError."""
    if type_.name not in TEXT_ONLY or type_.array:
        return column(name, type_)
    return Expression(type_, lambda row: row[name], column=name)


def resolve_unknown(expression: Expression, type_: Type, location: str = "") -> Expression:
    """Give an unknown literal its type; return any other expression unchanged. Raises WhereError on invalid text."""
    if expression.type != UNKNOWN:
        return expression
    if expression.literal is None:
        return constant(type_, None)
    try:
        return constant(type_, reader_of(type_)(expression.literal))
    except InvalidTextError as error:
        raise WhereError(f"{location}{error}") from error


def evaluate_all(expressions: Sequence[Expression]) -> Callable[[Row], list[Value]]:
    """Return the function from a row to the values of all expressions, which are held in memory together."""
    tests = [(each.evaluate, creates_value(each)) for each in expressions]

    def evaluate(row: Row) -> list[Value]:
        values: list[Value] = []
        for test, creates in tests:
            value = test(row)
            if creates:
                count_waiting(value)
            values.append(value)
        return values

    return evaluate


def strict(function: Callable[..., Value], *arguments: Expression) -> Evaluate:
    """Call `function` on the values of one or two arguments; NULL if one is NULL. Both arguments are evaluated, so
    either may fail."""
    if len(arguments) == 1:
        only = arguments[0].evaluate

        def unary(row: Row) -> Value:
            value = only(row)
            return None if value is None else function(value)

        return unary
    left, right = arguments[0].evaluate, arguments[1].evaluate

    def binary(row: Row) -> Value:
        a, b = left(row), right(row)
        return None if a is None or b is None else function(a, b)

    def binary_waiting(row: Row) -> Value:
        a = left(row)
        count_waiting(a)
        b = right(row)
        return None if a is None or b is None else function(a, b)

    waits = creates_value(arguments[0]) and not (arguments[1].constant or arguments[1].column)
    return binary_waiting if waits else binary
