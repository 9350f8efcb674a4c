"""Casts between the types the evaluator knows; everything else is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal

from tidemill.base.pgtext import DAY_US, INTEGERS, READERS, check_integer, to_float4
from tidemill.shapes.where.expressions import TEXT, UNKNOWN, Expression, Row, resolve, strict
from tidemill.shapes.where.types import (
    ROUNDING,
    EvaluationError,
    Type,
    Value,
    WhereError,
    reader,
    to_float8,
)


def cast(expression: Expression, target: Type, location: str) -> Expression:
    """Raises WhereError when this cast is not supported."""
    target = target.plain
    if target.name not in READERS or target.name == "enum":
        raise WhereError(f"{location}cast to type {target} is not supported in a where clause.")
    if expression.type == UNKNOWN:
        return resolve(expression, target, location)
    source = expression.type
    if source.name == target.name and source.array == target.array:
        return expression
    if target == TEXT and not source.array:
        return _to_text(expression, location)
    if source.array or target.array:
        raise _refused(source, target, location)
    if source.name == "text":
        return Expression(target, strict(reader(target), expression), constant=expression.constant)
    function = _between(source.name, target.name)
    if function is None:
        raise _refused(source, target, location)
    return Expression(target, strict(function, expression), constant=expression.constant)


def _refused(source: Type, target: Type, location: str) -> WhereError:
    return WhereError(f"{location}cannot cast type {source} to {target} in a where clause.")


def _to_text(expression: Expression, location: str) -> Expression:
    """A column's own text. Computed values are refused: their text form is PostgreSQL's business."""
    kind, name = expression.type.name, expression.column
    if kind == "bpchar":
        return Expression(
            expression.type.like("text"),
            strict(lambda text: text.rstrip(" "), expression),
            collated=expression.collated,
        )
    if kind == "bool":
        return Expression(TEXT, strict(lambda value: "true" if value else "false", expression))
    if kind in INTEGERS:
        return Expression(TEXT, strict(str, expression))
    if not name:
        raise WhereError(f"{location}only a column of type {expression.type} can be cast to text.")

    def evaluate(row: Row) -> Value:
        return row[name]

    return Expression(Type("text", ordered=kind != "enum"), evaluate)


def _round_away(value: Decimal) -> int:
    if not value.is_finite():
        raise EvaluationError("cannot convert NaN or infinity to integer")
    return int(value.quantize(Decimal(1), rounding=ROUND_HALF_UP, context=ROUNDING))


def _round_even(value: float) -> int:
    try:
        return round(value)
    except (ValueError, OverflowError) as error:
        raise EvaluationError("integer out of range") from error


def _between(source: str, target: str) -> Callable[[Value], Value] | None:
    if target in INTEGERS:
        to_int: dict[str, Callable[[Value], int]] = {
            "numeric": _round_away,
            "float4": _round_even,
            "float8": _round_even,
        }
        if source in INTEGERS:
            return lambda value: check_integer(target, value)
        if source in to_int:
            return lambda value: check_integer(target, to_int[source](value))
        return None
    if target == "numeric":
        if source in INTEGERS:
            return Decimal
        digits = {"float4": 6, "float8": 15}.get(source)
        return None if digits is None else lambda value: Decimal(f"{value:.{digits}g}")
    if target in ("float4", "float8") and (source in INTEGERS or source in ("numeric", "float4", "float8")):
        return (lambda value: to_float4(to_float8(value))) if target == "float4" else to_float8
    if target in ("timestamp", "timestamptz") and source in ("timestamp", "timestamptz"):
        return lambda value: value
    if target in ("timestamp", "timestamptz") and source == "date":
        return lambda value: value * DAY_US
    if target == "date" and source in ("timestamp", "timestamptz"):
        return lambda value: value // DAY_US if isinstance(value, int) else value
    return None
