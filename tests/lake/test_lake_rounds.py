"""Rounds of the publisher of all tables: common times, isolation, what an idle round costs, dropped tables."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.lake.world import START_MS, LakeWorld
from support.shards.world import SCHEMA, append
from support.waiting import DEADLINE_S, until
from tidemill.base.clock import Clock
from tidemill.base.errors import MissingError, UnavailableError
from tidemill.base.status.status import StatusTracker
from tidemill.consensus.api import Versioned
from tidemill.consensus.memory import MemoryConsensus, MemoryState
from tidemill.lake.common_time import publication_times
from tidemill.lake.pointer import list_pointers, load_table
from tidemill.lake.publish.table_publisher import hold_period_ms
from tidemill.lake.published import LakeTables
from tidemill.lake.publisher import LakePublisher
from tidemill.lake.settings import PREFIX
from tidemill.metastore.rows.catalogue import PipelineRow
from tidemill.objects.store import ObjectStore
from tidemill.shards.api import Binding, Column, HistoryLostError
from tidemill.shards.handle import LogShard
from tidemill.shards.parts.schema_evolution import SchemaChanges
from tidemill.shards.registry import drop_shard, list_created_shards, open_remap, tombstones_name
from tidemill.shards.state.commands import Create
from tidemill.shards.state.state import ShardState

T = START_MS
PIPELINE = PipelineRow("p", {"a": "capture:shop:public.a", "b": "capture:shop:public.b", "c": "topic:c"})


class CountingConsensus(MemoryConsensus):
    """`peer` runs between two requests of a publisher: before it reads the pointers."""

    def __init__(self, clock: Clock, state: MemoryState) -> None:
        super().__init__(clock, state)
        self.requests = 0
        self.peer: Callable[[], Awaitable[object]] | None = None

    async def scan(self, prefix: str) -> list[tuple[str, Versioned]]:
        if prefix == PREFIX and self.peer is not None:
            peer, self.peer = self.peer, None
            await peer()
        return await super().scan(prefix)

    async def _submit(self, op: Any) -> Any:
        self.requests += 1
        return await super()._submit(op)


class Lake(LakeWorld):
    """A publisher of all tables. `tracker` has its reports."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.counting = CountingConsensus(self.clock, self.durable)
        self.tracker = StatusTracker()
        self.publisher_of_all = self.another()

    def consensus(self) -> MemoryConsensus:
        return self.counting if hasattr(self, "counting") else super().consensus()

    def another(self) -> LakePublisher:
        return LakePublisher(self.stores(), self.pipelines, self.tracker)

    async def pipelines(self) -> Sequence[PipelineRow]:
        return [PIPELINE]

    async def filled(self, name: str, upper: int = T + 10) -> LogShard:
        shard = await self.table(name, SCHEMA)
        await append(shard, 0, upper, [(k, f"{name}{k}", upper - 1, 1) for k in range(2000)])
        return shard

    async def round(self) -> None:
        self.clock.advance(30_000)
        await self.publisher_of_all.round()

    async def published(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((await load_table(self.counting, self.objects, name)).metadata)
        return found

    async def tags(self, name: str) -> set[str]:
        return {tag for tag in (await self.published(name))["refs"] if tag != "main"}


async def test_tables_of_a_capture_are_published_at_one_time_and_others_at_theirs(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    a, b, c = [await lake.filled(name) for name in "abc"]
    remap = await open_remap(lake.counting, lake.clock, lake.rand, "capture/shop")
    await remap.mint(Binding(T + 5, {"x": (1,)}, 0x1_0000_0010, T + 4))
    await lake.round()
    assert [await lake.tags(name) for name in "abc"] == [{f"t{T + 9}"}] * 3
    summary = (await lake.published("a"))["snapshots"][0]["summary"]
    assert (summary["tidemill.time"], summary["tidemill.lsn"]) == (str(T + 9), "1/10")
    assert summary["tidemill.commit-time-ms"] == str(T + 4)
    assert "tidemill.lsn" not in (await lake.published("c"))["snapshots"][0]["summary"]
    await append(a, T + 10, T + 30, [(1, "a1", T + 20, -1)])
    await append(b, T + 10, T + 25, [])
    await append(c, T + 10, T + 40, [(1, "c1", T + 20, -1)])
    await lake.round()
    assert f"t{T + 24}" in await lake.tags("a") & await lake.tags("b"), "the least upper of the capture"
    assert len((await lake.published("b"))["snapshots"]) == 1, "nothing changed in it: only a tag"
    assert f"t{T + 39}" in await lake.tags("c")


async def test_a_round_without_changes_writes_nothing_and_costs_three_requests(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    shards = [await lake.filled(name) for name in "abc"]
    await lake.round()
    await lake.round()
    before = [meta.key async for meta in lake.objects.list("lake/")]
    requests = lake.counting.requests
    for _ in range(5):
        await lake.round()
    assert lake.counting.requests - requests <= 5 * 3
    await append(shards[2], T + 10, T + 20, [])
    await lake.round()
    assert [meta.key async for meta in lake.objects.list("lake/")] == before, "progress alone is no change"


async def test_f705_an_error_of_one_table_is_reported_and_the_others_are_published(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    broken, other = await lake.filled("c"), await lake.filled("d")
    lost = broken.state.batches[0].parts[0].object_key
    data = await lake.objects.get(lost)
    await lake.objects.delete(lost)
    await lake.round()
    assert await lake.tags("d") and other.state.upper
    failure = lake.tracker.failure("lake:c")
    assert failure is not None and lost in failure.error
    await lake.objects.put(lost, data)
    await lake.round()
    assert lake.tracker.failure("lake:c") is None and await lake.tags("c")
    status = lake.tracker.mark("lake:c")
    assert status is not None and status.position == status.target == T + 9


async def test_a_publisher_that_loses_its_lease_drops_what_it_read(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    shard = await lake.filled("c")
    await append(shard, T + 10, T + 20, [(k, f"c{k}", T + 19, -1) for k in range(1000)])
    publisher = lake.publisher_of_all
    running = asyncio.create_task(publisher.run())
    await until(lambda: publisher.counters.rounds, "a round")
    assert publisher.counters.publications == 1 and publisher.memory_bytes > 1000 * 8
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert publisher.memory_bytes == 0


async def test_what_a_dropped_table_published_is_deleted(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    await lake.filled("c")
    await lake.filled("d")
    await lake.round()
    (created,) = [each for each in await list_created_shards(lake.counting) if each.name == "c"]
    await drop_shard(lake.counting, lake.objects, lake.clock, lake.rand, created)
    await lake.round()
    keys = [meta.key async for meta in lake.objects.list("lake/")]
    assert keys and not [key for key in keys if created.shard_id in key]
    pointer, _ = (await list_pointers(lake.counting))[created.shard_id]
    assert pointer.dropped and not pointer.metadata
    assert lake.tracker.mark("lake:c") is None


async def test_a_table_that_another_process_creates_and_publishes_during_the_first_round_is_not_taken_for_dropped(
    tmp_path: Path,
) -> None:
    lake = Lake(tmp_path)
    await lake.filled("c")

    async def load_new_table() -> None:
        await lake.filled("d")
        await LakeTables(lake.stores(), lake.pipelines).load("d")

    lake.counting.peer = load_new_table
    await lake.round()
    assert lake.counting.peer is None and await lake.tags("c") and await lake.tags("d")
    await lake.round()
    assert lake.tracker.failure("lake:d") is None
    assert not any(pointer.dropped for pointer, _ in (await list_pointers(lake.counting)).values())


async def test_objects_of_a_table_that_consensus_does_not_know_are_deleted(tmp_path: Path) -> None:
    """Consensus was restored from a state before the table."""
    lake = Lake(tmp_path)
    await lake.filled("c")
    key = "lake/another-id/metadata/l@5-0af3.metadata.json"
    young = f"lake/another-id/metadata/l@{T}-0af3.metadata.json"
    for each in (key, young):
        await lake.objects.put(each, b"{}")
    await lake.round()
    assert await lake.objects.head(key) is None and await lake.objects.head(young) is not None
    assert await lake.tags("c")


async def test_two_publishers_at_once_publish_each_change_once(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    shard = await lake.filled("c")
    other = lake.another()
    for time in range(T + 20, T + 100, 20):
        await append(shard, shard.state.upper, time, [(time, "x", time - 1, 1)])
        await lake.round()
        await other.round()
        await other.round()
    metadata = await lake.published("c")
    assert [s["summary"]["tidemill.time"] for s in metadata["snapshots"]] == [str(T + k) for k in (19, 39, 59, 79)]
    assert [s["sequence-number"] for s in metadata["snapshots"]] == [1, 2, 3, 4]
    assert lake.publisher_of_all.counters.conflicts + other.counters.conflicts <= 8


async def test_the_catalogue_publishes_a_table_that_never_was(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    await lake.filled("c")
    tables = LakeTables(lake.stores(), lake.pipelines)
    assert await tables.list_names() == ["c"]
    found = await tables.load("c")
    assert json.loads(found.metadata)["current-snapshot-id"]
    assert Path(found.metadata_location.removeprefix("file://")).read_bytes() == found.metadata


async def test_tombstones_are_no_table(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    table = await lake.filled("c")
    await lake.filled(tombstones_name("c", table.shard_id))
    await lake.round()
    assert set(await list_pointers(lake.counting)) == {table.shard_id}
    assert await LakeTables(lake.stores(), lake.pipelines).list_names() == ["c"]


async def test_readers_of_a_table_that_was_never_published_cause_one_publication(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    await lake.filled("c")
    tables = LakeTables(lake.stores(), lake.pipelines)
    found = await asyncio.gather(*(tables.load("c") for _ in range(8)))
    assert len({each.metadata_location for each in found}) == 1
    keys = [meta.key async for meta in lake.objects.list("lake/")]
    assert len([key for key in keys if key.endswith(".metadata.json")]) == 1


class GatedObjects:
    """`objects`, of which the reads of some objects wait for `gate`. `reads` counts those of each object."""

    def __init__(self, objects: ObjectStore, names: dict[str, str]) -> None:
        self._objects = objects
        self._names = names
        self.reads: Counter[str] = Counter()
        self.gate = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)

    async def get(self, key: str, *place: int) -> bytes:
        if key in self._names:
            self.reads[self._names[key]] += 1
            await self.gate.wait()
        return await self._objects.get(key, *place)


async def gated(lake: Lake, *names: str) -> GatedObjects:
    """Let reads of the parts of new tables wait."""
    shards = {name: await lake.filled(name) for name in names}
    found = {part.object_key: name for name, shard in shards.items() for part in shard.state.batches[0].parts}
    assert len(found) == len(names) and all(found)
    objects = GatedObjects(lake.objects, found)
    lake.objects = objects  # type: ignore[assignment]
    return objects


async def test_a_table_without_a_change_is_loaded_while_another_is_evaluated_and_one_is_evaluated_at_a_time(
    tmp_path: Path,
) -> None:
    lake = Lake(tmp_path)
    await lake.filled("idle")
    objects = await gated(lake, "b", "c")
    tables = LakeTables(lake.stores(), lake.pipelines)
    await tables.load("idle")
    lake.clock.advance(2 * hold_period_ms(lake.settings))
    loads = [asyncio.create_task(tables.load(name)) for name in ("b", "c", "b", "c")]
    await until(lambda: bool(objects.reads), "the evaluation of a table")
    async with asyncio.timeout(DEADLINE_S):
        await tables.load("idle")
    assert objects.reads.total() == 1 and not any(load.done() for load in loads)
    objects.gate.set()
    found = await asyncio.gather(*loads)
    assert objects.reads == {"b": 1, "c": 1} and [found[0], found[1]] == found[2:]
    assert not tables._turns, "a table that no request waits for has no lock"
    assert tables.memory_bytes == 0, "what an evaluation read is dropped"


async def test_a_publication_that_failed_is_repeated_after_an_interval(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    objects = await gated(lake, "b")
    objects.gate.set()
    (key,) = objects._names
    data = await lake.objects.get(key)
    await lake.objects.delete(key)
    objects.reads.clear()
    tables = LakeTables(lake.stores(), lake.pipelines)
    with pytest.raises(MissingError, match=key) as first:
        await tables.load("b")
    reads = objects.reads["b"]
    await lake.objects.put(key, data)
    for found in await asyncio.gather(*(tables.load("b") for _ in range(5)), return_exceptions=True):
        assert type(found) is MissingError and str(found) == str(first.value)
    assert objects.reads["b"] == reads > 0
    lake.clock.advance(int(lake.settings.interval_s * 1000) + 1)
    assert json.loads((await tables.load("b")).metadata)["current-snapshot-id"]


async def test_an_error_that_heals_is_not_repeated(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    shard = await lake.table("empty", SCHEMA)
    fails = [True]

    async def pipelines() -> Any:
        if fails:
            raise UnavailableError("consensus does not answer.")
        return await lake.pipelines()

    tables = LakeTables(lake.stores(), pipelines)
    with pytest.raises(UnavailableError, match="consensus does not answer"):
        await tables.load("empty")
    fails.clear()
    with pytest.raises(HistoryLostError):
        await tables.load("empty")
    await append(shard, 0, T + 10, [(1, "x", T + 5, 1)])
    first = await tables.load("empty")
    await drop_shard(lake.counting, lake.objects, lake.clock, lake.rand, await created_shard(lake, "empty"))
    again = await lake.filled("empty")
    found = await tables.load("empty")
    assert again.shard_id in found.metadata_location and again.shard_id not in first.metadata_location


async def created_shard(lake: Lake, name: str) -> Create:
    return next(each for each in await list_created_shards(lake.counting) if each.name == name)


async def test_a_request_that_is_cancelled_leaves_the_publication_to_the_next(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    objects = await gated(lake, "b")
    tables = LakeTables(lake.stores(), lake.pipelines)
    first = asyncio.create_task(tables.load("b"))
    await until(lambda: bool(objects.reads), "the evaluation of the table")
    first.cancel()
    objects.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert json.loads((await tables.load("b")).metadata)["current-snapshot-id"]


async def test_an_idle_table_is_checked_once_an_interval_however_often_it_is_loaded(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    await lake.filled("c")
    tables = LakeTables(lake.stores(), lake.pipelines)
    await tables.load("c")
    lake.clock.advance(2 * hold_period_ms(lake.settings))
    await tables.load("c")
    before = lake.counting.requests
    await tables.load("c")
    assert lake.counting.requests - before <= 4, "the pointer is read, twice, and no log"
    lake.clock.advance(31_000)
    before = lake.counting.requests
    await tables.load("c")
    assert lake.counting.requests - before > 4


async def test_an_old_publication_is_loaded_only_if_it_is_still_the_contents(tmp_path: Path) -> None:
    """A table that cannot be published any more is refused in words before its files are deleted."""
    lake = Lake(tmp_path)
    shard = await lake.filled("c")
    tables = LakeTables(lake.stores(), lake.pipelines)
    first = await tables.load("c")
    lake.clock.advance(2 * hold_period_ms(lake.settings))
    assert await tables.load("c") == first, "nothing changed"
    await shard.evolve(SchemaChanges(add=(Column("n", "float64", "NaN"),)))
    lake.clock.advance(int(lake.settings.interval_s * 1000) + 1)
    with pytest.raises(UnavailableError, match="column=n default='nan' batches=1"):
        await tables.load("c")


@pytest.mark.parametrize(
    ("states", "times"),
    [
        ([("a", 5, 20), ("b", 5, 30), ("c", 0, 99)], {"a": 19, "b": 19, "c": 98}),
        ([("a", 5, 20), ("b", 25, 30)], {"a": 19, "b": 29}),
        ([("a", 5, 20), ("b", 15, 30), ("x", 0, 0)], {"a": 19, "b": 19}),
        ([("a", 0, 0), ("b", 5, 30)], {"b": 29}),
    ],
)
def test_the_common_time_is_readable_in_all_tables_that_have_it(
    states: list[tuple[str, int, int]], times: dict[str, int]
) -> None:
    found = [ShardState(name, name, SCHEMA, since, upper) for name, since, upper in states]
    assert publication_times(found, {"a": "capture/shop", "b": "capture/shop"}) == times
