"""Commands of a partition's log. Wire tags and field order are append-only; times ride inside, set by the proposer."""

from __future__ import annotations

import msgspec


class Placeholder(msgspec.Struct, frozen=True, array_like=True):
    """Where one record batch lies and what it holds; `object_index` points into the command's `objects`."""

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
    """Append batches, in order. All or none."""

    at_ms: int
    objects: tuple[str, ...]
    placeholders: tuple[Placeholder, ...]


class Advance(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The log starts at `log_start` (never back), and what `writer` numbered below `below` is decided: its batches for
    this partition are in the log before this record, or never will be. What lies below `reconciled` (never back) is in
    L1; of transactions that were aborted wholly below `aborted_start` (never back) compaction has taken everything."""

    at_ms: int
    log_start: int
    writer: str
    below: int
    reconciled: int = 0
    aborted_start: int = 0


class Rollup(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The whole state as of this record's position: in an object, and the commands that were placed, in this record's
    term, while that was written. Records before this one may be forgotten."""

    object_key: str
    size_bytes: int
    tail: tuple[PlaceBatches | Advance, ...] = ()


Command = PlaceBatches | Rollup | Advance
