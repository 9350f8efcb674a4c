"""The replicated state of one domain: what, with the bucket, makes its database again at any time.

S1  seqno = log position + seqno_delta, epoch = term + epoch_delta. The deltas may be negative: a restored
    domain goes on counting where its bucket ends, on a log that begins anew.
S2  `volatile` holds, in strictly ascending seqno order, exactly the batches above the persisted manifest's
    last_seqno. Opening the manifest and applying them gives the newest database.
S3  No manifest claims a seqno that was never issued, and none replaces one of a higher seqno, of a higher epoch, or
    of a higher number in its epoch.
S4  `volatile_bytes` is the sum of `batch_bytes` over `volatile`.
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
"""What a row costs beside its key and value: two references, two dict entries, two object headers, about."""


class VolatileBatch(NamedTuple):
    """One batch not yet in a persisted manifest. keys[i] goes with values[i]; an empty value deletes the key.

    The memtable holds these very `bytes` objects (R4 of RFC 0002): the buffer costs no second copy.
    """

    seqno: int
    keys: list[bytes]
    values: list[bytes]


class PersistedManifest(msgspec.Struct, frozen=True, array_like=True):
    """The newest manifest that is both in the bucket and in the log. `data` is as `lsm.manifest` encodes it.

    `number` orders manifests of one epoch: after a merge two of them have one last_seqno and different files.
    """

    data: bytes
    last_seqno: int
    epoch: int
    number: int = 0


class DomainState:
    """Changed by `apply` alone.

    domain_uuid     names the database and its place in the bucket; "" until the first leader has set one
    seqno_delta     0, or what the last reset left (S1)
    epoch_delta     likewise
    volatile        see S2; filled by writes, trimmed by manifests
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
        """The last seqno that the bucket alone would bring back; 0 for none."""
        return self.manifest.last_seqno if self.manifest is not None else 0

    @property
    def newest_seqno(self) -> int:
        """The last seqno ever issued to a batch of this domain; 0 for none."""
        return self.volatile[-1].seqno if self.volatile else self.persisted_seqno

    def next_batches(self, seqno: int, rows: int) -> tuple[list[VolatileBatch], bool]:
        """The first batches above `seqno`, as many as have `rows` rows or a batch more; and are there others?"""
        found: list[VolatileBatch] = []
        for batch in islice(self.volatile, bisect_right(self.volatile, seqno, key=_seqno), None):
            if rows <= 0:
                return found, True
            found.append(batch)
            rows -= len(batch.keys)
        return found, False

    def trim(self, seqno: int) -> None:
        """Drop the batches up to `seqno`. A hundred thousand of them are one step: the work is done in C."""
        volatile = self.volatile
        dropped = [volatile.popleft() for _ in range(bisect_right(volatile, seqno, key=_seqno))]
        if len(dropped) < len(volatile):
            self.volatile_bytes -= sum_bytes(dropped)
        else:
            self.volatile_bytes = sum_bytes(volatile)

    def batches_after(self, seqno: int) -> list[VolatileBatch]:
        """Volatile batches above `seqno`, in order. Costs as much as it returns."""
        found = []
        for batch in reversed(self.volatile):
            if batch.seqno <= seqno:
                break
            found.append(batch)
        found.reverse()
        return found


def batch_bytes(keys: Sequence[bytes], values: Sequence[bytes]) -> int:
    """What a batch counts for in every limit on memory."""
    return sum(map(len, keys)) + sum(map(len, values)) + ROW_OVERHEAD_BYTES * len(keys)


_seqno, _keys, _values = attrgetter("seqno"), attrgetter("keys"), attrgetter("values")


def sum_bytes(batches: Collection[VolatileBatch]) -> int:
    """Of `batch_bytes` over all of them, some times faster where they are small."""
    keys = list(chain.from_iterable(map(_keys, batches)))
    values = chain.from_iterable(map(_values, batches))
    return sum(map(len, keys)) + sum(map(len, values)) + ROW_OVERHEAD_BYTES * len(keys)


def check_state(state: DomainState) -> None:
    """Assert S2 and S4; for tests and the simulation."""
    at = state.persisted_seqno
    for batch in state.volatile:
        assert batch.seqno > at, f"S2: seqno {batch.seqno} follows {at}"
        assert batch.keys and len(batch.keys) == len(batch.values), f"S2: a batch without rows at {batch.seqno}"
        at = batch.seqno
    assert state.volatile_bytes == sum(batch_bytes(b.keys, b.values) for b in state.volatile), "S4: bytes drifted"
    assert state.domain_uuid or not (state.volatile or state.manifest), "rows without a uuid"
