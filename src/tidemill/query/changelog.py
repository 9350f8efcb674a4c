"""Changelog of a shard: its updates after a time, under a hold that moves with the reader."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import structlog

from tidemill.base.clock import Clock
from tidemill.base.runtime.tasks import Tasks
from tidemill.shards.api import Delta
from tidemill.shards.handle import LogShard
from tidemill.shards.read.holds import HOLD_TTL_MS, MovingHold

log = structlog.get_logger()


@asynccontextmanager
async def open_changelog(
    shard: LogShard, clock: Clock, since: int, *, follow: bool
) -> AsyncIterator[AsyncIterator[Delta]]:
    """Yield the deltas of `Table.changes`. Inside, history after the last delta is held, however long its reader
    takes."""
    hold = MovingHold(shard, shard.reader_name("changes"), clock, ttl_ms=HOLD_TTL_MS, kept=True)
    until = (await shard.frontiers())[1]

    async def deltas() -> AsyncGenerator[Delta, None]:
        if until <= since + 1 and not follow:
            return
        async for delta in shard.listen(since + 1):
            yield delta
            await hold.move_to(delta.upper - 1)
            if delta.upper >= until and not follow:
                return

    async with Tasks(lambda _, error: log.warning("hold lapsed", shard=shard.name, cause=str(error))) as tasks:
        found = deltas()
        try:
            if until:
                await hold.move_to(max(0, since))
            tasks.spawn(hold.renew_until_cancelled(), name="changes-hold")
            yield found
        finally:
            await found.aclose()
            await hold.release()


async def next_delta(deltas: AsyncIterator[Delta]) -> Delta | None:
    """Return the next delta; None at the end."""
    return await anext(deltas, None)
