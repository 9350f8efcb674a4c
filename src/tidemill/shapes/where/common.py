"""One type for several expressions, as PostgreSQL resolves it for IN, CASE, COALESCE, GREATEST, LEAST and ARRAY.

https://www.postgresql.org/docs/current/typeconv-union-case.html: the first known type, until one comes that it casts to
implicitly and not the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tidemill.shapes.where import casts
from tidemill.shapes.where.expressions import TEXT, UNKNOWN, Expression, resolve
from tidemill.shapes.where.folding import folding_of
from tidemill.shapes.where.types import MOMENTS, NUMBERS, Type, WhereError

_TEXT_CASTS = frozenset({"text", "bpchar"})
_PREFERRED = frozenset({"text", "float8", "timestamptz", "bool", "interval"})


def _casts(source: str, target: str) -> bool:
    """Whether there is an implicit cast."""
    if source in NUMBERS and target in NUMBERS:
        return NUMBERS[source] <= NUMBERS[target]
    if source in MOMENTS and target in MOMENTS:
        return MOMENTS[source] <= MOMENTS[target]
    return source in _TEXT_CASTS and target in _TEXT_CASTS


def common_type(parts: Sequence[Expression]) -> Type | None:
    """None where the types cannot be matched."""
    chosen: Type | None = None
    for part in parts:
        type_ = part.type
        if type_ == UNKNOWN:
            continue
        if chosen is None:
            chosen = type_
        elif (chosen.name, chosen.array) != (type_.name, type_.array):
            if chosen.array or type_.array or not (_casts(chosen.name, type_.name) or _casts(type_.name, chosen.name)):
                return None
            if chosen.name not in _PREFERRED and not _casts(type_.name, chosen.name):
                chosen = type_
    if chosen is None:
        chosen = TEXT
    known = [part for part in parts if part.type != UNKNOWN]
    ordered = all(part.type.ordered for part in known)
    collated = any(part.collated for part in known)
    return msgspec.structs.replace(chosen, ordered=ordered or collated, folding=folding_of(*parts))


def alike(parts: Sequence[Expression], what: str, location: str) -> tuple[Type, list[Expression]]:
    """The parts, each as one common type. Raises WhereError."""
    common = common_type(parts)
    if common is None:
        kinds = " and ".join(dict.fromkeys(str(part.type) for part in parts if part.type != UNKNOWN))
        raise WhereError(f"{location}{what} types {kinds} cannot be matched", fix="Cast.")
    return common, [coerce(part, common, location) for part in parts]


def coerce(expression: Expression, target: Type, location: str) -> Expression:
    """By an implicit cast, which must exist."""
    if expression.type == UNKNOWN:
        return resolve(expression, target, location)
    if expression.type.name == target.name:
        return expression
    return casts.cast(expression, target, location)
