"""A table cut into chunks for its copy: ranges of blocks, each read by itself, in any snapshot from the first one on.
Pure (docs/rfcs/0008-snapshots-in-chunks.md).

    chunk n    rows with  (n · step, 0) ≤ ctid < ((n + 1) · step, 0); the last one has no end

K1  Every block is in one chunk, blocks that come later too: the last chunk has no end. Of a partitioned table a chunk
    is the same range of blocks of every partition.
K2  A row that no transaction beyond the first snapshot touches lies in its block in every later one, so it is read
    once. One that is touched comes whole in the stream, behind the copy, whatever was read of it. So the topic is exact
    from the youngest snapshot on (TableSnapshot.exact_lsn).
K3  K2 holds as long as rows stay where they are (the same files: VACUUM FULL, CLUSTER and TRUNCATE make other ones) and
    the stream says whole rows (REPLICA IDENTITY FULL); else a copy is one snapshot's, and begins anew when cut off.
K4  What is told to be done are chunks from the first one on without a gap: one number, however many are read at once.
"""

from __future__ import annotations

import msgspec


class Chunks(msgspec.Struct, frozen=True):
    step_blocks: int
    count: int

    def condition(self, number: int) -> str:
        """As SQL: which rows of the table are in this chunk; "" = all."""
        low = f"ctid >= '({number * self.step_blocks},0)'" if number else ""
        high = f"ctid < '({(number + 1) * self.step_blocks},0)'" if number + 1 < self.count else ""
        return " AND ".join(filter(None, (low, high)))


def cut(blocks: int, longest: int, chunk_blocks: int) -> Chunks:
    """Into chunks of about `chunk_blocks`. `blocks`: of the table and its partitions; `longest`: of the longest one."""
    wanted = max(1, -(-blocks // chunk_blocks))
    step = max(1, -(-longest // wanted))
    return Chunks(step, max(1, -(-longest // step)))


class Prefix:
    """How many chunks are done from the first one on, and how many rows they have, as chunks end in any order (K4)."""

    def __init__(self, done: int, rows: int) -> None:
        self.done = done
        self.rows = rows
        self._beyond: dict[int, int] = {}

    def add(self, number: int, rows: int) -> None:
        self._beyond[number] = rows
        while self.done in self._beyond:
            self.rows += self._beyond.pop(self.done)
            self.done += 1
