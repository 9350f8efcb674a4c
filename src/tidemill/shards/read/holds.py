"""The time of a read, and the leased hold that keeps it readable: renewed while it is used, and expired soon after its
owner died.

    a short read            no hold: replaced objects stay readable for the delay of garbage collection
    `hold_during`               one long read at one time (verify, an export, a large snapshot): hold, then choose
                                batches
    `MovingHold`            a reader that follows the shard and must be able to resume (derived tables, streams)

A listener at the shard's head needs no hold: since follows the head at the retention distance, and a listener that is
further behind takes a hold while it catches up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from numbers import Integral
from typing import Protocol

import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import InvalidError, TidemillError, UnavailableError, UnknownOutcomeError
from tidemill.base.runtime.tasks import Tasks
from tidemill.shards.api import HistoryLostError
from tidemill.shards.state.state import ShardState

HOLD_TTL_MS = 300_000
"""Time that history outlives a dead reader. Renewed after a third of it, so that two lost renewals do no harm."""

HOLD_ABOVE_BYTES = 16 << 20
"""Size from which a read takes a hold on its own, since it may last longer than garbage collection waits."""

OBJECTS_ONLY = (1 << 53) - 1
"""Value of `since` for a hold that keeps the objects of a state, but no history: no time is that late."""

RELEASE_TIMEOUT_S = 2.0

LATEST = "latest"

log = structlog.get_logger()


def as_of_ms(value: str | int | datetime | None) -> int | None:
    """Parse a time as people write it: ms (also numpy's integers), ISO 8601 text or a datetime (UTC without a zone).

    Returns None, which means the newest, for `latest` and None. Fractions of a ms are truncated. Raises InvalidError.
    """
    if value is None or (isinstance(value, str) and value.strip().lower() == LATEST):
        return None
    if isinstance(value, bool) or not isinstance(value, Integral | str | datetime):
        raise InvalidError(
            f"as_of is not a time: as_of={value!r}.",
            fix="Use ms since 1970 as an integer, ISO 8601 text or a datetime.",
        )
    if not isinstance(value, str | datetime):
        return int(value)
    if isinstance(value, str):
        text = value.strip()
        try:
            if text.removeprefix("-").isascii() and text.removeprefix("-").isdigit():
                return int(text)
            value = datetime.fromisoformat(text)
        except ValueError as error:
            raise InvalidError(
                f"as_of is not a time: as_of={text[:100]!r}.",
                fix="Write ms since 1970, 2026-11-22T12:00:00Z, or latest.",
            ) from error
    moment = value.replace(tzinfo=UTC) if value.tzinfo is None else value
    since_epoch = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (since_epoch.days * 86_400 + since_epoch.seconds) * 1000 + since_epoch.microseconds // 1000


class HoldableShard(Protocol):
    name: str

    @property
    def state(self) -> ShardState: ...

    async def set_hold(self, reader: str, since: int, ttl_ms: int) -> None: ...

    async def release_hold(self, reader: str) -> None: ...


@asynccontextmanager
async def hold_during(
    shard: HoldableShard, reader: str, since: int, *, ttl_ms: int = HOLD_TTL_MS
) -> AsyncIterator[None]:
    """Keep every time ≥ `since` readable inside the context, and the batches chosen there. `reader` names this use
    only.

    Raises HistoryLostError (since is below the shard's), UnavailableError (too many holds, or consensus does not
    answer), UnknownOutcomeError. A hold that could not be renewed lapses: the reads then raise HistoryLostError.
    """
    await shard.set_hold(reader, since, ttl_ms)

    def lapsed(_: str, error: BaseException) -> None:
        log.warning("hold lapsed", shard=shard.name, reader=reader, cause=str(error))

    try:
        async with Tasks(lapsed) as tasks:
            renewing = _renew_forever(lambda: shard.set_hold(reader, since, ttl_ms), shard.name, reader, ttl_ms)
            tasks.spawn(renewing, name=f"hold-{shard.name}")
            yield
    finally:
        await try_release_hold(shard, reader)


async def _renew_forever(renew: Callable[[], Awaitable[None]], shard: str, reader: str, ttl_ms: int) -> None:
    while True:
        await asyncio.sleep(ttl_ms / 3000)
        try:
            await renew()
        except (UnavailableError, UnknownOutcomeError) as error:
            log.warning("hold not renewed, retrying", shard=shard, reader=reader, cause=str(error))


async def try_release_hold(shard: HoldableShard, reader: str) -> None:
    """Release a hold if possible; one that is not released in time lapses."""
    try:
        async with asyncio.timeout(RELEASE_TIMEOUT_S):
            await shard.release_hold(reader)
    except (TidemillError, TimeoutError) as error:
        log.info("hold not released; it will lapse", shard=shard.name, reader=reader, cause=str(error))


class MovingHold:
    """A hold of one shard at a time that advances. Writes only when it is worth it: an idle shard costs nothing.

    With `kept`, the owner may be away for longer than the lease, and runs `renew_until_cancelled` concurrently. Then
    the newest time is held, too, since much may be written before the owner returns, and an idle shard costs one write
    per third of the lease.
    """

    def __init__(
        self, shard: HoldableShard, reader: str, clock: Clock, *, ttl_ms: int = HOLD_TTL_MS, kept: bool = False
    ) -> None:
        self._shard = shard
        self._reader = reader
        self._clock = clock
        self._ttl_ms = ttl_ms
        self._kept = kept
        self._writing = asyncio.Lock()
        self._since = -1
        self._until_ms = 0

    async def move_to(self, since: int) -> None:
        """Hold from `since` on. Raises as `set_hold`. Writes nothing while no history above it can be lost."""
        if not self._kept and since >= self._shard.state.upper - 1:
            return  # since never passes the newest time
        async with self._writing:
            fresh = self._until_ms - self._clock.now_ms() > self._ttl_ms * 2 // 3
            if fresh and since - self._since < self._ttl_ms // 10:
                return
            # Set before the write: if its answer is lost, a renewal further back would be rejected forever.
            self._since = since
            await self._write()

    async def renew_until_cancelled(self) -> None:
        """Renew the hold at its last position until cancelled.

        A lost hold is not reported here: the next `move_to` raises.
        """
        try:
            await _renew_forever(self._renew, self._shard.name, self._reader, self._ttl_ms)
        except Exception as error:
            log.warning("hold renewal stopped", shard=self._shard.name, reader=self._reader, cause=str(error))
            raise

    async def _renew(self) -> None:
        async with self._writing:
            if self._since < 0:
                return
            try:
                # At the same time as before: a hold that moves no longer protects batches that were chosen under it.
                await self._write()
            except HistoryLostError as error:
                self._since, self._until_ms = -1, 0
                log.warning("hold lapsed", shard=self._shard.name, reader=self._reader, cause=str(error))

    async def _write(self) -> None:
        now_ms = self._clock.now_ms()
        await self._shard.set_hold(self._reader, self._since, self._ttl_ms)
        self._until_ms = now_ms + self._ttl_ms

    async def release(self) -> None:
        if self._until_ms > self._clock.now_ms():
            await try_release_hold(self._shard, self._reader)
