"""One file: written from chunks, opened from its last bytes, with every damaged byte detected."""

from __future__ import annotations

import random
import struct
import zlib
from bisect import bisect_left

import crc32c
import lz4.block
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.metastore.sst_world import Rows, numbered_rows, read_sst, row_sets, write_sst
from tidemill.base.errors import CorruptError, InvalidError
from tidemill.metastore.lsm import bloom
from tidemill.metastore.lsm.block import decode_block
from tidemill.metastore.lsm.options import Options
from tidemill.metastore.lsm.sst import FORMAT, SstSummary, SstWriter, decode_meta, separator

TINY = Options(block_bytes=64)


@given(row_sets(), st.integers(1, 20), st.sampled_from([1, 64, 8192]))
def test_rows_come_back_as_they_were(rows: Rows, chunk: int, block_bytes: int) -> None:
    data, summary = write_sst(rows, chunk=chunk, options=Options(block_bytes=block_bytes))
    assert read_sst(data, summary.named(1, 2, "n")) == rows


@given(row_sets(), st.integers(1, 20))
def test_a_file_depends_on_its_rows_and_not_on_the_chunks_they_came_in(rows: Rows, chunk: int) -> None:
    assert write_sst(rows, chunk=chunk, options=TINY) == write_sst(rows, chunk=1000, options=TINY)


@given(row_sets())
def test_the_summary_says_what_the_manifest_needs(rows: Rows) -> None:
    data, summary = write_sst(rows, options=TINY)
    keys, _, seqnos = rows
    assert (summary.smallest, summary.largest, summary.rows) == (keys[0], keys[-1], len(keys))
    assert (summary.min_seqno, summary.max_seqno) == (min(seqnos), max(seqnos))
    assert summary.size_bytes == len(data)
    file = summary.named(7, 8, "nonce")
    assert (file.epoch, file.number, file.nonce, file.meta_start) == (7, 8, "nonce", summary.meta_start)
    assert decode_meta(data[file.meta_start :], file, "f").starts[-1] == file.meta_start


@given(row_sets(), st.binary(max_size=12))
def test_the_index_leads_to_the_only_block_that_can_hold_a_key(rows: Rows, stranger: bytes) -> None:
    data, summary = write_sst(rows, options=TINY)
    meta = decode_meta(data[summary.meta_start :], summary.named(1, 2, "n"), "f")
    blocks = [
        decode_block(data[meta.starts[index] : meta.starts[index + 1]], "f", meta.starts[index], count)
        for index, count in enumerate(meta.rows)
    ]
    for index, block in enumerate(blocks):
        assert block.keys[-1] <= meta.last_keys[index]
        if index + 1 < len(blocks):
            assert meta.last_keys[index] < blocks[index + 1].keys[0]
        assert all(meta.find(key) == index and meta.may_contain(key) for key in block.keys)
    assert meta.last_keys[-1] == rows[0][-1]
    holders = [index for index, block in enumerate(blocks) if block.keys[0] <= stranger <= block.keys[-1]]
    assert holders in ([], [meta.find(stranger)])
    if stranger > rows[0][-1]:
        assert meta.find(stranger) == len(blocks)


@given(st.binary(max_size=8), st.binary(max_size=8))
def test_a_separator_lies_between_and_is_never_longer(a: bytes, b: bytes) -> None:
    if a != b:
        last, following = sorted((a, b))
        found = separator(last, following)
        assert last <= found < following and len(found) <= len(last)


@pytest.mark.parametrize(
    ("last", "following", "expected"),
    [
        (b"abcdef", b"abzzzz", b"abd"),
        (b"row/00163999", b"row/00164000", b"row/00163:"),
        (b"a", b"ab", b"a"),
        (b"a\xff\xff", b"b", b"a\xff\xff"),
        (b"a\xff\x01z", b"b", b"a\xff\x02"),
    ],
)
def test_separators_are_short(last: bytes, following: bytes, expected: bytes) -> None:
    assert separator(last, following) == expected


def test_blocks_keep_to_their_size_whatever_the_rows_weigh() -> None:
    seeded = random.Random(5)
    sizes = [10] * 3000 + [5000] * 200 + [0] * 3000 + [seeded.choice((5, 50, 3000, 40_000)) for _ in range(500)]
    keys = [b"row/%08d" % number for number in range(len(sizes))]
    rows = keys, [seeded.randbytes(size) for size in sizes], [9] * len(sizes)
    data, summary = write_sst(rows)
    meta = decode_meta(data[summary.meta_start :], summary.named(1, 2, "n"), "f")
    at = 0
    for count, start, end in zip(meta.rows, meta.starts, meta.starts[1:], strict=False):
        raw = sum(sizes[at : at + count])
        assert count == 1 or raw <= 2 * 8192
        assert end - start <= raw + count * 20 + 200
        at += count
    assert len(meta.rows) < 3 * (summary.size_bytes / 8192 + 500)


def test_the_size_so_far_is_about_the_size_of_the_file() -> None:
    rows = numbered_rows(20_000, value_bytes=100)
    writer = SstWriter(Options())
    for at in range(0, 20_000, 2_000):
        writer.add(*(column[at : at + 2_000] for column in rows))
    reported = writer.size_bytes
    assert reported == pytest.approx(writer.finish()[1].size_bytes, rel=0.1)


def test_buffers_are_few() -> None:
    seeded = random.Random(3)
    writer = SstWriter(Options())
    for at in range(0, 40_000, 2_000):
        keys = [b"row/%08d" % number for number in range(at, at + 2_000)]
        writer.add(keys, [seeded.randbytes(100) for _ in keys], [1] * 2_000)
    buffers, summary = writer.finish()
    assert len(buffers) <= summary.size_bytes // 2**20 + 2


@pytest.mark.parametrize(
    "chunks",
    [
        [([b"b", b"a"], [b"1", b"2"], [1, 1])],
        [([b"a", b"a"], [b"1", b"2"], [1, 1])],
        [([b"a"], [b"1"], [1]), ([b"a"], [b"2"], [1])],
        [([b"b"], [b"1"], [1]), ([b"a"], [b"2"], [1])],
        [([b"a", b"b"], [b"1"], [1, 1])],
        [([b"a"], [b"1"], [])],
    ],
    ids=["descending", "twice", "twice over chunks", "descending over chunks", "a value short", "no seqno"],
)
def test_disordered_and_ragged_rows_are_refused(chunks: list[Rows]) -> None:
    writer = SstWriter(Options())
    for chunk in chunks[:-1]:
        writer.add(*chunk)
    with pytest.raises(InvalidError):
        writer.add(*chunks[-1])


def test_a_file_without_rows_is_refused() -> None:
    writer = SstWriter(Options())
    writer.add([], [], [])
    with pytest.raises(InvalidError, match="at least one row"):
        writer.finish()


def test_the_empty_key_is_a_key_like_any_other() -> None:
    rows: Rows = ([b"", b"a"], [b"zero", b""], [3, 4])
    data, summary = write_sst(rows)
    assert read_sst(data, summary.named(1, 2, "n")) == rows and summary.smallest == b""
    writer = SstWriter(Options())
    writer.add([b""], [b"zero"], [3])
    with pytest.raises(InvalidError):
        writer.add([b""], [b"again"], [4])


@settings(max_examples=20)
@given(row_sets(max_size=12), st.integers(1, 255))
def test_every_flipped_byte_of_filter_index_and_footer_is_found(rows: Rows, flip: int) -> None:
    data, summary = write_sst(rows, options=TINY)
    file = summary.named(1, 2, "n")
    tail = data[file.meta_start :]
    for at in range(len(tail)):
        with pytest.raises(CorruptError, match=r"file=f section=(filter|index|footer) offset=\d+"):
            decode_meta(tail[:at] + bytes((tail[at] ^ flip,)) + tail[at + 1 :], file, "f")


@settings(max_examples=20)
@given(row_sets(max_size=12))
def test_every_truncation_of_filter_index_and_footer_is_found(rows: Rows) -> None:
    data, summary = write_sst(rows, options=TINY)
    file = summary.named(1, 2, "n")
    tail = data[file.meta_start :]
    for bad in [tail[:end] for end in range(len(tail))] + [tail[start:] for start in range(1, len(tail) + 1)]:
        with pytest.raises(CorruptError):
            decode_meta(bad, file, "f")


FORMAT_1 = bytes.fromhex(
    "0135000000f80796c404726f772fc407ff31ff32ff333093c40f6f6e650300f004c400c40574687265650702c40625010000"
    "02006199d06c000001492140c089c0f2997120009391c406726f772f3330920038910362b4a7743800000000000000450000"
    "000000000059000000000000000100000000000000030000000000000007000000000000002c010000000000004800010054"
    "4944454d5353549b28548f"
)
"""A file of format 1 as its first version wrote it."""


FORMAT_1_ROWS: Rows = ([b"row/1", b"row/2", b"row/30"], [b"one" * 5, b"", b"three"], [300, 7, 9])
FORMAT_1_SUMMARY = SstSummary(len(FORMAT_1), 3, b"row/1", b"row/30", 7, 300, 56)


def test_files_of_format_1_are_read_for_ever() -> None:
    assert read_sst(FORMAT_1, FORMAT_1_SUMMARY.named(1, 2, "n")) == FORMAT_1_ROWS


def read_by_the_page(data: bytes) -> Rows:
    """Read a file by docs/internals/metastore-format.md alone, without code of the package."""

    def section(start: int, end: int) -> bytes:
        assert crc32c.crc32c(data[start : end - 4]) == int.from_bytes(data[end - 4 : end], "little")
        stored = data[start + 1 : end - 4]
        return bytes(lz4.block.decompress(stored)) if data[start] else stored

    footer_bytes, number, magic, crc = struct.unpack("<HH8sI", data[-16:])
    assert (number, magic, crc) == (1, b"TIDEMSST", crc32c.crc32c(data[-footer_bytes:-4]))
    fields = struct.unpack("<5Q2q", data[-footer_bytes:-16])
    filter_start, index_start, footer_start, block_count, row_count, min_seqno, max_seqno = fields
    lasts, starts, counts = msgspec.msgpack.decode(section(index_start, footer_start))
    words = struct.unpack(f"<{(index_start - filter_start - 5) // 8}Q", section(filter_start, index_start))
    rows: Rows = ([], [], [])
    for block in range(block_count):
        prefix, suffixes, values, base, width, deltas = msgspec.msgpack.decode(section(*starts[block : block + 2]))
        if isinstance(suffixes, bytes):
            suffixes = suffixes.split(suffixes[:1])[1:]
        assert prefix + suffixes[-1] <= lasts[block] and len(suffixes) == counts[block]
        rows[0].extend(prefix + suffix for suffix in suffixes)
        rows[1].extend(values)
        rows[2].extend(
            base + int.from_bytes(deltas[width * i : width * i + width], "little") for i in range(len(values))
        )
    for key in rows[0]:
        h = zlib.crc32(key)
        z = ((h & 16383) + 1) * 0x9E3779B97F4A7C15 % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        z ^= z >> 31
        bits = list(dict.fromkeys(z >> shift & 63 for shift in range(0, 60, 6)))[:5]
        assert all(words[h * len(words) >> 32] >> bit & 1 for bit in bits)
    assert (len(rows[0]), min(rows[2]), max(rows[2])) == (row_count, min_seqno, max_seqno)
    return rows


def test_a_reader_written_from_the_page_reads_what_is_written() -> None:
    assert read_by_the_page(FORMAT_1) == FORMAT_1_ROWS
    seeded = random.Random(2)
    wide = sorted(seeded.randbytes(12) for _ in range(3_000))
    for rows in (
        numbered_rows(5_000, value_bytes=60),
        (wide, [seeded.randbytes(seeded.randrange(200)) for _ in wide], [seeded.getrandbits(62) for _ in wide]),
    ):
        assert read_by_the_page(write_sst(rows)[0]) == rows


def test_damage_is_told_with_its_section_and_offset() -> None:
    data, summary = write_sst(numbered_rows(500))
    file = summary.named(1, 2, "n")
    tail = bytearray(data[file.meta_start :])
    tail[3] ^= 1
    with pytest.raises(CorruptError, match=f"file=some.sst section=filter offset={file.meta_start}"):
        decode_meta(bytes(tail), file, "some.sst")


def test_another_file_under_this_name_is_found() -> None:
    mine = write_sst(numbered_rows(100, seqno=1))[1].named(1, 2, "n")
    others, summary = write_sst(numbered_rows(100, seqno=2))
    assert summary.size_bytes == mine.size_bytes
    with pytest.raises(CorruptError, match="does not match the manifest"):
        decode_meta(others[mine.meta_start :], mine, "f")


def test_another_file_of_the_same_counts_is_found_by_its_largest_key() -> None:
    mine = write_sst(numbered_rows(100, first=200, seqno=500))[1].named(1, 2, "n")
    others, summary = write_sst(numbered_rows(100, first=300, seqno=400))
    assert (summary.size_bytes, summary.meta_start) == (mine.size_bytes, mine.meta_start)
    assert (summary.min_seqno, summary.max_seqno) == (mine.min_seqno, mine.max_seqno)
    with pytest.raises(CorruptError, match="section=index"):
        decode_meta(others[mine.meta_start :], mine, "f")


def test_a_file_of_a_newer_format_is_refused_with_both_numbers() -> None:
    data, summary = write_sst(numbered_rows(10))
    footer_bytes = struct.unpack_from("<H", data, len(data) - 16)[0]
    newer = bytearray(data)
    struct.pack_into("<H", newer, len(data) - 14, FORMAT + 1)
    struct.pack_into("<I", newer, len(data) - 4, crc32c.crc32c(bytes(newer[-footer_bytes:-4])))
    file = summary.named(1, 2, "n")
    with pytest.raises(
        InvalidError, match=f"newer version of tidemill: file=f format={FORMAT + 1} supported={FORMAT}"
    ) as e:
        decode_meta(bytes(newer[file.meta_start :]), file, "f")
    assert e.value.fix


def test_may_hold_is_the_filter_of_the_format() -> None:
    rows = numbered_rows(3_000)
    data, summary = write_sst(rows)
    meta = decode_meta(data[summary.meta_start :], summary.named(1, 2, "n"), "f")
    words = bloom.decode_filter(bloom.build_filter(bloom.hashes_of(rows[0]), 12))
    asked = rows[0] + [b"other/%d" % number for number in range(3_000)]
    assert [meta.may_contain(key) for key in asked] == [bloom.may_contain(words, key) for key in asked]
    assert sum(map(meta.may_contain, asked[3_000:])) < 60


def test_without_a_filter_every_key_may_be_there() -> None:
    data, summary = write_sst(numbered_rows(100), options=Options(bloom_bits_per_key=0))
    meta = decode_meta(data[summary.meta_start :], summary.named(1, 2, "n"), "f")
    assert meta.may_contain(b"anything") and meta.find(b"row/00000050") == bisect_left(meta.last_keys, b"row/00000050")
