"""The row hash of stored parts: 64 bits, vectorised, the same in every process, version and machine.

It orders parts, picks buckets and finds candidates; its users compare the key columns themselves. It is not keyed and
not cryptographic. Any change needs a new name and an RFC; the golden values in tests/shards/test_shards_hashing.py pin
it.

    mix(x)     x ^= x >> 30; x *= 0xBF58476D1CE4E5B9; x ^= x >> 27; x *= 0x94D049BB133111EB; x ^= x >> 31
    lane       per column and row, a u64:
      null                     0x9E3779B97F4A7C15
      bool, ints, date, time   mix(two's complement, sign-extended to 64 bits); timestamps in µs, dates in days
      floats                   widened to float64, -0.0 → 0.0, any NaN → 0x7FF8000000000000, then mix(bits)
      decimal                  unscaled value as 128 bits: mix(low ^ mix(high))
      string, binary           acc = mix(length in bytes); for each 8-byte little-endian word, the last one
                               zero-padded: acc = mix(acc ^ word)
    hash       h = 0; for each column in order: h = mix(h * 0x9E3779B97F4A7C15 + lane)

All arithmetic is modulo 2^64. int32 and int64 columns of equal values have equal hashes, so a widened key column keeps
its order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidemill.base.errors import InvalidError

U64 = npt.NDArray[np.uint64]

_NULL = np.uint64(0x9E3779B97F4A7C15)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)
_NAN_BITS = np.uint64(0x7FF8000000000000)
_BLOCK_ROWS = 8192  # so that every pass over a block stays in the core's cache
_TAIL_MASK = np.array([(1 << (8 * n)) - 1 for n in range(9)], dtype=np.uint64)


def hash_rows(rows: pa.Table | pa.RecordBatch, columns: Sequence[str]) -> U64:
    """Return the hash of each row over `columns`, in that order. Shape (rows,), uint64.

    Raises InvalidError for a type without a rule.
    """
    out = np.zeros(rows.num_rows, dtype=np.uint64)
    for name in columns:
        column = rows.column(rows.schema.get_field_index(name))
        at = 0
        for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else (column,):
            for start in range(0, len(chunk), _BLOCK_ROWS):
                lane = _lane(chunk.slice(start, _BLOCK_ROWS))
                block = out[at : at + len(lane)]
                block *= _GOLDEN
                block += lane
                _mix(block)
                at += len(lane)
    return out


def bucket_of(hashes: U64, buckets: int) -> npt.NDArray[np.int64]:
    """Return the bucket of each hash: equal, contiguous hash ranges, so the order by bucket is the order by hash."""
    return (((hashes >> np.uint64(32)) * np.uint64(buckets)) >> np.uint64(32)).astype(np.int64)


def _mix(x: U64) -> U64:
    """Apply mix(x) in place, to save three allocations per step."""
    x ^= x >> _S30
    x *= _M1
    x ^= x >> _S27
    x *= _M2
    x ^= x >> _S31
    return x


def _lane(array: Any) -> U64:
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _lane(array.dictionary_decode())
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        lane = _bytes_lane(array, np.int32)
    elif pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        lane = _bytes_lane(array, np.int64)
    elif pa.types.is_decimal128(kind):
        words = np.frombuffer(array.buffers()[1], dtype="<u8") if len(array) else np.zeros(0, np.uint64)
        words = words[2 * array.offset : 2 * (array.offset + len(array))]
        lane = _mix(words[0::2] ^ _mix(words[1::2].copy()))
    elif pa.types.is_floating(kind):
        values = np.array(array.fill_null(0).to_numpy(zero_copy_only=False), dtype=np.float64)
        values += 0.0  # -0.0 becomes 0.0
        bits = values.view(np.uint64)
        bits[np.isnan(values)] = _NAN_BITS
        lane = _mix(bits)
    else:
        lane = _mix(_integers(array).view(np.uint64))
    if array.null_count:
        lane[np.asarray(array.is_null().to_numpy(zero_copy_only=False), dtype=bool)] = _NULL
    return lane


def _integers(array: Any) -> npt.NDArray[np.int64]:
    """Return a fresh int64 array of the column's integer representation; nulls have arbitrary values."""
    kind = array.type
    if pa.types.is_boolean(kind):
        array = array.cast(pa.int8())
    elif pa.types.is_date32(kind):
        array = array.view(pa.int32())
    elif pa.types.is_timestamp(kind):
        array = (array if kind.unit == "us" else array.cast(pa.timestamp("us", kind.tz))).view(pa.int64())
    elif not pa.types.is_integer(kind):
        raise InvalidError(f"column type cannot be hashed: type={kind}.", fix="Use a type that tables support.")
    filled = array.fill_null(0) if array.null_count else array
    values = np.asarray(filled.to_numpy(zero_copy_only=False))
    if values.dtype == np.uint64:
        return values.copy().view(np.int64)
    return values.astype(np.int64, copy=True)


def _bytes_lane(array: Any, offset_type: type[np.signedinteger[Any]]) -> U64:
    """Mix word by word over all rows that are long enough; unaligned 8-byte loads through a byte-strided view."""
    n = len(array)
    if n == 0:
        return np.zeros(0, dtype=np.uint64)
    _, offsets_buffer, data_buffer = array.buffers()
    width = np.dtype(offset_type).itemsize
    offsets = np.frombuffer(offsets_buffer, dtype=offset_type, count=n + 1, offset=array.offset * width)
    start = offsets[:-1].astype(np.int64)
    length = offsets[1:].astype(np.int64) - start
    lane = _mix(length.astype(np.uint64))
    first, last = int(offsets[0]), int(offsets[-1])
    if last == first:
        return lane
    data = np.frombuffer(data_buffer, dtype=np.uint8, count=last)[first:]
    padded = np.zeros(last - first + 8, dtype=np.uint8)
    padded[:-8] = data
    words: U64 = np.ndarray(shape=(last - first + 1,), dtype="<u8", buffer=padded, strides=(1,))
    at = start - first
    live: npt.NDArray[np.int64] | None = None
    while True:
        left = length if live is None else length[live]
        if live is None and int(left.min()) > 0:
            word = words[at]
            word &= _TAIL_MASK[np.minimum(left, 8)]
            lane ^= word
            _mix(lane)
        else:
            keep = np.nonzero(left > 0)[0]
            live = keep if live is None else live[keep]
            if not len(live):
                return lane
            word = words[at[live]] & _TAIL_MASK[np.minimum(length[live], 8)]
            lane[live] = _mix(lane[live] ^ word)
        at += 8
        length = length - 8
