"""Moving an idle source's time on, for who reads its shards beside busy ones.

Nothing is minted for a source in which nothing moves, so its shards' uppers stand. A derived table, or a query over
several shards at one time, needs them to pass the others': it says that the source is still the same, now.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from tidemill.metastore.catalogue import Catalogue, PipelineRow
from tidemill.metastore.rows.pipelines import source_of
from tidemill.shards.front import Remap

LAG_MS = 1_000
"""A shard this far behind the newest is worth a binding of some twenty bytes."""


async def advance_idle(
    catalogue: Catalogue, open_remap: Callable[[str], Awaitable[Remap]], shard: str, upper: int, time_ms: int
) -> bool:
    """Advance the sources of `shard`, whose upper is `upper`, to `time_ms`; True when one moved.

    Only of a shard that has everything its sources have bound: one that is behind is not idle, and catches up by
    itself. The shard follows when its pipeline does. Raises Unavailable, Unknown.
    """
    rows = [row for row in await catalogue.list(PipelineRow, fresh=False) if shard in row.tables]
    moved = False
    for source in {source for row in rows for source in _sources(row, shard)}:
        remap = await open_remap(source)
        latest = await remap.latest()
        if latest is not None and latest.time_ms < min(upper, time_ms):
            moved |= await remap.advance(time_ms) is not None
    return moved


def _sources(row: PipelineRow, shard: str) -> Iterable[str]:
    """A derived shard's are all of its pipeline."""
    fed_by = row.tables[shard]
    return [source_of(each) for each in ([fed_by] if fed_by != "derived" else row.tables.values()) if each != "derived"]
