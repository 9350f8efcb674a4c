"""Compares arrays as PostgreSQL does: element by element, by the element type's own equality.

=          the same bounds, and equal elements at the same positions; NULL is equal to NULL
@> <@ &&   sets of elements, in any dimensions; NULL is in no set
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tidemill.base.pgtypes.arrays import Bounded
from tidemill.shapes.where.expressions import BOOL, UNKNOWN, Expression, resolve, strict
from tidemill.shapes.where.types import Type, Value, WhereError, canonical

SET_OPERATORS = ("@>", "<@", "&&")


def flatten(items: list[Value]) -> list[Value]:
    """Return the elements of a possibly nested array, in storage order."""
    out: list[Value] = []
    for item in items:
        out.extend(flatten(item) if isinstance(item, list) else (item,))
    return out


def equal(kind: str) -> Callable[[list[Value], list[Value]], bool]:
    """Return the equality of two arrays of `kind`."""
    form = canonical(kind)

    def call(a: list[Value], b: list[Value]) -> bool:
        if isinstance(a, Bounded) or isinstance(b, Bounded):
            lower = [each.lower if isinstance(each, Bounded) else () for each in (a, b)]
            if lower[0] != lower[1]:
                return False
        return a == b if form is None else _formed(a, form) == _formed(b, form)

    return call


def _formed(value: Value, form: Callable[[Value], Value]) -> Value:
    if isinstance(value, list):
        return [_formed(item, form) for item in value]
    return None if value is None else form(value)


def set_operator(name: str, left: Expression, right: Expression, location: str) -> Expression:
    """Compile one of SET_OPERATORS. Raises WhereError."""
    if left.type == UNKNOWN and right.type == UNKNOWN:
        raise WhereError(f"{location}operator is not unique: unknown {name} unknown", fix="Cast one side.")
    left, right = resolve(left, right.type, location), resolve(right, left.type, location)
    if not left.type.array or not right.type.array or not same_elements(left.type, right.type):
        raise WhereError(
            f"{location}operator does not exist: {left.type} {name} {right.type}",
            fix="Cast one side to the other's type.",
        )
    if name == "<@":
        left, right = right, left
    members = partial(_members, left.type)
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


def same_elements(a: Type, b: Type) -> bool:
    """Return whether arrays of the two types compare. Those of varchar, name and text do not, though their elements
    do."""
    return (a.name, a.varying, a.most_bytes) == (b.name, b.varying, b.most_bytes)


def _members(type_: Type, items: list[Value]) -> set[Value]:
    form = canonical(type_.name)
    found = (item for item in flatten(items) if item is not None)
    return set(found) if form is None else {form(item) for item in found}
