"""Stored shapes: files with faults, and what a store has after a restart."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

from support.shapes.consumer import TABLE
from tidemill.base.clock import ManualClock, Rand
from tidemill.base.errors import UnavailableError
from tidemill.base.status.status import StatusTracker
from tidemill.shapes.definition.definition import ShapeDefinition, Source
from tidemill.shapes.definition.planner import ShapeRequest
from tidemill.shapes.definition.table_columns import ColumnInfo, TableColumns
from tidemill.shapes.log.chunks import split_chunk
from tidemill.shapes.log.disk_log import DiskLog, LogRoom
from tidemill.shapes.log.log import LogLimits
from tidemill.shapes.log.log_offset import BEFORE_ALL, LogOffset
from tidemill.shapes.log.saved_shape import SavedTableShape
from tidemill.shapes.log.sqlite_file import FileThreads, Flush, ShapeFile, ShapeWrite, StoredShape
from tidemill.shapes.log.store import ShapeStore
from tidemill.shapes.memory_budget import Budget

INFO = TableColumns(
    TABLE,
    (
        ColumnInfo("id", "int4", "b", 0, -1, True, True, True),
        ColumnInfo("name", "text", "b", 0, -1, False, False, True),
        ColumnInfo("open", "bool", "b", 0, -1, False, True, True),
    ),
)

UNREADABLE, UNCOMPILABLE, OTHERWISE = 7, 120, 249

WITHOUT_LSN = {40: "", 41: "1:1:"}
"""Snapshots as earlier releases stored them, without an LSN."""


def written(key: int) -> ShapeWrite:
    where = "nope = 1" if key == UNCOMPILABLE else f"id = {key}"
    schema = b"{}" if key == OTHERWISE else INFO.schema_json(())
    definition = ShapeDefinition(Source("table", "main", "public", "t"), where)
    kept = SavedTableShape(ShapeRequest("t", where), definition, schema, TABLE, 1).encode()
    record = b"\xc1" if key == UNREADABLE else kept
    snapshot = WITHOUT_LSN.get(key, "1:1:@1")
    return ShapeWrite(key, [(0, b"{}")], [], 0, StoredShape(key, f"h{key}", record, snapshot, 1, (0, 0), 2, 0))


LIMITS = LogLimits(chunk_bytes=40)


class Inline(Executor):
    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class FaultyFile(ShapeFile):
    """A file whose next flushes fail as `faults` says: "lost" without effect, "untold" after it; both report a
    failure.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.faults: list[str] = []

    def flush(self, flush: Flush) -> None:
        fault = self.faults.pop(0) if self.faults else ""
        if fault != "lost":
            super().flush(flush)
        if fault:
            raise UnavailableError(f"the disk: {fault}")


def store_of(
    path: Path, clock: ManualClock, seed: int = 1, limits: LogLimits = LIMITS
) -> tuple[ShapeStore, FaultyFile]:
    file = FaultyFile(path)
    threads, room = FileThreads(Inline(), Inline()), LogRoom(limits, Budget(1 << 20), Budget(1 << 20))
    store = ShapeStore(file, threads, clock, Rand(seed), StatusTracker(), "shapes:db/disk", room)
    return store, file


async def whole(log: DiskLog, offset: LogOffset = BEFORE_ALL) -> list[bytes]:
    found: list[bytes] = []
    while True:
        chunk = await log.fetch(offset)
        found += split_chunk(chunk.items)
        if chunk.complete:
            return found
        assert chunk.end > offset
        offset = chunk.end


def recorded(store: ShapeStore, *rows: bytes) -> DiskLog:
    log = store.create_log()
    log.add_base(rows)
    log.seal_base()
    store.logs.save_record(log, f"h{log.key}", b"record", "1:2:")
    return log
