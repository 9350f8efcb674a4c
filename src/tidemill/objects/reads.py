"""Reads of objects: requests for near ranges are one, a mismatch is read again, and an object can be read as a file.

Coalescing is pure planning. A gap is read and discarded if that is cheaper than another request. Merging never makes a
request larger than `max_bytes`, so a large set is still spread over several connections.

A second read after a checksum mismatch distinguishes a damaged answer from a damaged object:

    second read valid      the store answered with flipped bits: the bytes are used, and the store gets a notice
    second read invalid    the object is damaged, or every answer is: CorruptError, and the store gets a notice

An object never changes, so both reads must return the same bytes. Nothing is read twice without a mismatch.
"""

from __future__ import annotations

import io
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import msgspec
import structlog

from tidemill.base.errors import CorruptError
from tidemill.base.limits import COALESCE_GAP_BYTES, MIB
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.objects.store import ObjectStore

REQUEST_BYTES_MAX = 8 * MIB


class RangeRequest(msgspec.Struct, frozen=True):
    """One read of [start, end). `wanted`: (index in the caller's list, start, end) of the ranges inside it."""

    start: int
    end: int
    wanted: tuple[tuple[int, int, int], ...]


def plan_reads(
    ranges: Sequence[tuple[int, int]],
    gap_bytes: int = COALESCE_GAP_BYTES,
    max_bytes: int = REQUEST_BYTES_MAX,
) -> list[RangeRequest]:
    """Plan requests in order of start. Ranges may overlap, repeat, be empty, and have any order."""
    requests: list[RangeRequest] = []
    start = end = -1
    wanted: list[tuple[int, int, int]] = []
    for low, high, index in sorted((low, high, index) for index, (low, high) in enumerate(ranges)):
        joins = wanted and low - end <= gap_bytes and max(end, high) - start <= max_bytes
        if wanted and not joins:
            requests.append(RangeRequest(start, end, tuple(wanted)))
            wanted = []
        if not wanted:
            start, end = low, high
        wanted.append((index, low, high))
        end = max(end, high)
    if wanted:
        requests.append(RangeRequest(start, end, tuple(wanted)))
    return requests


def split_response(request: RangeRequest, data: bytes, into: list[bytes]) -> None:
    """Store the wanted pieces of one answered request at their indexes in `into`."""
    whole = len(request.wanted) == 1 and len(data) == request.end - request.start
    for index, low, high in request.wanted:
        into[index] = data if whole else data[low - request.start : high - request.start]


T = TypeVar("T")

log = structlog.get_logger()


@runtime_checkable
class NoticeReceiver(Protocol):
    """A store that accepts notices about itself, or a layer above one."""

    def record_notice(self, what: str) -> None: ...


async def read_verified(objects: object, key: str, read: Callable[[], Awaitable[T]]) -> T:
    """Return the verified result of `read`.

    Raises CorruptError after two mismatches in a row, and the errors of `read`.
    """
    try:
        return await read()
    except CorruptError as error:
        return await read_again(objects, key, error, read)


async def read_again(objects: object, key: str, error: CorruptError, read: Callable[[], Awaitable[T]]) -> T:
    """Read again after a read that failed with `error`. `read` must ask the store, not a cache."""
    try:
        found = await read()
    except CorruptError:
        report_damaged_object(objects, key, error.message)
        raise
    report_flipped_read(objects, key, error.message)
    return found


def read_verified_sync(objects: object, key: str, read: Callable[[], T]) -> T:
    """Return the verified result of a synchronous `read`; see `read_verified`."""
    try:
        return read()
    except CorruptError as error:
        first = error
    try:
        found = read()
    except CorruptError:
        report_damaged_object(objects, key, first.message)
        raise
    report_flipped_read(objects, key, first.message)
    return found


def report_flipped_read(objects: object, key: str, reason: str) -> None:
    what = "the object store answered a read with damaged bytes, and then with valid ones"
    _log_and_notify(objects, f"{what}: {_location(key, reason)}")


def report_damaged_object(objects: object, key: str, reason: str) -> None:
    _log_and_notify(
        objects, f"an object is damaged, or the object store damages its answers: reads=2 {_location(key, reason)}"
    )


def _location(key: str, reason: str) -> str:
    return f"key={key} reason={reason!r}."


def _log_and_notify(objects: object, what: str) -> None:
    log.error(what)
    forward_notice(objects, what)


def forward_notice(objects: object, what: str) -> None:
    """Pass a notice to the store, if it accepts notices."""
    if isinstance(objects, NoticeReceiver):
        objects.record_notice(what)


class ObjectFile(io.RawIOBase):
    """File over `key`, for synchronous readers of pieces of it: Parquet's footer and some columns.

    It has `size_bytes` and is read through `portal`, never from the portal's own thread.

    One reader at a time.

    Raises the errors of `ObjectStore.get`.
    """

    def __init__(self, portal: BlockingPortal, objects: ObjectStore, key: str, size_bytes: int) -> None:
        self._portal = portal
        self._objects = objects
        self._key = key
        self._size_bytes = size_bytes
        self._at = 0

    def record_notice(self, what: str) -> None:
        forward_notice(self._objects, what)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size_bytes}[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        end = self._size_bytes if size is None or size < 0 else min(self._at + size, self._size_bytes)
        if end <= self._at:
            return b""
        found = self._portal.call(self._objects.get(self._key, self._at, end))
        self._at = end
        return found

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        found = self.read(len(view))
        view[: len(found)] = found
        return len(found)
