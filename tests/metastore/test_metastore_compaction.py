"""Compaction in a real database: reads are unaffected, deleted rows stay deleted, failures only cost time."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import msgspec
import pytest

from support.metastore.lsm_world import PREFIX, SMALL, Gate, World, collect, expected, failing, numbered, objects
from support.waiting import until
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import CorruptError, FencedError, UnavailableError, UnknownOutcomeError
from tidemill.metastore.lsm.compaction.executor import SizeBasedExecutor
from tidemill.metastore.lsm.compaction.inline_executor import InlineExecutor
from tidemill.metastore.lsm.compaction.picker import Job, Progress, pick_job, target_bytes
from tidemill.metastore.lsm.compaction.worker.client import WorkerExecutor
from tidemill.metastore.lsm.database import Database
from tidemill.metastore.lsm.manifest import FileMeta, Manifest
from tidemill.metastore.lsm.manifest_store import BucketManifests
from tidemill.objects.local import LocalObjects
from tidemill.objects.memory import MemoryObjects
from tidemill.objects.store import ObjectStore

__all__ = ["objects"]  # the fixture


def world_in_memory() -> World:
    return World(MemoryObjects(SystemClock()))


async def flushed(world: World, database: Database, rows: dict[bytes, bytes]) -> None:
    world.put(database, rows)
    await database.flush()


async def check(world: World, database: Database) -> None:
    assert await collect(database.scan()) == expected(world.rows)
    assert await collect(database.scan(reverse=True)) == expected(world.rows, reverse=True)


def settled(database: Database) -> bool:
    levels = database.version.levels
    return database.background.compactor.merging is None and pick_job(levels, database.options, {}) is None


class Held:
    """A merger that waits for `let_go`, before or after its merge."""

    def __init__(self, world: World, *, after: bool = False) -> None:
        self.inner = InlineExecutor(world.objects, world.options, world.clock)
        self.let_go = asyncio.Event()
        self.jobs: list[Job] = []
        self.after = after

    async def merge(self, job: Job, progress: Progress | None = None) -> list[FileMeta]:
        self.jobs.append(job)
        if self.after:
            made = await self.inner.merge(job, progress)
            await self.let_go.wait()
            return made
        await self.let_go.wait()
        return await self.inner.merge(job, progress)

    async def aclose(self) -> None:
        return None


async def open_with(world: World, merger: object, **more: object) -> Database:
    world.epoch += 1
    return await world.open(background=True, merger=merger, **more)


# reads ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True])
async def test_reads_and_writes_go_on_while_a_merge_is_under_way(after: bool) -> None:
    world = world_in_memory()
    held = Held(world, after=after)
    database = await open_with(world, held)
    for n in range(SMALL.l0_compact):
        await flushed(world, database, numbered(range(n, 40), f"{n}-"))
    await until(lambda: bool(held.jobs))
    await check(world, database)
    # A flush passes the merge and changes keys that are in it.
    await flushed(world, database, {**numbered(range(10, 20), "later"), b"row/000003": b""})
    await check(world, database)
    assert len(database.version.levels[0]) == SMALL.l0_compact + 1
    held.let_go.set()
    await until(lambda: database.stats().merges == 1)
    assert len(database.version.levels[0]) == 1
    await check(world, database)
    assert await database.get(b"row/000003") is None
    assert await database.get(b"row/000010") == b"later10"
    await database.aclose()


async def test_a_scan_begun_before_a_merge_ends_on_the_files_it_began_on() -> None:
    world = world_in_memory()
    database = await world.open()
    for n in range(3):
        await flushed(world, database, numbered(range(n, 300, 2), f"{n}-"))
    before = dict(world.rows)
    scan = database.scan()
    first = await anext(aiter(scan))
    await database.background.compact()
    await flushed(world, database, {key: b"" for key in world.rows})
    await database.background.compact()
    await database.background.collect_garbage()
    rest = await collect(scan)
    assert list(zip(*first, strict=True)) + rest == expected(before)
    await database.aclose()


async def test_a_snapshot_is_stable_over_merges_and_collections_and_its_files_go_after_it(objects: ObjectStore) -> None:
    world = World(objects, msgspec.structs.replace(SMALL, manifests_kept=1))
    database = await world.open()
    for n in range(4):
        await flushed(world, database, numbered(range(n, 100), f"{n}-"))
    before = dict(world.rows)
    snapshot = database.snapshot()
    pinned = {world.files.key(file) for file in database.version.files}
    for n in range(4):
        await flushed(world, database, {**numbered(range(50 + n, 100), f"new{n}-"), b"row/%06d" % n: b""})
        await database.background.compact()
        await database.background.collect_garbage()
        assert await collect(snapshot.scan()) == expected(before)
        assert await snapshot.get(b"row/000000") == before[b"row/000000"]
        await check(world, database)
    assert pinned <= set(await world.sst_keys())
    snapshot.close()
    await database.background.collect_garbage()
    await database.background.collect_garbage()
    assert set(await world.sst_keys()) == {world.files.key(file) for file in database.version.files}
    await check(world, database)
    await database.aclose()


async def test_a_get_meets_a_merge_at_every_point_of_its_reads() -> None:
    """Many readers on a cold cache, while the background merges and collects continuously."""
    world = World(MemoryObjects(SystemClock()), msgspec.structs.replace(SMALL, cache_bytes=0, l0_compact=2))

    async def wander(_: str) -> None:
        for _ in range(source.randrange(4)):
            await asyncio.sleep(0)

    source = random.Random(5)
    world.objects.before_read = wander
    world.objects.before_put = wander
    database = await world.open(background=True)
    asked = 0
    busy = True

    async def read() -> None:
        nonlocal asked
        while busy:
            key = b"row/%06d" % source.randrange(60)
            with database.snapshot() as snapshot:
                seen = dict(world.rows)
                assert await snapshot.get(key) == seen.get(key)
                assert await collect(snapshot.prefix(b"row/00002")) == expected(seen, b"row/00002", b"row/00003")
            asked += 1
            await asyncio.sleep(0)

    async def tend() -> None:
        while busy:
            await database.background.collect_garbage()
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(read())
        group.create_task(tend())
        for n in range(60):
            rows = {b"row/%06d" % source.randrange(60): b"%d" % n * source.randrange(3) for _ in range(20)}
            world.put(database, rows)
            await database.flush()
        busy = False
    assert asked > 60 and database.stats().merges > 10
    await check(world, database)
    await database.aclose()


# what merges keep ------------------------------------------------------------------------------------


async def test_tombstones_never_resurrect_what_lies_below() -> None:
    """A key is deleted at one level while every lower level has older versions of it."""
    options = msgspec.structs.replace(SMALL, level_base_bytes=1_000, level_factor=3, file_bytes=400)
    world = World(MemoryObjects(SystemClock()), options)
    database = await world.open(background=True)
    source = random.Random(3)
    for n in range(120):
        rows = {b"row/%06d" % source.randrange(150): b"%d-" % n + source.randbytes(20) for _ in range(30)}
        gone = {b"row/%06d" % source.randrange(150): b"" for _ in range(15)}
        world.put(database, {**rows, **gone})
        await database.flush()
        if n % 10 == 0:
            await check(world, database)
    await until(lambda: settled(database))
    assert len(database.version.levels) > 2
    await check(world, database)
    await database.background.compact()
    assert sum(file.rows for file in database.version.files) == len(world.rows)
    await check(world, database)
    await database.aclose()


async def test_all_versions_of_a_key_meet_in_one_merge() -> None:
    world = world_in_memory()
    database = await world.open()
    for n in range(6):
        await flushed(world, database, {b"k": b"%d" % n, b"other/%d" % n: b"x"})
    await database.background.compact()
    assert database.version.rows == 7
    row = await database.get_row(b"k")
    assert row is not None and (row.seqno, row.value) == (6, b"5")
    await database.aclose()


async def test_level_sizes_converge() -> None:
    world = world_in_memory()
    database = await world.open(background=True)
    source = random.Random(8)
    for _ in range(80):
        world.put(database, {source.randbytes(8): source.randbytes(40) for _ in range(20)})
        await database.background.stall.wait()
        await database.flush()
    await until(lambda: settled(database))
    levels = database.version.levels
    assert len(levels[0]) < SMALL.l0_compact and len(levels) >= 4
    for level in range(1, len(levels)):
        size_bytes = sum(file.size_bytes for file in levels[level])
        assert size_bytes < target_bytes(level, SMALL) or level == SMALL.levels - 1
    stats = database.stats()
    assert stats.merges > 10 and 1 < stats.write_amplification < 40
    await check(world, database)
    await database.aclose()


async def test_small_flushes_of_ascending_keys_do_not_pile_up_small_files() -> None:
    options = msgspec.structs.replace(SMALL, file_bytes=20_000, level_base_bytes=1 << 20)
    world = World(MemoryObjects(SystemClock()), options)
    database = await world.open(background=True)
    for n in range(150):
        await database.background.stall.wait()
        await flushed(world, database, numbered(range(5 * n, 5 * n + 5), "ascending"))
    await until(lambda: settled(database))
    assert len(database.version.files) < 30
    assert database.stats().write_amplification < 20
    await check(world, database)
    await database.aclose()


# failures -------------------------------------------------------------------------------------------


async def fill_level_0(world: World, database: Database) -> None:
    for n in range(SMALL.l0_compact):
        await flushed(world, database, numbered(range(n, 60), f"{n}-"))


@pytest.mark.parametrize("error", [UnavailableError("refused"), UnknownOutcomeError("lost")])
@pytest.mark.parametrize("stored", [False, True])
async def test_an_output_that_may_not_be_stored_is_made_again_under_a_new_name(error: Exception, stored: bool) -> None:
    world = world_in_memory()
    database = await world.open()
    await fill_level_0(world, database)
    await database.aclose()
    step = failing("sst/", error)
    world.objects.before_put, world.objects.after_put = (None, step) if stored else (step, None)
    world.objects.puts.clear()
    database = await world.open(background=True)
    await until(lambda: database.stats().merges == 1)
    tried = [key for key in world.objects.puts if "sst/" in key]
    assert len(set(tried)) == len(tried)
    assert database.stats().merge_error == "" and database.background.compactor.stats.failures == 1
    assert database.versions.lowest_in_flight == database.versions._next_number
    await check(world, database)
    await database.background.collect_garbage()
    named = {world.files.key(file) for file in database.version.files}
    assert not stored or set(await world.sst_keys()) > named
    await database.aclose()


async def test_a_refused_manifest_is_tried_again_without_merging_again() -> None:
    world = world_in_memory()
    database = await world.open()
    await fill_level_0(world, database)
    await database.aclose()
    world.objects.before_put = failing("manifest/", UnavailableError("refused"), times=2)
    world.objects.puts.clear()
    database = await world.open(background=True)
    await until(lambda: database.stats().merges == 1)
    made = {key for key in world.objects.puts if "sst/" in key}
    assert made == {world.files.key(file) for file in database.version.files}
    assert database.background.compactor.stats.failures == 2
    await check(world, database)
    await database.aclose()


async def test_a_copy_uploaded_in_vain_never_shares_the_number_of_the_manifest_that_counts() -> None:
    """The upload succeeded and the log was unreachable: a restore from the bucket must find the later manifest
    newest."""

    class Replicated(BucketManifests):
        log_is_away = False
        counts: Manifest | None = None

        async def read(self, max_epoch: int) -> Manifest | None:
            return self.counts

        async def write(self, manifest: Manifest) -> None:
            await self.upload(manifest)
            if self.log_is_away:
                raise UnavailableError("The log is away.")
            self.counts = manifest

    for seed in range(4):  # the order of nonces must not matter
        world = world_in_memory()
        world.manifests = manifests = Replicated(world.objects, PREFIX, Rand(seed))
        database = await world.open()
        for n in range(4):
            manifests.log_is_away = True
            world.put(database, numbered(range(n, n + 5)))
            with pytest.raises(UnavailableError):
                await database.flush()
            manifests.log_is_away = False
            await flushed(world, database, numbered(range(n)) or {b"k": b"v"})
            newest = await manifests.newest(10)
            assert newest is not None and await manifests.load(newest.key) == manifests.counts
        await database.aclose()


@pytest.mark.parametrize("kind", [UnknownOutcomeError, FencedError])
async def test_a_manifest_of_unknown_fate_or_a_newer_epoch_breaks_the_database(
    kind: type[UnknownOutcomeError] | type[FencedError],
) -> None:
    world = world_in_memory()
    database = await world.open()
    await fill_level_0(world, database)
    await database.aclose()
    world.objects.before_put = failing("manifest/", kind("no"))
    database = await world.open(background=True)
    await until(lambda: database.lifecycle.end_reason is not None)
    for broken in (database.background.collect_garbage, database.background.compact, database.flush):
        with pytest.raises(kind):
            await broken()
    with pytest.raises(kind):
        database.apply(10**6, [b"k"], [b"v"])
    await database.aclose()
    # Its merged files are orphans; the next database repeats the merge.
    database = await world.open(background=True)
    await until(lambda: database.stats().merges == 1)
    await check(world, database)
    await database.aclose()


async def test_a_damaged_input_is_told_and_heals_when_the_object_is_restored() -> None:
    world = world_in_memory()
    database = await world.open()
    await fill_level_0(world, database)
    await database.aclose()
    key = (await world.sst_keys())[1]
    data = await world.objects.get(key)
    await world.objects.delete(key)
    await world.objects.inner.put(key, data[:40] + bytes([data[40] ^ 1]) + data[41:])
    database = await world.open(background=True)
    await until(lambda: database.stats().merge_error != "")
    assert key.rpartition("-")[2].removesuffix(".sst") in database.stats().merge_error
    with pytest.raises(CorruptError):
        await database.background.compact()
    # Other rows can be written and read all the time.
    await flushed(world, database, {b"aside": b"x"})
    assert await database.get(b"aside") == b"x"
    await world.objects.delete(key)
    await world.objects.inner.put(key, data)
    await until(lambda: database.stats().merges >= 1 and settled(database))
    assert database.stats().merge_error == ""
    await check(world, database)
    await database.aclose()


async def test_a_merge_that_dies_of_a_bug_is_tried_again() -> None:
    """The loop must survive: otherwise level 0 would grow until all writers stop, without a reported reason."""

    class Buggy(Held):
        async def merge(self, job: Job, progress: Progress | None = None) -> list[FileMeta]:
            if not self.jobs:
                self.jobs.append(job)
                raise RuntimeError("nobody foresaw this")
            return await self.inner.merge(job, progress)

    world = world_in_memory()
    database = await world.open()
    await fill_level_0(world, database)
    await database.aclose()
    database = await open_with(world, Buggy(world))
    await until(lambda: "nobody foresaw this" in database.stats().merge_error)
    await until(lambda: database.stats().merges >= 1 and settled(database))
    assert database.stats().merge_error == "" and database.background.failure is None
    await check(world, database)
    await database.aclose()


async def test_a_merge_cut_off_by_closing_leaves_orphans_that_are_swept() -> None:
    world = World(MemoryObjects(SystemClock()), msgspec.structs.replace(SMALL, manifests_kept=1))
    held = Held(world, after=True)
    database = await open_with(world, held)
    await fill_level_0(world, database)
    await until(lambda: len(world.objects.puts) > 2 * SMALL.l0_compact)
    await database.aclose()
    orphans = set(await world.sst_keys()) - {world.files.key(file) for file in database.version.files}
    assert orphans
    database = await world.open()
    await check(world, database)
    await flushed(world, database, {b"own manifest": b"x"})
    done = await database.background.collect_garbage()
    assert done.deleted_files == len(orphans) and not done.missing
    assert set(await world.sst_keys()) == {world.files.key(file) for file in database.version.files}
    await check(world, database)
    await database.aclose()


async def test_a_cancelled_compact_changes_nothing_and_may_be_repeated() -> None:
    world = world_in_memory()
    database = await world.open()
    await fill_level_0(world, database)
    gate = Gate("sst/")
    world.objects.before_put = gate
    compacting = asyncio.ensure_future(database.background.compact())
    await until(lambda: gate.waiting == 1)
    before, compactor = database.version, database.background.compactor
    assert compactor.merging is not None and compactor.merging.rows == before.rows
    compacting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await compacting
    assert database.version is before and compactor.merging is None
    gate.open.set()
    await database.background.compact()
    assert not database.version.levels[0]
    await check(world, database)
    await database.aclose()


async def test_collection_spares_the_outputs_of_a_merge_that_is_not_committed_yet() -> None:
    world = world_in_memory()
    held = Held(world, after=True)
    database = await open_with(world, held)
    await fill_level_0(world, database)
    await until(lambda: len(world.objects.puts) > 2 * SMALL.l0_compact)
    for _ in range(3):
        done = await database.background.collect_garbage()
        assert done.skipped_in_flight > 0 and done.deleted_files == 0
    held.let_go.set()
    await until(lambda: database.stats().merges == 1)
    await check(world, database)
    assert not (await database.background.collect_garbage()).missing
    await database.aclose()


# the worker -------------------------------------------------------------------------------------------


async def test_a_database_outlives_its_workers_deaths(tmp_path: Path) -> None:
    options = msgspec.structs.replace(SMALL, inline_merge_rows=50, slice_rows=20)
    world = World(LocalObjects.open(str(tmp_path), SystemClock(), Rand(1)), options)
    worker = WorkerExecutor(str(tmp_path), msgspec.structs.replace(options, compaction_bytes_per_s=60_000))
    merger = SizeBasedExecutor(InlineExecutor(world.objects, options, world.clock), worker, options)
    database = await open_with(world, merger)
    killed: set[int] = set()
    for n in range(400):
        if n >= 24 and len(killed) == 2:
            break  # on a busy machine a worker takes long to come
        await flushed(world, database, numbered(range(n % 150, 200), f"{n}-"))
        if worker.pid is not None and len(killed) < 2 and worker.pid not in killed:
            killed.add(worker.pid)
            os.kill(worker.pid, signal.SIGKILL)
        await check(world, database)
    await until(lambda: settled(database) and database.stats().merge_error == "")
    assert len(killed) == 2 and database.background.compactor.stats.failures >= 1
    assert database.stats().merges >= 1
    await check(world, database)
    await database.aclose()
    await merger.aclose()
    assert worker.pid is None


async def test_the_pace_of_merges_is_limited_on_request(tmp_path: Path) -> None:
    took_s: list[float] = []
    for rate in (0, 10_000):
        world = World(MemoryObjects(SystemClock()), msgspec.structs.replace(SMALL, compaction_bytes_per_s=rate))
        database = await world.open()
        await fill_level_0(world, database)
        moved = database.version.size_bytes
        start_s = world.clock.monotonic_s()
        await database.background.compact()
        took_s.append(world.clock.monotonic_s() - start_s)
        await check(world, database)
        await database.aclose()
    assert took_s[1] >= moved / 10_000 - 0.1 > took_s[0]
