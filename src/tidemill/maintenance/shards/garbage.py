"""Deletion of replaced objects: the objects of a shard's garbage, oldest first, and then their entries.

Invariant (readers hold first): a reader holds first and then chooses; a writer replaces first and then deletes. The
choice of what to delete uses a state read in this call, and a hold that is set later chooses from a state that names
none of it.

Invariant (leak rather than lose): an object is deleted before its entry is, and deleting it again is harmless.
"""

from __future__ import annotations

import asyncio

from tidemill.base.clock import Clock
from tidemill.base.limits import OBJECT_CONCURRENCY
from tidemill.objects.store import ObjectStore
from tidemill.shards.handle import LogShard
from tidemill.shards.state import apply as rules


async def collect_garbage(
    shard: LogShard, objects: ObjectStore, clock: Clock, *, after_ms: int, persisted: int
) -> tuple[int, int]:
    """Delete objects that were replaced at least `after_ms` ago, by version `persisted` at the latest, and that no
    live hold may read. Return (objects, bytes). Raises UnavailableError, UnknownOutcomeError: call again."""
    await shard.frontiers()
    now_ms = clock.now_ms()
    may_go = rules.collectable_garbage(shard.state, now_ms - after_ms, now_ms)
    found = [garbage for garbage in may_go if garbage.version <= persisted]
    if not found:
        return 0, 0
    slots = asyncio.Semaphore(OBJECT_CONCURRENCY)

    async def delete(key: str) -> None:
        async with slots:
            await objects.delete(key)

    await asyncio.gather(*(delete(key) for garbage in found for key in garbage.objects))
    await shard.mark_collected(found[-1].version)
    return sum(len(g.objects) for g in found), sum(g.size_bytes for g in found)
