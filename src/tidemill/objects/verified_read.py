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
class Noticing(Protocol):
    """A store that accepts notices about itself, or a layer above one."""

    def notice(self, what: str) -> None: ...


async def checked(objects: object, key: str, read: Callable[[], Awaitable[T]]) -> T:
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
        tell_damaged(objects, key, error.message)
        raise
    tell_flipped(objects, key, error.message)
    return found


def checked_now(objects: object, key: str, read: Callable[[], T]) -> T:
    """Return the verified result of a synchronous `read`; see `checked`."""
    try:
        return read()
    except CorruptError as error:
        first = error
    try:
        found = read()
    except CorruptError:
        tell_damaged(objects, key, first.message)
        raise
    tell_flipped(objects, key, first.message)
    return found


def tell_flipped(objects: object, key: str, reason: str) -> None:
    what = "the object store answered a read with damaged bytes, and then with valid ones"
    _tell(objects, f"{what}: {_at(key, reason)}")


def tell_damaged(objects: object, key: str, reason: str) -> None:
    _tell(objects, f"an object is damaged, or the object store damages its answers: reads=2 {_at(key, reason)}")


def _at(key: str, reason: str) -> str:
    return f"key={key} reason={reason!r}."


def _tell(objects: object, what: str) -> None:
    log.error(what)
    pass_on(objects, what)


def pass_on(objects: object, what: str) -> None:
    """Pass a notice to the store, if it accepts notices."""
    if isinstance(objects, Noticing):
        objects.notice(what)
