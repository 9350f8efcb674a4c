"""Manifest: the live files, and the seqno up to which they hold everything; its byte layout.

manifest  'TMMF' 4 bytes | format uint16 = 1 | msgpack body | crc32c uint32 of everything before it

Integers of the frame are little end first. The magic, the format and the position of the checksum stay
the same in every later format, so that an old program can distinguish a newer format from damage.
The whole format is drawn in docs/internals/metastore-format.md.
"""

from __future__ import annotations

import crc32c
import msgspec

from tidemill.base.errors import CorruptError, InvalidError

MAGIC = b"TMMF"
FORMAT = 1
_HEAD_BYTES = len(MAGIC) + 2
_CRC_BYTES = 4


class FileMeta(msgspec.Struct, frozen=True, array_like=True, cache_hash=True):
    """One SST as the manifest describes it: enough to read everything but its blocks with one ranged read."""

    epoch: int
    number: int
    nonce: str
    size_bytes: int
    rows: int
    smallest: bytes
    largest: bytes
    """`smallest` and `largest` are inclusive and exist in the file."""
    min_seqno: int
    max_seqno: int
    meta_start: int
    """Start of filter, index and footer, which extend to the end of the file."""
    tombstones: int = 0
    """Number of rows that only hide older ones. A file without any may move to the bottom level unchanged."""


class Manifest(msgspec.Struct, frozen=True):
    """State of the database as of `last_seqno`. Invariant: every row at or below it is in these files."""

    domain_uuid: str
    epoch: int
    number: int
    """Number of the manifest in its domain; never decreases, not even in a newer epoch."""
    last_seqno: int
    next_file_number: int
    created_ms: int
    levels: tuple[tuple[FileMeta, ...], ...]
    """Level 0 newest first; the others in key order, disjoint."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Manifest)


def encode_manifest(manifest: Manifest) -> bytes:
    data = MAGIC + FORMAT.to_bytes(2, "little") + _encoder.encode(manifest)
    return data + int(crc32c.crc32c(data)).to_bytes(_CRC_BYTES, "little")


def decode_manifest(data: bytes, name: str = "") -> Manifest:
    """Decode a manifest. `name` is for messages only. Raises CorruptError; InvalidError if its format is newer than
    supported."""
    where = f"manifest={name or 'unnamed'} size_bytes={len(data)}"
    if len(data) < _HEAD_BYTES + _CRC_BYTES or not data.startswith(MAGIC):
        raise CorruptError(f"the bytes are not a manifest: {where}.", fix=_RESTORE)
    # The checksum is checked before the format: a flipped bit must not look like a newer format.
    stored, computed = int.from_bytes(data[-_CRC_BYTES:], "little"), int(crc32c.crc32c(data[:-_CRC_BYTES]))
    if stored != computed:
        raise CorruptError(
            f"the manifest is damaged or truncated: {where} stored_crc32c={stored:08x} computed_crc32c={computed:08x}.",
            fix=_RESTORE,
        )
    found = int.from_bytes(data[len(MAGIC) : _HEAD_BYTES], "little")
    if found > FORMAT:
        raise InvalidError(
            f"the manifest was written by a newer version of tidemill: {where} format={found} supported={FORMAT}.",
            fix="Use the version of tidemill that wrote it, or a newer one.",
        )
    try:
        return _decoder.decode(data[_HEAD_BYTES:-_CRC_BYTES])
    except msgspec.MsgspecError as error:
        raise CorruptError(
            f"the manifest is undecodable though its checksum is valid: {where} reason={error}.", fix=_RESTORE
        ) from error


_RESTORE = "Restore the object from a copy of the bucket, or restore the domain from an older manifest by name."
