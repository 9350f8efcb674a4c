"""Parser of Protobuf schemas: text, or serialized descriptor in base64 → model.

The digest is that of the linked descriptor without its name, comments and derived names, so a file is the same schema
in either form. The name of a reference is the file that is imported. Imports below google/protobuf and google/type need
no reference.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

from tidemill.metastore.rows.registry import Reference
from tidemill.registry.errors import invalid_schema
from tidemill.registry.limits import shorten
from tidemill.registry.protobuf.compile import compile_text
from tidemill.registry.protobuf.model import build_model
from tidemill.registry.protobuf.text import proto_text
from tidemill.registry.schema import ParsedSchema, ResolvedReference, schema_digest

OWN_NAME = "schema.proto"
WELL_KNOWN_FILES = {
    "google.protobuf": (
        "any", "source_context", "type", "api", "descriptor", "duration", "empty", "field_mask", "struct", "timestamp",
        "wrappers",
    ),
    "google.type": (
        "calendar_period", "color", "date", "datetime", "dayofweek", "decimal", "expr", "fraction", "interval",
        "latlng", "localized_text", "money", "month", "phone_number", "postal_address", "quaternion", "timeofday",
    ),
}  # fmt: skip
"""Files that every schema may import, imported files before those that import them."""


def parse(
    text: str, references: Sequence[Reference], resolved: Sequence[ResolvedReference], normalize: bool
) -> ParsedSchema:
    """Parse a schema. `resolved` has every schema that is referred to, imported schemas before those that import
    them. Raises RegistryError."""
    imported = []
    for found in resolved:
        if found.parsed.kind != "PROTOBUF":
            raise invalid_schema(f"it refers to a schema that is not Protobuf: {shorten(found.name)}")
        file = _decode_descriptor(found.parsed.descriptor)
        file.name = found.name
        imported.append(file)
    given = _from_base64(text)
    descriptor = given if given is not None else _compile_text(text, imported)
    name = descriptor.name
    descriptor.name = OWN_NAME
    if normalize:
        _sort_file(descriptor)
    imported = [*_well_known_imports(descriptor, imported), *imported]
    linked = _link(descriptor, imported)
    _remove_derived(linked)
    linked.ClearField("name")
    meaning = linked.SerializeToString(deterministic=True)
    linked.name = name if given is not None and name else OWN_NAME
    model = build_model(linked, imported)
    stored = text if given is None and not normalize else proto_text(linked) or ""
    digest = schema_digest("PROTOBUF", meaning, references)
    return ParsedSchema(
        "PROTOBUF", stored, tuple(references), model, digest, linked.SerializeToString(deterministic=True)
    )


def _sort_file(file: Any) -> None:
    """Sort into the normal order of Confluent's registry: imports by name, fields and reserved ranges by number.
    Enum values are not sorted: the first one is the default."""
    public = {file.dependency[index] for index in file.public_dependency}
    weak = {file.dependency[index] for index in file.weak_dependency}
    names = sorted(file.dependency)
    file.dependency[:] = names
    file.public_dependency[:] = [index for index, name in enumerate(names) if name in public]
    file.weak_dependency[:] = [index for index, name in enumerate(names) if name in weak]
    _sort_by(file.extension, "number")
    for message in file.message_type:
        _sort_message(message)


def _sort_message(message: Any) -> None:
    _sort_by(message.field, "number")
    _sort_by(message.extension, "number")
    _sort_by(message.reserved_range, "start")
    _sort_by(message.extension_range, "start")
    message.reserved_name.sort()
    for nested in message.nested_type:
        _sort_message(nested)


def _sort_by(items: Any, name: str) -> None:
    items.sort(key=lambda item: getattr(item, name))


def encode_descriptor(descriptor: bytes) -> str:
    """Return the descriptor in the format that Confluent's clients call `encode_descriptor`."""
    return base64.standard_b64encode(descriptor).decode("ascii")


def _from_base64(text: str) -> Any:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.message import DecodeError

    try:
        data = base64.b64decode(text.strip(), validate=True)
        file = FileDescriptorProto.FromString(data)
    except (binascii.Error, DecodeError, ValueError):
        return None
    # Four letters may be valid base64: an empty descriptor is rather an invalid text.
    return file if data and (file.name or file.message_type or file.enum_type or file.syntax) else None


def _compile_text(text: str, imported: Sequence[Any]) -> Any:
    given = {file.name for file in imported}
    return compile_text(text, OWN_NAME, [*(file for file in well_known_files() if file.name not in given), *imported])


def _well_known_imports(descriptor: Any, imported: Sequence[Any]) -> list[Any]:
    """Return the known files that are imported, directly or by each other, except those that a reference provides."""
    given = {file.name for file in imported}
    known = {file.name: file for file in well_known_files()}
    found: dict[str, Any] = {}

    def add_files(names: Sequence[str]) -> None:
        for name in names:
            if name in known and name not in given and name not in found:
                add_files(known[name].dependency)
                found[name] = known[name]

    for file in (descriptor, *imported):
        add_files(file.dependency)
    return list(found.values())


def _decode_descriptor(data: bytes) -> Any:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    return FileDescriptorProto.FromString(data)


def _link(descriptor: Any, imported: Sequence[Any]) -> Any:
    """Link a file in a descriptor pool: types must exist, and names and numbers must be unique."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.descriptor_pool import DescriptorPool

    pool = DescriptorPool()
    try:
        for file in imported:
            pool.Add(file)
        pool.Add(descriptor)
        found = pool.FindFileByName(descriptor.name)
    except (TypeError, KeyError) as error:
        raise invalid_schema(" ".join(str(error).split())[:300]) from error
    linked = FileDescriptorProto()
    found.CopyToProto(linked)
    return linked


def _remove_derived(linked: Any) -> None:
    """Remove comments, and JSON names that follow from the fields' own names: clients derive them, and they are half
    of the size."""
    linked.ClearField("source_code_info")
    open_types = list(linked.message_type)
    fields = list(linked.extension)
    while open_types:
        message = open_types.pop()
        fields += [*message.field, *message.extension]
        open_types += message.nested_type
    for field in fields:
        if field.json_name == _json_name(field.name):
            field.ClearField("json_name")


def _json_name(name: str) -> str:
    """Convert lower_snake to lowerCamel, as protoc does."""
    first, *rest = name.split("_")
    return first + "".join(part[:1].upper() + part[1:] for part in rest)


@cache
def well_known_files() -> tuple[Any, ...]:
    """Return the FileDescriptorProtos of KNOWN, in an order in which a pool can add them."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    found: dict[str, Any] = {}

    def add_with_dependencies(descriptor: Any) -> None:
        for other in descriptor.dependencies:
            add_with_dependencies(other)
        if descriptor.name not in found:
            file = FileDescriptorProto()
            descriptor.CopyToProto(file)
            found[descriptor.name] = file

    for package, names in WELL_KNOWN_FILES.items():
        for name in names:
            add_with_dependencies(import_module(f"{package}.{name}_pb2").DESCRIPTOR)
    return tuple(found.values())
