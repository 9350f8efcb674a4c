"""Merges on the event loop, in slices: for small jobs, for memory objects, and in the simulation."""

from __future__ import annotations

import asyncio
from typing import Self

import msgspec

from tidemill.base.clock import Clock
from tidemill.base.runtime.tasks import Tasks
from tidemill.metastore.lsm.compaction.compaction_job import Put, Read, merge_steps
from tidemill.metastore.lsm.compaction.executor import Progress
from tidemill.metastore.lsm.compaction.picker import Job
from tidemill.metastore.lsm.file_store import Files
from tidemill.metastore.lsm.manifest import FileMeta
from tidemill.metastore.lsm.options import Options
from tidemill.objects.store import ObjectStore


class Throttle:
    """A token bucket over the bytes that merges read and write. 0 bytes per second = no limit.

    Bytes are taken first and waited for afterwards, so one request may be larger than the bucket;
    the next one pays for it. A quiet time saves up at most BURST_S.
    """

    BURST_S = 0.1

    def __init__(self, bytes_per_s: int, clock: Clock) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._paid_until_s = 0.0

    def delay_s(self, size_bytes: int) -> float:
        """Take the bytes, and tell how long to wait for them."""
        if not self._bytes_per_s:
            return 0.0
        now_s = self._clock.monotonic_s()
        self._paid_until_s = max(self._paid_until_s, now_s - self.BURST_S) + size_bytes / self._bytes_per_s
        return max(0.0, self._paid_until_s - now_s)

    async def take(self, size_bytes: int) -> None:
        delay_s = self.delay_s(size_bytes)
        if delay_s > 0:
            await asyncio.sleep(delay_s)


async def drive(
    job: Job, objects: ObjectStore, options: Options, throttle: Throttle, progress: Progress | None
) -> list[FileMeta]:
    """Run the merge's steps with their I/O, and let the loop run others after every slice."""
    files = Files(objects, job.prefix)
    steps = merge_steps(job, options)
    answer: bytes | None = None
    async with _Reader(files) as reader:
        while True:
            try:
                # The first `send` of a generator must be None; its type cannot say so.
                step = next(steps) if answer is None else steps.send(answer)
            except StopIteration as ended:
                made: list[FileMeta] = ended.value
                return made
            answer = b""
            if isinstance(step, Read):
                answer = await reader.read(step)
                await throttle.take(len(answer))
            elif isinstance(step, Put):
                await files.put(step.name, step.buffers)
                await throttle.take(step.size_bytes)
            else:
                if progress is not None:
                    progress(step.rows_done)
                await asyncio.sleep(0)


class _Reader:
    """Reads what is asked, and what will be asked next while the rows of this are merged: a bucket is far away."""

    def __init__(self, files: Files) -> None:
        self._files = files
        # A failed read is told when its bytes are asked for; if the merge ends before that, nobody needs them.
        self._tasks = Tasks(on_failure=lambda name, error: None)
        self._ahead: dict[Read, asyncio.Task[bytes]] = {}

    async def read(self, asked: Read) -> bytes:
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


class InlineMerger:
    """Merges on the loop it is called on, for any domain in this store."""

    def __init__(self, objects: ObjectStore, options: Options, clock: Clock) -> None:
        self._objects = objects
        self._options = options
        self._throttle = Throttle(options.compaction_bytes_per_s, clock)
        self._turn = asyncio.Lock()

    async def merge(self, job: Job, progress: Progress | None = None) -> list[FileMeta]:
        async with self._turn:
            return await drive(job, self._objects, self._options, self._throttle, progress)

    async def aclose(self) -> None:
        """Nothing to close: a merge under way belongs to its caller, who cancels it."""
