"""Checksums of stored values, since SQLite does not checksum its pages.

    0xC1 | crc32c uint32, little-endian | body

The checksum covers a context and the body. Log records of an older layout are plain msgpack, which never begins with
0xC1, and are read without a check. Registers were sealed when their database was upgraded to this layout.
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
    """Return the body. A value without a seal is returned unchanged. Raises CorruptError."""
    if stored[:1] != SEAL:
        return stored
    body = stored[_HEAD_BYTES:]
    if stored[1:_HEAD_BYTES] != _crc(body, context):
        raise CorruptError(f"{what} bytes={len(stored)}.", fix=FIX)
    return body


def register_context(key: str, seq: int, nonce: str) -> bytes:
    """Return the context of a register, which binds the checksum to this version of this key."""
    return f"{key}\0{seq}\0{nonce}\0".encode()


def unseal_register(key: str, seq: int, nonce: str, stored: bytes) -> bytes:
    """Return the body of a register. Raises CorruptError, also if there is no seal."""
    if stored[:1] != SEAL:
        raise CorruptError(f"a register is damaged: key={key} bytes={len(stored)}.", fix=FIX)
    return unseal(stored, f"a register is damaged: key={key}", register_context(key, seq, nonce))


def _crc(body: bytes, context: bytes) -> bytes:
    return int(crc32c.crc32c(body, crc32c.crc32c(context))).to_bytes(4, "little")
