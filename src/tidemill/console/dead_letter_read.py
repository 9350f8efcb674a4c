"""Newest dead letters of a pipeline, read batch by batch from the newest one, because letters can be large."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from tidemill.console.views.dead_letters import Letter, ReasonCounts, newest_letters

if TYPE_CHECKING:
    import pyarrow as pa

    from tidemill.shards.handle import LogShard


class NewestFirst:
    """Letters that are still there, in batches from the newest to the oldest: a replay removes letters by
    retractions."""

    def __init__(self) -> None:
        self.removed = 0
        """Retractions that were seen."""
        self._retracted: Counter[tuple[str, int, int]] = Counter()

    def live(self, rows: pa.Table) -> pa.Table:
        """Return the rows of a batch that no retraction in it, or in a newer batch, removes."""
        import pyarrow as pa  # commands import this module for its types

        from tidemill.shards.api import DIFF
        from tidemill.shards.parts.arrow_rows import int64s
        from tidemill.spark.decode.dead_letter_rows import numbers_in_order, places_of

        diffs = int64s(rows, DIFF)
        if not self._retracted and (diffs > 0).all():
            return rows
        places = places_of(rows)
        kept = []
        for at in reversed(numbers_in_order(rows)):
            if diffs[at] < 0:
                self._retracted[places[at]] += 1
                self.removed += 1
            elif self._retracted[places[at]]:
                self._retracted[places[at]] -= 1
            else:
                kept.append(at)
        return rows.take(pa.array(sorted(kept), pa.int64()))


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
    found, reasons, newest = list[Letter](), ReasonCounts(), NewestFirst()
    for batch in reversed(batches):
        read_bytes += sum(part.size_bytes for part in batch.parts)
        if (examined_max is not None and examined >= examined_max) or (
            bytes_max is not None and read_bytes > bytes_max
        ):
            break
        rows = newest.live(await shard.read_batch(batch, 0, upper)).select(names)
        rows = rows.sort_by([(name, "ascending") for name in ("at", "topic", "partition", "offset")])
        examined += rows.num_rows
        reasons.add(rows.select(["reason", "topic", "at"]).to_pylist())
        found = newest_letters([*rows.slice(max(0, rows.num_rows - limit)).to_pylist(), *found], limit)
    return LettersRead(total - 2 * newest.removed, found, examined, reasons.rows())
