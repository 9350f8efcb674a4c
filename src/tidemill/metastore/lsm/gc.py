"""Garbage collection of one domain: old manifests first, then files.

A file is needed while it is in the current version, pinned by a snapshot or a scan, or named by a retained manifest of
the bucket. Retained are the newest `manifests_kept` of the bucket, all of newer epochs, and always the replicated
manifest, from which this database was opened or which it wrote last. Some files look dead but must not be deleted yet:

    of a newer epoch                   another leader's, whose manifest this process does not know
    of this epoch, number ≥ the lowest  being written now: its manifest follows
      one in flight
    of an older epoch, before this      the dead leader's last manifest may be newer than the replicated
      epoch has a manifest in the       one, and a restore would start from it; its upload may even
      bucket                            still be running
    dead for less than gc_delay_ms,     readers without a pin here: followers, and processes that have
      or written less than that ago     just loaded a manifest

Invariant (roots before listing): the roots are read in one synchronous step at the start of a round. A file that is not
a root then, with a number below every one in flight, can enter no later version: versions gain only files created after
that step. So nothing that happens during the round can make it live again.

A dead file that cannot be deleted is found again in the next round. Deletion is idempotent and names are never reused,
so a round may be interrupted at any point.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Set
from enum import Enum
from typing import TypeVar

import msgspec
import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import ClosedError, MissingError, TidemillError, UnavailableError, UnknownOutcomeError
from tidemill.base.runtime.tasks import error_sentence
from tidemill.metastore.lsm.file_store import FileName, SstFiles
from tidemill.metastore.lsm.manifest import FileMeta
from tidemill.metastore.lsm.manifest_store import BucketManifests, ManifestName
from tidemill.metastore.lsm.options import Options

_log = structlog.get_logger()

DELETES_AT_ONCE = 8
PAUSE_MIN_S = 1.0

_Name = TypeVar("_Name", ManifestName, FileName)
Identity = tuple[int, int, str]
"""Epoch, number and nonce of a file."""


class Roots(msgspec.Struct, frozen=True):
    """Files and manifest that the database needs, read in one synchronous step.

    lowest_in_flight   the lowest file number of this epoch that is being written, else the next one to be assigned
    files              of the current version and of every pinned one
    manifest           epoch and number of the replicated manifest, None before the first one
    """

    epoch: int
    lowest_in_flight: int
    files: frozenset[FileMeta]
    manifest: tuple[int, int] | None


class Retention(Enum):
    """Reason why a file is not dead."""

    LIVE = "live"
    NEWER_EPOCH = "newer epoch"
    IN_FLIGHT = "in flight"


class CollectionResult(msgspec.Struct, frozen=True):
    """Result of one round, with the reasons why files were not deleted.

    waiting    dead, but not for long enough, or until this epoch has a manifest in the bucket
    failed     deletes that failed; the next round retries them
    missing    keys of files that a retained manifest or the current version names but the bucket lacks
    """

    deleted_files: int = 0
    deleted_manifests: int = 0
    kept: int = 0
    skipped_newer_epoch: int = 0
    skipped_in_flight: int = 0
    waiting: int = 0
    failed: int = 0
    missing: tuple[str, ...] = ()


class GarbageCollector:
    """Collector of one writable database, one round at a time. It remembers since when each file is dead."""

    def __init__(
        self,
        files: SstFiles,
        manifests: BucketManifests,
        options: Options,
        clock: Clock,
    ) -> None:
        self._files = files
        self._manifests = manifests
        self._options = options
        self._clock = clock
        self._dead_since_s: dict[Identity, float] = {}
        self._named: dict[str, frozenset[FileMeta]] = {}
        self._lock = asyncio.Lock()
        self.last: CollectionResult | None = None
        """Result of the last completed round."""
        self.error: TidemillError | None = None
        """Error of the last round of `run`; None if it succeeded."""

    async def run(self, roots: Callable[[], Roots], may_go_on: Callable[[], bool]) -> None:
        """Collect, with pauses, until `may_go_on` returns False."""
        while True:
            await asyncio.sleep(max(PAUSE_MIN_S, self._options.gc_delay_ms / 2000))
            if not may_go_on():
                return
            try:
                await self.collect(roots, may_go_on)
            except TidemillError as error:
                self.error = error if may_go_on() else None
            except Exception as error:
                # The next round retries it: if this loop ended, the leader would step down, and so would its successor.
                self.error = TidemillError(f"garbage collection failed unexpectedly: reason={error_sentence(error)!r}.")
                _log.exception("garbage collection failed unexpectedly")
            else:
                self.error = None

    async def collect(
        self, roots: Callable[[], Roots], may_go_on: Callable[[], bool] = lambda: True
    ) -> CollectionResult:
        """Run one round. `may_go_on` is checked before every delete: a broken database deletes nothing more.

        Raises CorruptError or InvalidError if a retained manifest cannot be read: then the needed files are unknown and
        nothing is deleted. UnavailableError if the bucket cannot be listed; ClosedError if `may_go_on` ended it.
        """
        async with self._lock:
            done = await self._run_round(roots(), may_go_on)
            if done.missing and (self.last is None or self.last.missing != done.missing):
                _log.error("files that a manifest names are not in the bucket", files=done.missing)
            self.last = done
            return done

    async def _run_round(self, roots: Roots, may_go_on: Callable[[], bool]) -> CollectionResult:
        names = [name async for name in self._manifests.list()]
        retained = retained_manifests(names, roots.manifest, self._options.manifests_kept, roots.epoch)
        self._named = {key: files for key, files in self._named.items() if key in {name.key for name in names}}
        named = await self._files_named_by(retained)
        old = [name for name in names if name not in retained and name.epoch <= roots.epoch]
        deleted_manifests, lasting = await self._delete(old, lambda name: self._manifests.delete(name.key), may_go_on)
        # A manifest that could not be deleted can still be chosen for a restore, so its files stay too.
        named |= await self._files_named_by(lasting)

        # Files are listed after the manifests were read: every file they name was durable before, so it is listed.
        listed = [name async for name in self._files.list()]
        live = {_identity(file) for file in roots.files | named}
        own_manifest = any(name.epoch == roots.epoch for name in names)
        count: Counter[Retention] = Counter()
        dead: list[FileName] = []
        for name in listed:
            reason = retention_of(name, roots, live)
            if reason is None:
                dead.append(name)
            else:
                count[reason] += 1
        due = self._dead_for_long_enough(dead, roots.epoch, own_manifest)
        deleted, failed = await self._delete(due, self._files.delete, may_go_on)
        for name in due:
            if name not in failed:
                self._dead_since_s.pop(_identity(name), None)
        return CollectionResult(
            deleted_files=deleted,
            deleted_manifests=deleted_manifests,
            kept=count[Retention.LIVE],
            skipped_newer_epoch=count[Retention.NEWER_EPOCH],
            skipped_in_flight=count[Retention.IN_FLIGHT],
            waiting=len(dead) - len(due),
            failed=len(failed) + len(lasting),
            missing=self._missing_files(roots.files | named, listed),
        )

    def _dead_for_long_enough(self, dead: list[FileName], epoch: int, own_manifest: bool) -> list[FileName]:
        """Return the files dead for long enough, both since first seen dead and by the object's age in the store."""
        now_s, delay_s = self._clock.monotonic_s(), self._options.gc_delay_ms / 1000
        written_before_ms = self._clock.now_ms() - self._options.gc_delay_ms
        before = self._dead_since_s
        self._dead_since_s = {_identity(name): before.get(_identity(name), now_s) for name in dead}
        return [
            name
            for name in dead
            if now_s - self._dead_since_s[_identity(name)] >= delay_s
            and name.modified_ms <= written_before_ms
            and (name.epoch == epoch or own_manifest)
        ]

    async def _files_named_by(self, names: Iterable[ManifestName]) -> frozenset[FileMeta]:
        """Return the files that these manifests name. Each manifest is read once: it never changes."""
        named: set[FileMeta] = set()
        for name in names:
            if name.key not in self._named:
                try:
                    manifest = await self._manifests.load(name.key)
                except MissingError as error:
                    # Another leader deleted it since the listing, and wrote a newer one that was not listed. The needed
                    # files are therefore unknown and the round ends.
                    raise UnavailableError(f"another leader collects garbage here too: manifest={name.key}.") from error
                self._named[name.key] = frozenset(file for files in manifest.levels for file in files)
            named |= self._named[name.key]
        return frozenset(named)

    async def _delete(
        self,
        names: list[_Name],
        delete: Callable[[_Name], Awaitable[None]],
        may_go_on: Callable[[], bool],
    ) -> tuple[int, list[_Name]]:
        """Delete; return (number deleted, those that failed). A lost acknowledgement counts as failed and is
        retried."""
        failed: list[_Name] = []

        async def delete_one(name: _Name) -> None:
            if not may_go_on():
                raise ClosedError("garbage collection has ended: the database was closed or is broken.")
            try:
                await delete(name)
            except (UnavailableError, UnknownOutcomeError):
                failed.append(name)

        for first in range(0, len(names), DELETES_AT_ONCE):
            # All deletes of the group end before an error is raised: none is running after the round.
            ended = await asyncio.gather(
                *map(delete_one, names[first : first + DELETES_AT_ONCE]), return_exceptions=True
            )
            for error in ended:
                if error is not None:
                    raise error
        return len(names) - len(failed), failed

    def _missing_files(self, needed: Iterable[FileMeta], listed: Iterable[FileName]) -> tuple[str, ...]:
        there = {_identity(name) for name in listed}
        return tuple(sorted(self._files.key(file) for file in needed if _identity(file) not in there))


def retained_manifests(
    names: Iterable[ManifestName], replicated: tuple[int, int] | None, kept: int, epoch: int
) -> list[ManifestName]:
    """Return the newest `kept` manifests, the replicated one regardless of its age, and all of epochs above `epoch`: a
    superseded leader cannot know which of those the new leader opened from or still needs.

    Uploads of one manifest under several nonces count once, so a series of failed attempts with one number cannot
    displace the manifests before it.
    """
    names = list(names)
    numbers = sorted({(name.epoch, name.number) for name in names})[-kept:]
    return [
        name
        for name in names
        if (name.epoch, name.number) in numbers or (name.epoch, name.number) == replicated or name.epoch > epoch
    ]


def retention_of(name: FileName, roots: Roots, live: Set[Identity]) -> Retention | None:
    """Return why the file is not dead, or None if it is. `live` are the files of the roots and retained manifests."""
    if _identity(name) in live:
        return Retention.LIVE
    if name.epoch > roots.epoch:
        return Retention.NEWER_EPOCH
    if name.epoch == roots.epoch and name.number >= roots.lowest_in_flight:
        return Retention.IN_FLIGHT
    return None


def _identity(file: FileMeta | FileName) -> Identity:
    return file.epoch, file.number, file.nonce
