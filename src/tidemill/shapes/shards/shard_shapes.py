"""Shapes over shards: plans requests, builds shapes whose feed runs for as long as the shape lives, and restores them
after a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import (
    CorruptError,
    InvalidError,
    MissingError,
    TidemillError,
    UnavailableError,
    UnknownOutcomeError,
    to_unavailable,
)
from tidemill.shapes.definition.definition import ShapeDefinition, Source
from tidemill.shapes.definition.planner import (
    SHARD_SCHEMA,
    Compiler,
    FieldError,
    Plan,
    ShapeRequest,
    build_definition,
    check_columns,
    check_queryable_columns,
)
from tidemill.shapes.definition.subset import SubsetMetadata, SubsetRequest, SubsetScope
from tidemill.shapes.live_shape import LiveShape
from tidemill.shapes.log.chunks import ResponseMemory
from tidemill.shapes.log.disk_log import DiskLog
from tidemill.shapes.log.log import LogLimits, ShapeLog
from tidemill.shapes.log.row_writer import RowWriter
from tidemill.shapes.log.saved_shape import SavedShardShape
from tidemill.shapes.log.sqlite_file import StoredShape
from tidemill.shapes.log.store import ShapeStore
from tidemill.shapes.loop_share import LoopShare
from tidemill.shapes.memory_budget import Budget, OverBudgetError
from tidemill.shapes.shards.feed import ShardFeed, read_contents, shard_schema_json, shard_where_types
from tidemill.shapes.shards.subsets import SubsetRowReader
from tidemill.shapes.where import Where
from tidemill.shards.api import HistoryLostError, SchemaEvolvedError, Shard

_log = structlog.get_logger()

Build = Callable[[LiveShape], Awaitable[None]]
ShardOpener = Callable[[str], Awaitable[Shard]]

MAX_LOADS = 2
"""Shards that may be in memory at the same time: shards are read completely."""

HANDLE_CACHE_S = 10.0
"""Time for which requests share one handle of a shard: opening one reads the shard's whole state. After that it is
looked up again, as the name may refer to another shard."""

MAX_HANDLES = 256

PROGRESS_INTERVAL_MS = 10_000
"""Interval, in a shard's time, at which the progress of a shape is stored. After a restart the shape continues if the
shard's history (`retention.history_s`) still reaches back to the stored time. An orderly stop stores the latest
progress."""

RESUME_S = 20.0
RESUME_RETRY_S = 0.5
"""Deadline for restoring a stored shape whose shard cannot be read at the moment."""


class ShardShapes:
    def __init__(self, clock: Clock, share: LoopShare, compiler: Compiler) -> None:
        self._clock = clock
        self._share = share
        self._handles: dict[str, tuple[Shard, float]] = {}
        self._compiler = compiler
        self._opener: ShardOpener | None = None
        self._loads = asyncio.Semaphore(MAX_LOADS)
        self._ask_cluster: Callable[[], Awaitable[str]] | None = None
        self._cluster_name = ""
        self._store: ShapeStore | None = None
        self._restored = True
        self._notes: dict[str, Callable[[], None]] = {}
        """Functions by handle of the shapes that are followed; each stores the progress of its shape."""

    def start_serving(
        self, opener: ShardOpener, cluster: Callable[[], Awaitable[str]] | None, store: ShapeStore | None
    ) -> None:
        """Start serving shards.

        `cluster()` returns the id of the cluster that owns them; it changes when the cluster is restored. With a
        `store` shapes outlive the process, and none is served before `restore`.
        """
        self._opener = opener
        self._ask_cluster = cluster
        self._store = store
        self._restored = store is None

    def log(self, limits: LogLimits, budget: Budget) -> ShapeLog:
        """Create the log of a new shape."""
        return ShapeLog(limits, budget) if self._store is None else self._store.create_log()

    def save_progress(self) -> None:
        """Store the progress of each shape with the next flush."""
        for note in self._notes.values():
            note()

    async def _open_shard(self, name: str) -> Shard:
        """Open a shard, or return its cached handle. Raises FieldError, or what the opener raises."""
        assert self._opener is not None
        now_s = self._clock.monotonic_s()
        found = self._handles.get(name)
        if found is not None and now_s - found[1] < HANDLE_CACHE_S:
            return found[0]
        self._handles.pop(name, None)
        try:
            shard = await self._opener(name)
        except InvalidError as error:
            raise FieldError("table", error.message, fix=error.fix) from error
        if len(self._handles) >= MAX_HANDLES:
            del self._handles[next(iter(self._handles))]
        self._handles[name] = (shard, now_s)
        return shard

    async def plan_request(self, request: ShapeRequest, name: str) -> Plan:
        """Check a request and return its plan. Raises FieldError (also for an invalid shard name), or what opening the
        shard raises."""
        if self._opener is None:
            raise FieldError("table", f"this node serves no tables: table={name}.")
        if not self._restored:
            raise UnavailableError("shapes are still being restored after a restart.")
        shard = await self._open_shard(name)
        names = tuple(column.name for column in shard.schema.columns)
        columns, where, definition = await self._check_request(request, shard, name)

        async def build(shape: LiveShape) -> None:
            """Load, then follow for as long as the shape lives. The feed runs in the shape's own task: a separate task
            could end alone and leave the shape live."""
            feed = ShardFeed(shard, where, columns, request.replica, request.log_mode, self._share)
            cluster = await self._cluster_id()
            try:
                async with self._loads:
                    await feed.load(shape)
            except MissingError:
                self._handles.pop(name, None)  # dropped; the name may refer to another shard
                raise
            except SchemaEvolvedError as error:
                self._handles.pop(name, None)  # the next request plans with the new columns
                raise to_unavailable(error) from error
            shape.mark_ready()
            await self._follow_shard(shape, feed, request, shard, cluster)

        types = shard_where_types(shard.schema)
        queryable = check_queryable_columns(request, names, shard.schema.key)
        params_count = len(where.params) if where is not None else 0
        scope = SubsetScope(SHARD_SCHEMA, shard.name, types, queryable, params_count)

        async def read(request: SubsetRequest, rows: ResponseMemory, mark: int) -> SubsetMetadata:
            subset = await self._compiler.compile_subset(request, scope)
            writer = RowWriter(
                SHARD_SCHEMA, shard.name, columns or names, shard.schema.key, marks={"snapshot_mark": mark}
            )
            reading = SubsetRowReader(names, writer, where, subset)
            async with self._loads:
                try:
                    table, upper = await read_contents(shard)
                except MissingError:
                    self._handles.pop(name, None)
                    raise
                except SchemaEvolvedError as error:
                    self._handles.pop(name, None)
                    raise to_unavailable(error) from error
                if table is not None:
                    await reading.read_rows(table, rows, self._share)
            return SubsetMetadata(mark, str(upper), str(upper), [], str(upper))

        return Plan(definition, shard_schema_json(shard.schema, columns), build, read)

    async def _check_request(
        self, request: ShapeRequest, shard: Shard, name: str
    ) -> tuple[tuple[str, ...], Where | None, ShapeDefinition]:
        """Return (columns to show, clause, definition). Raises FieldError."""
        names = tuple(column.name for column in shard.schema.columns)
        columns = check_columns(request, names, shard.schema.key)
        where = await self._compiler(request, shard_where_types(shard.schema), SHARD_SCHEMA, name)
        definition = build_definition(request, Source("shard", "", SHARD_SCHEMA, name), columns, where)
        return columns, where, definition

    async def _cluster_id(self) -> str:
        """Return the cluster's id, read once per process. Raises UnavailableError."""
        if self._ask_cluster is not None and not self._cluster_name:
            self._cluster_name = await self._ask_cluster()
        return self._cluster_name

    async def _follow_shard(
        self, shape: LiveShape, feed: ShardFeed, request: ShapeRequest, shard: Shard, cluster: str
    ) -> None:
        """Follow the shard for as long as the shape lives. Raises InvalidError if its clause fails on a row."""
        name = shape.definition.source.table
        try:
            await feed.follow(shape, self._progress_saver(shape, request, shard, cluster))
        except (
            HistoryLostError,
            MissingError,
            SchemaEvolvedError,
        ) as error:  # dropped: the name may refer to another shard
            self._handles.pop(name, None)
            shape.drop(f"the table's changes ended: {error}")
        except InvalidError:
            raise  # the where clause failed on a row
        except TidemillError as error:
            shape.drop(f"the table's changes ended: {error}")
        finally:
            self._notes.pop(shape.handle, None)

    # -- after a restart ---------------------------------------------------------------------------------------

    def _progress_saver(
        self, shape: LiveShape, request: ShapeRequest, shard: Shard, cluster: str
    ) -> Callable[[int], None]:
        """Store the shape, so that it exists after a restart; return a function to call with the times that were
        processed.

        It stores the progress every PROGRESS_INTERVAL_MS. Once the shard has forgotten the changes after the stored
        time, the shape cannot continue.
        """
        store, log = self._store, shape.log
        if store is None or not isinstance(log, DiskLog):
            return lambda _: None
        noted_ms = -1

        def save() -> None:
            nonlocal noted_ms
            if shape.has_ended or shape.last_seen in (noted_ms, 0):  # 0: no time of the shard is final yet
                return
            noted_ms = shape.last_seen
            kept = SavedShardShape(
                request, shape.definition, shape.schema_json, cluster, shard.shard_id, shard.schema.version, noted_ms,
                shape.rows_loaded,
            )  # fmt: skip
            store.logs.save_record(log, shape.handle, kept.encode(), "")

        def processed(time_ms: int) -> None:
            if time_ms - noted_ms >= PROGRESS_INTERVAL_MS:
                save()

        self._notes[shape.handle] = save
        save()
        return processed

    async def restore(self, start: Callable[[StoredShape, SavedShardShape, DiskLog, Build], None]) -> None:
        """Restore the stored shapes, before any other is served; `start` starts each under its old handle, or raises
        OverBudgetError.

        Each shape then continues, or ends if it cannot. Idempotent.
        """
        store = self._store
        if store is None or self._restored:
            return
        try:
            saved = await store.read_saved()
        except UnavailableError as error:
            _log.error("stored shapes cannot be read", database="shards", error=str(error))
            store.discard_shapes()
            saved = []
        taken: set[ShapeDefinition] = set()
        for each in reversed(saved):  # the newest shape of a definition wins
            try:
                kept = SavedShardShape.decode(each.record)
                if kept.definition in taken:
                    raise CorruptError("a newer shape has the same definition.")
                log = store.restore_log(each)
                try:
                    start(each, kept, log, partial(self._run_restored, kept=kept))
                except OverBudgetError:
                    log.drop()
                    raise
                taken.add(kept.definition)
            except (CorruptError, OverBudgetError) as error:
                _log.info("a stored shape cannot be restored", handle=each.handle, why=str(error))
                store.delete_saved(each)
        self._restored = True

    async def _run_restored(self, shape: LiveShape, kept: SavedShardShape) -> None:
        """Run a restored shape: continue from the end of its log, or drop it."""
        deadline_s = self._clock.monotonic_s() + RESUME_S
        while True:
            try:
                async with self._loads:
                    feed, shard = await self._resume_feed(shape, kept)
                break
            except (UnavailableError, UnknownOutcomeError) as error:
                if isinstance(error, OverBudgetError) or self._clock.monotonic_s() >= deadline_s:
                    shape.drop(str(error))
                    return
            except TidemillError as error:
                self._handles.pop(kept.definition.source.table, None)
                shape.drop(str(error))
                return
            await asyncio.sleep(RESUME_RETRY_S)
        shape.mark_ready()
        await self._follow_shard(shape, feed, kept.request, shard, kept.cluster)

    async def _resume_feed(self, shape: LiveShape, kept: SavedShardShape) -> tuple[ShardFeed, Shard]:
        """Return a feed that continues the log. Raises HistoryLostError if the shard was replaced, or its history is
        too short."""
        name, request = kept.definition.source.table, kept.request
        shard = await self._open_shard(name)
        life = (await self._cluster_id(), shard.shard_id, shard.schema.version)
        if life != (kept.cluster, kept.shard_id, kept.version):
            raise HistoryLostError(f"the table was replaced or changed: table={name}.")
        columns, where, definition = await self._check_request(request, shard, name)
        if definition != kept.definition or shard_schema_json(shard.schema, columns) != kept.schema_json:
            raise HistoryLostError(f"the shape's definition or columns changed: table={name}.")
        feed = ShardFeed(shard, where, columns, request.replica, request.log_mode, self._share)
        await feed.resume(shape, max(kept.seen_ms, shape.log.end.tx))
        return feed, shard
