"""Parser of Avro schemas: text → canonical text and model.

The model holds what `compat` needs, with names resolved as in Java's Avro. fastavro decides on everything but names
whether the text is an Avro schema.

    canonical    attributes in the order type, name, namespace, doc, fields, … , others after them in their order; no
                 white space; `{"type": "string"}` without other attributes is `"string"`
    normalized   in addition: full names, and other attributes sorted
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from typing import Any

import orjson

from tidemill.metastore.rows.registry import Reference
from tidemill.registry.avro.model import (
    PRIMITIVES,
    Array,
    AvroModel,
    Enum,
    Fixed,
    Map,
    Named,
    Primitive,
    Record,
    RecordField,
    Union,
)
from tidemill.registry.errors import invalid_schema
from tidemill.registry.limits import load_json, shorten
from tidemill.registry.schema import ParsedSchema, ResolvedReference, schema_digest

ORDER = (
    "type",
    "name",
    "namespace",
    "doc",
    "items",
    "values",
    "size",
    "symbols",
    "fields",
    "default",
    "order",
    "aliases",
)
NAMED = ("record", "error", "enum", "fixed")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def parse(
    text: str, references: Sequence[Reference], resolved: Sequence[ResolvedReference], normalize: bool
) -> ParsedSchema:
    """Parse a schema. `resolved` has every schema that is referred to, directly or not, each before those that refer to
    it.

    Raises RegistryError.
    """
    tree = load_json(text)
    known: dict[str, Any] = {}
    for found in resolved:
        if found.parsed.kind != "AVRO":
            raise invalid_schema(f"it refers to a schema that is not Avro: {shorten(found.name)}")
        known |= found.parsed.model.named
    builder = _AvroModelBuilder(dict(known))
    root = builder.build(tree, "")
    _validate(tree, [*known, *builder.bare])
    canonical = orjson.dumps(_canonical(tree, "", normalize, builder.bare)).decode()
    own = {name: node for name, node in builder.named.items() if name not in known}
    model = AvroModel(root, own)
    return ParsedSchema(
        "AVRO", canonical, tuple(references), model, schema_digest("AVRO", canonical.encode(), references)
    )


def _validate(tree: Any, names: Sequence[str]) -> None:
    """Validate the schema with fastavro. `names` are those that it refers to and does not define; fastavro does not
    look at their definitions."""
    from fastavro.schema import SchemaParseException, UnknownType, parse_schema

    try:
        parse_schema(tree, named_schemas={name: {} for name in names})
    except UnknownType as error:
        raise invalid_schema(f"unknown type {shorten(error.name)}") from error
    except SchemaParseException as error:
        raise invalid_schema(str(error)) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        # fastavro assumes these attributes without checking them.
        raise invalid_schema(f"an attribute is missing or of a wrong type: {error!r}") from error


class _AvroModelBuilder:
    """Builder of the model. Names resolve as in the specification: a name with a dot is a full name; otherwise the
    enclosing namespace applies, and if it has no such name, the name without a namespace."""

    def __init__(self, named: dict[str, Any]) -> None:
        self.named = named
        self.bare: set[str] = set()
        """Full names that were referred to and do not exist: the name without a namespace was meant."""

    def build(self, node: Any, space: str) -> Any:
        if isinstance(node, str):
            if node in PRIMITIVES:
                return Primitive(node)
            full = full_name(node, space)
            if full not in self.named and node in self.named:
                self.bare.add(full)
                full = node
            if full not in self.named:
                raise invalid_schema(f"unknown type {shorten(node)}")
            return self.named[full]
        if isinstance(node, list):
            return _build_union([self.build(branch, space) for branch in node])
        if not isinstance(node, dict):
            raise invalid_schema(f"not a type: {shorten(node)}")
        kind = node.get("type")
        if kind == "array":
            return Array(self.build(node.get("items"), space))
        if kind == "map":
            return Map(self.build(node.get("values"), space))
        if not isinstance(kind, str) or kind not in NAMED:
            return self.build(kind, space)
        return self._build_named(node, kind, space)

    def _build_named(self, node: dict[str, Any], kind: str, space: str) -> Any:
        name, own_space = node.get("name"), node.get("namespace", space)
        if not isinstance(name, str) or not isinstance(own_space, str):
            raise invalid_schema(f"the name of a {kind} must be a string: {shorten(name)}")
        full = full_name(name, own_space)
        if not all(_NAME.fullmatch(part) for part in full.split(".")):
            raise invalid_schema(f"not a name: {shorten(full)}")
        if full in self.named:
            raise invalid_schema(f"the name {shorten(full)} is defined twice")
        inner = full.rpartition(".")[0]
        aliases = frozenset(full_name(alias, inner) for alias in _checked_strings(node.get("aliases", ()), "aliases"))
        if kind == "fixed":
            size = node.get("size")
            if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                raise invalid_schema(f"the size of {shorten(full)} is not a number: {shorten(size)}")
            self.named[full] = fixed = Fixed(full, aliases, size)
            return fixed
        if kind == "enum":
            symbols = tuple(_checked_strings(node.get("symbols"), "symbols"))
            default = node.get("default")
            if default is not None and default not in symbols:
                raise invalid_schema(f"the default of {shorten(full)} is not one of its symbols: {shorten(default)}")
            self.named[full] = enum = Enum(full, aliases, symbols, default)
            return enum
        self.named[full] = record = Record(full, aliases)
        if not isinstance(node.get("fields"), list):
            raise invalid_schema(f"the record {shorten(full)} has no fields")
        for field in node["fields"]:
            if not isinstance(field, dict) or "name" not in field or "type" not in field:
                raise invalid_schema(
                    f"a field of {shorten(full)} is not an object with a name and a type: {shorten(field)}"
                )
            if not isinstance(field["name"], str) or not _NAME.fullmatch(field["name"]):
                raise invalid_schema(f"not a field name: {shorten(field['name'])}")
            kind_of = self.build(field["type"], inner)
            known_as = frozenset(_checked_strings(field.get("aliases", ()), "aliases"))
            if field["name"] in record.fields:
                raise invalid_schema(f"the field {shorten(field['name'])} of {shorten(full)} is defined twice")
            record.fields[field["name"]] = RecordField(field["name"], kind_of, "default" in field, known_as)
        return record


def _build_union(branches: list[Any]) -> Union:
    """Build a union. Raises RegistryError for what a union may not contain: another union, or the same type twice;
    named types are compared by name."""
    seen = set()
    for branch in branches:
        if isinstance(branch, Union):
            raise invalid_schema("a union directly inside another union")
        kind = branch.name if isinstance(branch, Named | Primitive) else type(branch)
        if kind in seen:
            raise invalid_schema(f"a union contains a type twice: {shorten(getattr(branch, 'name', kind))}")
        seen.add(kind)
    return Union(branches)


def full_name(name: str, space: str) -> str:
    return name if "." in name or not space else f"{space}.{name}"


def _checked_strings(value: Any, what: str) -> Sequence[str]:
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise invalid_schema(f"{what} must be an array of strings: {shorten(value)}")
    return value


def _canonical(node: Any, space: str, normalize: bool, bare: Set[str]) -> Any:
    """Return the canonical form of a node. `bare` is that of `_AvroModelBuilder`."""
    if isinstance(node, list):
        return [_canonical(branch, space, normalize, bare) for branch in node]
    if isinstance(node, str):
        full = full_name(node, space)
        return full if normalize and node not in PRIMITIVES and full not in bare else node
    if not isinstance(node, dict):
        return node
    found = dict(node)
    kind = node.get("type")
    named = isinstance(kind, str) and kind in NAMED
    inner = space
    if named:
        name = node["name"]
        full = full_name(name, node.get("namespace", space) if "." not in name else "")
        inner = full.rpartition(".")[0]
        if normalize:
            found["name"] = full
            found.pop("namespace", None)
            if space and not inner:
                found["namespace"] = ""  # without it, the name would be in the enclosing namespace
            if "aliases" in found:
                found["aliases"] = sorted(full_name(alias, inner) for alias in found["aliases"])
    elif not isinstance(kind, str) or kind not in ("array", "map"):
        found["type"] = _canonical(kind, space, normalize, bare)
    for part in ("items", "values"):
        if part in found and kind in ("array", "map"):
            found[part] = _canonical(found[part], space, normalize, bare)
    if named and isinstance(found.get("fields"), list):
        found["fields"] = [_canonical_field(field, inner, normalize, bare) for field in found["fields"]]
    if set(found) == {"type"} and not named:
        return found["type"]
    return _order_attributes(found, normalize)


def _canonical_field(field: dict[str, Any], space: str, normalize: bool, bare: Set[str]) -> dict[str, Any]:
    found = {**field, "type": _canonical(field["type"], space, normalize, bare)}
    if normalize:
        if found.get("order") == "ascending":
            del found["order"]
        if "aliases" in found:
            found["aliases"] = sorted(found["aliases"])
    # The name comes first, as is usual for a field.
    return {"name": found.pop("name"), **_order_attributes(found, normalize)}


def _order_attributes(found: dict[str, Any], normalize: bool) -> dict[str, Any]:
    others = [name for name in found if name not in ORDER]
    return {name: found[name] for name in (*ORDER, *(sorted(others) if normalize else others)) if name in found}
