"""Manifest storage of a replicated database: a copy goes to the bucket first, then the log decides.

Implements `lsm.manifest_store.Manifests` for the leader, and reading for followers.
"""

from __future__ import annotations

from collections.abc import Callable

from tidemill.base.errors import (
    CorruptError,
    FencedError,
    InvalidError,
    TidemillError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidemill.consensus.state_log.state_log import StateLog
from tidemill.metastore.domain.codec import encode_command
from tidemill.metastore.domain.commands import PersistManifest
from tidemill.metastore.domain.state import DomainState, PersistedManifest
from tidemill.metastore.lsm.manifest import Manifest, decode_manifest, encode_manifest
from tidemill.metastore.lsm.manifest_store import BucketManifests

ANY_EPOCH = 10**20 - 1


def read_manifest(state: DomainState, domain_uuid: str, max_epoch: int) -> Manifest | None:
    """Return the replicated manifest. Raises FencedError if the domain's uuid changed or a newer epoch exists;
    CorruptError; InvalidError."""
    if state.domain_uuid != domain_uuid:
        raise FencedError(
            f"the domain's uuid changed: opened={domain_uuid} current={state.domain_uuid}.",
            current=state.domain_uuid,
            fix="Reopen it.",
        )
    persisted = state.manifest
    if persisted is None:
        return None
    if persisted.epoch > max_epoch:
        raise FencedError(
            f"a newer epoch has persisted a manifest: epoch={max_epoch} persisted_epoch={persisted.epoch}.",
            current=persisted.epoch,
            fix="Step down.",
        )
    manifest = decode_manifest(persisted.data, f"log of {domain_uuid}")
    if manifest.domain_uuid != domain_uuid:
        raise CorruptError(
            f"the manifest is of another domain: uuid={domain_uuid} manifest_uuid={manifest.domain_uuid}.",
            fix="Restore the domain from its own manifest.",
        )
    return manifest


class ReplicatedManifests:
    """The leader's manifest storage, for one opening of the database in one term.

    `persisted()` is called after every manifest that the log accepted. `failed(error)` is called after one that it did
    not accept, unless it certainly never got there (UnavailableError): the leader must stop then.
    """

    def __init__(
        self,
        log: StateLog[DomainState],
        bucket: BucketManifests,
        *,
        domain_uuid: str,
        term: int,
        persisted: Callable[[], None],
        failed: Callable[[TidemillError], None],
    ) -> None:
        self._log = log
        self._bucket = bucket
        self._domain_uuid = domain_uuid
        self._term = term
        self._persisted = persisted
        self._failed = failed

    async def read(self, max_epoch: int) -> Manifest | None:
        return read_manifest(self._log.state, self._domain_uuid, max_epoch)

    async def write(self, manifest: Manifest) -> None:
        """Upload, then replicate in the epoch's own term. Raises FencedError, ConflictError, InvalidError,
        UnavailableError, UnknownOutcomeError."""
        data = encode_manifest(manifest)
        persisted = PersistedManifest(data, manifest.last_seqno, manifest.epoch, manifest.number)
        command = PersistManifest(self._domain_uuid, persisted)
        try:
            self._check(command)
            await self._upload(manifest)
            await self._log.propose_deferred(lambda state: self._encode_checked(command))
        except UnavailableError:
            raise
        except TidemillError as error:
            self._failed(error)
            raise
        self._persisted()

    async def _upload(self, manifest: Manifest) -> None:
        try:
            await self._bucket.upload(manifest)
        except UnknownOutcomeError as error:
            # Uploaded or not: the log does not have it, so it does not count.
            raise UnavailableError(f"the manifest's upload has no known outcome: reason={error.message!r}.") from error

    def _encode_checked(self, command: PersistManifest) -> bytes:
        self._check(command)
        return encode_command(command)

    def _check(self, command: PersistManifest) -> None:
        state = self._log.state
        if self._log.term != self._term or command.manifest.epoch != state.epoch(self._term):
            raise FencedError(
                f"the term of this manifest has ended: epoch={command.manifest.epoch} term={self._term} "
                f"current_term={self._log.term}.",
                fix="Step down.",
            )
        command.check(state)


class FollowedManifests:
    """A follower's manifest storage: it reads the manifest from its replica of the log."""

    def __init__(self, log: StateLog[DomainState], domain_uuid: str) -> None:
        self._log = log
        self._domain_uuid = domain_uuid

    async def read(self, max_epoch: int) -> Manifest | None:
        """Return the manifest, regardless of the epoch: a follower has none."""
        return read_manifest(self._log.state, self._domain_uuid, ANY_EPOCH)

    async def write(self, manifest: Manifest) -> None:
        raise InvalidError(f"a follower writes no manifest: uuid={self._domain_uuid}.", fix="Write at the leader.")
