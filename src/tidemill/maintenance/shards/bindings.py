"""The job `bindings`: truncate the log of a source's bindings below the least time that a reader needs.

    reader              reads from
    a pipeline's table  its since: every time at which it can be read has its binding, and it continues from its upper
    any other reader    the history of the retention

Both the current state and that of the newest manifest count, because a restore begins from the manifest. A shard
without contents retains nothing: the oldest binding covers everything before it, with that binding's time. A source
without a reader retains its history and no more. Bindings of a busy source are some hundred bytes each, so a step
forgets few at a time.

A shard that retains a source's bindings for PINNED_MS longer than the history is reported under
`keeper:bindings:SOURCE`, with the number of bindings and the way to release them: a pipeline that was stopped for good
is no longer in the status reports, and would retain them silently. The age of the oldest binding that the shard has not
passed counts, not the distance between two bindings, which is large after an idle day of the source.

A source with bindings to forget is visited soon after it changed, and less and less often while it does not. A source
without any is visited only when it changed: an idle topic costs nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from tidemill.base.status.status import StatusTracker
from tidemill.consensus.change_journal import ChangedLogs
from tidemill.maintenance.checkpoint.restore_horizon import RestoreHorizon
from tidemill.maintenance.checkpoint.stages import binding_sources
from tidemill.maintenance.scheduler import (
    REPORTED_UNITS_MAX,
    AgedValue,
    JobContext,
    MaintenanceJob,
    StepBudget,
    UnitFailures,
)
from tidemill.metastore.rows import PIPELINES
from tidemill.metastore.rows.catalogue import PipelineRow, source_of
from tidemill.shards.bindings.remap import LOG_PREFIX, WHOLE_RECORD_INTERVAL, LogRemap
from tidemill.shards.registry import list_created_shards
from tidemill.shards.state.commands import Create
from tidemill.shards.state.state_machine import shard_replica

INTERVAL_S = 10.0
FIRST_PAUSE_S = 15.0
LONGEST_PAUSE_S = 600.0
HELD_SHOWN = 10
PINNED_MS = 3_600_000
"""Time beyond the history after which retained bindings are reported. A process that is gone is shown as blind for
as long; from then on only this report mentions it."""
STALLED_AFTER_MS = 300_000
"""Time after which a shard that still needs the same time counts as stuck. A moving since is seen here after a
visit of the shard, a checkpoint and a manifest, so a pipeline that catches up has minutes for them."""


class _SourceSchedule(msgspec.Struct):
    """Schedule of the visits of one source."""

    times: AgedValue
    """Time of the newest binding as of `history_s` ago: later bindings may have times ahead of the clock."""
    next_s: float = 0.0
    pause_s: float = FIRST_PAUSE_S


class BindingsUpkeep(MaintenanceJob):
    """The job `bindings`."""

    def __init__(self, context: JobContext, tracker: StatusTracker) -> None:
        self._g = context
        self._failures = UnitFailures("keeper:bindings", tracker, context.clock)
        self._persisted = RestoreHorizon(context.metastore)
        self._logs = ChangedLogs(context.consensus, LOG_PREFIX)
        self._tended: dict[str, _SourceSchedule] = {}
        """Sources with bindings to forget, now or later."""
        self._forgotten = 0
        self._tracker = tracker
        self._pinned: set[str] = set()
        self._held_by: dict[str, str] = {}
        """Source → the shard whose since is the least."""

    def facts(self) -> dict[str, object]:
        return {
            "forgotten": self._forgotten,
            "sources": len(self._tended),
            "held_by": dict(sorted(self._held_by.items())[:HELD_SHOWN]),
            "pinned": len(self._pinned),
            "failing": self._failures.count,
        }

    async def run(self, budget: StepBudget) -> bool:
        """Visit the sources that are due, the longest waiting first."""
        g = self._g
        now_s = g.clock.monotonic_s()
        await self._follow_sources(now_s)
        tended = self._tended
        due = sorted((s for s in tended if tended[s].next_s <= now_s), key=lambda s: (tended[s].next_s, s))
        if not due:
            return False
        pipelines = await g.metastore.rows(PIPELINES, fresh=False)
        readers = shards_by_source(pipelines)
        created = {create.name: create for create in await list_created_shards(g.consensus)}
        for at, source in enumerate(due):
            if at and not budget.has_budget:
                return True
            try:
                await self._visit_source(
                    source, [created[name] for name in readers[source] if name in created], pipelines
                )
            except BaseException as error:
                self._failures.failed(source, error)
                tended[source].next_s = now_s + LONGEST_PAUSE_S / 10
            else:
                self._failures.clear_failure(source)
        return False

    async def _follow_sources(self, now_s: float) -> None:
        """Read which sources exist, and which changed."""
        sources = set(await binding_sources(self._g.metastore))
        changed = await self._logs.next_changed(sources.__contains__)
        for source, head in changed.items():
            if head.next - head.start > WHOLE_RECORD_INTERVAL:
                tended = self._tended.setdefault(source, _SourceSchedule(AgedValue(self._g.retention.history_s)))
                tended.pause_s = FIRST_PAUSE_S
                tended.next_s = min(tended.next_s, now_s + FIRST_PAUSE_S)
        self._logs.done(changed)
        for gone in self._tended.keys() - sources:
            self._stop_following(gone)

    def _stop_following(self, source: str) -> None:
        del self._tended[source]
        self._failures.clear_failure(source)
        self._clear_report(source)
        self._held_by.pop(source, None)

    async def _visit_source(self, source: str, readers: Sequence[Create], pipelines: Sequence[PipelineRow]) -> None:
        g, tended = self._g, self._tended[source]
        remap = LogRemap(g.consensus, source, g.clock, g.rand)
        newest = await remap.latest()
        if remap.length <= WHOLE_RECORD_INTERVAL:
            self._stop_following(source)
            return
        aged = tended.times.observe(newest.time_ms if newest is not None else 0, g.clock.monotonic_s())
        least = max(g.clock.now_ms() - g.retention.history_ms, aged)
        holder, upper = "", 0
        for create in readers:
            asks = await self._least_needed_time(create)
            if asks is not None and asks[0] < least:
                (least, upper), holder = asks, create.name
        self._forgotten += await remap.truncate_before(least)
        self._held_by.pop(source, None)
        if holder:
            self._held_by[source] = holder
        await self._report_retention(
            remap, least, upper, holder, [row.name for row in pipelines if holder in row.tables]
        )
        tended.next_s = g.clock.monotonic_s() + tended.pause_s
        tended.pause_s = min(LONGEST_PAUSE_S, tended.pause_s * 2)

    async def _report_retention(
        self, remap: LogRemap, least: int, upper: int, holder: str, pipelines: Sequence[str]
    ) -> None:
        """Report the shard `holder`, which is at `upper` and may still need the time `least`. The age is that of the
        bindings, so it does not depend on the process that runs this job.

        A `least` of 0 is not reported as stalled: the shard has not begun, or this process has not yet seen a manifest
        that holds it.
        """
        now_ms, retention = self._g.clock.now_ms(), self._g.retention
        kept_ms = now_ms - retention.history_ms - retention.step_ms - PINNED_MS
        since_ms = max(least, await remap.oldest_ms() or 0) if holder and 0 < least < kept_ms else kept_ms
        if not await _has_binding_between(remap, since_ms, kept_ms):
            self._clear_report(remap.name)
            return
        if remap.name not in self._pinned and len(self._pinned) >= REPORTED_UNITS_MAX:
            return
        self._pinned.add(remap.name)
        since = datetime.fromtimestamp(since_ms / 1000, UTC).isoformat(timespec="seconds")
        name = pipelines[0]
        reason = f"{remap.length:,} bindings since {since} are retained for table {holder} of pipeline {name}"
        behind = await _has_binding_between(remap, max(upper - 1, since_ms), now_ms - PINNED_MS)
        if behind:
            held_by = f"pipeline:{name}"
            reason += f", which is behind: if it is stopped, start it, or delete it: tidemill pipeline delete {name}"
        else:
            held_by = f"shard:{holder}"
            reason += f", whose history has a reader: tidemill table describe {holder}"
        newest = await remap.latest()
        newest_ms = newest.time_ms if newest is not None else since_ms
        self._tracker.set(
            f"keeper:bindings:{remap.name}", since_ms, newest_ms, now_ms=now_ms, held_by=held_by, reason=reason,
            budget_ms=STALLED_AFTER_MS, unit="ms", progress=upper if behind else 0,
        )  # fmt: skip

    def _clear_report(self, source: str) -> None:
        if source in self._pinned:
            self._pinned.discard(source)
            self._tracker.remove(f"keeper:bindings:{source}")

    async def _least_needed_time(self, create: Create) -> tuple[int, int] | None:
        """Return (the least time that this shard, or one restored in its place, may need, its upper); None when it
        needs nothing."""
        state = await shard_replica(self._g.consensus, create.shard_id).load()
        if state is None:
            return None
        if not state.upper:
            return 0, 0  # created and not begun: its first step may be under way, and ends at an old binding
        held = await self._persisted.persisted_shard(create.name, create.shard_id)
        return min(state.since, held.since), state.upper


async def _has_binding_between(remap: LogRemap, time_ms: int, before_ms: int) -> bool:
    """Return whether there is a binding later than `time_ms` and older than `before_ms`."""
    found = await remap.after(time_ms, 1) if time_ms < before_ms else []
    return bool(found) and found[0].time_ms < before_ms


def shards_by_source(pipelines: Sequence[PipelineRow]) -> Mapping[str, list[str]]:
    """Return source → the shards that are made from it."""
    out: dict[str, list[str]] = defaultdict(list)
    for row in pipelines:
        for shard, fed_by in row.tables.items():
            if fed_by != "derived":
                out[source_of(fed_by)].append(shard)
    return out
