"""What a database tells of itself, for `status` and benchmarks."""

from __future__ import annotations

import msgspec


class LevelStats(msgspec.Struct, frozen=True):
    files: int
    rows: int
    size_bytes: int


class Stats(msgspec.Struct, frozen=True):
    """Sizes are of this moment, totals since the database was opened.

    memtable_bytes         rows in memory with their overhead; frozen ones too
    pins                   open snapshots and scans
    flushed_bytes          of files made by flushes; merged_bytes of those made by merges
    write_amplification    both together over flushed_bytes; 0 before the first flush
    object_reads           ranged reads of files; read_bytes their bytes
    slowed, stopped        batches that waited a little, or for room; waited_s their time together
    flush_error, merge_error, collection_error   "" when the last attempt succeeded
    """

    levels: tuple[LevelStats, ...]
    memtable_rows: int
    memtable_bytes: int
    layers: int
    pins: int
    max_applied_seqno: int
    max_persisted_seqno: int
    flushes: int
    flushed_bytes: int
    merges: int
    merged_rows: int
    merged_bytes: int
    write_amplification: float
    cache_bytes: int
    cache_dropped: int
    object_reads: int
    read_bytes: int
    slowed: int
    stopped: int
    waited_s: float
    flush_error: str
    merge_error: str
    collection_error: str
