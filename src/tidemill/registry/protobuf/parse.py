"""A Protobuf schema's text, or its serialized descriptor in base64 → its model.

The digest is of the linked descriptor without its name, comments and derived names, so a file is one schema however it
was given. A reference's name is the file that is imported. Imports below google/protobuf and google/type need none.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

from tidemill.metastore.rows.registry import Reference
from tidemill.registry.errors import bad_schema
from tidemill.registry.limits import shown
from tidemill.registry.parsed_schema import Parsed, Resolved, digest_of
from tidemill.registry.protobuf.compile import compile_text
from tidemill.registry.protobuf.model import model_of
from tidemill.registry.protobuf.text import text_of

OWN_NAME = "schema.proto"
KNOWN = {
    "google.protobuf": (
        "any", "source_context", "type", "api", "descriptor", "duration", "empty", "field_mask", "struct", "timestamp",
        "wrappers",
    ),
    "google.type": (
        "calendar_period", "color", "date", "datetime", "dayofweek", "decimal", "expr", "fraction", "interval",
        "latlng", "localized_text", "money", "month", "phone_number", "postal_address", "quaternion", "timeofday",
    ),
}  # fmt: skip
"""Files that every schema may import, those before others that import them."""


def parse(text: str, references: Sequence[Reference], resolved: Sequence[Resolved], normalize: bool) -> Parsed:
    """`resolved`: everything that is referred to, what is imported before what imports it. Raises Refused."""
    imported = []
    for found in resolved:
        if found.parsed.kind != "PROTOBUF":
            raise bad_schema(f"it refers to a schema that is not Protobuf: {shown(found.name)}")
        file = _decoded(found.parsed.descriptor)
        file.name = found.name
        imported.append(file)
    given = _from_base64(text)
    descriptor = given if given is not None else _compiled(text, imported)
    name = descriptor.name
    descriptor.name = OWN_NAME
    if normalize:
        _sort(descriptor)
    imported = [*_known(descriptor, imported), *imported]
    linked = _linked(descriptor, imported)
    _without_derived(linked)
    linked.ClearField("name")
    meaning = linked.SerializeToString(deterministic=True)
    linked.name = name if given is not None and name else OWN_NAME
    model = model_of(linked, imported)
    stored = text if given is None and not normalize else text_of(linked) or ""
    digest = digest_of("PROTOBUF", meaning, references)
    return Parsed("PROTOBUF", stored, tuple(references), model, digest, linked.SerializeToString(deterministic=True))


def _sort(file: Any) -> None:
    """Normal order, as Confluent's registry has it: imports by name, fields and reserved ranges by number. The order of
    enum values stays: the first one is the default."""
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


def serialized(descriptor: bytes) -> str:
    """What Confluent's clients call the format `serialized`."""
    return base64.standard_b64encode(descriptor).decode("ascii")


def _from_base64(text: str) -> Any:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.message import DecodeError

    try:
        data = base64.b64decode(text.strip(), validate=True)
        file = FileDescriptorProto.FromString(data)
    except (binascii.Error, DecodeError, ValueError):
        return None
    # Four letters are base64 of something: a descriptor that says nothing is rather a text that is none.
    return file if data and (file.name or file.message_type or file.enum_type or file.syntax) else None


def _compiled(text: str, imported: Sequence[Any]) -> Any:
    given = {file.name for file in imported}
    return compile_text(text, OWN_NAME, [*(file for file in known_files() if file.name not in given), *imported])


def _known(descriptor: Any, imported: Sequence[Any]) -> list[Any]:
    """The known files that are imported, also by each other, but for those that a reference gives."""
    given = {file.name for file in imported}
    known = {file.name: file for file in known_files()}
    found: dict[str, Any] = {}

    def take(names: Sequence[str]) -> None:
        for name in names:
            if name in known and name not in given and name not in found:
                take(known[name].dependency)
                found[name] = known[name]

    for file in (descriptor, *imported):
        take(file.dependency)
    return list(found.values())


def _decoded(data: bytes) -> Any:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    return FileDescriptorProto.FromString(data)


def _linked(descriptor: Any, imported: Sequence[Any]) -> Any:
    """As a pool understands it: types exist, names and numbers are not given twice."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.descriptor_pool import DescriptorPool

    pool = DescriptorPool()
    try:
        for file in imported:
            pool.Add(file)
        pool.Add(descriptor)
        found = pool.FindFileByName(descriptor.name)
    except (TypeError, KeyError) as error:
        raise bad_schema(" ".join(str(error).split())[:300]) from error
    linked = FileDescriptorProto()
    found.CopyToProto(linked)
    return linked


def _without_derived(linked: Any) -> None:
    """Comments, and JSON names that follow from the fields' own: clients derive them, and they are half of the size."""
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
    """lower_snake → lowerCamel, as protoc derives it."""
    first, *rest = name.split("_")
    return first + "".join(part[:1].upper() + part[1:] for part in rest)


@cache
def known_files() -> tuple[Any, ...]:
    """FileDescriptorProtos of KNOWN, in the order in which a pool can take them."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    found: dict[str, Any] = {}

    def take(descriptor: Any) -> None:
        for other in descriptor.dependencies:
            take(other)
        if descriptor.name not in found:
            file = FileDescriptorProto()
            descriptor.CopyToProto(file)
            found[descriptor.name] = file

    for package, names in KNOWN.items():
        for name in names:
            take(import_module(f"{package}.{name}_pb2").DESCRIPTOR)
    return tuple(found.values())
