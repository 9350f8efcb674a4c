"""Published tables, as the catalogue shows them.

A table that was never published is published when it is loaded. So is one whose last publication is old: its files may
be deleted if it could not be published since (`table_publisher.hold_objects`), and the error says why. A publication
without a change writes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from weakref import WeakValueDictionary

import msgspec

from tidemill.base.errors import ClosedError, ConflictError, MissingError, UnavailableError, UnknownOutcomeError
from tidemill.lake.catalogue import PublishedTable
from tidemill.lake.common_time import common_sources
from tidemill.lake.pointer import load_table
from tidemill.lake.publish.stored import LakeStores
from tidemill.lake.publish.table_publisher import hold_period_ms
from tidemill.lake.publisher import ReadPipelines, publish_now
from tidemill.lake.vectors.part_columns import PartColumns
from tidemill.shards.api import HistoryLostError
from tidemill.shards.registry import list_created_shards, shard_exists, table_of_tombstones

HEALING = (UnavailableError, UnknownOutcomeError, ConflictError, ClosedError, HistoryLostError)
"""Errors that say nothing of the next try."""


class _Outcome(msgspec.Struct, frozen=True):
    """Outcome of a publication on request. `error`: None after a success."""

    at_s: float
    error: Exception | None


class LakeTables:
    """Implementation of `catalogue.routes.PublishedTables`.

    Requests publish one table once per `lake.interval_s`, also if its evaluation fails: many readers of a large table
    that was never published evaluate it once. Requests for several tables evaluate one at a time, in the memory of one
    evaluation. A table without a change is not evaluated, and so waits for none. Errors that heal by themselves are not
    repeated.
    """

    def __init__(self, stores: LakeStores, read_pipelines: ReadPipelines) -> None:
        self._stores = stores
        self._read_pipelines = read_pipelines
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Lock by table, as long as a request holds it or waits for it."""
        self._evaluating = asyncio.Lock()
        self._columns = PartColumns(stores.objects, cpu=stores.cpu)
        self._outcomes: dict[str, _Outcome] = {}
        """Publications on request in the last interval, by table."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of what is cached of parts during an evaluation; at most `part_columns.CACHE_BYTES`."""
        return self._columns.memory_bytes

    async def list_names(self) -> Sequence[str]:
        created = await list_created_shards(self._stores.consensus)
        return [create.name for create in created if not table_of_tombstones(create.name)[0]]

    async def load(self, table: str) -> PublishedTable:
        stores = self._stores
        try:
            found = await load_table(stores.consensus, stores.objects, table)
        except MissingError:
            if not await shard_exists(stores.consensus, table):
                raise
            found = None
        if found is None or stores.clock.now_ms() - found.pointer.published_ms > hold_period_ms(stores.settings):
            async with self._turns.setdefault(table, asyncio.Lock()):
                await self._publish_unless_recent(table, is_published=found is not None)
            found = await load_table(stores.consensus, stores.objects, table)
        return PublishedTable(found.location, found.metadata)

    async def _publish_unless_recent(self, table: str, *, is_published: bool) -> None:
        """Publish the table, or repeat the error of the last interval. A table of this name that was published then,
        and is not any more, was created again."""
        clock, is_evaluated = self._stores.clock, False

        @asynccontextmanager
        async def evaluation() -> AsyncIterator[None]:
            nonlocal is_evaluated
            async with self._evaluating:
                is_evaluated = True
                try:
                    yield
                finally:
                    self._columns.clear()

        oldest_s = clock.monotonic_s() - self._stores.settings.interval_s
        self._outcomes = {name: found for name, found in self._outcomes.items() if found.at_s > oldest_s}
        recent = self._outcomes.get(table)
        if recent is not None and recent.error is not None:
            raise _copy_error(recent.error)
        if recent is not None and (is_published or await self._is_published(table)):
            return
        try:
            sources = common_sources(await self._read_pipelines())
            await publish_now(self._stores, table, sources, columns=self._columns, evaluation=evaluation)
        except Exception as error:
            if is_evaluated and not isinstance(error, HEALING):
                self._outcomes[table] = _Outcome(clock.monotonic_s(), _copy_error(error))
            raise
        self._outcomes[table] = _Outcome(clock.monotonic_s(), None)

    async def _is_published(self, table: str) -> bool:
        with suppress(MissingError):
            await load_table(self._stores.consensus, self._stores.objects, table)
            return True
        return False


def _copy_error(error: Exception) -> Exception:
    """Return an equal error without a traceback, whose frames would keep the memory of an evaluation."""
    found = type(error).__new__(type(error), *error.args)
    found.__dict__.update(error.__dict__)
    return found
