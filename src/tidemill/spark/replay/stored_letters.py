"""Dead letters of a pipeline as stored: which are there, and their removal."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import pyarrow as pa

from tidemill.base.clock import Rand
from tidemill.base.errors import ConflictError
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.shards.api import DIFF
from tidemill.shards.handle import LogShard
from tidemill.shards.parts.arrow_rows import int64s
from tidemill.shards.parts.schema import update_schema
from tidemill.spark.decode.dead_letter_rows import Place, live_letters, numbers_in_order, retractions


class StoredLetter(NamedTuple):
    """A letter without its bytes. `time_ms`: the record's tidemill time."""

    place: Place
    last_offset: int
    time_ms: int
    reason: str

    @property
    def order(self) -> tuple[int, Place]:
        return self.time_ms, self.place


class StoredLetters:
    """Dead letters in their shard. Raises as reading it."""

    def __init__(self, portal: BlockingPortal, shard: LogShard, rand: Rand) -> None:
        self._portal = portal
        self._shard = shard
        self._rand = rand

    def read(self) -> list[StoredLetter]:
        """Return all letters, by time. Memory holds one batch with its bytes."""
        found: dict[Place, StoredLetter] = {}
        for rows in self._batches():
            columns = rows.select(["topic", "partition", "offset", "last_offset", "at", "reason"]).to_pydict()
            diffs = int64s(rows, DIFF).tolist()
            for number in numbers_in_order(rows):
                place = Place(columns["topic"][number], columns["partition"][number], columns["offset"][number])
                if diffs[number] < 0:
                    found.pop(place, None)
                    continue
                at_ms = int(columns["at"][number].timestamp() * 1000 + 0.5)
                found[place] = StoredLetter(place, columns["last_offset"][number], at_ms, columns["reason"][number])
        return sorted(found.values(), key=lambda letter: letter.order)

    def remove(self, places: Collection[Place]) -> int:
        """Remove those of these letters that are still there; return their number."""
        wanted = set(places)
        while wanted:
            lower = self._portal.call(self._shard.frontiers())[1]
            rows = live_letters(self._batches(), wanted, update_schema(self._shard.schema))
            if not rows.num_rows:
                return 0
            if self._retract(rows, lower):
                return int(rows.num_rows)
        return 0

    def _retract(self, rows: pa.Table, lower: int) -> bool:
        """Append the retractions at `lower`; False if another process appended first."""

        async def run() -> None:
            part = await self._shard.write_part(retractions(rows, lower))
            await self._shard.compare_and_append(lower, lower + 1, (part,), self._rand.nonce())

        try:
            self._portal.call(run())
        except ConflictError:
            return False
        return True

    def _batches(self) -> Iterator[pa.Table]:
        """Yield the rows of each batch, oldest first."""
        upper = self._portal.call(self._shard.frontiers())[1]
        for batch in self._portal.call(self._shard.batches_until(upper - 1)) if upper else ():
            yield self._portal.call(self._shard.read_batch(batch, 0, upper))
