"""Interface of the database for its background work, to avoid cyclic dependencies; its statistics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec

from tidemill.base.clock import Clock, Rand
from tidemill.metastore.lsm.file_store import SstFiles
from tidemill.metastore.lsm.lifecycle import Lifecycle
from tidemill.metastore.lsm.memtable import Memtable
from tidemill.metastore.lsm.options import Options
from tidemill.metastore.lsm.table_cache import TableCache
from tidemill.metastore.lsm.version import Edit, Version
from tidemill.metastore.lsm.version_set import VersionSet


class Notifier:
    """Notification of several listeners. None misses one between checking the state and waiting.

    Counter of notifications: read `rings`, check the state, then wait until the count is exceeded."""

    def __init__(self) -> None:
        self.rings = 0
        self._event = asyncio.Event()

    def ring(self) -> None:
        self.rings += 1
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait_after(self, seen: int) -> int:
        """Wait until `rings` is above `seen` and return it; return immediately if it already is."""
        while self.rings <= seen:
            await self._event.wait()
        return self.rings


class DatabaseProtocol(Protocol):
    """Part of `Database` that it uses. It changes the database only through these methods, `memtable` and
    `versions`."""

    domain_uuid: str
    epoch: int
    options: Options
    clock: Clock
    rand: Rand
    files: SstFiles
    tables: TableCache
    memtable: Memtable
    versions: VersionSet
    wake: Notifier
    lifecycle: Lifecycle
    max_applied_seqno: int

    @property
    def max_persisted_seqno(self) -> int: ...
    @property
    def version(self) -> Version: ...
    async def flush(self, timeout_s: float | None = None) -> int: ...
    async def commit_edit(self, edit: Edit, installed: Callable[[], None] | None = None) -> None: ...


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
