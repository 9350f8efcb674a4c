"""A console over HTTP: a node that only reports, with stores in memory, one real table, and shapes of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import pyarrow as pa

from support.console import reports as made
from support.waiting import DEADLINE_S
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.config.config import Config, parse
from tidemill.base.errors import UnavailableError
from tidemill.base.status.status import StatusReport, StatusTracker
from tidemill.consensus.memory import MemoryConsensus
from tidemill.console.app import console_routes
from tidemill.metastore.rows.captures import CaptureTableRow
from tidemill.metastore.rows.catalogue import PipelineRow, TopicRow
from tidemill.node.http.server import HttpServer, build_application
from tidemill.objects.memory import MemoryObjects
from tidemill.shapes import ShapeService, shape_routes
from tidemill.shards.api import DIFF, TIME, Column, ShardSchema
from tidemill.shards.handle import LogShard
from tidemill.shards.registry import open_shard
from tidemill.spark.decode.dead_letter_rows import DEAD_LETTERS

ORDERS = ShardSchema((Column("id", "int64"), Column("status", "string"), Column("total", "decimal(12,2)")), ("id",))


class Rows(msgspec.Struct):
    """Rows of a catalogue."""

    pipelines: Sequence[PipelineRow] = ()
    topics: Sequence[TopicRow] = ()
    captured: Sequence[CaptureTableRow] = ()

    async def all_tables(self, *, fresh: bool = True) -> Sequence[CaptureTableRow]:
        return self.captured

    async def list(self, kind: type, *, fresh: bool = True) -> Sequence[Any]:
        return self.pipelines if kind is PipelineRow else self.topics


class Stores(msgspec.Struct):
    consensus: MemoryConsensus
    objects: MemoryObjects
    catalogue: Any


class ReportingNode:
    """The node of a console. `reports(now_ms)` are those on the status board; `silent` makes consensus fail."""

    def __init__(self, reports: Callable[[int], list[StatusReport]], rows: Rows, sections: dict[str, Any]) -> None:
        self.clock, self.rand = SystemClock(), Rand(3)
        self.config: Config = parse({"node": {"name": "harbour"}, **sections}, origin="")
        self.reports = reports
        self.silent = False
        self.reads = 0
        self.stores: Any = Stores(MemoryConsensus(self.clock), MemoryObjects(self.clock), rows)

    async def read_reports(self) -> Sequence[StatusReport]:
        self.reads += 1
        if self.silent:
            raise UnavailableError("consensus does not answer: waited_s=2.")
        return self.reports(self.clock.now_ms())

    def not_ready_reason(self) -> str:
        return ""

    def current_problems(self) -> Sequence[str]:
        return []


def shop_rows() -> Rows:
    return Rows(made.pipelines(), made.topics(), made.captured_tables())


class Console:
    """A served console. `call` runs a coroutine on its loop."""

    def __init__(self, node: ReportingNode, loop: asyncio.AbstractEventLoop) -> None:
        self.node = node
        self.loop = loop
        self.url = ""
        self.served = 0
        """Requests so far."""

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(DEADLINE_S)

    async def serve(self, port: int = 0) -> None:
        node = self.node
        service = ShapeService(node.clock, node.rand, StatusTracker())
        service.add_shards(lambda name: self.table(name))
        app = build_application([*shape_routes(service), *console_routes(node)])

        async def counted(scope: Any, receive: Any, send: Any) -> None:
            self.served += 1
            await app(scope, receive, send)

        self.server = HttpServer(counted, port=port, on_failure=lambda *_: None)
        self.service = service
        await self.server.start()
        self.url = self.server.url

    async def close(self) -> None:
        await self.service.aclose()
        await self.server.aclose()

    async def table(self, name: str, schema: ShardSchema | None = None) -> LogShard:
        node = self.node
        return await open_shard(node.stores.consensus, node.stores.objects, node.clock, node.rand, name, schema)

    async def append(self, name: str, schema: ShardSchema, rows: list[dict[str, Any]], diff: int = 1) -> int:
        """Append rows at the current time; return it."""
        shard = await self.table(name, schema)
        _, lower = await shard.frontiers()
        at = max(self.node.clock.now_ms(), lower)
        from tidemill.shards.parts.schema import update_schema

        columns = {name: [row.get(name) for row in rows] for name in schema_names(schema)}
        table = pa.table({**columns, TIME: [at] * len(rows), DIFF: [diff] * len(rows)}, schema=update_schema(schema))
        await shard.compare_and_append(lower, at + 1, [await shard.write_part(table)] if rows else [], "")
        await shard.aclose()
        return at

    async def append_orders(self, first: int, count: int, name: str = "orders") -> int:
        from decimal import Decimal

        status = ("open", "paid", None)
        rows = [
            {"id": n, "status": status[n % 3], "total": Decimal(n * 125) / 100} for n in range(first, first + count)
        ]
        return await self.append(name, ORDERS, rows)

    async def append_letters(self, count: int) -> int:
        from datetime import UTC, datetime

        at = datetime.now(UTC)
        common = {"topic": "clicks", "at": at, "table": "", "key": "", "bytes": b'{"click_id": broken'}
        reasons = ("no id", "not JSON: character 13", "not JSON: character 14")
        rows = [
            common | {"partition": n % 4, "offset": 100 + n, "last_offset": 100 + n, "reason": reasons[n % 3]}
            for n in range(count)
        ]
        return await self.append("shop.dead_letters", DEAD_LETTERS, rows)


def schema_names(schema: ShardSchema) -> list[str]:
    return [column.name for column in schema.columns]


async def end_tasks() -> None:
    """End what still runs on this loop, so that nothing outlives it."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=DEADLINE_S)
    await asyncio.get_running_loop().shutdown_default_executor()


@contextmanager
def console(
    reports: Callable[[int], list[StatusReport]] = made.shop, rows: Rows | None = None, **sections: Any
) -> Iterator[Console]:
    """Serve a console on a separate thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    served = Console(ReportingNode(reports, rows or shop_rows(), sections), loop)
    try:
        served.call(served.serve())
        yield served
    finally:
        served.call(served.close())
        served.call(end_tasks())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
