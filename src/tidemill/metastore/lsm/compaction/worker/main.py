"""The compaction worker: run with `python -m`, frames on stdin and stdout. Only client.py starts it.

It ends when stdin ends: the parent has died or no longer needs it, and everything it is still writing could only become
an orphan.
"""

from __future__ import annotations

import asyncio
import os
import sys

from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import TidemillError
from tidemill.base.runtime.tasks import Tasks
from tidemill.metastore.lsm.compaction.inline_executor import Throttle, run_job
from tidemill.metastore.lsm.compaction.picker import Job
from tidemill.metastore.lsm.compaction.worker.protocol import (
    Done,
    Failed,
    FromWorker,
    Progressed,
    Setup,
    Work,
    frame,
    read_frame,
    to_worker,
)
from tidemill.metastore.lsm.options import Options
from tidemill.objects.factory import open_objects
from tidemill.objects.store import ObjectStore


async def main() -> None:
    # Redirect stdout to stderr, so that nothing printed gets between the frames.
    answers = os.dup(1)
    os.dup2(2, 1)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    jobs: asyncio.Queue[Job] = asyncio.Queue()
    setup = to_worker.decode(await read_frame(reader))
    assert isinstance(setup, Setup)
    os.nice(setup.nice)
    clock = SystemClock()
    objects: ObjectStore | None = None
    throttle = Throttle(setup.options.compaction_bytes_per_s, clock)
    async with Tasks(_exit_after_failure) as tasks:
        tasks.spawn(_read_jobs(reader, jobs), name="merge-worker-stdin")
        while True:
            try:
                job = await asyncio.wait_for(jobs.get(), setup.idle_s)
            except TimeoutError:
                break
            try:
                objects = objects or await open_objects(setup.objects_url, clock, Rand(), verify=False, create=False)
            except TidemillError as error:  # of this job: the store may be away for a while
                _write_frame(answers, Failed.of(error))
                continue
            _write_frame(answers, await _run(job, objects, setup.options, throttle, answers))
    if objects is not None:
        await objects.aclose()


def _exit_after_failure(name: str, error: BaseException) -> None:
    """Exit after a failure to read stdin: no job can arrive any more. The parent starts another worker."""
    sys.stderr.write(f"compaction worker: {name}: {error!r}\n")
    os._exit(1)


async def _read_jobs(reader: asyncio.StreamReader, jobs: asyncio.Queue[Job]) -> None:
    """Queue jobs as they arrive. A running job yields after every slice, so the end of stdin ends it immediately."""
    while True:
        try:
            message = to_worker.decode(await read_frame(reader))
        except asyncio.IncompleteReadError:
            os._exit(0)
        assert isinstance(message, Work)
        jobs.put_nowait(message.job)


async def _run(job: Job, objects: ObjectStore, options: Options, throttle: Throttle, answers: int) -> FromWorker:
    def progress(rows_done: int) -> None:
        _write_frame(answers, Progressed(rows_done))

    try:
        return Done(await run_job(job, objects, options, throttle, progress))
    except TidemillError as error:
        return Failed.of(error)


def _write_frame(answers: int, message: FromWorker) -> None:
    data = memoryview(frame(message))
    while data:
        data = data[os.write(answers, data) :]


if __name__ == "__main__":
    asyncio.run(main())
