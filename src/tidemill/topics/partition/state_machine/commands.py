"""Commands of a partition's log.

Wire tags and field order are append-only. Commands carry their times, set by the proposer.
"""

from __future__ import annotations

import msgspec


class Placeholder(msgspec.Struct, frozen=True, array_like=True):
    """Location and metadata of one record batch; `object_index` is an index into the command's `objects`."""

    object_index: int
    first_byte: int
    size_bytes: int
    base_offset: int
    record_count: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    max_timestamp_ms: int
    kind: int = 0
    """PLAIN, TRANSACTIONAL, COMMIT or ABORT of `transactions`."""


class PlaceBatches(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Append batches, in order, all or none."""

    at_ms: int
    objects: tuple[str, ...]
    placeholders: tuple[Placeholder, ...]


class Advance(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Advance the offsets of the log; none of them ever decreases.

    The log starts at `log_start`. Everything that `writer` numbered below `below` is decided: its batches for this
    partition are in the log before this record, or never will be. Offsets below `reconciled` are in L1. Compaction has
    removed every record of transactions that were aborted wholly below `aborted_start`.
    """

    at_ms: int
    log_start: int
    writer: str
    below: int
    reconciled: int = 0
    aborted_start: int = 0


class Rollup(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Refer to the whole state as of this record's position, so that earlier records may be truncated.

    The state is the object's, plus the commands in `tail`: those placed, in this record's term, while the object was
    being written.
    """

    object_key: str
    size_bytes: int
    tail: tuple[PlaceBatches | Advance, ...] = ()


Command = PlaceBatches | Rollup | Advance
