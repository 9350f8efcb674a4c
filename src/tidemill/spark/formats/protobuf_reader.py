"""Protobuf data of one writer's schema → columns of a table.

    frame │ indexes of the message type │ the message

The indexes lead from the file's messages to a nested one: their number and each of them as zigzag varints; the single
byte 0 stands for the first message. Protobuf's own library decodes a message in native code, with bounded recursion.

A field with presence is null if it is not set; another one then has its default, as for every reader of Protobuf.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from tidemill.base.libraries import missing_extra
from tidemill.base.runtime.tasks import is_fault
from tidemill.shards.api import Column
from tidemill.shards.nested.type_names import ArrayType, MapType, StructType, is_nested, nested_type
from tidemill.spark.decode.block_decoder import Block
from tidemill.spark.decode.newline_text import Places
from tidemill.spark.decode.stream import UnreadableError, reason_of
from tidemill.spark.formats.avro.reader import Dead
from tidemill.spark.formats.avro.values import AvroValueReader
from tidemill.spark.formats.conversion import ColumnPlan, SourceType, raw_type, unscaled_decimal
from tidemill.spark.formats.nested_conversion import ELEMENT, VALUE, Parts
from tidemill.spark.formats.schemas.writer_schema import WriterSchema

_KNOWN_PREFIXES = ("google/protobuf/", "google/type/")
_INDEXES_MAX = 100
_EPOCH_DAY = datetime.date(1970, 1, 1).toordinal()
_KINDS = {
    1: "double", 2: "float", 3: "int", 4: "uint", 5: "int", 6: "uint", 7: "int", 8: "bool", 9: "string", 12: "bytes",
    13: "int", 14: "string", 15: "int", 16: "int", 17: "int", 18: "int",
}  # fmt: skip
"""Kind of a source by FieldDescriptorProto.Type; 14 is an enum, read as the constant's name."""

Get = Callable[[Any], Any]
"""Function from a message to the raw value of one of its fields."""


class ProtobufSchemaError(ValueError):
    """The descriptor is no file of messages that can be read."""


def check_protobuf() -> None:
    """Raise InvalidError if Protobuf's library is not installed."""
    try:
        import google.protobuf.message_factory  # noqa: F401
    except ModuleNotFoundError as error:
        raise missing_extra(error) or error from error


class ProtobufReader:
    """Reader of the messages of one file."""

    def __init__(self, schema: WriterSchema, columns: Sequence[Column]) -> None:
        """Link the file. Raises ProtobufSchemaError."""
        self._schema = schema
        self._columns = columns
        self._file = _link(schema)
        self._types: dict[tuple[int, ...], _MessageReader | str] = {}

    def read(self, body: bytes, at: Places, sizes: Places, places: Places, dead: Dead) -> list[Block]:
        rows: dict[tuple[int, ...], _MessageRows] = {}
        ends = (at + sizes).tolist()
        for begin, end, place in zip(at.tolist(), ends, places.tolist(), strict=True):
            try:
                path, begins = _read_path(body, begin, end)
                if path not in rows:
                    rows[path] = _MessageRows(self._message(path))
                rows[path].add(body[begins:end], place)
            except BaseException as error:
                if not is_fault(error):
                    raise
                dead.append((place, _reason(error)))
        return [found.block(dead) for found in rows.values()]

    def _message(self, path: tuple[int, ...]) -> _MessageReader:
        """Return the reader of a message type. Raises UnreadableError for one that cannot be a row."""
        found = self._types.get(path)
        if found is None:
            try:
                kind = self._file.message_types_by_name[self._names[path[0]]]
                for index in path[1:]:
                    kind = kind.nested_types[index]
            except IndexError:
                found = f"schema {self._schema.id} has no message {list(path)}"
            else:
                reader = _MessageReader(kind, self._columns, f"schema {self._schema.id}")
                found = reader.plan.problem or reader
            self._types[path] = found
        if isinstance(found, str):
            raise UnreadableError(found)
        return found

    @property
    def _names(self) -> list[str]:
        return list(self._file.message_types_by_name)


class _MessageReader:
    """Reader of one message type."""

    def __init__(self, kind: Any, columns: Sequence[Column], schema: str) -> None:
        from google.protobuf.message_factory import GetMessageClass

        self.parse: Callable[[bytes], Any] = GetMessageClass(kind).FromString
        self.gets: dict[str, Get] = {}
        self.sources: dict[str, SourceType] = {}
        for column in columns:
            field = kind.fields_by_name.get(column.name)
            if field is not None:
                read = _nested_reader(field, column.type) if is_nested(column.type) else _field_reader(field)
                self.sources[column.name], self.gets[column.name] = read
        self.nested = {column.name for column in columns if is_nested(column.type)}
        self.plan = ColumnPlan(columns, self.sources, schema)


class _MessageRows:
    """Values of many messages of one type."""

    def __init__(self, reader: _MessageReader) -> None:
        self._reader = reader
        self._places: list[int] = []
        self._values: dict[str, list[Any]] = {name: [] for name in reader.gets}

    def add(self, data: bytes, place: int) -> None:
        message = self._reader.parse(data)
        row = [get(message) for get in self._reader.gets.values()]
        for found, value in zip(self._values.values(), row, strict=True):
            found.append(value)
        self._places.append(place)

    def block(self, dead: Dead) -> Block:
        sources = self._reader.sources
        arrays = {
            name: found if name in self._reader.nested else pa.array(found, raw_type(sources[name]))
            for name, found in self._values.items()
        }
        columns, kept = self._reader.plan.convert(arrays, self._places, dead)
        return Block(np.array(kept, dtype=np.int64), columns)


def _read_path(body: bytes, at: int, end: int) -> tuple[tuple[int, ...], int]:
    """Return the indexes of the message type, and where the message begins."""
    if at < end and body[at] == 0:
        return (0,), at + 1
    reader = AvroValueReader(body, at, end)
    count = reader.read_varint()
    if not 0 < count <= _INDEXES_MAX:
        raise UnreadableError(f"not a number of message indexes: {count}")
    path = tuple(reader.read_varint() for _ in range(count))
    if min(path) < 0:
        raise UnreadableError(f"not a message index: {min(path)}")
    return path, reader.at


def _reason(error: BaseException) -> str:
    if type(error).__name__ == "DecodeError":
        return "not a message of its schema"
    return reason_of(error)


# fields ---------------------------------------------------------------------------------------------


def _field_reader(field: Any) -> tuple[SourceType, Get]:
    name = field.name
    if field.is_repeated:
        return SourceType("json"), lambda message: _json(_as_dict(message).get(name) or ({} if _is_map(field) else []))
    if field.message_type is not None:
        source, read = _message_field(field.message_type)
        return source, lambda message: read(getattr(message, name)) if message.HasField(name) else None
    source, get = SourceType(_KINDS[field.type]), _scalar(field)
    if not field.has_presence or field.has_default_value:
        return source, get
    return source, lambda message: get(message) if message.HasField(name) else None


def _scalar(field: Any) -> Get:
    name = field.name
    if field.enum_type is None:
        return lambda message: getattr(message, name)
    read = _constant_name(field)
    return lambda message: read(getattr(message, name))


def _constant_name(field: Any) -> Get:
    """Return a function from the number of an enum to the constant's name."""
    names = {number: value.name for number, value in field.enum_type.values_by_number.items()}

    def constant(number: Any) -> str:
        if number not in names:
            raise UnreadableError(f"column={field.name}: the enum has no constant {number}")
        return str(names[number])

    return constant


def _message_field(kind: Any) -> tuple[SourceType, Get]:
    """Return the source of a message that stands for a single value, or else its JSON."""
    full = kind.full_name
    if full == "google.protobuf.Timestamp":
        return SourceType("micros"), _timestamp_micros
    if full == "google.type.Date":
        return SourceType("date"), lambda date: datetime.date(date.year, date.month, date.day).toordinal() - _EPOCH_DAY
    if full == "google.type.Decimal":
        return SourceType("string"), lambda decimal: decimal.value
    if full == "confluent.type.Decimal":
        return SourceType("string"), lambda decimal: f"{unscaled_decimal(decimal.value, decimal.scale):f}"
    if kind.file.name == "google/protobuf/wrappers.proto":
        return SourceType(_KINDS[kind.fields_by_name["value"].type]), lambda wrapper: wrapper.value
    return SourceType("json"), lambda message: _json(_as_dict(message))


def _timestamp_micros(moment: Any) -> int:
    if moment.nanos % 1_000:
        raise UnreadableError("a timestamp that is finer than a microsecond")
    return int(moment.seconds) * 1_000_000 + int(moment.nanos) // 1_000


def _as_dict(message: Any) -> Any:
    from google.protobuf.json_format import MessageToDict

    return MessageToDict(message, preserving_proto_field_name=True)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _is_map(field: Any) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


# fields of nested columns -----------------------------------------------------------------------------


def _nested_reader(field: Any, type_name: str) -> tuple[SourceType, Get]:
    """Return the source of a field, as deep as the type of the column goes, and a function from a message to lists,
    dicts and raw values."""
    name, kind = field.name, nested_type(type_name)
    if _is_map(field):
        key, value = (field.message_type.fields_by_name[each] for each in ("key", "value"))
        source, read = _inner_reader(value, kind.value if isinstance(kind, MapType) else "")
        parts = Parts("map", {VALUE: source}, "string" if _KINDS.get(key.type) == "string" else "int")
        return SourceType("json", parts=lambda: parts), lambda message: {
            each: read(found) for each, found in getattr(message, name).items()
        }
    if field.is_repeated:
        source, read = _inner_reader(field, kind.element if isinstance(kind, ArrayType) else "")
        parts = Parts("array", {ELEMENT: source})
        return SourceType("json", parts=lambda: parts), lambda message: [read(each) for each in getattr(message, name)]
    source, read = _inner_reader(field, type_name)
    if not field.has_presence or (field.message_type is None and field.has_default_value):
        return source, lambda message: read(getattr(message, name))
    return source, lambda message: read(getattr(message, name)) if message.HasField(name) else None


def _inner_reader(field: Any, type_name: str) -> tuple[SourceType, Get]:
    """Return the source of a single value of a field, and a function from that value to its raw value. `type_name`: of
    the column at this place, "" if it is another one."""
    if field.message_type is None:
        return SourceType(_KINDS[field.type]), _constant_name(field) if field.enum_type is not None else _itself
    source, read = _message_field(field.message_type)
    kind = nested_type(type_name)
    if source.kind != "json" or not isinstance(kind, StructType):
        return source, read
    inner = {
        name: _nested_reader(found, wanted)
        for name, wanted in kind.fields
        if (found := field.message_type.fields_by_name.get(name)) is not None
    }
    parts = Parts("record", {name: each for name, (each, _) in inner.items()})
    return SourceType("json", parts=lambda: parts), lambda message: {
        name: get(message) for name, (_, get) in inner.items()
    }


def _itself(value: Any) -> Any:
    return value


# files ----------------------------------------------------------------------------------------------


def _link(schema: WriterSchema) -> Any:
    """Return the file's descriptor with everything that it imports."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message import DecodeError

    pool = DescriptorPool()
    try:
        own = FileDescriptorProto.FromString(schema.descriptor)
        files = [own]
        for one in schema.references:
            file = FileDescriptorProto.FromString(one.descriptor)
            file.name = one.name
            files.insert(-1, file)
        given = {file.name for file in files}
        added: set[str] = set()
        for file in files:
            for known in _known_imports(file.dependency, given, added):
                pool.Add(known)
            pool.Add(file)
        return pool.FindFileByName(own.name)
    except (DecodeError, TypeError, KeyError, ImportError) as error:
        raise ProtobufSchemaError(" ".join(str(error).split())[:200]) from error


def _known_imports(names: Sequence[str], given: set[str], added: set[str]) -> Iterator[Any]:
    """Yield the files of Google that are imported, each after those that it imports itself."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    for name in names:
        if name in given or name in added or not name.startswith(_KNOWN_PREFIXES):
            continue
        added.add(name)
        file = FileDescriptorProto()
        import_module(name.removesuffix(".proto").replace("/", ".") + "_pb2").DESCRIPTOR.CopyToProto(file)
        yield from _known_imports(file.dependency, given, added)
        yield file
