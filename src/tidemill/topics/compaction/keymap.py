"""Map the hash of a key to the offset of its newest record, for one compaction pass over a range of a partition.

For a captured table it also has the offset of its last TRUNCATE.

Invariant (bounded memory): the map holds as many keys as it has room for, 24 bytes each, plus those of one batch. A
pass over a partition with more keys ends when the map is full, and the next pass continues there.
"""

from __future__ import annotations

import numpy as np

from tidemill.topics.batch.records import Int64s
from tidemill.topics.compaction.hashes import Hashes

_PENDING_MIN = 1 << 16
"""Minimum number of records that are sorted and merged into the map together; in a large map an eighth of its size."""


class KeyMap:
    def __init__(self, room: int) -> None:
        self._room = room
        self._hashes: Hashes = np.zeros((0, 2), np.uint64)
        self._offsets: Int64s = np.zeros(0, np.int64)
        self._longest_run = 0
        """Maximum number of keys that agree in the first half of their hash: nearly always one."""
        self._pending: list[tuple[Hashes, Int64s]] = []
        self._pending_count = 0
        self.emptied_at = -1
        """Offset before which all records of all keys are superseded."""

    def __len__(self) -> int:
        self._merge_pending()
        return len(self._offsets)

    @property
    def is_full(self) -> bool:
        if len(self._offsets) + self._pending_count < self._room:
            return False
        self._merge_pending()
        return len(self._offsets) >= self._room

    def add(self, hashes: Hashes, offsets: Int64s) -> None:
        """Add records of one or more batches. Each call must have greater offsets than the one before."""
        self._pending.append((hashes, offsets))
        self._pending_count += len(offsets)
        if self._pending_count >= max(_PENDING_MIN, len(self._offsets) // 8):
            self._merge_pending()

    def is_superseded(self, hashes: Hashes, offsets: Int64s) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return which of these records have a newer one of their key in the map."""
        self._merge_pending()
        at = self._find(hashes)
        known = np.flatnonzero(at >= 0)
        found = np.zeros(len(offsets), np.bool_)
        found[known] = self._offsets[at[known]] > offsets[known]
        return found

    def _find(self, hashes: Hashes) -> Int64s:
        """Return the index of each hash, −1 if absent.

        Hashes that agree in the first half are adjacent, in any order.
        """
        found = np.full(len(hashes), -1, np.int64)
        first = np.searchsorted(self._hashes[:, 0], hashes[:, 0], side="left")
        for step in range(self._longest_run):
            at = np.minimum(first + step, len(self._offsets) - 1)
            same = (self._hashes[at] == hashes).all(axis=1)
            found[same] = at[same]
        return found

    def _merge_pending(self) -> None:
        if not self._pending:
            return
        hashes = np.concatenate([each[0] for each in self._pending])
        offsets = np.concatenate([each[1] for each in self._pending])
        self._pending, self._pending_count = [], 0
        order = np.lexsort((offsets, hashes[:, 1], hashes[:, 0]))
        hashes, offsets = hashes[order], offsets[order]
        last = np.ones(len(offsets), np.bool_)
        last[:-1] = (hashes[1:] != hashes[:-1]).any(axis=1)
        hashes, offsets = hashes[last], offsets[last]
        at = self._find(hashes)
        new = at < 0
        self._offsets[at[~new]] = offsets[~new]
        where = np.searchsorted(self._hashes[:, 0], hashes[new, 0], side="left")
        self._hashes = np.insert(self._hashes, where, hashes[new], axis=0)
        self._offsets = np.insert(self._offsets, where, offsets[new])
        begins = np.flatnonzero(np.diff(self._hashes[:, 0]) != 0) + 1
        self._longest_run = int(np.diff(begins, prepend=0, append=len(self._offsets)).max())
