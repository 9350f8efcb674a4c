"""The merge worker: a separate process that accesses the bucket directly. Its death at any time is harmless."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
from pathlib import Path

import msgspec
import pytest

from support.metastore.lsm_files import Shelf
from support.waiting import DEADLINE_S, until
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import ClosedError, InvalidError, MissingError, UnavailableError
from tidemill.metastore.lsm.compaction.executor import DEATHS_TOLERATED, SizeBasedExecutor
from tidemill.metastore.lsm.compaction.picker import Job, Progress, pick_full_compaction
from tidemill.metastore.lsm.compaction.worker import client
from tidemill.metastore.lsm.compaction.worker.client import WorkerExecutor
from tidemill.metastore.lsm.manifest import FileMeta
from tidemill.metastore.lsm.options import Options
from tidemill.objects.local import LocalObjects

OPTIONS = Options(slice_rows=500, file_bytes=256 << 10)
LIMIT_S = 60.0


def shelf_at(path: Path, options: Options = OPTIONS) -> Shelf:
    return Shelf(options, LocalObjects.open(path, SystemClock(), Rand()))


async def fill(shelf: Shelf, *, files: int = 3, rows: int = 3000) -> dict[bytes, bytes]:
    everything: dict[bytes, bytes] = {}
    for seqno in range(1, files + 1):
        source = random.Random(seqno)
        batch = {b"%06d" % source.randrange(10 * rows): source.randbytes(60) for _ in range(rows)}
        everything.update(batch)
        await shelf.flush(batch, seqno)
    return everything


def job_of(shelf: Shelf) -> Job:
    job = pick_full_compaction(shelf.version.levels, shelf.options)
    assert job is not None
    return shelf.prepared(job)


def alive(pid: int) -> bool:
    """Return whether a process runs. An ended process that was not waited for counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until_dead(pid: int) -> None:
    await until(lambda: not alive(pid))


async def test_the_worker_makes_what_the_loop_makes(tmp_path: Path) -> None:
    shelf = shelf_at(tmp_path)
    everything = await fill(shelf)
    worker = WorkerExecutor(str(tmp_path), OPTIONS)
    reported: list[int] = []
    try:
        assert worker.pid is None, "nothing is started before the first job"
        by_worker = await worker.merge(job_of(shelf), reported.append)
        inline = await shelf.merger.merge(job_of(shelf))
    finally:
        await worker.aclose()
    assert len(inline) > 1 and reported[-1] == job_of(shelf).rows
    for mine, theirs in zip(inline, by_worker, strict=True):
        assert await shelf.rows_of(mine) == await shelf.rows_of(theirs)
        assert msgspec.structs.replace(mine, number=0, nonce="") == msgspec.structs.replace(theirs, number=0, nonce="")
    found = [row for file in by_worker for row in await shelf.rows_of(file)]
    assert {key: value for key, value, _ in found} == everything


async def test_one_process_does_many_jobs_and_ends_with_the_merger(tmp_path: Path) -> None:
    shelf = shelf_at(tmp_path)
    await fill(shelf)
    worker = WorkerExecutor(str(tmp_path), OPTIONS)
    worker._deaths = 2
    await worker.merge(job_of(shelf))
    assert worker.deaths == 0, "only deaths in a row count"
    pid = worker.pid
    assert pid is not None and alive(pid) and os.getpriority(os.PRIO_PROCESS, pid) >= 5
    await asyncio.gather(*(worker.merge(job_of(shelf)) for _ in range(3)))
    assert worker.pid == pid
    await worker.aclose()
    assert not alive(pid)
    with pytest.raises(ClosedError):
        await worker.merge(job_of(shelf))


async def test_a_killed_worker_is_unavailable_once_and_the_next_job_has_a_new_one(tmp_path: Path) -> None:
    slow = msgspec.structs.replace(OPTIONS, compaction_bytes_per_s=100_000)
    shelf = shelf_at(tmp_path)
    await fill(shelf)
    worker = WorkerExecutor(str(tmp_path), slow)
    try:
        merging = asyncio.ensure_future(worker.merge(job_of(shelf)))
        await until(lambda: worker.pid is not None)
        pid = worker.pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(UnavailableError, match="returncode=-9 deaths_in_a_row=1"):
            await merging
        assert worker.deaths == 1 and worker.pid is None
    finally:
        await worker.aclose()
    again = WorkerExecutor(str(tmp_path), OPTIONS)
    try:
        assert await again.merge(job_of(shelf))
        old = again.pid
        assert old is not None
        os.kill(old, signal.SIGKILL)
        await until_dead(old)
        with contextlib.suppress(UnavailableError):
            await again.merge(job_of(shelf))
        assert await again.merge(job_of(shelf)) and again.pid != old and again.deaths == 0
    finally:
        await again.aclose()


async def test_a_stopped_worker_is_killed_and_the_next_job_has_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a merge waited for it indefinitely, so level 0 grew until every commit waited, and nothing was
    reported."""
    shelf = shelf_at(tmp_path)
    await fill(shelf)
    worker = WorkerExecutor(str(tmp_path), OPTIONS)
    try:
        await worker.merge(job_of(shelf))
        stopped = worker.pid
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        with monkeypatch.context() as patched:
            patched.setattr(client, "SILENT_S", 0.5)
            with pytest.raises(UnavailableError, match="silent during a job and was killed"):
                await worker.merge(job_of(shelf))
        await until_dead(stopped)
        assert await worker.merge(job_of(shelf)) and worker.pid != stopped and worker.deaths == 0
    finally:
        await worker.aclose()


async def test_a_job_while_the_store_is_away_fails_and_its_worker_lives(tmp_path: Path) -> None:
    shelf = shelf_at(tmp_path / "store")
    await fill(shelf)
    (tmp_path / "store").rename(tmp_path / "away")
    worker = WorkerExecutor(str(tmp_path / "store"), OPTIONS)
    try:
        for _ in range(3):
            with pytest.raises(UnavailableError, match="object directory"):
                await worker.merge(job_of(shelf))
        assert worker.deaths == 0 and worker.pid is not None
        (tmp_path / "away").rename(tmp_path / "store")
        assert await worker.merge(job_of(shelf))
    finally:
        await worker.aclose()


async def test_a_cancelled_merge_kills_the_worker(tmp_path: Path) -> None:
    slow = msgspec.structs.replace(OPTIONS, compaction_bytes_per_s=10_000)
    shelf = shelf_at(tmp_path)
    await fill(shelf)
    worker = WorkerExecutor(str(tmp_path), slow)
    started = asyncio.Event()
    merging = asyncio.ensure_future(worker.merge(job_of(shelf)))
    await until(lambda: worker.pid is not None)
    started.set()
    pid = worker.pid
    merging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await merging
    assert not alive(pid) and worker.pid is None
    await worker.aclose()


async def test_closing_during_a_merge_ends_it_with_closed(tmp_path: Path) -> None:
    slow = msgspec.structs.replace(OPTIONS, compaction_bytes_per_s=10_000)
    shelf = shelf_at(tmp_path)
    await fill(shelf)
    worker = WorkerExecutor(str(tmp_path), slow)
    merging = asyncio.ensure_future(worker.merge(job_of(shelf)))
    await until(lambda: worker.pid is not None)
    pid = worker.pid
    await worker.aclose()
    with pytest.raises(ClosedError):
        await merging
    assert not alive(pid)


async def test_errors_of_the_store_come_back_as_they_are(tmp_path: Path) -> None:
    shelf = shelf_at(tmp_path)
    await fill(shelf)
    gone = shelf.version.levels[0][0]
    await shelf.files.delete(gone)
    worker = WorkerExecutor(str(tmp_path), OPTIONS)
    try:
        with pytest.raises(MissingError, match=gone.nonce) as caught:
            await worker.merge(job_of(shelf))
        assert caught.value.fix and worker.deaths == 0 and worker.pid is not None
    finally:
        await worker.aclose()


async def test_an_idle_worker_ends_by_itself(tmp_path: Path) -> None:
    shelf = shelf_at(tmp_path)
    await fill(shelf, rows=100)
    worker = WorkerExecutor(str(tmp_path), OPTIONS, idle_s=0.05)
    try:
        await worker.merge(job_of(shelf))
        await until(lambda: worker.pid is None)
    finally:
        await worker.aclose()


async def test_the_worker_does_not_outlive_a_killed_database(tmp_path: Path) -> None:
    """kill -9 of the process that owns the database: its worker sees the end of stdin in the middle of a merge."""
    shelf = shelf_at(tmp_path)
    for seqno in (1, 2):
        source = random.Random(seqno)
        await shelf.flush({b"%012d" % (2 * n + seqno): source.randbytes(4000) for n in range(4000)}, seqno)
    job = tmp_path / "job"
    job.write_bytes(msgspec.msgpack.encode(job_of(shelf)))
    code = (
        "import asyncio, sys, msgspec\n"
        "from tidemill.metastore.lsm.compaction.worker.client import WorkerExecutor\n"
        "from tidemill.metastore.lsm.compaction.picker import Job\n"
        "from tidemill.metastore.lsm.options import Options\n"
        "async def main():\n"
        "    job = msgspec.msgpack.decode(open(sys.argv[2], 'rb').read(), type=Job)\n"
        "    worker = WorkerExecutor(sys.argv[1], Options(slice_rows=500, compaction_bytes_per_s=2_000_000))\n"
        "    await worker.merge(job, lambda rows: print(worker.pid, flush=True))\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(tmp_path), str(job), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(await asyncio.wait_for(parent.stdout.readline(), LIMIT_S))
    assert alive(pid)
    parent.kill()
    await parent.wait()
    # The merge itself would take about 25 seconds more.
    async with asyncio.timeout(DEADLINE_S):
        await until_dead(pid)


def test_memory_objects_have_no_worker() -> None:
    with pytest.raises(InvalidError, match="another process's memory"):
        WorkerExecutor("memory:", OPTIONS)


async def test_starting_up_imports_little(tmp_path: Path) -> None:
    """The worker starts in a fraction of a second because it imports only the code of a merge."""
    code = (
        "import sys, tidemill.metastore.lsm.compaction.worker.main\n"
        "heavy = {'pyarrow', 'duckdb', 'pydantic', 'starlette', 'psycopg', 'obstore', 'apsw', 'pyspark', 'typer'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    out, _ = await child.communicate()
    assert out.decode().strip() == "[]"


# the choice ------------------------------------------------------------------------------------------


class Recorder:
    def __init__(self, deaths: int = 0) -> None:
        self.deaths = deaths
        self.jobs: list[Job] = []
        self.closed = False

    async def merge(self, job: Job, progress: Progress | None = None) -> list[FileMeta]:
        self.jobs.append(job)
        return []

    async def aclose(self) -> None:
        self.closed = True


def job_with(rows: int) -> Job:
    file = FileMeta(1, 1, "n", 1, rows, b"a", b"b", 1, 1, 0)
    return Job(0, 1, ((file,),), ())


async def test_large_jobs_go_to_the_worker_and_small_ones_stay_on_the_loop() -> None:
    inline, worker = Recorder(), Recorder()
    choosing = SizeBasedExecutor(inline, worker, Options(inline_merge_rows=1000))
    for rows in (1, 1000, 1001, 10**9):
        await choosing.merge(job_with(rows))
    assert [job.rows for job in inline.jobs] == [1, 1000]
    assert [job.rows for job in worker.jobs] == [1001, 10**9]
    await choosing.aclose()
    assert inline.closed and worker.closed


async def test_a_worker_that_dies_again_and_again_is_not_asked_any_more() -> None:
    inline, worker = Recorder(), Recorder(deaths=DEATHS_TOLERATED)
    await SizeBasedExecutor(inline, worker, Options(inline_merge_rows=10)).merge(job_with(11))
    assert inline.jobs and not worker.jobs


async def test_memory_stays_bounded_whatever_the_size_of_the_job(tmp_path: Path) -> None:
    """Twice the rows need about the same peak: the worker holds windows of its inputs and one output."""
    peaks = []
    for rows in (60_000, 240_000):
        path = tmp_path / str(rows)
        shelf = shelf_at(path, msgspec.structs.replace(OPTIONS, file_bytes=2 << 20))
        for seqno in (1, 2):
            source = random.Random(seqno)
            await shelf.flush({b"%012d" % (2 * n + seqno): source.randbytes(100) for n in range(rows)}, seqno)
        worker = WorkerExecutor(str(path), shelf.options)
        try:
            made = await worker.merge(job_of(shelf))
            assert sum(file.rows for file in made) == 2 * rows
            status = Path(f"/proc/{worker.pid}/status").read_text()
            peaks.append(int(status.split("VmHWM:")[1].split()[0]) / 1024)
        finally:
            await worker.aclose()
    print(f"peaks: {peaks} MiB")
    assert peaks[1] < peaks[0] + 24, peaks
    assert peaks[1] < 160, peaks
