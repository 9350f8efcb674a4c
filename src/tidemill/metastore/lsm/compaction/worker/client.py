"""Compaction in one worker process, so that large jobs cost the event loop nothing but the frames of protocol.py.

The process is started for the first job, and again after it ended: it exits after `idle_s` without work, which frees
its memory. It opens its own object store, reads the inputs and writes the outputs; no byte of a file passes through the
parent.

It holds no state. If it dies during a job, or is killed because the job was cancelled, the files it wrote are orphans
and the job is executed again, under new names. `concurrent.futures.ProcessPoolExecutor` cannot take its place, because
it cannot kill a running job.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

from tidemill.base.errors import ClosedError, InvalidError, UnavailableError
from tidemill.metastore.lsm.compaction.picker import Job, Progress
from tidemill.metastore.lsm.compaction.worker.protocol import Done, Failed, Setup, Work, frame, from_worker, read_frame
from tidemill.metastore.lsm.manifest import FileMeta
from tidemill.metastore.lsm.options import Options

NICE = 5
"""Niceness. The worker yields to the server but must not starve: level 0 grows while it waits, which stalls writers."""
IDLE_S = 60.0
EXIT_GRACE_S = 2.0
"""Time that a process gets to exit after its pipe closed."""
SILENT_S = 120.0
"""Time without a message during a job after which the process is killed. It reports each slice of a merge."""
_MAIN = "tidemill.metastore.lsm.compaction.worker.main"


class WorkerExecutor:
    """Merger in one process, for any domain in the store at this URL. Raises InvalidError for `memory:`, which another
    process cannot access."""

    def __init__(self, objects_url: str, options: Options, *, nice: int = NICE, idle_s: float = IDLE_S) -> None:
        if objects_url.startswith("memory:"):
            raise InvalidError(
                "a compaction worker cannot access objects in another process's memory: objects.url=memory:.",
                fix="Compact on the event loop, or store the objects in a directory or a bucket.",
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
        """Pid of the running process, if any."""
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    async def merge(self, job: Job, progress: Progress | None = None) -> list[FileMeta]:
        """Execute a job, see `CompactionExecutor`.

        Also raises UnavailableError if the process cannot be started, dies, or is silent for SILENT_S.
        """
        async with self._turn:
            if self._closed:
                raise ClosedError("the compaction worker is closed.")
            try:
                return await self._run_in_worker(job, progress)
            except TimeoutError as error:  # it is stopped, or waits for something that does not come
                await self._kill_process()
                self._deaths += 1
                raise UnavailableError(
                    f"the compaction worker is silent during a job and was killed: silent_s={SILENT_S:g}"
                    f" deaths_in_a_row={self._deaths} level={job.level} rows={job.rows}.",
                    fix="If this repeats, check the object store and the machine's load. The job is retried"
                    " automatically.",
                ) from error
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                returncode = await self._kill_process(grace_s=EXIT_GRACE_S)
                if self._closed:
                    raise ClosedError("the compaction worker was closed during a job.") from error
                self._deaths += 1
                raise UnavailableError(
                    "the compaction worker died during a job: "
                    f"returncode={returncode} deaths_in_a_row={self._deaths} level={job.level} rows={job.rows}.",
                    fix="If this repeats, check the machine's memory. The job is retried automatically.",
                ) from error
            except asyncio.CancelledError:
                # The caller no longer waits for this job, so everything it would still write would be an orphan.
                await asyncio.shield(self._kill_process())
                raise

    async def aclose(self) -> None:
        """Kill the process. A running job ends with ClosedError. Idempotent."""
        self._closed = True
        await self._kill_process()

    async def _run_in_worker(self, job: Job, progress: Progress | None) -> list[FileMeta]:
        process = await self._ensure_started()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(frame(Work(job)))
        async with asyncio.timeout(SILENT_S):
            await process.stdin.drain()
        while True:
            async with asyncio.timeout(SILENT_S):
                data = await read_frame(process.stdout)
            message = from_worker.decode(data)
            if isinstance(message, Done):
                self._deaths = 0
                return message.files
            if isinstance(message, Failed):
                self._deaths = 0
                raise message.error()
            if progress is not None:
                progress(message.rows_done)

    async def _ensure_started(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        try:
            # In a separate session: Ctrl-C at the terminal signals only the server, which then closes this worker.
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
                f"the compaction worker cannot be started: program={sys.executable} reason={error}.",
                fix="Check the machine's limits on processes and memory.",
            ) from error
        self._process = process
        if self._closed:
            raise ConnectionError("closed while the worker was starting")
        assert process.stdin is not None
        process.stdin.write(frame(self._setup))
        return process

    async def _kill_process(self, grace_s: float = 0.0) -> int | None:
        """Make sure that the process has ended; return its exit code. It gets `grace_s` to exit before it is killed."""
        process, self._process = self._process, None
        if process is None:
            return None
        if process.stdin is not None:
            process.stdin.close()
        if grace_s:
            # Popen.kill would reap a process that has just died, and its exit code would be lost.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    return await process.wait()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        return await process.wait()
