"""Common time of several tables."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.base.errors import UnavailableError
from tidemill.shards.api import HistoryLostError
from tidemill.shards.handle import LogShard
from tidemill.spark.derived.idle_advance import LAG_MS, advance_idle
from tidemill.spark.stores import Stores

IDLE_WAIT_S = 3.0
"""Time for idle tables to pass the others' time; if their pipelines do not run, the tables are read at the older
time."""


async def common_time(stores: Stores, shards: Sequence[LogShard]) -> int:
    """Return the newest time that is final in all of them; -1 if none was ever written.

    The time of a table whose source is idle is advanced first, with a short wait. Raises HistoryLostError,
    UnavailableError.
    """
    frontiers = {shard.name: await shard.frontiers() for shard in shards}
    newest = max((upper for _, upper in frontiers.values()), default=0)
    moved = [
        shard
        for shard in shards
        if newest - frontiers[shard.name][1] > LAG_MS
        and await advance_idle(stores.catalogue, stores.remap, shard, frontiers[shard.name][1], newest - 1)
    ]
    for shard in moved:
        await shard.wait_upper(newest - 1, IDLE_WAIT_S)
        frontiers[shard.name] = await shard.frontiers()
    if not newest:
        return -1
    last, least = min((upper, name) for name, (_, upper) in frontiers.items())
    since, first = max((since, name) for name, (since, _) in frontiers.items())
    if not last:
        raise UnavailableError(
            f"nothing was written yet: shard={least}.", fix="Wait for its pipeline, or omit the table."
        )
    if last <= since:
        raise HistoryLostError(
            f"the tables have no time in common: {first} is readable from {since} on, {least} before {last}.",
            fix=f"Find out why {least} does not advance: tidemill why {least}.",
        )
    return last - 1
