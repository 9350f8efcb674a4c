"""Finds one type for several expressions, as PostgreSQL resolves it for IN, CASE, COALESCE, GREATEST, LEAST and ARRAY.

Rule: https://www.postgresql.org/docs/current/typeconv-union-case.html. The first known type, replaced by a later one if
the first casts implicitly to it and not the reverse.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tidemill.shapes.where import casts
from tidemill.shapes.where.collations import with_common_collation
from tidemill.shapes.where.expressions import TEXT, UNKNOWN, Expression, resolve_unknown, strict
from tidemill.shapes.where.types import MOMENTS, NAME_BYTES, NUMBERS, Type, WhereError, truncate

_TEXT_CASTS = {
    "char": {"text"},
    "name": {"text"},
    "text": {"name", "varchar", "bpchar"},
    "varchar": {"name", "text", "bpchar"},
    "bpchar": {"name", "text", "varchar"},
}
"""Implicit casts between the kinds of text."""
_PREFERRED = frozenset({"text", "float8", "timestamptz", "bool", "interval"})


def _pg_kind(type_: Type) -> str:
    """Return PostgreSQL's name of the type, also for the kinds of text."""
    if type_.most_bytes:
        return "name" if type_.most_bytes == NAME_BYTES else "char"
    return "varchar" if type_.varying else type_.name


def _has_implicit_cast(source: str, target: str) -> bool:
    """Return whether there is an implicit cast."""
    if source in NUMBERS and target in NUMBERS:
        return NUMBERS[source] <= NUMBERS[target]
    if source in MOMENTS and target in MOMENTS:
        return MOMENTS[source] <= MOMENTS[target]
    return target in _TEXT_CASTS.get(source, ())


def find_common_type(parts: Sequence[Expression]) -> Type | None:
    """Return the common type, None if the types cannot be matched."""
    chosen: Type | None = None
    for part in parts:
        type_ = part.type
        if type_ == UNKNOWN:
            continue
        if chosen is None:
            chosen = type_
            continue
        known, new = _pg_kind(chosen), _pg_kind(type_)
        if chosen.array or type_.array:
            if (chosen.name, chosen.array, chosen.most_bytes) != (type_.name, type_.array, type_.most_bytes):
                return None
        elif known != new:
            if "char" in (known, new) or not (_has_implicit_cast(known, new) or _has_implicit_cast(new, known)):
                return None
            if known not in _PREFERRED and not _has_implicit_cast(new, known):
                chosen = type_
    if chosen is None:
        chosen = TEXT
    return with_common_collation(chosen, *parts)


def convert_to_common_type(parts: Sequence[Expression], what: str, location: str) -> tuple[Type, list[Expression]]:
    """Return the common type, and the parts converted to it. Raises WhereError."""
    common = find_common_type(parts)
    if common is None:
        kinds = " and ".join(dict.fromkeys(str(part.type) for part in parts if part.type != UNKNOWN))
        raise WhereError(f"{location}{what} types {kinds} cannot be matched", fix="Cast.")
    return common, [coerce(part, common, location) for part in parts]


def coerce(expression: Expression, target: Type, location: str) -> Expression:
    """Convert an expression by an implicit cast, which must exist."""
    source = expression.type
    if source == UNKNOWN:
        return resolve_unknown(expression, target, location)
    same = expression if source.name == target.name else casts.compile_cast(expression, target, location)
    if target.most_bytes not in (0, source.most_bytes):

        def to_name(text: str) -> str:
            found = truncate(target.most_bytes, text)
            return found.rstrip(" ") if source.name == "bpchar" else found

        same = msgspec.structs.replace(same, evaluate=strict(to_name, same), column="")
    return casts.as_text_kind(same, target)
