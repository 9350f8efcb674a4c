"""Merges: newest rows win, tombstones are dropped when permitted, files are cut, I/O is bounded, damage is reported."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise

import msgspec
import pytest

from support.metastore.lsm_files import Shelf, meta
from tidemill.base.clock import ManualClock
from tidemill.base.errors import CorruptError, InvalidError, MissingError, UnavailableError
from tidemill.metastore.lsm.compaction import compaction_job as job_module
from tidemill.metastore.lsm.compaction.compaction_job import PauseStep, ReadStep, merge_steps, names_needed
from tidemill.metastore.lsm.compaction.inline_executor import InlineExecutor, Throttle
from tidemill.metastore.lsm.compaction.picker import Job, pick_full_compaction
from tidemill.metastore.lsm.options import Options
from tidemill.objects.memory import MemoryObjects

SMALL = Options(block_bytes=64, file_bytes=1000, slice_rows=64)


def job_of(shelf: Shelf) -> Job:
    job = pick_full_compaction(shelf.version.levels, shelf.options)
    assert job is not None
    return job


async def test_the_newest_row_of_a_key_stays_with_its_seqno() -> None:
    shelf = Shelf(SMALL)
    await shelf.flush({b"a": b"1", b"b": b"1", b"c": b"1"}, 1)
    await shelf.flush({b"b": b"2", b"c": b"2"}, 2)
    await shelf.flush({b"c": b"3", b"d": b"3"}, 3)
    (made,) = await shelf.do(job_of(shelf))
    assert await shelf.rows_of(made) == [(b"a", b"1", 1), (b"b", b"2", 2), (b"c", b"3", 3), (b"d", b"3", 3)]
    assert (made.smallest, made.largest, made.min_seqno, made.max_seqno, made.rows) == (b"a", b"d", 1, 3, 4)


async def test_a_tombstone_hides_older_rows_and_goes_when_nothing_older_is_left() -> None:
    shelf = Shelf(SMALL)
    await shelf.flush({b"a": b"1", b"b": b"1"}, 1)
    await shelf.flush({b"a": b"", b"z": b""}, 2)
    (made,) = await shelf.do(job_of(shelf))
    assert await shelf.rows_of(made) == [(b"b", b"1", 1)]


async def test_a_tombstone_stays_where_an_older_file_may_hold_its_key() -> None:
    shelf = Shelf(SMALL)
    await shelf.flush({b"b": b"1"}, 1)
    await shelf.flush({key: b"" for key in (b"a", b"b", b"c", b"d", b"e")}, 2)
    job = msgspec.structs.replace(job_of(shelf), older=((b"b", b"b"), (b"d", b"d\xff")))
    (made,) = await shelf.do(job)
    assert await shelf.rows_of(made) == [(b"b", b"", 2), (b"d", b"", 2)]


async def test_a_file_of_tombstones_merged_with_itself_is_gone() -> None:
    shelf = Shelf(SMALL)
    await shelf.flush({b"a": b"", b"b": b"", b"c": b"1"}, 1)
    assert [file.tombstones for file in shelf.version.files] == [2]
    (made,) = await shelf.do(job_of(shelf))
    assert await shelf.rows_of(made) == [(b"c", b"1", 1)] and made.tombstones == 0
    assert pick_full_compaction(shelf.version.levels, SMALL) is None


async def test_when_every_row_goes_no_file_is_made() -> None:
    shelf = Shelf(SMALL)
    await shelf.flush({b"a": b"1"}, 1)
    await shelf.flush({b"a": b""}, 2)
    before = [meta.key async for meta in shelf.objects.list("")]
    assert await shelf.do(job_of(shelf)) == []
    assert [meta.key async for meta in shelf.objects.list("")] == before


async def test_outputs_are_cut_at_the_file_size_and_disjoint() -> None:
    shelf = Shelf(SMALL)
    source = random.Random(1)
    everything: dict[bytes, bytes] = {}
    for seqno in range(1, 6):
        rows = {source.randbytes(3): source.randbytes(20) for _ in range(900)}
        everything.update(rows)
        await shelf.flush(rows, seqno)
    made = await shelf.do(job_of(shelf))
    assert len(made) > 5
    assert all(left.largest < right.smallest for left, right in pairwise(made))
    # One chunk of each run beyond the limit at most, plus index and footer.
    assert max(file.rows for file in made) < SMALL.file_bytes // 20 + 5 * job_module.CHUNK_ROWS_MIN
    assert {key: value for key, (value, _) in (await shelf.seen()).items()} == everything


async def test_when_names_run_out_the_last_file_takes_the_rest() -> None:
    shelf = Shelf(SMALL)
    await shelf.flush({b"%05d" % n: random.Random(n).randbytes(20) for n in range(1000)}, 1)
    await shelf.flush({b"00000": b"x"}, 2)
    job = shelf.prepared(job_of(shelf))
    assert len(job.names) > 20
    made = await shelf.merger.merge(msgspec.structs.replace(job, names=job.names[:2]))
    assert len(made) == 2 and sum(file.rows for file in made) == 1000


async def test_a_job_without_names_is_refused() -> None:
    with pytest.raises(InvalidError, match="needs names"):
        next(merge_steps(Job(0, 1, ((meta(1, b"a", b"b"),),), ()), SMALL))


async def test_large_values_go_through_in_small_chunks() -> None:
    """A slice is a number of rows; with large values it must not be held in memory as a whole."""
    options = msgspec.structs.replace(SMALL, file_bytes=4 << 20, block_bytes=8192, slice_rows=2000)
    shelf = Shelf(options)
    for seqno in (1, 2):
        await shelf.flush({b"%d-%03d" % (seqno, n): random.Random(n).randbytes(100_000) for n in range(200)}, seqno)
    job = shelf.prepared(job_of(shelf))
    steps = merge_steps(job, options)
    step = next(steps)
    held: list[int] = []
    try:
        while True:
            if isinstance(step, ReadStep):
                held.append(step.end - step.start)
                step = steps.send(await shelf.files.read(step.file, step.start, step.end))
            else:
                step = steps.send(b"")
    except StopIteration as ended:
        made = ended.value
    assert sum(file.rows for file in made) == 400
    assert max(file.size_bytes for file in made) < options.file_bytes + 4 * job_module.CHUNK_BYTES
    assert max(held) <= job_module.WINDOW_BYTES_MAX


async def test_one_value_may_be_larger_than_a_read() -> None:
    shelf = Shelf(SMALL)
    huge = random.Random(0).randbytes(job_module.WINDOW_BYTES_MAX + 1)
    await shelf.flush({b"a": b"1", b"b": huge, b"c": huge, b"d": b"1"}, 1)
    await shelf.flush({b"a": b"2", b"c": b"2"}, 2)
    await shelf.do(job_of(shelf))
    assert await shelf.seen() == {b"a": (b"2", 2), b"b": (huge, 1), b"c": (b"2", 2), b"d": (b"1", 1)}


async def test_reads_are_few_and_large() -> None:
    options = Options(file_bytes=64 << 20)
    shelf = Shelf(options)
    for seqno in (1, 2):
        source = random.Random(seqno)
        await shelf.flush({source.randbytes(16): source.randbytes(100) for _ in range(60_000)}, seqno)
    job = shelf.prepared(job_of(shelf))
    steps = merge_steps(job, options)
    reads: list[ReadStep] = []
    pauses: list[PauseStep] = []
    step = next(steps)
    try:
        while True:
            if isinstance(step, ReadStep):
                reads.append(step)
                step = steps.send(await shelf.files.read(step.file, step.start, step.end))
            else:
                pauses += [step] if isinstance(step, PauseStep) else []
                step = steps.send(b"")
    except StopIteration:
        pass
    data_bytes = sum(file.meta_start for file in job.inputs)
    assert len(reads) <= 2 * len(job.inputs) + data_bytes // job_module.WINDOW_BYTES_MAX + 2
    # Every byte of rows is read exactly once.
    assert sum(read.end - read.start for read in reads) == sum(file.size_bytes for file in job.inputs)
    assert pauses[-1].rows_done == job.rows
    gaps = [b.rows_done - a.rows_done for a, b in pairwise(pauses)]
    assert max(gaps) <= 2 * options.slice_rows


async def test_damage_and_absence_name_the_file() -> None:
    for harm in ("damage", "cut", "remove"):
        shelf = Shelf(SMALL)
        await shelf.flush({b"%05d" % n: b"v" * 30 for n in range(200)}, 1)
        file = await shelf.flush({b"%05d" % n: b"w" * 30 for n in range(200)}, 2)
        key = shelf.files.key(file)
        data = await shelf.objects.get(key)
        await shelf.objects.delete(key)
        if harm == "damage":
            at = file.meta_start // 2
            await shelf.objects.put(key, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        elif harm == "cut":
            await shelf.objects.put(key, data[:-10])
        with pytest.raises(MissingError if harm == "remove" else CorruptError, match=file.nonce):
            await shelf.do(job_of(shelf))


def test_names_cover_incompressible_outputs() -> None:
    options = Options()
    job = Job(0, 1, ((meta(1, b"a", b"b", size_bytes=100 * options.file_bytes),),), ())
    assert names_needed(job, options) >= 150
    assert names_needed(Job(0, 1, ((meta(1, b"a", b"b", size_bytes=1),),), ()), options) >= 1


# driver ----------------------------------------------------------------------------------------------


def test_the_throttle_gives_the_rate_on_the_passed_clock() -> None:
    clock = ManualClock()
    throttle = Throttle(1000, clock)
    waited_ms = 0
    for _ in range(100):
        delay_ms = round(throttle.delay_s(100) * 1000)
        waited_ms += delay_ms
        clock.advance(delay_ms)
    # 10,000 bytes at 1,000 a second, less what was saved before.
    assert 9_800 <= waited_ms <= 10_000


def test_a_quiet_time_saves_up_little() -> None:
    clock = ManualClock()
    throttle = Throttle(1000, clock)
    throttle.delay_s(1000)
    clock.advance(3_600_000)
    assert throttle.delay_s(1100) == pytest.approx(1.0, abs=0.01)


def test_no_rate_is_no_limit() -> None:
    assert Throttle(0, ManualClock()).delay_s(1 << 40) == 0.0


async def test_a_merge_keeps_to_its_rate() -> None:
    """The job's reads and writes together take as long as the rate demands, measured by the loop's clock."""
    shelf = Shelf(SMALL)
    for seqno in (1, 2):
        await shelf.flush({b"%d-%03d" % (seqno, n): random.Random(n).randbytes(30) for n in range(300)}, seqno)
    job = shelf.prepared(job_of(shelf))

    class LoopClock(ManualClock):
        def monotonic_s(self) -> float:
            return asyncio.get_running_loop().time()

    rate = 5 * job.size_bytes
    merger = InlineExecutor(shelf.objects, msgspec.structs.replace(SMALL, compaction_bytes_per_s=rate), LoopClock())
    start_s = asyncio.get_running_loop().time()
    made = await merger.merge(job)
    took_s = asyncio.get_running_loop().time() - start_s
    moved_bytes = job.size_bytes + sum(file.size_bytes for file in made)
    assert took_s >= moved_bytes / rate - Throttle.BURST_S > 0.1


async def test_the_next_window_is_read_while_the_rows_of_this_one_are_merged() -> None:
    """Reads of a bucket take tens of milliseconds: a run that reads only when it is empty would mostly wait."""
    options = Options(file_bytes=64 << 20)
    shelf = Shelf(options)
    for seqno in (1, 2):
        source = random.Random(seqno)
        rows = {source.randbytes(16): source.randbytes(400) for _ in range(20_000)}
        await shelf.flush(rows, seqno)
    job = shelf.prepared(job_of(shelf))
    slices = busy = 0
    under_way: set[tuple[int, int]] = set()
    asked: list[tuple[int, int, int]] = []

    class Far(MemoryObjects):
        async def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            asked.append((int(key.split("-")[1]), start, end or 0))
            under_way.add((start, end or 0))
            await asyncio.sleep(0.005)
            under_way.discard((start, end or 0))
            return await shelf.objects.get(key, start, end)

    def progress(rows_done: int) -> None:
        nonlocal slices, busy
        slices, busy = slices + 1, busy + bool(under_way)

    made = await InlineExecutor(Far(shelf.clock), options, shelf.clock).merge(job, progress)
    assert sum(file.rows for file in made) == 40_000
    # Merging begins while the second windows are on their way; nothing is read twice, nothing left out.
    assert busy > 0 and slices > 10
    assert len(set(asked)) == len(asked)
    assert sum(end - start for _, start, end in asked) == job.size_bytes
    assert len(asked) >= 10


async def test_a_read_ahead_that_fails_is_told_when_its_bytes_are_needed() -> None:
    options = Options(file_bytes=64 << 20)
    shelf = Shelf(options)
    for seqno in (1, 2):
        source = random.Random(seqno)
        await shelf.flush({source.randbytes(16): source.randbytes(400) for _ in range(20_000)}, seqno)

    class Gone(MemoryObjects):
        reads = 0

        async def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            self.reads += 1
            if self.reads > 5:
                raise UnavailableError("The store is away.")
            return await shelf.objects.get(key, start, end)

    with pytest.raises(UnavailableError, match="store is away"):
        await InlineExecutor(Gone(shelf.clock), options, shelf.clock).merge(shelf.prepared(job_of(shelf)))


async def test_a_cancelled_merge_leaves_no_read_behind() -> None:
    options = Options(file_bytes=64 << 20)
    shelf = Shelf(options)
    for seqno in (1, 2):
        source = random.Random(seqno)
        await shelf.flush({source.randbytes(16): source.randbytes(400) for _ in range(20_000)}, seqno)
    reads = 0

    class Slow(MemoryObjects):
        async def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            nonlocal reads
            reads += 1
            if reads > 4:
                await asyncio.Event().wait()
            return await shelf.objects.get(key, start, end)

    before = asyncio.all_tasks()
    merging = asyncio.ensure_future(
        InlineExecutor(Slow(shelf.clock), options, shelf.clock).merge(shelf.prepared(job_of(shelf)))
    )
    while reads < 6:
        await asyncio.sleep(0)
    merging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await merging
    assert asyncio.all_tasks() == before


async def test_others_run_between_slices_and_progress_is_told() -> None:
    options = Options(slice_rows=200)
    shelf = Shelf(options)
    for seqno in (1, 2):
        await shelf.flush({b"%d-%05d" % (seqno, n): b"v" * 100 for n in range(5000)}, seqno)
    job = shelf.prepared(job_of(shelf))
    reported: list[int] = []
    turns = 0
    ended = False

    async def other() -> None:
        nonlocal turns
        while not ended:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.ensure_future(other())
    await shelf.merger.merge(job, reported.append)
    ended = True
    await task
    assert turns >= job.rows // (2 * options.slice_rows)
    assert reported == sorted(reported) and reported[-1] == job.rows


async def test_the_block_cache_of_the_prefix_is_not_needed() -> None:
    """A merger uses the object store and the job, and nothing else of the database."""
    shelf = Shelf(SMALL)
    await shelf.flush({b"a": b"1"}, 1)
    await shelf.flush({b"a": b"2"}, 2)
    assert isinstance(shelf.objects, MemoryObjects)
    elsewhere = InlineExecutor(shelf.objects.reopen(), SMALL, ManualClock())
    (made,) = await elsewhere.merge(shelf.prepared(job_of(shelf)))
    assert await shelf.rows_of(made) == [(b"a", b"2", 2)]
