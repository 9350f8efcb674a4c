"""Newest dead letters of a pipeline, read piece by piece from the newest batch on, because letters can be large."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tidemill.console.views.dead_letters import Letter, ReasonCounts, newest_letters

if TYPE_CHECKING:
    import pyarrow as pa

    from tidemill.shards.api import Batch, Part
    from tidemill.shards.handle import LogShard
    from tidemill.shards.read.read_handle import ShardReadHandle


class NewestFirst:
    """Letters that are still there, in batches from the newest to the oldest: a replay removes letters by
    retractions, and so does their retention. A batch is given whole, or in pieces that split no letter's updates."""

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


async def read_pieces(
    shard: ShardReadHandle, batch: Batch, upper: int, columns: Sequence[str] | None = None
) -> AsyncIterator[pa.Table]:
    """Yield the updates of a batch below `upper`, in pieces that split no row's updates: all columns, or these and the
    key. Memory holds one row group. Raises as `LogShard.read_batch`."""
    from tidemill.shards.read.hash_ranges import read_batch_ordered

    loop = asyncio.get_running_loop()

    def fetch(part: Part) -> Any:
        return asyncio.run_coroutine_threadsafe(shard.fetch(part, [batch]), loop).result()

    pieces: Iterator[pa.Table] = read_batch_ordered(shard.schema, batch, upper - 1, fetch, columns)
    while (rows := await asyncio.to_thread(next, pieces, None)) is not None:
        yield rows


class LettersRead(msgspec.Struct, frozen=True):
    """`total` letters are stored. `letters` are the newest of them, oldest first. `reasons` counts the newest
    `examined` ones. `expired` letters were removed because of their age; None = not read."""

    total: int
    letters: list[Letter]
    examined: int
    reasons: list[dict[str, Any]]
    expired: int | None = 0


async def read_letters(
    shard: LogShard, limit: int, examined_max: int | None = None, bytes_max: int | None = None
) -> LettersRead:
    """Return the newest `limit` letters. Without maxima, examine all of them."""
    from tidemill.spark.decode.dead_letter_rows import is_letter
    from tidemill.spark.stored_letters import count_expired

    _, upper = await shard.frontiers()
    names = [column.name for column in shard.schema.columns]
    batches = await shard.batches_until(upper - 1) if upper else []
    total, examined, read_bytes = sum(part.rows for batch in batches for part in batch.parts), 0, 0
    found, reasons, newest, expired = list[Letter](), ReasonCounts(), NewestFirst(), None if batches else 0
    for batch in reversed(batches):
        read_bytes += sum(part.size_bytes for part in batch.parts)
        if (examined_max is not None and examined >= examined_max) or (
            bytes_max is not None and read_bytes > bytes_max
        ):
            break
        async for piece in read_pieces(shard, batch, upper):
            rows = newest.live(piece).select(names)
            letters = rows.filter(is_letter(rows))
            if letters.num_rows < rows.num_rows:
                expired, total = count_expired(rows), total - 1
            rows = letters.sort_by([(name, "ascending") for name in ("at", "topic", "partition", "offset")])
            examined += rows.num_rows
            reasons.add(rows.select(["reason", "topic", "at"]).to_pylist())
            found = newest_letters([*rows.slice(max(0, rows.num_rows - limit)).to_pylist(), *found], limit)
    else:
        expired = expired or 0
    return LettersRead(total - 2 * newest.removed, found, examined, reasons.rows(), expired)
