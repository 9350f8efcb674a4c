"""Deletion vectors of Iceberg v3, and the Puffin files that hold them.

    vector  length u32 BE of magic and bitmap | D1 D3 39 64 | bitmap64 | CRC-32 u32 BE of magic and bitmap
    file    PFA1 | vectors | PFA1 | JSON payload | payload length i32 LE | flags, 4 zero bytes | PFA1

A file holds exactly the vectors that a manifest lists: some readers apply every vector of a file by its
`referenced-data-file`, whether the manifest lists it or not.

Sources: the Puffin specification, blob type `deletion-vector-v1`; the table specification, "Deletion Vectors".
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence

import msgspec
import numpy as np

from tidemill.base.errors import CorruptError
from tidemill.lake.format.roaring import decode_mask, encode_mask
from tidemill.shards.parts.arrow_rows import Mask

MAGIC = b"\xd1\xd3\x39\x64"
PUFFIN_MAGIC = b"PFA1"
BLOB_TYPE = "deletion-vector-v1"
POSITION_FIELD = 2147483645
"""Field id of `_pos`, the metadata column that the vector is about."""
CREATED_BY = "tidemill"


class Vector(msgspec.Struct, frozen=True):
    """Deletion vector of the data file `path`. `blob` is encoded, `count` is the number of its positions."""

    path: str
    blob: bytes
    count: int


class PlacedVector(msgspec.Struct, frozen=True):
    """Place of a vector in its file, in bytes."""

    path: str
    count: int
    offset: int
    length: int


def encode_vector(path: str, mask: Mask) -> Vector:
    """Return the vector of a data file; True rows are deleted, at least one. Raises InvalidError."""
    body = MAGIC + encode_mask(mask)
    blob = b"".join([struct.pack(">I", len(body)), body, struct.pack(">I", zlib.crc32(body))])
    return Vector(path, blob, int(np.count_nonzero(mask)))


def decode_vector(blob: bytes | memoryview, rows: int) -> Mask:
    """Return the mask of a data file of `rows` rows. Raises CorruptError."""
    if len(blob) < 12:
        raise CorruptError(f"a deletion vector is too short: bytes={len(blob)}.")
    body, (length,), (stored,) = blob[4:-4], struct.unpack(">I", blob[:4]), struct.unpack(">I", blob[-4:])
    if length != len(body) or bytes(body[:4]) != MAGIC or zlib.crc32(body) != stored:
        raise CorruptError(f"a deletion vector is damaged: bytes={len(blob)} length={length}.")
    return decode_mask(body[4:], rows)


def encode_puffin(vectors: Sequence[Vector]) -> tuple[bytes, list[PlacedVector]]:
    """Return the bytes of a Puffin file with these vectors, and their places in the same order."""
    placed = []
    offset = len(PUFFIN_MAGIC)
    for vector in vectors:
        placed.append(PlacedVector(vector.path, vector.count, offset, len(vector.blob)))
        offset += len(vector.blob)
    blobs = [
        {
            "type": BLOB_TYPE,
            "fields": [POSITION_FIELD],
            "snapshot-id": -1,
            "sequence-number": -1,
            "offset": place.offset,
            "length": place.length,
            "properties": {"referenced-data-file": place.path, "cardinality": str(place.count)},
        }
        for place in placed
    ]
    payload = json.dumps({"blobs": blobs, "properties": {"created-by": CREATED_BY}}, separators=(",", ":")).encode()
    footer = [PUFFIN_MAGIC, payload, struct.pack("<iI", len(payload), 0), PUFFIN_MAGIC]
    return b"".join([PUFFIN_MAGIC, *(vector.blob for vector in vectors), *footer]), placed
