"""Primitive types of the Kafka protocol, read from a memoryview and appended to a bytearray.

Protocol guide: https://kafka.apache.org/protocol (primitive types); KIP-482 (compact types, tagged fields).

    legacy string   int16 length (−1 = null) · UTF-8
    legacy bytes    int32 length (−1 = null) · bytes
    legacy array    int32 count  (−1 = null) · elements
    compact …       unsigned varint of length + 1 (0 = null) · the same
    tagged fields   unsigned varint count · (unsigned varint tag · unsigned varint size · size bytes)*

Readers return (value, next position) and raise MalformedFrameError, never IndexError or struct.error. A length beyond
the end of the frame is rejected before anything is allocated for it.
"""

from __future__ import annotations

import struct
import threading
from typing import Final

from tidemill.base.errors import InvalidError

I16 = struct.Struct(">h")
I32 = struct.Struct(">i")
I64 = struct.Struct(">q")


ELEMENTS_MAX: Final = 20_000
"""Maximum number of elements of all arrays and tagged fields of one request: some 20 ms of decoding.

A consumer of 10,000 partitions, or a producer to as many, sends fewer. The elements that fit in a 100 MB frame would
block the loop for a minute.
"""


class _Elements(threading.local):
    left = ELEMENTS_MAX


_elements = _Elements()


class MalformedFrameError(InvalidError):
    """Request bytes that do not follow the schema. The connection is closed."""


def truncated_frame_error(what: str, position: int) -> MalformedFrameError:
    return MalformedFrameError(f"frame ends inside a field: field={what} position={position}.")


def reset_element_count() -> None:
    """Reset the element count. Call it before the first byte of a request is read."""
    _elements.left = ELEMENTS_MAX


def count_elements(count: int) -> None:
    """Account for the elements of an array before they are read.

    Raises MalformedFrameError if the request has too many.
    """
    _elements.left -= max(count, 0)
    if _elements.left < 0:
        raise MalformedFrameError(
            f"request has too many array elements: limit={ELEMENTS_MAX}.", fix="Split it into several requests."
        )


def read_uvarint(view: memoryview, position: int) -> tuple[int, int]:
    """Read an unsigned varint of at most five bytes (32 bits)."""
    value = shift = 0
    end = len(view)
    while True:
        if position >= end:
            raise truncated_frame_error("varint", position)
        byte = view[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 28:
            raise MalformedFrameError(f"varint longer than five bytes: position={position}.")


def write_uvarint(out: bytearray, value: int) -> None:
    while value > 0x7F:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)


def read_i16(view: memoryview, position: int) -> tuple[int, int]:
    if position + 2 > len(view):
        raise truncated_frame_error("int16", position)
    return I16.unpack_from(view, position)[0], position + 2


def read_i32(view: memoryview, position: int) -> tuple[int, int]:
    if position + 4 > len(view):
        raise truncated_frame_error("int32", position)
    return I32.unpack_from(view, position)[0], position + 4


def read_i64(view: memoryview, position: int) -> tuple[int, int]:
    if position + 8 > len(view):
        raise truncated_frame_error("int64", position)
    return I64.unpack_from(view, position)[0], position + 8


def read_length(view: memoryview, position: int, *, compact: bool, wide: bool) -> tuple[int, int]:
    """Read a length or count, −1 for null. Raises MalformedFrameError if it exceeds the bytes that are left."""
    if compact:
        value, position = read_uvarint(view, position)
        value -= 1
    elif wide:
        value, position = read_i32(view, position)
    else:
        value, position = read_i16(view, position)
    if value < -1 or value > len(view) - position:
        raise MalformedFrameError(f"length exceeds the frame: length={value} left={len(view) - position}.")
    return value, position


def read_string(view: memoryview, position: int, *, compact: bool) -> tuple[str | None, int]:
    length, position = read_length(view, position, compact=compact, wide=False)
    if length < 0:
        return None, position
    try:
        return str(view[position : position + length], "utf-8"), position + length
    except UnicodeDecodeError as error:
        raise MalformedFrameError(f"string is not UTF-8: position={position}.") from error


def read_bytes(view: memoryview, position: int, *, compact: bool) -> tuple[memoryview | None, int]:
    """Read bytes as a view into the frame, not a copy."""
    length, position = read_length(view, position, compact=compact, wide=True)
    if length < 0:
        return None, position
    return view[position : position + length], position + length


def read_uuid(view: memoryview, position: int) -> tuple[str, int]:
    """Read a UUID as hex with dashes, the form of our topic ids; all zeros for none."""
    if position + 16 > len(view):
        raise truncated_frame_error("uuid", position)
    text = view[position : position + 16].hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}", position + 16


def skip_tags(view: memoryview, position: int) -> int:
    """Skip tagged fields: unknown ones are never an error (KIP-482)."""
    count, position = read_uvarint(view, position)
    if count:
        count_elements(count)
    for _ in range(count):
        _, position = read_uvarint(view, position)
        size, position = read_uvarint(view, position)
        position += size
        if position > len(view):
            raise truncated_frame_error("tagged field", position)
    return position


def write_length(out: bytearray, length: int, *, compact: bool, wide: bool) -> None:
    if compact:
        write_uvarint(out, length + 1)
    else:
        out += (I32 if wide else I16).pack(length)


def write_string(out: bytearray, value: str | None, *, compact: bool) -> None:
    if value is None:
        write_length(out, -1, compact=compact, wide=False)
        return
    data = value.encode()
    write_length(out, len(data), compact=compact, wide=False)
    out += data


ZERO_UUID = "00000000-0000-0000-0000-000000000000"


def uuid_bytes(value: str | None) -> bytes:
    """Return the 16 bytes of a UUID in the form of `read_uuid`."""
    return bytes.fromhex(value.replace("-", "")) if value else bytes(16)
