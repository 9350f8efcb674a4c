"""Derives the collation of an expression from those of its operands, as PostgreSQL does.

    explicit      COLLATE; two different ones are an error
    implicit      of a column; two different ones leave the collation undecided, which is an error only where it is used
    the database's own, which constants and all other text have, yields to both

Rule: https://www.postgresql.org/docs/current/collation.html#COLLATION-CONCEPTS. PostgreSQL reports an undecided
collation when it evaluates a row, so an empty table would accept the clause. Here the clause is rejected.
"""

from __future__ import annotations

import msgspec

from tidemill.shapes.where.expressions import Expression
from tidemill.shapes.where.types import Folding, Type, WhereError

_COLLATABLE = ("text", "bpchar")
BYTE_ORDERS = frozenset({'"C"', '"POSIX"'})
"""Names of the collations that order by the bytes of the text."""
UNDECIDED = "?"
"""Name of the collation of operands with different implicit ones."""


class Collation(msgspec.Struct, frozen=True):
    """`name`, `ordered` and `folding` as in Type."""

    name: str
    ordered: bool
    folding: Folding


_UNKNOWN_ORDER = Collation("", False, "simple")
"""The database's collation, if no operand determines it further."""


def common_collation(*operands: Expression, location: str = "") -> Collation:
    """Return the collation of several operands together. Raises WhereError for two explicit ones."""
    texts = [each for each in operands if each.type.name in _COLLATABLE]
    explicit = [each.type for each in texts if each.collated]
    if len({type_.collation for type_ in explicit}) > 1:
        raise WhereError(f"{location}collation mismatch between explicit collations.", fix="Use one of them.")
    columns = [each.type for each in texts if not each.constant]
    some = explicit or [type_ for type_ in columns if type_.collation] or columns
    if not some:
        return _UNKNOWN_ORDER
    if len({type_.collation for type_ in some}) > 1:
        return Collation(UNDECIDED, False, "undecided")
    foldings = {type_.folding for type_ in some}
    folding = foldings.pop() if len(foldings) == 1 else "undecided"
    return Collation(some[0].collation, all(type_.ordered for type_ in some), folding)


def with_common_collation(type_: Type, *operands: Expression, location: str = "") -> Type:
    """Return the type of an expression that takes its collation from these operands."""
    if type_.name not in _COLLATABLE:
        return type_
    found = common_collation(*operands, location=location)
    return msgspec.structs.replace(type_, collation=found.name, ordered=found.ordered, folding=found.folding)


def decided_collation(*operands: Expression, location: str = "") -> Collation:
    """Return the collation for comparing the operands. Raises WhereError if it is undecided."""
    found = common_collation(*operands, location=location)
    if found.name == UNDECIDED:
        raise undecided_error(location)
    return found


def without_strength(expression: Expression) -> Expression:
    """Return the expression as PostgreSQL compares the subject of a CASE: an explicit collation counts as implicit, an
    undecided one as none."""
    collation = "" if expression.type.collation == UNDECIDED else expression.type.collation
    type_ = msgspec.structs.replace(expression.type, collation=collation)
    return msgspec.structs.replace(expression, type=type_, collated=False)


def undecided_error(location: str) -> WhereError:
    return WhereError(f"{location}these texts have different collations.", fix='Write COLLATE "C" after one of them.')
