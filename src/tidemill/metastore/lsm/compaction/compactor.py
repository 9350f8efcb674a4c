"""The loop that keeps a database's levels in shape: pick, merge, commit; one job at a time.

C1  Only this loop removes files from a version; a flush only adds to level 0. So what was picked is still
    there when its edit is committed, however long the merge took.
C2  Nothing counts before the commit. A merge that is cut off, fails, or loses its process leaves orphans
    and is picked again, under new names.
C3  A commit that failed as Unavailable is tried again with the same outputs, which stay in flight: the work is
    not lost. After Unknown or Fenced the database is broken (L6) and the loop ends.
C4  Reads are never blocked: they hold their version, whose files stay until nobody pins them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

import msgspec
import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import (
    ClosedError,
    ConflictError,
    FencedError,
    InvalidError,
    TidemillError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidemill.metastore.lsm.compaction.compaction_job import names_needed
from tidemill.metastore.lsm.compaction.executor import Merger
from tidemill.metastore.lsm.compaction.picker import Job, pick, settle
from tidemill.metastore.lsm.file_store import FileName
from tidemill.metastore.lsm.manifest import FileMeta
from tidemill.metastore.lsm.notifier import Notifier
from tidemill.metastore.lsm.options import Options
from tidemill.metastore.lsm.version import Edit, Version

_log = structlog.get_logger()

BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 30.0


class VersionsLike(Protocol):
    """What the loop needs of version_set.py."""

    @property
    def current(self) -> Version: ...
    def next_file_name(self) -> FileName: ...
    def release_file_names(self, names: Iterable[FileName]) -> None: ...


class Merging(msgspec.Struct):
    """The job under way, for marks: position `rows_done`, target `rows`."""

    level: int
    target: int
    rows: int
    size_bytes: int
    rows_done: int = 0
    since_ms: int = 0


class CompactionStats(msgspec.Struct):
    """Totals since the database was opened. Bytes are those of whole files, as stored.

    `failure` is the last error of a job that has not succeeded since, "" when all is well.
    """

    merges: int = 0
    moves: int = 0
    rows_read: int = 0
    rows_written: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    failures: int = 0
    failure: str = ""


class Compactor:
    """`commit` makes an edit durable and current, shielded from cancellation; `wake` rings at every new version."""

    def __init__(
        self,
        versions: VersionsLike,
        commit: Callable[[Edit], Awaitable[None]],
        wake: Notifier,
        merger: Merger,
        options: Options,
        clock: Clock,
        prefix: str,
    ) -> None:
        self._versions = versions
        self._commit = commit
        self._wake = wake
        self._merger = merger
        self._options = options
        self._clock = clock
        self._prefix = prefix
        self._turn = asyncio.Lock()
        self._pointers: dict[int, bytes] = {}
        self.merging: Merging | None = None
        self.stats = CompactionStats()

    async def run(self) -> None:
        """Until cancelled. Ends with the commit's error when that broke the database, or refused the edit."""
        delay_s = 0.0
        while True:
            rings = self._wake.rings
            try:
                busy = await self._step(lambda version: pick(version.levels, self._options, self._pointers))
            except _CommitFailedError as failed:
                raise failed.error from failed
            except ClosedError:
                raise
            except Exception:
                # Also after Corrupt and Missing: an object that the operator restores heals them. And after what
                # nobody foresaw: a loop that died of it would stop all writers in the end.
                delay_s = min(BACKOFF_MAX_S, 2 * delay_s or BACKOFF_FIRST_S)
                await asyncio.sleep(delay_s)
                continue
            delay_s = 0.0
            if not busy:
                await self._wake.after(rings)

    async def settle(self) -> None:
        """Bring what is in the database at this moment into one level, without tombstones; waits for its turn.

        Raises what the merge or the commit raised; nothing is lost then, and the call may be repeated.
        """
        try:
            await self._step(lambda version: settle(version.levels, self._options))
        except _CommitFailedError as failed:
            raise failed.error from failed

    async def _step(self, choose: Callable[[Version], Job | None]) -> bool:
        """Choose one job and do it; False when there is none."""
        async with self._turn:
            job = choose(self._versions.current)
            if job is None:
                return False
            try:
                await self._do(job)
            except _CommitFailedError as failed:
                self._note_failure(failed.error)
                raise
            except Exception as error:
                self._note_failure(error)
                raise
            finally:
                self.merging = None
            self.stats.failure = ""
            return True

    async def _do(self, job: Job) -> None:
        if job.move:
            await self._commit_patiently(_edit(job, list(job.inputs)))
            self.stats.moves += 1
        else:
            names = tuple(self._versions.next_file_name() for _ in range(names_needed(job, self._options)))
            try:
                made = await self._merge(msgspec.structs.replace(job, names=names, prefix=self._prefix))
                await self._commit_patiently(_edit(job, made))
            finally:
                # In a version by now, or orphans for good: the names are not used again (V4).
                self._versions.release_file_names(names)
            self.stats.merges += 1
            self.stats.rows_read += job.rows
            self.stats.bytes_read += job.size_bytes
            self.stats.rows_written += sum(file.rows for file in made)
            self.stats.bytes_written += sum(file.size_bytes for file in made)
        if job.level > 0:
            self._pointers[job.level] = job.runs[-1][-1].largest

    async def _merge(self, job: Job) -> list[FileMeta]:
        merging = self.merging = Merging(job.level, job.target, job.rows, job.size_bytes, since_ms=self._clock.now_ms())

        def progress(rows_done: int) -> None:
            merging.rows_done = rows_done

        return await self._merger.merge(job, progress)

    async def _commit_patiently(self, edit: Edit) -> None:
        """Commit, again after Unavailable: the outputs are good, only the manifest is missing (C3)."""
        delay_s = BACKOFF_FIRST_S
        while True:
            try:
                await self._commit(edit)
                return
            except UnavailableError as error:
                self._note_failure(error)
                await asyncio.sleep(delay_s)
                delay_s = min(BACKOFF_MAX_S, 2 * delay_s)
            except (UnknownOutcomeError, FencedError, ConflictError, InvalidError) as error:
                raise _CommitFailedError(error) from error

    def _note_failure(self, error: Exception) -> None:
        text = str(error) if isinstance(error, TidemillError) else repr(error)
        if text != self.stats.failure:
            _log.warning("a merge failed", prefix=self._prefix, cause=text)
        self.stats.failures += 1
        self.stats.failure = text


class _CommitFailedError(Exception):
    """Tells an error of the commit, which ends the loop, from the same kind of error of a merge, which does not."""

    def __init__(self, error: TidemillError) -> None:
        super().__init__(str(error))
        self.error = error


def _edit(job: Job, made: list[FileMeta]) -> Edit:
    return Edit(added=tuple((job.target, file) for file in made), removed=job.inputs)
