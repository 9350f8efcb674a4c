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


class PlaceBatches(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Append batches, in order. All or none."""

    at_ms: int
    objects: tuple[str, ...]
    placeholders: tuple[Placeholder, ...]


class Rollup(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The whole state as of this record's position lies in an object; records before it may be forgotten."""

    object_key: str
    size_bytes: int


Command = PlaceBatches | Rollup
