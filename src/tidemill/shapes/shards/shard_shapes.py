"""Shapes over shards: planning, and building a shape whose feed runs for as long as the shape lives."""

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
    as_unavailable,
)
from tidemill.shapes.definition.definition import ShapeDefinition, Source
from tidemill.shapes.definition.planner import (
    SHARD_SCHEMA,
    Compiler,
    FieldError,
    Plan,
    ShapeRequest,
    check_columns,
    definition_of,
    queryable_columns,
)
from tidemill.shapes.definition.subset import Metadata, SubsetRequest, SubsetScope
from tidemill.shapes.live_shape import LiveShape
from tidemill.shapes.log.disk_log import DiskLog
from tidemill.shapes.log.log import LogLimits, LogStorage, MemoryLog
from tidemill.shapes.log.row_writer import RowWriter
from tidemill.shapes.log.saved_shape import KeptShard
from tidemill.shapes.log.sqlite_file import Saved
from tidemill.shapes.log.store import ShapeStore
from tidemill.shapes.loop_share import LoopShare
from tidemill.shapes.memory_budget import Budget, OverBudgetError
from tidemill.shapes.response_memory import ResponseMemory
from tidemill.shapes.shards.feed import ShardFeed, contents, shard_schema_json, shard_types
from tidemill.shapes.shards.subsets import SubsetRows
from tidemill.shapes.where import Where
from tidemill.shards.api import HistoryLostError, SchemaEvolvedError, Shard

_log = structlog.get_logger()

Build = Callable[[LiveShape], Awaitable[None]]
ShardOpener = Callable[[str], Awaitable[Shard]]

LOADS_AT_ONCE = 2
"""Shards are read whole: so many of them may be in memory."""

HANDLE_S = 10.0
"""Requests within so long share one handle: opening one reads the shard's whole state. Then it is looked up again, for
the name may mean another shard by now."""

MOST_HANDLES = 256

NOTED_MS = 10_000
"""Of a shard's time. A shape goes on after a restart while the shard remembers what came after what was noted last
(`retention.history_s`); a process that ends in order notes all there is."""

RESUME_S = 20.0
RESUME_RETRY_S = 0.5
"""For a shape of an earlier life whose shard cannot be asked just now."""


class ShardShapes:
    def __init__(self, clock: Clock, share: LoopShare, compiler: Compiler) -> None:
        self._clock = clock
        self._share = share
        self._handles: dict[str, tuple[Shard, float]] = {}
        self._compiler = compiler
        self._opener: ShardOpener | None = None
        self._loads = asyncio.Semaphore(LOADS_AT_ONCE)
        self._ask_cluster: Callable[[], Awaitable[str]] | None = None
        self._cluster_name = ""
        self._store: ShapeStore | None = None
        self._restored = True
        self._notes: dict[str, Callable[[], None]] = {}
        """Of each shape that is followed: writes down how far it is."""

    def serve(
        self, opener: ShardOpener, cluster: Callable[[], Awaitable[str]] | None, store: ShapeStore | None
    ) -> None:
        """`cluster()` names the cluster whose shards these are: another one once it was restored. With a `store` shapes
        outlive the process, and none is served before `restore`."""
        self._opener = opener
        self._ask_cluster = cluster
        self._store = store
        self._restored = store is None

    def log(self, limits: LogLimits, budget: Budget) -> LogStorage:
        """A new one."""
        return MemoryLog(limits, budget) if self._store is None else self._store.new_log()

    def note(self) -> None:
        """How far each shape is goes into the next flush."""
        for note in self._notes.values():
            note()

    async def _open(self, name: str) -> Shard:
        """Raises FieldError, or what the opener raises."""
        assert self._opener is not None
        now_s = self._clock.monotonic_s()
        found = self._handles.get(name)
        if found is not None and now_s - found[1] < HANDLE_S:
            return found[0]
        self._handles.pop(name, None)
        try:
            shard = await self._opener(name)
        except InvalidError as error:
            raise FieldError("table", error.message, fix=error.fix) from error
        if len(self._handles) >= MOST_HANDLES:
            del self._handles[next(iter(self._handles))]
        self._handles[name] = (shard, now_s)
        return shard

    async def plan(self, request: ShapeRequest, name: str) -> Plan:
        """Raises FieldError (also for a name the shards refuse), or what opening the shard raises."""
        if self._opener is None:
            raise FieldError("table", f"this node serves no shards: shard={name}.")
        if not self._restored:
            raise UnavailableError("the shapes of an earlier life are being restored.")
        shard = await self._open(name)
        names = tuple(column.name for column in shard.schema.columns)
        columns, where, definition = await self._check(request, shard, name)

        async def build(shape: LiveShape) -> None:
            """Load, then follow for as long as the shape lives: the feed is the shape's own run, and no task beside it
            that could end alone and leave the shape live."""
            feed = ShardFeed(shard, where, columns, request.replica, request.log_mode, self._share)
            cluster = await self._cluster()
            try:
                async with self._loads:
                    await feed.load(shape)
            except MissingError:
                self._handles.pop(name, None)  # it was dropped; the name may mean another one
                raise
            except SchemaEvolvedError as error:
                self._handles.pop(name, None)  # the next request plans with its new columns
                raise as_unavailable(error) from error
            shape.ready()
            await self._follow(shape, feed, request, shard, cluster)

        types = shard_types(shard.schema)
        queryable = queryable_columns(request, names, shard.schema.key)
        params_count = len(where.params) if where is not None else 0
        scope = SubsetScope(SHARD_SCHEMA, shard.name, types, queryable, params_count)

        async def read(request: SubsetRequest, rows: ResponseMemory, mark: int) -> Metadata:
            subset = await self._compiler.subset(request, scope)
            writer = RowWriter(
                SHARD_SCHEMA, shard.name, columns or names, shard.schema.key, marks={"snapshot_mark": mark}
            )
            reading = SubsetRows(names, writer, where, subset)
            async with self._loads:
                try:
                    table, upper = await contents(shard)
                except MissingError:
                    self._handles.pop(name, None)
                    raise
                except SchemaEvolvedError as error:
                    self._handles.pop(name, None)
                    raise as_unavailable(error) from error
                if table is not None:
                    await reading.work(table, rows, self._share)
            return Metadata(mark, str(upper), str(upper), [], str(upper))

        return Plan(definition, shard_schema_json(shard.schema, columns), build, read)

    async def _check(
        self, request: ShapeRequest, shard: Shard, name: str
    ) -> tuple[tuple[str, ...], Where | None, ShapeDefinition]:
        """(columns to show, clause, definition). Raises FieldError."""
        names = tuple(column.name for column in shard.schema.columns)
        columns = check_columns(request, names, shard.schema.key)
        where = await self._compiler(request, shard_types(shard.schema), SHARD_SCHEMA, name)
        definition = definition_of(request, Source("shard", "", SHARD_SCHEMA, name), columns, where)
        return columns, where, definition

    async def _cluster(self) -> str:
        """Of this process's life. Raises UnavailableError."""
        if self._ask_cluster is not None and not self._cluster_name:
            self._cluster_name = await self._ask_cluster()
        return self._cluster_name

    async def _follow(
        self, shape: LiveShape, feed: ShardFeed, request: ShapeRequest, shard: Shard, cluster: str
    ) -> None:
        """For as long as the shape lives. Raises InvalidError where its clause fails on a row."""
        name = shape.definition.source.table
        try:
            await feed.follow(shape, self._noting(shape, request, shard, cluster))
        except (
            HistoryLostError,
            MissingError,
            SchemaEvolvedError,
        ) as error:  # dropped: the name may mean another one by now
            self._handles.pop(name, None)
            shape.drop(f"the shard's changes ended: {error}")
        except InvalidError:
            raise  # the where clause failed on a row
        except TidemillError as error:
            shape.drop(f"the shard's changes ended: {error}")
        finally:
            self._notes.pop(shape.handle, None)

    # -- over a restart ----------------------------------------------------------------------------------------

    def _noting(self, shape: LiveShape, request: ShapeRequest, shard: Shard, cluster: str) -> Callable[[int], None]:
        """From here on the shape is there after a restart. What is returned is told the times that it has seen, and
        writes one down every NOTED_MS of them: what the shard forgets meanwhile cannot be followed on from."""
        store, log = self._store, shape.log
        if store is None or not isinstance(log, DiskLog):
            return lambda _: None
        noted_ms = -1

        def write() -> None:
            nonlocal noted_ms
            if shape.gone or shape.last_seen in (noted_ms, 0):  # 0: nothing of the shard is final yet
                return
            noted_ms = shape.last_seen
            kept = KeptShard(
                request, shape.definition, shape.schema_json, cluster, shard.shard_id, shard.schema.version, noted_ms,
                shape.rows_loaded,
            )  # fmt: skip
            store.record(log, shape.handle, kept.encode(), "")

        def seen(time_ms: int) -> None:
            if time_ms - noted_ms >= NOTED_MS:
                write()

        self._notes[shape.handle] = write
        write()
        return seen

    async def restore(self, start: Callable[[Saved, KeptShard, DiskLog, Build], None]) -> None:
        """Take in the shapes that the store holds, before any other; `start` begins each, under the handle that it had,
        and raises OverBudgetError. Each then goes on by itself, or is over. Idempotent."""
        store = self._store
        if store is None or self._restored:
            return
        try:
            saved = await store.saved()
        except UnavailableError as error:
            _log.error("shapes of an earlier life cannot be read", database="shards", error=str(error))
            store.start_over()
            saved = []
        taken: set[ShapeDefinition] = set()
        for each in reversed(saved):  # of two of one definition the older one was over
            try:
                kept = KeptShard.decode(each.record)
                if kept.definition in taken:
                    raise CorruptError("another shape of this definition came after it.")
                log = store.old_log(each)
                try:
                    start(each, kept, log, partial(self._resume, kept=kept))
                except OverBudgetError:
                    log.drop()
                    raise
                taken.add(kept.definition)
            except (CorruptError, OverBudgetError) as error:
                _log.info("a shape of an earlier life is over", handle=each.handle, why=str(error))
                store.forget(each)
        self._restored = True

    async def _resume(self, shape: LiveShape, kept: KeptShard) -> None:
        """The run of a shape of an earlier life: follow on from where its log ends, or drop it."""
        deadline_s = self._clock.monotonic_s() + RESUME_S
        while True:
            try:
                async with self._loads:
                    feed, shard = await self._resumed(shape, kept)
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
        shape.ready()
        await self._follow(shape, feed, kept.request, shard, kept.cluster)

    async def _resumed(self, shape: LiveShape, kept: KeptShard) -> tuple[ShardFeed, Shard]:
        """Raises HistoryLostError where the shard is not what it was, or does not remember what came after."""
        name, request = kept.definition.source.table, kept.request
        shard = await self._open(name)
        life = (await self._cluster(), shard.shard_id, shard.schema.version)
        if life != (kept.cluster, kept.shard_id, kept.version):
            raise HistoryLostError(f"the shard is another one now: shard={name}.")
        columns, where, definition = await self._check(request, shard, name)
        if definition != kept.definition or shard_schema_json(shard.schema, columns) != kept.schema_json:
            raise HistoryLostError(f"the shape means something else now: shard={name}.")
        feed = ShardFeed(shard, where, columns, request.replica, request.log_mode, self._share)
        await feed.resume(shape, max(kept.seen_ms, shape.log.end.tx))
        return feed, shard
