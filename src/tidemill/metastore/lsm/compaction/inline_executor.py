"""Compaction on the event loop, in slices: for small jobs, for memory objects, and in the simulation."""

from __future__ import annotations

import asyncio
from typing import Self

import msgspec

from tidemill.base.clock import Clock
from tidemill.base.runtime.tasks import Tasks
from tidemill.metastore.lsm.compaction.compaction_job import PutStep, ReadStep, merge_steps
from tidemill.metastore.lsm.compaction.picker import Job, Progress
from tidemill.metastore.lsm.file_store import SstFiles
from tidemill.metastore.lsm.manifest import FileMeta
from tidemill.metastore.lsm.options import Options
from tidemill.objects.store import ObjectStore


class Throttle:
    """Token bucket for the bytes that compactions read and write. 0 bytes per second = no limit.

    Bytes are consumed first and waited for afterwards, so one request may be larger than the bucket; the next one
    waits for it. Idle time accumulates at most BURST_S.
    """

    BURST_S = 0.1

    def __init__(self, bytes_per_s: int, clock: Clock) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._paid_until_s = 0.0

    def delay_s(self, size_bytes: int) -> float:
        """Consume the bytes and return how long to wait for them."""
        if not self._bytes_per_s:
            return 0.0
        now_s = self._clock.monotonic_s()
        self._paid_until_s = max(self._paid_until_s, now_s - self.BURST_S) + size_bytes / self._bytes_per_s
        return max(0.0, self._paid_until_s - now_s)

    async def consume(self, size_bytes: int) -> None:
        delay_s = self.delay_s(size_bytes)
        if delay_s > 0:
            await asyncio.sleep(delay_s)


async def run_job(
    job: Job, objects: ObjectStore, options: Options, throttle: Throttle, progress: Progress | None
) -> list[FileMeta]:
    """Run the job's steps with their I/O, and yield to the event loop after every slice."""
    files = SstFiles(objects, job.prefix)
    steps = merge_steps(job, options)
    answer: bytes | None = None
    async with _ReadAheadReader(files) as reader:
        while True:
            try:
                # The first `send` of a generator must be None, which its type does not allow.
                step = next(steps) if answer is None else steps.send(answer)
            except StopIteration as ended:
                made: list[FileMeta] = ended.value
                return made
            answer = b""
            if isinstance(step, ReadStep):
                answer = await reader.read(step)
                await throttle.consume(len(answer))
            elif isinstance(step, PutStep):
                await files.put(step.name, step.buffers)
                await throttle.consume(step.size_bytes)
            else:
                if progress is not None:
                    progress(step.rows_done)
                await asyncio.sleep(0)


class _ReadAheadReader:
    """Reader that also starts the next read while the present rows are merged, to hide the latency of the bucket."""

    def __init__(self, files: SstFiles) -> None:
        self._files = files
        # A failed read-ahead raises when its bytes are requested. If the job ends before that, the failure is
        # irrelevant.
        self._tasks = Tasks(on_failure=lambda name, error: None)
        self._ahead: dict[ReadStep, asyncio.Task[bytes]] = {}

    async def read(self, asked: ReadStep) -> bytes:
        ahead = asked.ahead
        under_way = self._ahead.pop(msgspec.structs.replace(asked, ahead=None), None)
        if ahead is not None:
            name = f"merge reads {ahead.file.epoch}-{ahead.file.number}"
            self._ahead[ahead] = self._tasks.spawn(self._files.read(ahead.file, ahead.start, ahead.end), name=name)
        if under_way is not None:
            return await under_way
        return await self._files.read(asked.file, asked.start, asked.end)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._tasks.aclose()


class InlineExecutor:
    """Merger on the calling event loop, for any domain in this store."""

    def __init__(self, objects: ObjectStore, options: Options, clock: Clock) -> None:
        self._objects = objects
        self._options = options
        self._throttle = Throttle(options.compaction_bytes_per_s, clock)
        self._turn = asyncio.Lock()

    async def merge(self, job: Job, progress: Progress | None = None) -> list[FileMeta]:
        async with self._turn:
            return await run_job(job, self._objects, self._options, self._throttle, progress)

    async def aclose(self) -> None:
        """Do nothing: a running job belongs to its caller, who cancels it."""
