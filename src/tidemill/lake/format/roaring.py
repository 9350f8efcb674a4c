"""Roaring bitmaps of 64-bit positions in the portable format, from masks of rows and back.

    bitmap64 = count u64, per 32-bit bitmap: key u32 (the high half), bitmap32
    bitmap32 = cookie 12346 u32, containers u32, per container: key u16, cardinality − 1 u16,
               per container: offset u32 from the start of bitmap32, then the containers
    container = up to 4,096 positions: sorted u16 each; more: 8,192 bytes of bits

All numbers are little-endian. A part has less than 2³² rows, so there is one bitmap, with key 0. Runs are not written:
they cost time and save little in scattered deletions.

Source: https://github.com/RoaringBitmap/RoaringFormatSpec
"""

from __future__ import annotations

import struct

import numpy as np

from tidemill.base.errors import CorruptError, InvalidError
from tidemill.shards.parts.arrow_rows import Mask

COOKIE = 12346
CHUNK_ROWS = 1 << 16
ARRAY_MAX = 4096
BITS_BYTES = CHUNK_ROWS // 8
ROWS_MAX = 1 << 32


def encode_mask(mask: Mask) -> bytes:
    """Return the bitmap of the positions that are True, at least one. Raises InvalidError for 2³² rows or more."""
    if len(mask) >= ROWS_MAX:
        raise InvalidError(f"a bitmap of positions holds less than 2**32 rows: rows={len(mask)}.")
    keys: list[tuple[int, int]] = []
    containers: list[bytes] = []
    for key, start in enumerate(range(0, len(mask), CHUNK_ROWS)):
        chunk = mask[start : start + CHUNK_ROWS]
        count = int(np.count_nonzero(chunk))
        if not count:
            continue
        keys.append((key, count - 1))
        if count <= ARRAY_MAX:
            containers.append(np.flatnonzero(chunk).astype("<u2").tobytes())
        else:
            containers.append(np.packbits(chunk, bitorder="little").tobytes().ljust(BITS_BYTES, b"\0"))
    if not keys:
        raise InvalidError("a bitmap of positions needs at least one.", fix="Leave it out.")
    ends = np.cumsum([len(container) for container in containers])
    offsets = 8 + 8 * len(keys) + np.concatenate([[0], ends[:-1]])
    head = struct.pack("<QIII", 1, 0, COOKIE, len(keys))
    return b"".join([head, np.array(keys, "<u2").tobytes(), offsets.astype("<u4").tobytes(), *containers])


def decode_mask(data: bytes | memoryview, rows: int) -> Mask:
    """Return the mask of `rows` rows that `encode_mask` was given. Raises CorruptError."""
    mask = np.zeros(-(-rows // CHUNK_ROWS) * CHUNK_ROWS, dtype=bool)
    try:
        count, high, cookie, containers = struct.unpack_from("<QIII", data)
        if (count, high, cookie) != (1, 0, COOKIE):
            raise CorruptError(f"unknown bitmap of positions: bitmaps={count} key={high} cookie={cookie}.")
        keys = np.frombuffer(data, "<u2", 2 * containers, 20).reshape(-1, 2).astype(np.int64)
        offsets = np.frombuffer(data, "<u4", containers, 20 + 4 * containers).tolist()
        for (key, last), offset in zip(keys.tolist(), offsets, strict=True):
            chunk = mask[key * CHUNK_ROWS : (key + 1) * CHUNK_ROWS]
            if last < ARRAY_MAX:
                chunk[np.frombuffer(data, "<u2", last + 1, 12 + offset)] = True
            else:
                bits = np.frombuffer(data, np.uint8, BITS_BYTES, 12 + offset)
                chunk[:] = np.unpackbits(bits, bitorder="little").astype(bool)
    except (struct.error, ValueError, IndexError) as error:
        raise CorruptError(f"a bitmap of positions is unreadable: bytes={len(data)} ({error}).") from error
    if mask[rows:].any():
        raise CorruptError(f"a bitmap has positions beyond its file: rows={rows}.")
    return mask[:rows]
