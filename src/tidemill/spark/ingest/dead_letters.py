"""Dead-letter shard of a pipeline: every record of its topics that could not be decoded, exactly once.

Invariant (letters first): a letter is stored before the table passes its record: the letters of an interval are
appended first, then the table's updates. After a crash in between, the interval is decoded again, and the letters are
recognized by their positions. The same holds for a driver that loses a race.
Invariant (no duplicates): an append names the shard's upper, and its writer has read every letter below that upper, so
two writers never add the same letter.

So letters need no agreed time, no table waits for another, and an interval without letters costs nothing. Any thread
may add letters, one at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import structlog

from tidemill.base.clock import Rand
from tidemill.base.errors import ConflictError
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.shards.api import TIME, Batch, HistoryLostError, SchemaEvolvedError
from tidemill.shards.handle import LogShard
from tidemill.shards.parts.arrow_rows import int64s

log = structlog.get_logger()

_Place = tuple[str, int]


class DeadLetterWriter:
    """Writer of dead letters. `opened` returns the shard and creates it if absent; it is called on first use, and the
    caller retries it."""

    def __init__(self, portal: BlockingPortal, opened: Callable[[], LogShard], rand: Rand) -> None:
        self.total = 0
        """Number of letters that this process added."""
        self._portal = portal
        self._opened = opened
        self._rand = rand
        self._shard: LogShard | None = None
        self._upper = 0
        self._known: dict[_Place, npt.NDArray[np.int64]] = {}
        self._one_at_a_time = threading.Lock()

    def open(self) -> None:
        """Create the shard, so that readers find it. Raises as opening a shard."""
        with self._one_at_a_time:
            self._opened_shard()

    def put(self, letters: pa.Table) -> None:
        """Add those of these letters that are not stored yet.

        Raises UnavailableError, UnknownOutcomeError: call again with the same letters.
        """
        if letters.num_rows == 0:
            return
        with self._one_at_a_time:
            while not self._try_add(self._opened_shard(), letters):
                pass

    def _try_add(self, shard: LogShard, letters: pa.Table) -> bool:
        """Add the new letters; False if a peer was first, or evolved the shard: try again."""
        try:
            self._follow(shard)
            new = letters.filter(pa.array(self._is_new(letters)))
            if new.num_rows and not self._append(shard, new):
                return False
        except SchemaEvolvedError:
            self._shard = None
            return False
        self.total += new.num_rows
        return True

    def _opened_shard(self) -> LogShard:
        if self._shard is None:
            self._shard = self._opened()
        return self._shard

    def _append(self, shard: LogShard, new: pa.Table) -> bool:
        lower = self._upper
        at = max(lower, int(int64s(new, TIME).max()))
        times = pa.array(np.full(new.num_rows, at, dtype=np.int64))
        rows = new.set_column(new.schema.get_field_index(TIME), TIME, times)

        async def run() -> None:
            part = await shard.write_part(rows)
            await shard.compare_and_append(lower, at + 1, (part,), self._rand.nonce())

        try:
            self._portal.call(run())
        except ConflictError:
            return False  # a peer added letters: read them before the next attempt
        self._upper = at + 1
        self._add_known(rows)
        return True

    def _follow(self, shard: LogShard) -> None:
        """Learn the positions of all letters below the shard's upper."""
        _, upper = self._portal.call(shard.frontiers())
        if upper <= self._upper:
            return
        batches: list[Batch] | None = None
        if self._upper:
            try:
                batches = self._portal.call(shard.batches(self._upper))
            except HistoryLostError:
                batches = None
        if batches is None:
            batches = self._portal.call(shard.batches_until(upper - 1))
        for batch in batches:
            self._add_known(self._portal.call(shard.read_batch(batch, 0, batch.upper)))
        self._upper = max(batch.upper for batch in batches)

    def _add_known(self, rows: pa.Table) -> None:
        for place, offsets, _ in _by_place(rows):
            known = self._known.get(place)
            self._known[place] = np.unique(offsets) if known is None else np.union1d(known, offsets)

    def _is_new(self, letters: pa.Table) -> npt.NDArray[np.bool_]:
        """Return a mask of the new letters. Two tables may fail on one record: of its letters only the first counts as
        new."""
        new = np.zeros(letters.num_rows, dtype=bool)
        for place, offsets, at in _by_place(letters):
            _, first = np.unique(offsets, return_index=True)
            known = self._known.get(place)
            fresh = np.ones(len(first), dtype=bool) if known is None else ~np.isin(offsets[first], known)
            new[at[first[fresh]]] = True
        return new


def _by_place(rows: pa.Table) -> list[tuple[_Place, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Return (topic and partition, offsets, row numbers) of each partition that has rows."""
    topics = rows.column("topic").to_pylist()
    partitions = rows.column("partition").to_pylist()
    offsets = int64s(rows, "offset")
    found: dict[_Place, list[int]] = {}
    for at, place in enumerate(zip(topics, partitions, strict=True)):
        found.setdefault(place, []).append(at)
    numbers = {place: np.array(at, dtype=np.int64) for place, at in found.items()}
    return [(place, offsets[at], at) for place, at in numbers.items()]
