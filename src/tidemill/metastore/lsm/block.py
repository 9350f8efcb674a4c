"""Blocks of rows, and the seal that every section of a file has.

section  codec uint8 (0 = raw, 1 = LZ4 block with its size before it) | payload | crc32c uint32 of all before it
block    a section whose payload is the msgpack array
         [prefix, suffixes, [value ...], seqno_base, seqno_width, seqno_deltas]
suffixes bin: each suffix after one separator byte, which is the first byte and occurs in no key of the block;
         if no such byte was found, the array [suffix ...]

Keys are prefix + suffix, ascending and unique. The empty value is a tombstone. The seqno of row i is
seqno_base + delta i; deltas take seqno_width bytes each (0, 1, 2, 4 or 8), little end first, and width 0 means that all
rows have the base. Keys in one bin are restored by a replace and a split, which takes half the time of one
concatenation each: cold scans spend most of their time decoding.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Sequence
from operator import itemgetter

import crc32c
import lz4.block
import msgspec

from tidemill.base.errors import CorruptError

_RAW, _LZ4 = b"\x00", b"\x01"
_CRC_BYTES = 4
SEAL_BYTES = 1 + _CRC_BYTES

_TYPECODES = {1: "B", 2: "H", 4: "I", 8: "Q"}

_SEPARATORS = [bytes((code,)) for code in (*range(0xFF, 0xF4, -1), 0xC1, 0xC0, *range(0x01, 0x20))]
"""Candidate separators, in this order: first bytes that never occur in UTF-8 text. Any byte would be correct."""

_ROW_COST_BYTES = 2 * (33 + 8) + 12
"""Memory cost of a row in addition to its bytes: two bytes objects, two list slots, rounding by the allocator."""
_BLOCK_COST_BYTES = 700
"""Memory cost of a block in addition to its rows: the object, its lists, its dict, its cache entry."""
_DICT_SLOT_COST_BYTES = 18
"""Memory cost of a slot of `by_key`, counted in advance: a dict has two rows per three slots, in powers of two."""

_crc32c = crc32c.crc32c
_compress = lz4.block.compress
_decompress = lz4.block.decompress
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[bytes, bytes | list[bytes], list[bytes], int, int, bytes]).decode
_CRC_RAW, _CRC_LZ4 = _crc32c(_RAW), _crc32c(_LZ4)


class Block:
    """One decoded block. The cache shares its lists: they must not be modified."""

    __slots__ = ("_base", "_deltas", "_width", "by_key", "cost_bytes", "hot", "keys", "values")

    keys: list[bytes]
    values: list[bytes]
    cost_bytes: int
    hot: bool
    """Set by every use; cleared by the cache when it looks for an entry to drop."""

    def __init__(self, keys: list[bytes], values: list[bytes], base: int, width: int, deltas: bytes, cost: int) -> None:
        self.keys = keys
        self.values = values
        self._base = base
        self._width = width
        self._deltas = deltas
        self.cost_bytes = cost
        self.hot = False
        self.by_key: dict[bytes, bytes] | None = None
        """Map from key to value, including tombstones, created by `index`. Point reads of a cached block use it."""

    def index(self) -> dict[bytes, bytes]:
        """Create `by_key`."""
        self.by_key = dict(zip(self.keys, self.values, strict=True))
        return self.by_key

    def find(self, key: bytes) -> int:
        """Return the row index of `key`, or -1."""
        keys = self.keys
        at = bisect_left(keys, key)
        return at if at < len(keys) and keys[at] == key else -1

    def seqno(self, row: int) -> int:
        width = self._width
        return self._base + int.from_bytes(self._deltas[row * width : row * width + width], "little")

    def seqnos(self) -> list[int]:
        """Return one seqno per row. Decoded by each call: reads need no seqnos, compactions need them once."""
        base = self._base
        if not self._width:
            return [base] * len(self.keys)
        deltas = struct.unpack(f"<{len(self.keys)}{_TYPECODES[self._width]}", self._deltas)
        return [base + delta for delta in deltas]


def encode_block(keys: Sequence[bytes], values: Sequence[bytes], seqnos: Sequence[int]) -> tuple[bytes, int, int]:
    """Return the payload of a block, to be sealed, and its lowest and highest seqno. At least one row; keys
    ascending."""
    # The keys are sorted, so the prefix shared by the first and the last is shared by all.
    shared = shared_bytes(keys[0], keys[-1]) if len(keys) > 1 else 0
    prefix = keys[0][:shared]
    suffixes = list(map(itemgetter(slice(shared, None)), keys)) if shared else keys
    low, high, width, deltas = _pack_seqnos(seqnos)
    return _encode((prefix, _join_suffixes(prefix, suffixes), values, low, width, deltas)), low, high


def decode_block(data: bytes, file: str, offset: int, rows: int) -> Block:
    """Decode a block. Raises CorruptError naming the file if its checksum is wrong or it does not have `rows` rows."""
    payload = unseal(data, file, "block", offset)
    try:
        prefix, suffixes, values, base, width, deltas = _decode(payload)
    except msgspec.MsgspecError as error:
        raise corrupt_error(file, "block", offset, f"its body does not decode, {error}") from error
    if isinstance(suffixes, bytes):
        separator = suffixes[:1]
        keys = suffixes.replace(separator, separator + prefix).split(separator or b"?")
        del keys[0]
    else:
        keys = [prefix + suffix for suffix in suffixes]
    if not rows == len(keys) == len(values) or len(deltas) != rows * width:
        raise corrupt_error(file, "block", offset, f"it holds {len(keys)} keys, {len(values)} values, not {rows} rows")
    cost_bytes = len(payload) + rows * (len(prefix) + _ROW_COST_BYTES) + _BLOCK_COST_BYTES
    cost_bytes += _DICT_SLOT_COST_BYTES << (3 * rows // 2).bit_length()
    return Block(keys, values, base, width, deltas, cost_bytes)


def seal(payload: bytes, *, compress: bool = True) -> bytes:
    """Return a section. It is stored uncompressed if LZ4 does not shrink it."""
    if compress:
        packed = _compress(payload)
        if len(packed) < len(payload):
            return b"".join((_LZ4, packed, _crc32c(packed, _CRC_LZ4).to_bytes(_CRC_BYTES, "little")))
    return b"".join((_RAW, payload, _crc32c(payload, _CRC_RAW).to_bytes(_CRC_BYTES, "little")))


def unseal(data: bytes, file: str, section: str, offset: int) -> bytes:
    """Return the payload of a section that begins at `offset` of `file`. Raises CorruptError."""
    if len(data) < SEAL_BYTES:
        raise corrupt_error(file, section, offset, f"it ends after {len(data)} bytes")
    view = memoryview(data)
    stored = int.from_bytes(data[-_CRC_BYTES:], "little")
    computed = _crc32c(view[:-_CRC_BYTES])
    if stored != computed:
        raise corrupt_error(file, section, offset, f"its checksum is {computed:08x}, not the stored {stored:08x}")
    codec = data[0]
    if codec == 1:
        try:
            return bytes(_decompress(view[1:-_CRC_BYTES]))
        except lz4.block.LZ4BlockError as error:
            raise corrupt_error(file, section, offset, f"it does not decompress, {error}") from error
    if codec == 0:
        return data[1:-_CRC_BYTES]
    raise corrupt_error(file, section, offset, f"its codec {codec} is unknown")


def corrupt_error(file: str, section: str, offset: int, reason: str) -> CorruptError:
    return CorruptError(
        f"a {section} of a file is damaged, {reason}: file={file} section={section} offset={offset}.",
        fix="Restore the object from a copy of the bucket, or restore the domain from an older manifest.",
    )


def shared_bytes(a: bytes, b: bytes) -> int:
    """Return the number of leading bytes that both share."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    # The highest differing bit of the two as numbers is in the first differing byte.
    differing = int.from_bytes(a[:length], "big") ^ int.from_bytes(b[:length], "big")
    return length - (differing.bit_length() + 7) // 8


def _join_suffixes(prefix: bytes, suffixes: Sequence[bytes]) -> bytes | Sequence[bytes]:
    first = _SEPARATORS[0]
    joined = first + first.join(suffixes)
    if joined.count(first) == len(suffixes) and first not in prefix:
        return joined
    for separator in _SEPARATORS[1:]:
        if separator not in joined and separator not in prefix:
            return separator + separator.join(suffixes)
    return suffixes


def _pack_seqnos(seqnos: Sequence[int]) -> tuple[int, int, int, bytes]:
    """Return lowest and highest seqno, width, deltas."""
    low = seqnos[0]
    if seqnos.count(low) == len(seqnos):
        return low, low, 0, b""
    low, high = min(seqnos), max(seqnos)
    deltas = [seqno - low for seqno in seqnos]
    span = high - low
    if span < 1 << 8:
        return low, high, 1, bytes(deltas)
    width = 2 if span < 1 << 16 else 4 if span < 1 << 32 else 8
    return low, high, width, struct.pack(f"<{len(deltas)}{_TYPECODES[width]}", *deltas)
