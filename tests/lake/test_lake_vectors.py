"""Bytes of bitmaps, deletion vectors and Puffin files, and of position deletes."""

from __future__ import annotations

import hashlib
import json
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.base.errors import CorruptError, InvalidError
from tidemill.lake.format.deletion_vectors import PlacedVector, decode_vector, encode_puffin, encode_vector
from tidemill.lake.format.position_deletes import decode_position_deletes, encode_position_deletes
from tidemill.lake.format.roaring import decode_mask, encode_mask
from tidemill.shards.parts.arrow_rows import Mask


def mask_of(positions: object, rows: int) -> Mask:
    mask = np.zeros(rows, dtype=bool)
    mask[np.array(positions, dtype=np.int64)] = True
    return mask


def test_a_vector_is_what_pyroaring_and_the_specification_make_of_its_positions() -> None:
    vector = encode_vector("file:///a.parquet", mask_of([1, 5, 70_000], 100_000))
    assert vector.blob.hex() == (
        "0000002e" "d1d33964" "0100000000000000" "00000000"
        "3a30000002000000" "00000100" "01000000" "180000001c000000" "01000500" "7011" "a9ae34b7"
    )  # fmt: skip
    assert (vector.path, vector.count) == ("file:///a.parquet", 3)


@pytest.mark.parametrize(
    ("positions", "size_bytes", "sha256"),
    [
        (range(0, 300_000, 3), 41_032, "0f340f9e74e98dbcde717575e49fef1148b01ee2da9acce179a77d0641aa063e"),
        (range(65_000, 75_000), 9_312, "0b3531947cc78b6306918a5121fcaa20f3ec5030fabcb991ac90d6614f9e9396"),
        (range(4096), 8_232, "d424c299cf53cd70077a3f5dc2dcedf1627d6e0b6f9ac26b149366942f8bcd99"),
        (range(4097), 8_232, "e4b7aabaf84ac2ce37429970f4a83a7750b9df3c05da1ba8b7cdaeecdeb4af18"),
    ],
)
def test_large_vectors_have_the_bytes_of_pyroaring(positions: range, size_bytes: int, sha256: str) -> None:
    """Known values: `pyroaring.BitMap(list(positions), optimize=False)` 1.2.0 in the frame of the specification."""
    blob = encode_vector("a", mask_of(positions, positions[-1] + 9)).blob
    assert (len(blob), hashlib.sha256(blob).hexdigest()) == (size_bytes, sha256)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 200_000), st.integers(0, 2**32), st.sampled_from([0.00002, 0.01, 0.06, 0.07, 0.5, 1.0]))
def test_a_mask_survives_its_encoding(rows: int, seed: int, share: float) -> None:
    mask = np.random.default_rng(seed).random(rows) < share
    mask[seed % rows] = True
    assert np.array_equal(decode_mask(encode_mask(mask), rows), mask)
    assert np.array_equal(decode_vector(encode_vector("a", mask).blob, rows), mask)
    assert np.array_equal(decode_position_deletes(encode_position_deletes("a", mask), rows), mask)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 57), st.integers(1, 255))
def test_a_changed_byte_of_a_vector_is_found(at: int, flip: int) -> None:
    blob = bytearray(encode_vector("a", mask_of([1, 5, 70_000], 100_000)).blob)
    blob[at % len(blob)] ^= flip
    with pytest.raises(CorruptError):
        decode_vector(bytes(blob), 100_000)


def test_a_vector_of_a_longer_file_is_refused() -> None:
    blob = encode_vector("a", mask_of([99], 100)).blob
    with pytest.raises(CorruptError, match="beyond its file"):
        decode_vector(blob, 99)
    with pytest.raises(CorruptError, match="beyond its data file"):
        decode_position_deletes(encode_position_deletes("a", mask_of([99], 100)), 99)


def test_a_vector_without_positions_does_not_exist() -> None:
    with pytest.raises(InvalidError):
        encode_vector("a", np.zeros(10, dtype=bool))


def test_a_puffin_file_has_exactly_its_vectors_and_says_where_they_are() -> None:
    vectors = [encode_vector(f"file:///{n}.parquet", mask_of([n, 2 * n], 100)) for n in (7, 8)]
    data, placed = encode_puffin(vectors)
    size = len(vectors[0].blob)
    assert placed == [
        PlacedVector("file:///7.parquet", 2, 4, size),
        PlacedVector("file:///8.parquet", 2, 4 + size, size),
    ]
    for vector, place in zip(vectors, placed, strict=True):
        assert data[place.offset : place.offset + place.length] == vector.blob
        body = vector.blob[4:-4]
        assert vector.blob[-4:] == zlib.crc32(body).to_bytes(4, "big")
    payload_bytes = int.from_bytes(data[-12:-8], "little")
    payload = data[-12 - payload_bytes : -12]
    assert data[:4] == data[-4:] == data[-16 - payload_bytes : -12 - payload_bytes] == b"PFA1"
    assert data[-8:-4] == bytes(4), "the footer is not compressed"
    assert json.loads(payload) == {
        "blobs": [
            {
                "type": "deletion-vector-v1", "fields": [2147483645], "snapshot-id": -1, "sequence-number": -1,
                "offset": place.offset, "length": place.length,
                "properties": {"referenced-data-file": place.path, "cardinality": "2"},
            }
            for place in placed
        ],
        "properties": {"created-by": "tidemill"},
    }  # fmt: skip
