"""Statistics of a database, for `status` and benchmarks."""

from __future__ import annotations

import msgspec


class LevelStats(msgspec.Struct, frozen=True):
    files: int
    rows: int
    size_bytes: int


class Stats(msgspec.Struct, frozen=True):
    """Statistics. Sizes are current, totals are since the database was opened.

    memtable_bytes         rows in memory with their overhead, including frozen ones
    pins                   open snapshots and scans
    flushed_bytes          size of files written by flushes; merged_bytes of those written by compactions
    write_amplification    sum of both over flushed_bytes; 0 before the first flush
    object_reads           ranged reads of files; read_bytes their bytes
    slowed, stopped        batches that were delayed, or waited for room; waited_s their total time
    flush_error, merge_error, collection_error   "" if the last attempt succeeded
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
