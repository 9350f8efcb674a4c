"""Advance the time of an idle source for readers that read its shards together with busy ones.

No bindings are created for a source without changes, so its shards' uppers do not move. A derived table, or a query
over several shards at one time, needs them to pass the others' uppers: a new binding states that the source is
unchanged up to now. Dead-letter shards have no source, nor do shards written from DataFrames: their uppers are advanced
directly, by an empty append.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence

from tidemill.base.errors import ConflictError
from tidemill.metastore.catalogue import Catalogue, PipelineRow
from tidemill.metastore.rows.catalogue import source_of
from tidemill.shards.api import Remap
from tidemill.shards.handle import LogShard
from tidemill.spark.write import WRITES

LAG_MS = 1_000
"""A shard that lags this far behind the newest justifies a binding of some twenty bytes."""


async def advance_idle(
    catalogue: Catalogue, open_remap: Callable[[str], Awaitable[Remap]], shard: LogShard, upper: int, time_ms: int
) -> bool:
    """Advance the sources of `shard`, whose upper is `upper`, to `time_ms`; return whether one moved.

    Only for a shard that has everything its sources have bound: one that is behind is not idle, and catches up. The
    shard follows when its pipeline does. Raises UnavailableError, UnknownOutcomeError.
    """
    rows = await catalogue.list(PipelineRow, fresh=False)
    if upper <= time_ms and any(row.dead_letters == shard.name for row in rows):
        with contextlib.suppress(ConflictError):  # another process appended a letter or advanced the time first
            await shard.compare_and_append(upper, time_ms + 1, (), "")
        return True
    if upper <= time_ms and not any(shard.name in row.tables for row in rows) and _is_idle_written_shard(shard):
        rows = await catalogue.list(PipelineRow)  # a pipeline's shard must only be advanced through its source
        if not any(shard.name in row.tables for row in rows):
            with contextlib.suppress(ConflictError):  # another process was first
                await shard.compare_and_append(upper, time_ms + 1, (), shard.reader_name(WRITES))
            return True
    moved = False
    for source in sources_of(rows, shard.name):
        remap = await open_remap(source)
        latest = await remap.latest()
        if latest is not None and latest.time_ms < min(upper, time_ms):
            moved |= await remap.advance(time_ms) is not None
    return moved


def _is_idle_written_shard(shard: LogShard) -> bool:
    """Return whether the newest append came from a DataFrame write, and no write is in progress, which would have to be
    recomputed."""
    state, now_ms = shard.state, shard.part_time_ms()
    writing = any(hold.reader.startswith(f"{WRITES}/") and hold.is_live(now_ms) for hold in state.holds)
    return bool(state.writers) and state.writers[-1].token.startswith(WRITES) and not writing


def sources_of(pipelines: Sequence[PipelineRow], shard: str) -> set[str]:
    """Return the sources whose bindings the shard depends on, through derived tables of any pipelines."""
    found: set[str] = set()
    waiting, seen = [shard], {shard}
    while waiting:
        name = waiting.pop()
        for row in pipelines:
            fed_by = row.tables.get(name)
            if fed_by is None:
                continue
            if fed_by != "derived":
                found.add(source_of(fed_by))
                continue
            # A row of an older version names no inputs: the table may read all tables of its pipeline.
            new = row.derived.get(name, row.tables).keys() - seen
            seen |= new
            waiting += new
    return found
