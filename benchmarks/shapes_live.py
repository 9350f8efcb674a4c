"""Benchmark of `shapes.py --live N`: N shapes `id = K` of one table on one node, restored from their file.

    restored    from the start of the stream until the last of them is followed: changes wait until then
    house       one turn of what the service does once a second, however quiet it is
    evaluated   changes of one row each through the shapes' sink, in their share of the loop, until logs have them
    durable     from then on until the file has them

One process, no network, no PostgreSQL: the catalogue's answer for the table is given, changes are handed to the tap.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

from support.shapes.consumer import TABLE, row
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.lsn import ChangePosition
from tidemill.base.runtime.memory_budget import resident_bytes
from tidemill.base.status.status import StatusTracker
from tidemill.capture.changes import Change, Fragment
from tidemill.capture.postgres.pg_snapshot import PgSnapshot
from tidemill.shapes.definition.definition import HandleMint, ShapeDefinition, Source
from tidemill.shapes.definition.planner import ShapeRequest
from tidemill.shapes.definition.table_columns import ColumnInfo, TableColumns
from tidemill.shapes.log.log import LogLimits
from tidemill.shapes.log.log_offset import BEFORE_ALL
from tidemill.shapes.log.saved_shape import SavedTableShape
from tidemill.shapes.log.sqlite_file import Flush, ShapeFile, ShapeWrite, StoredShape
from tidemill.shapes.service import ShapeService
from tidemill.shapes.settings import ShapeSettings
from tidemill.shapes.tables.backlog import BacklogLimits
from tidemill.shapes.tables.capture_tap import ShapeTap

MIB = 1 << 20
OWNER = "bench"
NAME = "main"
INFO = TableColumns(
    TABLE,
    (
        ColumnInfo("id", "int4", "b", 0, -1, True, True, True),
        ColumnInfo("name", "text", "b", 0, -1, False, False, True),
        ColumnInfo("open", "bool", "b", 0, -1, False, True, True),
    ),
)
FILL = 5_000
PER_TRANSACTION = 20
"""Transactions of as many rows, of as many shapes."""


class Stream:
    """Answers a tap as a session of the capture does."""

    def __init__(self, sink: ShapeTap) -> None:
        self.sink = sink
        self.confirmed = 0

    def report_flushed(self, consumer: str, position: ChangePosition) -> None:
        self.confirmed = max(self.confirmed, position.commit_lsn)

    async def store_tap_names(self) -> None:
        """Do nothing: the row already has the name."""


def fill(path: Path, count: int) -> None:
    """A file of `count` shapes, as an earlier life leaves it: one row each."""
    file = ShapeFile(path)
    file.open()
    mint = HandleMint(SystemClock(), Rand(5))
    schema = INFO.schema_json(())
    for first in range(1, count + 1, FILL):
        written = []
        for key in range(first, min(first + FILL, count + 1)):
            where = f"id = {key}"
            definition = ShapeDefinition(Source("table", NAME, "public", "t"), where)
            kept = SavedTableShape(ShapeRequest("t", where), definition, schema, TABLE, 1)
            base = b'{"key":"\\"public\\".\\"t\\"/\\"%d\\"","value":{"id":"%d","name":"n","open":"true"},"headers":{}}'
            rows = base % (key, key)
            saved = StoredShape(key, mint.mint(definition), kept.encode(), "1:1:@1", 1, (0, 0), len(rows), 0)
            written.append(ShapeWrite(key, [(0, rows)], [], 0, saved))
        file.flush(Flush(OWNER, False, written, ()))
    file.release()


def empty_service(settings: ShapeSettings) -> tuple[ShapeService, ShapeTap]:
    """A service that streams, and the tap of its one table, which is empty."""
    service = ShapeService(SystemClock(), Rand(7), StatusTracker(), settings)
    sink = service.add_database(NAME, "host=/nowhere", lambda: [TABLE])
    database = service._tables._databases[NAME]
    database.infos[TABLE] = INFO

    async def empty(*_: object) -> PgSnapshot:
        return PgSnapshot(1, 1, frozenset())

    database.source.load = empty
    sink.begin_session([])
    sink.set_carried_relations([TABLE.oid])
    sink.begin_stream(Stream(sink), 0)
    return service, sink


def fragment(number: int, count: int, rows: int) -> Fragment:
    lsn = 100_000 + 8 * number
    changes = tuple(
        Change(TABLE, "insert", ChangePosition(lsn, 2 * n), row(1 + (number * rows + n) * 7919 % count), None)
        for n in range(rows)
    )
    return Fragment(5 + number, lsn, 0, True, True, changes, changes[-1].position, (), 100 * rows)


async def measure(count: int, changes: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="shapes-live-") as directory:
        await asyncio.to_thread(fill, Path(directory) / f"{NAME}.db", count)
        before = resident_bytes()
        settings = ShapeSettings(
            max_shapes=count,
            memory_bytes=4 << 30,
            directory=Path(directory),
            limits=LogLimits(),
            backlog=BacklogLimits(size_bytes=1 << 30, age_s=1e9),
        )
        service = ShapeService(SystemClock(), Rand(7), StatusTracker(), settings)
        try:
            return {"before_mib": before / MIB, **await _measure(service, count, changes)}
        finally:
            await service.aclose()


async def _measure(service: ShapeService, count: int, changes: int) -> dict[str, float]:
    sink = service.add_database(NAME, "host=/nowhere", lambda: [TABLE])
    service._tables._databases[NAME].infos[TABLE] = INFO
    stream = Stream(sink)
    sink.begin_session([OWNER])
    sink.set_carried_relations([TABLE.oid])
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    sink.begin_stream(stream, 0)
    await until(lambda: not sink.restoring)
    restored_s, restored_cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    if len(service.shapes()) != count:
        raise SystemExit(f"DOES NOT HOLD: shapes={len(service.shapes())} expected={count}")
    resident = resident_bytes()
    await asyncio.sleep(1.5)
    began_s = time.perf_counter()
    service._housekeeping.run_once()
    house_s = time.perf_counter() - began_s
    found = {PER_TRANSACTION: 0.0, 1: 0.0}
    cpu_us = {}
    number = 0
    durable_s = 0.0
    for rows in found:
        fragments = [fragment(number + n, count, rows) for n in range(changes // rows)]
        number += len(fragments)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        for n, each in enumerate(fragments):
            sink.process_fragment(each)
            if n % 64 == 0:
                await asyncio.sleep(0)
        await until(lambda: sink.evaluated_position() >= sink.taken)
        found[rows] = changes // rows * rows / (time.perf_counter() - began_s)
        cpu_us[rows] = (time.process_time() - began_cpu_s) / (changes // rows * rows) * 1e6
        began_s = time.perf_counter()
        await until(lambda: stream.confirmed >= sink.taken)
        durable_s = time.perf_counter() - began_s
    items = 0
    for shape in service._live.all():
        offset = BEFORE_ALL
        while True:
            chunk = await shape.log.fetch(offset)
            items += len(chunk.items)
            if chunk.complete:
                break
            offset = chunk.end
    expected = count + sum(changes // rows * rows for rows in found)
    if items != expected:
        raise SystemExit(f"DOES NOT HOLD: items={items} expected={expected}")
    return {
        "restored_s": restored_s,
        "restored_cpu_s": restored_cpu_s,
        "resident_mib": resident / MIB,
        "resident_after_mib": resident_bytes() / MIB,
        "counted_mib": service.budget.used_bytes / MIB,
        "house_ms": house_s * 1000,
        "cpu_us": cpu_us[1],
        "cpu_of_many_us": cpu_us[PER_TRANSACTION],
        "changes_s": found[1],
        "changes_of_many_s": found[PER_TRANSACTION],
        "durable_s": durable_s,
        "items_verified": items,
    }


async def until(condition, deadline_s: float = 600.0) -> None:
    over_s = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > over_s:
            raise SystemExit("not in time")
        await asyncio.sleep(0.002)
