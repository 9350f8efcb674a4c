"""A second read after a checksum mismatch: it distinguishes a damaged answer from a damaged object.

    second read right    the store answered with flipped bits: the bytes are used, and the store has a notice
    second read wrong    the object is damaged, or every answer is: Corrupt, and the store has a notice

An object never changes (O1), so both reads must bring the same bytes. Nothing is read twice while all is well.
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
    """A store with notices about itself, or a layer above one."""

    def notice(self, what: str) -> None: ...


async def checked(objects: object, key: str, read: Callable[[], Awaitable[T]]) -> T:
    """Return the verified result of `read`. Raises CorruptError after two failures in a row, and as `read`."""
    try:
        return await read()
    except CorruptError as error:
        return await read_again(objects, key, error, read)


async def read_again(objects: object, key: str, error: CorruptError, read: Callable[[], Awaitable[T]]) -> T:
    """The second read, after one that failed with `error`. It must ask the store, not a cache."""
    try:
        found = await read()
    except CorruptError:
        tell_damaged(objects, key, error.message)
        raise
    tell_flipped(objects, key, error.message)
    return found


def checked_now(objects: object, key: str, read: Callable[[], T]) -> T:
    """As `checked`, of a synchronous reader."""
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
    what = "The object store answered a read with damaged bytes, and then with the right ones"
    _tell(objects, f"{what}: {_at(key, reason)}")


def tell_damaged(objects: object, key: str, reason: str) -> None:
    _tell(objects, f"An object is damaged, or the object store damages its answers: reads=2 {_at(key, reason)}")


def _at(key: str, reason: str) -> str:
    return f"key={key} reason={reason!r}."


def _tell(objects: object, what: str) -> None:
    log.error(what)
    pass_on(objects, what)


def pass_on(objects: object, what: str) -> None:
    """Hand a notice to the store, if it takes notices."""
    if isinstance(objects, Noticing):
        objects.notice(what)
