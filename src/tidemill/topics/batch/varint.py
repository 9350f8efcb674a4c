"""Variable-length integers, one at a time or by columns: zig-zag, little-endian (Kafka's record format v2, KIP-98;
Protocol Buffers' sint64).

`columnar_scan` reads many together.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Int64s = npt.NDArray[np.int64]


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


_TABLE = pa.array([encode_varint(value) for value in range(TABLE_SIZE)], pa.binary())
_ONE_BYTE_BOUND = 64
"""Bound of the numbers that take one byte."""
_BITS, _LOW, _MORE = np.uint64(7), np.uint64(0x7F), 0x80
_SIZE_THRESHOLDS = np.array([1 << 7 * size for size in range(1, 10)], np.uint64)
"""Smallest zig-zag numbers that take one more byte each."""


def encode_varints(values: Int64s) -> Any:
    """Encode the values as a binary column of zig-zag varints."""
    if not len(values):
        return _TABLE[:0]
    low, high = int(values.min()), int(values.max())
    if low >= 0 and high < _ONE_BYTE_BOUND:
        data, offsets = (values << 1).astype(np.uint8), np.arange(len(values) + 1, dtype=np.int32)
        return pa.Array.from_buffers(pa.binary(), len(values), [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    if low >= 0 and high < TABLE_SIZE:
        return _TABLE.take(pa.array(values))
    return _encode_long_varints(values)


def _encode_long_varints(values: Int64s) -> Any:
    """Encode with one step for each byte of the longest."""
    rest = ((values << 1) ^ (values >> 63)).view(np.uint64)
    sizes = 1 + np.searchsorted(_SIZE_THRESHOLDS, rest, side="right")
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    data = np.empty(int(offsets[-1]), np.uint8)
    at = offsets[:-1]
    for step in range(1, int(sizes.max()) + 1):
        last = sizes == step
        data[at] = (rest & _LOW).astype(np.uint8) | np.where(last, 0, _MORE).astype(np.uint8)
        goes_on = ~last
        at, rest, sizes = at[goes_on] + 1, rest[goes_on] >> _BITS, sizes[goes_on]
    return pa.Array.from_buffers(pa.binary(), len(values), [None, pa.py_buffer(offsets), pa.py_buffer(data)])
