"""Encode the records of a batch by columns: each step is one call over all records. Same bytes as encode.py.

record:  length varint | attributes int8 | timestamp delta varint | offset delta varint | rest: key, value, headers
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.topics.batch.varint import TABLE_SIZE, encode_varint

Int64s = npt.NDArray[np.int64]
_EMPTY = pa.scalar(b"")
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


def value_sizes(column: Any) -> Int64s:
    """Return the size of each value of a binary column without nulls, in bytes."""
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    return np.diff(offsets).astype(np.int64)


def join_fields(*columns: Any) -> Any:
    """Join columns element by element; constants are bytes."""
    return pc.binary_join_element_wise(*columns, _EMPTY)


def encode_record_columns(first: int, time_deltas: Int64s, rests: list[Any]) -> memoryview:
    """Encode records with the offset deltas `first`, `first` + 1, …; `rests`: the adjacent columns of each record."""
    count = len(time_deltas)
    heads = [encode_varints(time_deltas), encode_varints(np.arange(first, first + count))]
    sizes = 1 + sum(value_sizes(column) for column in (*heads, *rests))
    out = join_fields(encode_varints(np.asarray(sizes, np.int64)), b"\x00", *heads, *rests)
    offsets = np.frombuffer(out.buffers()[1], np.int32)[out.offset : out.offset + count + 1]
    return memoryview(out.buffers()[2])[int(offsets[0]) : int(offsets[-1])]
