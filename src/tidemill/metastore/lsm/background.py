"""Background work of one database: flush, compaction, garbage collection, and how long writers wait for them.

    memtable ──flush──▶ level 0 ──compaction──▶ deeper levels        files that nothing names ──▶ deleted

Each is a task. One that fails permanently leaves its error in `failure`; only reopening the database starts it again.
A database that is not writable only reads metas in advance.
"""

from __future__ import annotations

import asyncio

from tidemill.base.errors import TidemillError
from tidemill.base.runtime.tasks import Tasks
from tidemill.metastore.lsm.compaction.compactor import Compactor
from tidemill.metastore.lsm.compaction.executor import CompactionExecutor
from tidemill.metastore.lsm.compaction.inline_executor import InlineExecutor
from tidemill.metastore.lsm.database_protocol import DatabaseProtocol
from tidemill.metastore.lsm.flush import Flusher
from tidemill.metastore.lsm.gc import CollectionResult, GarbageCollector, Roots
from tidemill.metastore.lsm.manifest_store import BucketManifests
from tidemill.metastore.lsm.write_stall import WriteStall

PRE_OPEN_AT_ONCE = 8


class BackgroundWork:
    """Background work. `merger`: executor of compactions, which the caller closes; None: the event loop."""

    def __init__(self, database: DatabaseProtocol, merger: CompactionExecutor | None) -> None:
        files, options, clock = database.files, database.options, database.clock
        self._database = database
        self._tasks = Tasks(self._task_failed)
        self._owns_merger = merger is None
        self._merger = merger or InlineExecutor(files.objects, options, clock)
        self.flusher = Flusher(database)
        self.compactor = Compactor(
            database.versions, database.commit_edit, database.wake, self._merger, options, clock, files.prefix
        )
        self.collector = GarbageCollector(
            files, BucketManifests(files.objects, files.prefix, database.rand), options, clock
        )
        self.stall = WriteStall(database, self)
        self.compacts = False
        """True if the compaction loop was started."""
        self.failure: BaseException | None = None
        """Error that ended a task permanently."""

    def start(self, *, removes_files: bool) -> None:
        """Start the flush task. `removes_files`: start compaction and garbage collection too."""
        self._tasks.spawn(self.flusher.run(), name="metastore flush")
        if removes_files:
            self.compacts = True
            self._tasks.spawn(self.compactor.run(), name="metastore compaction")
            self._tasks.spawn(self.collector.run(self.roots, self._is_open), name="metastore collection")

    def start_pre_open(self) -> None:
        """Read filters and indexes of the newest `pre_open` files in advance, in a task."""
        if self._database.options.pre_open:
            self._tasks.spawn(self._read_metas_in_advance(), name="metastore pre-open")

    async def _read_metas_in_advance(self) -> None:
        """Failures are ignored here: the first read of the file raises them again."""
        database = self._database
        files = [file for level in database.version.levels for file in level][: database.options.pre_open]
        for first in range(0, len(files), PRE_OPEN_AT_ONCE):
            reading = (database.tables.meta(file) for file in files[first : first + PRE_OPEN_AT_ONCE])
            for outcome in await asyncio.gather(*reading, return_exceptions=True):
                if isinstance(outcome, BaseException) and not isinstance(outcome, TidemillError):
                    raise outcome

    @property
    def last_error(self) -> object:
        """Error of the last flush or compaction; falsy if neither failed."""
        return self.flusher.error or self.compactor.stats.failure

    async def compact(self) -> None:
        """Flush, then compact everything into the deepest level, without tombstones."""
        await self._database.flush()
        await self.compactor.compact_fully()

    async def collect_garbage(self) -> CollectionResult:
        """Run one round of garbage collection. Raises InvalidError if read-only, and what `GarbageCollector.collect`
        raises."""
        self._database.lifecycle.check_writable()
        return await self.collector.collect(self.roots, self._is_open)

    def roots(self) -> Roots:
        """Return the files and the manifest that the database needs."""
        versions = self._database.versions
        manifest = versions.manifest
        return Roots(
            epoch=self._database.epoch,
            lowest_in_flight=versions.lowest_in_flight,
            files=versions.current.files | versions.pinned_files(),
            manifest=None if manifest is None else (manifest.epoch, manifest.number),
        )

    def _is_open(self) -> bool:
        return self._database.lifecycle.end_reason is None

    def _task_failed(self, name: str, error: BaseException) -> None:
        self.failure = error
        self._database.wake.ring()

    async def aclose(self) -> None:
        """Stop the tasks, without a flush. Idempotent."""
        await self._tasks.aclose()
        if self._owns_merger:
            await self._merger.aclose()
