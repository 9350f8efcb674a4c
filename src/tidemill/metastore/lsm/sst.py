"""A file of sorted rows (SST): written in one pass, opened with one ranged read.

sst     block ... | filter | index | footer          sections as in block.py; filter begins at meta_start
filter  a raw section: the words of bloom.py, or nothing
index   a section whose payload is the msgpack array [[last ...], [start ...], [rows ...]], one entry per block
        and one more start: the end of the last block. `last` is at least the block's last key and less
        than the next block's first; for the last block it is the file's largest key itself.
footer  filter_start, index_start, footer_start, blocks, rows  uint64 | min_seqno, max_seqno  int64
        | footer_bytes uint16 | format uint16 = 1 | 'TIDEMSST' | crc32c uint32 of the footer before it

Integers are little end first. The last 16 bytes of the footer keep their position and meaning in every later format, so
that an old program can distinguish a newer format from damage. The whole format is drawn in
docs/internals/metastore-format.md.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from operator import lt
from typing import NamedTuple
from zlib import crc32

import crc32c
import msgspec

from tidemill.base.errors import InvalidError
from tidemill.base.limits import MIB
from tidemill.metastore.lsm.block import corrupt_error, encode_block, seal, shared_bytes, unseal
from tidemill.metastore.lsm.bloom import MASKS, build_filter, decode_filter, hashes_of
from tidemill.metastore.lsm.manifest import FileMeta
from tidemill.metastore.lsm.options import Options

_JOIN_BYTES = MIB
"""Blocks are passed to the store in buffers of about this size, not one by one."""

_FIRST_GUESS_ROWS = 16

_encode = msgspec.msgpack.Encoder().encode
_decode_index = msgspec.msgpack.Decoder(tuple[list[bytes], list[int], list[int]]).decode


MAGIC = b"TIDEMSST"
FORMAT = 1
_FIELDS = struct.Struct("<QQQQQqq")
_TAIL = struct.Struct("<HH8sI")
FOOTER_BYTES = _FIELDS.size + _TAIL.size
_CRC_BYTES = 4


class Footer(NamedTuple):
    filter_start: int
    index_start: int
    footer_start: int
    blocks: int
    rows: int
    min_seqno: int
    max_seqno: int


def encode_footer(footer: Footer) -> bytes:
    body = _FIELDS.pack(*footer) + _TAIL.pack(FOOTER_BYTES, FORMAT, MAGIC, 0)[:-_CRC_BYTES]
    return body + int(crc32c.crc32c(body)).to_bytes(_CRC_BYTES, "little")


def decode_footer(data: bytes, end: int, name: str) -> Footer:
    """Decode the footer from the last bytes of a file of size `end`.

    Raises CorruptError; InvalidError for a newer format.
    """
    if len(data) < _TAIL.size:
        raise corrupt_error(name, "footer", end - len(data), f"it ends after {len(data)} bytes")
    size, found, magic, stored = _TAIL.unpack_from(data, len(data) - _TAIL.size)
    offset = end - min(size, len(data))
    if magic != MAGIC or not _TAIL.size <= size <= len(data):
        raise corrupt_error(name, "footer", offset, "the file does not end with an SST footer")
    # The checksum is checked before the format: a flipped bit must not look like a newer format.
    computed = int(crc32c.crc32c(memoryview(data)[-size:-_CRC_BYTES]))
    if stored != computed:
        raise corrupt_error(name, "footer", offset, f"its checksum is {computed:08x}, not the stored {stored:08x}")
    if found > FORMAT:
        raise InvalidError(
            f"the file was written by a newer version of tidemill: file={name} format={found} supported={FORMAT}.",
            fix="Use the version of tidemill that wrote it, or a newer one.",
        )
    if size != FOOTER_BYTES:
        raise corrupt_error(name, "footer", offset, f"its length is {size} bytes, not {FOOTER_BYTES}")
    return Footer._make(_FIELDS.unpack_from(data, len(data) - size))


class SstSummary(msgspec.Struct, frozen=True):
    """Description of a file in a manifest, before the file has a name."""

    size_bytes: int
    rows: int
    smallest: bytes
    largest: bytes
    min_seqno: int
    max_seqno: int
    meta_start: int
    tombstones: int = 0

    def named(self, epoch: int, number: int, nonce: str) -> FileMeta:
        return FileMeta(
            epoch,
            number,
            nonce,
            self.size_bytes,
            self.rows,
            self.smallest,
            self.largest,
            self.min_seqno,
            self.max_seqno,
            self.meta_start,
            self.tombstones,
        )


class SstWriter:
    """Encoder of sorted rows into the buffers of one file. Synchronous, no I/O.

    Blocks are cut by the number of rows that filled the last one; a block that turns out more than twice too large is
    split in halves. So no row is measured individually.
    """

    def __init__(self, options: Options) -> None:
        self._target_bytes = options.block_bytes
        self._bits_per_key = options.bloom_bits_per_key
        self._guess_rows = _FIRST_GUESS_ROWS
        self._keys: list[bytes] = []  # rows of the block that is not full yet
        self._values: list[bytes] = []
        self._seqnos: list[int] = []
        self._joined: list[bytes] = []
        self._blocks: list[bytes] = []  # sealed since the last join
        self._unjoined_bytes = 0
        self._written_bytes = 0
        self._hashes: array[int] = array("I")
        self._smallest: bytes | None = None
        self._largest = b""
        self._min_seqno = 0
        self._max_seqno = 0
        self._tombstones = 0
        self._last_keys: list[bytes] = []  # exact keys, shortened once the next block's first key is known
        self._starts: list[int] = [0]
        self._rows: list[int] = []

    @property
    def rows(self) -> int:
        return len(self._hashes)

    @property
    def size_bytes(self) -> int:
        """Approximate size of the file if it ended here: blocks as stored, buffered rows uncompressed."""
        waiting = sum(map(len, self._keys)) + sum(map(len, self._values))
        return self._written_bytes + waiting + len(self._hashes) * self._bits_per_key // 8

    def add(self, keys: Sequence[bytes], values: Sequence[bytes], seqnos: Sequence[int]) -> None:
        """Add rows above all earlier ones, ascending and unique. Raises InvalidError; the writer is unusable after
        that."""
        if not keys:
            return
        if not len(keys) == len(values) == len(seqnos):
            raise InvalidError(
                f"a chunk's columns differ in length: keys={len(keys)} values={len(values)} seqnos={len(seqnos)}.",
            )
        if not (all(map(lt, keys, keys[1:])) and (self._smallest is None or self._largest < keys[0])):
            raise InvalidError(f"keys must ascend and be unique: first={keys[0]!r} after={self._largest!r}.")
        if self._smallest is None:
            self._smallest = keys[0]
            self._min_seqno = self._max_seqno = seqnos[0]
        self._largest = keys[-1]
        self._tombstones += values.count(b"")
        self._hashes += hashes_of(keys)
        self._keys += keys
        self._values += values
        self._seqnos += seqnos
        self._cut_full_blocks()

    def finish(self) -> tuple[list[bytes], SstSummary]:
        """Return the buffers of the file, in order, and its description. Raises InvalidError without rows."""
        if self._smallest is None:
            raise InvalidError("a file needs at least one row: rows=0.")
        if self._keys:
            self._cut_block(self._keys, self._values, self._seqnos)
            self._keys, self._values, self._seqnos = [], [], []
        self._join_blocks()
        filter_start = self._starts[-1]
        filter_section = seal(build_filter(self._hashes, self._bits_per_key), compress=False)
        index_section = seal(_encode((self._last_keys, self._starts, self._rows)))
        index_start = filter_start + len(filter_section)
        footer_start = index_start + len(index_section)
        footer = encode_footer(
            Footer(
                filter_start,
                index_start,
                footer_start,
                len(self._rows),
                self.rows,
                self._min_seqno,
                self._max_seqno,
            )
        )
        summary = SstSummary(
            size_bytes=footer_start + len(footer),
            rows=self.rows,
            smallest=self._smallest,
            largest=self._largest,
            min_seqno=self._min_seqno,
            max_seqno=self._max_seqno,
            meta_start=filter_start,
            tombstones=self._tombstones,
        )
        return [*self._joined, filter_section + index_section + footer], summary

    def _cut_full_blocks(self) -> None:
        keys, values, seqnos = self._keys, self._values, self._seqnos
        at, count = 0, len(keys)
        while count - at >= self._guess_rows:
            end = at + self._guess_rows
            self._cut_block(keys[at:end], values[at:end], seqnos[at:end])
            at = end
        if at:
            del keys[:at], values[:at], seqnos[:at]

    def _cut_block(self, keys: list[bytes], values: list[bytes], seqnos: list[int]) -> None:
        """Cut one block of these rows, or several if they are too many, and adapt the next guess to its size."""
        payload, low, high = encode_block(keys, values, seqnos)
        rows, target = len(keys), self._target_bytes
        # At most doubled: a block of tombstones does not predict the size of the rows after it.
        self._guess_rows = max(1, min(2 * rows, rows * target // len(payload)))
        if rows > 1 and len(payload) > 2 * target:
            half = rows // 2
            self._cut_block(keys[:half], values[:half], seqnos[:half])
            self._cut_block(keys[half:], values[half:], seqnos[half:])
            return
        self._min_seqno = min(self._min_seqno, low)
        self._max_seqno = max(self._max_seqno, high)
        if self._last_keys:
            self._last_keys[-1] = separator(self._last_keys[-1], keys[0])
        block = seal(payload)
        self._blocks.append(block)
        self._last_keys.append(keys[-1])
        self._rows.append(rows)
        self._written_bytes += len(block)
        self._unjoined_bytes += len(block)
        self._starts.append(self._written_bytes)
        if self._unjoined_bytes >= _JOIN_BYTES:
            self._join_blocks()

    def _join_blocks(self) -> None:
        if self._blocks:
            self._joined.append(b"".join(self._blocks))
            self._blocks = []
            self._unjoined_bytes = 0


class TableMeta:
    """Filter and index of one open file."""

    __slots__ = ("_word_count", "_words", "cost_bytes", "hot", "last_keys", "name", "rows", "starts")

    name: str
    last_keys: list[bytes]
    """One per block: at least its last key, less than the first key of the next; the last one is an existing key."""
    starts: array[int]
    """One per block, and the end of the last block."""
    rows: array[int]
    """Rows per block. Arrays, not lists: for ten million rows a list would hold 6 MB of int objects."""
    cost_bytes: int
    hot: bool

    def __init__(
        self, name: str, words: array[int], last_keys: list[bytes], starts: Sequence[int], rows: Sequence[int]
    ) -> None:
        self.name = name
        self._words = words
        self._word_count = len(words)
        self.last_keys = last_keys
        self.starts = array("Q", starts)
        self.rows = array("I", rows)
        self.hot = False
        # Per block: a bytes object with its list slot, rounded up by the allocator, a start and a count.
        self.cost_bytes = 1000 + 8 * len(words) + sum(map(len, last_keys)) + len(rows) * (33 + 8 + 8 + 8 + 4)

    def may_contain(self, key: bytes) -> bool:
        """Return False only if the file has no row for `key`. An inlined copy of `bloom.may_contain`, to save a
        call."""
        h = crc32(key)
        mask = MASKS[h & 16383]
        return self._words[h * self._word_count >> 32] & mask == mask

    def find(self, key: bytes) -> int:
        """Return the only block that can hold `key`; the number of blocks if the key is above the largest."""
        return bisect_left(self.last_keys, key)


def decode_meta(data: bytes, file: FileMeta, name: str) -> TableMeta:
    """Decode filter, index and footer from the bytes [meta_start, size_bytes) of the file.

    Raises CorruptError, naming section and offset; InvalidError if the file's format is newer than this program's.
    """
    footer = decode_footer(data, file.meta_start + len(data), name)
    filter_start, index_start, footer_start, blocks, rows, min_seqno, max_seqno = footer
    at = len(data) - FOOTER_BYTES
    if (filter_start, footer_start + FOOTER_BYTES, rows, min_seqno, max_seqno) != (
        file.meta_start,
        file.size_bytes,
        file.rows,
        file.min_seqno,
        file.max_seqno,
    ):
        raise corrupt_error(name, "footer", file.meta_start + at, "it is intact but does not match the manifest")
    words = unseal(data[: index_start - filter_start], name, "filter", filter_start)
    if len(words) % 8:
        raise corrupt_error(name, "filter", filter_start, f"its {len(words)} bytes are not words")
    index = unseal(data[index_start - filter_start : at], name, "index", index_start)
    try:
        last_keys, starts, counts = _decode_index(index)
    except msgspec.MsgspecError as error:
        raise corrupt_error(name, "index", index_start, f"its body does not decode, {error}") from error
    if not blocks == len(last_keys) == len(counts) == len(starts) - 1 or (starts[-1], last_keys[-1]) != (
        filter_start,
        file.largest,
    ):
        raise corrupt_error(name, "index", index_start, f"it does not describe the {blocks} blocks of the footer")
    return TableMeta(name, decode_filter(words), last_keys, starts, counts)


def separator(last: bytes, following: bytes) -> bytes:
    """Return a short key at or above `last` and below `following` (last < following)."""
    shared = shared_bytes(last, following)
    if shared == len(last):
        return last
    if last[shared] + 1 < following[shared]:
        return last[:shared] + bytes((last[shared] + 1,))
    # Every key that shares last's bytes through `shared` is below `following`: increment the first later byte possible.
    for at in range(shared + 1, len(last)):
        if last[at] < 0xFF:
            return last[:at] + bytes((last[at] + 1,))
    return last
