"""Several shards at one time, for joins that agree: `tidemill sql`, verify, and readers in Python."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from tidemill.base.errors import Invalid
from tidemill.shards.front import Shard


async def common_time(shards: Sequence[Shard]) -> int:
    """The newest time final in all of them: the least upper, minus one. Raises Invalid when there is none."""
    if not shards:
        raise Invalid("no shard was named.", fix="Name at least one.")
    frontiers = await asyncio.gather(*(s.frontiers() for s in shards))
    at = min(upper for _, upper in frontiers) - 1
    late = [s.name for s, (since, _) in zip(shards, frontiers, strict=True) if since > at]
    if at < 0 or late:
        empty = [s.name for s, (_, upper) in zip(shards, frontiers, strict=True) if upper - 1 <= at]
        raise Invalid(
            f"no time is readable in all of them: held_by={','.join(empty)} compacted_past={','.join(late)}.",
            fix="Wait until every shard has been written once.",
        )
    return at


async def snapshot_tables(shards: Sequence[Shard], as_of: int | None = None) -> dict[str, pa.Table]:
    """Contents of each shard by name, all at one time: `as_of`, or else `common_time`."""
    at = await common_time(shards) if as_of is None else as_of
    tables = await asyncio.gather(*(s.snapshot(at) for s in shards))
    return {s.name: t for s, t in zip(shards, tables, strict=True)}


def register(connection: Any, tables: Mapping[str, pa.Table]) -> None:
    """Make each table a view of its shard's name in a DuckDB connection."""
    for name, table in tables.items():
        connection.register(name, table)
