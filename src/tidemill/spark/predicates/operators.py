"""Typed operators over columns, with the semantics of SQL: null is unknown, exact numbers are compared exactly.

bool, string, date, timestamp, timestamp_ntz    as their Arrow types; strings are compared by bytes
integers, decimals                              exact: sums, differences and products are decimals
float                                           NaN equals itself and is greater than any number
binary, json                                    only IS NULL
a text literal                                  takes the type of the other operand, as in PostgreSQL
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

DIGITS_MAX = 76
"""Digits of a decimal256, and so of an intermediate result."""

Columns = Mapping[str, Any]
"""Column name → pa.Array."""
Evaluate = Callable[[Columns], Any]
"""Columns → pa.Array of one value per row, or pa.Scalar."""

BOOL = pa.bool_()
TEXT = pa.string()
FLOAT = pa.float64()


class PredicateError(ValueError):
    """The expression has no meaning. The message is a sentence without its end."""


class Operand(msgspec.Struct, frozen=True):
    """Typed expression. `literal`: a text or NULL whose type the other operand determines; `name`: as messages show
    it."""

    type: pa.DataType
    evaluate: Evaluate
    name: str
    literal: str | None = None
    untyped: bool = False
    real: bool = False
    """A column of PostgreSQL's type `real`. Its values are compared as `double precision`."""


def column_operand(name: str, type_name: str, kind: pa.DataType) -> Operand:
    """Return a column. `type_name`: its type in the table."""
    shown = f"{name} ({type_name})"
    if type_name == "json":
        return Operand(pa.large_binary(), lambda columns: columns[name], shown)  # text, but not comparable as text
    if pa.types.is_nested(kind):
        raise PredicateError(f"{shown} has a nested type, which an expression cannot use")
    wide = pa.int64() if pa.types.is_integer(kind) else FLOAT if pa.types.is_floating(kind) else kind
    if wide == kind:
        return Operand(kind, lambda columns: columns[name], shown)
    return Operand(wide, lambda columns: columns[name].cast(wide), shown, real=wide == FLOAT)


def constant(value: Any, kind: pa.DataType, name: str) -> Operand:
    scalar = pa.scalar(value, kind)
    return Operand(kind, lambda _: scalar, name)


def text_literal(text: str) -> Operand:
    return Operand(TEXT, constant(text, TEXT, "").evaluate, f"'{text}'", text, untyped=True)


def null_literal() -> Operand:
    return Operand(pa.null(), lambda _: pa.scalar(None), "NULL", untyped=True)


def number_literal(text: str) -> Operand:
    """Return an exact number, also with an exponent, as in PostgreSQL. With an exponent and too many digits it is a
    float."""
    exponent = "e" in text.lower()
    if "." not in text and not exponent and len(text.lstrip("0")) <= 18:
        return constant(int(text), pa.int64(), text)
    value = Decimal(text)
    _, digits, power = value.as_tuple()
    scale = max(0, -int(power))
    precision = max(len(digits) + max(0, int(power)), scale, 1)
    if precision <= 38:
        return constant(Decimal(f"{value:f}"), pa.decimal256(precision, scale), text)
    if exponent:
        return constant(float(text), FLOAT, text)
    raise PredicateError(f"{text} has more than 38 digits")


def list_items(left: Operand, items: Sequence[Operand]) -> list[Operand]:
    """Return the items without columns of `left IN (…)` with the types in which they are compared: PostgreSQL rounds
    several of them to the type of a `real`, but compares a single number as a `double precision`."""
    numbers = [item for item in items if _is_number(item.type)]
    if not left.real or len(items) < 2 or any(item.type == FLOAT for item in numbers):
        return [*items]
    return [convert(convert(item, pa.float32()), FLOAT) if _is_number(item.type) else item for item in items]


# unification ----------------------------------------------------------------------------------------
def _is_exact(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_decimal(kind))


def _is_number(kind: pa.DataType) -> bool:
    return _is_exact(kind) or bool(pa.types.is_floating(kind))


def convert(operand: Operand, kind: pa.DataType) -> Operand:
    """Convert numbers and untyped literals; every value is representable in `kind`, or rounded if that is a float."""
    if operand.type == kind:
        return operand if not operand.untyped else msgspec.structs.replace(operand, untyped=False, literal=None)
    if operand.untyped and operand.literal is None:
        return constant(None, kind, operand.name)
    if operand.literal is not None:
        return constant(_parse_text(operand.literal, kind), kind, operand.name)
    before = operand.evaluate
    if pa.types.is_integer(operand.type) and pa.types.is_decimal(kind):
        wide = pa.decimal256(19, 0)
        return Operand(kind, lambda columns: before(columns).cast(wide).cast(kind), operand.name)
    safe = not pa.types.is_floating(kind)
    return Operand(kind, lambda columns: pc.cast(before(columns), kind, safe=safe), operand.name)


def unify(operands: Sequence[Operand]) -> list[Operand]:
    """Return the operands with one type. Raises PredicateError if they have none in common."""
    typed = [operand for operand in operands if not operand.untyped]
    if not typed:
        texts = any(operand.literal is not None for operand in operands)
        return [convert(operand, TEXT if texts else BOOL) for operand in operands]
    kinds = [operand.type for operand in typed]
    if all(kind == kinds[0] for kind in kinds):
        common = kinds[0]
    elif all(map(_is_number, kinds)):
        common = FLOAT if any(map(pa.types.is_floating, kinds)) else _common_decimal(kinds)
    else:
        other = next(operand for operand in typed if operand.type != kinds[0])
        raise PredicateError(f"{typed[0].name} and {other.name} have different types")
    return [convert(operand, common) for operand in operands]


def _common_decimal(kinds: Sequence[pa.DataType]) -> pa.DataType:
    scale = max(_scale(kind) for kind in kinds)
    whole = max(_precision(kind) - _scale(kind) for kind in kinds)
    return _decimal(whole + scale, scale)


def _decimal(precision: int, scale: int) -> pa.DataType:
    if precision > DIGITS_MAX:
        raise PredicateError(f"an intermediate result may have {precision} digits, more than {DIGITS_MAX}")
    return pa.decimal256(precision, scale)


def _scale(kind: pa.DataType) -> int:
    return int(kind.scale) if pa.types.is_decimal(kind) else 0


def _precision(kind: pa.DataType) -> int:
    return int(kind.precision) if pa.types.is_decimal(kind) else 19


def _parse_text(text: str, kind: pa.DataType) -> Any:
    """Return the value of a text literal. Raises PredicateError."""
    try:
        if pa.types.is_timestamp(kind):
            at = datetime.datetime.fromisoformat(text.strip())
            if kind.tz is None:
                if at.tzinfo is not None:
                    raise PredicateError(f"'{text}' has a time zone, and the column has none")
                return at
            return at if at.tzinfo is not None else at.replace(tzinfo=datetime.UTC)
        if pa.types.is_date(kind):
            return datetime.date.fromisoformat(text.strip())
        if pa.types.is_integer(kind):
            return pa.scalar(int(text), kind).as_py()
        if pa.types.is_decimal(kind):
            return pa.scalar(Decimal(text), kind).as_py()
        if pa.types.is_floating(kind):
            return float(text)
        if pa.types.is_boolean(kind):
            return {"true": True, "t": True, "false": False, "f": False}[text.strip().lower()]
    except PredicateError:
        raise
    except (ValueError, KeyError, InvalidOperation, pa.ArrowException) as error:
        raise PredicateError(f"'{text}' is not a value of type {kind}") from error
    raise PredicateError(f"'{text}' cannot be compared with a value of this type")


# operators ------------------------------------------------------------------------------------------
def as_bool(operand: Operand, where: str) -> Operand:
    found = convert(operand, BOOL) if operand.untyped else operand
    if found.type != BOOL:
        raise PredicateError(f"{operand.name} is no condition: {where} needs true or false")
    return found


def logical(operator: str, operands: Sequence[Operand]) -> Operand:
    """Return the conjunction or disjunction; in a loop, because there may be thousands of operands."""
    if len(operands) == 1:
        return operands[0]
    join = pc.and_kleene if operator == "AND" else pc.or_kleene
    first, *others = (as_bool(operand, operator).evaluate for operand in operands)

    def evaluate(columns: Columns) -> Any:
        found = first(columns)
        for other in others:
            found = join(found, other(columns))
        return found

    return Operand(BOOL, evaluate, f"({operands[0].name} {operator} …)")


def negation(operand: Operand) -> Operand:
    inner = as_bool(operand, "NOT").evaluate
    return Operand(BOOL, lambda columns: pc.invert(inner(columns)), f"NOT {operand.name}")


def comparison(operator: str, left: Operand, right: Operand) -> Operand:
    a, b = unify((left, right))
    if pa.types.is_large_binary(a.type) or pa.types.is_binary(a.type):
        raise PredicateError(f"{left.name} cannot be compared; only IS NULL and IS NOT NULL apply to it")
    apply = _compare_floats if pa.types.is_floating(a.type) else _compare
    first, second = a.evaluate, b.evaluate
    return Operand(
        BOOL, lambda columns: apply(operator, first(columns), second(columns)), f"{left.name} {operator} {right.name}"
    )


_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "=": pc.equal,
    "<>": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}


def _compare(operator: str, a: Any, b: Any) -> Any:
    return _COMPARE[operator](a, b)


def _compare_floats(operator: str, a: Any, b: Any) -> Any:
    """Compare with NaN as the greatest number, equal to itself. `or_` and `and_` are null if an operand is."""
    if operator in ("<", "<="):
        return _compare_floats(">" if operator == "<" else ">=", b, a)
    a_nan, b_nan = pc.is_nan(a), pc.is_nan(b)
    if operator == ">=":
        return pc.or_(a_nan, pc.greater_equal(a, b))
    if operator == ">":
        return pc.or_(pc.and_(a_nan, pc.invert(b_nan)), pc.greater(a, b))
    equal = pc.or_(pc.and_(a_nan, b_nan), pc.equal(a, b))
    return equal if operator == "=" else pc.invert(equal)


def arithmetic(operator: str, left: Operand, right: Operand) -> Operand:
    """Return a sum, a difference or a product: exact for integers and decimals, so it never overflows."""
    a, b = unify((left, right))
    if not _is_number(a.type):
        raise PredicateError(f"{left.name} is no number: {operator} needs numbers")
    if _is_exact(a.type):
        # Each keeps its own digits: brought to one scale, the operands of a product would have more of them.
        a, b = _as_decimal(left, a), _as_decimal(right, b)
    apply = {"+": pc.add, "-": pc.subtract, "*": pc.multiply}[operator]
    try:
        kind = apply(pa.array([], a.type), pa.array([], b.type)).type
    except pa.ArrowInvalid as error:
        raise PredicateError(f"a result of {operator} may have more than {DIGITS_MAX} digits") from error
    first, second = a.evaluate, b.evaluate
    return Operand(kind, lambda columns: apply(first(columns), second(columns)), f"{left.name} {operator} {right.name}")


def _as_decimal(operand: Operand, unified: Operand) -> Operand:
    own = unified if operand.untyped else operand
    return convert(own, _decimal(_precision(own.type), _scale(own.type)))


def negative(operand: Operand) -> Operand:
    return arithmetic("-", constant(0, pa.int64(), ""), operand)


def is_null(operand: Operand) -> Operand:
    before = operand.evaluate
    return Operand(BOOL, lambda columns: pc.is_null(before(columns)), f"{operand.name} IS NULL")


def is_bool(operand: Operand, value: bool) -> Operand:
    """Return whether a condition is true, or false; never unknown."""
    before = as_bool(operand, "IS").evaluate
    test = pa.scalar(value)
    return Operand(
        BOOL, lambda columns: pc.fill_null(pc.equal(before(columns), test), False), f"{operand.name} IS {value}"
    )


def like(operand: Operand, pattern: Operand, *, ignore_case: bool) -> Operand:
    text = pattern.literal
    if text is None:
        raise PredicateError("the pattern of LIKE is no text literal")
    found = convert(operand, TEXT) if operand.untyped else operand
    if found.type != TEXT:
        raise PredicateError(f"{operand.name} is no text: LIKE needs text")
    before = found.evaluate
    # Arrow does not unescape the text of `%x`, `x%` and `%x%`: it compares a backslash as a character.
    match, wanted = (pc.match_substring_regex, _like_regex(text)) if "\\" in text else (pc.match_like, text)
    return Operand(
        BOOL, lambda columns: match(before(columns), wanted, ignore_case=ignore_case), f"{operand.name} LIKE"
    )


def _like_regex(pattern: str) -> str:
    """Return the regular expression of a pattern of LIKE, in which a backslash escapes any character, as in
    PostgreSQL. Raises PredicateError if it escapes none."""
    out, chars = [], iter(pattern)
    for char in chars:
        if char == "%":
            out.append(".*")
        elif char == "_":
            out.append(".")
        else:
            literal = next(chars, "") if char == "\\" else char
            if not literal:
                raise PredicateError("the pattern of LIKE ends with a backslash, which escapes nothing")
            out.append(f"\\{literal}" if literal in r"\.+*?()|[]{}^$" else literal)
    return rf"(?s)\A{''.join(out)}\z"


def call(function: str, arguments: Sequence[Operand]) -> Operand:
    """Return length(text), abs(number) or coalesce(…)."""
    name = f"{function}(…)"
    if function == "coalesce" and arguments:
        unified = unify(arguments)
        each = [operand.evaluate for operand in unified]
        return Operand(unified[0].type, lambda columns: pc.coalesce(*(one(columns) for one in each)), name)
    if function not in ("length", "abs"):
        raise PredicateError(f"function {function} is not supported")
    if len(arguments) != 1:
        raise PredicateError(f"{function} has one argument")
    operand = convert(arguments[0], TEXT) if function == "length" and arguments[0].untyped else arguments[0]
    before = operand.evaluate
    if function == "length" and operand.type == TEXT:
        return Operand(pa.int64(), lambda columns: pc.cast(pc.utf8_length(before(columns)), pa.int64()), name)
    if function == "abs" and _is_number(operand.type):
        whole = _as_decimal(operand, operand) if pa.types.is_integer(operand.type) else operand
        inner = whole.evaluate
        return Operand(whole.type, lambda columns: pc.abs(inner(columns)), name)
    raise PredicateError(f"{function} cannot be applied to {arguments[0].name}")
