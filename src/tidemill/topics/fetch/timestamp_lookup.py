"""Find the first record at or after a time in a batch, which is decoded once and searched by columns.

Runs in a thread (`validator_pool`): a batch may hold millions of records.
"""

from __future__ import annotations

import numpy as np

from tidemill.base.errors import TidemillError
from tidemill.objects.store import Buffer
from tidemill.topics.api import BatchRef
from tidemill.topics.batch.columnar_scan import CHUNK_RECORDS, scan_any_deltas
from tidemill.topics.batch.compression import decompress
from tidemill.topics.batch.header import APPEND_TIME, HEADER_BYTES, parse_header


def first_offset_at(batch: Buffer, ref: BatchRef, timestamp_ms: int, start: int = 0) -> tuple[int, int] | None:
    """Return (offset, timestamp) of the first record at or after both `timestamp_ms` and the offset `start`.

    Returns None if only records below `start` have such a time. For a batch that cannot be read, or whose header
    promises a later time than its records have (stored before that was checked), returns its first offset: never one
    after the requested record.
    """
    beginning = (max(ref.base_offset, start), ref.max_timestamp_ms)
    try:
        header = parse_header(batch)
        if header.attributes & APPEND_TIME:
            return beginning[0], header.max_timestamp_ms
        data = decompress(header.codec, memoryview(batch)[HEADER_BYTES : header.size_bytes])
    except TidemillError:
        return beginning
    wanted = max(-(2**63), min(timestamp_ms - header.base_timestamp_ms, 2**63 - 1))
    at = done = 0
    while done < header.record_count:
        found = scan_any_deltas(data, at, min(CHUNK_RECORDS, header.record_count - done))
        if found is None:
            return beginning
        late = np.flatnonzero((found.time_deltas >= wanted) & (found.offset_deltas >= max(0, start - ref.base_offset)))
        if len(late):
            index = int(late[0])
            return ref.base_offset + int(found.offset_deltas[index]), header.base_timestamp_ms + int(
                found.time_deltas[index]
            )
        at = found.end
        done += len(found.time_deltas)
    return beginning if start <= ref.base_offset else None
