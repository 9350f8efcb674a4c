"""Variable-length integers, one at a time: zig-zag, little-endian (Kafka's record format v2, KIP-98; Protocol Buffers'
sint64).

`columnar_scan` reads many together, `columnar_encode` writes many together.
"""

from __future__ import annotations


def _build_varint(value: int) -> bytes:
    zigzag = (value << 1) ^ (value >> 63)
    out = bytearray()
    while zigzag > 0x7F:
        out.append((zigzag & 0x7F) | 0x80)
        zigzag >>= 7
    out.append(zigzag)
    return bytes(out)


TABLE_SIZE = 16_384
_SMALL_VARINTS = [_build_varint(value) for value in range(TABLE_SIZE)]
NULL_LENGTH = _build_varint(-1)


def encode_varint(value: int) -> bytes:
    return _SMALL_VARINTS[value] if 0 <= value < TABLE_SIZE else _build_varint(value)


class VarintError(ValueError):
    pass


def read_varint(data: bytes | memoryview, at: int, bits: int = 64) -> tuple[int, int]:
    """Read a varint of `bits` bits, 32 or 64; return (value, next position).

    Raises IndexError beyond the data, VarintError beyond `bits`.
    """
    byte = data[at]
    at += 1
    zigzag = byte & 0x7F
    shift = 7
    while byte > 0x7F:
        if shift > bits:
            raise VarintError("a variable-length integer is too long")
        byte = data[at]
        at += 1
        zigzag |= (byte & 0x7F) << shift
        shift += 7
    if zigzag >> bits:
        raise VarintError("a variable-length integer is too large")
    return (zigzag >> 1) ^ -(zigzag & 1), at
