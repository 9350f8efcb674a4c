"""Zigzag variable-length integers, one at a time (Kafka's record format v2, KIP-98). Many at once: `columnar_scan`."""

from __future__ import annotations


class VarintError(ValueError):
    pass


def varint(data: bytes | memoryview, at: int, bits: int = 64) -> tuple[int, int]:
    """(value, next position) of one of `bits` bits, 32 or 64. Raises IndexError past the end, VarintError past
    `bits`."""
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
