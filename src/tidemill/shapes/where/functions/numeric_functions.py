"""Functions of numbers, and bit operators. Types are resolved as PostgreSQL does."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from decimal import ROUND_HALF_UP, Decimal

from tidemill.base.pgtypes.text import INTEGERS, check_integer, check_numeric
from tidemill.shapes.where import casts
from tidemill.shapes.where.expressions import UNKNOWN, Expression, resolve_unknown, strict
from tidemill.shapes.where.operators import operator_error
from tidemill.shapes.where.types import NUMBERS, ROUNDING_CONTEXT, EvaluationError, Type, Value, WhereError

FUNCTIONS = ("abs", "round")
PREFIXES = {"@": "abs", "|/": "sqrt"}
"""Prefix operators that are compiled like functions; sqrt itself, which also accepts a numeric, is not supported."""
BIT_OPERATORS = ("&", "|", "#", "<<", ">>")
MAX_ROUND_DIGITS = 2_000
"""PostgreSQL accepts more digits, with the same result."""


def compile_call(name: str, operands: Sequence[Expression], location: str) -> Expression:
    """Compile one of FUNCTIONS, or of the functions behind PREFIXES. Raises WhereError."""
    kinds = ", ".join(str(operand.type) for operand in operands)
    refused = WhereError(f"{location}function {name}({kinds}) does not exist", fix="Cast.")
    if not 1 <= len(operands) <= (2 if name == "round" else 1):
        raise refused
    constant = all(operand.constant for operand in operands)
    digits = resolve_unknown(operands[1], Type("int4"), location) if len(operands) == 2 else None
    value = resolve_unknown(operands[0], Type("float8" if digits is None else "numeric"), location)
    kind = value.type.name
    if value.type.array or kind not in NUMBERS:
        raise refused
    if name == "sqrt":
        return Expression(
            Type("float8"), strict(_square_root, casts.compile_cast(value, Type("float8"), location)), constant=constant
        )
    if name == "abs":
        function: Callable[..., Value] = abs
        if kind == "numeric":
            function = Decimal.copy_abs
        elif kind in INTEGERS:
            function = lambda x: check_integer(kind, abs(x))  # noqa: E731
        return Expression(Type(kind), strict(function, value), constant=constant)
    if digits is not None:
        if digits.type.array or digits.type.name not in ("int2", "int4") or kind.startswith("float"):
            raise refused
        return Expression(
            Type("numeric"),
            strict(_round_half_up, casts.compile_cast(value, Type("numeric"), location), digits),
            constant=constant,
        )
    if kind == "numeric":
        return Expression(Type(kind), strict(lambda x: _round_half_up(x, 0), value), constant=constant)
    return Expression(
        Type("float8"), strict(_round_half_even, casts.compile_cast(value, Type("float8"), location)), constant=constant
    )


def _round_half_up(value: Decimal, digits: int) -> Decimal:
    """Round half away from zero."""
    if not value.is_finite():
        return value
    scale = max(-MAX_ROUND_DIGITS, min(MAX_ROUND_DIGITS, digits))
    if scale >= -int(value.as_tuple().exponent):
        exact = (
            value
            if digits <= 0
            else value.quantize(Decimal(1).scaleb(-scale, ROUNDING_CONTEXT), context=ROUNDING_CONTEXT)
        )
        return check_numeric(exact)
    rounded = value.quantize(
        Decimal(1).scaleb(-scale, ROUNDING_CONTEXT), rounding=ROUND_HALF_UP, context=ROUNDING_CONTEXT
    )
    return check_numeric(rounded if scale >= 0 else rounded.quantize(Decimal(1), context=ROUNDING_CONTEXT))


def _square_root(value: float) -> float:
    if value < 0:
        raise EvaluationError("cannot take square root of a negative number")
    return math.sqrt(value)


def _round_half_even(value: float) -> float:
    return float(round(value)) if abs(value) < 1 << 53 else value


def compile_bit_operator(name: str, left: Expression, right: Expression, location: str) -> Expression:
    """Compile one of BIT_OPERATORS. Raises WhereError."""
    constant = left.constant and right.constant
    if left.type == UNKNOWN and right.type == UNKNOWN:
        raise WhereError(f"{location}operator is not unique: unknown {name} unknown", fix="Cast one side.")
    if name in ("<<", ">>"):
        right = resolve_unknown(right, Type("int4"), location)
        if left.type == UNKNOWN and right.type.name == "int4":
            left = resolve_unknown(left, Type("int4"), location)
        kind = left.type.name
        if left.type.array or right.type.array or kind not in INTEGERS or right.type.name not in ("int2", "int4"):
            raise operator_error(name, left.type, right.type, location)
        return Expression(Type(kind), strict(_shift(name, kind), left, right), constant=constant)
    left, right = resolve_unknown(left, right.type, location), resolve_unknown(right, left.type, location)
    kinds = {left.type.name, right.type.name}
    if left.type.array or right.type.array or not kinds <= INTEGERS.keys():
        raise operator_error(name, left.type, right.type, location)
    function = {"&": operator.and_, "|": operator.or_, "#": operator.xor}[name]
    return Expression(Type(max(kinds, key=NUMBERS.__getitem__)), strict(function, left, right), constant=constant)


def compile_bit_not(operand: Expression, location: str) -> Expression:
    if operand.type.array or operand.type.name not in INTEGERS:
        raise operator_error("~", None, operand.type, location)
    return Expression(operand.type, strict(operator.invert, operand), constant=operand.constant)


def _shift(name: str, kind: str) -> Callable[[int, int], int]:
    """Return the shift function. As in the machine's instruction, the distance is taken modulo the register width, and
    higher bits are dropped."""
    places, bound = (63 if kind == "int8" else 31), INTEGERS[kind]

    def call(value: int, by: int) -> int:
        if name == ">>":
            return value >> (by & places)
        return ((value << (by & places)) + bound) % (2 * bound) - bound

    return call
