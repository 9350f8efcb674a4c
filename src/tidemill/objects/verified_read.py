"""Read a second time after a checksum mismatch, to distinguish a damaged answer from a damaged object.

    second read valid      the store answered with flipped bits: the bytes are used, and the store gets a notice
    second read invalid    the object is damaged, or every answer is: Corrupt, and the store gets a notice

An object never changes, so both reads must return the same bytes. Nothing is read twice without a mismatch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar, runtime_checkable

import structlog

from tidemill.base.errors import CorruptError

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
