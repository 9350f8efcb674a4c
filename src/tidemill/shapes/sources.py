"""The sources that one process serves shapes of: captured databases, and all shards.

State: the file of shape logs and the supervised tasks of each source. Adding a source starts its tasks: one restores
its shapes and evaluates its stream, one writes its file, and one answers the questions of clauses that PostgreSQL
evaluates. Releasing a source ends its shapes and closes its file.

Invariant (complete files): the pending log writes of a source are flushed before its file is closed, for the process
that continues the same stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from urllib.parse import quote

from tidemill.base.clock import Clock
from tidemill.base.runtime.tasks import Tasks, run_unit
from tidemill.base.status.status import StatusTracker
from tidemill.shapes.live_shapes import LiveShapes
from tidemill.shapes.log.store import ShapeStore
from tidemill.shapes.reporting import SHARDS_STATUS
from tidemill.shapes.shards.shard_shapes import ShardOpener, ShardShapes
from tidemill.shapes.store_files import SHARDS_FILE, StoreFiles, disk_status_name
from tidemill.shapes.tables.capture_tap import ShapeTap
from tidemill.shapes.tables.captured_database import Relations, TableFinder
from tidemill.shapes.tables.table_shapes import TableShapes

SHARDS_NAME = "shards"


class ShapeSources:
    """Served sources. `live` has their shapes, `tables` and `shards` what is known of them."""

    def __init__(
        self,
        live: LiveShapes,
        tables: TableShapes,
        shards: ShardShapes,
        files: StoreFiles,
        tasks: Tasks,
        tracker: StatusTracker,
        clock: Clock,
    ) -> None:
        self._live = live
        self._tables = tables
        self._shards = shards
        self._files = files
        self._tasks = tasks
        self._tracker = tracker
        self._clock = clock
        self._pumps: dict[str, list[asyncio.Task[None]]] = {}
        self._shard_pumps: list[asyncio.Task[None]] = []
        self._shard_store: ShapeStore | None = None
        self.database_stores: dict[str, ShapeStore] = {}

    @property
    def stores(self) -> dict[str, ShapeStore]:
        """Return the open files by source."""
        shards = {} if self._shard_store is None else {SHARDS_NAME: self._shard_store}
        return {**self.database_stores, **shards}

    def _spawn(self, stage: str, body: Callable[[], Awaitable[None]], task: str) -> asyncio.Task[None]:
        return self._tasks.spawn(run_unit(stage, body, tracker=self._tracker, clock=self._clock), name=task)

    def add_database(self, name: str, dsn: str, relations: Relations, seeker: TableFinder | None) -> ShapeTap:
        """See `ShapeService.add_database`."""
        if name in self.database_stores:
            raise RuntimeError(f"the database is already served: name={name}")
        self.suspend_database(name, "the capture was restarted")
        store = self._files.open(quote(name, safe=""), name)
        tap = self._tables.add(name, dsn, relations, store, seeker)

        async def pump() -> None:
            await self._tables.restore(name, self._live.restore_table_shape)
            await tap.run()

        async def answer() -> None:
            await self._tables.answer_requests(name)

        task = f"shapes:{name}"
        pumps = [self._spawn(task, pump, task), self._spawn(f"shapes:{name}/asked", answer, task)]
        if store is not None:
            self.database_stores[name] = store
            pumps.append(self._spawn(disk_status_name(name), store.run, task))
        self._pumps[name] = pumps
        return tap

    async def release_database(self, name: str, reason: str) -> None:
        """Close the file of a database, then suspend it."""
        store = self.database_stores.get(name)
        if store is not None:
            await _cancel(self._pumps.pop(name, []))
            try:
                await asyncio.shield(store.aclose())
            finally:
                self.database_stores.pop(name, None)
        self.suspend_database(name, reason)

    def suspend_database(self, name: str, reason: str) -> None:
        """End the shapes of a database without flushing anything to disk."""
        self._live.end_database(name, reason)
        for pump in self._pumps.pop(name, []):
            pump.cancel()
        self._tables.suspend_database(name)

    def add_shards(self, opener: ShardOpener, cluster: Callable[[], Awaitable[str]] | None) -> None:
        """See `ShapeService.add_shards`."""
        store = self._shard_store = self._files.open(SHARDS_FILE, SHARDS_NAME) if cluster is not None else None
        self._shards.start_serving(opener, cluster, store)
        if store is not None:
            store.name = _ignore_file_name
            self._shard_pumps = [
                self._spawn(SHARDS_STATUS, self._restore_shards, SHARDS_STATUS),
                self._spawn(disk_status_name(SHARDS_NAME), store.run, SHARDS_STATUS),
            ]

    async def _restore_shards(self) -> None:
        await self._shards.restore(self._live.restore_shard_shape)
        await asyncio.Event().wait()  # keep the supervised task running

    async def _release_shards(self) -> None:
        """Write the progress of the shapes over shards, and release their file."""
        store = self._shard_store
        if store is not None:
            self._shards.save_progress()
            await _cancel(self._shard_pumps)
            self._shard_store = None
            await asyncio.shield(store.aclose())

    async def release_all(self, reason: str) -> None:
        for name in list(self.database_stores):
            await self.release_database(name, reason)
        await self._release_shards()


async def _cancel(pumps: list[asyncio.Task[None]]) -> None:
    for pump in pumps:
        pump.cancel()
    await asyncio.gather(*pumps, return_exceptions=True)


async def _ignore_file_name(_: str) -> None:
    """Ignore the file name of shapes over shards: no capture row names this file, and the shards themselves keep the
    history."""
