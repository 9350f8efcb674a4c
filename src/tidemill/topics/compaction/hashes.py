"""Hash each key to 128 bits, a whole column at a time. Compaction identifies keys by these hashes.

    word 0      the key's length in bytes
    words 1 …   its bytes, four at a time, padded with zeros
    hash k      upper 32 bits of Σ secret[k][i] · word[i] mod 2^64, four of them in parallel

Multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast"): two keys collide in one hash with a
probability of 2^-32, in all four with 2^-128. That holds even for maliciously chosen keys, since each pass draws new
secrets. Longer keys are hashed one by one with BLAKE2b.
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
