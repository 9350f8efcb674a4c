"""Operators on typed expressions: comparison, arithmetic, LIKE, ANY/ALL. Each checks types as PostgreSQL does.

Ordering text depends on a collation we do not have, so `<` and friends on text need code-point order:
a column whose collation is C, or an explicit COLLATE "C".
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal
from functools import lru_cache

from tidemill.shapes.where.arrays import flatten
from tidemill.shapes.where.expressions import (
    BOOL,
    TEXT,
    UNKNOWN,
    Evaluate,
    Expression,
    Row,
    resolve,
    strict,
)
from tidemill.shapes.where.types import (
    INTEGERS,
    MOMENTS,
    NUMBERS,
    TEXTS,
    WIDE,
    EvaluationError,
    Type,
    Value,
    WhereError,
    check_integer,
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
_MIRROR_NAN = {"=": (True, False), "<>": (False, True), "!=": (False, True)}
DAY_US = 86_400_000_000


def no_operator(name: str, left: Type | None, right: Type, location: str) -> WhereError:
    shown = f"{left} {name} {right}" if left is not None else f"{name} {right}"
    return WhereError(f"{location}operator does not exist: {shown}", fix="Cast one side to the other's type.")


def unify(name: str, left: Expression, right: Expression, location: str) -> tuple[Expression, Expression]:
    """Both sides with one comparable representation. Raises WhereError."""
    if left.type == UNKNOWN and right.type == UNKNOWN:
        return resolve(left, TEXT, location), resolve(right, TEXT, location)
    left, right = resolve(left, right.type, location), resolve(right, left.type, location)
    a, b = left.type, right.type
    if a.array or b.array:
        if a.array and b.array and a.name == b.name and name in ("=", "<>", "!="):
            return left, right
        raise no_operator(name, a, b, location)
    if a.name in NUMBERS and b.name in NUMBERS:
        return promote(left, right)
    if a.name in MOMENTS and b.name in MOMENTS:
        return _as_moment(left, right)
    if a.name in TEXTS and b.name in TEXTS:
        if "enum" in (a.name, b.name) and (a.name != b.name or name not in ("=", "<>", "!=")):
            raise no_operator(name, a, b, location)
        if "bpchar" in (a.name, b.name):
            return _stripped(left), _stripped(right)
        return left, right
    if a.name == b.name:
        return left, right
    raise no_operator(name, a, b, location)


def promote(left: Expression, right: Expression) -> tuple[Expression, Expression]:
    a, b = left.type.name, right.type.name
    if a == b or (a in INTEGERS and b in INTEGERS):
        return left, right
    if "float4" in (a, b) or "float8" in (a, b):
        return _convert(left, "float8", float), _convert(right, "float8", float)
    return _convert(left, "numeric", Decimal), _convert(right, "numeric", Decimal)


def _convert(expression: Expression, name: str, function: Callable[[Value], Value]) -> Expression:
    if expression.type.name == name:
        return expression
    return Expression(Type(name), strict(function, expression), constant=expression.constant)


def _as_moment(left: Expression, right: Expression) -> tuple[Expression, Expression]:
    if left.type.name == right.type.name:
        return left, right
    return tuple(  # type: ignore[return-value]
        _convert(side, "timestamp", lambda days: days * DAY_US) if side.type.name == "date" else side
        for side in (left, right)
    )


def _stripped(expression: Expression) -> Expression:
    if expression.type.name != "bpchar":
        return expression
    return Expression(
        Type("bpchar", ordered=expression.type.ordered),
        strict(lambda text: text.rstrip(" "), expression),
        constant=expression.constant,
        collated=expression.collated,
    )


def compare(name: str, left: Expression, right: Expression, location: str) -> Expression:
    left, right = unify(name, left, right, location)
    return Expression(BOOL, strict(comparator(name, left, right, location), left, right))


def comparator(name: str, left: Expression, right: Expression, location: str) -> Callable[[Value, Value], bool]:
    """The function for two non-NULL values of unified sides."""
    function = COMPARISONS[name]
    kind = left.type.name
    if kind in TEXTS and name not in ("=", "<>", "!="):
        _check_order(name, left, right, location)
    if kind in ("float4", "float8", "numeric") and not left.type.array:
        return _with_nan(name, function)
    return function


def _check_order(name: str, left: Expression, right: Expression, location: str) -> None:
    if left.collated or right.collated:
        return
    for side in (left, right):
        if not side.constant and not side.type.ordered:
            raise WhereError(
                f"{location}ordering text depends on the collation of the database: operator={name}.",
                fix='Write COLLATE "C" after one side.',
            )


def _with_nan(name: str, function: Callable[[Value, Value], bool]) -> Callable[[Value, Value], bool]:
    """NaN equals itself and is above every other number, as in PostgreSQL."""

    def call(a: Value, b: Value) -> bool:
        if a == a and b == b:
            return function(a, b)
        return function(int(a != a), int(b != b))

    return call


def distinct(left: Expression, right: Expression, negated: bool, location: str) -> Expression:
    """IS [NOT] DISTINCT FROM; `negated` = NOT DISTINCT. Never NULL."""
    left, right = unify("=", left, right, location)
    equal = comparator("=", left, right, location)
    first, second = left.evaluate, right.evaluate

    def evaluate(row: Row) -> bool:
        a, b = first(row), second(row)
        same = (a is None and b is None) if a is None or b is None else equal(a, b)
        return same is negated

    return Expression(BOOL, evaluate)


# -- arithmetic ------------------------------------------------------------------------------------


def arithmetic(name: str, left: Expression, right: Expression, location: str) -> Expression:
    if left.type == UNKNOWN and right.type == UNKNOWN:
        raise WhereError(f"{location}operator is not unique: unknown {name} unknown", fix="Cast one side.")
    left, right = resolve(left, right.type, location), resolve(right, left.type, location)
    a, b = left.type, right.type
    if a.array or b.array or a.name not in NUMBERS or b.name not in NUMBERS:
        raise no_operator(name, a, b, location)
    wider = max(a.name, b.name, key=lambda kind: NUMBERS[kind])
    if wider == "float4" and a.name != b.name:
        wider = "float8"
    if name == "%" and wider.startswith("float"):
        raise no_operator(name, a, b, location)
    if wider not in INTEGERS:
        left, right = promote(left, right)
    function = _ARITHMETIC[(name, "int" if wider in INTEGERS else "float" if wider.startswith("float") else "numeric")]
    if wider in INTEGERS:
        result: Callable[..., Value] = lambda x, y: check_integer(wider, function(x, y))  # noqa: E731
    elif wider.startswith("float"):
        result = _float_checked(function, wider)
    else:
        result = function
    return Expression(Type(wider), strict(result, left, right), constant=left.constant and right.constant)


def negate(operand: Expression, location: str) -> Expression:
    if operand.type.array or operand.type.name not in NUMBERS:
        raise no_operator("-", None, operand.type, location)
    name = operand.type.name
    if name in INTEGERS:
        return Expression(Type(name), strict(lambda x: check_integer(name, -x), operand), constant=operand.constant)
    return Expression(Type(name), strict(operator.neg, operand), constant=operand.constant)


def _nonzero(divisor: Value) -> None:
    if divisor == 0:
        raise EvaluationError("division by zero")


def _int_divide(a: int, b: int) -> int:
    _nonzero(b)
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def _int_modulo(a: int, b: int) -> int:
    _nonzero(b)
    return int(math.copysign(1, a)) * (abs(a) % abs(b))


def _float_divide(a: float, b: float) -> float:
    _nonzero(b)
    return a / b


def _float_checked(function: Callable[[float, float], float], name: str) -> Callable[[float, float], float]:
    from tidemill.shapes.where.types import to_float4

    def call(a: float, b: float) -> float:
        value = function(a, b)
        if math.isinf(value) and not math.isinf(a) and not math.isinf(b):
            raise EvaluationError("value out of range: overflow")
        return to_float4(value) if name == "float4" else value

    return call


def _leading_group(value: Decimal) -> tuple[int, int]:
    """Weight and value of the first base-10000 digit, as PostgreSQL stores a numeric; (0, 0) for zero."""
    if value == 0:
        return 0, 0
    weight = value.adjusted() // 4
    return weight, int(abs(value).scaleb(-4 * weight, WIDE))


def _numeric_divide(a: Decimal, b: Decimal) -> Decimal:
    """Quotient rounded to the scale PostgreSQL's select_div_scale picks (at least 16 significant digits)."""
    if a.is_nan() or b.is_nan():
        return Decimal("nan")
    _nonzero(b)
    if not a.is_finite():
        return Decimal("nan") if not b.is_finite() else a.copy_sign(a) if b > 0 else -a
    if not b.is_finite():
        return Decimal(0)
    (weight_a, first_a), (weight_b, first_b) = _leading_group(a), _leading_group(b)
    quotient_weight = weight_a - weight_b - (1 if first_a <= first_b else 0)
    scale = max(16 - quotient_weight * 4, -int(a.as_tuple().exponent), -int(b.as_tuple().exponent), 0)
    scale = min(scale, 1000)
    exact_digits = max(a.adjusted() - b.adjusted(), 0) + scale + 5
    context = WIDE.copy()
    context.prec = exact_digits + 30
    quotient = context.divide(a, b)
    return quotient.quantize(Decimal(1).scaleb(-scale), rounding=ROUND_HALF_UP, context=WIDE)


def _numeric_modulo(a: Decimal, b: Decimal) -> Decimal:
    if a.is_nan() or b.is_nan() or a.is_infinite():
        return Decimal("nan")
    _nonzero(b)
    return WIDE.remainder(a, b)


def _decimal(function: Callable[[Decimal, Decimal], Decimal]) -> Callable[[Decimal, Decimal], Decimal]:
    def call(a: Decimal, b: Decimal) -> Decimal:
        if a.is_infinite() or b.is_infinite():
            value = function(a, b) if not (a.is_nan() or b.is_nan()) else Decimal("nan")
            return value
        return function(a, b)

    return call


_ARITHMETIC: dict[tuple[str, str], Callable[..., Value]] = {
    ("+", "int"): operator.add,
    ("-", "int"): operator.sub,
    ("*", "int"): operator.mul,
    ("/", "int"): _int_divide,
    ("%", "int"): _int_modulo,
    ("+", "float"): operator.add,
    ("-", "float"): operator.sub,
    ("*", "float"): operator.mul,
    ("/", "float"): _float_divide,
    ("+", "numeric"): _decimal(WIDE.add),
    ("-", "numeric"): _decimal(WIDE.subtract),
    ("*", "numeric"): _decimal(WIDE.multiply),
    ("/", "numeric"): _numeric_divide,
    ("%", "numeric"): _numeric_modulo,
}
ARITHMETIC_NAMES = frozenset(name for name, _ in _ARITHMETIC)


def concat(left: Expression, right: Expression, location: str) -> Expression:
    left, right = resolve(left, TEXT, location), resolve(right, TEXT, location)
    if left.type.array or right.type.array or left.type.name != "text" or right.type.name != "text":
        raise WhereError(f"{location}only text can be joined: {left.type} || {right.type}", fix="Cast both to text.")
    ordered = left.type.ordered and right.type.ordered
    return Expression(Type("text", ordered=ordered), strict(operator.add, left, right))


# -- LIKE ------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def like_pattern(pattern: str) -> re.Pattern[str]:
    """A LIKE pattern (escape character backslash) as a regular expression. Raises EvaluationError."""
    out: list[str] = []
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 1
            if at >= len(pattern):
                raise EvaluationError("LIKE pattern must not end with escape character")
            out.append(re.escape(pattern[at]))
        elif char == "%":
            out.append(".*")
        elif char == "_":
            out.append(".")
        else:
            out.append(re.escape(char))
        at += 1
    return re.compile("".join(out), re.DOTALL)


def like(name: str, left: Expression, right: Expression, location: str) -> Expression:
    """`name` is ~~, !~~, ~~* or !~~*."""
    left, right = resolve(left, TEXT, location), resolve(right, TEXT, location)
    for side in (left, right):
        if side.type.array or side.type.name not in ("text", "bpchar"):
            raise no_operator(name, left.type, right.type, location)
    wanted = not name.startswith("!")
    fold = name.endswith("*")

    def match(text: str, pattern: str) -> bool:
        if fold:
            text, pattern = text.lower(), pattern.lower()
        return (like_pattern(pattern).fullmatch(text) is not None) is wanted

    return Expression(BOOL, strict(match, left, right))


# -- ANY, ALL, IN ----------------------------------------------------------------------------------


def quantified(name: str, left: Expression, right: Expression, every: bool, location: str) -> Expression:
    """`left op ANY(array)`, or ALL when `every`; NULL elements count as unknown."""
    if left.type == UNKNOWN:
        left = resolve(left, right.type.element if right.type.array else TEXT, location)
    right = resolve(right, Type(left.type.name, True, left.type.ordered), location)
    if not right.type.array:
        raise WhereError(f"{location}op ANY/ALL (array) requires array on right side")
    probe = Expression(right.type.element, lambda row: None)
    unified_left, unified_right = unify(name, left, probe, location)
    test = comparator(name, unified_left, unified_right, location)
    lift = _lifter(right.type.element, unified_right.type)
    value_of, array_of = unified_left.evaluate, right.evaluate
    decisive = not every

    def evaluate(row: Row) -> bool | None:
        array = array_of(row)
        if array is None:
            return None
        elements = flatten(array)
        if not elements:
            return every
        value = value_of(row)
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


def _lifter(source: Type, target: Type) -> Callable[[Value], Value]:
    if source.name == "bpchar":
        return lambda text: text.rstrip(" ")
    if source.name == target.name:
        return lambda value: value
    if target.name == "float8":
        return float
    if target.name == "numeric":
        return Decimal
    return lambda days: days * DAY_US


def any_true(tests: list[Evaluate]) -> Evaluate:
    """OR with three values: true if any is true, else NULL if any is NULL, else false."""

    def evaluate(row: Row) -> bool | None:
        doubtful = False
        for test in tests:
            value = test(row)
            if value is True:
                return True
            if value is None:
                doubtful = True
        return None if doubtful else False

    return evaluate


def all_true(tests: list[Evaluate]) -> Evaluate:
    """AND with three values."""

    def evaluate(row: Row) -> bool | None:
        doubtful = False
        for test in tests:
            value = test(row)
            if value is False:
                return False
            if value is None:
                doubtful = True
        return None if doubtful else True

    return evaluate


HASHABLE = frozenset({"int2", "int4", "int8", "text", "uuid", "bool", "date", "timestamptz"})


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


def member(left: Expression, items: list[Expression], location: str) -> Evaluate:
    """IN over expressions. Constants of a hashable kind become one set lookup."""
    if left.type == UNKNOWN and items and all(item.type == UNKNOWN for item in items):
        left = resolve(left, TEXT, location)
    pairs = [unify("=", left, item, location) for item in items]
    kinds = {pair[0].type.name for pair in pairs} | {pair[1].type.name for pair in pairs}
    if len(kinds) == 1 and kinds <= HASHABLE and all(right.constant for _, right in pairs):
        return _lookup(pairs[0][0].evaluate, [right.evaluate({}) for _, right in pairs])
    return any_true([strict(comparator("=", a, b, location), a, b) for a, b in pairs])
