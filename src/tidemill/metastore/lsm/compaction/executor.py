"""Who carries a job out: the protocol, and the choice between the loop and the worker process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tidemill.metastore.lsm.compaction.picker import Job
from tidemill.metastore.lsm.manifest import FileMeta
from tidemill.metastore.lsm.options import Options

DEATHS_TOLERATED = 3
"""After so many deaths in a row the worker is no longer trusted with a job: it is merged on the loop."""

Progress = Callable[[int], None]
"""Is told how many of the job's rows are done, now and then."""


class Merger(Protocol):
    """Does one job at a time; further calls wait for their turn. Several domains may share one."""

    async def merge(self, job: Job, progress: Progress | None = None) -> list[FileMeta]:
        """The outputs by key, durable. `job` carries names for them and the files' prefix.

        Whatever it raises, at most orphans are left: Unavailable and Unknown (try again, with new names),
        Missing and Corrupt (an input is gone or damaged).
        """
        ...

    async def aclose(self) -> None: ...


class MortalMerger(Merger, Protocol):
    """A merger in a process of its own."""

    @property
    def deaths(self) -> int:
        """How often in a row its process ended in the middle of a job."""
        ...


class ChoosingMerger:
    """Jobs of more than `options.inline_merge_rows` rows go to the worker, the others to the loop. Owns both.

    A worker that dies again and again (no memory, no permission to start one) must not stop merges for
    good, because then level 0 grows until writers stop. The loop stalls no more than a slice either way.
    """

    def __init__(self, inline: Merger, worker: MortalMerger, options: Options) -> None:
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
