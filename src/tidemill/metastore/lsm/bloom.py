"""Register-blocked Bloom filter: one 64-bit word per key, five bits of it, one memory access per look-up.

    h     = crc32 (the one of zlib) of the key
    word  = (h * words) >> 32
    mask  = MASKS[h & 16383]             MASKS[i]: the first five distinct 6-bit groups of mix(i), lowest first
    mix   = SplitMix64's output for state i * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15 (mod 2**64)

A key may be in the set if all bits of its mask are set in its word. Words are little end first.
The word index grows with h, so sorted hashes are sorted by word: building needs one sort and no scatter.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from zlib import crc32

import numpy as np

BITS_PER_MASK = 5
_MASK_COUNT = 16_384
_SLICE = 16_384
"""Hashes that are added to a filter in one step."""
_GAMMA = 0x9E3779B97F4A7C15


def _masks() -> list[int]:
    mixed = np.arange(1, _MASK_COUNT + 1, dtype=np.uint64) * np.uint64(_GAMMA)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    masks = np.zeros(_MASK_COUNT, dtype=np.uint64)
    for shift in range(0, 60, 6):
        bit = np.uint64(1) << ((mixed >> np.uint64(shift)) & np.uint64(63))
        masks |= np.where(np.bitwise_count(masks) < BITS_PER_MASK, bit, np.uint64(0))
    return [int(mask) for mask in masks]


MASKS = _masks()
_MASK_WORDS = np.array(MASKS, dtype=np.uint64)


def hashes_of(keys: Iterable[bytes]) -> array[int]:
    """Return one uint32 per key, the input of `build_filter`."""
    return array("I", map(crc32, keys))


def build_filter(hashes: array[int], bits_per_key: int) -> bytes:
    """Return the words of a filter over these hashes; empty if `bits_per_key` is 0. About 5 ms for 250k keys."""
    if not bits_per_key or not hashes:
        return b""
    count = (len(hashes) * bits_per_key + 63) // 64
    words = np.zeros(count, dtype="<u8")
    ordered = np.sort(np.frombuffer(hashes, dtype=np.uint32))
    # In slices that fit the processor's cache. A word may span two slices, so it is or-ed, not set.
    for start in range(0, len(ordered), _SLICE):
        part = ordered[start : start + _SLICE].astype(np.uint64)
        at = (part * np.uint64(count)) >> np.uint64(32)
        firsts = np.flatnonzero(np.concatenate(([True], at[1:] != at[:-1])))
        masks = _MASK_WORDS[part & np.uint64(_MASK_COUNT - 1)]
        words[at[firsts]] |= np.bitwise_or.reduceat(masks, firsts)
    return words.tobytes()


def decode_filter(data: bytes) -> array[int]:
    """Decode the words of a filter. A missing filter becomes one word with every bit set, which matches every key."""
    words = array("Q", data or b"\xff" * 8)
    if sys.byteorder == "big":
        words.byteswap()
    return words


def may_contain(words: array[int], key: bytes) -> bool:
    """Return False only if the key is certainly not in the set. `TableMeta.may_contain` is an inlined copy."""
    h = crc32(key)
    mask = MASKS[h & 16383]
    return words[(h * len(words)) >> 32] & mask == mask
