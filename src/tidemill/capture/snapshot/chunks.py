"""Cut a table into chunks for its copy: ranges of blocks, each read separately, in any snapshot from the first one on
(docs/rfcs/0008-snapshots-in-chunks.md).

    chunk n    rows with  (n · step, 0) ≤ ctid < ((n + 1) · step, 0); the last one has no end

Invariant (full coverage): every block is in one chunk, including blocks that are added later, because the last chunk
has no end. In a partitioned table a chunk is the same range of blocks of every partition.

Invariant (rows stay): a row that no transaction after the first snapshot touches stays in its block in every later
snapshot, so it is read once. A touched row arrives whole in the stream, behind the copy, regardless of what the copy
read of it. So the topic is exact from the newest snapshot on (TableSnapshot.exact_lsn). This holds as long as rows stay
in the same files (VACUUM FULL, CLUSTER and TRUNCATE create new ones) and the stream carries whole rows (REPLICA
IDENTITY FULL). Otherwise a copy has to use one snapshot, and starts over when interrupted.

Invariant (prefix): the recorded number of completed chunks counts from the first one on without a gap, even though
several are read concurrently.

The throttle limits a copy to a number of rows per second, over all connections that read it. Everything else is pure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import msgspec

from tidemill.base.clock import Clock

PART_S = 0.25
"""Seconds of rows written at a time, so that waiting writes keep moving."""


class ChunkPlan(msgspec.Struct, frozen=True):
    step_blocks: int
    count: int

    def sql_condition(self, number: int) -> str:
        """Return the SQL condition of the rows of a chunk; "" = all."""
        low = f"ctid >= '({number * self.step_blocks},0)'" if number else ""
        high = f"ctid < '({(number + 1) * self.step_blocks},0)'" if number + 1 < self.count else ""
        return " AND ".join(filter(None, (low, high)))


def plan_chunks(blocks: int, longest: int, chunk_blocks: int) -> ChunkPlan:
    """Cut a table into chunks of about `chunk_blocks`. `blocks`: total of the table and its partitions. `longest`:
    blocks of its longest partition.
    """
    wanted = max(1, -(-blocks // chunk_blocks))
    step = max(1, -(-longest // wanted))
    return ChunkPlan(step, max(1, -(-longest // step)))


class CompletedPrefix:
    """Number of completed chunks from the first one on, and of their rows. Chunks may complete in any order."""

    def __init__(self, done: int, rows: int) -> None:
        self.done = done
        self.rows = rows
        self._beyond: dict[int, int] = {}

    def add(self, number: int, rows: int) -> None:
        self._beyond[number] = rows
        while self.done in self._beyond:
            self.rows += self._beyond.pop(self.done)
            self.done += 1


class CopyThrottle:
    """Rate limit of a copy. `rows_per_s` 0 = unlimited. At most `most_rows` are written at a time in any case."""

    def __init__(self, rows_per_s: int, most_rows: int, clock: Clock) -> None:
        self._rows_per_s = rows_per_s
        self._most_rows = min(most_rows, max(1, int(rows_per_s * PART_S))) if rows_per_s else most_rows
        self._clock = clock
        self._next_s = 0.0

    def parts(self, lines: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
        for at in range(0, len(lines), self._most_rows):
            yield lines[at : at + self._most_rows]

    async def wait_turn(self, rows: int) -> None:
        """Wait until this number of rows may be written. Callers are served in order of arrival, and unused time is not
        saved up.
        """
        if not self._rows_per_s:
            return
        now_s = self._clock.monotonic_s()
        at_s = max(self._next_s, now_s)
        self._next_s = at_s + rows / self._rows_per_s
        if at_s > now_s:
            await asyncio.sleep(at_s - now_s)
