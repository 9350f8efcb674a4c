"""Model of a JSON Schema with its references resolved. A recursive schema is a graph: nodes are compared by identity.

A schema with several constraints is a node ALL of them: a type with its keywords, an enum, allOf, anyOf, oneOf, not.
Several types are a node ANY of them. Not modelled, and so never compared: format, contains, propertyNames,
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
    """Node of the model. `limits` holds plain keywords (minLength…), `pattern` and `integer`; the other attributes
    depend on `kind`."""

    __slots__ = ("default", "kind", "limits", "parts", "shape", "values")

    def __init__(self, kind: str = EVERYTHING) -> None:
        self.kind = kind
        self.default = False
        """Set if the schema has a default."""
        self.limits: Mapping[str, Any] = {}
        self.values: frozenset[bytes] = frozenset()
        """Values of an ENUM, as sorted JSON."""
        self.parts: Sequence[Node] = ()
        """Parts of ALL, ANY and ONE; NOT has one."""
        self.shape: Shape | None = None
        """Contents of an OBJECT or ARRAY."""


class Shape:
    """Contents of an object or an array. `rest` is the schema of unnamed properties or items: None allows any, a
    node NOTHING allows none."""

    __slots__ = ("named", "needs", "needs_schema", "patterns", "places", "required", "rest")

    def __init__(self) -> None:
        self.named: dict[str, Node] = {}
        self.patterns: dict[str, Node] = {}
        self.required: frozenset[str] = frozenset()
        self.needs: dict[str, frozenset[str]] = {}
        self.needs_schema: dict[str, Node] = {}
        self.places: list[Node] = []
        """Schemas of the first items of an array, by position."""
        self.rest: Node | None = None

    @property
    def is_open(self) -> bool:
        return not self.patterns and self.rest is None

    @property
    def is_closed(self) -> bool:
        return self.rest is not None and self.rest.kind == NOTHING
