"""Zigzag variable-length integers, one at a time (Kafka's record format v2, KIP-98).

`columnar_scan` reads many together.
"""

from __future__ import annotations


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
