"""Shards: the state of each without its batches, one row per batch, and the bindings of sources.

    shard      40 | name text
               shard_id, since, upper, version, log_position, closed, header bytes
    batch      41 | name text | lower u64
               upper, batch bytes, objects array of keys
    binding    42 | source text | time_ms u64
               log_position, binding bytes

`header`, `batch` and `binding` belong to `shards`, the only reader (shards/state/codec, shards/bindings/remap):

    header     a rollup with an empty list of batches: schema, holds, writers
    batch      one batch with its parts, including inline ones
    binding    a time and the offsets that it covers

`objects` repeats the keys of the batch's parts, so that a checker does not need the codec of `shards`.
"""

from __future__ import annotations

import msgspec

from tidemill.metastore.rows.key_encoding import Column, Kind
from tidemill.metastore.rows.row_family import Family


class ShardRow(msgspec.Struct, frozen=True):
    """State of a shard without its batches. `log_position`: next position of the shard's fenced log as of this row."""

    name: str
    shard_id: str
    since: int
    upper: int
    version: int = 0
    log_position: int = 0
    closed: bool = False
    header: bytes = b""


class ShardBatchRow(msgspec.Struct, frozen=True):
    """Updates with lower ≤ time < upper. Batches of a shard are contiguous, so `lower` identifies one."""

    name: str
    lower: int
    upper: int
    batch: bytes
    objects: tuple[str, ...] = ()


SHARDS = Family(0x40, "shard", ShardRow, Column("name", Kind.TEXT))
SHARD_BATCHES = Family(0x41, "shard batch", ShardBatchRow, Column("name", Kind.TEXT), Column("lower", Kind.U64))


class BindingRow(msgspec.Struct, frozen=True):
    """One binding. `source` as the remap shard is named; `log_position`: position of the binding in its log."""

    source: str
    time_ms: int
    log_position: int
    binding: bytes


BINDINGS = Family(0x42, "binding", BindingRow, Column("source", Kind.TEXT), Column("time_ms", Kind.U64))
