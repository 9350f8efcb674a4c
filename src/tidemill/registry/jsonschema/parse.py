"""Parser of JSON Schemas: text → canonical text and model.

`metaschema` decides whether the text is a schema (of the draft that `$schema` names, 7 without it). `references`
resolves `$ref` within the schema and to the schemas that the request's references name.

    canonical    no white space
    normalized   in addition: keys sorted
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from tidemill.metastore.rows.registry import Reference
from tidemill.registry.errors import invalid_schema
from tidemill.registry.jsonschema.metaschema import check_schema
from tidemill.registry.jsonschema.model import (
    ALL,
    ANY,
    ARRAY,
    COMBINED,
    ENUM,
    EVERYTHING,
    NOT,
    NOTHING,
    NUMBER,
    OBJECT,
    STRING,
    Node,
    Shape,
)
from tidemill.registry.jsonschema.references import ReferenceResolver
from tidemill.registry.limits import load_json, shorten
from tidemill.registry.schema import ParsedSchema, ResolvedReference, schema_digest

KEYWORDS = {
    OBJECT: (
        "properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties",
        "dependencies", "dependentRequired", "dependentSchemas",
    ),
    ARRAY: ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"),
    NUMBER: ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    STRING: ("minLength", "maxLength", "pattern"),
}  # fmt: skip
"""Keywords that apply to one type only: a schema without `type` is taken to mean the types of its keywords."""


def parse(
    text: str, references: Sequence[Reference], resolved: Sequence[ResolvedReference], normalize: bool
) -> ParsedSchema:
    """Parse a schema. `resolved` has every schema that is referred to, directly or not. Raises RegistryError."""
    tree = load_json(text)
    if not isinstance(tree, dict | bool):
        raise invalid_schema(f"a JSON Schema is an object or a boolean: {shorten(tree)}")
    check_schema(tree)
    for found in resolved:
        if found.parsed.kind != "JSON":
            raise invalid_schema(f"it refers to a schema that is not JSON Schema: {shorten(found.name)}")
    model = _JsonSchemaModelBuilder(tree, [(found.name, found.parsed.text) for found in resolved]).root()
    option = orjson.OPT_SORT_KEYS if normalize else None
    canonical = orjson.dumps(tree, option=option).decode()
    return ParsedSchema(
        "JSON", canonical, tuple(references), model, schema_digest("JSON", canonical.encode(), references)
    )


class _JsonSchemaModelBuilder:
    """Builder of the model. Nodes are memoized by the identity of the JSON they come from, which `_kept` keeps
    alive."""

    def __init__(self, tree: Any, others: Sequence[tuple[str, str]]) -> None:
        trees = [(name, orjson.loads(text)) for name, text in others]
        self._kept: list[Any] = [tree, *trees]
        self._tree = tree
        self._alone = isinstance(tree, dict) and "draft-0" in str(tree.get("$schema", ""))
        """Set for drafts before 2019-09, which ignore keywords next to a reference."""
        self._references = ReferenceResolver(tree, trees)
        self._nodes: dict[int, Node] = {}
        self._chased: set[int] = set()

    def root(self) -> Node:
        return self._build_node(self._tree, self._references.root)

    def _build_node(self, schema: Any, resolver: Any) -> Node:
        if isinstance(schema, bool):
            return Node(EVERYTHING if schema else NOTHING)
        if not isinstance(schema, dict):
            raise invalid_schema(f"not a schema: {shorten(schema)}")
        known = self._nodes.get(id(schema))
        if known is not None:
            return known
        resolver = self._references.enter(schema, resolver)
        if _reference(schema) is not None and (self._alone or not _has_other_keywords(schema)):
            return self._resolve_reference_only(schema, resolver)
        node = self._nodes[id(schema)] = Node()
        node.default = "default" in schema
        parts = self._build_parts(schema, resolver)
        if len(parts) == 1 and _reference(schema) is None:
            _copy_into(node, parts[0])  # created for this node alone; a referenced node may not be complete yet
        elif parts:
            node.kind, node.parts = ALL, parts
        return node

    def _resolve_reference_only(self, schema: dict[str, Any], resolver: Any) -> Node:
        """Resolve a schema that is only a reference to the schema that it refers to."""
        if id(schema) in self._chased:
            raise invalid_schema(f"a reference refers to itself: {shorten(_reference(schema))}")
        self._chased.add(id(schema))
        node = self._nodes[id(schema)] = self._resolve_reference(str(_reference(schema)), resolver)
        return node

    def _resolve_reference(self, reference: str, resolver: Any) -> Node:
        found = self._references.look_up(reference, resolver)
        self._kept.append(found.contents)
        return self._build_node(found.contents, found.resolver)

    def _build_parts(self, schema: dict[str, Any], resolver: Any) -> list[Node]:
        parts: list[Node] = []
        reference = _reference(schema)
        if reference is not None:
            parts.append(self._resolve_reference(reference, resolver))
        types = schema.get("type")
        if isinstance(types, list) and len(types) != 1:
            parts.append(_combined_node(ANY, [self._build_typed(kind, schema, resolver) for kind in types]))
        elif types is not None:
            parts.append(self._build_typed(types[0] if isinstance(types, list) else types, schema, resolver))
        else:
            for kind, keywords in KEYWORDS.items():
                if any(keyword in schema for keyword in keywords):
                    parts.append(self._build_typed(kind, schema, resolver))
        if "enum" in schema or "const" in schema:
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            enum = Node(ENUM)
            enum.values = frozenset(orjson.dumps(value, option=orjson.OPT_SORT_KEYS) for value in values)
            parts.append(enum)
        for kind in COMBINED:
            if kind in schema:
                branches = _without_duplicates(schema[kind])
                parts.append(_combined_node(kind, [self._build_node(branch, resolver) for branch in branches]))
        if "not" in schema:
            parts.append(_combined_node(NOT, [self._build_node(schema["not"], resolver)]))
        return parts

    def _build_typed(self, kind: str, schema: dict[str, Any], resolver: Any) -> Node:
        node = Node(NUMBER if kind == "integer" else kind)
        if node.kind == NUMBER:
            node.limits = {**_number_limits(schema), "integer": kind == "integer"}
        elif node.kind == STRING:
            node.limits = {word: schema[word] for word in KEYWORDS[STRING] if word in schema}
        elif node.kind == OBJECT:
            node.limits = {word: schema[word] for word in ("minProperties", "maxProperties") if word in schema}
            node.shape = self._object_shape(schema, resolver)
        elif node.kind == ARRAY:
            node.limits = {word: schema[word] for word in ("minItems", "maxItems") if word in schema}
            node.limits = {**node.limits, "uniqueItems": schema.get("uniqueItems", False)}
            node.shape = self._array_shape(schema, resolver)
        return node

    def _object_shape(self, schema: dict[str, Any], resolver: Any) -> Shape:
        shape = Shape()
        shape.named = {name: self._build_node(one, resolver) for name, one in schema.get("properties", {}).items()}
        shape.patterns = {
            name: self._build_node(one, resolver) for name, one in schema.get("patternProperties", {}).items()
        }
        required = schema.get("required", [])
        shape.required = frozenset(required if isinstance(required, list) else ())
        needs = {**schema.get("dependencies", {}), **schema.get("dependentRequired", {})}
        shape.needs = {name: frozenset(one) for name, one in needs.items() if isinstance(one, list)}
        schemas = {name: one for name, one in needs.items() if not isinstance(one, list)}
        schemas |= schema.get("dependentSchemas", {})
        shape.needs_schema = {name: self._build_node(one, resolver) for name, one in schemas.items()}
        shape.rest = self._rest_schema(schema.get("additionalProperties", True), resolver)
        return shape

    def _array_shape(self, schema: dict[str, Any], resolver: Any) -> Shape:
        shape = Shape()
        items = schema.get("items")
        places = schema.get("prefixItems", items if isinstance(items, list) else [])
        shape.places = [self._build_node(one, resolver) for one in places]
        if "prefixItems" in schema:
            shape.rest = self._rest_schema(True if items is None else items, resolver)
        elif isinstance(items, list):
            shape.rest = self._rest_schema(schema.get("additionalItems", True), resolver)
        elif items is not None:
            shape.rest = self._rest_schema(items, resolver)
        return shape

    def _rest_schema(self, schema: Any, resolver: Any) -> Node | None:
        node = self._build_node(schema, resolver)
        return None if schema is True or schema == {} else node


def _reference(schema: dict[str, Any]) -> str | None:
    """Return the reference of a schema. A dynamic reference is treated as a plain one: nothing extends a registered
    schema from outside."""
    found = (schema.get(word) for word in ("$ref", "$dynamicRef", "$recursiveRef"))
    return next((one for one in found if isinstance(one, str)), None)


def _has_other_keywords(schema: dict[str, Any]) -> bool:
    """Return whether a schema has keywords other than its reference."""
    words = (*KEYWORDS.values(), ("type", "enum", "const", "default", NOT, *COMBINED))
    return any(word in schema for group in words for word in group)


def _number_limits(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the limits of a number. Draft 4 has `exclusiveMinimum: true` next to `minimum`; later drafts have the
    number there."""
    found = {word: schema[word] for word in KEYWORDS[NUMBER] if word in schema}
    for plain, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(found.get(exclusive), bool) and found.pop(exclusive) and plain in found:
            found[exclusive] = found.pop(plain)
    return found


def _without_duplicates(branches: Sequence[Any]) -> list[Any]:
    found = {orjson.dumps(branch, option=orjson.OPT_SORT_KEYS): branch for branch in reversed(branches)}
    return list(reversed(found.values()))


def _combined_node(kind: str, parts: Sequence[Node]) -> Node:
    node = Node(kind)
    node.parts = parts
    return node


def _copy_into(node: Node, other: Node) -> None:
    """Copy the contents of `other` into `node`, which was handed out before it was known to have a single
    constraint."""
    node.kind, node.limits, node.values = other.kind, other.limits, other.values
    node.parts, node.shape = other.parts, other.shape
