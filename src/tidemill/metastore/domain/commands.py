"""The four updates of a domain's state, each with the rules that can be checked before its log position is known.

`check(state)` raises and changes nothing. It runs twice: when the update is built, to reject early and save an append,
and when it is applied, which alone decides. `apply` adds the rules that need position or term.
"""

from __future__ import annotations

import msgspec

from tidemill.base.errors import ConflictError, InvalidError
from tidemill.metastore.domain.state import DomainState, PersistedManifest


class SetDomainUuid(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Give a domain without a uuid its uuid. The first of concurrent leaders wins."""

    domain_uuid: str

    def check(self, state: DomainState) -> None:
        if not self.domain_uuid:
            raise InvalidError("a domain uuid cannot be empty.", fix="Generate one.")
        if state.domain_uuid:
            raise ConflictError(
                f"the domain already has a uuid: current={state.domain_uuid} offered={self.domain_uuid}.",
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
                f"a write batch needs rows: keys={len(self.keys)} values={len(self.values)}.",
                fix="Pass at least one row, each with a key and a value.",
            )


class PersistManifest(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Make a manifest that is already in the bucket the one that the next leader opens; drop the batches it covers."""

    domain_uuid: str
    manifest: PersistedManifest

    def check(self, state: DomainState) -> None:
        check_uuid(state, self.domain_uuid)
        check_counts(self.manifest)
        check_seqno_issued(state, self.manifest)
        check_manifest_advances(state, self.manifest)


class ResetManifest(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Let an empty domain continue from a manifest found in the bucket, or start without rows (None)."""

    domain_uuid: str
    manifest: PersistedManifest | None

    def check(self, state: DomainState) -> None:
        if not self.domain_uuid:
            raise InvalidError("a domain uuid cannot be empty.", fix="Name the domain that is restored.")
        if self.manifest is not None:
            check_counts(self.manifest)
        if state.volatile or state.persisted_seqno:
            raise ConflictError(
                f"the domain is not empty: uuid={state.domain_uuid} newest_seqno={state.newest_seqno}.",
                current=state.manifest,
                fix="Reset only a domain without rows; restore into empty consensus.",
            )


Command = SetDomainUuid | WriteBatch | PersistManifest | ResetManifest


def check_counts(manifest: PersistedManifest) -> None:
    if manifest.last_seqno < 0 or manifest.epoch < 0:
        raise InvalidError(
            f"a manifest's counters must not be negative: last_seqno={manifest.last_seqno} epoch={manifest.epoch}.",
            fix="Restore from a manifest that this program wrote.",
        )


def check_uuid(state: DomainState, domain_uuid: str) -> None:
    if not domain_uuid or domain_uuid != state.domain_uuid:
        raise ConflictError(
            f"the update is for another domain: uuid={domain_uuid!r} current={state.domain_uuid!r}.",
            current=state.domain_uuid,
            fix="Reopen the domain; it was reset or has no uuid yet.",
        )


def check_seqno_issued(state: DomainState, manifest: PersistedManifest) -> None:
    """Raise InvalidError if the manifest claims a seqno that was never issued: rows written later would count as
    persisted."""
    if manifest.last_seqno > state.newest_seqno:
        raise InvalidError(
            f"the manifest claims a seqno that was never written: last_seqno={manifest.last_seqno} "
            f"newest_seqno={state.newest_seqno}.",
            fix="Report this: a manifest's last seqno is set when the memtable is frozen.",
        )


def check_manifest_advances(state: DomainState, manifest: PersistedManifest) -> None:
    stored = state.manifest
    if stored is None:
        return
    # The number matters too: of two manifests with one seqno, the older one names files that may have been deleted.
    before = (manifest.epoch, manifest.number) < (stored.epoch, stored.number)
    if before or manifest.last_seqno < stored.last_seqno:
        raise ConflictError(
            f"a newer manifest is persisted: last_seqno={manifest.last_seqno} epoch={manifest.epoch} "
            f"number={manifest.number} stored_seqno={stored.last_seqno} stored_epoch={stored.epoch} "
            f"stored_number={stored.number}.",
            current=stored,
            fix="Reopen from the stored manifest.",
        )
