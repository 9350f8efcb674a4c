"""The text generated for a descriptor is equivalent: it compiles to the same schema."""

from __future__ import annotations

import pytest
from google.protobuf import descriptor_pb2

from tidemill.registry.protobuf.parse import encode_descriptor
from tidemill.registry.protobuf.text import proto_text
from tidemill.registry.schema import SubmittedSchema
from tidemill.registry.schema_types import parse_schema

TEXTS = {
    "proto3": r"""
        syntax = "proto3";
        package shop.v1;
        import "google/protobuf/timestamp.proto";
        option java_package = "com.shop \"x\" \\ ü";
        option java_multiple_files = true;
        option optimize_for = CODE_SIZE;
        enum Color {
          option allow_alias = true;
          RED = 0; ROT = 0 [deprecated = true]; BLUE = 5;
          reserved 2, 6 to 9;
          reserved "X";
        }
        message Order {
          option deprecated = true;
          message Line { string sku = 1 [json_name = "SKU"]; Color color = 2; repeated int32 n = 3 [packed = false]; }
          int64 id = 1;
          optional string note = 2;
          repeated Line lines = 3;
          map<string, Line> by_name = 4;
          oneof pay { bytes card = 5; double cash = 6; }
          google.protobuf.Timestamp at = 7;
          Order parent = 8;
          reserved 20, 30 to 40, 1000 to max;
          reserved "old";
        }
        service Shop {
          rpc Get(Order) returns (Order);
          rpc All(stream Order) returns (stream Order) { option deprecated = true; }
        }
    """,
    "proto2": r"""
        syntax = "proto2";
        message M {
          required int32 a = 1 [default = -7];
          optional string s = 2 [default = "a\n\"b\" ü"];
          optional bytes b = 3 [default = "\001\"x"];
          optional double d = 4 [default = inf];
          optional E e = 5 [default = Y];
          optional bool t = 6 [default = true];
          optional group G = 7 { optional int32 inner = 1; }
          extensions 100 to 199, 500 to max;
          enum E { X = 1; Y = -2; }
          extend M { optional int32 more = 100; }
        }
        extend M { repeated M others = 101; }
    """,
    "editions": """
        edition = "2023";
        option features.field_presence = IMPLICIT;
        message M { int32 a = 1 [features.field_presence = EXPLICIT]; repeated int32 r = 2; reserved gone; }
    """,
    "empty": 'syntax = "proto3";',
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.processes
def test_the_text_of_a_descriptor_is_the_schema_that_it_is(name: str) -> None:
    first = parse_schema(SubmittedSchema("PROTOBUF", TEXTS[name]), {})
    given = parse_schema(SubmittedSchema("PROTOBUF", encode_descriptor(first.descriptor)), {})
    assert given.digest == first.digest and given.text.startswith(("syntax", "edition"))
    again = parse_schema(SubmittedSchema("PROTOBUF", given.text), {})
    assert again.digest == first.digest, given.text


def test_what_a_text_could_not_say_stays_a_descriptor() -> None:
    file = descriptor_pb2.FileDescriptorProto(name="m.proto", syntax="proto3")
    # an unknown extension
    file.message_type.add(name="M").options.MergeFromString(b"\xc2\x3e\x01x")
    assert proto_text(file) is None
    parsed = parse_schema(SubmittedSchema("PROTOBUF", encode_descriptor(file.SerializeToString())), {})
    assert parsed.text == "" and parsed.descriptor
