"""Checks of `tidemill doctor` for an object store, before it is used.

Some servers accept the condition of a create and ignore it, or check it without atomicity. Two creates in sequence
detect the first kind, a race of many the second. Probe objects are under `probe/` and are always deleted at the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import ConflictError, TidemillError
from tidemill.objects.buckets.urls import redact
from tidemill.objects.factory import local_directory, open_objects
from tidemill.objects.store import ObjectStore

RACERS = 32


class ProbeCheck(msgspec.Struct, frozen=True):
    """One line of the doctor: `detail` is the finding, `fix` the remedy if not ok."""

    name: str
    ok: bool
    detail: str
    fix: str = ""


async def probe_url(url: str, clock: Clock, rand: Rand, *, create: bool = True) -> list[ProbeCheck]:
    """Open the store and probe it; a failed open is the only check then. `create`: see `open_objects`."""
    try:
        store = await open_objects(url, clock, rand, retry_budget_s=2.0, create=create)
    except TidemillError as error:
        return [ProbeCheck("objects open", False, error.message, error.fix)]
    try:
        return [
            ProbeCheck("objects open", True, local_directory(url) or redact(url)),
            *await probe_objects(store, rand),
        ]
    finally:
        await store.aclose()


async def probe_objects(store: ObjectStore, rand: Rand) -> list[ProbeCheck]:
    """Create, read, list, conditional create, racing creates, delete; later checks are skipped if create fails."""
    prefix = f"probe/{rand.nonce()}/"
    once, raced = prefix + "once", prefix + "raced"
    checks = [await _check("objects create", lambda: _create(store, once))]
    if checks[0].ok:
        checks.append(await _check("objects read", lambda: _read(store, once)))
        checks.append(await _check("objects list", lambda: _list(store, prefix, once)))
        checks.append(await _check("objects conditional create", lambda: _second_create(store, once)))
        checks.append(await _check("objects racing creates", lambda: _race(store, raced)))
        checks.append(await _check("objects delete", lambda: _delete(store, (once, raced))))
    return checks


class _ProbeFailedError(Exception):
    def __init__(self, detail: str, fix: str) -> None:
        super().__init__(detail)
        self.detail = detail
        self.fix = fix


_NO_CONDITIONS = (
    "Use a service that honours conditional creates (AWS S3, Google Cloud Storage, Azure, Ceph, MinIO, recent Garage), "
    "or upgrade this one."
)


async def _check(name: str, step: Callable[[], Awaitable[str]]) -> ProbeCheck:
    try:
        return ProbeCheck(name, True, await step())
    except _ProbeFailedError as error:
        return ProbeCheck(name, False, error.detail, error.fix)
    except TidemillError as error:
        return ProbeCheck(name, False, error.message, error.fix)


async def _create(store: ObjectStore, key: str) -> str:
    await store.put(key, [b"first", b" writer"])
    return "an object can be created"


async def _read(store: ObjectStore, key: str) -> str:
    whole, piece = await store.get(key), await store.get(key, 6, 12)
    if (whole, piece) != (b"first writer", b"writer"):
        raise _ProbeFailedError(
            f"a read returned other bytes than were written: key={key}.",
            fix="Do not use this server: it does not store objects reliably.",
        )
    return "it can be read, completely and by range"


async def _list(store: ObjectStore, prefix: str, key: str) -> str:
    found = [meta.key async for meta in store.list(prefix)]
    if found != [key]:
        raise _ProbeFailedError(
            f"a listing does not show the new object: prefix={prefix} found={found}.",
            fix="Use a server whose listings are strongly consistent.",
        )
    return "a listing shows it immediately"


async def _second_create(store: ObjectStore, key: str) -> str:
    try:
        await store.put(key, b"second writer")
    except ConflictError:
        if await store.get(key) == b"first writer":
            return "a second create is rejected"
        raise _ProbeFailedError(f"a rejected create replaced the object: key={key}.", _NO_CONDITIONS) from None
    raise _ProbeFailedError(f"a second create of one key was accepted: key={key}.", _NO_CONDITIONS)


async def _race(store: ObjectStore, key: str) -> str:
    async def write(writer: int) -> int | None:
        try:
            await store.put(key, f"writer {writer}".encode())
        except ConflictError:
            return None
        return writer

    ended = await asyncio.gather(*(write(writer) for writer in range(RACERS)))
    winners = [writer for writer in ended if writer is not None]
    if len(winners) != 1:
        raise _ProbeFailedError(
            f"not exactly one of the racing creates succeeded: creates={RACERS} succeeded={len(winners)} key={key}.",
            _NO_CONDITIONS,
        )
    if await store.get(key) != f"writer {winners[0]}".encode():
        raise _ProbeFailedError(f"the winner of racing creates was overwritten: key={key}.", _NO_CONDITIONS)
    return f"exactly one of {RACERS} racing creates succeeded"


async def _delete(store: ObjectStore, keys: tuple[str, ...]) -> str:
    for key in keys:
        await store.delete(key)
        if await store.head(key) is not None:
            raise _ProbeFailedError(
                f"a deleted object still exists: key={key}.", fix="Check versioning rules of the bucket."
            )
    return "objects can be deleted"
