"""A row family: a typed row, its key columns, and the encoding of the other fields.

    value   format uint8 = 1 | msgpack array of the fields that are not in the key, in the order of the struct

Fields are only added, at the end and with a default: a shorter array is an older row, and fields appended by a newer
version are ignored. A value is never empty, since the empty value is the tombstone.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from tidemill.base.errors import CorruptError, InvalidError
from tidemill.metastore.rows.key_encoding import (
    ENCODING_ERRORS,
    Column,
    Kind,
    Part,
    column_encoder,
    decode_column,
    encode_column,
    encode_text,
)

FORMAT = 1
R = TypeVar("R", bound=msgspec.Struct)

_FORMAT = bytes([FORMAT])
_encoder = msgspec.msgpack.Encoder()


class Family(Generic[R]):
    """A row family. `key`: the first fields of `row`, in order; `own_entity`: the first of them is the entity."""

    def __init__(self, tag: int, name: str, row: type[R], *key: Column, own_entity: bool = True) -> None:
        fields = msgspec.structs.fields(row)
        if tuple(field.name for field in fields[: len(key)]) != tuple(column.name for column in key):
            raise TypeError(f"the key of {name} must be the first fields of {row.__name__}")
        if own_entity and key[0].kind is not Kind.TEXT:
            raise TypeError(f"the entity of {name} must be text")
        self.tag = tag
        self.name = name
        self.row = row
        self.own_entity = own_entity
        self.columns = key
        self._writers = [column_encoder(column.kind) for column in key]
        self._head = bytes([tag]) if own_entity else bytes([tag]) + encode_text("")
        self._decoder = msgspec.msgpack.Decoder(_value_type(row, len(key)))

    def __repr__(self) -> str:
        return f"Family({self.name})"

    def key(self, *parts: Part) -> bytes:
        """Encode the key of one row. Raises InvalidError for a wrong number of columns or an invalid value."""
        if len(parts) != len(self.columns):
            raise InvalidError(f"a key of {self.name} has {len(self.columns)} columns: given={len(parts)}.")
        return self.prefix(*parts)

    def prefix(self, *parts: Part) -> bytes:
        """Return the common prefix of the keys of all rows with these first columns; no columns = the whole family."""
        try:
            written = [write(part) for write, part in zip(self._writers[: len(parts)], parts, strict=True)]
        except ENCODING_ERRORS:  # `put` raises an error that names the column
            written = [encode_column(column, part) for column, part in zip(self.columns, parts, strict=False)]
        return self._head + b"".join(written)

    def key_of(self, row: R) -> bytes:
        return self.prefix(*msgspec.structs.astuple(row)[: len(self.columns)])

    def encode(self, row: R) -> tuple[bytes, bytes]:
        """Return (key, value). Raises InvalidError for a key that cannot be encoded."""
        fields, count = msgspec.structs.astuple(row), len(self.columns)
        return self.prefix(*fields[:count]), _FORMAT + _encoder.encode(fields[count:])

    def decode_key(self, key: bytes) -> tuple[Part, ...]:
        """Decode a key into its columns. Raises CorruptError for a key of another family or a damaged one."""
        if not key.startswith(self._head):
            raise CorruptError(f"not a key of this family: family={self.name} key={key.hex()}.")
        parts: list[Part] = []
        at = len(self._head)
        for column in self.columns:
            part, at = decode_column(column, key, at)
            parts.append(part)
        if at != len(key):
            raise CorruptError(f"a key is longer than its columns: family={self.name} key={key.hex()}.")
        return tuple(parts)

    def decode(self, key: bytes, value: bytes) -> R:
        """Decode a row. Raises CorruptError (damaged) or InvalidError (written by a newer version)."""
        parts = self.decode_key(key)
        if value[:1] != _FORMAT:
            raise InvalidError(
                f"a row has an unknown format: family={self.name} key={key.hex()} "
                f"format={value[:1].hex()} known={FORMAT}.",
                fix="Upgrade tidemill: a newer version wrote this row.",
            )
        try:
            rest = self._decoder.decode(memoryview(value)[1:])
        except msgspec.DecodeError as error:
            raise CorruptError(f"a row is unreadable: family={self.name} key={key.hex()} cause={error}.") from error
        return self.row(*parts, *msgspec.structs.astuple(rest))


def _value_type(row: type[msgspec.Struct], skipped: int) -> type[msgspec.Struct]:
    """Return an array-like struct of the fields after the key, with the row's types and defaults."""
    fields: list[Any] = []
    for field in msgspec.structs.fields(row)[skipped:]:
        if field.default is not msgspec.NODEFAULT:
            fields.append((field.name, field.type, field.default))
        elif field.default_factory is not msgspec.NODEFAULT:
            fields.append((field.name, field.type, msgspec.field(default_factory=field.default_factory)))
        else:
            fields.append((field.name, field.type))
    return msgspec.defstruct(f"{row.__name__}Value", fields, array_like=True, frozen=True)
