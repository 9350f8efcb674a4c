"""Avro schemas as trees of types, from the text of a schema and of its references.

A logical type is applied only where it fits its underlying type, as the specification says; otherwise the underlying
type alone counts. `connect` is the name of the type in Kafka Connect, which Debezium's converters add.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tidemill.spark.formats.conversion import SourceType
from tidemill.spark.formats.nested_conversion import ELEMENT, VALUE, Parts

PRIMITIVES = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})
_PLAIN = {
    "boolean": "bool", "int": "int", "long": "int", "float": "float", "double": "double", "bytes": "bytes",
    "string": "string", "fixed": "bytes", "enum": "string", "null": "null",
}  # fmt: skip
_LOGICAL = {
    ("int", "date"): "date",
    ("int", "time-millis"): "clock_millis",
    ("long", "time-micros"): "clock_micros",
    ("long", "timestamp-millis"): "millis",
    ("long", "timestamp-micros"): "micros",
    ("long", "timestamp-nanos"): "nanos",
    ("long", "local-timestamp-millis"): "local_millis",
    ("long", "local-timestamp-micros"): "local_micros",
    ("long", "local-timestamp-nanos"): "local_nanos",
}
_DEPTH_MAX = 100
UUID_BYTES = 16


class AvroSchemaError(ValueError):
    """The text is no Avro schema that can be read."""


class AvroType:
    """One type. A recursive type is a graph, so types compare by identity."""

    __slots__ = ("branches", "connect", "fields", "kind", "logical", "parts", "precision", "scale", "size", "symbols")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.logical = ""
        self.connect = ""
        self.scale = 0
        self.precision = 0
        self.size = 0
        """Bytes of a fixed."""
        self.symbols: tuple[str, ...] = ()
        self.fields: list[tuple[str, AvroType]] = []
        self.branches: list[AvroType] = []
        self.parts: AvroType | None = None
        """Items of an array, or values of a map."""

    def field(self, name: str) -> AvroType | None:
        return next((kind for found, kind in self.fields if found == name), None)

    def without_null(self) -> AvroType | None:
        """Return the type itself, or the only branch of a union that is not null; None for any other union."""
        if self.kind != "union":
            return self
        rest = [branch for branch in self.branches if branch.kind != "null"]
        return rest[0] if len(rest) == 1 else None

    def source_type(self) -> SourceType:
        """Return the type as a source of a column."""
        found = self.without_null()
        if found is None:
            plain = {branch.source_type() for branch in self.branches if branch.kind != "null"}
            return plain.pop() if len(plain) == 1 else SourceType("json" if plain else "null")
        if found.is_decimal:
            return SourceType("decimal", found.scale)
        if found.logical == "uuid":
            return SourceType("uuid_bytes" if found.kind == "fixed" else "string")
        if found.kind in ("array", "map", "record"):
            return SourceType("json", parts=found.parts_of_source)
        return SourceType(_LOGICAL.get((found.kind, found.logical), _PLAIN.get(found.kind, "json")))

    def parts_of_source(self) -> Parts:
        """Return the types inside of an array, a map or a record."""
        if self.kind == "record":
            return Parts("record", {name: kind.source_type() for name, kind in self.fields})
        assert self.parts is not None
        return Parts(self.kind, {ELEMENT if self.kind == "array" else VALUE: self.parts.source_type()})

    @property
    def is_decimal(self) -> bool:
        return self.logical == "decimal" and self.kind in ("bytes", "fixed")

    def __str__(self) -> str:
        if self.kind == "union":
            return f"[{', '.join(map(str, self.branches))}]"
        return self.logical or self.kind


def parse_avro(text: str, references: Sequence[str] = ()) -> AvroType:
    """Return the type that the text describes. `references`: texts of the schemas that it refers to, each after those
    that it refers to itself. Raises AvroSchemaError."""
    parser = _AvroParser()
    try:
        for reference in references:
            parser.parse(msgspec.json.decode(reference), "", 0)
        return parser.parse(msgspec.json.decode(text), "", 0)
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise AvroSchemaError(f"not an Avro schema: {type(error).__name__}: {error}"[:200]) from error


class _AvroParser:
    def __init__(self) -> None:
        self._named: dict[str, AvroType] = {}

    def parse(self, given: Any, space: str, depth: int) -> AvroType:
        if depth > _DEPTH_MAX:
            raise AvroSchemaError(f"nested deeper than {_DEPTH_MAX} levels")
        if isinstance(given, str):
            return self._find(given, space)
        if isinstance(given, list):
            union = AvroType("union")
            union.branches = [self.parse(one, space, depth + 1) for one in given]
            return union
        kind = given["type"]
        if not isinstance(kind, str):
            return self.parse(kind, space, depth + 1)
        if kind in ("record", "error", "enum", "fixed"):
            found = self._parse_named(given, kind, space, depth)
        elif kind in ("array", "map"):
            found = AvroType(kind)
            found.parts = self.parse(given["items" if kind == "array" else "values"], space, depth + 1)
        elif kind in PRIMITIVES:
            found = AvroType(kind)
        else:
            return self._find(kind, space)
        _add_logical_type(found, given)
        return found

    def _parse_named(self, given: dict[str, Any], kind: str, space: str, depth: int) -> AvroType:
        name, own = given["name"], given.get("namespace", space)
        full = name if "." in name or not own else f"{own}.{name}"
        found = self._named[full] = AvroType("record" if kind == "error" else kind)
        inner = full.rpartition(".")[0]
        if found.kind == "record":
            found.fields = [(one["name"], self.parse(one["type"], inner, depth + 1)) for one in given["fields"]]
        elif kind == "enum":
            found.symbols = tuple(given["symbols"])
        else:
            found.size = int(given["size"])
        return found

    def _find(self, name: str, space: str) -> AvroType:
        if name in PRIMITIVES:
            return AvroType(name)
        for full in (f"{space}.{name}" if space and "." not in name else name, name):
            if full in self._named:
                return self._named[full]
        raise AvroSchemaError(f"it refers to an unknown type: {name}"[:200])


def _add_logical_type(found: AvroType, given: dict[str, Any]) -> None:
    logical, connect = given.get("logicalType"), given.get("connect.name")
    found.connect = connect if isinstance(connect, str) else ""
    if logical == "decimal":
        precision, scale = given.get("precision"), given.get("scale", 0)
        if not (isinstance(precision, int) and isinstance(scale, int) and 0 <= scale <= precision):
            return
        found.precision, found.scale = precision, scale
    elif logical == "uuid" and found.kind == "fixed" and found.size != UUID_BYTES:
        return
    found.logical = logical if isinstance(logical, str) else ""
