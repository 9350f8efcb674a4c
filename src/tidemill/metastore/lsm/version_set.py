"""Version set: the current version, the pins of versions, the file numbers in flight, and the commit of edits.

- Invariant (serial manifests): manifest writes are serialised; each is made from the newest version at its turn.
- Invariant (atomic install): the committed version is installed, and the work that depends on it done, in one
  synchronous step.
- Invariant (halt on unknown): a manifest write of unknown outcome halts everything: this process cannot know any more
  which version is current.
- Invariant (in flight): a file number is in flight from when its name is assigned until its file is in a version or
  never will be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import FencedError, InvalidError, TidemillError, UnknownOutcomeError
from tidemill.metastore.lsm.file_store import FileName
from tidemill.metastore.lsm.manifest import FileMeta, Manifest
from tidemill.metastore.lsm.manifest_store import Manifests
from tidemill.metastore.lsm.table_cache import TableCache
from tidemill.metastore.lsm.version import EMPTY_VERSION, Edit, Version


class VersionSet:
    """Version set. `current` is never modified, only replaced. `manifest` is the one last read or written."""

    def __init__(
        self,
        manifests: Manifests,
        tables: TableCache,
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
        self.current = Version(manifest.levels or ((),), manifest.last_seqno) if manifest else EMPTY_VERSION
        self.halted: TidemillError | None = None
        """Set once, after UnknownOutcomeError or FencedError. Then nothing is written or collected any more."""

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
            self._drop_unneeded(version.files)

    def pinned_files(self) -> set[FileMeta]:
        """Return the files of all pinned versions."""
        # list() copies in one step: the finaliser of an abandoned scan may unpin at any allocation.
        return {file for version in list(self._pins) for file in version.files}

    @property
    def pins(self) -> int:
        return sum(self._pins.values())

    def _drop_unneeded(self, files: Iterable[FileMeta]) -> None:
        needed = self.pinned_files() | self.current.files
        for file in files:
            if file not in needed:
                self._tables.drop_file(file)

    # file numbers --------------------------------------------------------------------------------------

    def next_file_name(self) -> FileName:
        """Return a name that was never used before; its number is in flight until released."""
        number = self._next_number
        self._next_number += 1
        self._in_flight.add(number)
        return FileName(self._epoch, number, self._rand.nonce())

    def release_file_names(self, names: Iterable[FileName]) -> None:
        """Release names whose files are in a version now, or are orphans. Idempotent."""
        self._in_flight.difference_update(name.number for name in names)

    @property
    def lowest_in_flight(self) -> int:
        """Lowest number still being written, else the next one to be assigned. Garbage collection spares files from it
        on."""
        return min(self._in_flight, default=self._next_number)

    # changes -------------------------------------------------------------------------------------------

    async def commit(self, edit: Edit, installed: Callable[[], None]) -> None:
        """Write the manifest with `edit`, then swap the version and call `installed` in one step.

        Must not be cancelled unless the database is being closed: the caller shields it. Raises ConflictError if the
        edit does not fit the newest version, and what `Manifests.write` raises.
        """
        async with self._lock:
            if self.halted is not None:
                raise self.halted
            version = self.current.apply_edit(edit)
            manifest = Manifest(
                domain_uuid=self._domain_uuid,
                epoch=self._epoch,
                number=self._manifest_number + 1,
                last_seqno=version.last_seqno,
                next_file_number=self._next_number,
                created_ms=self._clock.now_ms(),
                levels=version.levels,
            )
            # The number is used up regardless of the outcome: a copy uploaded in vain must not share the number of the
            # manifest that counts, because a restore takes the greatest number in the bucket for the newest.
            self._manifest_number = manifest.number
            try:
                await self._manifests.write(manifest)
            except FencedError as error:
                self.halted = error
                raise
            except TidemillError as error:
                if isinstance(error, UnknownOutcomeError):
                    self.halted = broken_error(manifest, error)
                    raise self.halted from error
                raise
            except BaseException as error:
                self.halted = broken_error(manifest, error)
                raise
            self.manifest = manifest
            self._install(version)
            installed()

    def switch_to(self, manifest: Manifest) -> bool:
        """Switch to a manifest written by another process; return False if it is the current one.

        Raises InvalidError for another domain's manifest, or an older one.
        """
        if manifest.domain_uuid != self._domain_uuid:
            raise InvalidError(
                "the manifest belongs to another domain: "
                f"domain_uuid={self._domain_uuid} manifest_domain_uuid={manifest.domain_uuid}.",
                fix="Reopen the database: the domain was reset.",
            )
        old = self.manifest
        if old is not None and (manifest.epoch, manifest.number) == (old.epoch, old.number):
            return False
        if manifest.last_seqno < self.current.last_seqno or (old is not None and manifest.epoch < old.epoch):
            raise InvalidError(
                "the manifest is older than the one in use: "
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
            self._drop_unneeded(old.files - version.files)


def broken_error(manifest: Manifest, cause: BaseException) -> UnknownOutcomeError:
    return UnknownOutcomeError(
        "the database is broken, a manifest write has an unknown outcome: "
        f"domain_uuid={manifest.domain_uuid} epoch={manifest.epoch} number={manifest.number} cause={cause!r}.",
        fix="Close the database and reopen it from the newest manifest.",
    )
