"""The job `bindings`: the log of a source's bindings is truncated behind whatever still reads it.

    who reads           since when
    a pipeline's table  its since: every time it can be read at has its binding, and it goes on from its upper
    everybody else      the retention's history

As of now and as of the newest manifest, for a restore begins there. A shard that has nothing yet holds back nothing:
what the oldest binding covers is all that came before, with that binding's time. A source without a reader keeps its
history and no more. Bindings of a busy source are some hundred bytes each, so a step forgets few at a time.

BK1  A source that changed is looked at soon, one that does not ever more seldom: an idle topic costs next to nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from tidemill.base.marks import Tracker
from tidemill.keeper.checkpoint import sources_of
from tidemill.keeper.grounds import Grounds
from tidemill.keeper.jobs import Budget
from tidemill.keeper.persisted import Persisted
from tidemill.keeper.told import Told
from tidemill.metastore.rows import PIPELINES
from tidemill.metastore.rows.pipelines import PipelineRow, source_of
from tidemill.shards.commands import Create
from tidemill.shards.machine import shard_replica
from tidemill.shards.open import created_shards
from tidemill.shards.remap import WHOLE_EVERY, LogRemap

EVERY_S = 10.0
FIRST_PAUSE_S = 15.0
LONGEST_PAUSE_S = 600.0
HELD_SHOWN = 10


class _Tended(msgspec.Struct):
    next_s: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    end: int = -1
    """Next position of the log as of the last look."""


class BindingsUpkeep:
    def __init__(self, grounds: Grounds, tracker: Tracker) -> None:
        self._g = grounds
        self._told = Told("keeper:bindings", tracker, grounds.clock)
        self._persisted = Persisted(grounds.metastore)
        self._tended: dict[str, _Tended] = {}
        self._forgotten = 0
        self._held_by: dict[str, str] = {}
        """source → the shard whose since is the least"""

    def facts(self) -> dict[str, object]:
        return {
            "forgotten": self._forgotten,
            "sources": len(self._tended),
            "held_by": dict(sorted(self._held_by.items())[:HELD_SHOWN]),
            "failing": self._told.count,
        }

    async def run(self, budget: Budget) -> bool:
        """Look at the sources whose time has come, the longest waiting first."""
        g = self._g
        sources = await sources_of(g.metastore)
        for gone in self._tended.keys() - set(sources):
            self._told.healed(gone)
            self._held_by.pop(gone, None)
        self._tended = {source: self._tended.get(source, _Tended()) for source in sources}
        now_s = g.clock.monotonic_s()
        due = sorted((s for s in sources if self._tended[s].next_s <= now_s), key=lambda s: self._tended[s].next_s)
        if not due:
            return False
        readers = readers_of(await g.metastore.rows(PIPELINES, fresh=False))
        created = {create.name: create for create in await created_shards(g.consensus)}
        for at, source in enumerate(due):
            if at and not budget.left:
                return True
            try:
                await self._visit(source, [created[name] for name in readers[source] if name in created])
            except BaseException as error:
                self._told.failed(source, error)
                self._tended[source].next_s = now_s + LONGEST_PAUSE_S / 10
            else:
                self._told.healed(source)
        return False

    async def _visit(self, source: str, readers: Sequence[Create]) -> None:
        g, tended = self._g, self._tended[source]
        remap = LogRemap(g.consensus, source, g.clock, g.rand)
        await remap.latest()
        end = remap.position
        if remap.length > WHOLE_EVERY:
            least = g.clock.now_ms() - int(g.retention.history_s * 1000)
            holder = ""
            for create in readers:
                since = await self._since(create)
                if since is not None and since < least:
                    least, holder = since, create.name
            self._forgotten += await remap.forget(least)
            self._held_by.pop(source, None)
            if holder:
                self._held_by[source] = holder
        tended.pause_s = FIRST_PAUSE_S if end != tended.end else min(LONGEST_PAUSE_S, tended.pause_s * 2)
        tended.end = end
        tended.next_s = g.clock.monotonic_s() + tended.pause_s

    async def _since(self, create: Create) -> int | None:
        """The least time that this shard, or one restored in its place, may ask for; None when it asks for nothing."""
        state = await shard_replica(self._g.consensus, create.shard_id).load()
        if state is None:
            return None
        if not state.upper:
            return 0  # made and not begun: its first step may be under way, and ends at an old binding
        held = await self._persisted.held(create.name, create.shard_id)
        return min(state.since, held.since)


def readers_of(pipelines: Sequence[PipelineRow]) -> Mapping[str, list[str]]:
    """Source → the shards that are made of it."""
    out: dict[str, list[str]] = defaultdict(list)
    for row in pipelines:
        for shard, fed_by in row.tables.items():
            if fed_by != "derived":
                out[source_of(fed_by)].append(shard)
    return out
