"""The newest record of each key, for one compaction pass over a range of a partition.

Keys are hashed to 128 bits, a whole column at a time; a map has the offset of each hash:

    word 0      the key's length in bytes
    words 1 …   its bytes, four at a time, padded with zeros
    hash k      upper 32 bits of Σ secret[k][i] · word[i] mod 2^64, four of them in parallel

Multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast"): two keys collide in one hash with a
probability of 2^-32, in all four with 2^-128. That holds even for maliciously chosen keys, since each pass draws new
secrets. Longer keys are hashed one by one with BLAKE2b.

For a captured table the map also has the offset of its last TRUNCATE.

Invariant (bounded memory): the map holds as many keys as it has room for, 24 bytes each, plus those of one batch. A
pass over a partition with more keys ends when the map is full, and the next pass continues there.
"""

from __future__ import annotations

from hashlib import blake2b, shake_256

import numpy as np
import numpy.typing as npt

from tidemill.objects.store import Buffer
from tidemill.topics.batch.records import Int64s

LONG_BYTES = 256
_WORDS = LONG_BYTES // 4 + 2
_GATHERED_BYTES = 1 << 20
_HIGH = np.uint64(0xFFFF_FFFF_0000_0000)

Hashes = npt.NDArray[np.uint64]
"""One row per key: two columns."""


class KeyHash:
    def __init__(self, secret: bytes) -> None:
        """Derive the factors. `secret` must be unknown to the writers of keys."""
        self._secret = shake_256(secret).digest(32)
        drawn = shake_256(b"words" + secret).digest(4 * _WORDS * 8)
        self._factors = np.frombuffer(drawn, "<u8").astype(np.uint64).reshape(_WORDS, 4)

    def hash_keys(self, data: Buffer, at: Int64s, sizes: Int64s) -> Hashes:
        """Hash the keys at `at` in `data` with length `sizes`; the hash of a null key is meaningless."""
        found = np.zeros((len(at), 2), np.uint64)
        table = np.frombuffer(data, np.uint8)
        for size in np.unique(sizes[sizes >= 0]).tolist():
            places = np.flatnonzero(sizes == size)
            if size > LONG_BYTES:
                found[places] = self._hash_long(data, at[places].tolist(), size)
                continue
            most = max(1, _GATHERED_BYTES // max(size, 1))
            for first in range(0, len(places), most):
                some = places[first : first + most]
                found[some] = self._hash_short(table, at[some], size)
        return found

    def _hash_short(self, table: npt.NDArray[np.uint8], at: Int64s, size: int) -> Hashes:
        words = (size + 3) // 4
        padded = np.zeros((len(at), words * 4), np.uint8)
        padded[:, :size] = table[at[:, None] + np.arange(size)]
        sums = padded.view("<u4").astype(np.uint64) @ self._factors[2 : 2 + words]
        sums += self._factors[0] + self._factors[1] * np.uint64(size)
        return sums[:, 0::2] & _HIGH | sums[:, 1::2] >> np.uint64(32)

    def _hash_long(self, data: Buffer, at: list[int], size: int) -> Hashes:
        view = memoryview(data)
        digests = [blake2b(view[a : a + size], digest_size=16, key=self._secret).digest() for a in at]
        return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64).reshape(-1, 2)


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
