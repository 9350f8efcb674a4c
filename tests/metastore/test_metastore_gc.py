"""Collection: each clause of rule L7 retains a file that is still needed, and unneeded files are deleted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import msgspec
import pytest
from structlog.testing import capture_logs

from sim.scenarios.metastore_plants import planted
from support.metastore.lsm_files import PREFIX
from tidemill.base.clock import ManualClock, Rand
from tidemill.base.errors import ClosedError, CorruptError, UnavailableError, UnknownOutcomeError
from tidemill.metastore.lsm.file_store import FileName, SstFiles
from tidemill.metastore.lsm.gc import CollectionResult, GarbageCollector, Roots, retained_manifests
from tidemill.metastore.lsm.manifest import FileMeta, Manifest
from tidemill.metastore.lsm.manifest_store import BucketManifests, ManifestName
from tidemill.metastore.lsm.options import Options
from tidemill.objects.memory import MemoryObjects
from tidemill.objects.store import Buffer, ObjectMeta

DELAY_MS = 1000
OPTIONS = Options(gc_delay_ms=DELAY_MS, manifests_kept=2)


class Bucket:
    """A bucket with real files and manifests, and a collector of epoch 2 over it."""

    def __init__(self, *, options: Options = OPTIONS) -> None:
        self.clock = ManualClock()
        self.use(MemoryObjects(self.clock), options)
        self.current: list[FileMeta] = []
        self.pinned: list[FileMeta] = []
        self.lowest_in_flight = 100
        self.replicated: tuple[int, int] | None = None

    def use(self, objects: MemoryObjects, options: Options = OPTIONS) -> None:
        self.objects = objects
        self.files = SstFiles(objects, PREFIX)
        self.manifests = BucketManifests(objects, PREFIX, Rand(1))
        self.collector = GarbageCollector(self.files, self.manifests, options, self.clock)

    async def file(self, number: int, epoch: int = 2, nonce: str = "n") -> FileMeta:
        await self.files.put(FileName(epoch, number, nonce), b"rows")
        return FileMeta(epoch, number, nonce, 4, 1, b"a", b"b", 1, 1, 0)

    async def manifest(self, number: int, files: Sequence[FileMeta], epoch: int = 2) -> str:
        return await self.manifests.upload(Manifest("u", epoch, number, number, 100, 0, (tuple(files),)))

    def roots(self) -> Roots:
        return Roots(2, self.lowest_in_flight, frozenset(self.current) | frozenset(self.pinned), self.replicated)

    async def collect(self) -> CollectionResult:
        return await self.collector.collect(self.roots)

    async def collect_late(self) -> CollectionResult:
        """Run a round that first sees the dead files, and one after the delay."""
        first = await self.collect()
        assert first.deleted_files == 0
        self.clock.advance(DELAY_MS)
        return await self.collect()

    async def numbers(self) -> list[tuple[int, int]]:
        return [(name.epoch, name.number) async for name in self.files.list()]

    async def manifest_numbers(self) -> list[tuple[int, int]]:
        return [(name.epoch, name.number) async for name in self.manifests.list()]


async def test_live_pinned_and_retained_files_stay_and_the_rest_goes() -> None:
    bucket = Bucket()
    files = [await bucket.file(number) for number in range(1, 7)]
    bucket.current, bucket.pinned = [files[0]], [files[1]]
    await bucket.manifest(1, [files[5]])
    await bucket.manifest(2, [files[2]])
    await bucket.manifest(3, [files[3]])
    done = await bucket.collect_late()
    assert await bucket.numbers() == [(2, 1), (2, 2), (2, 3), (2, 4)]
    assert (done.deleted_files, done.kept, done.waiting, done.failed, done.missing) == (2, 4, 0, 0, ())
    assert await bucket.manifest_numbers() == [(2, 2), (2, 3)]


async def test_files_of_a_newer_epoch_are_never_touched() -> None:
    bucket = Bucket()
    await bucket.manifest(1, [])
    await bucket.file(1, epoch=3)
    done = await bucket.collect_late()
    assert done.skipped_newer_epoch == 1 and await bucket.numbers() == [(3, 1)]


async def test_the_planted_fault_deletes_a_newer_epochs_file() -> None:
    bucket = Bucket()
    await bucket.manifest(1, [])
    await bucket.file(1, epoch=3)
    with planted("gc-newer-epoch"):
        assert (await bucket.collect_late()).deleted_files == 1


async def test_manifests_of_a_newer_epoch_are_never_touched_and_their_files_are_roots() -> None:
    bucket = Bucket()
    old = await bucket.file(1, epoch=1)
    await bucket.manifest(1, [])
    for number in (2, 3, 4):
        await bucket.manifest(number, [old], epoch=3)
    await bucket.collect_late()
    # Of ours, number 1 is not among the newest any more.
    assert await bucket.manifest_numbers() == [(3, 2), (3, 3), (3, 4)]
    assert await bucket.numbers() == [(1, 1)]


async def test_numbers_at_or_above_the_lowest_in_flight_are_skipped() -> None:
    bucket = Bucket()
    await bucket.manifest(1, [])
    for number in (9, 10, 11):
        await bucket.file(number)
    bucket.lowest_in_flight = 10
    done = await bucket.collect_late()
    assert (done.deleted_files, done.skipped_in_flight) == (1, 2)
    assert await bucket.numbers() == [(2, 10), (2, 11)]


async def test_the_roots_are_taken_before_anything_is_listed() -> None:
    """A file committed while the round lists was in flight at its start, so it is safe without being a root."""
    bucket = Bucket()
    await bucket.manifest(1, [])
    bucket.lowest_in_flight = 10
    taken = False

    def roots() -> Roots:
        nonlocal taken
        taken = True
        return bucket.roots()

    class Late(SstFiles):
        async def list(self) -> AsyncIterator[FileName]:
            assert taken
            await bucket.file(10)
            bucket.lowest_in_flight = 11
            async for name in super().list():
                yield name

    collector = GarbageCollector(Late(bucket.objects, PREFIX), bucket.manifests, OPTIONS, bucket.clock)
    bucket.clock.advance(DELAY_MS)
    done = await collector.collect(roots)
    assert done.skipped_in_flight == 1 and done.waiting == 0


async def test_a_dead_file_waits_until_it_was_seen_dead_for_the_delay() -> None:
    bucket = Bucket()
    await bucket.manifest(1, [])
    file = await bucket.file(1)
    bucket.current = [file]
    bucket.clock.advance(10 * DELAY_MS)
    assert (await bucket.collect()).kept == 1
    bucket.current = []
    # Old, but dead only since this round.
    assert (await bucket.collect()).waiting == 1
    bucket.clock.advance(DELAY_MS - 1)
    assert (await bucket.collect()).waiting == 1
    bucket.clock.advance(1)
    assert (await bucket.collect()).deleted_files == 1


async def test_a_file_that_lives_again_in_between_starts_anew() -> None:
    """A snapshot's pin may end and a retained manifest may appear: only the time since then counts."""
    bucket = Bucket()
    await bucket.manifest(1, [])
    file = await bucket.file(1)
    assert (await bucket.collect()).waiting == 1
    bucket.clock.advance(DELAY_MS)
    bucket.pinned = [file]
    assert (await bucket.collect()).kept == 1
    bucket.pinned = []
    assert (await bucket.collect()).waiting == 1


async def test_a_young_file_waits_however_long_this_process_has_seen_it_dead() -> None:
    bucket = Bucket()
    await bucket.manifest(1, [])
    await bucket.file(1)
    await bucket.collect()
    bucket.clock.advance(DELAY_MS)
    # A delayed request writes the object again: its age starts at zero.
    await bucket.objects.delete(bucket.files.key(FileName(2, 1, "n")))
    await bucket.file(1)
    assert (await bucket.collect()).waiting == 1


async def test_older_epochs_files_wait_for_a_manifest_of_this_epoch() -> None:
    """The dead leader's last manifest may be the newest in the bucket without ever being replicated."""
    bucket = Bucket()
    orphan = await bucket.file(7, epoch=1)
    replicated = await bucket.file(1, epoch=1)
    await bucket.manifest(1, [replicated], epoch=1)
    bucket.current, bucket.replicated = [replicated], (1, 1)
    done = await bucket.collect_late()
    assert (done.deleted_files, done.waiting) == (0, 1)
    # Its upload was on its way all the time. A restore of now would start from it, and finds its file.
    await bucket.manifest(2, [replicated, orphan], epoch=1)
    done = await bucket.collect()
    assert (done.missing, done.kept) == ((), 2)


async def test_older_epochs_orphans_are_swept_once_this_epoch_has_a_manifest() -> None:
    bucket = Bucket()
    await bucket.file(7, epoch=1)
    await bucket.manifest(2, [])
    assert (await bucket.collect_late()).deleted_files == 1


async def test_two_attempts_at_one_number_are_told_apart_by_nonce() -> None:
    bucket = Bucket()
    await bucket.manifest(1, [])
    bucket.current = [await bucket.file(1, nonce="good")]
    await bucket.file(1, nonce="lost")
    assert (await bucket.collect_late()).deleted_files == 1
    assert [name.nonce async for name in bucket.files.list()] == ["good"]


# manifests -------------------------------------------------------------------------------------------


def name_of(epoch: int, number: int, nonce: str = "n") -> ManifestName:
    return ManifestName(epoch, number, nonce, f"{epoch}-{number}-{nonce}", 1, 1)


def test_the_newest_manifests_and_the_replicated_one_are_retained() -> None:
    names = [name_of(1, number) for number in range(1, 6)]
    assert retained_manifests(names, (1, 2), 2, 1) == [names[1], names[3], names[4]]
    assert retained_manifests(names, None, 9, 1) == names
    assert retained_manifests([], (1, 1), 2, 1) == []


def test_many_attempts_at_one_number_count_once() -> None:
    names = [name_of(1, 1), name_of(1, 2), *(name_of(1, 3, f"try{n}") for n in range(5))]
    assert retained_manifests(names, None, 2, 1) == names[1:]


def test_every_manifest_of_a_newer_epoch_is_retained() -> None:
    """A deposed leader cannot know which of them the log accepted: all may be needed, not only the newest."""
    names = [name_of(1, 1), name_of(1, 2), name_of(2, 3), name_of(3, 4), name_of(3, 5)]
    assert retained_manifests(names, None, 1, 1) == names[2:]


async def test_the_replicated_manifest_stays_however_old_it_is() -> None:
    bucket = Bucket()
    file = await bucket.file(1)
    await bucket.manifest(1, [file])
    for number in range(2, 6):
        await bucket.manifest(number, [])
    bucket.replicated = (2, 1)
    done = await bucket.collect_late()
    assert await bucket.manifest_numbers() == [(2, 1), (2, 4), (2, 5)] and done.kept == 1


async def test_manifests_go_before_the_files_they_name() -> None:
    bucket = Bucket(options=msgspec.structs.replace(OPTIONS, gc_delay_ms=0))
    file = await bucket.file(1)
    for number, files in ((1, [file]), (2, []), (3, [])):
        await bucket.manifest(number, files)
    order: list[str] = []

    class Watched(MemoryObjects):
        async def delete(self, key: str) -> None:
            order.append(key.removeprefix(PREFIX).partition("/")[0])
            await bucket.objects.delete(key)

        def list(self, prefix: str, start_after: str = "") -> AsyncIterator[ObjectMeta]:
            return bucket.objects.list(prefix, start_after)

        async def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            return await bucket.objects.get(key, start, end)

    objects = Watched(bucket.clock)
    collector = GarbageCollector(
        SstFiles(objects, PREFIX),
        BucketManifests(objects, PREFIX, Rand(1)),
        msgspec.structs.replace(OPTIONS, gc_delay_ms=0),
        bucket.clock,
    )
    await collector.collect(bucket.roots)
    assert order == ["manifest", "sst"]


async def test_a_manifest_that_will_not_go_keeps_its_files() -> None:
    bucket = Bucket()
    file = await bucket.file(1)
    for number, files in ((1, [file]), (2, []), (3, [])):
        await bucket.manifest(number, files)

    class Stubborn(BucketManifests):
        async def delete(self, key: str) -> None:
            raise UnavailableError("no")

    collector = GarbageCollector(bucket.files, Stubborn(bucket.objects, PREFIX, Rand(1)), OPTIONS, bucket.clock)
    await collector.collect(bucket.roots)
    bucket.clock.advance(DELAY_MS)
    done = await collector.collect(bucket.roots)
    assert (done.deleted_files, done.failed, done.kept) == (0, 1, 1)


async def test_an_unreadable_retained_manifest_stops_all_deletion() -> None:
    bucket = Bucket()
    await bucket.file(1)
    key = await bucket.manifest(1, [])
    data = await bucket.objects.get(key)
    await bucket.objects.delete(key)
    await bucket.objects.put(key, data[:-1])
    for _ in range(2):
        with pytest.raises(CorruptError, match=key):
            await bucket.collect()
        bucket.clock.advance(DELAY_MS)
    assert await bucket.numbers() == [(2, 1)]


async def test_a_retained_manifest_pruned_meanwhile_by_another_leader_ends_the_round() -> None:
    """The replacement of the manifest was not listed, so the set of needed files is unknown."""
    bucket = Bucket()
    dead = await bucket.file(1)
    bucket.clock.advance(2 * DELAY_MS)
    await bucket.manifest(1, [])
    gone = await bucket.manifest(2, [])

    class Racing(BucketManifests):
        async def load(self, key: str) -> Manifest:
            if key == gone:
                await self.delete(key)
            return await super().load(key)

    collector = GarbageCollector(bucket.files, Racing(bucket.objects, PREFIX, Rand(1)), OPTIONS, bucket.clock)
    with pytest.raises(UnavailableError, match="collects garbage here too"):
        await collector.collect(bucket.roots)
    assert await bucket.objects.head(bucket.files.key(dead)) is not None


async def test_a_missing_live_file_is_reported() -> None:
    bucket = Bucket()
    lost, kept = await bucket.file(1), await bucket.file(2)
    await bucket.manifest(1, [lost, kept])
    await bucket.files.delete(lost)
    with capture_logs() as logs:
        done = await bucket.collect()
        assert done.missing == (bucket.files.key(lost),) and bucket.collector.last is done
        await bucket.collect()
    # It is reported once, not in every round.
    assert [(entry["log_level"], entry["files"]) for entry in logs] == [("error", done.missing)]


# failures --------------------------------------------------------------------------------------------


class Failing(MemoryObjects):
    """A store whose deletes fail, before or after their effect, until `fails` is reset."""

    fails: type[UnavailableError] | type[UnknownOutcomeError] | None = None
    under_way = 0
    most = 0

    async def delete(self, key: str) -> None:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        if self.fails is UnavailableError:
            raise UnavailableError("refused")
        await super().delete(key)
        if self.fails is UnknownOutcomeError:
            raise UnknownOutcomeError("lost")

    async def put(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        await super().put(key, data)


def failing_bucket(files: int) -> tuple[Bucket, Failing]:
    bucket = Bucket()
    objects = Failing(bucket.clock)
    bucket.use(objects)
    return bucket, objects


@pytest.mark.parametrize("kind", [UnavailableError, UnknownOutcomeError])
async def test_failed_deletes_are_counted_and_met_again(
    kind: type[UnavailableError] | type[UnknownOutcomeError],
) -> None:
    bucket, objects = failing_bucket(3)
    await bucket.manifest(1, [])
    for number in (1, 2, 3):
        await bucket.file(number)
    objects.fails = kind
    done = await bucket.collect_late()
    assert (done.deleted_files, done.failed) == (0, 3)
    objects.fails = None
    done = await bucket.collect()
    assert (done.failed, await bucket.numbers()) == (0, [])
    assert done.deleted_files == (3 if kind is UnavailableError else 0)


async def test_deletes_run_side_by_side_but_not_without_bound() -> None:
    bucket, objects = failing_bucket(50)
    await bucket.manifest(1, [])
    for number in range(1, 51):
        await bucket.file(number)
    assert (await bucket.collect_late()).deleted_files == 50
    assert 2 <= objects.most <= 8


async def test_a_database_that_breaks_during_a_round_deletes_nothing_more() -> None:
    bucket = Bucket()
    await bucket.manifest(1, [])
    for number in range(1, 4):
        await bucket.file(number)
    await bucket.collect()
    bucket.clock.advance(DELAY_MS)
    with pytest.raises(ClosedError):
        await bucket.collector.collect(bucket.roots, lambda: False)
    assert len(await bucket.numbers()) == 3


async def test_foreign_objects_under_the_prefix_are_left_alone() -> None:
    bucket = Bucket()
    await bucket.manifest(1, [])
    await bucket.objects.put(f"{PREFIX}sst/README", b"mine")
    await bucket.collect_late()
    assert await bucket.objects.get(f"{PREFIX}sst/README") == b"mine"


class Repeating(MemoryObjects):
    """A store whose listings have every entry twice."""

    async def list(self, prefix: str, start_after: str = "") -> AsyncIterator[ObjectMeta]:
        page = [meta async for meta in super().list(prefix, start_after)]
        for meta in page * 2:
            yield meta


async def test_f622_a_listing_that_repeats_its_entries_ends_no_round() -> None:
    bucket = Bucket()
    bucket.use(Repeating(bucket.clock))
    await bucket.manifest(1, [])
    for number in range(1, 4):
        await bucket.file(number)
    await bucket.collect_late()
    assert await bucket.numbers() == [] and await bucket.manifest_numbers() == [(2, 1)] * 2


async def test_f622_an_unexpected_error_of_a_round_is_told_and_the_next_round_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tidemill.metastore.lsm.gc.PAUSE_MIN_S", 0.0)
    bucket = Bucket(options=msgspec.structs.replace(OPTIONS, gc_delay_ms=0))
    told: list[str] = []

    def roots() -> Roots:
        if bucket.collector.error is None:
            raise KeyError("a defect")
        told.append(str(bucket.collector.error))
        return bucket.roots()

    with capture_logs() as logs:
        await bucket.collector.run(roots, lambda: not told)
    assert "KeyError" in told[0] and bucket.collector.error is None and bucket.collector.last is not None
    assert [entry["log_level"] for entry in logs] == ["error"]


async def test_two_rounds_at_once_take_turns() -> None:
    bucket = Bucket()
    await bucket.manifest(1, [])
    await bucket.file(1)
    await bucket.collect()
    bucket.clock.advance(DELAY_MS)
    done = await asyncio.gather(bucket.collect(), bucket.collect())
    assert sorted(round.deleted_files for round in done) == [0, 1]
