"""Times at which a shard that a pipeline keeps may be written by somebody else: where its sources say nothing.

A write takes the whole interval that it appends, and what the pipeline would have written there is dropped (below
upper: drop). So it takes one ms, of which every source of the table has said that nothing is bound to it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from tidemill.shards.api import Remap


async def quiet_at(open_remap: Callable[[str], Awaitable[Remap]], sources: Iterable[str], time_ms: int) -> bool:
    """Is nothing bound to `time_ms` in any of these sources, now and for good? A source that has not come there yet is
    moved there. Raises HistoryLost, Unavailable, Unknown."""
    for source in sources:
        remap = await open_remap(source)
        latest = await remap.advance(time_ms)
        if latest is None or latest.time_ms < time_ms:
            return False  # nothing was ever bound: the first binding may get this time
        at, before = await remap.at(time_ms), await remap.at(time_ms - 1)
        if at is None or (before.offsets if before is not None else {}) != at.offsets:
            return False
    return True
