"""Byte layout of the records of a `StateLog`.

command   0x00 | command bytes
rollup    0x01 | uint32 little-endian: number of parts that follow | state bytes of this part
          (a large state spans several records of one append: concatenate the parts)
"""

from __future__ import annotations

from tidemill.base.limits import MIB

COMMAND = 0
ROLLUP = 1
PART_BYTES = 4 * MIB


def encode_command(command: bytes) -> bytes:
    return b"\x00" + command


def encode_rollup(state: bytes) -> list[bytes]:
    """Return at least one record; the last one has 0 parts following."""
    whole = memoryview(state)
    parts = [whole[at : at + PART_BYTES] for at in range(0, max(1, len(state)), PART_BYTES)]
    return [b"".join((b"\x01", (len(parts) - 1 - i).to_bytes(4, "little"), part)) for i, part in enumerate(parts)]


def decode_part(record: bytes) -> tuple[int, bytes]:
    """Return (parts that follow, state bytes) of a rollup record."""
    return int.from_bytes(record[1:5], "little"), record[5:]
