"""The filter: no present key is denied, few absent keys pass, and its bits follow the documented format."""

from __future__ import annotations

import hashlib
import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.metastore.lsm.bloom import MASKS, build_filter, decode_filter, hashes_of, may_contain

BITS = 12


def make(keys: list[bytes], bits_per_key: int = BITS) -> bytes:
    return build_filter(hashes_of(keys), bits_per_key)


@given(st.lists(st.binary(max_size=30), min_size=1), st.integers(0, 40))
def test_no_key_of_the_set_is_denied(keys: list[bytes], bits_per_key: int) -> None:
    words = decode_filter(make(keys, bits_per_key))
    assert all(may_contain(words, key) for key in keys)


def families() -> dict[str, tuple[list[bytes], list[bytes]]]:
    """Return present and absent keys, both like those of the metastore's rows and unlike them."""
    seeded = random.Random(1)
    many = 40_000
    decimal = [b"extent/%020d" % number for number in range(2 * many)]
    binary = [b"\x05" + struct.pack(">QQ", number // 1000, number % 1000 * 7) for number in range(2 * many)]
    noise = [seeded.randbytes(16) for _ in range(2 * many)]
    topics = [b"topic-%d/partition-%d" % (number // 64, number % 64) for number in range(2 * many)]
    return {
        "every other number": (decimal[::2], decimal[1::2]),
        "the numbers after": (decimal[:many], decimal[many:]),
        "big-endian pairs": (binary[::2], binary[1::2]),
        "random": (noise[:many], noise[many:]),
        "names": (topics[::2], topics[1::2]),
        "one bit away": (noise[:many], [bytes((key[0] ^ 1, *key[1:])) for key in noise[:many]]),
    }


@pytest.mark.parametrize("family", families())
def test_at_most_15_in_1000_absent_keys_are_promised(family: str) -> None:
    present, absent = families()[family]
    words = decode_filter(make(present))
    assert all(may_contain(words, key) for key in present)
    assert sum(may_contain(words, key) for key in absent) / len(absent) <= 0.015


def test_more_bits_promise_fewer_absent_keys() -> None:
    present, absent = families()["random"]
    filters = [decode_filter(make(present, bits)) for bits in (6, 12, 24)]
    few, usual, many = (sum(may_contain(words, key) for key in absent) for words in filters)
    assert few > 3 * usual > 9 * many


def test_without_bits_everything_may_be_there() -> None:
    data = make([b"a", b"b"], 0)
    assert data == b"" and may_contain(decode_filter(data), b"c")


def test_a_filter_takes_the_bits_it_was_given() -> None:
    assert len(make([b"%d" % number for number in range(1000)])) == 8 * ((1000 * BITS + 63) // 64)


def test_every_mask_is_five_bits_as_the_format_draws_them() -> None:
    for index, mask in enumerate(MASKS):
        state = (index * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
        bits = list(dict.fromkeys(state >> shift & 63 for shift in range(0, 60, 6)))[:5]
        assert mask == sum(1 << bit for bit in bits) and mask.bit_count() == 5


def test_the_bits_of_a_filter_never_change() -> None:
    """Later programs read filters on disk: this digest may only change with the format's number."""
    data = make([b"row/%06d" % number for number in range(5_000)])
    assert hashlib.sha256(data).hexdigest()[:16] == "703d2ee0040170ac"
