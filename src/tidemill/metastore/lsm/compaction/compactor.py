"""Compaction loop of a database: pick a job, execute it, commit it; one job at a time.

- Invariant (sole remover): only this loop removes files from a version; a flush only adds to level 0. So the picked
  files are still live when the job's edit is committed, however long the job took.
- Invariant (commit decides): nothing has an effect before the commit. A job that is interrupted, fails, or loses its
  process leaves orphans and is picked again, under new names.
- Invariant (no lost work): a commit that failed with UnavailableError is retried with the same outputs, whose names
  stay in flight. After UnknownOutcomeError or FencedError the database is broken and the loop ends.
- Invariant (reads never wait): a read pins its version, whose files stay until no reader pins them.
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
from tidemill.metastore.lsm.compaction.executor import CompactionExecutor
from tidemill.metastore.lsm.compaction.picker import Job, pick_full_compaction, pick_job
from tidemill.metastore.lsm.database_protocol import Notifier
from tidemill.metastore.lsm.file_store import FileName
from tidemill.metastore.lsm.manifest import FileMeta
from tidemill.metastore.lsm.options import Options
from tidemill.metastore.lsm.version import Edit, Version

_log = structlog.get_logger()

BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 30.0


class VersionSetProtocol(Protocol):
    """Interface of the version set that the loop uses."""

    @property
    def current(self) -> Version: ...
    def next_file_name(self) -> FileName: ...
    def release_file_names(self, names: Iterable[FileName]) -> None: ...


class CompactionProgress(msgspec.Struct):
    """Progress of the running job, for the stage status: position `rows_done`, target `rows`."""

    level: int
    target: int
    rows: int
    size_bytes: int
    rows_done: int = 0
    since_ms: int = 0


class CompactionStats(msgspec.Struct):
    """Totals since the database was opened. Bytes are those of whole files as stored.

    `failure` is the error of the last job if it failed, "" if it succeeded.
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
    """Compaction loop. `commit` makes an edit durable and current, shielded from cancellation; `wake` rings at every
    new version."""

    def __init__(
        self,
        versions: VersionSetProtocol,
        commit: Callable[[Edit], Awaitable[None]],
        wake: Notifier,
        merger: CompactionExecutor,
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
        self.merging: CompactionProgress | None = None
        self.stats = CompactionStats()

    async def run(self) -> None:
        """Run until cancelled. Ends with the commit's error if that broke the database or rejected the edit."""
        delay_s = 0.0
        while True:
            rings = self._wake.rings
            try:
                busy = await self._run_one_job(lambda version: pick_job(version.levels, self._options, self._pointers))
            except _CommitFailedError as failed:
                raise failed.error from failed
            except ClosedError:
                raise
            except Exception:
                # CorruptError and MissingError are retried too: an operator may restore the object. So are unexpected
                # errors: if this loop ended, writers would stop eventually.
                delay_s = min(BACKOFF_MAX_S, 2 * delay_s or BACKOFF_FIRST_S)
                await asyncio.sleep(delay_s)
                continue
            delay_s = 0.0
            if not busy:
                await self._wake.wait_after(rings)

    async def compact_fully(self) -> None:
        """Compact everything that is in the database now into one level, without tombstones; wait for a running job
        first.

        Raises what the job or its commit raised; nothing is lost then, and the call may be repeated.
        """
        try:
            await self._run_one_job(lambda version: pick_full_compaction(version.levels, self._options))
        except _CommitFailedError as failed:
            raise failed.error from failed

    async def _run_one_job(self, choose: Callable[[Version], Job | None]) -> bool:
        """Choose one job and execute it; return False if no job is due."""
        async with self._turn:
            job = choose(self._versions.current)
            if job is None:
                return False
            try:
                await self._execute(job)
            except _CommitFailedError as failed:
                self._record_failure(failed.error)
                raise
            except Exception as error:
                self._record_failure(error)
                raise
            finally:
                self.merging = None
            self.stats.failure = ""
            return True

    async def _execute(self, job: Job) -> None:
        if job.move:
            await self._commit_with_retries(_edit_of_job(job, list(job.inputs)))
            self.stats.moves += 1
        else:
            names = tuple(self._versions.next_file_name() for _ in range(names_needed(job, self._options)))
            try:
                made = await self._merge(msgspec.structs.replace(job, names=names, prefix=self._prefix))
                await self._commit_with_retries(_edit_of_job(job, made))
            finally:
                # The files are in a version now, or orphans forever: the names are not reused.
                self._versions.release_file_names(names)
            self.stats.merges += 1
            self.stats.rows_read += job.rows
            self.stats.bytes_read += job.size_bytes
            self.stats.rows_written += sum(file.rows for file in made)
            self.stats.bytes_written += sum(file.size_bytes for file in made)
        if job.level > 0:
            self._pointers[job.level] = job.runs[-1][-1].largest

    async def _merge(self, job: Job) -> list[FileMeta]:
        merging = self.merging = CompactionProgress(
            job.level, job.target, job.rows, job.size_bytes, since_ms=self._clock.now_ms()
        )

        def progress(rows_done: int) -> None:
            merging.rows_done = rows_done

        return await self._merger.merge(job, progress)

    async def _commit_with_retries(self, edit: Edit) -> None:
        """Commit, and retry after UnavailableError: the outputs are complete, only the manifest is missing."""
        delay_s = BACKOFF_FIRST_S
        while True:
            try:
                await self._commit(edit)
                return
            except UnavailableError as error:
                self._record_failure(error)
                await asyncio.sleep(delay_s)
                delay_s = min(BACKOFF_MAX_S, 2 * delay_s)
            except (UnknownOutcomeError, FencedError, ConflictError, InvalidError) as error:
                raise _CommitFailedError(error) from error

    def _record_failure(self, error: Exception) -> None:
        text = str(error) if isinstance(error, TidemillError) else repr(error)
        if text != self.stats.failure:
            _log.warning("compaction failed", prefix=self._prefix, cause=text)
        self.stats.failures += 1
        self.stats.failure = text


class _CommitFailedError(Exception):
    """Error of the commit, which ends the loop. The same error of the job itself does not."""

    def __init__(self, error: TidemillError) -> None:
        super().__init__(str(error))
        self.error = error


def _edit_of_job(job: Job, made: list[FileMeta]) -> Edit:
    return Edit(added=tuple((job.target, file) for file in made), removed=job.inputs)
