"""The consensus half of a restore (RFC 0002 §6): claim it, make the domains go on, open the cluster.

    begin          claim empty consensus for one attempt
    take_claim     the bucket belongs to the new incarnation, before anything is written into it (`bucket_claim` CL3)
    reset_domain   a domain goes on from its manifest
    take_bucket    and says so in its manifest
    finish         consensus is free for its nodes

RS1  Nothing is written into consensus that knows anything else: `read_attempt` names what it found.
RS2  Every step may be repeated by the same attempt, whatever of it had happened; nobody else can open the cluster
     before `finish`. The attempt remembers its manifests, so a second run restores the same rows.
RS3  The manifest that is reset to is uploaded anew, above every epoch that names anything in the bucket: whatever
     the old cluster left beyond it is older from then on, also for the next restore.
"""

from __future__ import annotations

import msgspec

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import ConflictError, CorruptError, InvalidError, UnknownOutcomeError
from tidemill.consensus.api import Consensus
from tidemill.metastore import cluster_manifest
from tidemill.metastore.backup.restore_source import DomainSource, Source
from tidemill.metastore.bucket_claim import claim, claimed_by
from tidemill.metastore.cluster import REGISTER, Cluster, read_cluster, write_cluster
from tidemill.metastore.cluster_manifest import ClusterManifest
from tidemill.metastore.domain.domain import Domain
from tidemill.metastore.domain.settings import prefix_of
from tidemill.metastore.lsm.file_store import Files
from tidemill.metastore.lsm.manifest_store import BucketManifests
from tidemill.objects.store import ObjectStore

ATTEMPT_REGISTER = "metastore/restore"
EPOCHS_APART = 1 << 20
"""A leader of the old cluster that is somehow still there would need so many terms to meet the new one's names."""


class Attempt(msgspec.Struct, frozen=True):
    """One restore, from its first run to its end. `manifests`: the key of each domain's, "" for none."""

    nonce: str
    cluster_uuid: str
    cluster_manifest: str
    manifests: tuple[str, ...]
    started_ms: int


async def attempt_of(consensus: Consensus) -> str:
    """The nonce of the restore that made this cluster; "" of one that was never restored."""
    claimed = await _registered(consensus)
    return claimed.nonce if claimed is not None else ""


async def _registered(consensus: Consensus) -> Attempt | None:
    found = await consensus.head(ATTEMPT_REGISTER)
    return msgspec.msgpack.decode(found.data, type=Attempt) if found is not None and found.data else None


async def read_attempt(consensus: Consensus) -> Attempt | None:
    """The attempt that has claimed this consensus and not finished; None when it is empty.

    Raises InvalidError, naming what was found, when it is neither (RS1).
    """
    claimed = await _registered(consensus)
    cluster = await read_cluster(consensus)
    if claimed is not None and (cluster is None or cluster[0].restoring):
        return claimed
    present = [key for key, version in await consensus.scan("") if version.data]
    present += [f"lease {lease.name}" for lease in await consensus.leases("")]
    if not present:
        return None
    what = f"cluster={cluster[0].uuid} " if cluster is not None else ""
    raise InvalidError(
        f"Consensus is not empty: {what}entries={len(present)} first={','.join(present[:3])}.",
        fix="Restore into an empty one: name a new consensus.url, or move the old database away.",
    )


async def begin(consensus: Consensus, clock: Clock, rand: Rand, source: Source) -> Attempt:
    """Claim the consensus for `source`; the attempt that stands there, the new one or the one begun earlier (RS2).

    Raises InvalidError when that one is from other manifests, or consensus is not empty.
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
            f"Another restore was begun here: attempt={attempt.nonce} cluster_manifest={attempt.cluster_manifest}.",
            fix="Run it again without --manifest, or begin anew with an empty consensus.",
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
            imported=True,
            restoring=attempt.nonce,
        )
        await write_cluster(consensus, rand, cluster, 0)
    return attempt


async def has_claim(consensus: Consensus, objects: ObjectStore) -> bool:
    """Has an attempt that stands here taken the bucket already? Then the old cluster has stopped, or does so."""
    found = await read_cluster(consensus)
    return found is not None and await claimed_by(objects, found[0])


async def take_claim(consensus: Consensus, objects: ObjectStore, clock: Clock) -> Cluster:
    """From here on what is left of the old cluster stops, and no other restore of this bucket goes on. Idempotent.

    Raises Replaced when another restore was first, Unavailable, UnknownOutcomeError.
    """
    cluster, _ = await _claimed(consensus)
    await claim(objects, clock, cluster)
    return cluster


async def reset_domain(objects: ObjectStore, rand: Rand, domain: Domain, source: DomainSource) -> None:
    """RS3. Idempotent: a domain that has gone on from this uuid already is left alone."""
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
        async for file in Files(objects, prefix_of(source.uuid)).list():
            epoch = max(epoch, file.epoch)
        manifest = msgspec.structs.replace(manifest, epoch=epoch + EPOCHS_APART, number=number + 1)
        await bucket.upload(manifest)
    await domain.reset(source.uuid, manifest)


async def take_bucket(consensus: Consensus, objects: ObjectStore, clock: Clock, rand: Rand, source: Source) -> Cluster:
    """Show the new incarnation in the bucket: what is left of the old cluster stops (presence P1). Idempotent."""
    cluster, _ = await _claimed(consensus)
    newest = await cluster_manifest.newest_manifest(objects)
    cluster_manifest.check_not_replaced(newest, cluster.uuid, cluster.incarnation)
    if newest is None or newest.manifest.cluster_uuid != cluster.uuid:
        uuids = tuple(domain.uuid for domain in source.domains)
        manifest = ClusterManifest(cluster.uuid, cluster.label, cluster.incarnation, uuids, clock.now_ms())
        await cluster_manifest.upload_manifest(objects, rand, manifest, newest.number + 1 if newest is not None else 1)
    return cluster


async def finish(consensus: Consensus, rand: Rand) -> Cluster:
    """Open the cluster to its nodes. The last step."""
    cluster, seq = await _claimed(consensus)
    return await write_cluster(consensus, rand, msgspec.structs.replace(cluster, restoring=""), seq)


async def _claimed(consensus: Consensus) -> tuple[Cluster, int]:
    found = await read_cluster(consensus)
    if found is None:
        raise CorruptError(
            f"The cluster register is gone: register={REGISTER}.", fix="Restore into empty consensus again."
        )
    return found
