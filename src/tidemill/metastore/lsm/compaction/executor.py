"""Execution of compaction jobs: the protocol, and the choice between the event loop and the worker process.

A worker is used if another process can access the objects.
"""

from __future__ import annotations

from typing import Protocol

from tidemill.base.clock import Clock
from tidemill.metastore.lsm.compaction.inline_executor import InlineExecutor
from tidemill.metastore.lsm.compaction.picker import Job, Progress
from tidemill.metastore.lsm.compaction.worker.client import WorkerExecutor
from tidemill.metastore.lsm.manifest import FileMeta
from tidemill.metastore.lsm.options import Options
from tidemill.objects.store import ObjectStore

DEATHS_TOLERATED = 3
"""Number of consecutive deaths of the worker after which jobs run on the event loop instead."""


class CompactionExecutor(Protocol):
    """Executor of compaction jobs, one at a time; further calls wait for their turn. Several domains may share one."""

    async def merge(self, job: Job, progress: Progress | None = None) -> list[FileMeta]:
        """Execute a job; return its outputs by key, durable. `job` carries names for them and the files' prefix.

        An error leaves orphans at most: UnavailableError and UnknownOutcomeError (retry, with new names), MissingError
        and CorruptError (an input is gone or damaged).
        """
        ...

    async def aclose(self) -> None: ...


class ProcessExecutor(CompactionExecutor, Protocol):
    """Merger that runs in a separate process."""

    @property
    def deaths(self) -> int:
        """Number of consecutive times that its process died during a job."""
        ...


class SizeBasedExecutor:
    """Merger that passes jobs of more than `options.inline_merge_rows` rows to the worker, others to the loop. Owns
    both.

    A worker that dies repeatedly (no memory, no permission to start one) must not stop compactions permanently: level 0
    would grow until writers stop. The loop never blocks for more than a slice in either case.
    """

    def __init__(self, inline: CompactionExecutor, worker: ProcessExecutor, options: Options) -> None:
        self._inline = inline
        self._worker = worker
        self._inline_rows = options.inline_merge_rows

    async def merge(self, job: Job, progress: Progress | None = None) -> list[FileMeta]:
        small = job.rows <= self._inline_rows
        merger = self._inline if small or self._worker.deaths >= DEATHS_TOLERATED else self._worker
        return await merger.merge(job, progress)

    async def aclose(self) -> None:
        await self._inline.aclose()
        await self._worker.aclose()


def open_executor(objects: ObjectStore, objects_url: str, options: Options, clock: Clock) -> CompactionExecutor:
    """Return one merger for all domains of a node, on `objects` at this URL. No process starts before a large job."""
    inline = InlineExecutor(objects, options, clock)
    if objects_url.startswith("memory:"):
        return inline
    return SizeBasedExecutor(inline, WorkerExecutor(objects_url, options), options)
