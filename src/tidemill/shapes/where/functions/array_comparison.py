"""Compares arrays as PostgreSQL does: element by element, by the element type's own equality.

=          the same bounds, and equal elements at the same positions; NULL is equal to NULL
@> <@ &&   sets of elements, in any dimensions; NULL is in no set
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tidemill.base.pgtypes.arrays import BoundedArray
from tidemill.shapes.where.collations import decided_collation
from tidemill.shapes.where.expressions import BOOL, UNKNOWN, Expression, resolve_unknown, strict
from tidemill.shapes.where.types import Type, Value, WhereError, canonical_form

SET_OPERATORS = ("@>", "<@", "&&")


def flatten(items: list[Value]) -> list[Value]:
    """Return the elements of a possibly nested array, in storage order."""
    out: list[Value] = []
    for item in items:
        out.extend(flatten(item) if isinstance(item, list) else (item,))
    return out


def array_equality(kind: str) -> Callable[[list[Value], list[Value]], bool]:
    """Return the equality of two arrays of `kind`."""
    form = canonical_form(kind)

    def call(a: list[Value], b: list[Value]) -> bool:
        if isinstance(a, BoundedArray) or isinstance(b, BoundedArray):
            lower = [each.lower if isinstance(each, BoundedArray) else () for each in (a, b)]
            if lower[0] != lower[1]:
                return False
        return a == b if form is None else _to_canonical(a, form) == _to_canonical(b, form)

    return call


def _to_canonical(value: Value, form: Callable[[Value], Value]) -> Value:
    if isinstance(value, list):
        return [_to_canonical(item, form) for item in value]
    return None if value is None else form(value)


def compile_set_operator(name: str, left: Expression, right: Expression, location: str) -> Expression:
    """Compile one of SET_OPERATORS. Raises WhereError."""
    if left.type == UNKNOWN and right.type == UNKNOWN:
        raise WhereError(f"{location}operator is not unique: unknown {name} unknown", fix="Cast one side.")
    left, right = resolve_unknown(left, right.type, location), resolve_unknown(right, left.type, location)
    if not left.type.array or not right.type.array or not has_same_elements(left.type, right.type):
        raise WhereError(
            f"{location}operator does not exist: {left.type} {name} {right.type}",
            fix="Cast one side to the other's type.",
        )
    decided_collation(left, right, location=location)
    if name == "<@":
        left, right = right, left
    members = partial(_member_set, left.type)
    if right.constant:  # the common case: the set is built once
        known = right.evaluate({})
        if known is None:
            return Expression(BOOL, lambda row: None)
        wanted = members(known)
        if name == "&&":
            return Expression(BOOL, strict(lambda value: not wanted.isdisjoint(members(value)), left))
        possible = None not in flatten(known)
        return Expression(BOOL, strict(lambda value: possible and wanted <= members(value), left))
    if name == "&&":
        return Expression(BOOL, strict(lambda a, b: not members(a).isdisjoint(members(b)), left, right))
    return Expression(BOOL, strict(lambda a, b: None not in flatten(b) and members(b) <= members(a), left, right))


def has_same_elements(a: Type, b: Type) -> bool:
    """Return whether arrays of the two types compare. Those of varchar, name and text do not, though their elements
    do."""
    return (a.name, a.varying, a.most_bytes) == (b.name, b.varying, b.most_bytes)


def _member_set(type_: Type, items: list[Value]) -> set[Value]:
    form = canonical_form(type_.name)
    found = (item for item in flatten(items) if item is not None)
    return set(found) if form is None else {form(item) for item in found}
