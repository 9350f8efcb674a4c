"""Arithmetic on numbers as PostgreSQL does it: ranges of integers, truncating division, scales of numeric quotients."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal, Inexact, Overflow

from tidemill.base.pgtypes.text import INTEGERS, check_integer, check_numeric, to_float4, too_many_digits_error
from tidemill.shapes.where.expressions import UNKNOWN, Expression, resolve_unknown, strict
from tidemill.shapes.where.functions import datetimes
from tidemill.shapes.where.operators import operator_error, promote_numbers
from tidemill.shapes.where.types import (
    EXACT_CONTEXT,
    NUMBERS,
    ROUNDING_CONTEXT,
    EvaluationError,
    Type,
    Value,
    WhereError,
)


def compile_arithmetic(name: str, left: Expression, right: Expression, location: str) -> Expression:
    if left.type == UNKNOWN and right.type == UNKNOWN:
        raise WhereError(f"{location}operator is not unique: unknown {name} unknown", fix="Cast one side.")
    left, right = resolve_unknown(left, right.type, location), resolve_unknown(right, left.type, location)
    a, b = left.type, right.type
    if a.array or b.array or a.name not in NUMBERS or b.name not in NUMBERS:
        raise operator_error(name, a, b, location)
    wider = max(a.name, b.name, key=lambda kind: NUMBERS[kind])
    if wider == "float4" and a.name != b.name:
        wider = "float8"
    if name == "%" and wider.startswith("float"):
        raise operator_error(name, a, b, location)
    if wider not in INTEGERS:
        left, right = promote_numbers(left, right)
    function = _ARITHMETIC[(name, "int" if wider in INTEGERS else "float" if wider.startswith("float") else "numeric")]
    if wider in INTEGERS:
        result: Callable[..., Value] = lambda x, y: check_integer(wider, function(x, y))  # noqa: E731
    elif wider.startswith("float"):
        result = _float_checked(function, wider)
    else:
        result = function
    return Expression(Type(wider), strict(result, left, right), constant=left.constant and right.constant)


def compile_negation(operand: Expression, location: str) -> Expression:
    if operand.type == Type("interval"):
        return Expression(operand.type, strict(datetimes.negate_interval, operand), constant=operand.constant)
    if operand.type.array or operand.type.name not in NUMBERS:
        raise operator_error("-", None, operand.type, location)
    name = operand.type.name
    if name in INTEGERS:
        return Expression(Type(name), strict(lambda x: check_integer(name, -x), operand), constant=operand.constant)
    flip: Callable[..., Value] = operator.neg if name.startswith("float") else Decimal.copy_negate  # neg rounds
    return Expression(Type(name), strict(flip, operand), constant=operand.constant)


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
    scales = function in (operator.mul, _float_divide)

    def call(a: float, b: float) -> float:
        value = function(a, b)
        if math.isinf(value) and not math.isinf(a) and not math.isinf(b):
            raise EvaluationError("value out of range: overflow")
        if value == 0 and scales and a != 0 and b != 0 and not math.isinf(b):
            raise EvaluationError("value out of range: underflow")
        return to_float4(value) if name == "float4" else value

    return call


def _leading_group(value: Decimal) -> tuple[int, int]:
    """Return weight and value of the first base-10000 digit, as PostgreSQL stores a numeric; (0, 0) for zero."""
    if value == 0:
        return 0, 0
    weight = value.adjusted() // 4
    return weight, int(value.copy_abs().scaleb(-4 * weight, ROUNDING_CONTEXT))


def _numeric_divide(a: Decimal, b: Decimal) -> Decimal:
    """Return the quotient, rounded to the scale that PostgreSQL's select_div_scale selects (at least 16 significant
    digits)."""
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
    context = ROUNDING_CONTEXT.copy()
    context.prec = exact_digits + 30
    quotient = context.divide(a, b)
    return check_numeric(quotient.quantize(Decimal(1).scaleb(-scale), rounding=ROUND_HALF_UP, context=context))


def _numeric_modulo(a: Decimal, b: Decimal) -> Decimal:
    if a.is_nan() or b.is_nan() or a.is_infinite():
        return Decimal("nan")
    _nonzero(b)
    if b.is_infinite():
        return a
    return EXACT_CONTEXT.remainder(a, b)


def _numeric_checked(function: Callable[[Decimal, Decimal], Decimal]) -> Callable[[Decimal, Decimal], Decimal]:
    def call(a: Decimal, b: Decimal) -> Decimal:
        if a.is_infinite() or b.is_infinite():
            return function(a, b) if not (a.is_nan() or b.is_nan()) else Decimal("nan")
        try:
            return check_numeric(function(a, b))
        except (Inexact, Overflow) as error:
            raise too_many_digits_error() from error

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
    ("+", "numeric"): _numeric_checked(EXACT_CONTEXT.add),
    ("-", "numeric"): _numeric_checked(EXACT_CONTEXT.subtract),
    ("*", "numeric"): _numeric_checked(EXACT_CONTEXT.multiply),
    ("/", "numeric"): _numeric_divide,
    ("%", "numeric"): _numeric_modulo,
}
ARITHMETIC_NAMES = frozenset(name for name, _ in _ARITHMETIC)
