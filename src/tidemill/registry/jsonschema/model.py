"""A JSON Schema with its references resolved. A recursive one is a graph: nodes are compared by identity.

A schema that says several things is a node ALL of them: a type with its keywords, an enum, allOf, anyOf, oneOf, not.
Several types are a node ANY of them. What is not modelled, and so never compared: format, contains, propertyNames,
if/then/else, unevaluatedItems and unevaluatedProperties, content*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

EVERYTHING, NOTHING = "everything", "nothing"
STRING, NUMBER, BOOLEAN, NULL, OBJECT, ARRAY = "string", "number", "boolean", "null", "object", "array"
ENUM, NOT = "enum", "not"
ALL, ANY, ONE = "allOf", "anyOf", "oneOf"
COMBINED = (ALL, ANY, ONE)


class Node:
    """`limits`: plain keywords (minLength…), `pattern` and `integer`; what else there is depends on `kind`."""

    __slots__ = ("default", "kind", "limits", "parts", "shape", "values")

    def __init__(self, kind: str = EVERYTHING) -> None:
        self.kind = kind
        self.default = False
        """Has the schema a default?"""
        self.limits: Mapping[str, Any] = {}
        self.values: frozenset[bytes] = frozenset()
        """ENUM: the values as sorted JSON."""
        self.parts: Sequence[Node] = ()
        """ALL, ANY, ONE; NOT has one."""
        self.shape: Shape | None = None
        """OBJECT and ARRAY."""


class Shape:
    """What an object or an array may hold. `rest`: None = anything, else what is not named must be of this schema;
    a node NOTHING closes it."""

    __slots__ = ("named", "needs", "needs_schema", "patterns", "places", "required", "rest")

    def __init__(self) -> None:
        self.named: dict[str, Node] = {}
        self.patterns: dict[str, Node] = {}
        self.required: frozenset[str] = frozenset()
        self.needs: dict[str, frozenset[str]] = {}
        self.needs_schema: dict[str, Node] = {}
        self.places: list[Node] = []
        """The first items of an array, one by one."""
        self.rest: Node | None = None

    @property
    def open(self) -> bool:
        return not self.patterns and self.rest is None

    @property
    def closed(self) -> bool:
        return self.rest is not None and self.rest.kind == NOTHING
