"""Reader of the console: reads the statuses of its node and the stores of the cluster, each read with a limit.

Owns no state but answers of the last seconds (`shared_answer`). Reads of table contents wait for each other: one uses a
core at a time, for any number of open pages.
"""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

import orjson

from tidemill.base.clock import Clock, Rand
from tidemill.base.config.config import Config
from tidemill.base.errors import MissingError, UnavailableError
from tidemill.base.status.freshness import SHARD, resolve_status_name, verdict_of
from tidemill.base.status.status import DerivedStatus, StatusReport, derive_statuses, severity_of
from tidemill.consensus.api import Consensus
from tidemill.console.captured_names import captured_table_stage, maintain_line, maintaining_tables, tables_of_any_name
from tidemill.console.dead_letter_read import LettersRead, read_letters
from tidemill.console.row_sample import RowSample, sample_rows
from tidemill.console.shared_answer import SharedAnswers
from tidemill.console.views.captures import captured_table_row
from tidemill.console.views.flow import Catalogued, table_places, unreported_topics
from tidemill.console.views.overview import overview
from tidemill.console.views.stages import latency_summaries, merge_latencies, verdict_row
from tidemill.console.views.tables import table_description, table_row
from tidemill.console.written_topics import WrittenTopics
from tidemill.metastore.catalogue import Catalogue, PipelineRow, TopicRow
from tidemill.objects.store import ObjectStore
from tidemill.shards.handle import LogShard
from tidemill.shards.registry import open_shard, read_shard, read_shards

Value = TypeVar("Value")

READS_WAITING_MAX = 8
"""Reads of table contents that wait for the one in progress; further ones are refused."""
TABLE_VALID_S = 3.0
"""Validity of the description of one table, which reads its log: the interval in which a page asks for it."""
NO_TABLE = b"null"
LETTERS_EXAMINED_MAX = 10_000
LETTERS_BYTES_MAX = 32 << 20


class ConsoleStores(Protocol):
    """Stores of a node that has started."""

    @property
    def consensus(self) -> Consensus: ...
    @property
    def objects(self) -> ObjectStore: ...
    @property
    def catalogue(self) -> Catalogue: ...


class ConsoleNode(Protocol):
    """The node whose console this is. `stores` is None until the catalogue can be read."""

    config: Config
    clock: Clock
    rand: Rand

    @property
    def stores(self) -> ConsoleStores | None: ...
    async def read_reports(self) -> Sequence[StatusReport]: ...
    def not_ready_reason(self) -> str: ...
    def current_problems(self) -> Sequence[str]: ...


class ClusterReader:
    """Reader of one node. Methods raise UnavailableError while the node starts or a store does not answer."""

    def __init__(self, node: ConsoleNode) -> None:
        self._node = node
        self._reading = asyncio.Lock()
        self._written = WrittenTopics()
        self._tables = SharedAnswers(self._describe_table, node.clock, TABLE_VALID_S)
        self._waiting = 0

    async def overview(self) -> dict[str, Any]:
        """Return the overview of the cluster, with what this node reports about itself."""
        node = self._node
        reports = await node.read_reports()
        catalogued, tables = Catalogued(), []
        if node.stores is not None:
            catalogue = node.stores.catalogue
            tables = list(await catalogue.all_tables(fresh=False))
            topics = await catalogue.list(TopicRow, fresh=False)
            streams = {topic.name: topic for topic in topics if topic.kind == "stream"}
            unwritten, unused = await self._idle_topics(reports, streams)
            catalogued = Catalogued(
                {name: topic.partitions for name, topic in streams.items()},
                dict(Counter(table.capture for table in tables)),
                await catalogue.list(PipelineRow, fresh=False),
                unwritten,
                unused,
            )
        # On a thread: a cluster of a thousand tables takes some ten milliseconds.
        found = await asyncio.to_thread(overview, reports, catalogued, tables, node.clock.now_ms())
        return found | {
            "node": node.config.node.name,
            "rows_need_secret": bool(node.config.shapes.secret),
            "lake": node.config.lake.enabled,
            "not_ready": node.not_ready_reason(),
            "notices": list(node.current_problems()),
        }

    async def _idle_topics(
        self, reports: Sequence[StatusReport], streams: Mapping[str, TopicRow]
    ) -> tuple[set[str], set[str]]:
        """Return the topics without any record, and the topics with records but without a client since the nodes
        started."""
        unreported = set(unreported_topics(reports, streams, self._node.clock.now_ms()))
        if not unreported:
            return set(), set()
        written = await self._written.update(self._stores().consensus)
        unwritten = {name for name in unreported if streams[name].topic_id not in written}
        return unwritten, unreported - unwritten

    async def places(self) -> list[dict[str, Any]]:
        """Return every table with its input, its pipeline and its delay."""
        stores = self._stores()
        marks = await self._marks()
        return table_places(marks, await stores.catalogue.list(PipelineRow, fresh=False))

    async def place(self, name: str) -> dict[str, Any]:
        """Return what the page shows about one table. A part that does not exist (yet) is None.

        `captured` has the captured tables of this name, and `maintained_as` the tables that pipelines make of them;
        `maintain` is the line of a pipeline that would make one.
        """
        stores, marks = self._stores(), await self._marks()
        pipelines = await stores.catalogue.list(PipelineRow, fresh=False)
        captured = tables_of_any_name(await stores.catalogue.all_tables(fresh=False), name)
        table = orjson.Fragment(await self._tables.body(name))
        place = table_places(marks, pipelines, name)
        try:
            why = await self._why(marks, f"{SHARD}{name}" if place else name)
        except MissingError as error:
            why = {"note": str(error)}
        return {
            "place": place[0] if place else None,
            "table": table,
            "why": why if "chain" in why else None,
            "note": why.get("note", ""),
            "captured": [captured_table_row(row) for row in captured],
            "maintained_as": sorted({table for row in captured for table in maintaining_tables(row, pipelines)}),
            "maintain": maintain_line(captured[0]) if captured else "",
        }

    async def why(self, name: str) -> dict[str, object]:
        """Return `why --json`. Raises MissingError."""
        return await self._why(await self._marks(), name)

    async def _why(self, marks: Mapping[str, DerivedStatus], name: str) -> dict[str, object]:
        if not marks:
            raise MissingError("no process is reporting.", fix="Start one: tidemill up.")
        note = ""
        try:
            start = resolve_status_name(marks, name) if name else max(marks, key=lambda n: severity_of(marks[n]))
        except KeyError:
            catalogue = self._stores().catalogue
            tables = await catalogue.all_tables(fresh=False)
            pipelines = await catalogue.list(PipelineRow, fresh=False)
            start, note = captured_table_stage(marks, tables, pipelines, name)
        found = verdict_of(marks, start)
        return verdict_row(found, found.exit_code, note)

    async def captured_tables(self, capture: str) -> list[dict[str, object]]:
        """Return `capture list --json`."""
        tables = await self._stores().catalogue.all_tables(fresh=False)
        return [captured_table_row(row) for row in tables if capture in ("", row.capture)]

    async def tables(self) -> list[dict[str, Any]]:
        """Return `table list --json`. Reads the log of every table."""
        return [table_row(state) for state in await read_shards(self._stores().consensus)]

    async def table(self, name: str) -> bytes:
        """Return `table describe --json`. Raises MissingError."""
        body = await self._tables.body(name)
        if body == NO_TABLE:
            raise MissingError(f"no such table: table={name}.", fix="See /api/tables.")
        return body

    async def _describe_table(self, name: str) -> dict[str, Any] | None:
        state = await read_shard(self._stores().consensus, name)
        return None if state is None else table_description(state, self._node.clock.now_ms())

    async def latency(self) -> dict[str, Any]:
        """Return `status --latency --json`."""
        return latency_summaries(merge_latencies(await self._node.read_reports()))

    async def rows(self, table: str, as_of_ms: int | None, limit: int) -> RowSample:
        """Return some rows of a table. Raises MissingError, and the errors of `sample_rows`."""
        async with self._read_table(table) as shard:
            return await sample_rows(shard, self._stores().objects, as_of_ms, limit)

    async def dead_letters(self, table: str, limit: int) -> LettersRead:
        """Return the newest dead letters in the table of one pipeline. Raises MissingError."""
        rows = await self._stores().catalogue.list(PipelineRow, fresh=False)
        if not any(table == row.dead_letters for row in rows):
            raise MissingError(f"no pipeline has these dead letters: table={table}.", fix="See /api/overview.")
        try:
            async with self._read_table(table) as shard:
                return await read_letters(shard, limit, LETTERS_EXAMINED_MAX, LETTERS_BYTES_MAX)
        except MissingError:
            return LettersRead(0, [], 0, [])  # the driver has not run yet

    def may_read_rows(self, secret: str) -> bool:
        """Return whether a request with this secret may read rows, as for shapes (`shapes.secret`)."""
        wanted = self._node.config.shapes.secret
        return not wanted or hmac.compare_digest(secret.encode("utf-8", "replace"), wanted.encode())

    def _stores(self) -> ConsoleStores:
        stores = self._node.stores
        if stores is None:
            raise UnavailableError(self._node.not_ready_reason() or "the node is starting.")
        return stores

    async def _marks(self) -> dict[str, DerivedStatus]:
        return derive_statuses(await self._node.read_reports(), self._node.clock.now_ms())

    @asynccontextmanager
    async def _read_table(self, name: str) -> AsyncIterator[LogShard]:
        """Open a table for one read at a time. Raises MissingError, and UnavailableError if too many wait."""
        if self._waiting >= READS_WAITING_MAX:
            raise UnavailableError("too many reads of tables wait on this node.", fix="Try again in a second.")
        self._waiting += 1
        try:
            async with self._reading:
                stores, node = self._stores(), self._node
                shard = await open_shard(
                    stores.consensus, stores.objects, node.clock, node.rand, name, cpu=_run_on_thread
                )
                try:
                    yield shard
                finally:
                    await shard.aclose()
        finally:
            self._waiting -= 1


async def _run_on_thread(work: Callable[[], Value]) -> Value:
    return await asyncio.to_thread(work)
