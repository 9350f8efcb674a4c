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
from tidemill.topics.batch.columns import Columns, Int64s
from tidemill.topics.batch.compression import compress
from tidemill.topics.batch.control_batch import aborts, commits
from tidemill.topics.batch.decode import GROUP_BYTES, Opened, has_records, open_batch, scan_opened
from tidemill.topics.batch.header import APPEND_TIME, CONTROL, CRC_START, HEADER, HEADER_BYTES, LENGTH_FIELD_END
from tidemill.topics.compaction.hashes import KeyHash
from tidemill.topics.compaction.keymap import KeyMap

Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]


class Pass(msgspec.Struct, frozen=True):
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


class Batch(msgspec.Struct, frozen=True):
    """A remaining batch; it covers the offsets [base_offset, next_offset)."""

    data: Buffer
    base_offset: int
    next_offset: int
    max_timestamp_ms: int


PLAIN_HEADERS, UNCHANGED_HEADER = 3, "tm.unchanged"
"""Header count and marker header of a captured table's records (capture/topics/topic_writer.py)."""


class Cleaned(msgspec.Struct, frozen=True):
    batches: list[Batch]
    tombstones: int
    changed: bool


Stored = tuple[BatchRef, Buffer]
"""Location of a batch, including the producers aborted in it, and its bytes."""


def take_keys(batches: Sequence[Stored], key_hash: KeyHash, keys: KeyMap, *, captured: bool = False) -> None:
    """Add the keys of batches, in order, to the map: of visible records with a key. `captured`: see Pass."""
    for group in _groups(_opened(ref, data) for ref, data in batches):
        readable = [each for each in group if isinstance(each, Opened)]
        for _, columns, _ in _scanned(readable):
            if columns is None:
                continue
            keyed = columns.key_bytes >= 0
            some = columns.take(np.flatnonzero(keyed & ~_leaving(columns) if captured else keyed))
            keys.add(key_hash.of(some.body, some.key_at, some.key_bytes), some.offsets)
            if captured and not keyed.all():
                keys.emptied_at = int(columns.offsets[columns.key_bytes < 0][-1])


def _leaving(columns: Columns) -> Mask:
    """Return which records omit columns.

    A reader takes these from the previous record of the key, so they supersede none.
    """
    out = np.zeros(len(columns), np.bool_)
    for at in np.flatnonzero(columns.header_counts > PLAIN_HEADERS).tolist():
        out[at] = any(name == UNCHANGED_HEADER for name, _ in columns.headers_of(at))
    return out


def clean(batches: Sequence[Stored], rules: Pass) -> Cleaned:
    """Compact these batches, which are in order."""
    stays: list[Batch] = []
    tombstones = 0
    changed = False
    within = [each for each in batches if each[0].base_offset < rules.end]
    for group in _groups(_opened(ref, data, rules.markers_below) for ref, data in within):
        for each in group:
            if isinstance(each, Batch):
                stays.append(each)
            changed = changed or each is None
        for opened, columns, begins in _scanned([each for each in group if isinstance(each, Opened)]):
            if columns is None:
                stays += [_as_it_is(each) for each in opened]
                continue
            keep = _kept(columns, rules)
            tombstones += int((keep & _deletes(columns, rules) & (columns.offsets >= rules.tombstones_from)).sum())
            changed = changed or not keep.all()
            stays += _rewritten(opened, columns, begins, keep)
    stays.sort(key=lambda batch: batch.base_offset)
    stays += [
        Batch(data, ref.base_offset, ref.base_offset + ref.record_count, ref.max_timestamp_ms)
        for ref, data in batches[len(within) :]
    ]
    return Cleaned(stays, tombstones, changed)


def _kept(columns: Columns, rules: Pass) -> Mask:
    hashes = rules.key_hash.of(columns.body, columns.key_at, columns.key_bytes)
    keyed = columns.key_bytes >= 0
    keep = (keyed & ~rules.keys.superseded(hashes, columns.offsets)) | (~keyed & rules.captured)
    keep &= columns.offsets >= rules.keys.emptied_at
    return keep & ~(_deletes(columns, rules) & (columns.offsets < rules.tombstones_below))


def _deletes(columns: Columns, rules: Pass) -> Mask:
    """Return which records are tombstones."""
    return (columns.value_bytes < 0) | ((columns.key_bytes < 0) & rules.captured)


def _opened(ref: BatchRef, data: Buffer, markers_below: int = 0) -> Opened | Batch | None:
    """Return Opened to be scanned, Batch to retain unchanged, or None to remove."""
    try:
        opened = open_batch(data, ref)
    except UnreadableBatchError:
        return Batch(data, ref.base_offset, ref.base_offset + ref.record_count, ref.max_timestamp_ms)
    if opened.header.attributes & CONTROL:
        ended = aborts(opened.body) and ref.base_offset < markers_below
        return None if ended or commits(opened.body) else _as_it_is(opened)
    return opened if has_records(opened.header, ref) else None


def _as_it_is(opened: Opened) -> Batch:
    header = opened.header
    return Batch(opened.batch, header.base_offset, header.next_offset, header.max_timestamp_ms)


def _groups(batches: Iterator[Opened | Batch | None]) -> Iterator[list[Opened | Batch | None]]:
    """Yield groups that are scanned together, which bounds the decompressed bytes."""
    group: list[Opened | Batch | None] = []
    records = size_bytes = 0
    for each in batches:
        group.append(each)
        if isinstance(each, Opened):
            records += each.header.record_count
            size_bytes += len(each.body)
        if records >= CHUNK_RECORDS or size_bytes >= GROUP_BYTES:
            yield group
            group, records, size_bytes = [], 0, 0
    if group:
        yield group


def _scanned(group: list[Opened]) -> Iterator[tuple[list[Opened], Columns | None, Int64s]]:
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


def _rewritten(opened: Sequence[Opened], columns: Columns, begins: Int64s, keep: Mask) -> Iterator[Batch]:
    first = 0
    for each in opened:
        end = first + each.header.record_count
        kept = keep[first:end]
        if kept.all():
            yield _as_it_is(each)
        elif kept.any():
            edges = np.flatnonzero(np.diff(kept, prepend=False, append=False)) + first
            runs = zip(begins[edges[0::2]].tolist(), begins[edges[1::2]].tolist(), strict=True)
            body = b"".join([columns.body[start:stop] for start, stop in runs])
            yield _batch(each, body, int(kept.sum()), int(columns.timestamps_ms[first:end][kept].max()))
        first = end


def _batch(opened: Opened, body: bytes, count: int, max_timestamp_ms: int) -> Batch:
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
    return Batch(bytes(out), header.base_offset, header.next_offset, max_timestamp_ms)
