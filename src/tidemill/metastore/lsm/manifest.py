"""Which files are live, and up to which seqno they hold everything; its byte layout.

manifest  'TMMF' 4 bytes | format uint16 = 1 | msgpack body | crc32c uint32 of everything before it

Integers of the frame are little end first. The magic, the format and the place of the checksum stay
as they are in every later format: so an old program can tell "newer than I am" from "damaged".
The whole format is drawn in docs/metastore-format.md.
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
    """One SST as the manifest knows it; everything needed to read it with one ranged read before its blocks."""

    epoch: int
    number: int
    nonce: str
    size_bytes: int
    rows: int
    smallest: bytes
    largest: bytes
    """Both inclusive, both keys of the file."""
    min_seqno: int
    max_seqno: int
    meta_start: int
    """Filter, index and footer begin here and go to the end of the file."""
    tombstones: int = 0
    """Of the rows, those that only hide older ones; a file without any may sink to the bottom as it is."""


class Manifest(msgspec.Struct, frozen=True):
    """The state of the database as of `last_seqno`: every row at or below it is in these files (rule L4)."""

    domain_uuid: str
    epoch: int
    number: int
    """Counts the manifests of the domain; never goes back, not even in a newer epoch."""
    last_seqno: int
    next_file_number: int
    created_ms: int
    levels: tuple[tuple[FileMeta, ...], ...]
    """Level 0 newest first; the others by key, disjoint."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Manifest)


def encode_manifest(manifest: Manifest) -> bytes:
    data = MAGIC + FORMAT.to_bytes(2, "little") + _encoder.encode(manifest)
    return data + int(crc32c.crc32c(data)).to_bytes(_CRC_BYTES, "little")


def decode_manifest(data: bytes, name: str = "") -> Manifest:
    """`name` only goes into messages. Raises CorruptError; Invalid when the format is newer than this program's."""
    where = f"manifest={name or 'unnamed'} size_bytes={len(data)}"
    if len(data) < _HEAD_BYTES + _CRC_BYTES or not data.startswith(MAGIC):
        raise CorruptError(f"The bytes are not a manifest: {where}.", fix=_RESTORE)
    # The checksum before the format: a flipped bit must not look like a newer program's work.
    stored, computed = int.from_bytes(data[-_CRC_BYTES:], "little"), int(crc32c.crc32c(data[:-_CRC_BYTES]))
    if stored != computed:
        raise CorruptError(
            f"The manifest is damaged or cut off: {where} stored_crc32c={stored:08x} computed_crc32c={computed:08x}.",
            fix=_RESTORE,
        )
    found = int.from_bytes(data[len(MAGIC) : _HEAD_BYTES], "little")
    if found > FORMAT:
        raise InvalidError(
            f"The manifest was written by a newer version of tidemill: {where} format={found} supported={FORMAT}.",
            fix="Run the version of tidemill that wrote it, or a newer one.",
        )
    try:
        return _decoder.decode(data[_HEAD_BYTES:-_CRC_BYTES])
    except msgspec.MsgspecError as error:
        raise CorruptError(
            f"The manifest's checksum holds but its body does not decode: {where} reason={error}.", fix=_RESTORE
        ) from error


_RESTORE = "Restore the object from a copy of the bucket, or restore the domain from an older manifest by name."
