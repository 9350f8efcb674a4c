"""Compact one range of batches: select the remaining records, and rebuild the batches that hold them. Pure, by columns.

Rules for records: a record is removed if the map has a newer one of its key, if it has no key, or if it is a tombstone
below `tombstones_below`. Nothing from `end` on is changed. In a captured table's topic a record without a key is the
tombstone of every key before it: older records are removed, and it is removed as a tombstone is.

Rules for batches: a batch retains its first and last offset, its producer, epoch, sequence and codec; its records
retain their bytes. A batch without remaining records is removed: the producer's state is in the partition's state.

Rules for transactions: batches of aborted transactions are invisible and are removed, and so are commit markers, which
no reader needs. Clients need an abort marker to end an aborted transaction that a fetch names, so it remains until it
is below `markers_below`.

Unreadable batches remain unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import crc32c
import msgspec
import numpy as np

from tidemill.objects.store import Buffer
from tidemill.topics.api import BatchRef, UnreadableBatchError
from tidemill.topics.batch.columnar_scan import CHUNK_RECORDS
from tidemill.topics.batch.compression import compress
from tidemill.topics.batch.control_batch import is_abort_marker, is_commit_marker
from tidemill.topics.batch.decode import GROUP_BYTES, OpenedBatch, has_user_records, open_batch, scan_opened
from tidemill.topics.batch.header import APPEND_TIME, CONTROL, CRC_START, HEADER, HEADER_BYTES, LENGTH_FIELD_END
from tidemill.topics.batch.records import Int64s, RecordColumns
from tidemill.topics.compaction.keymap import KeyHash, KeyMap

Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]


class PassRules(msgspec.Struct, frozen=True):
    """Inputs of one compaction pass over a partition.

    `keys` covers the keys below `end`. Tombstones below `tombstones_below` are removed; the remaining ones are counted
    from `tombstones_from`.
    `captured`: the topic is a captured table's. No present or future fetch names transactions that were aborted wholly
    below `markers_below`.
    """

    keys: KeyMap
    key_hash: KeyHash
    end: int
    tombstones_below: int
    tombstones_from: int
    captured: bool = False
    markers_below: int = 0


class CleanedBatch(msgspec.Struct, frozen=True):
    """A remaining batch; it covers the offsets [base_offset, next_offset)."""

    data: Buffer
    base_offset: int
    next_offset: int
    max_timestamp_ms: int


PLAIN_HEADERS, UNCHANGED_HEADER = 3, "tm.unchanged"
"""Header count and marker header of a captured table's records (capture/topics/record_writer.py)."""


class CompactedBatches(msgspec.Struct, frozen=True):
    batches: list[CleanedBatch]
    tombstones: int
    changed: bool


StoredBatch = tuple[BatchRef, Buffer]
"""Location of a batch, including the producers aborted in it, and its bytes."""


def collect_keys(batches: Sequence[StoredBatch], key_hash: KeyHash, keys: KeyMap, *, captured: bool = False) -> None:
    """Add the keys of batches, in order, to the map: of visible records with a key. `captured`: see Pass."""
    for group in _group_for_scan(_open_or_retain(ref, data) for ref, data in batches):
        readable = [each for each in group if isinstance(each, OpenedBatch)]
        for _, columns, _ in _scan_group(readable):
            if columns is None:
                continue
            keyed = columns.key_bytes >= 0
            some = columns.select(np.flatnonzero(keyed & ~_omits_columns(columns) if captured else keyed))
            keys.add(key_hash.hash_keys(some.body, some.key_at, some.key_bytes), some.offsets)
            if captured and not keyed.all():
                keys.emptied_at = int(columns.offsets[columns.key_bytes < 0][-1])


def _omits_columns(columns: RecordColumns) -> Mask:
    """Return which records omit columns.

    A reader takes these from the previous record of the key, so they supersede none.
    """
    out = np.zeros(len(columns), np.bool_)
    for at in np.flatnonzero(columns.header_counts > PLAIN_HEADERS).tolist():
        out[at] = any(name == UNCHANGED_HEADER for name, _ in columns.headers_of(at))
    return out


def compact_batches(batches: Sequence[StoredBatch], rules: PassRules) -> CompactedBatches:
    """Compact these batches, which are in order."""
    stays: list[CleanedBatch] = []
    tombstones = 0
    changed = False
    within = [each for each in batches if each[0].base_offset < rules.end]
    for group in _group_for_scan(_open_or_retain(ref, data, rules.markers_below) for ref, data in within):
        for each in group:
            if isinstance(each, CleanedBatch):
                stays.append(each)
            changed = changed or each is None
        for opened, columns, begins in _scan_group([each for each in group if isinstance(each, OpenedBatch)]):
            if columns is None:
                stays += [_unchanged_batch(each) for each in opened]
                continue
            keep = _retained(columns, rules)
            tombstones += int((keep & _is_tombstone(columns, rules) & (columns.offsets >= rules.tombstones_from)).sum())
            changed = changed or not keep.all()
            stays += _rebuild_batches(opened, columns, begins, keep)
    stays.sort(key=lambda batch: batch.base_offset)
    stays += [
        CleanedBatch(data, ref.base_offset, ref.base_offset + ref.record_count, ref.max_timestamp_ms)
        for ref, data in batches[len(within) :]
    ]
    return CompactedBatches(stays, tombstones, changed)


def _retained(columns: RecordColumns, rules: PassRules) -> Mask:
    hashes = rules.key_hash.hash_keys(columns.body, columns.key_at, columns.key_bytes)
    keyed = columns.key_bytes >= 0
    keep = (keyed & ~rules.keys.is_superseded(hashes, columns.offsets)) | (~keyed & rules.captured)
    keep &= columns.offsets >= rules.keys.emptied_at
    return keep & ~(_is_tombstone(columns, rules) & (columns.offsets < rules.tombstones_below))


def _is_tombstone(columns: RecordColumns, rules: PassRules) -> Mask:
    """Return which records are tombstones."""
    return (columns.value_bytes < 0) | ((columns.key_bytes < 0) & rules.captured)


def _open_or_retain(ref: BatchRef, data: Buffer, markers_below: int = 0) -> OpenedBatch | CleanedBatch | None:
    """Return Opened to be scanned, Batch to retain unchanged, or None to remove."""
    try:
        opened = open_batch(data, ref)
    except UnreadableBatchError:
        return CleanedBatch(data, ref.base_offset, ref.base_offset + ref.record_count, ref.max_timestamp_ms)
    if opened.header.attributes & CONTROL:
        ended = is_abort_marker(opened.body) and ref.base_offset < markers_below
        return None if ended or is_commit_marker(opened.body) else _unchanged_batch(opened)
    return opened if has_user_records(opened.header, ref) else None


def _unchanged_batch(opened: OpenedBatch) -> CleanedBatch:
    header = opened.header
    return CleanedBatch(opened.batch, header.base_offset, header.next_offset, header.max_timestamp_ms)


def _group_for_scan(
    batches: Iterator[OpenedBatch | CleanedBatch | None],
) -> Iterator[list[OpenedBatch | CleanedBatch | None]]:
    """Yield groups that are scanned together, which bounds the decompressed bytes."""
    group: list[OpenedBatch | CleanedBatch | None] = []
    records = size_bytes = 0
    for each in batches:
        group.append(each)
        if isinstance(each, OpenedBatch):
            records += each.header.record_count
            size_bytes += len(each.body)
        if records >= CHUNK_RECORDS or size_bytes >= GROUP_BYTES:
            yield group
            group, records, size_bytes = [], 0, 0
    if group:
        yield group


def _scan_group(group: list[OpenedBatch]) -> Iterator[tuple[list[OpenedBatch], RecordColumns | None, Int64s]]:
    """Yield batches with their records and the records' first bytes; an unreadable batch comes without columns."""
    rest = [group] if group else []
    while rest:
        some = rest.pop()
        found = scan_opened(some)
        if found is not None:
            yield some, *found
        elif len(some) > 1:
            rest += [some[len(some) // 2 :], some[: len(some) // 2]]
        else:
            yield some, None, np.zeros(0, np.int64)


def _rebuild_batches(
    opened: Sequence[OpenedBatch], columns: RecordColumns, begins: Int64s, keep: Mask
) -> Iterator[CleanedBatch]:
    first = 0
    for each in opened:
        end = first + each.header.record_count
        kept = keep[first:end]
        if kept.all():
            yield _unchanged_batch(each)
        elif kept.any():
            edges = np.flatnonzero(np.diff(kept, prepend=False, append=False)) + first
            runs = zip(begins[edges[0::2]].tolist(), begins[edges[1::2]].tolist(), strict=True)
            body = b"".join([columns.body[start:stop] for start, stop in runs])
            yield _rebuild_batch(each, body, int(kept.sum()), int(columns.timestamps_ms[first:end][kept].max()))
        first = end


def _rebuild_batch(opened: OpenedBatch, body: bytes, count: int, max_timestamp_ms: int) -> CleanedBatch:
    header = opened.header
    if header.attributes & APPEND_TIME:
        max_timestamp_ms = header.max_timestamp_ms
    payload = compress(header.codec, body)
    out = bytearray(HEADER_BYTES)
    out += payload
    length = len(out) - LENGTH_FIELD_END
    fields = (
        header.attributes, header.last_offset_delta, header.base_timestamp_ms, max_timestamp_ms,
        header.producer_id, header.producer_epoch, header.base_sequence, count,
    )  # fmt: skip
    HEADER.pack_into(out, 0, header.base_offset, length, header.leader_epoch, header.magic, 0, *fields)
    crc = crc32c.crc32c(memoryview(out)[CRC_START:])
    HEADER.pack_into(out, 0, header.base_offset, length, header.leader_epoch, header.magic, crc, *fields)
    return CleanedBatch(bytes(out), header.base_offset, header.next_offset, max_timestamp_ms)
