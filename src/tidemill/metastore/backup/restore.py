"""Consensus half of a restore (RFC 0002 §6): claim consensus and the bucket, reset the domains, open the cluster.

    begin_attempt       claim empty consensus for one attempt
    claim_for_restore   claim the bucket for the new incarnation, before anything else is written into it
    reset_domain        let a domain continue from its manifest
    publish_manifest    write the new cluster manifest
    finish_restore      open consensus to its nodes

- Invariant (empty consensus): a restore writes nothing into consensus that contains anything else than status reports;
  `read_attempt` names what it found.
- Invariant (repeatable steps): the same attempt may repeat every step, regardless of how much of it had happened. No
  other process can open the cluster before `finish_restore`. The attempt records its manifests, so a second run
  restores the same rows.
- Invariant (newest epoch): the restored manifest is uploaded again with an epoch above every epoch in the bucket.
  Anything else that the old cluster left is older from then on, for later restores too.
"""

from __future__ import annotations

import msgspec

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import ConflictError, CorruptError, InvalidError, UnknownOutcomeError
from tidemill.consensus.api import REPORT_PREFIX, Consensus
from tidemill.metastore import cluster_manifest
from tidemill.metastore.backup.restore_source import DomainSource, RestoreSource
from tidemill.metastore.bucket_claim import claim_bucket, has_claimed
from tidemill.metastore.cluster import REGISTER, Cluster, read_cluster, write_cluster
from tidemill.metastore.cluster_manifest import ClusterManifest
from tidemill.metastore.domain.domain import Domain
from tidemill.metastore.domain.settings import prefix_of
from tidemill.metastore.lsm.file_store import SstFiles
from tidemill.metastore.lsm.manifest_store import BucketManifests
from tidemill.objects.store import ObjectStore

ATTEMPT_REGISTER = "metastore/restore"
EPOCH_DISTANCE = 1 << 20
"""Distance of the new epochs from the old ones. A surviving leader of the old cluster would need that many terms to
reuse a name of the new one."""


class Attempt(msgspec.Struct, frozen=True):
    """One restore, from its first run to its end. `manifests`: the key of each domain's manifest, "" without one."""

    nonce: str
    cluster_uuid: str
    cluster_manifest: str
    manifests: tuple[str, ...]
    started_ms: int


async def attempt_of(consensus: Consensus) -> str:
    """Return the nonce of the restore that created this cluster; "" if it was never restored."""
    claimed = await _stored_attempt(consensus)
    return claimed.nonce if claimed is not None else ""


async def _stored_attempt(consensus: Consensus) -> Attempt | None:
    found = await consensus.head(ATTEMPT_REGISTER)
    return msgspec.msgpack.decode(found.data, type=Attempt) if found is not None and found.data else None


async def read_attempt(consensus: Consensus) -> Attempt | None:
    """Return the unfinished attempt that has claimed this consensus; None if consensus is empty but for status reports.

    Raises InvalidError, naming what was found, in any other case.
    """
    claimed = await _stored_attempt(consensus)
    cluster = await read_cluster(consensus)
    if claimed is not None and (cluster is None or cluster[0].restoring):
        return claimed
    found = await consensus.scan("")
    # A node that starts before the restore reports, until it ends, that its cluster is in the bucket only.
    present = [key for key, version in found if version.data and not key.startswith(REPORT_PREFIX)]
    present += [f"lease {lease.name}" for lease in await consensus.leases("")]
    if not present:
        return None
    what = f"cluster={cluster[0].uuid} " if cluster is not None else ""
    raise InvalidError(
        f"consensus is not empty: {what}entries={len(present)} first={','.join(present[:3])}.",
        fix="Restore into empty consensus: set a new consensus.url, or move the old database away.",
    )


async def begin_attempt(consensus: Consensus, clock: Clock, rand: Rand, source: RestoreSource) -> Attempt:
    """Claim the consensus for `source`; return the stored attempt, either the new one or one begun earlier.

    Raises InvalidError if that attempt uses other manifests, or if consensus is not empty.
    """
    while True:
        attempt = await read_attempt(consensus)
        if attempt is not None:
            break
        fresh = Attempt(rand.nonce(), source.cluster.cluster_uuid, source.found.key, source.keys, clock.now_ms())
        try:
            await consensus.cas(ATTEMPT_REGISTER, 0, msgspec.msgpack.encode(fresh), fresh.nonce)
        except (ConflictError, UnknownOutcomeError):
            continue
    if (attempt.cluster_manifest, attempt.manifests) != (source.found.key, source.keys):
        raise InvalidError(
            f"another restore was begun here: attempt={attempt.nonce} cluster_manifest={attempt.cluster_manifest}.",
            fix="Run it again without --manifest, or restore into another, empty consensus.",
        )
    found = await read_cluster(consensus)
    if found is None:
        manifest = source.cluster
        cluster = Cluster(
            rand.uuid(),
            len(manifest.domains),
            clock.now_ms(),
            label=manifest.cluster_uuid,
            incarnation=source.claimed + 1,
            restoring=attempt.nonce,
        )
        await write_cluster(consensus, rand, cluster, 0)
    return attempt


async def has_claimed_bucket(consensus: Consensus, objects: ObjectStore) -> bool:
    """Return whether this consensus's attempt has already claimed the bucket. Then the old cluster has stopped or is
    about to."""
    found = await read_cluster(consensus)
    return found is not None and await has_claimed(objects, found[0])


async def claim_for_restore(consensus: Consensus, objects: ObjectStore, clock: Clock, rand: Rand) -> Cluster:
    """Claim the bucket: the remains of the old cluster stop, and every other restore of this bucket fails. Idempotent.

    Raises ClusterReplacedError if another restore was first, UnavailableError, UnknownOutcomeError.
    """
    cluster, _ = await _read_existing_cluster(consensus)
    await claim_bucket(consensus, objects, clock, rand, cluster)
    return cluster


async def reset_domain(objects: ObjectStore, rand: Rand, domain: Domain, source: DomainSource) -> None:
    """Reset a domain to its manifest, under a new epoch. Idempotent: a domain that already continued from it is left
    alone."""
    manifest = source.manifest
    await domain.sync()
    gone_on = manifest is None or domain.state.persisted_seqno >= manifest.last_seqno
    if domain.domain_uuid == source.uuid and gone_on:
        return
    if manifest is not None:
        bucket = BucketManifests(objects, prefix_of(source.uuid), rand)
        epoch, number = manifest.epoch, manifest.number
        async for name in bucket.list():
            epoch, number = max(epoch, name.epoch), max(number, name.number)
        async for file in SstFiles(objects, prefix_of(source.uuid)).list():
            epoch = max(epoch, file.epoch)
        manifest = msgspec.structs.replace(manifest, epoch=epoch + EPOCH_DISTANCE, number=number + 1)
        await bucket.upload(manifest)
    await domain.reset(source.uuid, manifest)


async def publish_manifest(
    consensus: Consensus, objects: ObjectStore, clock: Clock, rand: Rand, source: RestoreSource
) -> Cluster:
    """Write the new incarnation's cluster manifest, which stops the old cluster's leader. Idempotent."""
    cluster, _ = await _read_existing_cluster(consensus)
    newest = await cluster_manifest.newest_manifest(objects)
    cluster_manifest.check_not_replaced(newest, cluster.uuid, cluster.incarnation)
    if newest is None or newest.manifest.cluster_uuid != cluster.uuid:
        uuids = tuple(domain.uuid for domain in source.domains)
        manifest = ClusterManifest(cluster.uuid, cluster.label, cluster.incarnation, uuids, clock.now_ms())
        await cluster_manifest.upload_manifest(objects, rand, manifest, newest.number + 1 if newest is not None else 1)
    return cluster


async def finish_restore(consensus: Consensus, rand: Rand) -> Cluster:
    """Open the cluster to its nodes. This is the last step."""
    cluster, seq = await _read_existing_cluster(consensus)
    return await write_cluster(consensus, rand, msgspec.structs.replace(cluster, restoring=""), seq)


async def _read_existing_cluster(consensus: Consensus) -> tuple[Cluster, int]:
    found = await read_cluster(consensus)
    if found is None:
        raise CorruptError(
            f"the cluster register is gone: register={REGISTER}.", fix="Restore into empty consensus again."
        )
    return found
