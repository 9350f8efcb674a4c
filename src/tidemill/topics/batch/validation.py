"""Check a whole produced batch before any of it is stored. Rejects what Kafka's log validator rejects.

    header   magic, size, counts, attributes, producer fields      always in the plain call     `check_header`
    body     CRC, decompression within DECOMPRESSED_BYTES,         in a thread when large       `check_body`
             every record's length, deltas 0 … n−1, fields that fill it exactly

Valid batches are checked without a Python object per record. Records of one layout are checked together
(`uniform_runs`). Of other records, many are checked by columns (`columnar_scan`), and few in one tight loop.
`_check_by_record` decides any batch that these do not accept.
"""

from __future__ import annotations

import crc32c
import numpy as np

from tidemill.objects.store import Buffer
from tidemill.topics.api import CorruptBatchError, InvalidRecordsError
from tidemill.topics.batch.columnar_scan import CHUNK_RECORDS, RECORD_BYTES_MIN, scan_any_deltas, scan_records
from tidemill.topics.batch.compression import decompress
from tidemill.topics.batch.header import (
    APPEND_TIME,
    CODEC_MASK,
    CONTROL,
    CRC_START,
    HEADER_BYTES,
    LAST_CODEC,
    TRANSACTIONAL,
    BatchHeader,
    parse_header,
)
from tidemill.topics.batch.uniform_runs import find_run
from tidemill.topics.batch.varint import VarintError, read_varint

_COLUMN_CHECK_RECORDS_MIN = 128
"""Minimum records for the check by columns, which costs some 60 µs even for few records."""

_RUN_CHECK_RECORDS_MIN = 24
"""Minimum records for the check by runs; fewer are checked in a loop faster than one table is built."""
_RUNS_MAX = 8
"""Limit of runs per batch: each one is searched among all remaining records."""

_COPY_BYTES = 64 << 10

_KEYLESS_REPORTED_MAX = 1_000
"""Limit of records without a key that a rejection lists."""

_INT64 = 2**63


def check_batch(buffer: Buffer) -> BatchHeader:
    """Check the one batch in `buffer` and return its header. Raises CorruptBatchError and its subclasses."""
    header = check_header(buffer)
    check_body(header, buffer)
    return header


def check_header(buffer: Buffer, *, in_transaction: bool = False) -> BatchHeader:
    """Check all that the 61 bytes of the header state.

    Raises CorruptBatchError (size), InvalidRecordsError (wrong magic, counts that disagree, a control batch, a
    transactional batch sent without a transaction or producer id, append time set by the producer, a producer id
    without epoch or sequence).
    """
    header = parse_header(buffer)
    if header.magic != 2:
        raise InvalidRecordsError(
            f"unsupported record format: magic={header.magic}.", fix="Use message format v2 (Kafka ≥ 0.11)."
        )
    if header.size_bytes != len(buffer):
        raise CorruptBatchError(
            f"not exactly one record batch: batch_bytes={header.size_bytes} sent_bytes={len(buffer)}."
        )
    count = header.record_count
    if count < 1 or header.last_offset_delta + 1 != count:
        raise InvalidRecordsError(
            f"record counts disagree: records={count} last_offset_delta={header.last_offset_delta}."
        )
    attributes = header.attributes
    if attributes & CODEC_MASK > LAST_CODEC:
        raise InvalidRecordsError(f"unknown compression codec: codec={attributes & CODEC_MASK}.")
    if attributes & (APPEND_TIME | CONTROL):
        raise InvalidRecordsError(f"append-time and control batches are not accepted: attributes={attributes:#06x}.")
    if attributes & TRANSACTIONAL and (not in_transaction or header.producer_id < 0):
        raise InvalidRecordsError(
            f"a transactional batch needs a transactional id and a producer id: producer_id={header.producer_id}.",
            fix="Initialise the producer with its transactional id.",
        )
    if header.producer_id >= 0:
        if header.producer_epoch < 0 or header.base_sequence < 0:
            raise InvalidRecordsError(
                f"a producer id needs epoch and sequence: producer_id={header.producer_id} "
                f"epoch={header.producer_epoch} sequence={header.base_sequence}."
            )
    elif header.producer_id != -1:
        raise InvalidRecordsError(f"negative producer id: producer_id={header.producer_id}.")
    return header


def check_body(header: BatchHeader, buffer: Buffer, *, keyed: bool = False) -> int:
    """Check the records and return their greatest timestamp in ms; the one in the header is only the client's claim.

    `keyed`: every record must have a key, as in a compacted topic.

    Raises CorruptBatchError (checksum), BatchTooLargeError, InvalidRecordsError with the first bad record. Plain work
    without waiting: 0.02 µs per record of one layout, otherwise 0.2 to 0.7, plus 0.03 ms per MiB and decompression.
    """
    return check_records(header, buffer, keyed=keyed)[0]


def check_records(header: BatchHeader, buffer: Buffer, *, keyed: bool = False) -> tuple[int, memoryview]:
    """Check the records as `check_body` does; return the greatest timestamp and the decompressed records."""
    view = memoryview(buffer)
    if crc32c.crc32c(view[CRC_START:]) != header.crc:
        raise CorruptBatchError(
            f"record batch checksum mismatch: stated={header.crc:#010x}.", fix="Send the batch again."
        )
    data = decompress(header.codec, view[HEADER_BYTES:])
    count = header.record_count
    if count * RECORD_BYTES_MIN > len(data):
        raise InvalidRecordsError(f"fewer bytes than records need: records={count} bytes={len(data)}.")
    highest = _check_all_records(data, header)
    if keyed:
        _check_keys(data, header)
    return highest, data


def _check_all_records(data: memoryview, header: BatchHeader) -> int:
    count = header.record_count
    highest = _check_by_runs(data, header) if count >= _RUN_CHECK_RECORDS_MIN else None
    if highest is not None:
        return highest
    if count >= _COLUMN_CHECK_RECORDS_MIN:
        highest = _check_by_columns(data, header)
    else:
        # Bytes are read faster than a view of them, but copying many would cost more.
        highest = _check_in_loop(bytes(data) if len(data) <= _COPY_BYTES else data, header)
    return _check_by_record(data, header) if highest is None else highest


def _check_keys(data: memoryview, header: BatchHeader) -> None:
    """Check the keys of an otherwise valid batch. Raises InvalidRecordsError with the records that have no key."""
    at = done = 0
    without: list[int] = []
    while done < header.record_count and len(without) < _KEYLESS_REPORTED_MAX:
        found = scan_any_deltas(data, at, min(CHUNK_RECORDS, header.record_count - done))
        if found is None:
            raise InvalidRecordsError(f"the keys of a compacted topic's records cannot be read: record={done}.")
        without += (done + np.flatnonzero(found.key_bytes < 0)).tolist()
        at = found.end
        done += len(found.key_bytes)
    if without:
        reason = "a record of a compacted topic needs a key"
        raise InvalidRecordsError(
            f"{reason}: record={without[0]}.",
            record_errors=tuple((index, reason) for index in without[:_KEYLESS_REPORTED_MAX]),
        )


def _check_by_runs(data: memoryview, header: BatchHeader) -> int | None:
    """Return the greatest timestamp, or None if the records are not a few runs, or are malformed."""
    at, done, count, highest = 0, 0, header.record_count, -_INT64
    base_ms = header.base_timestamp_ms
    there = bytes(data) if len(data) <= _COPY_BYTES else data
    for _ in range(_RUNS_MAX):
        found = find_run(there, at, done, count - done)
        if found is None or base_ms + found.low_ms < -_INT64 or base_ms + found.high_ms >= _INT64:
            return None
        highest = max(highest, base_ms + found.high_ms)
        at = found.end
        done += found.records
        if done == count:
            return highest if at == len(data) else None
    return None


def _check_by_columns(data: memoryview, header: BatchHeader) -> int | None:
    """Return the greatest timestamp, or None if a record is malformed."""
    at, done, count, highest = 0, 0, header.record_count, -_INT64
    base_ms = header.base_timestamp_ms
    while done < count:
        found = scan_records(data, at, done, min(CHUNK_RECORDS, count - done))
        if found is None:
            return None
        low, high = base_ms + int(found.time_deltas.min()), base_ms + int(found.time_deltas.max())
        if low < -_INT64 or high >= _INT64:
            return None
        highest = max(highest, high)
        at = found.end
        done += len(found.time_deltas)
    return highest if at == len(data) else None


def _check_in_loop(data: bytes | memoryview, header: BatchHeader) -> int | None:
    """Check few records in a loop; see `_check_by_columns`.

    Handles the sizes that nearly all records have, else returns None.
    """
    at, low, high = 0, 0, -_INT64
    try:
        for index in range(header.record_count):
            byte = data[at]
            if byte < 0x80:
                end = at + 1 + (byte >> 1)
                at += 2
            elif data[at + 1] < 0x80:
                end = at + 2 + ((byte & 0x7F | data[at + 1] << 7) >> 1)
                at += 3
            else:
                length, at = read_varint(data, at, 32)
                end = at + length
                at += 1
            if byte & 1:
                return None
            byte = data[at]
            if byte < 0x80:
                delta = (byte >> 1) ^ -(byte & 1)
                at += 1
            else:
                delta, at = read_varint(data, at)
            if delta > high:
                high = delta
            if delta < low:
                low = delta
            byte = data[at]
            at += 1
            if byte > 0x7F:
                byte = byte & 0x7F | data[at] << 7
                at += 1
            if byte != index << 1:
                return None
            for _ in _KEY_AND_VALUE:
                byte = data[at]
                if byte < 0x80:
                    if not byte & 1:
                        at += 1 + (byte >> 1)
                    elif byte == 1:
                        at += 1
                    else:
                        return None
                elif byte & 1:
                    return None
                elif data[at + 1] < 0x80:
                    at += 2 + ((byte & 0x7F | data[at + 1] << 7) >> 1)
                else:
                    size, at = read_varint(data, at, 32)
                    at += size
            headers = data[at]
            at += 1
            if headers:
                if headers & 1 or headers > 0x7F:
                    return None
                for _ in range(headers >> 1):
                    byte = data[at]
                    if byte & 1 or byte > 0x7F:
                        return None
                    at += 1 + (byte >> 1)
                    byte = data[at]
                    if byte == 1:
                        at += 1
                    elif byte & 1 or byte > 0x7F:
                        return None
                    else:
                        at += 1 + (byte >> 1)
            if at != end:
                return None
    except (IndexError, VarintError):
        return None
    base_ms = header.base_timestamp_ms
    whole = at == len(data) and base_ms + low >= -_INT64 and base_ms + high < _INT64
    return base_ms + high if whole else None


_KEY_AND_VALUE = (0, 1)


class _MalformedRecordError(ValueError):
    pass


def _check_by_record(data: memoryview, header: BatchHeader) -> int:
    """Check record by record, slowly and exactly. Return the greatest timestamp."""
    at, highest = 0, -_INT64
    index = 0
    try:
        for index in range(header.record_count):
            time_delta, at = _check_record(data, at, index)
            timestamp_ms = header.base_timestamp_ms + time_delta
            if not -_INT64 <= timestamp_ms < _INT64:
                raise _MalformedRecordError("the timestamp has more than 64 bits")
            highest = max(highest, timestamp_ms)
    except (ValueError, IndexError) as error:
        reason = str(error) if isinstance(error, ValueError) else "the record ends beyond the batch"
        raise InvalidRecordsError(
            f"a record is malformed: record={index} reason={reason}.", record_errors=((index, reason),)
        ) from None
    if at != len(data):
        raise InvalidRecordsError(f"bytes after the last record: records={header.record_count} bytes={len(data) - at}.")
    return highest


def _check_record(data: memoryview, at: int, index: int) -> tuple[int, int]:
    """Return (timestamp delta, start of the next record) of the record at `at`."""
    length, at = read_varint(data, at, 32)
    end = at + length
    if length < 0 or end > len(data):
        raise _MalformedRecordError(f"the length is out of bounds: length={length}")
    time_delta, at = read_varint(data, at + 1)
    offset_delta, at = read_varint(data, at, 32)
    if offset_delta != index:
        raise _MalformedRecordError(f"the offset delta is not the record's place: offset_delta={offset_delta}")
    for field in ("key", "value"):
        at = _skip_field(data, at, field, null=True)
    headers, at = read_varint(data, at, 32)
    if headers < 0 or headers > end - at:
        raise _MalformedRecordError(f"the header count is out of bounds: headers={headers}")
    for _ in range(headers):
        at = _skip_field(data, _skip_field(data, at, "header key", null=False), "header value", null=True)
    if at != end:
        raise _MalformedRecordError(f"length and content disagree: length={length} difference={end - at}")
    return time_delta, at


def _skip_field(data: memoryview, at: int, field: str, *, null: bool) -> int:
    size, at = read_varint(data, at, 32)
    if size < (-1 if null else 0) or at + size > len(data):
        raise _MalformedRecordError(f"the size of a field is out of bounds: field={field!r} size={size}")
    return at + max(size, 0)
