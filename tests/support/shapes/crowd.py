"""Many shapes over one table, routed together."""

from __future__ import annotations

from typing import Any

from support.shapes.consumer import CLOCK, COLUMNS, ENDLESS, NOTHING_SEEN, TABLE
from tidemill.capture.changes import Fragment
from tidemill.shapes.definition.definition import ShapeDefinition, Source
from tidemill.shapes.live_shape import LiveShape
from tidemill.shapes.log.log import ShapeLog
from tidemill.shapes.log.log_offset import BASE_END
from tidemill.shapes.log.row_writer import RowWriter
from tidemill.shapes.loop_share import LoopShare
from tidemill.shapes.tables.backlog import BacklogLimits
from tidemill.shapes.tables.capture_tap import ShapeTap
from tidemill.shapes.tables.table_consumer import TableConsumer
from tidemill.shapes.where import Type, compile_where

TYPES = {"id": Type("int4"), "name": Type("text"), "open": Type("bool")}


class Crowd:
    """Many shapes over one table behind one sink."""

    def __init__(self, filters: list[str], limits: BacklogLimits | None = None, sink: ShapeTap | None = None) -> None:
        self.sink = sink or ShapeTap(CLOCK, LoopShare(CLOCK), limits)
        self.shapes: list[LiveShape] = []
        self.consumers: list[TableConsumer] = []
        for number, where in enumerate(filters):
            definition = ShapeDefinition(Source("table", "main", "public", "t"), where)
            shape = LiveShape(f"h{number}", definition, b"{}", ShapeLog())
            shape.log.seal_base()
            writer = RowWriter("public", "t", [c.name for c in COLUMNS], ["id"], ["open"])
            consumer = TableConsumer(shape, TABLE, compile_where(where, (), TYPES) if where else None, writer)
            self.sink.router.add(consumer)
            consumer.set_snapshot(NOTHING_SEEN)
            assert not consumer.publish_waiting(ENDLESS)
            shape.mark_ready()
            self.shapes.append(shape)
            self.consumers.append(consumer)

    def take(self, fragments: list[Fragment]) -> None:
        for fragment in fragments:
            self.sink.process_fragment(fragment)

    def finish(self) -> None:
        while self.sink.run_slice(ENDLESS):
            pass

    def outcome(self) -> list[Any]:
        return [shape.end_reason or list(shape.log.read(BASE_END).items) for shape in self.shapes]
