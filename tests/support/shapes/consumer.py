"""A consumer of changes of one table, and the rows that it is given."""

from __future__ import annotations

import json
from typing import Any

from tidemill.base.clock import SystemClock
from tidemill.base.lsn import ChangePosition
from tidemill.capture.changes import Change, Column, Fragment, Op, Relation
from tidemill.capture.postgres.pg_snapshot import PgSnapshot
from tidemill.shapes.definition.definition import Replica, ShapeDefinition, Source
from tidemill.shapes.live_shape import LiveShape
from tidemill.shapes.log.log import LogLimits, ShapeLog
from tidemill.shapes.log.log_offset import BASE_END
from tidemill.shapes.log.row_writer import RowWriter
from tidemill.shapes.loop_share import LoopShare, Turn
from tidemill.shapes.tables.capture_tap import ShapeTap
from tidemill.shapes.tables.table_consumer import TableConsumer
from tidemill.shapes.where import Type, compile_where

COLUMNS = (
    Column("id", 23, -1, "integer", 0, True),
    Column("name", 25, -1, "text", -1),
    Column("open", 16, -1, "boolean", -1),
)

TABLE = Relation(7, "public", "t", COLUMNS)

OTHER = Relation(8, "public", "u", COLUMNS)

CLOCK = SystemClock()

ENDLESS = Turn(CLOCK, float("inf"))

NOTHING_SEEN = PgSnapshot(1, 1, frozenset())


def row(key: int, name: str | None = "n", is_open: bool = True) -> dict[str, str | None]:
    return {"id": str(key), "name": name, "open": "t" if is_open else "f"}


class Bench:
    """One shape behind one sink; `commit` delivers a transaction in fragments of the given sizes, evaluated
    immediately.
    """

    def __init__(
        self,
        where: str = "",
        replica: Replica = "default",
        open_now: bool = True,
        log_bytes: int = 1 << 20,
        asks: bool = False,
    ) -> None:
        self.sink = ShapeTap(CLOCK, LoopShare(CLOCK))
        definition = ShapeDefinition(Source("table", "main", "public", "t"), where, replica=replica)
        self.shape = LiveShape("h", definition, b"{}", ShapeLog(LogLimits(log_bytes=log_bytes)))
        self.shape.log.seal_base()
        types = {"id": Type("int4"), "name": Type("text"), "open": Type("bool")}
        compiled = compile_where(where, (), types) if where else None
        writer = RowWriter("public", "t", [c.name for c in COLUMNS], ["id"], ["open"], replica)
        self.consumer = TableConsumer(self.shape, TABLE, compiled, writer, asks=asks)
        self.sink.router.add(self.consumer)
        if open_now:
            self.open(NOTHING_SEEN)
        self._lsn = 1000

    def open(self, snapshot: PgSnapshot) -> None:
        self.consumer.set_snapshot(snapshot)
        while self.consumer.publish_waiting(ENDLESS):
            pass
        self.shape.mark_ready()

    def take(self, fragment: Fragment) -> None:
        self.sink.process_fragment(fragment)
        while self.sink.run_slice(ENDLESS):
            pass

    def answer(self, *verdicts: bool) -> None:
        """Answer the pending question as PostgreSQL does for its rows."""
        assert self.consumer.question is not None
        self.consumer.resume_with_verdicts(verdicts)
        self.sink.turns.resume(self.consumer)
        while self.sink.run_slice(ENDLESS):
            pass

    def fragments(self, xid: int, *changes: tuple[Any, ...], size: int = 100, lsn: int = 0) -> list[Fragment]:
        """Changes are (op, old, new[, relation])."""
        self._lsn = lsn or self._lsn + 8
        built = []
        for number, (op, old, new, *relation) in enumerate(changes):
            position = ChangePosition(self._lsn, 2 * number)
            operation: Op = op
            built.append(Change(relation[0] if relation else TABLE, operation, position, new, old))
        cuts = [built[i : i + size] for i in range(0, len(built), size)] or [[]]
        out = []
        for number, cut in enumerate(cuts):
            last = cut[-1].position if cut else ChangePosition(self._lsn, 0)
            begins, commits = number == 0, number == len(cuts) - 1
            out.append(Fragment(xid, self._lsn, 0, begins, commits, tuple(cut), last))
        return out

    def commit(self, xid: int, *changes: tuple[Any, ...], size: int = 100) -> None:
        for fragment in self.fragments(xid, *changes, size=size):
            self.take(fragment)

    @property
    def items(self) -> list[dict[str, Any]]:
        return [json.loads(item) for item in self.shape.log.read(BASE_END).items]

    @property
    def operations(self) -> list[str]:
        return [f"{item['headers']['operation']} {item['value']['id']}" for item in self.items]
