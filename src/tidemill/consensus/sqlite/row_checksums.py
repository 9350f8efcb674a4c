"""Checksums of what the database holds: SQLite has none of its own.

    0xC1 | crc32c uint32, little end first | body

The checksum is of a context and the body. Bodies of log records that an older layout wrote are msgpack, which never
begins with 0xC1, and are read as they are; registers were sealed when their database was brought to this layout.
"""

from __future__ import annotations

import crc32c

from tidemill.base.errors import CorruptError

SEAL = b"\xc1"
_HEAD_BYTES = 5
FIX = "Restore the database from a copy, or the cluster from its bucket."


def seal(body: bytes, context: bytes = b"") -> bytes:
    return b"".join((SEAL, _crc(body, context), body))


def unseal(stored: bytes, what: str, context: bytes = b"") -> bytes:
    """Raises CorruptError. What has no seal is given as it is."""
    if stored[:1] != SEAL:
        return stored
    body = stored[_HEAD_BYTES:]
    if stored[1:_HEAD_BYTES] != _crc(body, context):
        raise CorruptError(f"{what} bytes={len(stored)}.", fix=FIX)
    return body


def context_of(key: str, seq: int, nonce: str) -> bytes:
    """Of a register: that it is this version of this key."""
    return f"{key}\0{seq}\0{nonce}\0".encode()


def unsealed_register(key: str, seq: int, nonce: str, stored: bytes) -> bytes:
    """Raises CorruptError, also where there is no seal."""
    if stored[:1] != SEAL:
        raise CorruptError(f"A register is damaged: key={key} bytes={len(stored)}.", fix=FIX)
    return unseal(stored, f"A register is damaged: key={key}", context_of(key, seq, nonce))


def _crc(body: bytes, context: bytes) -> bytes:
    return int(crc32c.crc32c(body, crc32c.crc32c(context))).to_bytes(4, "little")
