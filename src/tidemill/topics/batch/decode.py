"""Decode record batches for internal consumers (Spark executors, tools) as columns, without an object per record.

    batches ─► header, checksum, decompressed bytes, each ─► all bytes joined ─► scanned together (columnar_scan.py) ─►
    Columns
                                                                  └─ any deviation: batch by batch, record by record

Many small batches cost as much as one large one. A batch whose deltas have gaps is from a compacted topic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import crc32c
import msgspec
import numpy as np

from tidemill.objects.store import Buffer
from tidemill.topics.api import BatchRef, CorruptBatchError, UnreadableBatchError
from tidemill.topics.batch.columnar_scan import CHUNK_RECORDS, RECORD_BYTES_MIN, scan_any_deltas, scan_with_deltas
from tidemill.topics.batch.compression import decompress
from tidemill.topics.batch.header import (
    APPEND_TIME,
    CONTROL,
    CRC_START,
    HEADER_BYTES,
    TRANSACTIONAL,
    BatchHeader,
    parse_header,
)
from tidemill.topics.batch.records import Int64s, Record, RecordColumns, build_columns, empty_columns
from tidemill.topics.batch.varint import read_varint

GROUP_BYTES = 8 << 20
"""Approximate limit of decompressed bytes that are scanned together; the other limit is CHUNK_RECORDS records."""

_INT64 = 2**63


class DecodedBatch(msgspec.Struct, frozen=True):
    header: BatchHeader
    records: list[Record]


class OpenedBatch(msgspec.Struct, frozen=True):
    """A decompressed batch whose header and checksum are correct."""

    batch: Buffer
    header: BatchHeader
    body: Buffer


def decode_batch(buffer: Buffer, *, check_crc: bool = True, ref: BatchRef | None = None) -> DecodedBatch:
    """Decode header and records, with absolute offsets. Raises UnreadableBatchError."""
    header, columns = decode_columns(buffer, check_crc=check_crc, ref=ref)
    times, offsets = columns.timestamps_ms.tolist(), columns.offsets.tolist()
    rows = zip(columns.keys, columns.values, columns.headers, times, offsets, strict=True)
    return DecodedBatch(header, [Record(*row) for row in rows])


def decode_columns(
    buffer: Buffer, *, check_crc: bool = True, ref: BatchRef | None = None
) -> tuple[BatchHeader, RecordColumns]:
    """Decode header and records as columns, with absolute and strictly ascending offsets.

    Raises only UnreadableBatchError.

    `ref`, if the reader has one: the offsets that the partition's log gave this batch. The bytes must agree, and an
    error names that range however damaged they are. With append time set, every timestamp is the batch's max timestamp,
    as Kafka's clients read it.
    """
    opened = open_batch(buffer, ref, check_crc=check_crc)
    columns = _decode_group([opened])
    return opened.header, _decode_single(opened) if columns is None else columns


def open_batch(buffer: Buffer, ref: BatchRef | None = None, *, check_crc: bool = True) -> OpenedBatch:
    """Check and decompress a batch. Raises only UnreadableBatchError."""
    first, last = (ref.base_offset, ref.base_offset + ref.record_count - 1) if ref is not None else (-1, -1)
    try:
        header = parse_header(buffer)
        if ref is None:
            first, last = header.base_offset, header.base_offset + max(header.last_offset_delta, 0)
        if header.magic != 2 or not HEADER_BYTES <= header.size_bytes <= len(buffer):
            raise CorruptBatchError(f"not a record batch v2: magic={header.magic} batch_bytes={header.size_bytes}.")
        if (header.base_offset, header.base_offset + header.last_offset_delta) != (first, last):
            raise CorruptBatchError(
                f"the header has other offsets: header={header.base_offset}+{header.last_offset_delta}."
            )
        view = memoryview(buffer)[: header.size_bytes]
        if check_crc and crc32c.crc32c(view[CRC_START:]) != header.crc:
            raise CorruptBatchError("record batch checksum mismatch.")
        return OpenedBatch(buffer, header, decompress(header.codec, view[HEADER_BYTES:]))
    except Exception as error:
        reason = _error_reason(error)
    # Any damage of the bytes loses these offsets. Raised here, so that the error holds no frame with the decoded data.
    raise UnreadableBatchError(reason, base_offset=first, last_offset=last)


def has_user_records(header: BatchHeader, ref: BatchRef | None = None) -> bool:
    """Return whether the batch has records for users: markers and batches of aborted transactions have none.

    Below the last stable offset, and with a ref that was planned there, the answer is final.
    """
    if header.attributes & CONTROL:
        return False
    return ref is None or not header.attributes & TRANSACTIONAL or header.producer_id not in ref.aborted


def decode_opened(batches: Iterable[OpenedBatch]) -> Iterator[RecordColumns | tuple[OpenedBatch, UnreadableBatchError]]:
    """Decode many batches in order, a group at a time; yield an unreadable batch with its error.

    Takes no more from `batches` than the next group needs.
    """
    for group in _group_batches(batches):
        rest = [group]
        while rest:
            some = rest.pop()
            columns = _decode_group(some)
            if columns is not None:
                yield columns
            elif len(some) > 1:
                rest += [some[len(some) // 2 :], some[: len(some) // 2]]
            else:
                try:
                    yield _decode_single(some[0])
                except UnreadableBatchError as bad:
                    yield some[0], bad


def _group_batches(batches: Iterable[OpenedBatch]) -> Iterator[list[OpenedBatch]]:
    group: list[OpenedBatch] = []
    records = size_bytes = 0
    for opened in batches:
        group.append(opened)
        records += opened.header.record_count
        size_bytes += len(opened.body)
        if records >= CHUNK_RECORDS or size_bytes >= GROUP_BYTES:
            yield group
            group, records, size_bytes = [], 0, 0
    if group:
        yield group


def _decode_group(group: Sequence[OpenedBatch]) -> RecordColumns | None:
    """Decode all batches in one scan, or return None if one of them is not in the common form."""
    found = scan_opened(group)
    return found[0] if found is not None else None


def scan_opened(group: Sequence[OpenedBatch]) -> tuple[RecordColumns, Int64s] | None:
    """Scan the records of all batches in one pass.

    Returns the columns, and the first byte of each record in their body followed by the end of the last one. Returns
    None if a batch is damaged or not in the common form.
    """
    headers = [opened.header for opened in group]
    if any(not 0 < h.record_count <= h.last_offset_delta + 1 for h in headers):
        return None
    if any(h.record_count * RECORD_BYTES_MIN > len(opened.body) for h, opened in zip(headers, group, strict=True)):
        return None
    body = b"".join([opened.body for opened in group])
    counts = np.array([h.record_count for h in headers], dtype=np.int64)
    lasts = np.array([h.last_offset_delta for h in headers], dtype=np.int64)
    ends = np.cumsum(counts)
    count, whole = int(ends[-1]), bool((counts == lasts + 1).all())
    places = np.arange(count) - np.repeat(ends - counts, counts)
    parts, starts, at = [], [], 0
    for first in range(0, count, CHUNK_RECORDS):
        some = places[first : first + CHUNK_RECORDS]
        found = scan_with_deltas(body, at, some) if whole else scan_any_deltas(body, at, len(some))
        if found is None:
            return None
        at = found.end
        starts.append(found.starts[:-1])
        parts.append(found)
    begins = np.concatenate([*starts, [at]])
    # A record that ends beyond its batch has hopped into the next one, where no record ends at the batch's boundary.
    if (begins[ends] != np.cumsum([len(opened.body) for opened in group])).any():
        return None
    if not whole:
        first_ones = places == 0
        places = np.concatenate([part.offset_deltas for part in parts])
        ascend = (np.diff(places, prepend=-1) > 0) | first_ones
        if (places < 0).any() or (places > np.repeat(lasts, counts)).any() or not ascend.all():
            return None
    deltas = np.concatenate([part.time_deltas for part in parts])
    bases = np.repeat(np.array([h.base_timestamp_ms for h in headers], dtype=np.int64), counts)
    times = bases + deltas
    if (((bases ^ times) & (deltas ^ times)) < 0).any():
        return None  # More than 64 bits.
    for h, end in zip(headers, ends.tolist(), strict=True):
        if h.attributes & APPEND_TIME:
            times[end - h.record_count : end] = h.max_timestamp_ms
    offsets = np.repeat(np.array([h.base_offset for h in headers], dtype=np.int64), counts) + places
    fields: list[Int64s] = [
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("key_at", "key_bytes", "value_at", "value_bytes", "headers_at", "header_counts")
    ]
    return RecordColumns(body, offsets, times, *fields), begins


def _decode_single(opened: OpenedBatch) -> RecordColumns:
    """Decode one batch, record by record. Raises UnreadableBatchError."""
    header = opened.header
    first, last = header.base_offset, header.base_offset + max(header.last_offset_delta, 0)
    try:
        columns = _decode_by_record(bytes(opened.body), header)
        offsets = columns.offsets
        if len(offsets) and (offsets[0] < first or offsets[-1] > last or (np.diff(offsets) <= 0).any()):
            raise CorruptBatchError(f"offsets do not ascend within the batch: first={offsets[0]} last={offsets[-1]}.")
        return columns
    except Exception as error:
        reason = _error_reason(error)
    raise UnreadableBatchError(reason, base_offset=first, last_offset=last)


def _decode_by_record(data: bytes, header: BatchHeader) -> RecordColumns:
    base_offset, base_ms = header.base_offset, header.base_timestamp_ms
    fixed_ms = header.max_timestamp_ms if header.attributes & APPEND_TIME else None
    rows: list[tuple[int, ...]] = []
    at = 0
    for _ in range(header.record_count):
        length, at = read_varint(data, at)
        end = at + length
        if length < 0 or end > len(data):
            raise IndexError("a record ends beyond the batch")
        delta_ms, at = read_varint(data, at + 1)
        delta, at = read_varint(data, at)
        key_at, key_bytes, at = _read_field(data, at)
        value_at, value_bytes, at = _read_field(data, at)
        count, headers_at = read_varint(data, at)
        at = _skip_headers(data, headers_at, count)
        if at != end:
            raise IndexError("a record's length and content disagree")
        time_ms = base_ms + delta_ms if fixed_ms is None else fixed_ms
        if not -_INT64 <= time_ms < _INT64:
            raise CorruptBatchError("a timestamp has more than 64 bits.")
        rows.append((base_offset + delta, time_ms, key_at, key_bytes, value_at, value_bytes, headers_at, count))
    if at != len(data):
        raise IndexError("bytes after the last record")
    return build_columns(data, list(zip(*rows, strict=True))) if rows else empty_columns()


def _read_field(data: bytes, at: int) -> tuple[int, int, int]:
    """Return (position, size or −1 for null, next position) of a field."""
    length, at = read_varint(data, at)
    if length < 0:
        return at, -1, at
    if at + length > len(data):
        raise IndexError("a field ends beyond the batch")
    return at, length, at + length


def _skip_headers(data: bytes, at: int, count: int) -> int:
    if count < 0:
        raise IndexError("negative header count")
    for _ in range(count):
        _, length, at = _read_field(data, at)
        if length < 0:
            raise IndexError("a header without a name")
        _, _, at = _read_field(data, at)
    return at


def _error_reason(error: Exception) -> str:
    return error.message.rstrip(".") if isinstance(error, CorruptBatchError) else f"{type(error).__name__}: {error}"
