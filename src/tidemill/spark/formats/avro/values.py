"""Values of Avro one by one: for records that the columnar reader does not read, and to report their errors.

A record is foreign data: nothing outside of it is read, and its depth and number of items are bounded, because a few
bytes can announce any of them.
"""

from __future__ import annotations

import datetime
import struct
from collections.abc import Callable
from typing import Any
from uuid import UUID

from tidemill.shards.nested.values import DUPLICATE_KEY
from tidemill.spark.decode.stream import UnreadableError
from tidemill.spark.formats.avro.schema import AvroType
from tidemill.spark.formats.conversion import unscaled_decimal

DEPTH_MAX = 100
FREE_ITEMS = 10_000
"""Items that a record may have without a byte for each: a null takes none."""
_VARINT_BYTES = 10
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_FLOAT, _DOUBLE = struct.Struct("<f"), struct.Struct("<d")


class AvroError(UnreadableError):
    """The bytes are no value of their schema."""


class AvroValueReader:
    """Reader of one record, data[at:end]."""

    def __init__(self, data: bytes, at: int, end: int) -> None:
        self._data = data
        self.at = at
        self._end = end
        self._items_left = end - at + FREE_ITEMS

    def read(self, kind: AvroType, *, for_json: bool = False, depth: int = 0) -> Any:
        """Return the raw value; `for_json`: as JSON represents it, with logical types as text."""
        if depth > DEPTH_MAX:
            raise AvroError(f"nested deeper than {DEPTH_MAX} levels")
        if kind.kind == "union":
            branch = self.read_varint()
            if not 0 <= branch < len(kind.branches):
                raise AvroError(f"not a branch of the union: {branch}")
            return self.read(kind.branches[branch], for_json=for_json, depth=depth + 1)
        if kind.kind == "record":
            return {n: self.read(part, for_json=for_json, depth=depth + 1) for n, part in kind.fields}
        if kind.kind in ("array", "map"):
            return self._read_items(kind, for_json, depth)
        value = _READ[kind.kind](self, kind)
        return _for_json(value, kind) if for_json and kind.logical else value

    def read_varint(self) -> int:
        value = 0
        for step in range(_VARINT_BYTES):
            byte = self._read_bytes(1)[0]
            value |= (byte & 0x7F) << 7 * step
            if byte <= 0x7F:
                if value >= 1 << 64:
                    break
                return (value >> 1) ^ -(value & 1)
        raise AvroError("a number that exceeds 64 bits")

    def read_bytes(self) -> bytes:
        return self._read_bytes(self.read_varint())

    def check_end(self) -> None:
        if self.at != self._end:
            raise AvroError(f"{self._end - self.at} bytes follow the record")

    def _read_bytes(self, size: int) -> bytes:
        if not 0 <= size <= self._end - self.at:
            raise AvroError(f"the record ends early: needed={size} left={self._end - self.at}")
        found = self._data[self.at : self.at + size]
        self.at += size
        return found

    def _read_items(self, kind: AvroType, for_json: bool, depth: int) -> Any:
        assert kind.parts is not None
        items: list[Any] = []
        named: dict[str, Any] = {}
        while count := self.read_varint():
            if count < 0:
                count = -count
                self.read_varint()  # the size of the block, which only helps to skip it
            self._items_left -= count
            if self._items_left < 0:
                raise AvroError("it announces more items than it has bytes")
            for _ in range(count):
                name = self.read_bytes().decode() if kind.kind == "map" else ""
                value = self.read(kind.parts, for_json=for_json, depth=depth + 1)
                if kind.kind == "map":
                    if name in named and not for_json:
                        raise AvroError(f"{DUPLICATE_KEY}: key={name[:80]!r}")
                    named[name] = value
                else:
                    items.append(value)
        return named if kind.kind == "map" else items

    def _read_boolean(self, kind: AvroType) -> bool:
        byte = self._read_bytes(1)[0]
        if byte > 1:
            raise AvroError(f"not a boolean: {byte}")
        return byte == 1

    def _read_symbol(self, kind: AvroType) -> str:
        at = self.read_varint()
        if not 0 <= at < len(kind.symbols):
            raise AvroError(f"not a symbol of the enum: {at}")
        return kind.symbols[at]


_READ: dict[str, Callable[[AvroValueReader, AvroType], Any]] = {
    "null": lambda reader, kind: None,
    "boolean": AvroValueReader._read_boolean,
    "int": lambda reader, kind: reader.read_varint(),
    "long": lambda reader, kind: reader.read_varint(),
    "float": lambda reader, kind: _FLOAT.unpack(reader._read_bytes(4))[0],
    "double": lambda reader, kind: _DOUBLE.unpack(reader._read_bytes(8))[0],
    "bytes": lambda reader, kind: reader.read_bytes(),
    "string": lambda reader, kind: reader.read_bytes().decode(),
    "fixed": lambda reader, kind: reader._read_bytes(kind.size),
    "enum": AvroValueReader._read_symbol,
}


def _for_json(value: Any, kind: AvroType) -> Any:
    """Return a value of a logical type as text, if JSON has a usual one for it."""
    if kind.is_decimal:
        return f"{unscaled_decimal(value, kind.scale):f}"
    if kind.logical == "uuid" and kind.kind == "fixed":
        return str(UUID(bytes=value))
    try:
        if kind.logical == "date" and kind.kind == "int":
            return (_EPOCH + datetime.timedelta(days=value)).date().isoformat()
        if kind.kind == "long" and kind.logical.endswith(("timestamp-millis", "timestamp-micros")):
            micros = value * (1_000 if kind.logical.endswith("millis") else 1)
            moment = _EPOCH + datetime.timedelta(microseconds=micros)
            text = moment.replace(tzinfo=None).isoformat()
            return text if kind.logical.startswith("local") else f"{text}Z"
    except OverflowError as error:
        raise AvroError(f"beyond the year 9999: {value}") from error
    return value
