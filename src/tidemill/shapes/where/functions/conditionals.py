"""Expressions that select one of several values: COALESCE, CASE, NULLIF, GREATEST and LEAST."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tidemill.base.pgtypes.text import INTEGERS
from tidemill.shapes.where import operators
from tidemill.shapes.where.collations import with_common_collation
from tidemill.shapes.where.common_type import coerce, convert_to_common_type
from tidemill.shapes.where.expressions import (
    TEXT,
    UNKNOWN,
    Evaluate,
    Expression,
    Row,
    count_waiting,
    creates_value,
    resolve_unknown,
)
from tidemill.shapes.where.types import CHAR_BYTES, NUMBERS, TEXTS, Type, Value, WhereError, canonical_form


def compile_coalesce(parts: Sequence[Expression], location: str) -> Expression:
    type_, same = convert_to_common_type(parts, "COALESCE", location)
    tests = [part.evaluate for part in same]

    def evaluate(row: Row) -> Value:
        for test in tests:
            value = test(row)
            if value is not None:
                return value
        return None

    return Expression(type_, evaluate, collated=any(part.collated for part in parts))


def compile_case(
    conditions: Sequence[Evaluate], results: Sequence[Expression], default: Expression, location: str
) -> Expression:
    """Compile CASE: the first result whose condition is true. The default comes first in the resolution of the common
    type."""
    type_, (last, *same) = convert_to_common_type([default, *results], "CASE", location)
    branches = list(zip(conditions, (result.evaluate for result in same), strict=True))
    otherwise = last.evaluate

    def evaluate(row: Row) -> Value:
        for condition, result in branches:
            if condition(row) is True:
                return result(row)
        return otherwise(row)

    return Expression(type_, evaluate, collated=any(part.collated for part in (default, *results)))


def compile_nullif(left: Expression, right: Expression, location: str) -> Expression:
    equal = operators.compile_comparison("=", left, right, location).evaluate
    left = resolve_unknown(left, TEXT if right.type == UNKNOWN else right.type, location)
    collated = with_common_collation(left.type, left, right, location=location)
    left = coerce(left, _comparison_type(collated, right.type), location)
    type_ = msgspec.structs.replace(  # varchar has no operators, and uses those of text
        left.type, varying=False, collation=collated.collation, ordered=collated.ordered, folding=collated.folding
    )
    value_of = left.evaluate

    def evaluate(row: Row) -> Value:
        return None if equal(row) is True else value_of(row)

    return Expression(type_, evaluate, collated=left.collated or right.collated)


def _comparison_type(left: Type, right: Type) -> Type:
    """Return the type to which the left side of `left = right` is cast."""
    a, b = left.name, right.name
    if a in NUMBERS and b in NUMBERS and not a.startswith("float") and not {a, b} <= INTEGERS.keys():
        return Type("float8") if b.startswith("float") else Type("numeric")
    if a == "bpchar" and b == "text" and not right.varying:
        return left.with_name("text")
    if left.most_bytes == CHAR_BYTES and right.most_bytes != CHAR_BYTES and {a, b} <= TEXTS:  # name = text exists
        return msgspec.structs.replace(left, most_bytes=0)
    return left.with_name("bpchar") if left.varying and b == "bpchar" else left


def compile_extreme(greatest: bool, parts: Sequence[Expression], location: str) -> Expression:
    """Compile GREATEST or LEAST: the first of the greatest (least) values, ignoring NULLs. Raises WhereError."""
    type_, same = convert_to_common_type(parts, "GREATEST" if greatest else "LEAST", location)
    if type_.array or (type_.name == "enum" and not type_.labels):
        raise WhereError(f"{location}values of type {type_} cannot be ordered in a where clause.")
    collated = any(part.collated for part in parts)
    probe = Expression(type_, lambda row: None, constant=all(part.constant for part in parts), collated=collated)
    before = operators.comparator(">" if greatest else "<", probe, probe, location)
    form = canonical_form("bpchar") if type_.name == "bpchar" else None
    tests = [(part.evaluate, creates_value(part)) for part in same]

    def evaluate(row: Row) -> Value:
        chosen = None
        for test, creates in tests:
            value = test(row)
            if creates:
                count_waiting(value)
            if value is None:
                continue
            if chosen is None or (before(value, chosen) if form is None else before(form(value), form(chosen))):
                chosen = value
        return chosen

    return Expression(type_, evaluate, collated=collated)
