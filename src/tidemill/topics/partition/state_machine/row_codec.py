"""Convert a partition's state to rows of the metastore, and back. Pure.

The rows are one partition row (counters, leader epochs, producers, open transactions), one extent row for each run of
batches that are adjacent in one object, and one row for each offset at which transactions were aborted.

Invariant: a partition row never counts an offset that no extent row holds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import attrgetter
from typing import TypeVar

import msgspec

from tidemill.base.errors import CorruptError
from tidemill.metastore.rows.partitions import AbortedRow, ExtentRow, PartitionRow
from tidemill.topics.partition.state_machine.producer_state import ProducerState
from tidemill.topics.partition.state_machine.state import PartitionState
from tidemill.topics.partition.state_machine.transactions import AbortedTransaction, OpenTransaction, abort_all

PRODUCERS_BYTES = 192 << 10
"""Size limit of the producers in a partition row, about 1,400 busy ones. Leaves room for the rest below
METASTORE_VALUE_BYTES."""

EXTENT_BATCHES = 256
"""Limit of batches per extent row: about 8 kB of its `batches`."""

_encoder = msgspec.msgpack.Encoder()
_batches = msgspec.msgpack.Decoder(list[tuple[int, int, int, int]])
_producers = msgspec.msgpack.Decoder(list[tuple[int, ProducerState]])
_transactions = msgspec.msgpack.Decoder(list[tuple[int, int]])

T = TypeVar("T")


def build_partition_row(state: PartitionState, topic_id: str, partition: int) -> PartitionRow:
    """Build the partition row: the whole state except its batches and expired producers."""
    opened = [(producer_id, each.first_offset) for producer_id, each in state.transactions.items()]
    return PartitionRow(
        topic_id,
        partition,
        log_start=state.log_start,
        next_offset=state.high_watermark,
        leader_term=state.terms[-1][0] if state.terms else 0,
        log_position=state.applied,
        last_at_ms=state.last_at_ms,
        terms=tuple(state.terms),
        producers=_encode_producers(list(state.live_producers())),
        transactions=_encoder.encode(opened) if opened else b"",
        reconciled=state.reconciled,
        aborted_start=state.aborted_start,
    )


def _encode_producers(live: list[tuple[int, ProducerState]]) -> bytes:
    """Encode the most recent producers that fit in a row.

    A producer that is left out may start at any sequence, as if it had expired.
    """
    data = _encoder.encode(live) if live else b""
    if len(data) <= PRODUCERS_BYTES:
        return data
    kept = sorted(live, key=lambda entry: (-entry[1].updated_ms, entry[0]))
    while len(data) > PRODUCERS_BYTES:
        del kept[len(kept) * 7 // 8 :]
        data = _encoder.encode(kept)
    return data


def build_extents(state: PartitionState, topic_id: str, partition: int, start: int) -> Iterator[ExtentRow]:
    """Yield extents for the batches from base offset `start`: runs of batches that are adjacent in one object.

    Invariant: runs that begin at the same offset are cut in the same way, so writing them again replaces them.
    """
    first, count = bisect_left(state.bases, start), len(state)
    while first < count:
        end = first + 1
        while end < count and end - first < EXTENT_BATCHES and _is_adjacent(state, end):
            end += 1
        yield _build_extent(state, topic_id, partition, first, end)
        first = end


def _is_adjacent(state: PartitionState, index: int) -> bool:
    same_object = state.objects[index] == state.objects[index - 1]
    return same_object and state.first_bytes[index] == state.first_bytes[index - 1] + state.sizes[index - 1]


def _build_extent(state: PartitionState, topic_id: str, partition: int, first: int, end: int) -> ExtentRow:
    last_offset = state.next_base(end - 1) - 1
    members = [
        (state.bases[i], state.first_bytes[i], state.sizes[i], state.max_timestamps[i]) for i in range(first, end)
    ]
    return ExtentRow(
        topic_id,
        partition,
        state.bases[first],
        last_offset,
        max(state.max_timestamps[first:end]),
        state.object_keys[state.objects[first]],
        state.first_bytes[first],
        sum(state.sizes[first:end]),
        last_offset - state.bases[first] + 1,
        _encoder.encode(members) if end - first > 1 else b"",
    )


def build_aborted_rows(state: PartitionState, topic_id: str, partition: int, start: int) -> list[AbortedRow]:
    """Return the rows of transactions that were aborted at or after `start`."""
    index = state.aborted
    found = (index[at] for at in range(index.first_ending_at(start), len(index)))
    rows: list[AbortedRow] = []
    for last_offset, ended in groupby(found, key=attrgetter("last_offset")):
        first, *others = ((each.producer_id, each.first_offset, each.stable) for each in ended)
        rows.append(AbortedRow(topic_id, partition, last_offset, *first, tuple(others)))
    return rows


def rebuild_state(row: PartitionRow, rows: Iterable[ExtentRow], aborted: Iterable[AbortedRow] = ()) -> PartitionState:
    """Rebuild the state from rows, with `applied` as of the partition row.

    Extents beyond the row's next offset are left out. A transaction that was open is aborted: its outcome was lost with
    the records after the row.

    Raises CorruptError if the extents are not contiguous from the start of the hot state to the row's next offset.
    """
    state = PartitionState()
    state.applied = row.log_position
    state.log_start, state.reconciled, state.aborted_start = row.log_start, row.reconciled, row.aborted_start
    state.last_at_ms = row.last_at_ms
    state.terms = [(term, offset) for term, offset in row.terms]
    state.producers = decode_producers(row)
    start = row.hot_start
    at: int | None = None
    highest = -(2**63)
    for extent in rows:
        if extent.last_offset < start:
            continue
        if extent.base_offset >= row.next_offset:
            break
        wanted = extent.base_offset <= start if at is None else extent.base_offset == at
        if not wanted or extent.last_offset >= row.next_offset:
            raise CorruptError(
                f"the extents of a partition are not contiguous: partition={row.topic_id}/{row.partition}"
                f" expected={start if at is None else at} found={extent.base_offset}"
                f" last_offset={extent.last_offset} next_offset={row.next_offset}.",
                fix="Restore from an older manifest.",
            )
        at = extent.last_offset + 1
        key = state.intern(extent.object_key)
        batches = decode_batches(extent)
        ends = [batch[0] for batch in batches[1:]] + [at]
        for (base, first_byte, size, timestamp), end in zip(batches, ends, strict=True):
            if end <= start:
                continue
            state.bases.append(base)
            state.objects.append(key)
            state.first_bytes.append(first_byte)
            state.sizes.append(size)
            state.max_timestamps.append(timestamp)
            highest = max(highest, timestamp)
            state.highest_timestamps.append(highest)
    if (start if at is None else at) != row.next_offset:
        raise CorruptError(
            f"a partition's newest extents are missing: partition={row.topic_id}/{row.partition}"
            f" found_to={at if at is not None else start} next_offset={row.next_offset}.",
            fix="Restore from an older manifest.",
        )
    state.high_watermark = row.next_offset
    opened = {
        producer_id: OpenTransaction(0, first_offset, 0)
        for producer_id, first_offset in decode_transactions(row).items()
    }
    for each in aborted:
        if max(row.log_start, row.aborted_start) <= each.last_offset < row.next_offset:
            for producer_id, first_offset, stable in ((each.producer_id, each.first_offset, each.stable), *each.others):
                state.aborted.add(AbortedTransaction(producer_id, first_offset, each.last_offset, stable))
                # An earlier restore ended this one; the older partition row still lists it as open.
                if producer_id in opened and opened[producer_id].first_offset == first_offset:
                    del opened[producer_id]
    abort_all(opened, state.aborted, row.next_offset)
    return state


def decode_producers(row: PartitionRow) -> dict[int, ProducerState]:
    """Decode the producers of a row, by id. Raises CorruptError."""
    return dict(_decode_list(_producers, row.producers, row, "producers"))


def decode_transactions(row: PartitionRow) -> dict[int, int]:
    """Decode the open transactions of a row: producer id to first offset. Raises CorruptError."""
    return dict(_decode_list(_transactions, row.transactions, row, "transactions"))


def _decode_list(decoder: msgspec.msgpack.Decoder[list[T]], data: bytes, row: PartitionRow, what: str) -> list[T]:
    try:
        return decoder.decode(data) if data else []
    except msgspec.DecodeError as error:
        raise CorruptError(
            f"the {what} of a partition are unreadable: partition={row.topic_id}/{row.partition} cause={error}."
        ) from error


def decode_batches(extent: ExtentRow) -> list[tuple[int, int, int, int]]:
    """Return (base offset, first byte, size, max timestamp) of each batch. Raises CorruptError."""
    if not extent.batches:
        return [(extent.base_offset, extent.first_byte, extent.size_bytes, extent.max_timestamp_ms)]
    try:
        return _batches.decode(extent.batches)
    except msgspec.DecodeError as error:
        raise CorruptError(
            f"the batches of an extent are unreadable: partition={extent.topic_id}/{extent.partition}"
            f" base_offset={extent.base_offset} cause={error}."
        ) from error
