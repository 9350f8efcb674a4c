"""What a database tells of itself, for `status` and benchmarks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from tidemill.metastore.lsm.database import Database


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

    @classmethod
    def of(cls, database: Database) -> Stats:
        levels = tuple(
            LevelStats(len(level), sum(file.rows for file in level), sum(file.size_bytes for file in level))
            for level in database.version.levels
        )
        flusher, merging, room = database.flusher, database.compactor.stats, database.room_keeper
        tables = database.tables
        flushed = flusher.file_bytes
        return cls(
            levels=levels,
            memtable_rows=database.memtable.rows,
            memtable_bytes=database.memtable.size_bytes,
            layers=len(database.memtable.layers),
            pins=database.versions.pins,
            max_applied_seqno=database.max_applied_seqno,
            max_persisted_seqno=database.max_persisted_seqno,
            flushes=flusher.flushes,
            flushed_bytes=flushed,
            merges=merging.merges,
            merged_rows=merging.rows_written,
            merged_bytes=merging.bytes_written,
            write_amplification=(flushed + merging.bytes_written) / flushed if flushed else 0.0,
            cache_bytes=tables.cache.used_bytes,
            cache_dropped=tables.cache.dropped,
            object_reads=tables.reads,
            read_bytes=tables.read_bytes,
            slowed=room.slowed,
            stopped=room.stopped,
            waited_s=room.waited_s,
            flush_error=str(flusher.error or ""),
            merge_error=merging.failure,
            collection_error=str(database.collection_error or ""),
        )
