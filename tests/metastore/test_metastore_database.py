"""The database on memory and on a local directory: batches, flush, recovery, failures, point reads.

Cases: memtable flush, recovery, failed manifest write, random operations against a shadow map, reading one's own batch,
pre-open, writes to a read-only database, a get of a key at a lower seqno. The cases of snapshots and refresh are in
test_metastore_snapshots.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import msgspec
import pytest

from support.metastore.lsm_world import SMALL, UUID, Gate, Watched, World, collect, expected, failing, numbered
from support.metastore.lsm_world import objects as objects  # the fixture
from support.waiting import until
from tidemill.base.errors import (
    ClosedError,
    ConflictError,
    CorruptError,
    FencedError,
    InvalidError,
    MissingError,
    TidemillError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidemill.base.limits import (
    METASTORE_BATCH_BYTES,
    METASTORE_BATCH_ROWS,
    METASTORE_KEY_BYTES,
    METASTORE_VALUE_BYTES,
)
from tidemill.metastore.lsm import write_stall
from tidemill.metastore.lsm.database import Database
from tidemill.metastore.lsm.manifest import Manifest
from tidemill.metastore.lsm.memtable import ROW_OVERHEAD_BYTES
from tidemill.metastore.lsm.options import Options
from tidemill.metastore.lsm.read_view import PENDING
from tidemill.metastore.lsm.sst import SstWriter
from tidemill.metastore.lsm.version import Edit
from tidemill.objects.store import ObjectStore

SST, MANIFEST = "/sst/", "/manifest/"


# the LSM table ---------------------------------------------------------------------------------------


async def test_memtable_flush(objects: ObjectStore) -> None:
    world = World(objects)
    database = await world.open()
    world.put(database, numbered(range(50)))
    world.put(database, {b"row/000003": b""})
    assert await database.flush() == 2
    assert database.memtable.layers == () and len(database.version.levels[0]) == 1
    assert database.max_persisted_seqno == 2 and len(await world.sst_keys()) == 1
    assert await collect(database.scan()) == expected(world.rows)
    assert await database.get(b"row/000003") is None


async def test_recovery(objects: ObjectStore) -> None:
    """Flushed rows are recovered; the caller applies the others again."""
    world = World(objects)
    database = await world.open()
    world.put(database, numbered(range(30)))
    await database.flush()
    kept = dict(world.rows)
    world.put(database, numbered(range(20, 60), "w"))
    await database.aclose()
    database = await world.open()
    assert (database.max_persisted_seqno, database.max_applied_seqno) == (1, 1)
    assert await collect(database.scan()) == expected(kept)
    database.apply(2, list(numbered(range(20, 60))), list(numbered(range(20, 60), "w").values()))
    assert await collect(database.scan()) == expected(world.rows)
    await database.flush()
    assert await collect(database.scan()) == expected(world.rows)


async def test_failed_manifest_write(objects: ObjectStore) -> None:
    """The flush raises, no seqno is persisted, rows stay readable, and a later flush retries."""
    world = World(objects)
    database = await world.open()
    world.put(database, numbered(range(10)))
    world.objects.before_put = failing(MANIFEST, UnavailableError("no"))
    with pytest.raises(UnavailableError):
        await database.flush()
    assert database.max_persisted_seqno == 0 and await world.newest_manifest() is None
    assert await collect(database.scan()) == expected(world.rows)
    world.put(database, numbered(range(5, 15), "w"))
    assert await database.flush() == 2
    assert await collect(database.scan()) == expected(world.rows)
    assert database.memtable.size_bytes == 0


async def test_random_against_a_shadow_map_with_deletes(objects: ObjectStore) -> None:
    world = World(objects, msgspec.structs.replace(SMALL, write_buffer_bytes=40_000))
    database = await world.open(background=True)
    source = random.Random(5)
    for turn in range(300):
        await database.background.stall.wait()
        rows = [(b"row/%03d" % source.randrange(400), b"" if source.random() < 0.3 else b"%d" % turn) for _ in range(9)]
        world.put(database, rows)
        key = b"row/%03d" % source.randrange(400)
        assert await database.get(key) == world.rows.get(key)
        if turn % 60 == 59:
            assert await collect(database.scan()) == expected(world.rows)
            assert await collect(database.scan(reverse=True)) == expected(world.rows, reverse=True)
    await database.flush()
    assert database.stats().merges > 0  # compaction took part
    assert await collect(database.scan()) == expected(world.rows)
    await database.aclose()


async def test_read_your_writes_batch(objects: ObjectStore) -> None:
    """A batch is visible as a whole to the next statement, its last row of a key counts, and all rows carry its
    seqno."""
    world = World(objects)
    database = await world.open()
    world.put(database, numbered(range(5)))
    await database.flush()
    world.put(database, [(b"row/000001", b"x"), (b"row/000002", b""), (b"new", b"1"), (b"new", b"2")])
    assert database.peek(b"row/000001") == b"x" and database.peek(b"row/000002") is None
    assert [await database.get_row(key) for key in (b"row/000001", b"row/000002", b"new", b"row/000000")] == [
        (2, b"x"),
        None,
        (2, b"2"),
        (1, b"v0"),
    ]
    for reverse in (False, True):
        assert await collect(database.scan(reverse=reverse)) == expected(world.rows, reverse=reverse)
        rows = expected(world.rows, b"row/", b"row0", reverse=reverse)
        assert await collect(database.prefix(b"row/", reverse=reverse)) == rows
    with database.snapshot() as snapshot:
        assert await snapshot.get_many([b"row/000001", b"row/000002", b"new"]) == [b"x", None, b"2"]
    with pytest.raises(InvalidError):
        database.apply(3, [b"new", b""], [b"3", b"3"])  # refused: nothing of it is read
    assert await collect(database.scan()) == expected(world.rows)


async def test_pre_open_reads_no_file_unless_it_is_told_to(objects: ObjectStore) -> None:
    """Off: a file is opened at its first use. On: the newest files are open soon after, each by one read."""
    world = World(objects)
    database = await world.open()
    for turn in range(3):
        world.put(database, numbered(range(turn, 40, 3)))
        await database.flush()
    await database.aclose()
    world.objects.reads.clear()
    database = await world.open()
    for _ in range(20):
        await asyncio.sleep(0)
    assert all(SST not in key for key in world.objects.reads)
    assert await collect(database.scan()) == expected(world.rows)
    files = database.version.levels[0]
    await database.aclose()
    for wished in (2, 100):
        world.objects.reads.clear()
        options = msgspec.structs.replace(SMALL, pre_open=wished)
        for how in ({}, {"read_only": True}):
            database = await world.open(options=options, **how)
            opened = files[:wished]
            await until(lambda: all(database.tables.cached_meta(file) is not None for file in opened))  # noqa: B023
            read = [key for key in world.objects.reads if SST in key]
            assert sorted(read) == sorted(database.files.key(file) for file in opened)
            world.objects.reads.clear()
            assert await database.get(b"row/000002") == b"v2"  # newest first, so its file is open
            assert len(world.objects.reads) == 1
            world.objects.reads.clear()
            await database.aclose()


async def test_a_damaged_file_does_not_keep_a_database_from_opening(objects: ObjectStore) -> None:
    world = World(objects)
    database = await world.open()
    for key in (b"a", b"b", b"c"):
        world.put(database, {key: b"1"})
        await database.flush()
    await database.aclose()
    await world.objects.delete((await world.sst_keys())[1])
    database = await world.open(options=msgspec.structs.replace(SMALL, pre_open=9))
    await until(lambda: sum(SST in key for key in world.objects.reads) == 3)
    assert await database.get_many([b"a", b"c"]) == [b"1", b"1"] and database.background.failure is None
    with pytest.raises(MissingError):
        await database.get(b"b")
    await database.aclose()


async def test_read_only_throws(objects: ObjectStore) -> None:
    world = World(objects)
    writer = await world.open()
    world.put(writer, numbered(range(5)))
    await writer.flush()
    reader = await world.open(read_only=True)
    assert await collect(reader.scan()) == expected(world.rows)
    with pytest.raises(InvalidError, match="read-only"):
        reader.apply(9, [b"a"], [b"1"])
    for call in (reader.flush, reader.background.compact, reader.background.collect_garbage):
        with pytest.raises(InvalidError, match="read-only"):
            await call()
    with pytest.raises(InvalidError, match="read-only"):
        await reader.commit_edit(Edit())
    await reader.background.stall.wait()
    assert await collect(reader.scan()) == expected(world.rows)


async def test_get_finds_a_key_at_a_lower_seqno(objects: ObjectStore) -> None:
    """F25: the newest rows of a file do not tell where an older key is stored."""
    world = World(objects)
    database = await world.open()
    world.put(database, {b"old": b"1", b"x": b"1"})
    await database.flush()
    world.put(database, {b"y": b"2"})
    with database.snapshot() as snapshot:  # at seqno 2: the key's file has none but seqno 1
        assert snapshot.seqno == 2 and await snapshot.get(b"old") == b"1"
        assert (await collect(snapshot.scan()))[0] == (b"old", b"1")
    for turn in range(3):
        world.put(database, {b"a": b"%d" % turn, b"z": b"%d" % turn})  # a file whose range covers the old key
        await database.flush()
    world.put(database, {b"b": b"in memory"})
    assert await database.get(b"old") == b"1" and await database.get_row(b"old") == (1, b"1")
    with database.snapshot() as snapshot:
        assert await snapshot.get_row(b"old") == (1, b"1")
    assert await database.get_many([b"old", b"a"]) == [b"1", b"2"]
    await database.background.compact()
    assert await database.get_row(b"old") == (1, b"1")


async def test_a_tombstone_in_a_newer_file_ends_the_search(objects: ObjectStore) -> None:
    world = World(objects)
    database = await world.open()
    world.put(database, numbered(range(9)))
    await database.flush()
    world.put(database, {b"row/000004": b""})
    await database.flush()
    for warm in (False, True):
        assert await database.get(b"row/000004") is None, warm
        assert await database.get_row(b"row/000004") is None
        assert await database.get_many([b"row/000004", b"row/000005"]) == [None, b"v5"]
        assert await collect(database.scan()) == expected(world.rows)
    assert database.peek(b"row/000004") is None


# batches ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seqno", "keys", "values", "said"),
    [
        (5, [b"a"], [b"1"], "increase"),
        (4, [b"a"], [b"1"], "increase"),
        (6, [], [], "at least one row"),
        (6, [b"a", b"b"], [b"1"], "one value for each key"),
        (6, [b"a", b""], [b"1", b"2"], "must not be empty: row=1"),
        (6, [b"k" * (METASTORE_KEY_BYTES + 1)], [b"1"], "too long"),
        (6, [b"k"], [b"v" * (METASTORE_VALUE_BYTES + 1)], "value is too large"),
        (6, [b"%d" % i for i in range(17)], [b"v" * (METASTORE_BATCH_BYTES // 17 + 1)] * 17, "batch is too large"),
        (6, [b"%d" % i for i in range(METASTORE_BATCH_ROWS + 1)], [b"v"] * (METASTORE_BATCH_ROWS + 1), "too large"),
    ],
)
async def test_a_refused_batch_changes_nothing(seqno: int, keys: list[bytes], values: list[bytes], said: str) -> None:
    world = World(Watched(memory()))
    database = await world.open()
    database.apply(5, [b"here"], [b"1"])
    with pytest.raises(InvalidError, match=said):
        database.apply(seqno, keys, values)
    assert database.max_applied_seqno == 5
    assert await collect(database.scan()) == [(b"here", b"1")]
    assert database.memtable.size_bytes == 5 + ROW_OVERHEAD_BYTES
    await database.flush()
    assert await collect(database.scan()) == [(b"here", b"1")]


async def test_a_batch_at_the_limits_is_taken() -> None:
    world = World(memory(), Options())
    database = await world.open()
    value = b"v" * METASTORE_VALUE_BYTES
    world.put(database, {b"%02d" % number: value for number in range(15)})
    world.put(database, {b"k" * METASTORE_KEY_BYTES: b"1"})
    world.put(database, {b"%05d" % number: b"1" for number in range(METASTORE_BATCH_ROWS)})
    await database.flush()
    assert await collect(database.scan()) == expected(world.rows)


# flush -----------------------------------------------------------------------------------------------


async def test_an_empty_flush_does_nothing(objects: ObjectStore) -> None:
    world = World(objects)
    database = await world.open()
    assert await database.flush() == 0
    world.put(database, {b"a": b"1"})
    await database.flush()
    written = len(world.objects.puts)
    assert await database.flush() == 1
    assert len(world.objects.puts) == written == 2


async def test_flush_and_write_interleave_and_the_seqno_covers_only_the_frozen_rows(objects: ObjectStore) -> None:
    """F22, L4: batches that arrive while the file is written are neither lost nor claimed by its manifest."""
    world = World(objects)
    database = await world.open()
    world.put(database, numbered(range(40)))
    gate = world.objects.before_put = Gate(SST)
    flushing = asyncio.create_task(database.flush())
    await until(lambda: gate.waiting > 0)
    world.put(database, numbered(range(20, 50), "w"))
    assert await collect(database.scan()) == expected(world.rows)
    gate.open.set()
    assert await flushing == 1
    manifest = await world.newest_manifest()
    assert manifest is not None and manifest.last_seqno == 1 == manifest.levels[0][0].max_seqno
    assert await collect(database.scan()) == expected(world.rows)
    assert await database.flush() == 2
    assert await collect(database.scan()) == expected(world.rows)


async def test_flushes_called_at_once_share_one_file() -> None:
    world = World(memory())
    database = await world.open()
    world.put(database, numbered(range(10)))
    gate = world.objects.before_put = Gate(SST)
    first = [asyncio.create_task(database.flush()) for _ in range(5)]
    await until(lambda: gate.waiting > 0)
    world.put(database, numbered(range(10), "w"))
    later = [asyncio.create_task(database.flush()) for _ in range(5)]
    await asyncio.sleep(0)
    gate.open.set()
    assert await asyncio.gather(*first) == [1] * 5
    assert set(await asyncio.gather(*later)) == {2}  # not served by the file that was frozen before them
    assert len(await world.sst_keys()) == 2


async def test_a_failed_flush_is_told_to_those_who_waited_for_it_and_not_to_who_came_later() -> None:
    world = World(memory())
    database = await world.open()
    world.put(database, numbered(range(10)))
    gate = Gate(SST)
    fail = failing(SST, UnavailableError("no"))

    async def wait_then_fail(key: str) -> None:
        await gate(key)
        await fail(key)

    world.objects.before_put = wait_then_fail
    first = asyncio.create_task(database.flush())
    await until(lambda: gate.waiting > 0)
    world.put(database, numbered(range(10), "w"))
    later = asyncio.create_task(database.flush())
    await asyncio.sleep(0)
    gate.open.set()
    with pytest.raises(UnavailableError):
        await first
    assert await later == 2


async def test_a_flush_past_its_deadline_is_unavailable_and_goes_on() -> None:
    world = World(memory())
    database = await world.open()
    world.put(database, numbered(range(10)))
    gate = world.objects.before_put = Gate(MANIFEST)
    with pytest.raises(UnavailableError, match="continues in the background"):
        await database.flush(timeout_s=0.01)
    assert database.max_persisted_seqno == 0
    gate.open.set()
    await until(lambda: database.max_persisted_seqno == 1)
    assert len(await world.sst_keys()) == 1 and await database.flush(timeout_s=0.01) == 1


async def test_a_cancelled_flush_call_leaves_the_flush_running() -> None:
    world = World(memory())
    database = await world.open()
    world.put(database, numbered(range(10)))
    gate = world.objects.before_put = Gate(MANIFEST)
    flushing = asyncio.create_task(database.flush())
    await until(lambda: gate.waiting > 0)
    flushing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await flushing
    gate.open.set()
    await until(lambda: database.max_persisted_seqno == 1)
    database.apply(2, [b"a"], [b"1"])  # and the database is not broken


async def test_a_full_write_buffer_is_flushed_without_a_call() -> None:
    world = World(memory(), msgspec.structs.replace(SMALL, write_buffer_bytes=20 * ROW_OVERHEAD_BYTES))
    database = await world.open()
    world.put(database, numbered(range(15)))
    await asyncio.sleep(0.01)
    assert database.max_persisted_seqno == 0
    world.put(database, numbered(range(15, 30)))
    await until(lambda: database.max_persisted_seqno == 2)


async def test_an_automatic_flush_that_failed_is_tried_again() -> None:
    world = World(memory(), msgspec.structs.replace(SMALL, write_buffer_bytes=5 * ROW_OVERHEAD_BYTES))
    database = await world.open()
    world.objects.before_put = failing(SST, UnavailableError("no"), times=2)
    world.put(database, numbered(range(9)))
    await until(lambda: database.stats().flushes == 1)
    assert sum(SST in key for key in world.objects.puts) == 3 and len(await world.sst_keys()) == 1
    assert database.max_persisted_seqno == 1
    await until(lambda: database.stats().flush_error == "")


@pytest.mark.parametrize("error", [UnknownOutcomeError("lost"), ConflictError("there")])
async def test_a_file_whose_fate_is_unknown_is_written_again_under_another_name(error: TidemillError) -> None:
    world = World(memory())
    database = await world.open()
    world.put(database, numbered(range(9)))
    world.objects.after_put = failing(SST, error)
    with pytest.raises(UnavailableError):
        await database.flush()
    await database.flush()
    keys = await world.sst_keys()
    assert len(set(keys)) == 2 and database.files.key(database.version.levels[0][0]) == keys[1]
    assert await collect(database.scan()) == expected(world.rows)


async def test_a_flush_yields_to_the_loop_after_every_slice_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flush writes at most `slice_rows` rows into the file between two turns of the loop."""
    at_once: list[int] = []
    since_turn = 0
    add = SstWriter.add

    def counting(self: SstWriter, keys: list[bytes], values: list[bytes], seqnos: list[int]) -> None:
        nonlocal since_turn
        since_turn += len(keys)
        at_once.append(since_turn)
        add(self, keys, values, seqnos)

    async def tick() -> None:
        nonlocal since_turn
        while True:
            since_turn = 0
            await asyncio.sleep(0)

    world = World(memory(), msgspec.structs.replace(SMALL, slice_rows=100))
    database = await world.open()
    world.put(database, numbered(range(3_000)))
    with database.snapshot():
        world.put(database, numbered(range(2_000, 4_000), "w"))  # a second layer: merged, also in slices
    monkeypatch.setattr(SstWriter, "add", counting)
    ticking = asyncio.create_task(tick())
    await database.flush()
    ticking.cancel()
    assert max(at_once) <= 100 and len(at_once) >= 40
    assert database.background.flusher.longest_slice_rows <= 100
    assert await collect(database.scan()) == expected(world.rows)


# the end of a database -------------------------------------------------------------------------------


async def test_a_manifest_write_with_an_unknown_end_breaks_the_database(objects: ObjectStore) -> None:
    """L6: no write, read or collection succeeds until it is reopened. Then no row is lost."""
    world = World(objects)
    database = await world.open()
    world.put(database, numbered(range(9)))
    await database.flush()
    snapshot, scan = database.snapshot(), database.scan()
    world.put(database, numbered(range(5, 20), "w"))
    world.objects.after_put = failing(MANIFEST, UnknownOutcomeError("lost"))
    with pytest.raises(UnknownOutcomeError, match="broken"):
        await database.flush()
    await every_call_raises(database, UnknownOutcomeError)
    with pytest.raises(UnknownOutcomeError):
        await snapshot.get(b"row/000001")
    with pytest.raises(UnknownOutcomeError):
        await anext(scan)
    snapshot.close()
    await database.aclose()
    database = await world.open()
    assert database.max_persisted_seqno == 2  # the write had happened
    assert await collect(database.scan()) == expected(world.rows)


async def test_a_fenced_database_ends(objects: ObjectStore) -> None:
    world = World(objects)
    old = await world.open()
    new = await world.open()
    world.put(new, {b"a": b"new"})
    await new.flush()
    old.apply(1, [b"a"], [b"old"])
    with pytest.raises(FencedError):
        await old.flush()
    await every_call_raises(old, FencedError)
    assert await new.get(b"a") == b"new"
    manifest = await world.newest_manifest()
    assert manifest is not None and manifest.epoch == new.epoch


async def test_a_refused_manifest_leaves_the_database_open() -> None:
    world = World(memory())
    database = await world.open()
    world.put(database, numbered(range(5)))
    world.objects.before_put = failing(MANIFEST, ConflictError("no"))
    with pytest.raises(ConflictError):
        await database.flush()
    assert await collect(database.scan()) == expected(world.rows)
    assert await database.flush() == 1


async def test_a_closed_database_raises_closed_and_flushes_nothing(objects: ObjectStore) -> None:
    world = World(objects)
    database = await world.open(background=True)
    world.put(database, numbered(range(5)))
    gate = world.objects.before_put = Gate(SST)
    flushing = asyncio.create_task(database.flush())
    await until(lambda: gate.waiting > 0)
    await database.aclose()
    with pytest.raises(ClosedError):
        await flushing
    await every_call_raises(database, ClosedError)
    await database.aclose()
    assert await world.newest_manifest() is None


async def every_call_raises(database: Database, kind: type[TidemillError]) -> None:
    plain: list[Callable[[], object]] = [
        lambda: database.apply(99, [b"a"], [b"1"]),
        lambda: database.peek(b"a"),
        database.scan,
        lambda: database.prefix(b"a"),
        database.snapshot,
    ]
    for call in plain:
        with pytest.raises(kind):
            call()
    for waiting in (
        database.get(b"a"),
        database.get_row(b"a"),
        database.get_many([b"a"]),
        database.background.stall.wait(),
        database.flush(),
        database.background.compact(),
        database.refresh(),
        database.background.collect_garbage(),
        database.commit_edit(Edit()),
    ):
        with pytest.raises(kind):
            await waiting


# opening ---------------------------------------------------------------------------------------------


async def test_another_domains_manifest_is_refused(objects: ObjectStore) -> None:
    world = World(objects)
    await world.manifests.write(Manifest("another", 1, 1, 5, 9, 0, ((),)))
    with pytest.raises(InvalidError, match=f"another domain: domain_uuid={UUID} manifest_domain_uuid=another"):
        await world.open()


async def test_a_manifest_without_levels_is_an_empty_database() -> None:
    world = World(memory())
    await world.manifests.write(Manifest(UUID, 1, 1, 5, 9, 0, ()))
    database = await world.open()
    assert database.max_applied_seqno == 5 and await collect(database.scan()) == []
    with pytest.raises(InvalidError):
        database.apply(5, [b"a"], [b"1"])
    database.apply(6, [b"a"], [b"1"])
    await database.flush()
    assert await database.get(b"a") == b"1"


# point reads -----------------------------------------------------------------------------------------


async def test_a_cold_get_reads_at_most_two_ranges_and_a_warm_one_none(objects: ObjectStore) -> None:
    world = World(objects)
    database = await world.open()
    world.put(database, numbered(range(500)))
    await database.background.compact()
    await database.aclose()
    database = await world.open()
    world.objects.reads.clear()
    assert await database.get(b"row/000123") == b"v123"
    assert len(world.objects.reads) == 2  # filter with index, and one block
    assert await database.get(b"row/000123") == b"v123" and database.peek(b"row/000123") == b"v123"
    assert len(world.objects.reads) == 2
    file = next(database.version.candidates(b"row/000123"))
    other = max(file.smallest, file.largest, key=lambda key: abs(int(key[4:]) - 123))
    assert database.peek_row(other) is PENDING  # its file is open, its block is not there
    assert await database.get_row(other) == (1, world.rows[other])
    assert database.peek_row(other) == (1, world.rows[other])
    assert len(world.objects.reads) == 3


async def test_the_filter_is_asked_before_any_block_is_read() -> None:
    world = World(memory())
    database = await world.open()
    for turn in range(4):
        world.put(database, {b"a": b"%d" % turn, b"z": b"%d" % turn, **numbered(range(turn, 400, 4))})
        await database.flush()
    world.objects.reads.clear()
    assert await database.get(b"row/000000!") is None
    assert len(world.objects.reads) == 4  # filter with index of each file, and no block
    world.objects.reads.clear()
    for number in range(300):
        assert await database.get(b"row/%06d!" % number) is None
    assert len(world.objects.reads) <= 4 * 300 * 0.03  # false positives of 12 bits per key are about 1 %


async def test_keys_of_neighbouring_blocks_share_a_read(objects: ObjectStore) -> None:
    world = World(objects)
    database = await world.open()
    world.put(database, numbered(range(1_000)))
    await database.flush()
    world.put(database, {b"row/000500": b"", b"row/000510": b"mem"})
    assert len((await database.tables.meta(database.version.levels[0][0])).last_keys) > 50
    world.objects.reads.clear()
    keys = [b"row/%06d" % number for number in range(520, 490, -1)] + [b"row/000900", b"absent", b"row/000900"]
    assert await database.get_many(keys) == [world.rows.get(key) for key in keys]
    assert len(world.objects.reads) == 2
    assert await database.get_many([]) == []


async def test_a_cold_read_outlives_the_merge_that_removes_its_file() -> None:
    world = World(memory())
    database = await world.open()
    for turn in range(3):
        world.put(database, numbered(range(turn, 60, 3)))
        await database.flush()
    gate = world.objects.before_read = Gate(SST)
    reading = asyncio.create_task(database.get(b"row/000030"))
    reading_many = asyncio.create_task(database.get_many([b"row/000031", b"row/000032"]))
    await until(lambda: gate.waiting > 0 and database.versions.pins == 2)
    world.objects.before_read = None
    before = set(await world.sst_keys())
    await database.background.compact()
    await database.background.collect_garbage()
    assert set(await world.sst_keys()) > before  # pinned by the two reads
    gate.open.set()
    assert await reading == b"v30" and await reading_many == [b"v31", b"v32"]
    for turn in range(SMALL.manifests_kept):  # until no retained manifest names them
        world.put(database, {b"x": b"%d" % turn})
        await database.flush()
    await database.background.collect_garbage()
    assert not before & set(await world.sst_keys())


async def test_a_damaged_block_is_corrupt_and_other_rows_stay_readable(objects: ObjectStore) -> None:
    world = World(objects)
    database = await world.open()
    world.put(database, numbered(range(200)))
    await database.flush()
    file = database.version.levels[0][0]
    key = database.files.key(file)
    meta = await database.tables.meta(file)
    data = bytearray(await world.objects.get(key))
    data[meta.starts[3] + 9] ^= 0x40
    await world.objects.delete(key)
    await world.objects.inner.put(key, bytes(data))
    victim = meta.last_keys[2]  # separators: this one is at or above the last key of block 2
    hurt = [row for row in world.rows if victim < row <= meta.last_keys[3]]
    for row in hurt:
        with pytest.raises(CorruptError, match=key.rpartition("/")[2]):
            await database.get(row)
    with pytest.raises(CorruptError):
        await collect(database.scan())
    assert await database.get(b"row/000000") == b"v0" and await database.get(b"row/000199") == b"v199"
    await world.objects.delete(key)
    with pytest.raises(MissingError, match=key.rpartition("/")[2]):
        await database.get(b"row/000100")
    assert database.versions.pins == 0


# back-pressure ---------------------------------------------------------------------------------------


async def test_writers_are_slowed_and_then_stopped_as_level_0_grows() -> None:
    options = msgspec.structs.replace(SMALL, l0_compact=2, l0_slow=3, l0_stop=4)
    world = World(memory(), options)
    database = await world.open()
    database.background.compacts = True  # as if the loop ran, and were late
    waits = []
    for turn in range(4):
        await database.background.stall.wait()
        waits.append((database.stats().slowed, database.stats().stopped))
        world.put(database, numbered(range(turn, 20)))
        await database.flush()
    assert waits == [(0, 0), (0, 0), (0, 0), (1, 0)]
    stopped = asyncio.create_task(database.background.stall.wait())
    await until(lambda: database.stats().stopped == 1)
    assert not stopped.done()
    await database.background.compact()
    await stopped
    assert database.stats().waited_s > 0


async def test_writers_stop_while_more_than_two_write_buffers_are_full_and_may_be_cancelled() -> None:
    world = World(memory(), msgspec.structs.replace(SMALL, write_buffer_bytes=10 * ROW_OVERHEAD_BYTES))
    database = await world.open()
    gate = world.objects.before_put = Gate(SST)
    world.put(database, numbered(range(15)))
    await database.background.stall.wait()
    await until(lambda: gate.waiting > 0)
    world.put(database, numbered(range(15, 30)))
    stopped = [asyncio.create_task(database.background.stall.wait()) for _ in range(3)]
    await until(lambda: database.stats().stopped == 3)
    stopped[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopped[0]
    assert not stopped[1].done()
    gate.open.set()
    await asyncio.gather(*stopped[1:])
    await until(lambda: database.max_persisted_seqno == 2)


async def test_no_merge_loop_no_stop() -> None:
    world = World(memory(), msgspec.structs.replace(SMALL, l0_compact=1, l0_slow=1, l0_stop=2))
    database = await world.open(background=False)
    for turn in range(5):
        await database.background.stall.wait()
        world.put(database, {b"a": b"%d" % turn})
        await database.flush()
    assert len(database.version.levels[0]) == 5


async def test_what_ended_the_background_work_is_told_to_the_writer_who_waits_for_it() -> None:
    world = World(memory(), msgspec.structs.replace(SMALL, l0_compact=2, l0_slow=2, l0_stop=2))
    database = await world.open(background=True)
    world.put(database, numbered(range(9)))
    await database.flush()
    manifests = 0

    async def refuse_all_but_the_first(key: str) -> None:
        nonlocal manifests
        manifests += MANIFEST in key
        if manifests > 1:
            raise ConflictError("refused")

    world.objects.before_put = refuse_all_but_the_first
    world.put(database, numbered(range(9)))
    await database.flush()  # the second file: now the loop merges, and its manifest is refused
    with pytest.raises(UnavailableError, match="has ended"):
        await database.background.stall.wait()
    assert isinstance(database.background.failure, ConflictError)
    await database.aclose()


async def test_a_stop_that_lasts_because_flushes_fail_is_told_to_the_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_stall, "CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(write_stall, "STOP_ERROR_AFTER_S", 0.05)
    world = World(memory(), msgspec.structs.replace(SMALL, write_buffer_bytes=10 * ROW_OVERHEAD_BYTES))
    database = await world.open()
    world.objects.before_put = failing(SST, UnavailableError("the bucket is away"), times=1_000)
    world.put(database, numbered(range(30)))
    with pytest.raises(UnavailableError, match=r"keeps failing.*the bucket is away"):
        await database.background.stall.wait()
    world.objects.before_put = None
    await database.background.stall.wait()  # the next try of the flush makes room
    assert database.max_persisted_seqno == 1


# hooks of the background work --------------------------------------------------------------------------


async def test_manifests_are_written_one_after_the_other_each_from_the_newest_version() -> None:
    world = World(memory())
    database = await world.open()
    world.put(database, numbered(range(0, 20)))
    await database.flush()
    world.put(database, numbered(range(20, 40)))
    gate = world.objects.before_put = Gate(MANIFEST)
    flushing = asyncio.create_task(database.flush())
    await until(lambda: gate.waiting == 1)
    old = database.version.levels[0][0]
    moving = asyncio.create_task(database.commit_edit(Edit(added=((1, old),), removed=(old,))))
    for _ in range(20):
        await asyncio.sleep(0)
    assert gate.waiting == 1  # the second one waits for its turn
    gate.open.set()
    await asyncio.gather(flushing, moving)
    manifest = await world.newest_manifest()
    assert manifest is not None and manifest.levels == database.version.levels
    assert [len(level) for level in manifest.levels] == [1, 1] and manifest.last_seqno == 2
    assert await collect(database.scan()) == expected(world.rows)


async def test_a_cancelled_commit_goes_on_and_breaks_nothing() -> None:
    world = World(memory())
    database = await world.open()
    world.put(database, numbered(range(20)))
    await database.flush()
    old = database.version.levels[0][0]
    gate = world.objects.before_put = Gate(MANIFEST)
    moving = asyncio.create_task(database.commit_edit(Edit(added=((1, old),), removed=(old,))))
    await until(lambda: gate.waiting == 1)
    moving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await moving
    gate.open.set()
    await until(lambda: len(database.version.levels) == 2)
    assert await collect(database.scan()) == expected(world.rows)


async def test_a_commit_cut_off_by_closing_is_told_as_closed() -> None:
    """The caller was not cancelled, so it must not see a cancellation."""
    world = World(memory())
    database = await world.open()
    world.put(database, numbered(range(20)))
    await database.flush()
    old = database.version.levels[0][0]
    gate = world.objects.before_put = Gate(MANIFEST)
    moving = asyncio.create_task(database.commit_edit(Edit(added=((1, old),), removed=(old,))))
    await until(lambda: gate.waiting == 1)
    await database.aclose()
    with pytest.raises(ClosedError):
        await moving


async def test_an_edit_that_removes_what_is_gone_is_a_conflict() -> None:
    world = World(memory())
    database = await world.open()
    world.put(database, numbered(range(20)))
    await database.flush()
    old = database.version.levels[0][0]
    await database.background.compact()
    with pytest.raises(ConflictError, match="not live"):
        await database.commit_edit(Edit(removed=(old,)))
    assert await collect(database.scan()) == expected(world.rows)


async def test_a_number_is_in_flight_until_its_file_is_in_a_version() -> None:
    world = World(memory())
    database = await world.open()
    assert database.versions.lowest_in_flight == 1
    name = database.versions.next_file_name()
    world.put(database, numbered(range(5)))
    gate = world.objects.before_put = Gate(MANIFEST)
    flushing = asyncio.create_task(database.flush())
    await until(lambda: gate.waiting == 1)
    assert database.versions.lowest_in_flight == name.number == 1
    database.versions.release_file_names([name])
    assert database.versions.lowest_in_flight == 2  # the flush's, whose file is stored already
    gate.open.set()
    await flushing
    assert database.versions.lowest_in_flight == 3
    manifest = await world.newest_manifest()
    assert manifest is not None and manifest.next_file_number == 3
    again = await world.open()
    assert again.versions.next_file_name().number == 3


async def test_statistics_add_up() -> None:
    world = World(memory())
    database = await world.open()
    for turn in range(3):
        world.put(database, numbered(range(turn, 90, 3)))
        await database.flush()
    world.put(database, numbered(range(4)))
    snapshot = database.snapshot()
    stats = database.stats()
    assert (stats.flushes, stats.memtable_rows, stats.layers, stats.pins) == (3, 4, 1, 1)
    assert stats.levels[0].files == 3 and stats.levels[0].rows == 90
    assert stats.write_amplification == 1.0
    snapshot.close()
    await database.background.compact()
    stats = database.stats()
    assert (stats.merges, stats.merged_rows, stats.pins, stats.memtable_bytes) == (1, 90, 0, 0)
    assert 1.5 < stats.write_amplification < 2.5
    assert sum(level.size_bytes for level in stats.levels) == database.version.size_bytes


def memory() -> ObjectStore:
    from tidemill.base.clock import SystemClock
    from tidemill.objects.memory import MemoryObjects

    return MemoryObjects(SystemClock())
