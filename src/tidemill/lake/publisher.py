"""Publisher of all tables of a cluster: one node at a time runs rounds, and any process publishes a table on demand.

    round    shards that changed ─► times (common per capture) ─► tables whose contents differ ─► publications
                                                                └─► tags for the other tables of their captures
    between  holds, expiry of snapshots and deletion of objects, also of tables that do not change

Invariant (isolation): an error of one table concerns that table only, and is reported under `lake:NAME`.

A round without changes costs three requests. The lease only decides which node tries: of two that publish a table at
once, one wins by the table's pointer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

import msgspec

from tidemill.base.errors import ConflictError
from tidemill.base.lsn import Lsn
from tidemill.base.runtime.tasks import error_sentence, is_fault, needs_operator
from tidemill.base.status.status import StatusTracker
from tidemill.consensus.api import Lease, read_all_changes
from tidemill.consensus.leader_election import LeaseRequest, run_while_leading
from tidemill.lake.common_time import common_sources, publication_times
from tidemill.lake.pointer import list_pointers
from tidemill.lake.publish.stored import LakeStores, Stored
from tidemill.lake.publish.table_publisher import TablePublisher, delete_dropped, delete_unknown
from tidemill.lake.vectors.part_columns import PartColumns
from tidemill.metastore.rows.catalogue import PipelineRow
from tidemill.shards.api import HistoryLostError
from tidemill.shards.handle import LogShard
from tidemill.shards.registry import list_created_shards, open_remap, open_shard, table_of_tombstones
from tidemill.shards.state.commands import Create
from tidemill.shards.state.state_machine import open_machine, shard_log_name

LEASE = "lake"
SWEEP_S = 300.0
"""Interval of the sweep of a table that was published in the meantime."""
BUDGET_MS = 120_000
"""Time beyond the interval after which a table whose publication is due counts as stuck."""
CONCURRENT_TABLES = 4
"""Tables published at a time. A publication mostly waits for the bucket."""
FAILURES_MAX = 50
"""Limit of the failing tables that are reported, since a report must not grow with them."""

ReadPipelines = Callable[[], Awaitable[Sequence[PipelineRow]]]


class RoundCounters(msgspec.Struct):
    """Counters since this process started."""

    rounds: int = 0
    publications: int = 0
    conflicts: int = 0
    deleted_objects: int = 0


class _Table(msgspec.Struct):
    """A table. `stale`: its state must be read again. `changed`: its contents may differ from the published ones.
    `swept_seq` is the version of its pointer at the last sweep."""

    publisher: TablePublisher
    stale: bool = False
    changed: bool = True
    swept_seq: int = -1
    swept_s: float = 0.0


class LakePublisher:
    """Publisher of all tables. `run` runs until it is cancelled, on the node that holds the lease."""

    def __init__(
        self, stores: LakeStores, read_pipelines: ReadPipelines, tracker: StatusTracker, *, holder: str = "lake"
    ) -> None:
        self._stores = stores
        self._read_pipelines = read_pipelines
        self._tracker = tracker
        self._holder = holder
        self._columns = PartColumns(stores.objects, cpu=stores.cpu)
        self._tables: dict[str, _Table] = {}
        """Table by the id of its shard."""
        self._token = ""
        self._dropped_checked: frozenset[str] | None = None
        self._failing: set[str] = set()
        self._failed: set[str] = set()
        """Names of reported tables, and of those that failed in this round."""
        self.counters = RoundCounters()

    @property
    def memory_bytes(self) -> int:
        """Bytes of what is cached of parts; at most `part_columns.CACHE_BYTES`."""
        return self._columns.memory_bytes

    def facts(self) -> dict[str, object]:
        facts = msgspec.structs.asdict(self.counters)
        return {**facts, "tables": len(self._tables), "failing": len(self._failing)}

    async def run(self) -> None:
        """Run rounds whenever this node holds the lease."""

        async def led(_: Lease) -> None:
            try:
                while True:
                    await self.round()
                    await asyncio.sleep(self._stores.settings.interval_s)
            finally:
                await self._forget()

        await run_while_leading(self._stores.consensus, LeaseRequest(LEASE, self._holder), led)

    async def _forget(self) -> None:
        """Close the handles and drop what is cached: another node continues, and reports from now on."""
        for table in self._tables.values():
            await table.publisher.shard.aclose()
        self._tables, self._token, self._dropped_checked, self._failing = {}, "", None, set()
        self._columns.clear()
        self._tracker.clear("lake:")

    # one round --------------------------------------------------------------------------------------
    async def round(self) -> None:
        """Publish every table that changed. Raises UnavailableError if the tables cannot be listed."""
        self._failed = set()
        await self._follow_shards()
        sources = common_sources(await self._read_pipelines())
        states = [table.publisher.shard.state for table in self._tables.values()]
        times = publication_times(states, sources)
        moving = set()
        for table in self._tables.values():
            name = table.publisher.shard.name
            if table.changed and name in times and await self._isolated(name, self._differs(table, times[name])):
                moving.add((sources.get(name), times[name]) if name in sources else name)
        slots = asyncio.Semaphore(CONCURRENT_TABLES)

        async def tend(table: _Table) -> None:
            name = table.publisher.shard.name
            due = name in times and (name in moving or (sources.get(name), times[name]) in moving)
            async with slots:
                if due:
                    await self._isolated(name, self._publish(table, times[name], sources.get(name, "")))
                elif name in times:
                    self._report(name, times[name], times[name])
                await self._isolated(name, self._expire_and_sweep(table))

        await asyncio.gather(*(tend(table) for table in self._tables.values()))
        for name in self._failing - self._failed:
            self._clear(name)
        self.counters.rounds += 1

    async def _follow_shards(self) -> None:
        """Open the handles of new tables, refresh those that changed, and close those that were dropped."""
        consensus = self._stores.consensus
        heads, self._token = await read_all_changes(consensus, "shard/", self._token)
        created = _published_tables(await list_created_shards(consensus))
        for shard_id in self._tables.keys() - created.keys():
            table = self._tables.pop(shard_id)
            self._clear(table.publisher.shard.name)
            self._tracker.remove(f"lake:{table.publisher.shard.name}")
            await table.publisher.shard.aclose()
        for shard_id, create in created.items():
            if shard_id not in self._tables:
                await self._isolated(create.name, self._open(create))
                continue
            table = self._tables[shard_id]
            table.stale |= shard_log_name(shard_id) in heads
            if table.stale:
                await self._isolated(create.name, self._refresh(table))
        await self._delete_dropped(frozenset(created))

    async def _open(self, create: Create) -> None:
        stores = self._stores
        machine = await open_machine(stores.consensus, stores.rand, create)
        shard = LogShard(machine, stores.objects, stores.clock, stores.rand, cache_bytes=0)
        self._tables[create.shard_id] = _Table(TablePublisher(stores, self._columns, shard))

    async def _refresh(self, table: _Table) -> None:
        await table.publisher.shard.frontiers()
        table.stale, table.changed = False, True

    async def _delete_dropped(self, created: frozenset[str]) -> None:
        """Delete what dropped tables published; their pointers are read again only after a table was dropped.

        The first round also deletes objects of tables that consensus does not know, as after a restore.
        """
        checked = self._dropped_checked
        if checked is not None and checked <= created:
            self._dropped_checked = created
            return
        pointers = await list_pointers(self._stores.consensus)
        # Read after the pointers: another process may have created a table and published it since.
        created |= _published_tables(await list_created_shards(self._stores.consensus)).keys()
        for shard_id, (pointer, seq) in pointers.items():
            if shard_id not in created and (not pointer.dropped or pointer.metadata):
                self.counters.deleted_objects += await delete_dropped(self._stores, shard_id, pointer, seq)
        if checked is None:
            self.counters.deleted_objects += await delete_unknown(self._stores, created | pointers.keys())
        self._dropped_checked = created

    async def _differs(self, table: _Table, time_ms: int) -> bool:
        if await table.publisher.differs(time_ms):
            return True
        table.changed = False
        return False

    async def _publish(self, table: _Table, time_ms: int, source: str) -> None:
        publisher = table.publisher
        state, name = publisher.shard.state, publisher.shard.name
        published = (await publisher.load()).pointer
        if time_ms < published.time_ms:
            return  # it was published on demand at a later time than its capture has in common
        self._report(name, published.time_ms, state.upper - 1)
        try:
            found = await publisher.publish(time_ms, await binding_summary(self._stores, source, time_ms))
        except (ConflictError, HistoryLostError):
            # Another process published it, or since passed the common time: the next round begins with newer states.
            self.counters.conflicts += 1
            await publisher.shard.frontiers()
            return
        table.changed = time_ms < state.upper - 1
        self.counters.publications += 1
        self._report(name, found.pointer.time_ms, found.pointer.time_ms)

    async def _expire_and_sweep(self, table: _Table) -> None:
        """Hold what is published, drop expired snapshots, and delete what none names any more."""
        publisher = table.publisher
        if (await publisher.load()).metadata.current is None:
            return
        await publisher.hold_published()
        await publisher.expire()
        now_s, seq = self._stores.clock.monotonic_s(), (await publisher.load()).seq
        if seq != table.swept_seq and now_s - table.swept_s >= SWEEP_S:
            table.swept_s = now_s
            self.counters.deleted_objects += await publisher.sweep()
            table.swept_seq = (await publisher.load()).seq

    # reports ----------------------------------------------------------------------------------------
    def _report(self, name: str, position: int, target: int) -> None:
        """Report the published time of a table, and the time up to which it can be published."""
        budget_ms = BUDGET_MS + int(self._stores.settings.interval_s * 1000)
        now_ms = self._stores.clock.now_ms()
        self._tracker.set(f"lake:{name}", position, target, now_ms=now_ms, budget_ms=budget_ms, unit="ms")

    async def _isolated(self, name: str, work: Awaitable[bool | None]) -> bool:
        """Do work on one table; report a failure of it. Return its result, False after a failure."""
        try:
            found = bool(await work)
        except BaseException as error:
            if not is_fault(error):
                raise
            self._failed.add(name)
            if name in self._failing or len(self._failing) < FAILURES_MAX:
                self._failing.add(name)
                self._tracker.fail(
                    f"lake:{name}",
                    error_sentence(error),
                    now_ms=self._stores.clock.now_ms(),
                    parked=needs_operator(error),
                )
            return False
        return found

    def _clear(self, name: str) -> None:
        if name in self._failing:
            self._failing.discard(name)
            self._tracker.clear_failure(f"lake:{name}")


def _published_tables(shards: Sequence[Create]) -> dict[str, Create]:
    """Return the tables that are published, by id: all but tombstones."""
    return {create.shard_id: create for create in shards if not table_of_tombstones(create.name)[0]}


async def binding_summary(stores: LakeStores, source: str, time_ms: int) -> Mapping[str, str]:
    """Return what is known of a time of a captured database: the LSN and the commit time that it covers."""
    if not source:
        return {}
    remap = await open_remap(stores.consensus, stores.clock, stores.rand, source)
    try:
        binding = await remap.at(time_ms)
    except HistoryLostError:
        return {}
    if binding is None:
        return {}
    found = {"tidemill.source": source, "tidemill.lsn": str(Lsn(binding.lsn)) if binding.lsn else ""}
    if binding.source_time_ms:
        found["tidemill.commit-time-ms"] = str(binding.source_time_ms)
    return {key: value for key, value in found.items() if value}


async def publish_now(
    stores: LakeStores,
    name: str,
    sources: Mapping[str, str],
    *,
    columns: PartColumns | None = None,
    evaluation: Callable[[], AbstractAsyncContextManager[object]] = nullcontext,
) -> Stored:
    """Publish the newest contents of one table, through `columns` if given. `evaluation` is entered only if they differ
    from the published ones, so that the table has to be evaluated.

    Raises MissingError (no such table), InvalidError (it cannot be published, or has no contents yet), and as
    `publication.publish`.
    """
    shard = await open_shard(stores.consensus, stores.objects, stores.clock, stores.rand, name)
    try:
        publisher = TablePublisher(stores, columns or PartColumns(stores.objects, cpu=stores.cpu), shard)
        return await _publish_newest(stores, publisher, sources.get(name, ""), evaluation)
    except ConflictError:
        # The other publication may be of an earlier time.
        return await _publish_newest(stores, publisher, sources.get(name, ""), evaluation)
    finally:
        await shard.aclose()


async def _publish_newest(
    stores: LakeStores,
    publisher: TablePublisher,
    source: str,
    evaluation: Callable[[], AbstractAsyncContextManager[object]],
) -> Stored:
    _, upper = await publisher.shard.frontiers()
    if not await publisher.differs(upper - 1):
        return await publisher.publish(upper - 1, await binding_summary(stores, source, upper - 1))
    async with evaluation():
        publisher.stored = None  # it may have waited: another process may have written or published the table
        _, upper = await publisher.shard.frontiers()
        return await publisher.publish(upper - 1, await binding_summary(stores, source, upper - 1))
