"""Transactions as one partition sees them (KIP-98, KIP-890). Pure: no clock, randomness or I/O.

    first batch of a producer ──► open ──commit marker──► visible to every reader
                                    └───abort marker──► skipped by read_committed readers

A transaction is open from its first batch to its marker. The first open transaction determines the last stable offset,
below which every transaction has ended.

An aborted transaction is remembered while any of its records may be read. It is dropped when the log start passes it,
or when compaction has replaced its records and no reader uses the old ones.

A marker ends a transaction of an epoch below `Marker.ends_below`. Without such a transaction nothing is written.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Mapping
from typing import Final

import msgspec

from tidemill.topics.api import BatchRef

PLAIN: Final = 0
TRANSACTIONAL: Final = 1
COMMIT: Final = 2
ABORT: Final = 3
"""Kind of a placed batch: non-transactional records, records of a transaction, or the marker that ends one."""

OPEN_LIMIT: Final = 2_000
"""Limit of concurrently open transactions in a partition: as many as its metastore row can hold (`row_codec`)."""


class OpenTransaction(msgspec.Struct, frozen=True, array_like=True):
    """An open transaction. `since_ms`: the proposer's time of its first batch."""

    epoch: int
    first_offset: int
    since_ms: int


class AbortedTransaction(msgspec.Struct, frozen=True, array_like=True):
    """An aborted transaction.

    Offsets are inclusive; the last one is the marker's.
    `stable`: every transaction that is aborted later begins at or after it.
    """

    producer_id: int
    first_offset: int
    last_offset: int
    stable: int


class AbortedIndex:
    """Aborted transactions, ascending by last offset, in compact columns of 32 bytes each.

    Owned by a partition's state.
    """

    __slots__ = ("firsts", "lasts", "producers", "stables")

    def __init__(self, data: bytes = b"") -> None:
        """Decode `data`, as returned by `encode`."""
        columns = array("q", data)
        if sys.byteorder == "big":
            columns.byteswap()
        size = len(columns) // 4
        self.producers, self.firsts = columns[:size], columns[size : 2 * size]
        self.lasts, self.stables = columns[2 * size : 3 * size], columns[3 * size :]

    def __len__(self) -> int:
        return len(self.lasts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AbortedIndex) and self._columns() == other._columns()

    def __getitem__(self, index: int) -> AbortedTransaction:
        return AbortedTransaction(self.producers[index], self.firsts[index], self.lasts[index], self.stables[index])

    def add(self, aborted: AbortedTransaction) -> None:
        self.producers.append(aborted.producer_id)
        self.firsts.append(aborted.first_offset)
        self.lasts.append(aborted.last_offset)
        self.stables.append(aborted.stable)

    def first_ending_at(self, offset: int) -> int:
        """Return the index of the first transaction that ends at or after `offset`."""
        return bisect_left(self.lasts, offset)

    def overlapping(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return (producer id, first offset) of transactions that may have records in [start, end), in offset order."""
        found: list[tuple[int, int]] = []
        for index in range(self.first_ending_at(start), len(self)):
            if self.firsts[index] < end:
                found.append((self.producers[index], self.firsts[index]))
            if self.stables[index] >= end:
                break
        return sorted(found, key=lambda pair: pair[1])

    def with_aborted(self, ref: BatchRef) -> BatchRef:
        """Return `ref` with the producers of aborted transactions that overlap the batch."""
        aborted = self.overlapping(ref.base_offset, ref.base_offset + 1) if len(self) else []
        if not aborted:
            return ref
        return msgspec.structs.replace(ref, aborted=tuple(sorted({producer_id for producer_id, _ in aborted})))

    def set_log_start(self, log_start: int) -> None:
        gone = self.first_ending_at(log_start)
        if gone:
            for column in self._columns():
                del column[:gone]

    def copy(self) -> AbortedIndex:
        copy = AbortedIndex()
        copy.producers, copy.firsts, copy.lasts, copy.stables = (column[:] for column in self._columns())
        return copy

    def clear(self) -> None:
        for column in self._columns():
            del column[:]

    def encode(self) -> bytes:
        """Encode as four columns of little-endian int64: producer ids, first offsets, last offsets, stable offsets."""
        columns = array("q")
        for column in self._columns():
            columns += column
        if sys.byteorder == "big":
            columns.byteswap()
        return columns.tobytes()

    def _columns(self) -> tuple[array[int], ...]:
        return self.producers, self.firsts, self.lasts, self.stables


class TransactionLedger:
    """Open transactions of a partition after the batches that a command has placed so far.

    The partition's own state does not change until `write`.
    """

    __slots__ = ("_changes", "_count", "_now", "_open")

    def __init__(self, open_now: Mapping[int, OpenTransaction]) -> None:
        self._open = open_now
        self._now: dict[int, OpenTransaction | None] = {}
        """Producer id to its current transaction, for those that changed."""
        self._changes: list[tuple[int, OpenTransaction | None, int]] = []
        """Changes in order: (producer, its new transaction or None, offset of the marker if it was aborted or −1)."""
        self._count = len(open_now)

    @property
    def is_idle(self) -> bool:
        """True if no transaction is open or changed."""
        return not self._open and not self._now

    def find(self, producer_id: int) -> OpenTransaction | None:
        return self._now[producer_id] if producer_id in self._now else self._open.get(producer_id)

    def allows_batch(self, producer_id: int, epoch: int, kind: int, *, confirmed: bool) -> bool:
        """Return whether a data batch may be placed. `confirmed`: the coordinator reports an open transaction."""
        found = self.find(producer_id)
        if kind == PLAIN:
            return found is None
        return found.epoch == epoch if found is not None else confirmed

    @property
    def is_full(self) -> bool:
        return self._count >= OPEN_LIMIT

    def place_batch(self, producer_id: int, epoch: int, offset: int, at_ms: int) -> None:
        """Place a batch of a transaction; the first one opens it."""
        if self.find(producer_id) is None:
            self._record_change(producer_id, OpenTransaction(epoch, offset, at_ms), -1)
            self._count += 1

    def has_transaction_below(self, producer_id: int, below: int) -> bool:
        """Return whether a marker for epochs below `below` would end a transaction."""
        found = self.find(producer_id)
        return found is not None and found.epoch < below

    def end(self, producer_id: int, kind: int, offset: int) -> None:
        self._record_change(producer_id, None, offset if kind == ABORT else -1)
        self._count -= 1

    def _record_change(self, producer_id: int, opened: OpenTransaction | None, aborted_at: int) -> None:
        self._now[producer_id] = opened
        self._changes.append((producer_id, opened, aborted_at))

    def write(self, transactions: dict[int, OpenTransaction], aborted: AbortedIndex) -> None:
        for producer_id, opened, aborted_at in self._changes:
            if opened is not None:
                transactions[producer_id] = opened  # At the end: first offsets ascend.
                continue
            ended = transactions.pop(producer_id)
            if aborted_at >= 0:
                first = first_open(transactions)
                stable = aborted_at + 1 if first is None else first
                aborted.add(AbortedTransaction(producer_id, ended.first_offset, aborted_at, stable))


def first_open(transactions: Mapping[int, OpenTransaction]) -> int | None:
    """Return the least first offset. The transactions are ordered by their beginning."""
    return next(iter(transactions.values())).first_offset if transactions else None


def abort_all(transactions: dict[int, OpenTransaction], aborted: AbortedIndex, end: int) -> None:
    """Abort without a marker all transactions that were open when the log was cut at `end`.

    Their coordinator belongs to the state before the restore.
    """
    for producer_id, opened in list(transactions.items()):
        del transactions[producer_id]
        # All of these end at the same offset, so a scan must not stop before the last of them.
        following = first_open(transactions)
        aborted.add(
            AbortedTransaction(producer_id, opened.first_offset, end - 1, end if following is None else following)
        )
