"""JSON Schema: valid schemas, and whether documents of one are valid for another, by content model."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import referencing
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.metastore.rows.registry import Reference, SchemaRow
from tidemill.registry.errors import RegistryError
from tidemill.registry.jsonschema.metaschema import have_unique_items
from tidemill.registry.limits import StepBudget
from tidemill.registry.schema import ParsedSchema, SubmittedSchema
from tidemill.registry.schema_types import find_problems, parse_schema


def parsed(schema: Any) -> ParsedSchema:
    return parse_schema(SubmittedSchema("JSON", schema if isinstance(schema, str) else json.dumps(schema)), {})


def why(reader: Any, writer: Any) -> list[str]:
    found = find_problems("BACKWARD", parsed(reader), parsed(writer), StepBudget())
    return [message.partition('"')[2].partition('"')[0] for message in found]


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def closed(**properties: Any) -> dict[str, Any]:
    return {**obj(**properties), "additionalProperties": False}


STR, INT, NUM = {"type": "string"}, {"type": "integer"}, {"type": "number"}
TREE = {
    "$ref": "#/definitions/t",
    "definitions": {"t": obj(v=INT, kids={"type": "array", "items": {"$ref": "#/definitions/t"}})},
}
TREE_D = json.loads(json.dumps(TREE).replace('"#/definitions/t"}}', '"#/definitions/t", "default": {}}}'))
TREE_N = json.loads(json.dumps(TREE).replace("integer", "number"))


@pytest.mark.parametrize(
    ("reader", "writer", "found"),
    [
        (STR, STR, []),
        (True, STR, []),
        ({}, STR, []),
        (STR, True, ["TYPE_CHANGED"]),
        (STR, False, []),
        (STR, INT, ["TYPE_CHANGED"]),
        (NUM, INT, []),
        (INT, NUM, ["TYPE_NARROWED"]),
        ({"type": ["string", "null"]}, STR, []),
        (STR, {"type": ["string", "null"]}, ["TYPE_CHANGED"]),
        ({"type": ["null", "number"]}, {"type": ["integer", "null"]}, []),
        ({**STR, "maxLength": 5}, STR, ["MAX_LENGTH_ADDED"]),
        ({**STR, "maxLength": 5}, {**STR, "maxLength": 9}, ["MAX_LENGTH_TIGHTENED"]),
        ({**STR, "maxLength": 9}, {**STR, "maxLength": 5}, []),
        (STR, {**STR, "maxLength": 5}, []),
        ({**STR, "minLength": 2}, {**STR, "minLength": 1}, ["MIN_LENGTH_TIGHTENED"]),
        ({**STR, "pattern": "^a"}, STR, ["PATTERN_ADDED"]),
        ({**STR, "pattern": "^a"}, {**STR, "pattern": "^b"}, ["PATTERN_CHANGED"]),
        (STR, {**STR, "pattern": "^b"}, []),
        ({**NUM, "minimum": 1}, {**NUM, "exclusiveMinimum": 1}, []),
        ({**NUM, "minimum": 2}, {**NUM, "exclusiveMinimum": 1}, ["MINIMUM_ADDED"]),
        ({**NUM, "maximum": 2}, {**NUM, "maximum": 3}, ["MAXIMUM_TIGHTENED"]),
        ({**NUM, "multipleOf": 2}, {**NUM, "multipleOf": 4}, []),
        ({**NUM, "multipleOf": 4}, {**NUM, "multipleOf": 2}, ["MULTIPLE_OF_CHANGED"]),
        ({**NUM, "multipleOf": 4}, NUM, ["MULTIPLE_OF_ADDED"]),
        ({"enum": ["a", "b"]}, {"enum": ["a"]}, []),
        ({"enum": ["a"]}, {"enum": ["a", "b"]}, ["ENUM_ARRAY_NARROWED"]),
        ({"enum": [1, 2]}, {"const": 1}, []),
        ({**STR, "enum": ["a", "b"]}, {**STR, "enum": ["a"]}, []),
        (STR, {**STR, "enum": ["a"]}, []),
        (closed(a=STR, b=STR), closed(a=STR), []),
        (closed(a=STR), closed(a=STR, b=STR), ["PROPERTY_REMOVED_FROM_CLOSED_CONTENT_MODEL"]),
        (obj(a=STR), obj(a=STR, b=STR), []),
        (obj(a=STR, b=STR), obj(a=STR), ["PROPERTY_ADDED_TO_OPEN_CONTENT_MODEL"]),
        (obj(a=STR, b={}), obj(a=STR), []),
        (
            {**closed(a=STR, b=STR), "required": ["b"]},
            closed(a=STR),
            ["REQUIRED_PROPERTY_ADDED_TO_UNOPEN_CONTENT_MODEL"],
        ),
        ({**closed(a=STR, b={**STR, "default": ""}), "required": ["b"]}, closed(a=STR), []),
        ({**obj(a=STR), "required": ["a"]}, obj(a=STR), ["REQUIRED_ATTRIBUTE_ADDED"]),
        (obj(a=STR), {**obj(a=STR), "required": ["a"]}, []),
        ({**obj(a={**STR, "default": "x"}), "required": ["a"]}, obj(a=STR), []),
        (TREE_D, TREE, []),
        (TREE, TREE_D, []),
        (
            {**closed(a={"$ref": "#/$defs/s", "default": ""}), "required": ["a"], "$defs": {"s": STR}},
            closed(),
            [],
        ),
        (obj(a=STR), closed(a=STR), []),
        (closed(a=STR), obj(a=STR), ["ADDITIONAL_PROPERTIES_REMOVED"]),
        ({**obj(a=STR), "additionalProperties": STR}, obj(a=STR), ["ADDITIONAL_PROPERTIES_NARROWED"]),
        ({**obj(a=STR), "additionalProperties": NUM}, {**obj(a=STR), "additionalProperties": INT}, []),
        ({**obj(), "additionalProperties": STR}, {**obj(b=STR), "additionalProperties": STR}, []),
        (
            {**obj(), "additionalProperties": STR},
            {**obj(b=INT), "additionalProperties": STR},
            ["PROPERTY_REMOVED_NOT_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL"],
        ),
        (
            {**closed(ab=NUM), "patternProperties": {"^a": NUM}},
            {**closed(), "patternProperties": {"^a": INT}},
            [],
        ),
        (
            {**closed(ab=STR), "patternProperties": {"^a": INT}},
            {**closed(), "patternProperties": {"^a": INT}},
            ["PROPERTY_ADDED_NOT_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL"],
        ),
        (
            {**closed(), "patternProperties": {"^a": STR}},
            obj(),
            ["PATTERN_PROPERTY_ADDED_TO_OPEN_CONTENT_MODEL", "ADDITIONAL_PROPERTIES_REMOVED"],
        ),
        (
            closed(),
            {**closed(), "patternProperties": {"^a": STR}},
            ["PATTERN_PROPERTY_REMOVED_FROM_CLOSED_CONTENT_MODEL"],
        ),
        ({**closed(), "patternProperties": {"^a": NUM}}, {**closed(), "patternProperties": {"^a": INT}}, []),
        ({**obj(), "maxProperties": 1}, obj(), ["MAX_PROPERTIES_ADDED"]),
        ({**obj(), "dependencies": {"a": ["b"]}}, obj(), ["DEPENDENCY_ARRAY_ADDED"]),
        ({**obj(), "dependentRequired": {"a": ["b"]}}, {**obj(), "dependencies": {"a": ["b", "c"]}}, []),
        ({**obj(), "dependencies": {"a": obj(b=STR)}}, obj(), ["DEPENDENCY_SCHEMA_ADDED"]),
        ({"type": "array", "items": NUM}, {"type": "array", "items": INT}, []),
        ({"type": "array", "items": INT}, {"type": "array", "items": NUM}, ["TYPE_NARROWED"]),
        ({"type": "array", "items": INT}, {"type": "array"}, ["ADDITIONAL_ITEMS_NARROWED"]),
        ({"type": "array", "uniqueItems": True}, {"type": "array"}, ["UNIQUE_ITEMS_ADDED"]),
        (
            {"type": "array", "items": [STR, STR]},
            {"type": "array", "items": [STR]},
            ["ITEM_ADDED_TO_OPEN_CONTENT_MODEL"],
        ),
        (
            {"type": "array", "items": [STR], "additionalItems": False},
            {"type": "array", "items": [STR, STR], "additionalItems": False},
            ["ITEM_REMOVED_FROM_CLOSED_CONTENT_MODEL"],
        ),
        ({"anyOf": [STR, NUM]}, {"anyOf": [STR, INT]}, []),
        ({"anyOf": [STR, NUM]}, STR, []),
        ({"anyOf": [STR, INT]}, {"anyOf": [STR, NUM]}, ["SUM_TYPE_NARROWED"]),
        (STR, {"anyOf": [STR, INT]}, ["TYPE_CHANGED"]),
        ({"anyOf": [STR, INT]}, {"oneOf": [STR, INT]}, []),
        ({"oneOf": [STR, INT]}, {"anyOf": [STR, INT]}, ["COMBINED_TYPE_CHANGED"]),
        ({"oneOf": [STR, INT, {"type": "null"}]}, {"oneOf": [STR, INT]}, []),
        ({"oneOf": [STR, INT]}, {"oneOf": [STR, INT, {"type": "null"}]}, ["SUM_TYPE_NARROWED"]),
        ({"allOf": [STR]}, {"allOf": [STR, {**STR, "maxLength": 3}]}, []),
        ({"allOf": [STR, {**STR, "maxLength": 3}]}, {"allOf": [STR]}, ["PRODUCT_TYPE_EXTENDED"]),
        ({"not": STR}, {"not": {"type": ["string", "null"]}}, []),
        ({"not": {"type": ["string", "null"]}}, {"not": STR}, ["NOT_TYPE_EXTENDED"]),
        (TREE_N, TREE, []),
        (TREE, TREE_N, ["TYPE_NARROWED"]),
        ({"properties": {"a": STR}}, {"properties": {"a": STR, "b": STR}}, []),
    ],
)
def test_documents_of_one_schema_are_valid_for_another_or_not(reader: Any, writer: Any, found: list[str]) -> None:
    assert why(reader, writer) == found


@pytest.mark.parametrize(
    "schema",
    [
        "", "[]", "3", {"type": "nothing"}, {"$ref": "#/nowhere"}, {"$ref": "#"}, {"$ref": "http://example.com/x"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"properties": {"a": 3}}, {"$ref": "file:///etc/passwd"}, '{"not":' * 120 + "{}" + "}" * 120, {"minLength": -1},
        {"$schema": 5}, {"$schema": "http://[x"}, {"$id": "http://[x"},
        {"$id": "a", "properties": {"a": {"$id": "//["}}},
        {"minLength": 5, "$ref": "#/minLength/x"}, {"const": {"$id": 5}, "$ref": "#/const"}, {"$ref": "http://[x"},
    ],
)  # fmt: skip
def test_what_is_no_schema_or_refers_to_nothing_is_refused(schema: Any) -> None:
    with pytest.raises(RegistryError) as refused:
        parsed(schema)
    assert refused.value.code == 42201


def test_a_pattern_of_exponential_time_costs_none() -> None:
    bomb = {**closed(), "patternProperties": {"^(a+)+$": STR}}
    assert why({**closed(**{"a" * 40 + "!": STR}), "patternProperties": bomb["patternProperties"]}, bomb) == []
    ahead = {"patternProperties": {"(?=b)": STR}}
    assert why({**closed(b=INT), **ahead}, {**closed(), **ahead}), "what RE2 does not know may find anything"


def test_patterns_are_those_of_another_language() -> None:
    named = {**closed(), "patternProperties": {r"^\p{L}+$": STR}}
    assert why(named, {**named, "patternProperties": {r"^\p{L}+$": INT}}), "it is compared, not refused"


class Calls:
    """Counter of the calls of a function of a library, which refuses more than `limit`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, limit: int) -> None:
        original = getattr(place, name)
        self.count = 0

        def counted(*arguments: Any) -> Any:
            self.count += 1
            assert self.count <= limit, f"{name} is called again and again"
            return original(*arguments)

        monkeypatch.setattr(place, name, counted)


DRAFT4, DRAFT7 = (f"http://json-schema.org/draft-0{number}/schema#" for number in (4, 7))
DRAFT2019, DRAFT2020 = (f"https://json-schema.org/draft/{name}/schema" for name in ("2019-09", "2020-12"))
MANY = ["a", *range(3_000)]
"""Items that cannot be sorted."""


@pytest.mark.parametrize(
    ("draft", "part", "valid"),
    [
        (DRAFT4, {"enum": MANY}, True), (DRAFT4, {"required": MANY}, False), (DRAFT7, {"type": MANY}, False),
        (DRAFT7, {"dependencies": {"a": MANY}}, False), (DRAFT2019, {"required": MANY}, False),
        (DRAFT2020, {"type": MANY}, False), (DRAFT2020, {"dependentRequired": {"a": MANY}}, False),
        ("http://json-schema.org/draft-03/schema#", {"enum": MANY}, True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("nested", [False, True])
def test_items_are_not_compared_two_by_two(
    draft: str, part: Any, valid: bool, nested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    Calls(monkeypatch, jsonschema._utils, "equal", 10 * len(MANY))
    schema = {"$schema": draft, **({"properties": {"p": part}} if nested else part)}
    if valid:
        parsed(schema)
        return
    with pytest.raises(RegistryError) as refused:
        parsed(schema)
    assert refused.value.code == 42201


@pytest.mark.parametrize(
    ("items", "valid"),
    [
        (["a", 1, "1", 1.5, True, False, 0, None, "", [], {}], True), ([1, 1.0], False), ([0, -0.0], False),
        (["a", 1, {"a": [1, 2]}, {"a": [1.0, 2]}], False), ([{"a": 1, "b": 2}, {"b": 2, "a": 1}], False),
        ([{"a": 1}, {"a": True}], True), ([[1], 1, ["1"], [[1]]], True), (["a", 1, "a"], False),
        ([1e300, 1e300], False), ([1e19, 10**19], False), ([2**53, 2**53 + 1, float(2**53)], False),
        ([2**53 + 1, float(2**53)], True),
    ],
)  # fmt: skip
def test_unique_items_are_those_of_json_schema(items: list[Any], valid: bool) -> None:
    assert have_unique_items(items) is valid


@pytest.mark.parametrize(
    ("draft", "anchor", "reference"),
    [
        (DRAFT7, {"$id": "#a"}, {"$ref": "#a"}), (DRAFT2019, {"$anchor": "a"}, {"$ref": "#a"}),
        (DRAFT2020, {"$anchor": "a"}, {"$ref": "#a"}), (DRAFT2020, {"$dynamicAnchor": "a"}, {"$dynamicRef": "#a"}),
        (DRAFT7, {"$id": "a"}, {"$ref": "a"}), (DRAFT2020, {"$id": "a"}, {"$id": "b", "allOf": [{"$ref": "a"}]}),
    ],
)  # fmt: skip
def test_the_documents_of_references_are_searched_once(
    draft: str, anchor: Any, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = 2_000
    calls = Calls(monkeypatch, referencing.Resource, "subresources", 10 * many)
    found = parsed({
        "$schema": draft, "definitions": {"x": {**anchor, **STR}},
        "properties": {str(number): reference for number in range(many)},
    })  # fmt: skip
    assert calls.count > many
    texts = parsed({"properties": {str(number): STR for number in range(many)}})
    assert find_problems("FULL", found, texts, StepBudget()) == []


def test_the_metaschema_is_found_without_a_search_of_the_levels_above(monkeypatch: pytest.MonkeyPatch) -> None:
    Calls(monkeypatch, referencing._core.Resolver, "dynamic_scope", 0)
    for draft in (DRAFT2019, DRAFT2020):
        deep: Any = {"minLength": 1}
        for _ in range(30):
            deep = {"not": deep}
        parsed({"$schema": draft, **deep})
        with pytest.raises(RegistryError):
            parsed(json.dumps({"$schema": draft, **deep}).replace("1", "-1"))


def test_uris_that_are_long_to_join_are_refused() -> None:
    base = {"$id": "http://x.org/" + "a/" * 20_000, **STR}
    assert parsed({**base, "properties": {str(number): {"$id": str(number)} for number in range(300)}})
    for part in ({"$id": "b"}, {"$ref": "b"}):
        with pytest.raises(RegistryError, match="URIs have more than"):
            parsed({**base, "properties": {str(number): part for number in range(900)}})


def test_what_cannot_be_searched_is_valid_without_anchors() -> None:
    mixed = {"dependencies": {"a": INT, "b": ["c"]}, "properties": {"d": {"$ref": "#/dependencies/a"}}}
    assert why(mixed, mixed) == []
    with pytest.raises(RegistryError, match="unresolved reference '#d'"):
        parsed({**mixed, "properties": {"d": {"$ref": "#d"}, "e": {"$id": "#d"}}})


def test_an_embedded_schema_precedes_one_that_is_embedded_in_a_referenced_schema() -> None:
    def bundled(kind: str, uri: str, **more: Any) -> dict[str, Any]:
        address = {"$id": "http://example.com/address", "type": kind}
        return {"$schema": DRAFT2020, "$id": f"http://example.com/{uri}", "$defs": {"a": address}, **more}

    other = SchemaRow(1, "JSON", json.dumps(bundled("string", "customer")))
    order = bundled("integer", "order", properties={"v": {"$ref": "address"}})
    references = (Reference("customer", "c", 1),)
    found = parse_schema(SubmittedSchema("JSON", json.dumps(order), references), {("c", 1): other})
    assert find_problems("BACKWARD", found, parsed({**obj(v=INT), "$schema": DRAFT2020}), StepBudget()) == []
    assert find_problems("BACKWARD", found, parsed({**obj(v=STR), "$schema": DRAFT2020}), StepBudget()) != []


def test_dynamic_references_are_followed() -> None:
    tree = obj(v=INT, kids={"type": "array", "items": {"$dynamicRef": "#node"}})
    draft = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$dynamicAnchor": "node"}
    wider = json.loads(json.dumps(tree).replace("integer", "number"))
    assert why({**wider, **draft}, {**tree, **draft}) == []
    assert why({**tree, **draft}, {**wider, **draft}) == ["TYPE_NARROWED"]


def test_references_lead_to_other_schemas_by_name_and_by_their_own_uri() -> None:
    other = SchemaRow(1, "JSON", json.dumps({"$id": "http://x.org/a.json", "type": "integer"}))
    references = (Reference("a.json", "a", 1),)
    for schema in (
        {"$ref": "a.json"},
        {"$ref": "http://x.org/a.json"},
        {"$id": "http://y.org/b.json", "$ref": "a.json"},
    ):
        found = parse_schema(SubmittedSchema("JSON", json.dumps(obj(v=schema)), references), {("a", 1): other})
        assert find_problems("BACKWARD", found, parsed(obj(v=INT)), StepBudget()) == []
        assert find_problems("BACKWARD", found, parsed(obj(v=NUM)), StepBudget()) != []


LEAF = st.sampled_from(
    [STR, INT, NUM, {"type": "null"}, {**STR, "maxLength": 1}, {**NUM, "minimum": 1}, {"enum": [1, "a"]}, True, False]
)
SCHEMAS = st.recursive(
    LEAF,
    lambda inner: st.one_of(
        st.builds(lambda a, more: {**obj(a=a), **more}, inner, st.sampled_from([{}, {"additionalProperties": False}])),
        st.builds(lambda a, b: {**closed(a=a, b=b), "required": ["a"]}, inner, inner),
        st.builds(lambda rest: {**obj(a=STR), "additionalProperties": rest}, inner),
        st.builds(lambda items: {"type": "array", "items": items}, inner),
        st.builds(lambda a, b: {"type": "array", "items": [a, b], "additionalItems": False}, inner, inner),
        st.builds(
            lambda kind, parts: {kind: parts},
            st.sampled_from(["allOf", "anyOf"]),
            st.lists(inner, min_size=1, max_size=2),
        ),
    ),
    max_leaves=4,
)
DOCUMENTS: list[Any] = [
    None, 0, 1, 0.5, "a", "ab", [], [1], ["a", 1], ["a", "b", None], {}, {"a": 1}, {"a": "a"}, {"a": "ab", "b": 2},
    {"b": None}, {"a": {"a": 1}}, {"c": 1}, {"a": [1, "a"]}, {"a": None, "c": "a"}, [{"a": 1}], True,
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(SCHEMAS, SCHEMAS)
def test_what_is_called_compatible_accepts_every_document_that_was_valid(reader: Any, writer: Any) -> None:
    if why(reader, writer):
        return
    new, old = jsonschema.Draft7Validator(reader), jsonschema.Draft7Validator(writer)
    for document in DOCUMENTS:
        assert not old.is_valid(document) or new.is_valid(document), (document, reader, writer)
