"""Shapes over shards: planning, and building a shape whose feed runs for as long as the shape lives."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tidemill.base.errors import Invalid, TidemillError
from tidemill.base.tasks import Tasks
from tidemill.shapes.live import LiveShape
from tidemill.shapes.plan import SHARD_SCHEMA, FieldError, Plan, ShapeRequest, check_columns, compile_request
from tidemill.shapes.shape import ShapeDefinition, Source
from tidemill.shapes.shard_source import ShardFeed, shard_schema_json, shard_types
from tidemill.shards.front import Shard

ShardOpener = Callable[[str], Awaitable[Shard]]


class ShardShapes:
    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._opener: ShardOpener | None = None

    def serve(self, opener: ShardOpener) -> None:
        self._opener = opener

    async def plan(self, request: ShapeRequest, name: str) -> Plan:
        """Raises FieldError (also for a name the shards refuse), or what opening the shard raises."""
        if self._opener is None:
            raise FieldError("table", f"this node serves no shards: shard={name}.")
        try:
            shard = await self._opener(name)
        except Invalid as error:
            raise FieldError("table", error.message, fix=error.fix) from error
        names = tuple(column.name for column in shard.schema.columns)
        columns = check_columns(request.columns, names, shard.schema.key)
        where = compile_request(request, shard_types(shard.schema), SHARD_SCHEMA, name)
        definition = ShapeDefinition(
            Source("shard", "", SHARD_SCHEMA, name),
            request.where,
            where.params if where else (),
            columns,
            request.replica,
            request.log_mode,
        )

        async def build(shape: LiveShape) -> None:
            feed = ShardFeed(shard, where, columns, request.replica, request.log_mode)
            await feed.load(shape)
            shape.ready()
            self._tasks.spawn(self._follow(shape, feed), name=f"shape-feed:{shape.handle}")

        return Plan(definition, shard_schema_json(shard.schema, columns), build)

    async def _follow(self, shape: LiveShape, feed: ShardFeed) -> None:
        """End with the shape; a failing shard ends the shape, whose clients then ask again."""
        try:
            await feed.follow(shape)
        except (TidemillError, OSError, EOFError) as error:
            shape.drop(f"the shard's changes ended: {error}")
