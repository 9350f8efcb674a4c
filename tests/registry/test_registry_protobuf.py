"""Protobuf: files as texts and as descriptors, and their compatibility."""

from __future__ import annotations

import pytest

from tidemill.metastore.rows.registry import Reference, SchemaRow
from tidemill.registry.errors import RegistryError
from tidemill.registry.limits import StepBudget
from tidemill.registry.protobuf import compile as compiler
from tidemill.registry.protobuf.parse import encode_descriptor
from tidemill.registry.schema import ParsedSchema, SubmittedSchema
from tidemill.registry.schema_types import find_problems, parse_schema, submitted_from_row

pytestmark = pytest.mark.processes

_kept: dict[str, ParsedSchema] = {}


def proto(body: str, head: str = 'syntax = "proto3";') -> ParsedSchema:
    text = f"{head} {body}"
    if text not in _kept:
        _kept[text] = parse_schema(SubmittedSchema("PROTOBUF", text), {})
    return _kept[text]


def why(reader: ParsedSchema, writer: ParsedSchema) -> list[str]:
    return [
        message.partition('"')[2].partition('"')[0]
        for message in find_problems("BACKWARD", reader, writer, StepBudget())
    ]


BASE = "message M { int32 a = 1; string b = 2; N n = 3; map<string, int32> m = 4; repeated int32 r = 5; } message N {}"


def changed(old: str, new: str) -> ParsedSchema:
    assert old in BASE
    return proto(BASE.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("a = 1", "renamed = 1", []),
        ("int32 a", "int64 a", []),
        ("int32 a", "bool a", []),
        ("int32 a", "sint32 a", ["FIELD_SCALAR_KIND_CHANGED"]),
        ("int32 a", "string a", ["FIELD_SCALAR_KIND_CHANGED"]),
        ("int32 a", "N a", ["FIELD_KIND_CHANGED"]),
        ("int32 a", "repeated int32 a", ["FIELD_NUMERIC_LABEL_CHANGED"]),
        ("int32 a", "optional int32 a", []),
        ("string b", "bytes b", []),
        ("string b", "repeated string b", []),
        ("int32 a = 1;", "", []),
        ("int32 a = 1;", "int32 a = 1; double z = 9;", []),
        ("message N {}", "message N { int32 more = 1; }", []),
        ("N n = 3;", "map<string, string> n = 3;", ["FIELD_KIND_CHANGED"]),
        ("map<string, int32>", "map<string, string>", ["FIELD_SCALAR_KIND_CHANGED"]),
        ("int32 a = 1; string b = 2;", "oneof o { int32 a = 1; string b = 2; }", ["MULTIPLE_FIELDS_MOVED_TO_ONEOF"]),
        ("int32 a = 1;", "oneof o { int32 a = 1; }", []),
    ],
)
def test_a_changed_file_reads_what_the_file_before_it_wrote(old: str, new: str, found: list[str]) -> None:
    assert why(changed(old, new), proto(BASE)) == found


def test_messages_and_oneofs_may_grow_but_not_shrink() -> None:
    one = proto(
        "message M { oneof o { int32 a = 1; string b = 2; } int32 c = 3; } message N {} enum E { X = 0; Y = 1; }"
    )
    assert why(proto("message M { oneof o { int32 a = 1; string b = 2; } }"), one) == ["MESSAGE_REMOVED"]
    more = "message M { oneof o { int32 a = 1; string b = 2; bool d = 4; } int32 c = 3; } message N {} message P {}"
    assert why(proto(more), one) == []
    assert why(one, proto(more)) == ["ONEOF_FIELD_REMOVED", "MESSAGE_REMOVED"]
    moved = "message M { oneof o { int32 a = 1; string b = 2; int32 c = 3; } } message N {}"
    assert why(proto(moved), one) == ["FIELD_MOVED_TO_EXISTING_ONEOF"]


def test_required_fields_come_and_go_with_neither() -> None:
    old = proto("message M { optional int32 a = 1; }", 'syntax = "proto2";')
    new = proto("message M { optional int32 a = 1; required int32 b = 2; }", 'syntax = "proto2";')
    assert why(new, old) == ["REQUIRED_FIELD_ADDED"] and why(old, new) == ["REQUIRED_FIELD_REMOVED"]
    assert why(proto("message M { required int32 a = 1; }", 'syntax = "proto2";'), old) == ["REQUIRED_FIELD_ADDED"]


def test_a_recursive_message_is_compared_once() -> None:
    old = proto("message T { int32 v = 1; repeated T kids = 2; }")
    assert why(proto("message T { int64 v = 1; repeated T kids = 2; }"), old) == []
    assert why(proto("message T { string v = 1; repeated T kids = 2; }"), old) == ["FIELD_SCALAR_KIND_CHANGED"]


def test_what_is_stored_is_understood_again_without_its_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    first = proto(BASE)
    monkeypatch.setattr(compiler, "compile_text", None)
    row = SchemaRow(1, "PROTOBUF", first.text, (), first.digest, first.descriptor)
    again = parse_schema(submitted_from_row(row), {})
    assert again.digest == first.digest and why(again, first) == []


@pytest.mark.parametrize(
    "text",
    [
        "abcd", "message M {", 'syntax = "proto3"; import "gone.proto";', 'syntax = "proto3"; message M { N n = 1; }',
        'syntax = "proto3"; message M { int32 a = 1; int32 b = 1; }', 'syntax = "proto9";', "CgNhYmM=",
        'syntax = "proto3"; import "/etc/passwd";', 'syntax = "proto3"; ' + "message A { " * 400 + "}" * 400,
    ],
)  # fmt: skip
def test_what_is_no_file_is_refused_in_the_compilers_words(text: str) -> None:
    if text == "CgNhYmM=":  # a descriptor with only a name is still a file
        assert parse_schema(SubmittedSchema("PROTOBUF", text), {}).descriptor
        return
    with pytest.raises(RegistryError) as refused:
        parse_schema(SubmittedSchema("PROTOBUF", text), {})
    assert refused.value.code == 42201
    assert "/tmp" not in refused.value.message


def test_types_of_known_files_stay_what_they_are() -> None:
    text = 'import "google/protobuf/struct.proto"; message M { google.protobuf.Struct s = 1; %s }'
    assert why(proto(text % "int32 more = 2;"), proto(text % "")) == []
    other = proto('import "google/protobuf/struct.proto"; message M { google.protobuf.Value s = 1; }')
    assert why(other, proto(text % "")) == ["FIELD_NAMED_TYPE_CHANGED"]


def test_a_known_file_may_itself_be_registered_and_referred_to() -> None:
    from google.protobuf import timestamp_pb2

    known = parse_schema(SubmittedSchema("PROTOBUF", encode_descriptor(timestamp_pb2.DESCRIPTOR.serialized_pb)), {})
    row = SchemaRow(1, "PROTOBUF", known.text, (), known.digest, known.descriptor)
    references = (Reference("google/protobuf/timestamp.proto", "known", 1),)
    text = 'syntax = "proto3"; import "google/protobuf/timestamp.proto"; message M { google.protobuf.Timestamp t = 1; }'
    assert parse_schema(SubmittedSchema("PROTOBUF", text, references), {("known", 1): row}).descriptor


def test_imports_are_references_and_may_be_changed_only_as_messages_may() -> None:
    line = proto("message Line { string sku = 1; }")
    other = proto("message Line { int64 sku = 1; }")
    references = (Reference("line.proto", "line", 1),)
    text = 'syntax = "proto3"; import "line.proto"; import "google/type/money.proto"; message O { Line l = 1; }'

    def importing(of: ParsedSchema) -> ParsedSchema:
        row = SchemaRow(1, "PROTOBUF", of.text, (), of.digest, of.descriptor)
        return parse_schema(SubmittedSchema("PROTOBUF", text, references), {("line", 1): row})

    assert why(importing(line), importing(line)) == []
    assert importing(line).deep != importing(other).deep
