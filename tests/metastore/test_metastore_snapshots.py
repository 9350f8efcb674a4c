"""Snapshots, read-only databases that refresh, and followers fed from the log.

Cases: implicit and explicit snapshots are stable across compaction; a snapshot's get sees tombstones in files; a
refresh is empty, a no-op, sees changes, keeps snapshots, rejects a lower seqno, and is forbidden when writable.
"""

from __future__ import annotations

import asyncio
import gc
import random
import warnings

import msgspec
import pytest

from support.metastore.lsm_world import SMALL, UUID, Gate, World, collect, expected, numbered
from support.metastore.lsm_world import objects as objects  # the fixture
from support.waiting import until
from tidemill.base.clock import SystemClock
from tidemill.base.errors import ClosedError, InvalidError
from tidemill.metastore.lsm.manifest import Manifest
from tidemill.objects.memory import MemoryObjects
from tidemill.objects.store import ObjectStore


def memory() -> ObjectStore:
    return MemoryObjects(SystemClock())


# snapshots -------------------------------------------------------------------------------------------


async def test_implicit_snapshots_are_stable_across_compaction(objects: ObjectStore) -> None:
    """An open scan returns the rows of its start, despite later batches, flushes, merges and collections."""
    world = World(objects)
    database = await world.open()
    of_nothing = [database.scan(), database.scan(reverse=True), database.prefix(b"row/")]
    for turn in range(4):
        world.put(database, numbered(range(turn, 200, 3)))
        await database.flush()
    world.put(database, numbered(range(50, 60), "memory"))
    before = dict(world.rows)
    for reverse in (False, True):
        scan, unread = database.scan(reverse=reverse), database.scan(reverse=reverse)
        keys, values = await anext(scan)
        seen = list(zip(keys, values, strict=True))
        world.put(database, {key: b"" for key in numbered(range(0, 200, 2))})
        world.put(database, numbered(range(300, 320)))
        await database.background.compact()
        await database.background.collect_garbage()
        assert seen + await collect(scan) == expected(before, reverse=reverse)
        assert await collect(unread) == expected(before, reverse=reverse)
        world.put(database, numbered(range(120, 130), "memory"))
        before = dict(world.rows)
    assert await collect(database.scan()) == expected(world.rows)
    assert [await collect(scan) for scan in of_nothing] == [[], [], []]  # begun on an empty database


async def test_explicit_snapshots_are_stable_across_compaction(objects: ObjectStore) -> None:
    world = World(objects)
    database = await world.open()
    source = random.Random(1)
    taken = []
    for turn in range(25):
        world.put(
            database,
            {b"row/%03d" % source.randrange(90): b"" if source.random() < 0.3 else b"%d" % turn for _ in range(12)},
        )
        if turn % 3 == 0:
            taken.append((database.snapshot(), dict(world.rows)))
        if turn % 4 == 0:
            await database.flush()
        if turn % 9 == 0:
            await database.background.compact()
            await database.background.collect_garbage()
    for snapshot, rows in taken:
        assert await collect(snapshot.scan()) == expected(rows)
        assert await collect(snapshot.scan(b"row/02", b"row/07", reverse=True)) == expected(
            rows, b"row/02", b"row/07", reverse=True
        )
        assert await collect(snapshot.prefix(b"row/01")) == expected(rows, b"row/01", b"row/02")
        keys = [b"row/%03d" % number for number in range(90)]
        assert [await snapshot.get(key) for key in keys] == [rows.get(key) for key in keys]
        assert await snapshot.get_many(keys) == [rows.get(key) for key in keys]
        snapshot.close()
    assert database.versions.pins == 0


async def test_a_snapshot_get_sees_tombstones_in_files(objects: ObjectStore) -> None:
    world = World(objects)
    database = await world.open()
    world.put(database, {b"a": b"1", b"b": b"1"})
    await database.flush()
    world.put(database, {b"a": b""})
    await database.flush()
    with database.snapshot() as snapshot:
        world.put(database, {b"a": b"again"})
        assert await snapshot.get(b"a") is None and await snapshot.get_row(b"a") is None
        assert snapshot.peek(b"a") is None
        assert await snapshot.get_many([b"a", b"b"]) == [None, b"1"]
        assert await collect(snapshot.scan()) == [(b"b", b"1")]
        assert snapshot.seqno == 2
    assert await database.get(b"a") == b"again"


async def test_a_snapshot_get_sees_a_tombstone_that_is_in_one_file_with_its_row(objects: ObjectStore) -> None:
    """Value and tombstone were in memory together, so one flush wrote both; later the file is merged deeper."""
    world = World(objects)
    database = await world.open()
    world.put(database, {b"a": b"0", b"foo": b"0"})
    await database.flush()
    world.put(database, {b"foo": b"bar"})
    world.put(database, {b"foo": b""})
    await database.flush()
    assert database.version.levels[0][0].tombstones == 1
    for merged in (False, True):
        if merged:
            await database.background.compact()
        with database.snapshot() as snapshot:
            world.put(database, {b"foo": b"again"})
            world.put(database, {b"foo": b""})
            assert await snapshot.get_many([b"foo", b"a"]) == [None, b"0"]  # read from the file: nothing is cached
            assert await snapshot.get(b"foo") is None and await snapshot.get_row(b"foo") is None
            for reverse in (False, True):
                assert await collect(snapshot.scan(reverse=reverse)) == [(b"a", b"0")]


async def test_a_snapshots_files_stay_until_it_is_closed(objects: ObjectStore) -> None:
    world = World(objects, msgspec.structs.replace(SMALL, manifests_kept=1))
    database = await world.open()
    for turn in range(3):
        world.put(database, numbered(range(turn, 60, 3)))
        await database.flush()
    old = set(await world.sst_keys())
    snapshot = database.snapshot()
    await database.background.compact()
    assert await snapshot.get(b"row/000007") == b"v7"  # a cold read pins and unpins on its own account
    assert await snapshot.get_many([b"row/000031", b"row/000001"]) == [b"v31", b"v1"]
    await database.background.collect_garbage()
    assert old < set(await world.sst_keys())
    assert {database.files.key(file) for file in database.versions.pinned_files()} == old
    snapshot.close()
    snapshot.close()  # idempotent
    await database.background.collect_garbage()
    assert not old & set(await world.sst_keys())
    with pytest.raises(ClosedError, match="snapshot is closed"):
        await snapshot.get(b"a")


async def test_what_is_cached_of_a_file_goes_when_nobody_needs_the_file() -> None:
    world = World(memory())
    database = await world.open()

    def cached() -> set[object]:
        keys = database.tables.cache.entries
        return {key[0] if isinstance(key, tuple) else key for key in keys}

    world.put(database, numbered(range(60)))
    await database.flush()
    await collect(database.scan())
    (old,) = database.version.levels[0]
    with database.snapshot() as snapshot:
        world.put(database, numbered(range(60), "w"))
        await database.background.compact()
        assert cached() == {old}  # pinned; merges fill no cache
        await collect(database.scan())
        assert cached() == {old, *database.version.files}
        assert await snapshot.get(b"row/000001") == b"v1"
    assert cached() == database.version.files
    world.put(database, numbered(range(60), "x"))
    await database.background.compact()
    assert cached() == set()


async def test_a_snapshot_that_is_never_closed_warns_and_lets_go() -> None:
    world = World(memory())
    database = await world.open()
    world.put(database, {b"a": b"1"})
    snapshot = database.snapshot()
    with pytest.warns(ResourceWarning, match="never closed: seqno=1"):
        del snapshot
    assert database.versions.pins == 0
    world.put(database, {b"a": b"2"})
    assert len(database.memtable.layers) == 1  # and the layer is writable again


async def test_a_scan_given_up_lets_go_without_a_warning() -> None:
    world = World(memory())
    database = await world.open()
    world.put(database, numbered(range(3_000)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async for _ in database.scan():
            break
        database.scan()
        ended = database.scan()
        await ended.aclose()
        assert await collect(ended) == []
        gc.collect()
    assert database.versions.pins == 0 and database.memtable.layers[0].pins == 0


async def test_a_scan_outlives_the_snapshot_it_was_made_from() -> None:
    world = World(memory())
    database = await world.open()
    world.put(database, numbered(range(50)))
    with database.snapshot() as snapshot:
        scan = snapshot.scan()
    before = dict(world.rows)
    world.put(database, {b"row/000001": b"new"})
    await database.background.compact()
    assert await collect(scan) == expected(before)


# refresh ---------------------------------------------------------------------------------------------


async def test_refresh_of_an_empty_database(objects: ObjectStore) -> None:
    world = World(objects)
    reader = await world.open(read_only=True)
    assert await reader.refresh() is False
    assert await collect(reader.scan()) == [] and await reader.get(b"a") is None
    assert reader.max_applied_seqno == reader.max_persisted_seqno == 0


async def test_refresh_without_a_change_is_a_no_op(objects: ObjectStore) -> None:
    world = World(objects)
    writer = await world.open()
    world.put(writer, numbered(range(9)))
    await writer.flush()
    reader = await world.open(read_only=True)
    version, before = reader.version, dict(world.rows)
    assert await reader.refresh() is False and reader.version is version
    world.put(writer, numbered(range(20), "w"))  # applied, and in no manifest yet
    assert await reader.refresh() is False and reader.version is version
    assert reader.max_applied_seqno == reader.max_persisted_seqno == 1 < writer.max_applied_seqno
    assert await collect(reader.scan()) == expected(before)


async def test_refresh_sees_changes(objects: ObjectStore) -> None:
    world = World(objects)
    writer = await world.open()
    reader = await world.open(read_only=True)
    for turn in range(5):
        world.put(writer, {**numbered(range(turn, 40, 3), str(turn)), b"row/%06d" % turn: b""})
        assert await reader.refresh() is False
        await writer.flush()
        if turn == 3:
            await writer.background.compact()
        assert await reader.refresh() is True
        assert reader.max_persisted_seqno == reader.max_applied_seqno == world.seqno
        assert await collect(reader.scan()) == expected(world.rows)
    await writer.background.compact()
    assert await reader.refresh() is True  # the same seqno, other files
    assert await collect(reader.scan()) == expected(world.rows)


async def test_refresh_sees_the_next_epoch(objects: ObjectStore) -> None:
    world = World(objects)
    writer = await world.open()
    world.put(writer, numbered(range(9)))
    await writer.flush()
    reader = await world.open(read_only=True)
    await writer.aclose()
    writer = await world.open()
    world.put(writer, numbered(range(9), "w"))
    await writer.flush()
    assert await reader.refresh() is True
    assert await collect(reader.scan()) == expected(world.rows)


async def test_refresh_keeps_snapshots(objects: ObjectStore) -> None:
    world = World(objects)
    writer = await world.open()
    world.put(writer, numbered(range(30)))
    await writer.flush()
    reader = await world.open(read_only=True)
    before = dict(world.rows)
    with reader.snapshot() as snapshot:
        world.put(writer, {**numbered(range(10, 40), "w"), b"row/000001": b""})
        await writer.background.compact()
        assert await reader.refresh() is True
        assert await collect(snapshot.scan()) == expected(before)
        assert await snapshot.get(b"row/000001") == b"v1"
        assert await reader.get(b"row/000001") is None
        assert await collect(reader.scan()) == expected(world.rows)


async def test_refresh_rejects_a_lower_seqno(objects: ObjectStore) -> None:
    world = World(objects)
    writer = await world.open()
    world.put(writer, numbered(range(9)))
    await writer.flush()
    older = await world.newest_manifest()
    world.put(writer, numbered(range(9), "w"))
    await writer.flush()
    reader = await world.open(read_only=True)
    assert older is not None
    for manifest, said in (
        (older, "older than the one in use"),
        (msgspec.structs.replace(older, number=99), "older than the one in use"),
        (msgspec.structs.replace(older, number=99, epoch=0, last_seqno=9), "older than the one in use"),
        (msgspec.structs.replace(older, domain_uuid="another", last_seqno=9), "another domain"),
    ):
        with pytest.raises(InvalidError, match=said):
            reader.refresh_to(manifest)
        assert reader.max_applied_seqno == reader.max_persisted_seqno == 2
    assert await collect(reader.scan()) == expected(world.rows)
    newest = await world.manifests.newest(10**9)
    assert newest is not None
    await world.manifests.delete(newest.key)
    with pytest.raises(InvalidError, match="older than the one in use"):
        await reader.refresh()


async def test_refresh_is_forbidden_when_writable(objects: ObjectStore) -> None:
    world = World(objects)
    writer = await world.open()
    with pytest.raises(InvalidError, match="writable database"):
        await writer.refresh()
    with pytest.raises(InvalidError, match="writable database"):
        writer.refresh_to(Manifest(UUID, 9, 9, 9, 9, 0, ((),)))


async def test_refreshes_at_once_take_turns() -> None:
    """Otherwise the refresh that read the older manifest could finish last and be rejected."""
    world = World(memory())
    writer = await world.open()
    world.put(writer, numbered(range(9)))
    await writer.flush()
    reader = await world.open(read_only=True)
    gate = world.objects.before_read = Gate("/manifest/")
    world.put(writer, numbered(range(9), "w"))
    first = asyncio.create_task(reader.refresh())
    await until(lambda: gate.waiting == 1)
    second = asyncio.create_task(reader.refresh())
    await asyncio.sleep(0)
    assert gate.waiting == 1
    gate.open.set()
    assert await first is False and await second is False


# followers -------------------------------------------------------------------------------------------


async def test_a_follower_takes_batches_on_top_of_its_files_and_flushes_nothing(objects: ObjectStore) -> None:
    world = World(objects, msgspec.structs.replace(SMALL, write_buffer_bytes=1_000))
    writer = await world.open()
    world.put(writer, numbered(range(9)))
    await writer.flush()
    follower = await world.open(follower=True)
    for turn in range(4):
        rows = {**numbered(range(turn, 30, 5), "w"), b"row/000000": b""}
        seqno = world.put(writer, rows)
        follower.apply(seqno, list(rows), list(rows.values()))
        await follower.background.stall.wait()
    assert await collect(follower.scan()) == expected(world.rows)
    assert await follower.get(b"row/000000") is None
    with pytest.raises(InvalidError, match="read-only"):
        await follower.flush()
    with pytest.raises(InvalidError, match="increase"):
        follower.apply(world.seqno, [b"a"], [b"1"])


async def test_a_followers_rows_at_or_below_the_manifest_go_and_newer_ones_stay(objects: ObjectStore) -> None:
    world = World(objects)
    writer = await world.open()
    follower = await world.open(follower=True)

    def both(rows: dict[bytes, bytes]) -> None:
        follower.apply(world.put(writer, rows), list(rows), list(rows.values()))

    both({b"a": b"1", b"b": b"1", b"c": b"1"})
    both({b"a": b"2"})
    await writer.flush()
    both({b"b": b"3"})  # in one layer with rows that the manifest covers
    with follower.snapshot() as snapshot:
        before = dict(world.rows)
        assert await follower.refresh() is True
        assert follower.max_applied_seqno == 3 and follower.max_persisted_seqno == 2
        assert await collect(follower.scan()) == expected(world.rows)
        both({b"c": b""})
        await writer.flush()
        assert await follower.refresh() is True
        assert follower.memtable.layers == () and follower.memtable.size_bytes == 0
        assert await collect(follower.scan()) == expected(world.rows)
        assert await collect(snapshot.scan()) == expected(before)


async def test_a_follower_behind_its_manifest_shadows_nothing_and_skips_what_the_files_hold(
    objects: ObjectStore,
) -> None:
    """A manifest may arrive before the batches that it covers: older rows in memory must not hide newer ones in
    files."""
    world = World(objects)
    writer = await world.open()
    follower = await world.open(follower=True)
    log = []
    for turn in range(6):
        rows = {b"a": b"%d" % turn, b"row/%d" % turn: b"1", b"row/%d" % (turn - 1): b""}
        log.append((world.put(writer, rows), list(rows), list(rows.values())))
    follower.apply(*log[0])
    follower.apply(*log[1])
    await writer.flush()
    manifest = await world.newest_manifest()
    assert manifest is not None and follower.refresh_to(manifest) is True
    assert await collect(follower.scan()) == expected(world.rows)
    assert await follower.get(b"a") == b"5"
    for batch in log[2:]:
        follower.apply(*batch)  # late, and in the files already
    assert follower.max_applied_seqno == 6 and follower.memtable.layers == ()
    assert await collect(follower.scan()) == expected(world.rows)
    follower.apply(7, [b"a"], [b"7"])
    assert await follower.get(b"a") == b"7"


async def test_a_followers_memory_is_bounded_by_what_no_manifest_covers() -> None:
    world = World(memory())
    writer = await world.open()
    follower = await world.open(follower=True)
    most = 0
    for turn in range(40):
        rows = numbered(range(turn * 10, turn * 10 + 10))
        follower.apply(world.put(writer, rows), list(rows), list(rows.values()))
        if turn % 4 == 0:
            await writer.flush()
            rows = numbered(range(3), "late")  # so that a layer always spans the manifest's seqno
            follower.apply(world.put(writer, rows), list(rows), list(rows.values()))
            await follower.refresh()
        most = max(most, follower.memtable.rows)
    assert most <= 3 * 43
    assert await collect(follower.scan()) == expected(world.rows)
