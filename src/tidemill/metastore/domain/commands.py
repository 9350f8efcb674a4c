"""The four updates of a domain's state, each with the rules it can be checked against before it has a position.

`check(state)` raises and changes nothing. It is asked twice: when the update is built, to refuse early and
save an append, and when it is applied, which alone decides. `apply` adds the rules that need position or term.
"""

from __future__ import annotations

import msgspec

from tidemill.base.errors import ConflictError, InvalidError
from tidemill.metastore.domain.state import DomainState, PersistedManifest


class SetDomainUuid(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Name a domain that has no name yet. The first of racing leaders wins."""

    domain_uuid: str

    def check(self, state: DomainState) -> None:
        if not self.domain_uuid:
            raise InvalidError("A domain uuid cannot be empty.", fix="Draw a new one.")
        if state.domain_uuid:
            raise ConflictError(
                f"The domain has its uuid: current={state.domain_uuid} offered={self.domain_uuid}.",
                current=state.domain_uuid,
                fix="Use the current one.",
            )


class WriteBatch(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Rows that become visible together, all with one seqno. An empty value deletes its key."""

    domain_uuid: str
    keys: list[bytes]
    values: list[bytes]

    def check(self, state: DomainState) -> None:
        check_uuid(state, self.domain_uuid)
        if not self.keys or len(self.keys) != len(self.values):
            raise InvalidError(
                f"A write batch needs rows: keys={len(self.keys)} values={len(self.values)}.",
                fix="Give at least one row, each a key and a value.",
            )


class PersistManifest(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A manifest that is already in the bucket becomes what the next leader opens; older batches are dropped."""

    domain_uuid: str
    manifest: PersistedManifest

    def check(self, state: DomainState) -> None:
        check_uuid(state, self.domain_uuid)
        check_counts(self.manifest)
        check_issued(state, self.manifest)
        check_not_lower(state, self.manifest)


class ResetManifest(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Make an empty domain go on from a manifest found in the bucket, or begin again with nothing (None)."""

    domain_uuid: str
    manifest: PersistedManifest | None

    def check(self, state: DomainState) -> None:
        if not self.domain_uuid:
            raise InvalidError("A domain uuid cannot be empty.", fix="Name the domain that is restored.")
        if self.manifest is not None:
            check_counts(self.manifest)
        if state.volatile or state.persisted_seqno:
            raise ConflictError(
                f"The domain is not empty: uuid={state.domain_uuid} newest_seqno={state.newest_seqno}.",
                current=state.manifest,
                fix="Reset only a domain that holds nothing; restore into empty consensus.",
            )


Command = SetDomainUuid | WriteBatch | PersistManifest | ResetManifest


def check_counts(manifest: PersistedManifest) -> None:
    if manifest.last_seqno < 0 or manifest.epoch < 0:
        raise InvalidError(
            f"A manifest counts from 0: last_seqno={manifest.last_seqno} epoch={manifest.epoch}.",
            fix="Restore from a manifest that this program wrote.",
        )


def check_uuid(state: DomainState, domain_uuid: str) -> None:
    if not domain_uuid or domain_uuid != state.domain_uuid:
        raise ConflictError(
            f"The update is for another domain: uuid={domain_uuid!r} current={state.domain_uuid!r}.",
            current=state.domain_uuid,
            fix="Reopen the domain; it was reset or never named.",
        )


def check_issued(state: DomainState, manifest: PersistedManifest) -> None:
    """F22: rows would count as persisted by the manifest's claim alone."""
    if manifest.last_seqno > state.newest_seqno:
        raise InvalidError(
            f"The manifest claims what was never written: last_seqno={manifest.last_seqno} "
            f"newest_seqno={state.newest_seqno}.",
            fix="Report it: a manifest's last seqno is taken when the memtable is frozen.",
        )


def check_not_lower(state: DomainState, manifest: PersistedManifest) -> None:
    stored = state.manifest
    if stored is None:
        return
    # The number is beyond the seed's rule: of two manifests with one seqno, the elder names files that may be gone.
    before = (manifest.epoch, manifest.number) < (stored.epoch, stored.number)
    if before or manifest.last_seqno < stored.last_seqno:
        raise ConflictError(
            f"A newer manifest is persisted: last_seqno={manifest.last_seqno} epoch={manifest.epoch} "
            f"number={manifest.number} stored_seqno={stored.last_seqno} stored_epoch={stored.epoch} "
            f"stored_number={stored.number}.",
            current=stored,
            fix="Reopen from the stored manifest.",
        )
