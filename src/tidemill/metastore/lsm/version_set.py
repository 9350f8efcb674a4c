"""The current version, who pins which, the file numbers being written, and the one way to change all that.

V1  Manifest writes are serialised; each is made from the newest version at its turn (L5).
V2  What was committed is installed, and what depends on it is done, in one synchronous step.
V3  A write that may or may not have happened halts everything: nobody here can tell which version is current (L6).
V4  A number is in flight from when its name is given until its file is in a version or will never be (L7).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import FencedError, InvalidError, TidemillError, UnknownOutcomeError
from tidemill.metastore.lsm.file_store import FileName
from tidemill.metastore.lsm.manifest import FileMeta, Manifest
from tidemill.metastore.lsm.manifest_store import Manifests
from tidemill.metastore.lsm.table_cache import Tables
from tidemill.metastore.lsm.version import EMPTY, Edit, Version


class Versions:
    """`current` is never changed, only replaced. `manifest` is the one it was read from or written to last."""

    def __init__(
        self,
        manifests: Manifests,
        tables: Tables,
        manifest: Manifest | None,
        *,
        domain_uuid: str,
        epoch: int,
        clock: Clock,
        rand: Rand,
    ) -> None:
        self._manifests = manifests
        self._tables = tables
        self._domain_uuid = domain_uuid
        self._epoch = epoch
        self._clock = clock
        self._rand = rand
        self._lock = asyncio.Lock()
        self._pins: dict[Version, int] = {}
        self._in_flight: set[int] = set()
        self._next_number = manifest.next_file_number if manifest else 1
        self._manifest_number = manifest.number if manifest else 0
        self.manifest = manifest
        self.current = Version(manifest.levels or ((),), manifest.last_seqno) if manifest else EMPTY
        self.halted: TidemillError | None = None
        """Set once, after Unknown or Fenced; then nothing is written or collected any more."""

    # pins --------------------------------------------------------------------------------------------

    def pin(self, version: Version) -> None:
        self._pins[version] = self._pins.get(version, 0) + 1

    def unpin(self, version: Version) -> None:
        count = self._pins[version] - 1
        if count:
            self._pins[version] = count
            return
        del self._pins[version]
        if version is not self.current:
            self._forget(version.files)

    def pinned_files(self) -> set[FileMeta]:
        """Files of every version somebody reads from, the current one aside."""
        # A copy in one step: an abandoned scan may unpin from its finaliser, at any allocation.
        return {file for version in list(self._pins) for file in version.files}

    @property
    def pins(self) -> int:
        return sum(self._pins.values())

    def _forget(self, files: Iterable[FileMeta]) -> None:
        needed = self.pinned_files() | self.current.files
        for file in files:
            if file not in needed:
                self._tables.forget(file)

    # file numbers --------------------------------------------------------------------------------------

    def next_file_name(self) -> FileName:
        """A name never given before; in flight until it is released."""
        number = self._next_number
        self._next_number += 1
        self._in_flight.add(number)
        return FileName(self._epoch, number, self._rand.nonce())

    def release_file_names(self, names: Iterable[FileName]) -> None:
        """Their files are in a version by now, or are orphans. Idempotent."""
        self._in_flight.difference_update(name.number for name in names)

    @property
    def lowest_in_flight(self) -> int:
        """The lowest number still being written, else the next one to be given (L7)."""
        return min(self._in_flight, default=self._next_number)

    # changes -------------------------------------------------------------------------------------------

    async def commit(self, edit: Edit, installed: Callable[[], None]) -> None:
        """Write the manifest with `edit`, then swap the version and call `installed` in one step.

        Not to be cancelled but at the end of the process's interest in the database: the caller shields it.
        Raises Conflict when the edit does not fit the newest version, and what `Manifests.write` raises.
        """
        async with self._lock:
            if self.halted is not None:
                raise self.halted
            version = self.current.edited(edit)
            manifest = Manifest(
                domain_uuid=self._domain_uuid,
                epoch=self._epoch,
                number=self._manifest_number + 1,
                last_seqno=version.last_seqno,
                next_file_number=self._next_number,
                created_ms=self._clock.now_ms(),
                levels=version.levels,
            )
            # Spent whatever comes of it: a copy uploaded in vain must not share the number of the one that
            # counts, because a restore takes the greatest number in the bucket for the newest.
            self._manifest_number = manifest.number
            try:
                await self._manifests.write(manifest)
            except FencedError as error:
                self.halted = error
                raise
            except TidemillError as error:
                if isinstance(error, UnknownOutcomeError):
                    self.halted = broken(manifest, error)
                    raise self.halted from error
                raise
            except BaseException as error:
                self.halted = broken(manifest, error)
                raise
            self.manifest = manifest
            self._install(version)
            installed()

    def adopt(self, manifest: Manifest) -> bool:
        """Go over to a manifest written by somebody else; False when it is the one we have.

        Raises InvalidError for another domain's, or one that goes back.
        """
        if manifest.domain_uuid != self._domain_uuid:
            raise InvalidError(
                "The manifest belongs to another domain: "
                f"domain_uuid={self._domain_uuid} manifest_domain_uuid={manifest.domain_uuid}.",
                fix="Reopen the database: the domain was reset.",
            )
        old = self.manifest
        if old is not None and (manifest.epoch, manifest.number) == (old.epoch, old.number):
            return False
        if manifest.last_seqno < self.current.last_seqno or (old is not None and manifest.epoch < old.epoch):
            raise InvalidError(
                "The manifest is older than the one in use: "
                f"last_seqno={manifest.last_seqno} current_last_seqno={self.current.last_seqno} "
                f"epoch={manifest.epoch} current_epoch={old.epoch if old else 0}.",
                fix="Read the newest manifest, or reopen the database.",
            )
        self.manifest = manifest
        self._install(Version(manifest.levels or ((),), manifest.last_seqno))
        return True

    def _install(self, version: Version) -> None:
        old, self.current = self.current, version
        if old not in self._pins:
            self._forget(old.files - version.files)


def broken(manifest: Manifest, cause: BaseException) -> UnknownOutcomeError:
    return UnknownOutcomeError(
        "The database is broken: a manifest may or may not have been written: "
        f"domain_uuid={manifest.domain_uuid} epoch={manifest.epoch} number={manifest.number} cause={cause!r}.",
        fix="Close the database and open it again from the newest manifest.",
    )
