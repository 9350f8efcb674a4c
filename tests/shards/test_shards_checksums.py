"""Checksums of parts: after any flipped bit, each way to read returns the written rows or raises CorruptError."""

from __future__ import annotations

import io
import random
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tidemill.base.errors import CorruptError
from tidemill.shards.api import DIFF, TIME, Batch, Column, Part, ShardSchema
from tidemill.shards.parts.checksums import open_part, seal_bytes, unseal_bytes
from tidemill.shards.parts.parquet_pages import check_pages
from tidemill.shards.parts.parts import Codec, decode_part, encode_part
from tidemill.shards.read.verified_file import VerifiedFile
from tidemill.shards.state.codec import decode_batch, decode_command, encode_batch, encode_command
from tidemill.shards.state.commands import Append

COUNT = 300
SCHEMA = ShardSchema(
    (Column("k", "int64"), Column("s", "string"), Column("b", "bool"), Column("d", "decimal(20,4)")), ("k",)
)
ROWS = pa.table(
    {
        "k": range(COUNT),
        "s": [f"v{i % 7}" for i in range(COUNT)],
        "b": [i % 3 == 0 for i in range(COUNT)],
        "d": pa.array([Decimal(i) / 4 for i in range(COUNT)], pa.decimal128(20, 4)),
        TIME: pa.array([5 + i % 2 for i in range(COUNT)], pa.int64()),
        DIFF: pa.array([1] * COUNT, pa.int64()),
    }
)


def by_pieces(part: Part, data: bytes) -> pa.Table:
    file = open_part(part, io.BytesIO(data))
    return pa.concat_tables([file.read_row_group(group) for group in range(file.metadata.num_row_groups)])


def by_an_engine(part: Part, data: bytes) -> pa.Table:
    """Read with an engine that verifies nothing, through `VerifiedFile`."""
    file: Any = VerifiedFile(part, io.BytesIO(data))  # type: ignore[arg-type]
    return pq.ParquetFile(file, page_checksum_verification=False).read()


def whole(part: Part, data: bytes) -> pa.Table:
    return decode_part(SCHEMA, data, part)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
@pytest.mark.parametrize("read", [whole, by_pieces, by_an_engine])
def test_a_flipped_bit_is_corrupt_or_changes_nothing(read: Any, codec: Codec) -> None:
    encoded = encode_part(SCHEMA, ROWS, codec)
    part, good = encoded.to_part(0, "shards/x/y.parquet"), encoded.data.to_pybytes()
    want = read(part, good)
    assert sorted(want.column("d").to_pylist()) == [Decimal(i) / 4 for i in range(COUNT)]
    refused = 0
    for bit in random.Random(4).sample(range(8 * len(good)), 400):
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            found = read(part, bytes(damaged))
        except (CorruptError, pa.ArrowException, OSError):  # the readers of parts make one of the three
            refused += 1
            continue
        assert found.equals(want), f"bit {bit} of {codec}"
    assert refused > 380


def test_pages_have_checksums_and_a_damaged_one_is_named() -> None:
    data = encode_part(SCHEMA, ROWS).data.to_pybytes()
    chunk = pq.read_metadata(pa.BufferReader(data)).row_group(0).column(3)
    pages = bytearray(data[chunk.data_page_offset : chunk.data_page_offset + chunk.total_compressed_size])
    check_pages(memoryview(pages), "object=x")
    pages[-5] ^= 1
    with pytest.raises(CorruptError, match="page is damaged: object=x page_byte=0"):
        check_pages(memoryview(pages), "object=x")
    with pytest.raises(CorruptError, match="unreadable"):
        check_pages(memoryview(b"\x15"), "object=x")


def test_checksums_are_in_the_state_and_parts_without_them_are_written_as_before() -> None:
    old, new = Part(3, 100, 0, "o", b"", 1, 9), Part(3, 100, 0, "o", b"", 1, 9, 0, 0xFFFFFFFF)
    for part, fields in ((old, 7), (new, 9)):
        batch = Batch(0, 10, (part,), "w", "t")
        assert decode_command(encode_command(Append(batch))) == Append(batch)
        assert decode_batch(encode_batch(batch)) == batch
        assert len(msgspec.msgpack.decode(encode_batch(batch))[4][0]) == fields


def test_what_is_sealed_opens_unless_a_bit_was_flipped() -> None:
    for data in (b"", b"abc", bytes(1000)):
        box = bytearray(seal_bytes(data))
        assert bytes(unseal_bytes(box, "box")) == data
        for at in range(len(box)):
            box[at] ^= 16
            with pytest.raises(CorruptError, match="box is damaged"):
                unseal_bytes(box, "box")
            box[at] ^= 16
    with pytest.raises(CorruptError):
        unseal_bytes(b"abc", "box")
