"""Newest dead letters of a pipeline, read batch by batch from the newest one, because letters can be large."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tidemill.console.views.dead_letters import Letter, ReasonCounts, newest_letters

if TYPE_CHECKING:
    from tidemill.shards.handle import LogShard


class LettersRead(msgspec.Struct, frozen=True):
    """`total` letters are stored. `letters` are the newest of them, oldest first. `reasons` counts the newest
    `examined` ones."""

    total: int
    letters: list[Letter]
    examined: int
    reasons: list[dict[str, Any]]


async def read_letters(
    shard: LogShard, limit: int, examined_max: int | None = None, bytes_max: int | None = None
) -> LettersRead:
    """Return the newest `limit` letters. Without maxima, examine all of them."""
    _, upper = await shard.frontiers()
    names = [column.name for column in shard.schema.columns]
    batches = await shard.batches_until(upper - 1) if upper else []
    total, examined, read_bytes = sum(part.rows for batch in batches for part in batch.parts), 0, 0
    found, reasons = list[Letter](), ReasonCounts()
    for batch in reversed(batches):
        read_bytes += sum(part.size_bytes for part in batch.parts)
        if (examined_max is not None and examined >= examined_max) or (
            bytes_max is not None and read_bytes > bytes_max
        ):
            break
        rows = (await shard.read_batch(batch, 0, upper)).select(names)
        rows = rows.sort_by([(name, "ascending") for name in ("at", "topic", "partition", "offset")])
        examined += rows.num_rows
        reasons.add(rows.select(["reason", "topic", "at"]).to_pylist())
        found = newest_letters([*rows.slice(max(0, rows.num_rows - limit)).to_pylist(), *found], limit)
    return LettersRead(total, found, examined, reasons.rows())
