"""Conversion of a linked FileDescriptorProto to an equivalent .proto text, for people and for clients that read texts.

The text lacks what the descriptor lacks: comments, and the order of different elements. There is no result where the
text would be incomplete: for options that are extensions, whose definitions the descriptor does not carry.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tidemill.registry.protobuf.model import REPEATED, REQUIRED, TYPES

GROUP = 10
LAST_FIELD = 536_870_912
"""Exclusive upper limit of field numbers."""

LAST_ENUM = 2_147_483_647
INDENT = "  "


class _NotExpressibleError(Exception):
    """Raised when a text cannot express the whole descriptor."""


def proto_text(file: Any) -> str | None:
    """Return the .proto text of a linked descriptor, or None if the text would be incomplete."""
    try:
        return "\n".join(_file(file)) + "\n"
    except _NotExpressibleError:
        return None


def _file(file: Any) -> Iterator[str]:
    syntax = file.syntax or "proto2"
    yield _edition(file) if syntax == "editions" else f'syntax = "{syntax}";'
    if file.package:
        yield f"package {file.package};"
    for place, name in enumerate(file.dependency):
        kind = "public " if place in file.public_dependency else "weak " if place in file.weak_dependency else ""
        yield f"import {kind}{_quoted(name)};"
    yield from _options(file.options)
    for enum in file.enum_type:
        yield from _enum(enum)
    for message in file.message_type:
        yield from _message(message, syntax)
    yield from _extensions(file.extension, syntax, {})
    for service in file.service:
        yield from _block(f"service {service.name}", _service(service))


def _edition(file: Any) -> str:
    name = type(file).DESCRIPTOR.fields_by_name["edition"].enum_type.values_by_number[file.edition].name
    return f'edition = "{name.removeprefix("EDITION_")}";'


def _block(head: str, lines: Iterator[str]) -> Iterator[str]:
    yield f"{head} {{"
    for line in lines:
        yield INDENT + line
    yield "}"


# messages -------------------------------------------------------------------------------------------


def _message(message: Any, syntax: str) -> Iterator[str]:
    yield from _block(f"message {message.name}", _message_body(message, syntax))


def _message_body(message: Any, syntax: str) -> Iterator[str]:
    nested = {one.name: one for one in message.nested_type}
    groups = {
        field.type_name.rpartition(".")[2] for field in (*message.field, *message.extension) if field.type == GROUP
    }
    yield from _options(message.options)
    for enum in message.enum_type:
        yield from _enum(enum)
    for name, one in nested.items():
        if not one.options.map_entry and name not in groups:
            yield from _message(one, syntax)
    written: set[int] = set()
    for field in message.field:
        if not field.HasField("oneof_index") or field.proto3_optional:
            yield from _field(field, syntax, nested)
        elif field.oneof_index not in written:
            written.add(field.oneof_index)
            oneof = message.oneof_decl[field.oneof_index]
            yield from _block(f"oneof {oneof.name}", _oneof(message, field.oneof_index, oneof, syntax, nested))
    yield from _extensions(message.extension, syntax, nested)
    for ranged in message.extension_range:
        if ranged.HasField("options"):
            raise _NotExpressibleError
        yield f"extensions {_range(ranged.start, ranged.end, LAST_FIELD)};"
    for ranged in message.reserved_range:
        yield f"reserved {_range(ranged.start, ranged.end, LAST_FIELD)};"
    yield from _reserved_names(message.reserved_name, syntax)


def _oneof(message: Any, index: int, oneof: Any, syntax: str, nested: dict[str, Any]) -> Iterator[str]:
    yield from _options(oneof.options)
    for field in message.field:
        if field.HasField("oneof_index") and field.oneof_index == index:
            yield from _field(field, syntax, nested, labelled=False)


def _field(field: Any, syntax: str, nested: dict[str, Any], *, labelled: bool = True) -> Iterator[str]:
    local = nested.get(field.type_name.rpartition(".")[2])
    if local is not None and local.options.map_entry:
        key, value = local.field
        label, kind = "", f"map<{_type(key)}, {_type(value)}>"
    else:
        label, kind = _label(field, syntax) if labelled else "", _type(field)
    options = _field_options(field)
    if field.type == GROUP:
        if local is None:
            raise _NotExpressibleError
        yield from _block(f"{label}group {local.name} = {field.number}{options}", _message_body(local, syntax))
    else:
        yield f"{label}{kind} {field.name} = {field.number}{options};"


def _label(field: Any, syntax: str) -> str:
    if field.label == REPEATED:
        return "repeated "
    if syntax == "proto2":
        return "required " if field.label == REQUIRED else "optional "
    return "optional " if field.proto3_optional else ""


def _type(field: Any) -> str:
    return str(field.type_name) or TYPES[field.type]


def _field_options(field: Any) -> str:
    found = []
    if field.HasField("default_value"):
        found.append(f"default = {_default(field)}")
    if field.HasField("json_name"):
        found.append(f"json_name = {_quoted(field.json_name)}")
    found += [f"{name} = {value}" for name, value in _option_literals(field.options)]
    return f" [{', '.join(found)}]" if found else ""


def _default(field: Any) -> str:
    kind = TYPES[field.type]
    if kind == "bytes":
        return f'"{field.default_value}"'  # already escaped
    return _quoted(field.default_value) if kind == "string" else str(field.default_value)


def _extensions(fields: Sequence[Any], syntax: str, nested: dict[str, Any]) -> Iterator[str]:
    for field in fields:
        yield from _block(f"extend {field.extendee}", _field(field, syntax, nested))


# enums and services ---------------------------------------------------------------------------------


def _enum(enum: Any) -> Iterator[str]:
    yield from _block(f"enum {enum.name}", _constants(enum))


def _constants(enum: Any) -> Iterator[str]:
    yield from _options(enum.options)
    for value in enum.value:
        said = ", ".join(f"{name} = {text}" for name, text in _option_literals(value.options))
        yield f"{value.name} = {value.number}{f' [{said}]' if said else ''};"
    for ranged in enum.reserved_range:
        yield f"reserved {_range(ranged.start, ranged.end + 1, LAST_ENUM + 1)};"
    yield from _reserved_names(enum.reserved_name, "proto3")


def _service(service: Any) -> Iterator[str]:
    yield from _options(service.options)
    for method in service.method:
        takes = f"{'stream ' if method.client_streaming else ''}{method.input_type}"
        gives = f"{'stream ' if method.server_streaming else ''}{method.output_type}"
        head = f"rpc {method.name}({takes}) returns ({gives})"
        options = list(_options(method.options))
        if options:
            yield from _block(head, iter(options))
        else:
            yield f"{head};"


# options and literals -------------------------------------------------------------------------------


def _options(options: Any) -> Iterator[str]:
    for name, value in _option_literals(options):
        if name != "map_entry":
            yield f"option {name} = {value};"


def _option_literals(options: Any) -> list[tuple[str, str]]:
    """Return every option that is set, with its value as a literal."""
    from google.protobuf.unknown_fields import UnknownFieldSet

    if len(UnknownFieldSet(options)):
        raise _NotExpressibleError
    found = []
    for field, value in options.ListFields():
        if field.is_extension:
            raise _NotExpressibleError
        for one in value if field.is_repeated else [value]:
            found.append((field.name, _literal(field, one)))
    return found


def _literal(field: Any, value: Any) -> str:
    from google.protobuf.text_format import MessageToString

    if field.message_type is not None:
        return f"{{ {MessageToString(value, as_one_line=True)} }}"
    if field.enum_type is not None:
        return str(field.enum_type.values_by_number[value].name)
    if isinstance(value, bool):
        return "true" if value else "false"
    return _quoted(value) if isinstance(value, str) else str(value)


def _quoted(text: str) -> str:
    """Return a string literal; characters other than printable ASCII are escaped by their bytes."""
    found = ""
    for letter in text:
        if letter in '"\\':
            found += f"\\{letter}"
        elif " " <= letter <= "~":
            found += letter
        else:
            found += "".join(f"\\{byte:03o}" for byte in letter.encode())
    return f'"{found}"'


def _range(start: int, end: int, most: int) -> str:
    """Format a range; `end` is exclusive."""
    if end >= most:
        return f"{start} to max"
    return str(start) if end == start + 1 else f"{start} to {end - 1}"


def _reserved_names(names: Sequence[str], syntax: str) -> Iterator[str]:
    for name in names:
        yield f"reserved {name if syntax == 'editions' else _quoted(name)};"
