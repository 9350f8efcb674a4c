"""Model of a Protobuf file's types with their references resolved. A recursive type is a graph: messages compare by
identity."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

SCALAR_GROUPS = {
    "int32": "number", "int64": "number", "uint32": "number", "uint64": "number", "bool": "number", "enum": "number",
    "sint32": "zigzag", "sint64": "zigzag",
    "string": "bytes", "bytes": "bytes",
    "fixed32": "fixed32", "sfixed32": "fixed32",
    "fixed64": "fixed64", "sfixed64": "fixed64",
    "float": "float", "double": "double",
}  # fmt: skip
"""Types that read each other have the same group (protobuf's guide, "Updating A Message Type")."""

TYPES = (
    "", "double", "float", "int64", "uint64", "int32", "fixed64", "fixed32", "bool", "string", "group", "message",
    "bytes", "uint32", "enum", "sfixed32", "sfixed64", "sint32", "sint64",
)  # fmt: skip
"""Type names by number: FieldDescriptorProto.Type."""

REQUIRED, REPEATED = 2, 3
"""Numbers of FieldDescriptorProto.Label; 1 is optional."""


class Message:
    """A message type. `name` is without its package and includes the names of enclosing messages."""

    __slots__ = ("fields", "map_entry", "name", "nested", "oneofs")

    def __init__(self, name: str, map_entry: bool) -> None:
        self.name = name
        self.map_entry = map_entry
        self.fields: dict[int, MessageField] = {}
        self.oneofs: dict[str, set[int]] = {}
        """Name → numbers of its fields. A oneof that only represents `optional` is left out."""
        self.nested: dict[str, Message] = {}


class MessageField(NamedTuple):
    """A field. `type` is a key of SCALAR_GROUPS, `message` or `group`; `of` is the message type."""

    number: int
    name: str
    type: str
    label: int
    of: Message | None


class ProtobufModel(NamedTuple):
    """Model of a file. `everything` maps full names to messages, imported ones included; `descriptor` is a
    FileDescriptorProto."""

    messages: dict[str, Message]
    everything: dict[str, Message]
    descriptor: Any


def build_model(descriptor: Any, imported: Iterable[Any]) -> ProtobufModel:
    """Build the model from linked FileDescriptorProtos, in which every type's name is full and begins with a dot."""
    everything: dict[str, Message] = {}
    open_fields: list[tuple[Message, Any]] = []
    for file in imported:
        _collect_messages(file.message_type, file.package, "", everything, open_fields)
    own = _collect_messages(descriptor.message_type, descriptor.package, "", everything, open_fields)
    for message, field in open_fields:
        of = everything.get(field.type_name.removeprefix(".")) if field.type in (10, 11) else None
        message.fields[field.number] = MessageField(field.number, field.name, TYPES[field.type], field.label, of)
    return ProtobufModel(own, everything, descriptor)


def _collect_messages(
    types: Iterable[Any],
    package: str,
    outer: str,
    everything: dict[str, Message],
    open_fields: list[tuple[Message, Any]],
) -> dict[str, Message]:
    found: dict[str, Message] = {}
    for described in types:
        name = f"{outer}.{described.name}" if outer else described.name
        message = Message(name, described.options.map_entry)
        everything[f"{package}.{name}" if package else name] = message
        found[described.name] = message
        for field in described.field:
            open_fields.append((message, field))
            if field.HasField("oneof_index") and not field.proto3_optional:
                message.oneofs.setdefault(described.oneof_decl[field.oneof_index].name, set()).add(field.number)
        message.nested = _collect_messages(described.nested_type, package, name, everything, open_fields)
    return found
