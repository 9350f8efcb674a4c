"""Comparison, logic, IN, ANY and ALL on typed expressions. All functions check types as PostgreSQL does.
Other operators are in `functions`; `compiler._compile_binary` selects them by name.

The order of text depends on a collation that is not available here. So `<` and the like on text require code-point
order: a column whose collation is C, or an explicit COLLATE "C", in a database whose encoding has that order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from decimal import Decimal

from tidemill.base.pgtypes.intervals import interval_span
from tidemill.base.pgtypes.text import DAY_US, INTEGERS
from tidemill.shapes.where.collations import BYTE_ORDERS, decided_collation
from tidemill.shapes.where.common_type import coerce, find_common_type
from tidemill.shapes.where.expressions import (
    BOOL,
    TEXT,
    UNKNOWN,
    Equality,
    Evaluate,
    Expression,
    Row,
    constant,
    resolve_unknown,
    strict,
    union_equality,
)
from tidemill.shapes.where.functions import array_comparison
from tidemill.shapes.where.types import (
    MOMENTS,
    NUMBERS,
    TEXTS,
    EvaluationError,
    Type,
    Value,
    WhereError,
    to_float8,
)

COMPARISONS: dict[str, Callable[[Value, Value], bool]] = {
    "=": operator.eq,
    "<>": operator.ne,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


_EQUALITIES = ("=", "<>", "!=")


def operator_error(name: str, left: Type | None, right: Type, location: str) -> WhereError:
    shown = f"{left} {name} {right}" if left is not None else f"{name} {right}"
    return WhereError(f"{location}operator does not exist: {shown}", fix="Cast one side to the other's type.")


def unify_operands(name: str, left: Expression, right: Expression, location: str) -> tuple[Expression, Expression]:
    """Convert both sides to one comparable representation. Raises WhereError."""
    if left.type == UNKNOWN and right.type == UNKNOWN:
        return resolve_unknown(left, TEXT, location), resolve_unknown(right, TEXT, location)
    left, right = resolve_unknown(left, right.type, location), resolve_unknown(right, left.type, location)
    a, b = left.type, right.type
    if a.array or b.array:
        if a.array and b.array and array_comparison.has_same_elements(a, b) and name in _EQUALITIES:
            return left, right
        raise operator_error(name, a, b, location)
    if a.name in NUMBERS and b.name in NUMBERS:
        return promote_numbers(left, right)
    if a.name in MOMENTS and b.name in MOMENTS:
        return _as_timestamp(left, right)
    if a.name in TEXTS and b.name in TEXTS:
        if "enum" in (a.name, b.name) and (a.name != b.name or not (name in _EQUALITIES or (a.labels or b.labels))):
            raise operator_error(name, a, b, location)
        if a.name == "bpchar":
            return _stripped(left), _stripped(right) if b.varying else _unpadded(right)
        if b.name == "bpchar":
            return _stripped(left) if a.varying else left, _stripped(right)
        return left, right
    if a.name == b.name:
        return left, right
    raise operator_error(name, a, b, location)


def promote_numbers(left: Expression, right: Expression) -> tuple[Expression, Expression]:
    a, b = left.type.name, right.type.name
    if a == b or (a in INTEGERS and b in INTEGERS):
        return left, right
    if "float4" in (a, b) or "float8" in (a, b):
        return _convert(left, "float8", to_float8), _convert(right, "float8", to_float8)
    return _convert(left, "numeric", Decimal), _convert(right, "numeric", Decimal)


def _convert(expression: Expression, name: str, function: Callable[[Value], Value]) -> Expression:
    if expression.type.name == name:
        return expression
    return Expression(Type(name), strict(function, expression), constant=expression.constant)


def _as_timestamp(left: Expression, right: Expression) -> tuple[Expression, Expression]:
    if left.type.name == right.type.name:
        return left, right
    return tuple(  # type: ignore[return-value]
        _convert(side, "timestamp", lambda days: days * DAY_US) if side.type.name == "date" else side
        for side in (left, right)
    )


def _unpadded(expression: Expression) -> Expression:
    return _stripped(expression) if expression.type.name == "bpchar" else expression


def _stripped(expression: Expression) -> Expression:
    return Expression(
        expression.type,
        strict(lambda text: text.rstrip(" "), expression),
        constant=expression.constant,
        collated=expression.collated,
    )


def compile_comparison(name: str, left: Expression, right: Expression, location: str) -> Expression:
    left, right = unify_operands(name, left, right, location)
    test = strict(comparator(name, left, right, location), left, right)
    return Expression(BOOL, test, equality=_equality(left, right) or _equality(right, left) if name == "=" else None)


def _equality(left: Expression, right: Expression) -> Equality | None:
    """Return the condition of a bare column that is compared with a constant of the same hashable kind."""
    kind = left.type.name
    if not left.column or not right.constant or not _hashes_alike(kind, right.type.name):
        return None
    if left.type.array or right.type.array:
        return None
    value = right.evaluate({})
    return Equality(left.column, kind, left.evaluate, frozenset() if value is None else frozenset((value,)))


def comparator(name: str, left: Expression, right: Expression, location: str) -> Callable[[Value, Value], bool]:
    """Return the function that compares two non-NULL values of unified sides."""
    function = COMPARISONS[name]
    kind = left.type.name
    collation = decided_collation(left, right, location=location)
    if left.type.array:
        same = array_comparison.array_equality(kind)
        return same if name == "=" else lambda a, b: not same(a, b)
    if kind == "enum" and name not in _EQUALITIES:
        return _by_label(function, left.type.labels or right.type.labels)
    if kind in TEXTS and name not in _EQUALITIES and not collation.ordered:
        if collation.name in BYTE_ORDERS:
            raise WhereError(
                f"{location}text of this database is not ordered by code points, due to its encoding: operator={name}.",
                fix="Only UTF8, LATIN1 and SQL_ASCII are.",
            )
        raise WhereError(
            f"{location}ordering text depends on the collation of the database: operator={name}.",
            fix='Write COLLATE "C" after one side.',
        )
    if kind in ("float4", "float8", "numeric"):
        return _with_nan(function)
    if kind == "interval":
        return lambda a, b: function(interval_span(a), interval_span(b))
    return function


def _by_label(function: Callable[[Value, Value], bool], labels: tuple[str, ...]) -> Callable[[Value, Value], bool]:
    places = {label: place for place, label in enumerate(labels)}

    def call(a: str, b: str) -> bool:
        try:
            return function(places[a], places[b])
        except KeyError as error:
            raise EvaluationError(f"the enum had no such label when the clause was compiled: {error}") from error

    return call


def _with_nan(function: Callable[[Value, Value], bool]) -> Callable[[Value, Value], bool]:
    """Compare numbers so that NaN equals itself and is above every other number, as in PostgreSQL."""

    def call(a: Value, b: Value) -> bool:
        if a == a and b == b:
            return function(a, b)
        return function(int(a != a), int(b != b))

    return call


def compile_distinct(left: Expression, right: Expression, negated: bool, location: str) -> Expression:
    """Compile IS [NOT] DISTINCT FROM; `negated` = NOT DISTINCT. Never NULL."""
    left, right = unify_operands("=", left, right, location)
    equal = comparator("=", left, right, location)
    first, second = left.evaluate, right.evaluate

    def evaluate(row: Row) -> bool:
        a, b = first(row), second(row)
        same = (a is None and b is None) if a is None or b is None else equal(a, b)
        return same is negated

    return Expression(BOOL, evaluate)


def compile_quantified(name: str, left: Expression, right: Expression, every: bool, location: str) -> Expression:
    """Compile `left op ANY(array)`, or ALL if `every`; NULL elements count as unknown."""
    if left.type == UNKNOWN:
        left = resolve_unknown(left, right.type.element if right.type.array else TEXT, location)
    right = resolve_unknown(right, left.type.with_name(left.type.name, array=True), location)
    if not right.type.array:
        raise WhereError(f"{location}op ANY/ALL (array) requires array on right side")
    probe = Expression(right.type.element, lambda element: element, constant=right.constant, collated=right.collated)
    unified_left, unified_right = unify_operands(name, left, probe, location)
    test = comparator(name, unified_left, unified_right, location)
    lift = unified_right.evaluate
    kind = unified_left.type.name
    if name == "=" and not every and right.constant and _hashes_alike(kind, right.type.name):
        values = right.evaluate({})
        if values is not None:
            return _lookup_any(unified_left, array_comparison.flatten(values))
    value_of, array_of = unified_left.evaluate, right.evaluate
    decisive = not every

    def evaluate(row: Row) -> bool | None:
        value, array = value_of(row), array_of(row)
        if array is None:
            return None
        elements = array_comparison.flatten(array)
        if not elements:
            return every
        if value is None:
            return None
        doubtful = False
        for element in elements:
            if element is None:
                doubtful = True
            elif test(value, lift(element)) is decisive:
                return decisive
        return None if doubtful else every

    return Expression(BOOL, evaluate)


def _lookup_any(left: Expression, values: list[Value]) -> Expression:
    """Compile `left = ANY(constant array)`; an empty array is false even for NULL."""
    return _lookup_expression(left, values) if values else constant(BOOL, False)


def any_true(tests: list[Evaluate]) -> Evaluate:
    """OR with three values: true if any is true, else NULL if any is NULL, else false."""
    return _decide(tests, True)


def all_true(tests: list[Evaluate]) -> Evaluate:
    """AND with three values: false if any is false, else NULL if any is NULL, else true."""
    return _decide(tests, False)


def _decide(tests: list[Evaluate], by: bool) -> Evaluate:
    def evaluate(row: Row) -> bool | None:
        doubtful = False
        for test in tests:
            value: bool | None = test(row)
            if value is by:
                return by
            if value is None:
                doubtful = True
        return None if doubtful else not by

    return evaluate


HASHABLE = frozenset({"int2", "int4", "int8", "text", "enum", "uuid", "bool", "date", "timestamp", "timestamptz"})
"""Kinds whose values are equal, and hash, as in Python. Excludes numbers with NaN, and padded text."""


def _hashes_alike(kind: str, other: str) -> bool:
    """Return whether values of the two kinds have one representation, with equal hashes if they are equal."""
    return kind in HASHABLE and (kind == other or (kind in INTEGERS and other in INTEGERS))


def _lookup(value_of: Evaluate, values: list[Value]) -> Evaluate:
    known = frozenset(value for value in values if value is not None)
    has_null = None in values

    def evaluate(row: Row) -> bool | None:
        value = value_of(row)
        if value is None:
            return None
        if value in known:
            return True
        return None if has_null else False

    return evaluate


def _lookup_expression(left: Expression, values: list[Value]) -> Expression:
    known = frozenset(value for value in values if value is not None)
    equality = Equality(left.column, left.type.name, left.evaluate, known) if left.column else None
    return Expression(BOOL, _lookup(left.evaluate, values), equality=equality)


def compile_in(left: Expression, items: Sequence[Expression], fixed: Sequence[bool], location: str) -> Expression:
    """Compile IN over a list of expressions; `fixed`: which of them read no column.

    Two or more of these take one common type together with the left side, as in PostgreSQL. Constants of a hashable
    kind become one set lookup.
    """
    together = [item for item, reads_none in zip(items, fixed, strict=True) if reads_none]
    common = find_common_type([left, *together]) if len(together) > 1 else None
    if together:
        decided_collation(left, *together, location=location)
    pairs: list[tuple[Expression, Expression]] = []
    for item, reads_none in zip(items, fixed, strict=True):
        if common is not None and not common.array and reads_none:
            item = coerce(item, common, location)
        pairs.append(unify_operands("=", left, item, location))
        if not reads_none:
            decided_collation(left, item, location=location)
    values = [right.evaluate({}) for _, right in pairs if right.constant]
    first = pairs[0][0]
    alike = all(a.type.name == first.type.name and _hashes_alike(a.type.name, b.type.name) for a, b in pairs)
    if len(values) == len(pairs) and alike and not first.type.array:
        return _lookup_expression(first, values)
    parts = [compile_comparison("=", a, b, location) for a, b in pairs]
    return Expression(BOOL, any_true([part.evaluate for part in parts]), equality=union_equality(parts))
