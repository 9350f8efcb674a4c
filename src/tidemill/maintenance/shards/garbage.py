"""Deleting what was replaced: the objects of a shard's garbage, oldest first, and then their entries.

CO1  Hold first, then choose; replace first, then delete. What may go is decided on a state read in this call, and a
     hold that is set after it chooses from a state that names none of it.
CO2  Leak before lose: an object is deleted before its entry is, and deleting it again is harmless.
"""

from __future__ import annotations

import asyncio

from tidemill.base.clock import Clock
from tidemill.base.limits import OBJECT_CONCURRENCY
from tidemill.objects.store import ObjectStore
from tidemill.shards.handle import LogShard
from tidemill.shards.state import apply as rules


async def collect(
    shard: LogShard, objects: ObjectStore, clock: Clock, *, after_ms: int, persisted: int
) -> tuple[int, int]:
    """Delete what was replaced at least `after_ms` ago, by version `persisted` at the latest, and that no live hold
    may read; (objects, bytes). Raises Unavailable, Unknown: call again."""
    await shard.frontiers()
    now_ms = clock.now_ms()
    may_go = rules.collectable(shard.state, now_ms - after_ms, now_ms)
    found = [garbage for garbage in may_go if garbage.version <= persisted]
    if not found:
        return 0, 0
    slots = asyncio.Semaphore(OBJECT_CONCURRENCY)

    async def delete(key: str) -> None:
        async with slots:
            await objects.delete(key)

    await asyncio.gather(*(delete(key) for garbage in found for key in garbage.objects))
    await shard.collected(found[-1].version)
    return sum(len(g.objects) for g in found), sum(g.size_bytes for g in found)
