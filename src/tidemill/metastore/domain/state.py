"""Replicated state of one domain. Together with the bucket it suffices to rebuild the domain's database at any time.

- Invariant (deltas): seqno = log position + seqno_delta, epoch = term + epoch_delta. The deltas may be negative: a
  restored domain continues the counters of its bucket, on a new log.
- Invariant (volatile buffer): `volatile` holds, in strictly ascending seqno order, exactly the batches above the
  persisted manifest's last_seqno. Opening the manifest and applying them gives the newest database.
- Invariant (manifests only advance): no manifest claims a seqno that was never issued, and none replaces one of a
  higher seqno, of a higher epoch, or of a higher number in its epoch.
- Invariant (accounting): `volatile_bytes` is the sum of `batch_bytes` over `volatile`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Sequence
from itertools import chain, islice
from operator import attrgetter
from typing import NamedTuple

import msgspec

ROW_OVERHEAD_BYTES = 64
"""Approximate memory cost of a row in addition to its key and value: two references, two dict entries, two object
headers."""


class VolatileBatch(NamedTuple):
    """One batch not yet in a persisted manifest. keys[i] belongs to values[i]; an empty value deletes the key.

    The memtable holds the identical `bytes` objects, so the buffer needs no second copy (RFC 0002).
    """

    seqno: int
    keys: list[bytes]
    values: list[bytes]


class PersistedManifest(msgspec.Struct, frozen=True, array_like=True):
    """The newest manifest that is both in the bucket and in the log. `data` is as `lsm.manifest` encodes it.

    `number` orders manifests of one epoch: a compaction yields a manifest with the same last_seqno and other files.
    """

    data: bytes
    last_seqno: int
    epoch: int
    number: int = 0


class DomainState:
    """State of a domain. Only `apply` changes it.

    domain_uuid     names the database and its prefix in the bucket; "" until the first leader sets one
    seqno_delta     0, or as the last reset set it
    epoch_delta     likewise
    volatile        batches above the manifest; appended by writes, trimmed by manifests
    manifest        None until the first flush
    """

    __slots__ = ("domain_uuid", "epoch_delta", "manifest", "seqno_delta", "volatile", "volatile_bytes")

    def __init__(self) -> None:
        self.domain_uuid = ""
        self.seqno_delta = 0
        self.epoch_delta = 0
        self.volatile: deque[VolatileBatch] = deque()
        self.volatile_bytes = 0
        self.manifest: PersistedManifest | None = None

    def seqno(self, position: int) -> int:
        return position + self.seqno_delta

    def epoch(self, term: int) -> int:
        return term + self.epoch_delta

    @property
    def persisted_seqno(self) -> int:
        """Last seqno that can be restored from the bucket alone; 0 for none."""
        return self.manifest.last_seqno if self.manifest is not None else 0

    @property
    def newest_seqno(self) -> int:
        """Last seqno issued to a batch of this domain; 0 for none."""
        return self.volatile[-1].seqno if self.volatile else self.persisted_seqno

    def next_batches(self, seqno: int, rows: int) -> tuple[list[VolatileBatch], bool]:
        """Return the first batches above `seqno`, until they have at least `rows` rows, and whether there are more."""
        found: list[VolatileBatch] = []
        for batch in islice(self.volatile, bisect_right(self.volatile, seqno, key=_seqno), None):
            if rows <= 0:
                return found, True
            found.append(batch)
            rows -= len(batch.keys)
        return found, False

    def trim(self, seqno: int) -> None:
        """Drop the batches up to `seqno`, in one step: even a hundred thousand are fast, since the loops run in C."""
        volatile = self.volatile
        dropped = [volatile.popleft() for _ in range(bisect_right(volatile, seqno, key=_seqno))]
        if len(dropped) < len(volatile):
            self.volatile_bytes -= sum_bytes(dropped)
        else:
            self.volatile_bytes = sum_bytes(volatile)

    def batches_after(self, seqno: int) -> list[VolatileBatch]:
        """Return the volatile batches above `seqno`, in order. The cost is proportional to their number."""
        found = []
        for batch in reversed(self.volatile):
            if batch.seqno <= seqno:
                break
            found.append(batch)
        found.reverse()
        return found


def batch_bytes(keys: Sequence[bytes], values: Sequence[bytes]) -> int:
    """Return the size of a batch as all memory limits count it."""
    return sum(map(len, keys)) + sum(map(len, values)) + ROW_OVERHEAD_BYTES * len(keys)


_seqno, _keys, _values = attrgetter("seqno"), attrgetter("keys"), attrgetter("values")


def sum_bytes(batches: Collection[VolatileBatch]) -> int:
    """Return the sum of `batch_bytes` over all batches, several times faster than adding them if they are small."""
    keys = list(chain.from_iterable(map(_keys, batches)))
    values = chain.from_iterable(map(_values, batches))
    return sum(map(len, keys)) + sum(map(len, values)) + ROW_OVERHEAD_BYTES * len(keys)


def assert_invariants(state: DomainState) -> None:
    """Assert the invariants of `volatile` and `volatile_bytes`; for tests and the simulation."""
    at = state.persisted_seqno
    for batch in state.volatile:
        assert batch.seqno > at, f"seqnos do not ascend: {batch.seqno} follows {at}"
        assert batch.keys and len(batch.keys) == len(batch.values), f"a batch without rows: seqno {batch.seqno}"
        at = batch.seqno
    assert state.volatile_bytes == sum(batch_bytes(b.keys, b.values) for b in state.volatile), "volatile_bytes drifted"
    assert state.domain_uuid or not (state.volatile or state.manifest), "rows without a uuid"
