"""Shapes over shards: planning, and building a shape whose feed runs for as long as the shape lives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tidemill.base.clock import Clock
from tidemill.base.errors import Invalid, Missing, TidemillError, mendable
from tidemill.shapes.live import LiveShape
from tidemill.shapes.plan import SHARD_SCHEMA, Compiler, FieldError, Plan, ShapeRequest, check_columns
from tidemill.shapes.shape import ShapeDefinition, Source
from tidemill.shapes.shard_source import ShardFeed, shard_schema_json, shard_types
from tidemill.shapes.share import LoopShare
from tidemill.shards.front import Evolved, HistoryLost, Shard

ShardOpener = Callable[[str], Awaitable[Shard]]

LOADS_AT_ONCE = 2
"""Shards are read whole: so many of them may be in memory."""

HANDLE_S = 10.0
"""Requests within so long share one handle: opening one reads the shard's whole state. Then it is looked up again, for
the name may mean another shard by now."""

MOST_HANDLES = 256


class ShardShapes:
    def __init__(self, clock: Clock, share: LoopShare, compiler: Compiler) -> None:
        self._clock = clock
        self._share = share
        self._handles: dict[str, tuple[Shard, float]] = {}
        self._compiler = compiler
        self._opener: ShardOpener | None = None
        self._loads = asyncio.Semaphore(LOADS_AT_ONCE)

    def serve(self, opener: ShardOpener) -> None:
        self._opener = opener

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
        except Invalid as error:
            raise FieldError("table", error.message, fix=error.fix) from error
        if len(self._handles) >= MOST_HANDLES:
            del self._handles[next(iter(self._handles))]
        self._handles[name] = (shard, now_s)
        return shard

    async def plan(self, request: ShapeRequest, name: str) -> Plan:
        """Raises FieldError (also for a name the shards refuse), or what opening the shard raises."""
        if self._opener is None:
            raise FieldError("table", f"this node serves no shards: shard={name}.")
        shard = await self._open(name)
        names = tuple(column.name for column in shard.schema.columns)
        columns = check_columns(request.columns, names, shard.schema.key)
        where = await self._compiler(request, shard_types(shard.schema), SHARD_SCHEMA, name)
        definition = ShapeDefinition(
            Source("shard", "", SHARD_SCHEMA, name),
            request.where,
            where.params if where else (),
            columns,
            request.replica,
            request.log_mode,
        )

        async def build(shape: LiveShape) -> None:
            """Load, then follow for as long as the shape lives: the feed is the shape's own run, and no task beside it
            that could end alone and leave the shape live."""
            feed = ShardFeed(shard, where, columns, request.replica, request.log_mode, self._share)
            try:
                async with self._loads:
                    await feed.load(shape)
            except Missing:
                self._handles.pop(name, None)  # it was dropped; the name may mean another one
                raise
            except Evolved as error:
                self._handles.pop(name, None)  # the next request plans with its new columns
                raise mendable(error) from error
            shape.ready()
            try:
                await feed.follow(shape)
            except (HistoryLost, Missing, Evolved) as error:  # dropped: the name may mean another one by now
                self._handles.pop(name, None)
                shape.drop(f"the shard's changes ended: {error}")
            except Invalid:
                raise  # the where clause failed on a row
            except TidemillError as error:
                shape.drop(f"the shard's changes ended: {error}")

        return Plan(definition, shard_schema_json(shard.schema, columns), build)
