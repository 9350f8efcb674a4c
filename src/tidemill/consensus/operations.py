"""The operations of the contract as data: the input of every backend, and the payload of the SQLite protocol.

Encoded by msgspec as arrays `[tag, field, …]`. A write changes durable state. Every other operation may be repeated
after a lost connection.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec


class Op(msgspec.Struct, frozen=True, array_like=True):
    writes: ClassVar[bool] = False


class Head(Op, frozen=True, tag=1):
    key: str


class Cas(Op, frozen=True, tag=2):
    writes: ClassVar[bool] = True
    key: str
    expected_seq: int
    data: bytes
    nonce: str


class Scan(Op, frozen=True, tag=3):
    prefix: str


class HeadOfLog(Op, frozen=True, tag=4):
    log: str


class Fence(Op, frozen=True, tag=5):
    writes: ClassVar[bool] = True
    log: str
    term: int


class Append(Op, frozen=True, tag=6):
    writes: ClassVar[bool] = True
    log: str
    term: int
    expected_next: int
    records: tuple[bytes, ...]
    nonce: str


class Read(Op, frozen=True, tag=7):
    log: str
    start: int
    limit_records: int
    limit_bytes: int


class Truncate(Op, frozen=True, tag=8):
    writes: ClassVar[bool] = True
    log: str
    before: int


class Wait(Op, frozen=True, tag=9):
    """Answered as soon as head.next > beyond. The client owns the deadline; it cancels with `CancelWait`."""

    log: str
    beyond: int


class Acquire(Op, frozen=True, tag=10):
    writes: ClassVar[bool] = True
    name: str
    holder: str
    ttl_ms: int
    info: bytes


class Release(Op, frozen=True, tag=11):
    writes: ClassVar[bool] = True
    name: str
    holder: str
    term: int


class Leases(Op, frozen=True, tag=12):
    prefix: str


class Drop(Op, frozen=True, tag=13):
    writes: ClassVar[bool] = True
    key: str
    expected_seq: int


class Changed(Op, frozen=True, tag=14):
    prefix: str
    since: str


AnyOp = (
    Head
    | Cas
    | Drop
    | Scan
    | HeadOfLog
    | Fence
    | Append
    | Read
    | Truncate
    | Wait
    | Acquire
    | Release
    | Leases
    | Changed
)
WriteOp = Cas | Drop | Fence | Append | Truncate | Acquire | Release
