"""Blocks: a round trip preserves the rows, and every damaged byte is detected."""

from __future__ import annotations

import os
import sys

import crc32c
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.metastore.sst_world import Rows, numbered_rows, row_sets
from tidemill.base.errors import CorruptError
from tidemill.metastore.lsm.block import Block, decode_block, encode_block, seal, shared_bytes, unseal


def sealed(rows: Rows) -> bytes:
    return seal(encode_block(*rows)[0])


def opened(data: bytes, rows: int) -> Block:
    return decode_block(data, "some.sst", 4096, rows)


@given(row_sets())
def test_rows_come_back_as_they_were(rows: Rows) -> None:
    block = opened(sealed(rows), len(rows[0]))
    assert (block.keys, block.values, block.seqnos()) == rows
    assert [block.seqno(row) for row in range(len(rows[0]))] == rows[2]


@given(row_sets(), st.binary(max_size=12))
def test_find_gives_the_row_or_minus_one(rows: Rows, stranger: bytes) -> None:
    block = opened(sealed(rows), len(rows[0]))
    assert [block.find(key) for key in rows[0]] == list(range(len(rows[0])))
    if stranger not in rows[0]:
        assert block.find(stranger) == -1
    assert block.by_key is None and block.index() == dict(zip(rows[0], rows[1], strict=True)) == block.by_key


@given(row_sets(max_size=8), st.data())
def test_every_flipped_byte_is_found(rows: Rows, data: st.DataObject) -> None:
    good = sealed(rows)
    flip = data.draw(st.integers(1, 255))
    for at in range(len(good)):
        bad = good[:at] + bytes((good[at] ^ flip,)) + good[at + 1 :]
        with pytest.raises(CorruptError):
            opened(bad, len(rows[0]))


@given(row_sets(max_size=8))
def test_every_truncation_and_every_addition_is_found(rows: Rows) -> None:
    good = sealed(rows)
    for bad in [good[:end] for end in range(len(good))] + [good + b"\0", b"\0" + good]:
        with pytest.raises(CorruptError):
            opened(bad, len(rows[0]))


def test_damage_is_told_with_file_section_and_offset() -> None:
    with pytest.raises(CorruptError, match=r"file=some\.sst section=block offset=4096"):
        opened(b"\1" + sealed(numbered_rows(3))[1:-1] + b"?", 3)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (msgspec.msgpack.encode({"not": "a block"}), "does not decode"),
        (msgspec.msgpack.encode((b"", [b"a", b"b"], [b"1"], 0, 0, b"")), "holds 2 keys, 1 values, not 2 rows"),
        (msgspec.msgpack.encode((b"", [b"a", b"b"], [b"1", b"2"], 0, 1, b"x")), "rows"),
        (msgspec.msgpack.encode((b"p", b"", [b"1", b"2"], 0, 0, b"")), "holds 0 keys"),
        (msgspec.msgpack.encode((b"", [b"a"], [b"1"], 0, 0, b"")), "holds 1 keys, 1 values, not 2 rows"),
    ],
)
def test_a_whole_section_that_is_not_the_expected_block_is_found(body: bytes, reason: str) -> None:
    with pytest.raises(CorruptError, match=reason):
        opened(seal(body), 2)


def test_an_unknown_codec_is_told() -> None:
    data = b"\x07" + b"payload"
    with pytest.raises(CorruptError, match="codec 7 is unknown"):
        unseal(data + crc32c.crc32c(data).to_bytes(4, "little"), "some.sst", "block", 0)


def test_a_payload_that_does_not_shrink_is_stored_raw() -> None:
    noise = os.urandom(500)
    assert seal(noise)[0] == 0 and len(seal(noise)) == 505 and unseal(seal(noise), "f", "block", 0) == noise
    text = b"abcdefgh" * 100
    assert seal(text)[0] == 1 and len(seal(text)) < 100 and unseal(seal(text), "f", "block", 0) == text


def test_the_common_prefix_is_stored_once() -> None:
    keys = [b"metastore/extent/%04d" % number for number in range(50)]
    payload, _, _ = encode_block(keys, [b"v"] * 50, [7] * 50)
    assert payload.count(b"metastore/extent/00") == 1


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=300, unique=True), st.binary(max_size=3))
def test_keys_of_any_bytes_come_back(suffixes: list[bytes], prefix: bytes) -> None:
    keys = sorted(prefix + suffix for suffix in suffixes)
    rows = keys, [b"v"] * len(keys), [1] * len(keys)
    assert opened(sealed(rows), len(keys)).keys == keys


@pytest.mark.parametrize("prefix", [b"", b"\xff", b"text/", bytes(range(256))])
@pytest.mark.parametrize("taken", [0, 1, 200, 256])
def test_a_separator_is_a_byte_of_no_key(prefix: bytes, taken: int) -> None:
    """`taken`: how many bytes, from 255 down, occur in keys; with all of them there is no separator."""
    keys = sorted(
        {prefix + bytes((code, code)) for code in range(255, 255 - taken, -1)} | {prefix + b"", prefix + b"a"}
    )
    payload, _, _ = encode_block(keys, [b"v"] * len(keys), [1] * len(keys))
    suffixes = msgspec.msgpack.decode(payload)[1]
    if isinstance(suffixes, bytes):
        assert not any(suffixes[:1] in key for key in keys)
    assert isinstance(suffixes, list) == (taken == 256 or len(prefix) == 256)
    assert opened(seal(payload), len(keys)).keys == keys


@pytest.mark.parametrize(
    ("span", "width"), [(0, 0), (1, 1), (255, 1), (256, 2), (65_535, 2), (65_536, 4), (2**32 - 1, 4), (2**32, 8)]
)
def test_seqnos_take_the_width_that_their_span_needs(span: int, width: int) -> None:
    seqnos = [10**6 + span, 10**6, 10**6 + span // 2]
    payload, low, high = encode_block([b"a", b"b", b"c"], [b"1", b"2", b"3"], seqnos)
    assert (low, high) == (10**6, 10**6 + span)
    body = msgspec.msgpack.decode(payload)
    assert body[4] == width and len(body[5]) == 3 * width
    assert opened(seal(payload), 3).seqnos() == seqnos


@given(st.binary(max_size=12), st.binary(max_size=6), st.binary(max_size=6))
def test_shared_bytes_counts_the_common_prefix(prefix: bytes, a: bytes, b: bytes) -> None:
    a, b = prefix + a, prefix + b
    assert shared_bytes(a, b) == max(count for count in range(min(len(a), len(b)) + 1) if a[:count] == b[:count])


@pytest.mark.parametrize("value_bytes", [8, 100, 1000])
def test_the_cost_of_a_block_is_the_memory_it_takes(value_bytes: int) -> None:
    rows = numbered_rows(80, value_bytes=value_bytes)
    block = opened(sealed(rows), 80)
    taken = sum(map(sys.getsizeof, [block.keys, block.values, block.index(), *block.keys, *block.values]))
    assert taken <= block.cost_bytes <= 1.25 * taken
