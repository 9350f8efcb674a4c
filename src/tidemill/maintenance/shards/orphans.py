"""The job `orphans`: delete objects below `shards/` that no shard names any more, by age and by reference, and the
registers of streaming queries that wrote a dropped shard.

    of an existing shard   written orphans_after_s ago, named by no batch and no garbage: first `Sweep` forbids that
                           such an old part is ever published, then it is deleted (a writer may only have been paused)
    staged for a write     written orphans_after_s ago: no shard ever names it, and no write takes that time
    of no existing shard   dropped, or from before a restore: named by no shard, mentioned by no row of the
                           checkpoint, for collect_after_s

An object without a time in its key (an older format) is retained and counted while its shard exists: no sweep can
forbid that a writer publishes it, however old it is. No writer creates such objects any more, and they are deleted with
their shard.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set

from tidemill.base.errors import ConflictError, UnknownOutcomeError
from tidemill.consensus.api import Versioned
from tidemill.maintenance.checkpoint.restore_horizon import RestoreHorizon
from tidemill.maintenance.scheduler import JobContext, MaintenanceJob, StepBudget
from tidemill.objects.store import ObjectMeta
from tidemill.shards.api import STAGED, written_ms
from tidemill.shards.handle import LogShard
from tidemill.shards.registry import list_created_shards
from tidemill.shards.state.state import ShardState
from tidemill.shards.state.state_machine import open_machine
from tidemill.shards.state.stream_registers import STREAM_REGISTERS

PREFIX = "shards/"
LISTING_BATCH = 20_000
"""Number of keys held at a time; the next step continues after them."""


class OrphanCollector(MaintenanceJob):
    """The job `orphans`."""

    def __init__(self, context: JobContext) -> None:
        self._g = context
        self._persisted = RestoreHorizon(context.metastore)
        self._after = ""
        self._gone: dict[str, tuple[float, list[int]]] = {}
        """Shard id without register and rows → when that was first seen, by the monotonic clock, and what was not
        persisted then."""
        self._seen: set[str] = set()
        self._created: set[str] = set()
        self._deleted = self._deleted_bytes = 0
        self._unstamped = self._counted = 0
        """Objects retained because their keys have no time: in the last whole listing, and in this one so far."""
        self._stream_queries = 0

    def facts(self) -> dict[str, object]:
        return {
            "deleted_objects": self._deleted,
            "deleted_bytes": self._deleted_bytes,
            "gone_shards": len(self._gone),
            "kept_unstamped": self._unstamped,
            "stream_queries": self._stream_queries,
        }

    async def run(self, budget: StepBudget) -> bool:
        """Process one stretch of the listing. Return True until its end is reached."""
        g, found = self._g, list[ObjectMeta]()
        async for meta in g.objects.list(PREFIX, self._after):
            found.append(meta)
            if len(found) >= LISTING_BATCH:
                break
        more = len(found) >= LISTING_BATCH
        self._after = found[-1].key if more else ""
        registers = await g.consensus.scan(STREAM_REGISTERS)
        # Read after the listings: every shard with a listed object is registered, and its state names them.
        created = {create.shard_id: create for create in await list_created_shards(g.consensus)}
        if self._created - created.keys():
            self._gone.clear()  # a dropped shard may have named parts under another id: their wait begins now
        self._created = set(created)
        await self._drop_stream_registers(registers, created.keys())
        states: dict[str, ShardState] = {}
        handles: dict[str, LogShard] = {}
        try:
            for shard_id, create in created.items():
                machine = await open_machine(g.consensus, g.rand, create)
                handles[shard_id] = LogShard(machine, g.objects, g.clock, g.rand, cache_bytes=0)
                states[shard_id] = machine.state
            by_shard: dict[str, list[ObjectMeta]] = defaultdict(list)
            for meta in found:
                by_shard[meta.key.removeprefix(PREFIX).partition("/")[0]].append(meta)
            for shard_id, metas in by_shard.items():
                if shard_id in handles:
                    await self._delete_shard_orphans(handles[shard_id], metas, states)
            staged = by_shard.pop(STAGED, [])
            await self._delete_objects([meta for meta in staged if 0 <= written_ms(meta.key) < self._orphan_limit_ms()])
            await self._delete_unowned({i: m for i, m in by_shard.items() if i not in created}, states)
        finally:
            for handle in handles.values():
                await handle.aclose()
        if not more:
            self._gone = {shard_id: since for shard_id, since in self._gone.items() if shard_id in self._seen}
            self._seen = set()
            self._unstamped, self._counted = self._counted, 0
        return more

    async def _drop_stream_registers(self, found: Sequence[tuple[str, Versioned]], created: Set[str]) -> None:
        """Drop the registers of shards that do not exist any more. A query that was just starting may write one again:
        the next run drops it."""
        gone = [(key, version.seq) for key, version in found if key.split("/")[1] not in created]
        for key, seq in gone:
            with contextlib.suppress(ConflictError, UnknownOutcomeError):  # the next run looks again
                await self._g.consensus.drop(key, seq)
        self._stream_queries = len(found) - len(gone)

    async def _delete_shard_orphans(
        self, shard: LogShard, metas: list[ObjectMeta], states: dict[str, ShardState]
    ) -> None:
        named = _named_objects(states.values())
        self._counted += sum(written_ms(meta.key) < 0 and meta.key not in named for meta in metas)
        before_ms = self._orphan_limit_ms()
        if not self._find_orphans(metas, [shard.state], before_ms):
            return
        states[shard.shard_id] = state = await shard.advance_sweep(before_ms)
        # The references of every shard as of the sweep: from here on nothing this old is ever named again.
        await self._delete_objects(self._find_orphans(metas, states.values(), before_ms, state))

    def _orphan_limit_ms(self) -> int:
        return self._g.clock.now_ms() - int(self._g.retention.orphans_after_s * 1000)

    def _find_orphans(
        self, metas: list[ObjectMeta], states: Iterable[ShardState], before_ms: int, swept: ShardState | None = None
    ) -> list[ObjectMeta]:
        named = _named_objects(states)
        limit_ms = before_ms if swept is None else min(before_ms, swept.swept_ms)
        return [meta for meta in metas if meta.key not in named and 0 <= written_ms(meta.key) < limit_ms]

    async def _delete_unowned(self, gone: dict[str, list[ObjectMeta]], states: dict[str, ShardState]) -> None:
        if not gone:
            return
        now_s = self._g.clock.monotonic_s()
        mentioned = await self._persisted.mentioned_shard_ids()
        horizon = await self._persisted.committed_seqnos()
        named = _named_objects(states.values())
        for shard_id, metas in gone.items():
            if shard_id in mentioned:
                self._gone.pop(shard_id, None)
                continue
            self._seen.add(shard_id)
            since_s, unpersisted = self._gone.setdefault(shard_id, (now_s, horizon))
            old = now_s - since_s >= self._g.retention.collect_after_s
            if old and await self._persisted.is_persisted_up_to(unpersisted):
                await self._delete_objects([meta for meta in metas if meta.key not in named])

    async def _delete_objects(self, metas: list[ObjectMeta]) -> None:
        for meta in metas:
            await self._g.objects.delete(meta.key)
            self._deleted += 1
            self._deleted_bytes += meta.size_bytes


def _named_objects(states: Iterable[ShardState]) -> set[str]:
    named: set[str] = set()
    for state in states:
        named.update(part.object_key for batch in state.batches for part in batch.parts)
        named.update(key for garbage in state.garbage for key in garbage.objects)
    return named
