"""Quiet times: times at which another writer may write a shard that a pipeline maintains, because its sources bind
nothing.

An append covers a whole interval of times, and updates of the pipeline for that interval are then dropped (below the
upper). So a write uses an interval of one ms to which every source of the table is known to bind nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from tidemill.shards.api import Remap


async def is_quiet_at(open_remap: Callable[[str], Awaitable[Remap]], sources: Iterable[str], time_ms: int) -> bool:
    """Return whether none of these sources binds anything to `time_ms`, now or later.

    A source whose bindings end earlier is advanced to that time. Raises HistoryLostError, UnavailableError,
    UnknownOutcomeError.
    """
    for source in sources:
        remap = await open_remap(source)
        latest = await remap.advance(time_ms)
        if latest is None or latest.time_ms < time_ms:
            return False  # nothing has been bound yet: the first binding may get this time
        at, before = await remap.at(time_ms), await remap.at(time_ms - 1)
        if at is None or (before.offsets if before is not None else {}) != at.offsets:
            return False
    return True
