"""Merges in one worker process, so that large ones cost the loop nothing but the frames of protocol.py.

The process is started when the first job comes, and again when it is gone: it ends by itself after
`idle_s` without work, which gives its memory back. It opens its own object store, reads the inputs and
writes the outputs; no byte of a file passes through this process.

It holds nothing that matters. When it dies in the middle of a job, or is killed because the job was
cancelled, the files it wrote are orphans and the job is done again, under new names.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

from tidemill.base.errors import ClosedError, InvalidError, UnavailableError
from tidemill.metastore.lsm.compaction.executor import Progress
from tidemill.metastore.lsm.compaction.picker import Job
from tidemill.metastore.lsm.compaction.worker.protocol import Done, Failed, Setup, Work, frame, from_worker, read_frame
from tidemill.metastore.lsm.manifest import FileMeta
from tidemill.metastore.lsm.options import Options

NICE = 5
"""It yields to the server but is not starved by a busy machine: level 0 grows while it waits, and then writers do."""
IDLE_S = 60.0
DYING_S = 2.0
"""A process whose pipe has closed is given this long to be gone."""
_MAIN = "tidemill.metastore.lsm.compaction.worker.main"


class WorkerMerger:
    """One process, for any domain in the store of this URL. Raises InvalidError for `memory:`: no other can see
    that."""

    def __init__(self, objects_url: str, options: Options, *, nice: int = NICE, idle_s: float = IDLE_S) -> None:
        if objects_url.startswith("memory:"):
            raise InvalidError(
                "A merge worker cannot see objects in another process's memory: objects.url=memory:.",
                fix="Merge on the loop, or keep the objects in a directory or a bucket.",
            )
        self._setup = Setup(objects_url, options, nice, idle_s)
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._deaths = 0
        self._closed = False

    @property
    def deaths(self) -> int:
        return self._deaths

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    async def merge(self, job: Job, progress: Progress | None = None) -> list[FileMeta]:
        """Raise UnavailableError when the process cannot be started or dies; else as the protocol says."""
        async with self._turn:
            if self._closed:
                raise ClosedError("The merge worker was closed.")
            try:
                return await self._exchange(job, progress)
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                returncode = await self._end(grace_s=DYING_S)
                if self._closed:
                    raise ClosedError("The merge worker was closed during a merge.") from error
                self._deaths += 1
                raise UnavailableError(
                    "The merge worker died during a merge: "
                    f"returncode={returncode} deaths_in_a_row={self._deaths} level={job.level} rows={job.rows}.",
                    fix="If it goes on, look at the machine's memory; the merge is tried again by itself.",
                ) from error
            except asyncio.CancelledError:
                # Nobody waits for this job any more: what it would still write could only be litter.
                await asyncio.shield(self._end())
                raise

    async def aclose(self) -> None:
        """Kill the process. A merge under way ends with Closed. Idempotent."""
        self._closed = True
        await self._end()

    async def _exchange(self, job: Job, progress: Progress | None) -> list[FileMeta]:
        process = await self._started()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(frame(Work(job)))
        await process.stdin.drain()
        while True:
            message = from_worker.decode(await read_frame(process.stdout))
            if isinstance(message, Done):
                self._deaths = 0
                return message.files
            if isinstance(message, Failed):
                self._deaths = 0
                raise message.error()
            if progress is not None:
                progress(message.rows_done)

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        try:
            # A session of its own: a Ctrl-C at the terminal is for the server, which then closes us.
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                _MAIN,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            self._deaths += 1
            raise UnavailableError(
                f"The merge worker cannot be started: program={sys.executable} reason={error}.",
                fix="Look at the machine's limits on processes and memory.",
            ) from error
        self._process = process
        if self._closed:
            raise ConnectionError("closed while the worker was starting")
        assert process.stdin is not None
        process.stdin.write(frame(self._setup))
        return process

    async def _end(self, grace_s: float = 0.0) -> int | None:
        """Make sure that the process is gone, and tell how it ended. It may end by itself within `grace_s`."""
        process, self._process = self._process, None
        if process is None:
            return None
        if process.stdin is not None:
            process.stdin.close()
        if grace_s:
            # Popen.kill would reap a process that has just died, and its return code would be lost.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    return await process.wait()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        return await process.wait()
