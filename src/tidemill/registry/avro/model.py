"""Model of an Avro schema with its names resolved. A recursive schema is a graph: nodes are compared by identity."""

from __future__ import annotations

from typing import Any, NamedTuple

PRIMITIVES = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})


class Primitive:
    """A primitive type."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Array:
    """An array type."""

    __slots__ = ("items",)

    def __init__(self, items: Any) -> None:
        self.items = items


class Map:
    """A map type; its keys are strings."""

    __slots__ = ("values",)

    def __init__(self, values: Any) -> None:
        self.values = values


class Union:
    """A union type."""

    __slots__ = ("branches",)

    def __init__(self, branches: list[Any]) -> None:
        self.branches = branches


class Named:
    """A named type. `aliases` are full names."""

    __slots__ = ("aliases", "name")

    def __init__(self, name: str, aliases: frozenset[str]) -> None:
        self.name = name
        self.aliases = aliases

    @property
    def short(self) -> str:
        return self.name.rpartition(".")[2]


class Fixed(Named):
    """A fixed type of `size` bytes."""

    __slots__ = ("size",)

    def __init__(self, name: str, aliases: frozenset[str], size: int) -> None:
        super().__init__(name, aliases)
        self.size = size


class Enum(Named):
    """An enum type."""

    __slots__ = ("default", "symbols")

    def __init__(self, name: str, aliases: frozenset[str], symbols: tuple[str, ...], default: str | None) -> None:
        super().__init__(name, aliases)
        self.symbols = symbols
        self.default = default


class Record(Named):
    """A record type; `fields` are in schema order."""

    __slots__ = ("fields",)

    def __init__(self, name: str, aliases: frozenset[str]) -> None:
        super().__init__(name, aliases)
        self.fields: dict[str, RecordField] = {}


class RecordField(NamedTuple):
    """A field of a record."""

    name: str
    type: Any
    has_default: bool
    aliases: frozenset[str]


class AvroModel(NamedTuple):
    """Model of a whole schema. `named` maps full names to the types that this schema itself defines."""

    root: Any
    named: dict[str, Any]
