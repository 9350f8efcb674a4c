"""Avro: valid schemas, equal schemas, and compatible schemas (specification 1.12, schema resolution)."""

from __future__ import annotations

import io
import json
from typing import Any

import fastavro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.registry.world import record
from tidemill.metastore.rows.registry import Reference, SchemaRow
from tidemill.registry.errors import RegistryError
from tidemill.registry.limits import StepBudget
from tidemill.registry.schema import ParsedSchema, SubmittedSchema
from tidemill.registry.schema_types import find_problems, parse_schema, versions_to_compare


def avro(text: str) -> ParsedSchema:
    return parse_schema(SubmittedSchema("AVRO", text), {})


def why(reader: str, writer: str) -> list[str]:
    found = find_problems("BACKWARD", avro(reader), avro(writer), StepBudget())
    return [message.partition('"')[2].partition('"')[0] for message in found]


ENUM = '{"type":"enum","name":"E","symbols":["A","B"]}'
ENUM_C = '{"type":"enum","name":"E","symbols":["A","B","C"]}'
ENUM_C_DEFAULT = '{"type":"enum","name":"E","symbols":["A"],"default":"A"}'
LIST = '{"type":"record","name":"L","fields":[{"name":"v","type":"%s"},{"name":"next","type":["null","L"]}]}'


@pytest.mark.parametrize(
    ("reader", "writer", "found"),
    [
        ('"int"', '"int"', []),
        *[(f'"{reader}"', '"int"', []) for reader in ("long", "float", "double")],
        *[(f'"{reader}"', '"long"', []) for reader in ("float", "double")],
        ('"double"', '"float"', []),
        ('"bytes"', '"string"', []),
        ('"string"', '"bytes"', []),
        ('"int"', '"long"', ["TYPE_MISMATCH"]),
        ('"float"', '"double"', ["TYPE_MISMATCH"]),
        ('"boolean"', '"int"', ["TYPE_MISMATCH"]),
        ('"string"', ENUM, ["TYPE_MISMATCH"]),
        (record("a:int", "b:int=1"), record("a:int"), []),
        (record("a:int", "b:int"), record("a:int"), ["READER_FIELD_MISSING_DEFAULT_VALUE"]),
        (record("a:int"), record("a:int", "b:int"), []),
        (record("a:string"), record("a:int"), ["TYPE_MISMATCH"]),
        (record("a:int", name="x.R"), record("a:int", name="y.R"), []),
        (record("a:int", name="S"), record("a:int", name="R"), ["NAME_MISMATCH"]),
        ('{"type":"record","name":"S","aliases":["R"],"fields":[]}', record(name="R"), []),
        ('{"type":"record","name":"R","fields":[{"name":"b","aliases":["a"],"type":"int"}]}', record("a:int"), []),
        (ENUM_C, ENUM, []),
        (ENUM, ENUM_C, ["MISSING_ENUM_SYMBOLS"]),
        (ENUM_C_DEFAULT, ENUM_C, []),
        ('{"type":"fixed","name":"F","size":4}', '{"type":"fixed","name":"F","size":8}', ["FIXED_SIZE_MISMATCH"]),
        ('{"type":"fixed","name":"G","size":4}', '{"type":"fixed","name":"F","size":4}', ["NAME_MISMATCH"]),
        ('["null","int"]', '"int"', []),
        ('["null","long"]', '"int"', []),
        ('["null","string"]', '"int"', ["MISSING_UNION_BRANCH"]),
        ('"int"', '["null","int"]', ["TYPE_MISMATCH"]),
        ('["null","int","string"]', '["null","int"]', []),
        ('["null","int"]', '["null","int","string"]', ["MISSING_UNION_BRANCH"]),
        ('"long"', '["int","long"]', []),
        ('{"type":"array","items":"long"}', '{"type":"array","items":"int"}', []),
        ('{"type":"array","items":"int"}', '{"type":"array","items":"string"}', ["TYPE_MISMATCH"]),
        ('{"type":"map","values":"long"}', '{"type":"map","values":"int"}', []),
        ('{"type":"map","values":"long"}', '{"type":"array","items":"long"}', ["TYPE_MISMATCH"]),
        (LIST % "long", LIST % "int", []),
        (LIST % "int", LIST % "long", ["TYPE_MISMATCH", "MISSING_UNION_BRANCH"][:1]),
        ('{"type":"int","logicalType":"date"}', '"int"', []),
    ],
)
def test_a_reader_reads_what_the_resolution_rules_say(reader: str, writer: str, found: list[str]) -> None:
    assert why(reader, writer) == found


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "3", "null", "{}", '"nothing"', '{"type":"record","name":"R"}', '{"type":"array"}', '{"type":"map"}',
        '{"type":"record","fields":[]}', '["int","int"]', '[["int"]]', '{"type":"enum","name":"E","symbols":["A","A"]}',
        '{"type":"enum","name":"E","symbols":["A"],"default":"B"}', '{"type":"fixed","name":"F","size":-1}',
        '{"type":"record","name":"a b","fields":[]}',
        '{"type":"record","name":"R","fields":[{"name":"1","type":"int"}]}',
        '{"type":"record","name":"R","fields":[{"name":"a","type":"int"},{"name":"a","type":"int"}]}',
        '{"type":"record","name":"R","fields":[{"name":"a","type":"int","default":"x"}]}',
        '[{"type":"fixed","name":"F","size":1},{"type":"fixed","name":"F","size":2}]',
        '{"type":{"type":"nothing"}}', '{"type":"record","name":"R","namespace":7,"fields":[]}',
        "[" * 5_000, '{"type":' * 200 + '"int"' + "}" * 200, '{"type":"array","items":' * 300 + '"int"' + "}" * 300,
    ],
)  # fmt: skip
def test_what_is_no_schema_is_refused(text: str) -> None:
    with pytest.raises(RegistryError) as refused:
        avro(text)
    assert refused.value.code == 42201


def test_a_comparison_ends_after_so_many_steps() -> None:
    wide = [f'{{"type":"record","name":"R{n}","fields":[{{"name":"a","type":"int"}}]}}' for n in range(600)]
    reader = f"[{','.join(text.replace('int', 'string') for text in wide)}]"
    with pytest.raises(RegistryError, match="too many steps"):
        find_problems("BACKWARD", avro(reader), avro(f"[{','.join(wide)}]"), StepBudget(10_000))


def test_types_of_other_schemas_are_known_by_their_full_names() -> None:
    inner = SchemaRow(1, "AVRO", record("x:int", name="n.Inner"))
    references = (Reference("n.Inner", "inner", 1),)
    places = {("inner", 1): inner}
    old = parse_schema(SubmittedSchema("AVRO", record("i:n.Inner", name="n.Outer"), references), places)
    wider = {("inner", 1): SchemaRow(2, "AVRO", record("x:long", name="n.Inner"))}
    new = parse_schema(SubmittedSchema("AVRO", record("i:Inner", name="n.Outer"), references), wider)
    assert find_problems("BACKWARD", new, old, StepBudget()) == []
    assert find_problems("FORWARD", new, old, StepBudget()) != []
    with pytest.raises(RegistryError, match="twice"):
        parse_schema(SubmittedSchema("AVRO", record("x:int", name="n.Inner"), references), places)
    with pytest.raises(RegistryError, match="not Avro"):
        parse_schema(SubmittedSchema("AVRO", '"int"', references), {("inner", 1): SchemaRow(1, "JSON", "{}")})


def test_a_name_that_is_not_in_the_namespace_is_the_one_without_a_namespace_as_in_java() -> None:
    places = {("common", 1): SchemaRow(1, "AVRO", record("x:int", name="Common"))}
    references = (Reference("Common", "common", 1),)
    text = record("c:Common", 'l:{"type":"array","items":"Common"}', 'u:["null","Common"]=null', name="com.x.Order")
    plain = parse_schema(SubmittedSchema("AVRO", text, references), places)
    normal = parse_schema(SubmittedSchema("AVRO", text, references, normalize=True), places)
    assert "com.x.Common" not in normal.text + plain.text
    for found in (plain, normal):
        again = parse_schema(SubmittedSchema("AVRO", found.text, references, normalize=True), places)
        assert (again.text, again.digest) == (normal.text, normal.digest)
    wider = {("common", 2): SchemaRow(2, "AVRO", record("x:long", name="Common"))}
    new = parse_schema(SubmittedSchema("AVRO", text, (Reference("Common", "common", 2),)), wider)
    assert find_problems("BACKWARD", new, plain, StepBudget()) == []
    assert find_problems("FORWARD", new, plain, StepBudget()) != []
    # A schema that refers to this one sees its names.
    order = SchemaRow(3, "AVRO", text, references=references)
    outer = record("o:Order", "c:Common", name="com.x.Outer")
    places |= {("order", 1): order}
    parse_schema(SubmittedSchema("AVRO", outer, (*references, Reference("com.x.Order", "order", 1))), places)
    with pytest.raises(RegistryError, match="unknown type"):
        parse_schema(SubmittedSchema("AVRO", text), {})
    # A type of the own namespace takes precedence.
    own = record(f"o:{record('y:string', name='Common')}", "c:Common", name="com.x.Order")
    found = parse_schema(SubmittedSchema("AVRO", own, references, normalize=True), places)
    assert found.text.count("com.x.Common") == 2


def test_a_type_without_a_namespace_keeps_it_in_the_normal_form() -> None:
    bare = '{"type":"record","name":"Common","namespace":"","fields":[{"name":"x","type":"int"}]}'
    text = record(f"a:{bare}", "b:Common", name="com.x.Order")
    normal = parse_schema(SubmittedSchema("AVRO", text, normalize=True), {})
    assert "com.x.Common" not in normal.text
    assert parse_schema(SubmittedSchema("AVRO", normal.text, normalize=True), {}).text == normal.text
    assert find_problems("FULL", avro(text), avro(normal.text), StepBudget()) == []


def test_levels_name_versions_and_directions() -> None:
    assert list(versions_to_compare("BACKWARD", [1, 2, 5])) == [5]
    assert list(versions_to_compare("FULL_TRANSITIVE", [1, 2, 5])) == [5, 2, 1]
    assert list(versions_to_compare("NONE", [1, 2])) == [] and list(versions_to_compare("FULL", [])) == []
    plain, more = avro(record("a:int")), avro(record("a:int", "b:int"))
    assert find_problems("BACKWARD", more, plain, StepBudget()) and not find_problems(
        "FORWARD", more, plain, StepBudget()
    )
    assert find_problems("FULL", more, plain, StepBudget()) and not find_problems("NONE", more, plain, StepBudget())


PLAIN = st.sampled_from(["null", "boolean", "int", "long", "float", "double", "bytes", "string"])


def _types() -> st.SearchStrategy[Any]:
    return st.recursive(
        PLAIN,
        lambda inner: st.one_of(
            st.builds(lambda items: {"type": "array", "items": items}, inner),
            st.builds(lambda values: {"type": "map", "values": values}, inner),
            st.lists(PLAIN, min_size=1, max_size=3, unique=True),
        ),
        max_leaves=4,
    )


VALUES: dict[str, Any] = {
    "null": None, "boolean": True, "int": 7, "long": 1 << 40, "float": 0.5, "double": 0.25, "bytes": b"b",
    "string": "s",
}  # fmt: skip


def _values(kind: Any) -> list[Any]:
    """Return values that a writer of this type may write, one for each branch."""
    if isinstance(kind, list):
        return [value for branch in kind for value in _values(branch)]
    if isinstance(kind, dict):
        inner = _values(kind.get("items", kind.get("values")))
        return [inner] if kind["type"] == "array" else [{str(n): value for n, value in enumerate(inner)}]
    return [VALUES[kind]]


@settings(max_examples=300, deadline=None)
@given(_types(), _types())
def test_what_is_called_compatible_is_read_by_another_implementation(reader: Any, writer: Any) -> None:
    if why(json.dumps(reader), json.dumps(writer)):
        return
    for value in _values(writer):
        data = io.BytesIO()
        fastavro.schemaless_writer(data, fastavro.parse_schema(writer), value)
        data.seek(0)
        fastavro.schemaless_reader(data, fastavro.parse_schema(writer), fastavro.parse_schema(reader))


@settings(max_examples=100, deadline=None)
@given(_types())
def test_every_schema_reads_itself_and_its_canonical_form_is_it(kind: Any) -> None:
    parsed = avro(json.dumps(kind, indent=2))
    assert avro(parsed.text).digest == parsed.digest
    assert why(parsed.text, parsed.text) == []
