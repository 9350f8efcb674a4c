"""The job `bindings`: the log of a source's bindings is truncated behind whatever still reads it.

    who reads           since when
    a pipeline's table  its since: every time it can be read at has its binding, and it goes on from its upper
    everybody else      the retention's history

As of now and as of the newest manifest, for a restore begins there. A shard that has nothing yet holds back nothing:
what the oldest binding covers is all that came before, with that binding's time. A source without a reader keeps its
history and no more. Bindings of a busy source are some hundred bytes each, so a step forgets few at a time.

Who keeps a source's bindings for PINNED_MS longer than the history is told under `keeper:bindings:SOURCE`, with how
many there are and what lets them go: a pipeline that was stopped for good is not in the marks any more, and would keep
them silently. What counts is the age of the oldest binding that somebody has not gone past, not how far apart two
bindings are: a source that was idle for a day, and then is not, is kept by nobody.

BK1  A source that has enough to forget is looked at soon after it changed, and ever more seldom while it does not. One
     that has not is looked at when it changed: an idle topic costs nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from tidemill.base.status.status import StatusTracker
from tidemill.consensus.change_cursor import ChangedLogs
from tidemill.maintenance.checkpoint.restore_horizon import Persisted
from tidemill.maintenance.checkpoint.stages import sources_of
from tidemill.maintenance.context import JobContext
from tidemill.maintenance.failure_status import TOLD_AT_ONCE, FailureStatus
from tidemill.maintenance.scheduler import Budget
from tidemill.metastore.rows import PIPELINES
from tidemill.metastore.rows.pipelines import PipelineRow, source_of
from tidemill.shards.bindings.remap import LOG_PREFIX, WHOLE_EVERY, LogRemap
from tidemill.shards.registry import created_shards
from tidemill.shards.state.commands import Create
from tidemill.shards.state.state_machine import shard_replica

EVERY_S = 10.0
FIRST_PAUSE_S = 15.0
LONGEST_PAUSE_S = 600.0
HELD_SHOWN = 10
PINNED_MS = 3_600_000
"""As long as a process that is gone is still shown as blind; from then on this is all that tells of it."""
STANDS_MS = 300_000
"""Who asks for one and the same time for so long is stuck. A since that moves is seen here after a visit of the shard,
a checkpoint and a manifest: a pipeline that catches up has minutes for them."""


class _Tended(msgspec.Struct):
    next_s: float = 0.0
    pause_s: float = FIRST_PAUSE_S


class BindingsUpkeep:
    def __init__(self, grounds: JobContext, tracker: StatusTracker) -> None:
        self._g = grounds
        self._told = FailureStatus("keeper:bindings", tracker, grounds.clock)
        self._persisted = Persisted(grounds.metastore)
        self._logs = ChangedLogs(grounds.consensus, LOG_PREFIX)
        self._tended: dict[str, _Tended] = {}
        """The sources with bindings to forget, now or later."""
        self._forgotten = 0
        self._tracker = tracker
        self._pinned: set[str] = set()
        self._held_by: dict[str, str] = {}
        """source → the shard whose since is the least"""

    def facts(self) -> dict[str, object]:
        return {
            "forgotten": self._forgotten,
            "sources": len(self._tended),
            "held_by": dict(sorted(self._held_by.items())[:HELD_SHOWN]),
            "pinned": len(self._pinned),
            "failing": self._told.count,
        }

    async def run(self, budget: Budget) -> bool:
        """Look at the sources whose time has come, the longest waiting first."""
        g = self._g
        now_s = g.clock.monotonic_s()
        await self._look(now_s)
        tended = self._tended
        due = sorted((s for s in tended if tended[s].next_s <= now_s), key=lambda s: (tended[s].next_s, s))
        if not due:
            return False
        pipelines = await g.metastore.rows(PIPELINES, fresh=False)
        readers = readers_of(pipelines)
        created = {create.name: create for create in await created_shards(g.consensus)}
        for at, source in enumerate(due):
            if at and not budget.left:
                return True
            try:
                await self._visit(source, [created[name] for name in readers[source] if name in created], pipelines)
            except BaseException as error:
                self._told.failed(source, error)
                tended[source].next_s = now_s + LONGEST_PAUSE_S / 10
            else:
                self._told.healed(source)
        return False

    async def _look(self, now_s: float) -> None:
        """Which sources there are, and which changed."""
        sources = set(await sources_of(self._g.metastore))
        changed = await self._logs.look(sources.__contains__)
        for source, head in changed.items():
            if head.next - head.start > WHOLE_EVERY:
                tended = self._tended.setdefault(source, _Tended())
                tended.pause_s = FIRST_PAUSE_S
                tended.next_s = min(tended.next_s, now_s + FIRST_PAUSE_S)
        self._logs.done(changed)
        for gone in self._tended.keys() - sources:
            self._let_go(gone)

    def _let_go(self, source: str) -> None:
        del self._tended[source]
        self._told.healed(source)
        self._released(source)
        self._held_by.pop(source, None)

    async def _visit(self, source: str, readers: Sequence[Create], pipelines: Sequence[PipelineRow]) -> None:
        g, tended = self._g, self._tended[source]
        remap = LogRemap(g.consensus, source, g.clock, g.rand)
        await remap.latest()
        if remap.length <= WHOLE_EVERY:
            self._let_go(source)
            return
        least = g.clock.now_ms() - g.retention.history_ms
        holder, upper = "", 0
        for create in readers:
            asks = await self._asks(create)
            if asks is not None and asks[0] < least:
                (least, upper), holder = asks, create.name
        self._forgotten += await remap.forget(least)
        self._held_by.pop(source, None)
        if holder:
            self._held_by[source] = holder
        await self._tell(remap, least, upper, holder, [row.name for row in pipelines if holder in row.tables])
        tended.next_s = g.clock.monotonic_s() + tended.pause_s
        tended.pause_s = min(LONGEST_PAUSE_S, tended.pause_s * 2)

    async def _tell(self, remap: LogRemap, least: int, upper: int, holder: str, pipelines: Sequence[str]) -> None:
        """`least` is what the holder, a shard that is at `upper`, may still ask for. The age is that of the bindings,
        so it survives whoever runs this job.

        0 is no time that stands: the shard has not begun, or no manifest that holds it was seen by this process yet.
        """
        now_ms, retention = self._g.clock.now_ms(), self._g.retention
        kept_ms = now_ms - retention.history_ms - retention.step_ms - PINNED_MS
        since_ms = max(least, await remap.oldest_ms() or 0) if holder and 0 < least < kept_ms else kept_ms
        if not await _passed_by(remap, since_ms, kept_ms):
            self._released(remap.name)
            return
        if remap.name not in self._pinned and len(self._pinned) >= TOLD_AT_ONCE:
            return
        self._pinned.add(remap.name)
        since = datetime.fromtimestamp(since_ms / 1000, UTC).isoformat(timespec="seconds")
        name = pipelines[0]
        reason = f"{remap.length:,} bindings since {since} are kept for shard {holder} of pipeline {name}"
        behind = await _passed_by(remap, max(upper - 1, since_ms), now_ms - PINNED_MS)
        if behind:
            held_by = f"pipeline:{name}"
            reason += f", which is behind: if it stands, start it, or give it up: tidemill pipeline delete {name}"
        else:
            held_by = f"shard:{holder}"
            reason += f", whose past somebody reads: tidemill shard describe {holder}"
        newest = await remap.latest()
        newest_ms = newest.time_ms if newest is not None else since_ms
        self._tracker.set(
            f"keeper:bindings:{remap.name}", since_ms, newest_ms, now_ms=now_ms, held_by=held_by, reason=reason,
            budget_ms=STANDS_MS, unit="ms", progress=upper if behind else 0,
        )  # fmt: skip

    def _released(self, source: str) -> None:
        if source in self._pinned:
            self._pinned.discard(source)
            self._tracker.remove(f"keeper:bindings:{source}")

    async def _asks(self, create: Create) -> tuple[int, int] | None:
        """(the least time that this shard, or one restored in its place, may ask for, its upper); None when it asks
        for nothing."""
        state = await shard_replica(self._g.consensus, create.shard_id).load()
        if state is None:
            return None
        if not state.upper:
            return 0, 0  # made and not begun: its first step may be under way, and ends at an old binding
        held = await self._persisted.held(create.name, create.shard_id)
        return min(state.since, held.since), state.upper


async def _passed_by(remap: LogRemap, time_ms: int, before_ms: int) -> bool:
    """Is there a binding later than `time_ms` and older than `before_ms`?"""
    found = await remap.after(time_ms, 1) if time_ms < before_ms else []
    return bool(found) and found[0].time_ms < before_ms


def readers_of(pipelines: Sequence[PipelineRow]) -> Mapping[str, list[str]]:
    """Source → the shards that are made of it."""
    out: dict[str, list[str]] = defaultdict(list)
    for row in pipelines:
        for shard, fed_by in row.tables.items():
            if fed_by != "derived":
                out[source_of(fed_by)].append(shard)
    return out
