"""One stretch of batches, cleaned: which records stay, and the batches that hold them. Pure, by columns.

CL1  A record goes when a newer one of its key is in the map, when it has no key, or when it is a tombstone below
     `tombstones_below`. From `end` on nothing is touched. In a captured table's topic a record without a key is the
     tombstone of every key before it: what is older goes, and it goes as a tombstone does.
CL2  A batch keeps its first and last offset, its producer, epoch and sequence, and its codec; its records keep their
     bytes. One without records any more goes whole: what is known of producers is in the partition's state.
CL3  A batch of an aborted transaction has no records for anybody, and goes; so does the marker of a commit, which
     nobody asks for. The marker of an abort stays as long as fetches may name the transaction, for a client ends it
     there: until it lies below `markers_below`.
CL4  What cannot be read stays as it is.
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
    """What is known of a partition's keys below `end`, and which tombstones may go: those below `tombstones_below`.
    `tombstones_from`: those that stay are counted from there on. `captured`: the topic is a captured table's. No fetch
    names, and none will, what was aborted wholly below `markers_below`."""

    keys: KeyMap
    key_hash: KeyHash
    end: int
    tombstones_below: int
    tombstones_from: int
    captured: bool = False
    markers_below: int = 0


class Batch(msgspec.Struct, frozen=True):
    """A batch as it stays; it covers the offsets [base_offset, next_offset)."""

    data: Buffer
    base_offset: int
    next_offset: int
    max_timestamp_ms: int


PLAIN_HEADERS, UNCHANGED_HEADER = 3, "tm.unchanged"
"""Of a captured table's records (capture/topics/topic_writer.py)."""


class Cleaned(msgspec.Struct, frozen=True):
    batches: list[Batch]
    tombstones: int
    changed: bool


Stored = tuple[BatchRef, Buffer]
"""Where a batch lies, with the producers whose batch here is an aborted one, and its bytes."""


def take_keys(batches: Sequence[Stored], key_hash: KeyHash, keys: KeyMap, *, captured: bool = False) -> None:
    """Into the map, from batches in order: what has records for anybody, and a key. `captured`: see Pass."""
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
    """Records that leave columns out, which a reader has from the record before of their key: they supersede none."""
    out = np.zeros(len(columns), np.bool_)
    for at in np.flatnonzero(columns.header_counts > PLAIN_HEADERS).tolist():
        out[at] = any(name == UNCHANGED_HEADER for name, _ in columns.headers_of(at))
    return out


def clean(batches: Sequence[Stored], rules: Pass) -> Cleaned:
    """What stays of these batches, which are in order."""
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
    """Which records are tombstones."""
    return (columns.value_bytes < 0) | ((columns.key_bytes < 0) & rules.captured)


def _opened(ref: BatchRef, data: Buffer, markers_below: int = 0) -> Opened | Batch | None:
    """To be looked into; to stay as it is; to go."""
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
    """Stretches that are looked at together: what is held decompressed is bounded."""
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
    """Batches with their records and where those begin; without columns one whose records cannot be read."""
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
