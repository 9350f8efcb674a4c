"""Byte encoding of keys: byte order equals column order, and no key's prefix runs into another entity.

    key     family tag uint8 | entity | column…
    entity  text; the owner of the row, which routes it to a domain (`cluster.domain_of`). Rows of the
            catalogue itself (topics, captures, pipelines, nodes) belong to the empty entity, so that one
            batch may change several of them.
    text    UTF-8 with every 00 written as 00 FF, then 00 01. So "a" < "a\\0" < "ab", like the strings.
    u32     4 bytes, big-endian
    u64     8 bytes, big-endian

Tag 00 belongs to the domains themselves (requests, import markers); families have tags from 01 on.

- Invariant (order): keys are ordered like (tag, entity, columns…).
- Invariant (prefix-free entities): `00 01` ends a text and occurs nowhere inside one, so the prefix of an entity is
  never a prefix of another.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

from tidemill.base.errors import CorruptError, InvalidError

END = b"\x00\x01"
ESCAPED = b"\x00\xff"
Part = str | int


class Kind(Enum):
    """Type of a key column."""

    TEXT = "text"
    U32 = "u32"
    U64 = "u64"


class Column(NamedTuple):
    name: str
    kind: Kind


def encode_column(column: Column, value: Part) -> bytes:
    """Encode one column. Raises InvalidError for a value of another kind or out of range."""
    try:
        return column_encoder(column.kind)(value)
    except ENCODING_ERRORS as error:
        raise InvalidError(
            f"a key cannot hold this value: column={column.name} kind={column.kind.value} value={value!r}.",
            fix="Use a non-negative number in range, or text that UTF-8 can encode.",
        ) from error


def column_encoder(kind: Kind) -> Callable[[Any], bytes]:
    """Return the encoder of a column of this kind. It raises the exceptions in `ENCODING_ERRORS` untranslated."""
    writers: dict[Kind, Callable[[Any], bytes]] = {Kind.TEXT: encode_text, Kind.U32: _encode_u32, Kind.U64: _encode_u64}
    return writers[kind]


ENCODING_ERRORS = (OverflowError, AttributeError, UnicodeEncodeError)


def encode_text(value: str) -> bytes:
    return value.encode().replace(b"\x00", ESCAPED) + END


def _encode_u32(value: int) -> bytes:
    return value.to_bytes(4, "big")


def _encode_u64(value: int) -> bytes:
    return value.to_bytes(8, "big")


def decode_column(column: Column, key: bytes, at: int) -> tuple[Part, int]:
    """Decode one column; return (value, where the next column begins). Raises CorruptError if the key ends too
    early."""
    if column.kind is Kind.TEXT:
        end = key.find(END, at)
        if end < 0:
            raise CorruptError(f"a key ends inside a text: column={column.name} key={key.hex()}.")
        return key[at:end].replace(ESCAPED, b"\x00").decode(), end + len(END)
    end = at + (4 if column.kind is Kind.U32 else 8)
    if end > len(key):
        raise CorruptError(f"a key ends inside a number: column={column.name} key={key.hex()}.")
    return int.from_bytes(key[at:end], "big"), end


def entity_of(key: bytes) -> bytes:
    """Return the encoded entity of a key without its end marker: the input of routing.

    Raises CorruptError for bytes that are not a row's key.
    """
    end = key.find(END, 1)
    if end < 0:
        raise CorruptError(f"a key has no entity: key={key.hex()}.")
    return key[1:end]


def names_entity(prefix: bytes) -> bool:
    """Return whether every key with this prefix belongs to one entity."""
    return prefix.find(END, 1) >= 0
