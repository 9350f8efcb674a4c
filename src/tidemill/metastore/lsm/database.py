"""The database: memory, files, and the view of both that its readers have.

    apply ──▶ memtable          moved to files by `background`
    get, scan, snapshot read a view: the memtable's layers, then the version's files

There is no write-ahead log: the caller must retain applied batches until `max_persisted_seqno` has passed them.

A database is opened in one of three modes (`lifecycle`). After UnknownOutcomeError or FencedError from a manifest
write, and after `aclose`, every call raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import ClosedError, InvalidError, TidemillError
from tidemill.base.runtime.tasks import Tasks
from tidemill.metastore.lsm.background import BackgroundWork
from tidemill.metastore.lsm.compaction.executor import CompactionExecutor
from tidemill.metastore.lsm.database_protocol import LevelStats, Notifier, Stats
from tidemill.metastore.lsm.file_store import SstFiles
from tidemill.metastore.lsm.lifecycle import Lifecycle, copy_of_error
from tidemill.metastore.lsm.manifest import Manifest
from tidemill.metastore.lsm.manifest_store import Manifests
from tidemill.metastore.lsm.memtable import Memtable, batch_bytes
from tidemill.metastore.lsm.options import Options
from tidemill.metastore.lsm.read_view import PENDING, ClosedView, Pending, Pin, Row, View
from tidemill.metastore.lsm.scan import Scan
from tidemill.metastore.lsm.snapshot import Snapshot
from tidemill.metastore.lsm.table_cache import BlockCache, TableCache
from tidemill.metastore.lsm.version import Edit, Version, prefix_end
from tidemill.metastore.lsm.version_set import VersionSet


@dataclass(frozen=True, kw_only=True)
class DatabaseContext:
    """Identity, mode and collaborators of one open database. At most one of `read_only` and `follower` is set."""

    domain_uuid: str
    epoch: int
    options: Options
    clock: Clock
    rand: Rand
    merger: CompactionExecutor | None = None
    """Executor of compactions, which the caller closes; None: the database runs them itself."""
    read_only: bool = False
    follower: bool = False
    background: bool = True
    """Start compaction and garbage collection. Tests run them by `compact` and `collect_garbage`."""


class ChangeStamps:
    """Stamps of the keys by their first byte. A stamp differs once a row whose key begins with the byte was written.

    Invariant (no missed change): a stamp is at least the seqno of the newest batch that has such a key. A batch whose
    keys are unknown here counts for every byte.
    """

    def __init__(self) -> None:
        self._life = object()
        """Part of every stamp: another open database has other stamps, even for equal seqnos."""
        self._seqnos: dict[bytes, int] = {}
        self._unseen_seqno = 0

    def record(self, seqno: int, keys: Sequence[bytes]) -> None:
        self._seqnos.update(dict.fromkeys([key[:1] for key in keys], seqno))

    def record_unseen(self, seqno: int) -> None:
        """Record batches up to `seqno` that a manifest contains, so that their keys are unknown."""
        self._unseen_seqno = seqno

    def stamp(self, first: bytes) -> tuple[object, int]:
        return self._life, max(self._seqnos.get(first, 0), self._unseen_seqno)


class Database:
    """One database, bound to one event loop. Created by `open`.

    Reads raise MissingError, CorruptError, InvalidError (a file of a newer format) and UnavailableError; after the
    database has ended ClosedError, UnknownOutcomeError or FencedError.
    """

    def __init__(
        self, files: SstFiles, manifests: Manifests, manifest: Manifest | None, context: DatabaseContext
    ) -> None:
        options, clock, rand = context.options, context.clock, context.rand
        self.files = files
        self.manifests = manifests
        self.domain_uuid = context.domain_uuid
        self.epoch = context.epoch
        self.options = options
        self.clock = clock
        self.rand = rand
        self.lifecycle = Lifecycle(context.domain_uuid, read_only=context.read_only, follower=context.follower)
        self._full_bytes = options.write_buffer_bytes
        self.wake = Notifier()
        """Rings when a version was installed, a flush is requested, a background task failed, or the database ended."""
        self.tables = TableCache(files, BlockCache(options.cache_bytes))
        self.memtable = Memtable()
        self.versions = VersionSet(
            manifests,
            self.tables,
            manifest,
            domain_uuid=context.domain_uuid,
            epoch=context.epoch,
            clock=clock,
            rand=rand,
        )
        self.max_applied_seqno = self.versions.current.last_seqno
        self._stamps = ChangeStamps()
        self._view = View((), self.versions, self.tables)
        self._commits = Tasks(lambda *_: None)  # each raises its error to its caller
        self._refreshing = asyncio.Lock()
        self.background = BackgroundWork(self, context.merger)

    @classmethod
    async def open(cls, files: SstFiles, manifests: Manifests, context: DatabaseContext) -> Database:
        """Open the newest manifest with an epoch of at most that of `context`; no file is read before this returns.

        Raises InvalidError if the manifest is another domain's, and what `manifest_store.read` raises.
        """
        manifest = await manifests.read(context.epoch)
        if manifest is not None and manifest.domain_uuid != context.domain_uuid:
            raise InvalidError(
                "the manifest belongs to another domain: "
                f"domain_uuid={context.domain_uuid} manifest_domain_uuid={manifest.domain_uuid}.",
                fix="Open it under its own uuid, or restore this domain from its own manifest.",
            )
        database = cls(files, manifests, manifest, context)
        if not database.lifecycle.read_only:
            database.background.start(removes_files=context.background)
        database.background.start_pre_open()
        return database

    # writing -----------------------------------------------------------------------------------------

    @property
    def max_persisted_seqno(self) -> int:
        """Seqno up to which every row is in files that a manifest names."""
        return self.versions.current.last_seqno

    def apply(self, seqno: int, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Make one batch visible, atomically. An empty value deletes its key. No I/O.

        Raises InvalidError, having changed nothing: for a seqno not above the last one, for a batch that `batch_bytes`
        rejects, and if the database is read-only. A follower skips batches that its manifest already contains.
        """
        if (seqno <= self.max_applied_seqno or not self.lifecycle.accepts_batches) and self._is_already_persisted(
            seqno
        ):
            return
        size_bytes = batch_bytes(keys, values)
        memtable = self.memtable
        was_full = memtable.live_bytes >= self._full_bytes
        if memtable.put(seqno, keys, values, size_bytes):
            self._renew_view()
        self.max_applied_seqno = seqno
        self._stamps.record(seqno, keys)
        if not was_full and memtable.live_bytes >= self._full_bytes and not self.lifecycle.read_only:
            self.wake.ring()

    def _is_already_persisted(self, seqno: int) -> bool:
        """Return True for a batch that a follower has in its files. Raises for every other batch that may not be
        applied."""
        self.lifecycle.check_open()
        if not self.lifecycle.accepts_batches:
            raise InvalidError(f"the database is read-only: domain_uuid={self.domain_uuid}.")
        if self.lifecycle.follower and seqno <= self.max_persisted_seqno:
            return True
        raise InvalidError(
            f"seqnos must increase from batch to batch: seqno={seqno} last_seqno={self.max_applied_seqno}.",
            fix="Apply batches in the order of their log, each once.",
        )

    async def flush(self, timeout_s: float | None = None) -> int:
        """Wait until everything applied before the call is in files that a manifest names; return the seqno reached.

        Raises the error of a failed flush; the rows then stay in memory and the next flush includes them. Unavailable
        after `timeout_s` seconds; the flush then continues in the background.
        """
        self.lifecycle.check_writable()
        await self.background.flusher.flush(timeout_s)
        return self.max_persisted_seqno

    # reading -----------------------------------------------------------------------------------------

    def peek(self, key: bytes) -> bytes | Pending | None:
        """Return the live value, or None, if that is known from memory; PENDING if something must be read."""
        return self._view.peek(key)

    async def get(self, key: bytes) -> bytes | None:
        """Return the live value, or None. Reads at most filter, index and one block of each file that may hold the
        key."""
        value = self._view.peek(key)
        return await self._view.get(key) if value is PENDING else value

    def peek_row(self, key: bytes) -> Row | Pending | None:
        """Return the row as `peek` does, with the seqno of its batch."""
        return self._view.peek_row(key)

    async def get_row(self, key: bytes) -> Row | None:
        """Return the live row with the seqno of its batch; None if it is absent or deleted."""
        row = self._view.peek_row(key)
        return await self._view.get_row(key) if row is PENDING else row

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return one value, or None, for each key, in order, all from one snapshot. Adjacent keys of a file share
        reads."""
        self.lifecycle.check_open()
        return await self._view.get_many(keys)

    def change_stamp(self, first: bytes) -> tuple[object, int]:
        """Return a change stamp. It differs once a row whose key begins with this byte was written, perhaps without
        that too."""
        return self._stamps.stamp(first)

    def scan(self, lower: bytes = b"", upper: bytes | None = None, *, reverse: bool = False) -> Scan:
        """Iterate over chunks of the live rows in [lower, upper), as of this call."""
        self.lifecycle.check_open()
        return Scan(self._pin(), lower, upper, reverse)

    def prefix(self, prefix: bytes, *, reverse: bool = False) -> Scan:
        """Iterate as `scan` does over the keys that start with `prefix`."""
        return self.scan(prefix, prefix_end(prefix), reverse=reverse)

    def snapshot(self) -> Snapshot:
        """Return a snapshot of the present state, valid until it is closed."""
        self.lifecycle.check_open()
        return Snapshot(self._pin(), self.max_applied_seqno)

    def _pin(self) -> Pin:
        return Pin(self._view, self.versions, self.options, self.lifecycle.check_open)

    # following ---------------------------------------------------------------------------------------

    async def refresh(self) -> bool:
        """Switch to the newest manifest; return False if it is the one in use. Snapshots keep their state.

        Raises InvalidError if the database is writable or the manifest is older.
        """
        self.lifecycle.check_read_only()
        async with self._refreshing:
            manifest = await self.manifests.read(self.epoch)
            self.lifecycle.check_read_only()
            if manifest is None and self.versions.manifest is None:
                return False
            if manifest is None:
                raise InvalidError(f"the manifest in use is gone: domain_uuid={self.domain_uuid} epoch={self.epoch}.")
            return self.refresh_to(manifest)

    def refresh_to(self, manifest: Manifest) -> bool:
        """Switch as `refresh` does, to a manifest from another source, such as the replicated state."""
        self.lifecycle.check_read_only()
        if not self.versions.switch_to(manifest):
            return False
        self.memtable.drop_through(manifest.last_seqno)
        if manifest.last_seqno > self.max_applied_seqno:
            self._stamps.record_unseen(manifest.last_seqno)
        self.max_applied_seqno = max(self.max_applied_seqno, manifest.last_seqno)
        self._renew_view()
        self.wake.ring()
        return True

    # changing the version ------------------------------------------------------------------------------

    @property
    def version(self) -> Version:
        return self.versions.current

    async def commit_edit(self, edit: Edit, installed: Callable[[], None] | None = None) -> None:
        """Write a manifest with this edit, swap the version and call `installed` in one step, after earlier commits.

        Continues if the caller is cancelled. Raises ConflictError if the edit no longer fits; UnavailableError and what
        else `Manifests.write` raises; after UnknownOutcomeError and FencedError the database has ended.
        """
        self.lifecycle.check_writable()
        committing = self._commits.spawn(self._commit(edit, installed), name="metastore manifest")
        try:
            await asyncio.shield(committing)
        except asyncio.CancelledError:
            me = asyncio.current_task()
            ended = self.lifecycle.end_reason
            if ended is not None and committing.cancelled() and not (me is not None and me.cancelling()):
                raise copy_of_error(ended) from None  # the database was closed; the caller was not cancelled
            raise

    async def _commit(self, edit: Edit, installed: Callable[[], None] | None) -> None:
        def install() -> None:
            if installed is not None:
                installed()
            self._renew_view()
            self.wake.ring()

        try:
            await self.versions.commit(edit, install)
        finally:
            if self.versions.halted is not None:
                self._end(self.versions.halted)

    # closing -------------------------------------------------------------------------------------------

    def _end(self, error: TidemillError) -> None:
        if self.lifecycle.end(error):
            self._view = ClosedView(self._view, self.lifecycle.check_open)
            self.wake.ring()

    def _renew_view(self) -> None:
        if self.lifecycle.end_reason is None:
            self._view = View(self.memtable.layers, self.versions, self.tables)

    def stats(self) -> Stats:
        """Return current sizes, and totals since the database was opened."""
        work, tables = self.background, self.tables
        flusher, merging, stall = work.flusher, work.compactor.stats, work.stall
        flushed = flusher.file_bytes
        return Stats(
            levels=tuple(
                LevelStats(len(level), sum(file.rows for file in level), sum(file.size_bytes for file in level))
                for level in self.version.levels
            ),
            memtable_rows=self.memtable.rows,
            memtable_bytes=self.memtable.size_bytes,
            layers=len(self.memtable.layers),
            pins=self.versions.pins,
            max_applied_seqno=self.max_applied_seqno,
            max_persisted_seqno=self.max_persisted_seqno,
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
            slowed=stall.slowed,
            stopped=stall.stopped,
            waited_s=stall.waited_s,
            flush_error=str(flusher.error or ""),
            merge_error=merging.failure,
            collection_error=str(work.collector.error or ""),
        )

    async def aclose(self) -> None:
        """Stop the background work, without a flush. Idempotent."""
        self._end(ClosedError(f"the database is closed: domain_uuid={self.domain_uuid}."))
        await self.background.aclose()
        await self._commits.aclose()
