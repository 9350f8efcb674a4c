"""Codecs of the rarely used APIs, compiled once per (key, version) by walking kio's generated dataclasses.

kio provides the schemas (names, types, nullability and tags of every version). The code that reads and writes is ours:
unknown tagged fields are skipped (kio raises), and values are plain dicts, integers and strings. One handler serves
every version, because

    reading   leaves out fields that a version lacks: handlers use `.get(name, default)`
    writing   uses the fields that the version has and ignores the rest; a field without a default is required

Field names are kio's (`throttle_time`, not `throttle_time_ms`); times are integers in milliseconds, UUIDs are
strings with dashes, error codes are integers.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from types import NoneType
from typing import Any, get_args

from kio import index
from kio.serial._introspect import classify_field, get_field_tag, get_schema_field_type, is_optional

from tidemill.kafka.error_codes import describe_code
from tidemill.kafka.schema import fetch, produce
from tidemill.kafka.schema.primitives import (
    MalformedFrameError,
    count_elements,
    read_bytes,
    read_length,
    read_string,
    read_uuid,
    read_uvarint,
    truncated_frame_error,
    uuid_bytes,
    write_length,
    write_string,
    write_uvarint,
)

Body = dict[str, Any]
Read = Callable[[memoryview, int], tuple[Any, int]]
Write = Callable[[bytearray, Any], None]

_FIXED = {
    "int8": ">b",
    "int16": ">h",
    "int32": ">i",
    "int64": ">q",
    "uint8": ">B",
    "uint16": ">H",
    "uint32": ">I",
    "uint64": ">Q",
    "float64": ">d",
    "error_code": ">h",
    "timedelta_i32": ">i",
    "timedelta_i64": ">q",
    "datetime_i64": ">q",
}
_MISSING = object()
_HAND_WRITTEN = {0: produce.FIRST_FLEXIBLE, 1: fetch.FIRST_FLEXIBLE}
"""First flexible version of the APIs that have hand-written codecs; their kio schemas are never loaded."""
_LATEST = {18: 4}
"""Newest version that kio knows, for APIs that serve a newer one.

ApiVersions 5 adds fields to the end of the request, which its handler reads, and has the response of version 4
(KIP-1242).
"""


def _request_schema(key: int, version: int) -> Any:
    return index.load_request_schema(key, min(version, _LATEST.get(key, version)))


def _response_schema(key: int, version: int) -> Any:
    return index.load_response_schema(key, min(version, _LATEST.get(key, version)))


def decode_request(key: int, version: int, view: memoryview, position: int) -> Body:
    """Decode the body of a request. Raises MalformedFrameError.

    Bytes after the body are ignored, as Kafka does: librdkafka 2.16 sends three of them when it requests all topics
    (Metadata 9 and later, an array count of four bytes instead of a varint).
    """
    body, _ = _request_reader(key, version)(view, position)
    assert isinstance(body, dict)
    return body


def encode_response(key: int, version: int, body: Body) -> bytearray:
    out = bytearray()
    _response_writer(key, version)(out, body)
    return out


def encode_field(key: int, version: int, path: tuple[str, ...], value: Any) -> bytes:
    """Encode one array of structs of a response, named by the path of arrays around it.

    The bytes can replace the array's value in the response.
    """
    out = bytearray()
    _writer_of(key, version, path)(out, value)
    return bytes(out)


def compile_codecs(key: int, version: int) -> None:
    """Compile the codecs ahead of the first request, which would load kio's module and compile on the loop: 3 to 10 ms
    each.
    """
    if key not in _HAND_WRITTEN:
        is_flexible(key, version)
        _request_reader(key, version)
        _response_writer(key, version)


@cache
def _request_reader(key: int, version: int) -> Read:
    schema: Any = _request_schema(key, version)
    return _struct_reader(schema)


@cache
def _response_writer(key: int, version: int) -> Write:
    schema: Any = _response_schema(key, version)
    return _struct_writer(schema)


@cache
def _writer_of(key: int, version: int, path: tuple[str, ...]) -> Write:
    schema: Any = _response_schema(key, version)
    for name in path:
        field = next(each for each in dataclasses.fields(schema) if each.name == name)
        flexible, schema = schema.__flexible__, classify_field(field).type_
    return _field_writer(field, flexible)


@cache
def is_flexible(key: int, version: int) -> bool:
    """Return whether the request has header v2 (tagged fields)."""
    if key in _HAND_WRITTEN:
        return version >= _HAND_WRITTEN[key]
    return bool(_request_schema(key, version).__flexible__)


@cache
def throttle_offset(key: int, version: int) -> int:
    """Return the byte position of `throttle_time_ms` in a response; −1 if it is absent or has no fixed position."""
    at = 0
    for field in dataclasses.fields(_response_schema(key, version)):
        if field.name == "throttle_time":
            return at
        fixed = _FIXED.get(field.metadata.get("kafka_type", ""))
        if fixed is None:
            break
        at += struct.calcsize(fixed)
    return -1


def response_fields(key: int, version: int) -> dict[str, Any]:
    """Return the names of a response's fields as a tree, for the test that no handler misspells one."""
    return _names(_response_schema(key, version))


def _names(schema: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for field in dataclasses.fields(schema):
        inner: Any = classify_field(field).type_
        tree[field.name] = _names(inner) if _is_struct(inner) else {}
    return tree


def _is_struct(inner: Any) -> bool:
    return dataclasses.is_dataclass(inner)


# readers -----------------------------------------------------------------------------------------


@cache
def _struct_reader(schema: Any) -> Read:
    flexible: bool = schema.__flexible__
    plain: list[tuple[str, Read]] = []
    tagged: dict[int, tuple[str, Read]] = {}
    for field in dataclasses.fields(schema):
        tag = get_field_tag(field) if "tag" in field.metadata else None
        reader = _field_reader(field, flexible)
        if tag is None:
            plain.append((field.name, reader))
        else:
            tagged[int(tag)] = (field.name, reader)

    def read(view: memoryview, position: int) -> tuple[Any, int]:
        body: Body = {}
        for name, reader in plain:
            body[name], position = reader(view, position)
        if not flexible:
            return body, position
        count, position = read_uvarint(view, position)
        if count:
            count_elements(count)
        for _ in range(count):
            tag, position = read_uvarint(view, position)
            size, position = read_uvarint(view, position)
            end = position + size
            if end > len(view):
                raise truncated_frame_error("tagged field", position)
            if tag in tagged:
                name, reader = tagged[tag]
                body[name], position = reader(view[:end], position)
                if position != end:
                    raise MalformedFrameError(f"tagged field has a wrong size: field={name} size={size}.")
            position = end
        return body, position

    return read


def _field_reader(field: Any, flexible: bool) -> Read:
    kind: Any = classify_field(field)
    inner: Any = kind.type_
    element: Read
    if _is_struct(inner):
        element = _struct_reader(inner)
        if not kind.is_array and is_optional(field) and "tag" not in field.metadata:
            element = _nullable_struct_reader(element)
    else:
        element = _primitive_reader(get_schema_field_type(field), flexible)
    reader = _array_reader(element, flexible) if kind.is_array else element
    return reader if NoneType in get_args(field.type) else _not_null(field.name, reader)


def _not_null(name: str, reader: Read) -> Read:
    def read(view: memoryview, position: int) -> tuple[Any, int]:
        value, end = reader(view, position)
        if value is None:
            raise MalformedFrameError(f"null in a field that is not nullable: field={name}.")
        return value, end

    return read


def _nullable_struct_reader(element: Read) -> Read:
    """Read a nullable struct: one byte before it, negative for null (KIP-893)."""

    def read(view: memoryview, position: int) -> tuple[Any, int]:
        if position >= len(view):
            raise truncated_frame_error("struct", position)
        return (None, position + 1) if view[position] > 0x7F else element(view, position + 1)

    return read


def _array_reader(element: Read, flexible: bool) -> Read:
    def read(view: memoryview, position: int) -> tuple[Any, int]:
        count, position = read_length(view, position, compact=flexible, wide=True)
        if count < 0:
            return None, position
        count_elements(count)
        items = []
        for _ in range(count):
            item, position = element(view, position)
            items.append(item)
        return items, position

    return read


def _primitive_reader(kafka_type: str, flexible: bool) -> Read:
    if kafka_type in _FIXED:
        packed = struct.Struct(_FIXED[kafka_type])
        size = packed.size
        unpack_from = packed.unpack_from

        def read_fixed(view: memoryview, position: int) -> tuple[Any, int]:
            if position + size > len(view):
                raise truncated_frame_error(kafka_type, position)
            return unpack_from(view, position)[0], position + size

        return read_fixed
    if kafka_type == "bool":

        def read_bool(view: memoryview, position: int) -> tuple[Any, int]:
            if position >= len(view):
                raise truncated_frame_error("bool", position)
            return view[position] != 0, position + 1

        return read_bool
    if kafka_type == "string":
        return lambda view, position: read_string(view, position, compact=flexible)
    if kafka_type in ("bytes", "records"):
        return lambda view, position: read_bytes(view, position, compact=flexible)
    if kafka_type == "uuid":
        return read_uuid
    raise NotImplementedError(f"no reader: kafka_type={kafka_type}.")


# writers -----------------------------------------------------------------------------------------


@cache
def _struct_writer(schema: Any) -> Write:
    flexible: bool = schema.__flexible__
    plain: list[tuple[str, Any, Write]] = []
    tagged: list[tuple[int, str, Any, Write]] = []
    for field in dataclasses.fields(schema):
        default = _default(field)
        writer = _field_writer(field, flexible)
        if "tag" in field.metadata:
            tagged.append((int(field.metadata["tag"]), field.name, default, writer))
        else:
            plain.append((field.name, default, writer))
    tagged.sort(key=lambda entry: entry[0])
    refuses = {"error_code", "error_message"} <= {name for name, _, _ in plain}

    def write(out: bytearray, body: Body) -> None:
        if refuses and body.get("error_code") and body.get("error_message") is None:
            # librdkafka 2.x dereferences the message of some rejections, which Kafka never leaves null.
            body = {**body, "error_message": describe_code(body["error_code"])}
        for name, default, writer in plain:
            value = body.get(name, default)
            if value is _MISSING:
                raise KeyError(f"response lacks a field: schema={schema.__name__} field={name}")
            writer(out, value)
        if not flexible:
            return
        present = [
            (tag, writer, value)
            for tag, name, default, writer in tagged
            if (value := body.get(name)) is not None and value != default and (value or default != ())
        ]
        write_uvarint(out, len(present))
        for tag, writer, value in present:
            inner = bytearray()
            writer(inner, value)
            write_uvarint(out, tag)
            write_uvarint(out, len(inner))
            out += inner

    return write


def _default(field: Any) -> Any:
    if field.name == "throttle_time":
        return 0
    if field.default is dataclasses.MISSING:
        return _MISSING
    if isinstance(field.default, timedelta):
        return int(field.default / timedelta(milliseconds=1))
    return field.default


def _field_writer(field: Any, flexible: bool) -> Write:
    kind: Any = classify_field(field)
    inner: Any = kind.type_
    element: Write
    if _is_struct(inner):
        element = _struct_writer(inner)
        if not kind.is_array and is_optional(field) and "tag" not in field.metadata:
            element = _nullable_struct_writer(element)
    else:
        element = _primitive_writer(get_schema_field_type(field), flexible)
    if not kind.is_array:
        return element
    write = _array_writer(element, flexible)
    return _accept_encoded(write) if _is_struct(inner) else write


def _accept_encoded(write: Write) -> Write:
    """Accept an array of structs also as its encoded bytes (`encode_field`)."""

    def write_either(out: bytearray, value: Any) -> None:
        if type(value) is bytes:
            out += value
        else:
            write(out, value)

    return write_either


def _nullable_struct_writer(element: Write) -> Write:
    def write(out: bytearray, value: Any) -> None:
        out.append(0xFF if value is None else 1)
        if value is not None:
            element(out, value)

    return write


def _array_writer(element: Write, flexible: bool) -> Write:
    def write(out: bytearray, items: Any) -> None:
        write_length(out, -1 if items is None else len(items), compact=flexible, wide=True)
        for item in items or ():
            element(out, item)

    return write


def _primitive_writer(kafka_type: str, flexible: bool) -> Write:
    if kafka_type in _FIXED:
        pack, number = struct.Struct(_FIXED[kafka_type]).pack, float if kafka_type == "float64" else int

        def write_fixed(out: bytearray, value: Any) -> None:
            out += pack(-1 if value is None else number(value))

        return write_fixed
    if kafka_type == "bool":
        return lambda out, value: out.append(1 if value else 0)
    if kafka_type == "string":
        return lambda out, value: write_string(out, value, compact=flexible)
    if kafka_type in ("bytes", "records"):

        def write_bytes(out: bytearray, value: Any) -> None:
            write_length(out, -1 if value is None else len(value), compact=flexible, wide=True)
            out += value or b""

        return write_bytes
    if kafka_type == "uuid":

        def write_uuid(out: bytearray, value: Any) -> None:
            out += uuid_bytes(value)

        return write_uuid
    raise NotImplementedError(f"no writer: kafka_type={kafka_type}.")
