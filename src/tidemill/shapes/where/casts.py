"""Casts between the types that the evaluator knows; any other cast is rejected by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal

import msgspec

from tidemill.base.pgtypes.text import DAY_US, INTEGERS, MOMENTS, check_integer, nearest_float4, to_float4
from tidemill.shapes.where.expressions import UNKNOWN, Expression, Row, resolve_unknown, strict
from tidemill.shapes.where.types import (
    ROUNDING_CONTEXT,
    EvaluationError,
    Type,
    Value,
    WhereError,
    is_readable,
    reader_of,
    to_float8,
)

_DATABASE_TEXT = Type("text", ordered=False)
"""Text that does not come from a column has the collation of the database."""


def compile_cast(expression: Expression, target: Type, location: str) -> Expression:
    """Compile a cast. Raises WhereError if this cast is not supported."""
    target = target.base_type
    if not is_readable(target.name) or target.name == "enum":
        raise WhereError(f"{location}cast to type {target} is not supported in a where clause.")
    if expression.type == UNKNOWN:
        return resolve_unknown(expression, target, location)
    source = expression.type
    if source.name == target.name and source.array == target.array:
        return as_text_kind(expression, target)
    if target.name == "text" and not target.array and not source.array:
        return as_text_kind(_to_text(expression, location), target)
    if source.array or target.array:
        raise _cast_error(source, target, location)
    if source.name == "text":
        type_ = source.with_name(target.name) if target.name == "bpchar" else target
        return Expression(
            type_, strict(reader_of(target), expression), constant=expression.constant, collated=expression.collated
        )
    function = _conversion(source.name, target.name)
    if function is None:
        raise _cast_error(source, target, location)
    return Expression(target, strict(function, expression), constant=expression.constant)


def as_text_kind(expression: Expression, target: Type) -> Expression:
    """Return the text as the kind of text that `target` is, so that literals compared with it are truncated and padded
    alike."""
    type_ = expression.type
    if (type_.varying, type_.most_bytes) == (target.varying, target.most_bytes):
        return expression
    type_ = msgspec.structs.replace(type_, varying=target.varying, most_bytes=target.most_bytes)
    return msgspec.structs.replace(expression, type=type_)


def _cast_error(source: Type, target: Type, location: str) -> WhereError:
    return WhereError(f"{location}cannot cast type {source} to {target} in a where clause.")


def _to_text(expression: Expression, location: str) -> Expression:
    """Compile a cast to text. Other types are supported as columns only: the text of computed values is specific to
    PostgreSQL."""
    kind, name = expression.type.name, expression.column
    if kind == "bpchar":
        return Expression(
            expression.type.with_name("text"),
            strict(lambda text: text.rstrip(" "), expression),
            constant=expression.constant,
            collated=expression.collated,
        )
    if kind == "bool":
        return Expression(_DATABASE_TEXT, strict(lambda value: "true" if value else "false", expression))
    if kind in INTEGERS:
        return Expression(_DATABASE_TEXT, strict(str, expression))
    if not name:
        raise WhereError(f"{location}only a column of type {expression.type} can be cast to text.")

    def evaluate(row: Row) -> Value:
        return row[name]

    return Expression(_DATABASE_TEXT, evaluate)


def _round_away(value: Decimal) -> int:
    if not value.is_finite():
        raise EvaluationError("cannot convert NaN or infinity to integer")
    return int(value.quantize(Decimal(1), rounding=ROUND_HALF_UP, context=ROUNDING_CONTEXT))


def _round_even(value: float) -> int:
    try:
        return round(value)
    except (ValueError, OverflowError) as error:
        raise EvaluationError("integer out of range") from error


def _to_single(value: int | Decimal | float) -> float:
    near = to_float8(value)
    if isinstance(value, float) or not math.isfinite(near):
        return to_float4(near)
    return nearest_float4(value, near)


def date_to_timestamp(days: int | float) -> int | float:
    """Convert a date to a timestamp. Raises EvaluationError."""
    if isinstance(days, float):
        return days
    micros = days * DAY_US
    if micros not in MOMENTS:
        raise EvaluationError("date out of range for timestamp")
    return micros


def _conversion(source: str, target: str) -> Callable[[Value], Value] | None:
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
        return _to_single if target == "float4" else to_float8
    if target in ("timestamp", "timestamptz") and source in ("timestamp", "timestamptz"):
        return lambda value: value
    if target in ("timestamp", "timestamptz") and source == "date":
        return date_to_timestamp
    if target == "date" and source in ("timestamp", "timestamptz"):
        return lambda value: value // DAY_US if isinstance(value, int) else value
    return None
