"""The job `shards`: advance since, merge settled batches and delete replaced objects, shard by shard.

    retention    since follows now - history_s, or what was the newest time history_s ago, whichever is later; never
                 past a hold, never past the newest time
    merging      `shards.compaction`: a run at a time, each published whole or not at all
    collection   objects replaced collect_after_s ago, that no live hold may read and no restore needs, oldest first,
                 and then their entries (`collect_garbage`)

Invariant (leak rather than lose): a step that is interrupted anywhere leaves work that the next step repeats, or
objects that the sweep finds. An object is deleted before its entry is, and deleting it again is harmless.

Invariant (readers hold first): a reader holds first and then chooses; a writer replaces first and then deletes. The
choice of what to delete uses a state read in this call, and a hold that is set later chooses from a state that names
none of it.

Invariant (isolation): an error in reading, merging or collecting a shard concerns that shard only. It is reported under
`keeper:shards:NAME`.

Times in a shard may be ahead of the clock, because the clock of a node was wrong for a moment: later changes follow
them, a millisecond apart. So the ages of history and of garbage are measured by this process's monotonic clock, too
(`AgedValue`). A process that takes over this job starts its own measurement. Until that covers the age, only the
times count.
"""

from __future__ import annotations

import asyncio

import msgspec

from tidemill.base.clock import Clock
from tidemill.base.limits import OBJECT_CONCURRENCY
from tidemill.base.status.status import NOTICE_BUDGET_MS, StatusTracker, times_ahead_reason
from tidemill.maintenance.checkpoint.restore_horizon import RestoreHorizon
from tidemill.maintenance.scheduler import (
    REPORTED_UNITS_MAX,
    AgedValue,
    JobContext,
    MaintenanceJob,
    StepBudget,
    UnitFailures,
)
from tidemill.objects.store import ObjectStore
from tidemill.shards.compaction.compaction import compact_once
from tidemill.shards.handle import LogShard
from tidemill.shards.registry import list_created_shards
from tidemill.shards.state import apply as rules
from tidemill.shards.state.commands import Create
from tidemill.shards.state.state_machine import open_machine

RETENTION_OWNER = "retention"
BUSY_S = 5.0
QUIET_S = 60.0
"""Longest time between two visits of a shard. A shard that changes is visited more often; the pause grows up to this
while it does not change."""

CACHE_BYTES = 0
"""Cache size; merges read each part about once."""


_Ages = tuple[AgedValue, AgedValue]
"""Uppers and versions of a shard, of `history_s` and `collect_after_s` ago."""


class _ShardSchedule(msgspec.Struct, kw_only=True):
    """Handle of one shard, and the schedule of its visits."""

    shard: LogShard
    next_s: float = 0.0
    pause_s: float = BUSY_S
    version: int = -1
    uppers: AgedValue
    """Upper as of `history_s` ago."""
    versions: AgedValue
    """Version as of `collect_after_s` ago."""
    moved_s: float
    """Time of the last advance of since."""


class UpkeepCounters(msgspec.Struct):
    """Counters since this process started."""

    merges: int = 0
    rows_in: int = 0
    rows_out: int = 0
    deleted_objects: int = 0
    deleted_bytes: int = 0
    waiting_bytes: int = 0


class ShardUpkeep(MaintenanceJob):
    """The job `shards`."""

    def __init__(self, context: JobContext, tracker: StatusTracker) -> None:
        self._g = context
        self._failures = UnitFailures("keeper:shards", tracker, context.clock)
        self._persisted = RestoreHorizon(context.metastore)
        self._tended: dict[str, _ShardSchedule] = {}
        """Shard id → its handle."""
        self._ages: dict[str, _Ages] = {}
        """Shard id → its ages, which a handle that is opened again does not restart."""
        self._figures: UpkeepCounters = UpkeepCounters()
        self._tracker = tracker
        self._ahead: set[str] = set()
        """Shards whose times are reported to be ahead of the clock."""

    def facts(self) -> dict[str, object]:
        counts = {"shards": len(self._tended), "failing": self._failures.count, "times_ahead": len(self._ahead)}
        return super().facts() | counts

    async def run(self, budget: StepBudget) -> bool:
        """Visit the shards that are due, the longest waiting first. Return True when the budget ended before all
        were visited."""
        await self._follow_shards()
        now_s = self._g.clock.monotonic_s()
        due = sorted((t for t in self._tended.values() if t.next_s <= now_s), key=lambda t: t.next_s)
        for at, tended in enumerate(due):
            if at and not budget.has_budget:
                return True
            await self._visit_isolated(tended, budget)
        self._figures.waiting_bytes = sum(
            g.size_bytes for tended in self._tended.values() for g in tended.shard.state.garbage
        )
        return False

    async def _follow_shards(self) -> None:
        created = {create.shard_id: create for create in await list_created_shards(self._g.consensus)}
        for shard_id in self._tended.keys() - created.keys():
            await self._close_dropped(shard_id)
        for tended in [t for t in self._tended.values() if t.shard.state.schema != t.shard.schema]:
            await self._close_handle(tended)  # its cache has an older schema: a new handle merges under the new one
        for shard_id, create in created.items():
            if shard_id not in self._tended:
                try:
                    self._tended[shard_id] = self._schedule(await self._open_handle(create))
                except BaseException as error:
                    self._failures.failed(create.name, error)

    async def _open_handle(self, create: Create) -> LogShard:
        g = self._g
        machine = await open_machine(g.consensus, g.rand, create)
        return LogShard(machine, g.objects, g.clock, g.rand, cpu=g.cpu, cache_bytes=CACHE_BYTES)

    def _schedule(self, shard: LogShard) -> _ShardSchedule:
        retention = self._g.retention
        fresh = AgedValue(retention.history_s), AgedValue(retention.collect_after_s)
        uppers, versions = self._ages.setdefault(shard.shard_id, fresh)
        return _ShardSchedule(shard=shard, uppers=uppers, versions=versions, moved_s=self._g.clock.monotonic_s())

    async def _close_dropped(self, shard_id: str) -> None:
        tended = self._tended.pop(shard_id)
        self._ages.pop(shard_id, None)
        self._persisted.forget_shard(shard_id)
        self._failures.clear_failure(tended.shard.name)
        self._report_ahead(tended.shard.name, "")
        await tended.shard.aclose()

    async def _visit_isolated(self, tended: _ShardSchedule, budget: StepBudget) -> None:
        """Visit one shard. Any error it raises is reported for that shard only."""
        try:
            more = await self._visit_shard(tended, budget)
        except BaseException as error:
            self._failures.failed(tended.shard.name, error)
            self._report_ahead(tended.shard.name, "")
            # The handle itself may be broken: the next visit opens a new one.
            await self._close_handle(tended)
            return
        self._failures.clear_failure(tended.shard.name)
        changed = tended.version != tended.shard.state.version
        tended.version = tended.shard.state.version
        tended.pause_s = BUSY_S if changed else min(QUIET_S, tended.pause_s * 2)
        tended.next_s = self._g.clock.monotonic_s() + (0.0 if more else tended.pause_s)

    async def _close_handle(self, tended: _ShardSchedule) -> None:
        self._tended.pop(tended.shard.shard_id, None)
        await tended.shard.aclose()

    # one shard --------------------------------------------------------------------------------------
    async def _visit_shard(self, tended: _ShardSchedule, budget: StepBudget) -> bool:
        shard = tended.shard
        await shard.frontiers()
        self._report_ahead(shard.name, times_ahead_reason(shard.state.upper, self._g.clock.now_ms()))
        await self._advance_since(tended, budget.term)
        more = await self._merge_batches(shard, budget)
        await self._collect_garbage(tended)
        return more

    async def _advance_since(self, tended: _ShardSchedule, term: int) -> None:
        state, clock, retention = tended.shard.state, self._g.clock, self._g.retention
        now_ms, now_s = clock.now_ms(), clock.monotonic_s()
        newest, aged = state.upper - 1, tended.uppers.observe(state.upper, now_s) - 1
        target = min(newest, max(now_ms - retention.history_ms, aged))
        own = next((hold.since for hold in state.holds if hold.reader == RETENTION_OWNER), 0)
        lapsed = any(not hold.is_live(now_ms) for hold in state.holds)
        # A write is worth it for a quarter of the history, for the newest time, or to release a lapsed hold. Times that
        # are ahead of the clock are closer together than the changes were.
        due = target - own >= retention.step_ms or (now_s - tended.moved_s) * 1000 >= retention.step_ms
        if (target > own and (due or target == newest)) or lapsed:
            await tended.shard.downgrade_since(RETENTION_OWNER, term, max(target, own))
            tended.moved_s = now_s

    def _report_ahead(self, name: str, reason: str) -> None:
        """Report that the times of a shard are ahead of the clock, or with "" that they are not. It waits for any time
        and is never stuck, since the shard works."""
        mark = f"keeper:shards:{name}"
        if reason and (name in self._ahead or len(self._ahead) < REPORTED_UNITS_MAX):
            self._ahead.add(name)
            self._tracker.set(mark, 0, 1, now_ms=self._g.clock.now_ms(), reason=reason, budget_ms=NOTICE_BUDGET_MS)
        elif name in self._ahead:
            self._ahead.discard(name)
            self._tracker.remove(mark)

    async def _merge_batches(self, shard: LogShard, budget: StepBudget) -> bool:
        while True:
            g = self._g
            done = await compact_once(shard, g.objects, g.rand, cpu=g.cpu, oldest_version=g.oldest_version)
            if done is None:
                return False
            budget.spend(done.bytes_in + done.bytes_out)
            self._figures.merges += done.shown
            self._figures.rows_in += done.rows_in
            self._figures.rows_out += done.rows_out
            if not budget.has_budget:
                return True

    async def _collect_garbage(self, tended: _ShardSchedule) -> None:
        g, shard = self._g, tended.shard
        seen = tended.versions.observe(shard.state.version, g.clock.monotonic_s())
        if not shard.state.garbage:
            return
        persisted = (await self._persisted.persisted_shard(shard.name, shard.shard_id)).version
        after_ms = int(g.retention.collect_after_s * 1000)
        count, size_bytes = await collect_garbage(
            shard, g.objects, g.clock, after_ms=after_ms, persisted=persisted, seen=seen
        )
        self._figures.deleted_objects += count
        self._figures.deleted_bytes += size_bytes


async def collect_garbage(
    shard: LogShard, objects: ObjectStore, clock: Clock, *, after_ms: int, persisted: int, seen: int = 0
) -> tuple[int, int]:
    """Delete objects that were replaced at least `after_ms` ago, by version `persisted` at the latest, and that no
    live hold may read. `seen` is a version as of `after_ms` ago. Return (objects, bytes). Raises UnavailableError,
    UnknownOutcomeError: call again."""
    await shard.frontiers()
    now_ms = clock.now_ms()
    may_go = rules.collectable_garbage(shard.state, now_ms - after_ms, now_ms, seen)
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
