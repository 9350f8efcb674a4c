"""Check of everything reachable, from the cluster's register to the last block: `tidemill doctor --deep`.

    consensus   cluster register ─► domains ─► the manifest each has replicated
    bucket      cluster manifest ─► domains ─► every retained manifest ─► files ─► blocks
    rows        every row and what it refers to, down to objects (metastore.check.checker, check.rows)
    logs        every partition's and shard's log, from its rollup on (check.logs)
    contents    with `--contents`: every part, record batch and index against its checksum (check.contents)

The check only reads and leads nothing: nodes may be up or down. Without consensus it walks the bucket alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack

import msgspec

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import CorruptError, InvalidError, MissingError, TidemillError, UnavailableError
from tidemill.consensus.api import Consensus
from tidemill.maintenance.check.contents import check_contents
from tidemill.maintenance.check.logs import check_logs
from tidemill.maintenance.check.rows import check_rows
from tidemill.metastore import cluster_manifest
from tidemill.metastore.api import Chunk
from tidemill.metastore.backup.restore_source import BucketRows, find_source
from tidemill.metastore.check.checker import Checker
from tidemill.metastore.check.files import check_domain_files
from tidemill.metastore.check.findings import Findings, RowSource
from tidemill.metastore.check.objects import References
from tidemill.metastore.cluster import Cluster, domain_name, domain_of, read_cluster
from tidemill.metastore.cluster_manifest import ClusterManifest
from tidemill.metastore.domain.domain import Domain
from tidemill.metastore.domain.settings import DomainContext, DomainSettings, prefix_of
from tidemill.metastore.lsm.manifest import decode_manifest
from tidemill.metastore.lsm.manifest_store import BucketManifests
from tidemill.metastore.lsm.snapshot import Snapshot
from tidemill.metastore.metastore import merge_scans
from tidemill.metastore.rows.key_encoding import names_entity
from tidemill.objects.store import ObjectStore

FOLLOW = DomainSettings(lead=False, may_lead=False)
FIX_RESTORE = "Run `tidemill restore`."


class DeepCheckResult(msgspec.Struct, frozen=True):
    """Result of the check. `checkpoint_age_ms` is the age of the rows of topics and shards; None if they were never
    written."""

    findings: Findings
    cluster_uuid: str
    incarnation: int
    from_consensus: bool
    checkpoint_age_ms: int | None


async def deep_check(
    consensus: Consensus,
    objects: ObjectStore,
    clock: Clock,
    rand: Rand,
    *,
    contents: bool = False,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> DeepCheckResult:
    """Run the deep check. With `contents` every stored byte is read and verified as well, which takes as long as
    reading the whole bucket.

    Raises MissingError when neither consensus nor the bucket has a cluster, UnavailableError.
    """
    findings = Findings(progress)
    found = await _newest_cluster_manifest(objects, findings)
    known = await read_cluster(consensus)
    if known is None and found is None and findings.clean:
        raise MissingError("there is no cluster: consensus and the bucket are empty.", fix="Start a node first.")
    async with AsyncExitStack() as stack:
        domains: list[Domain] = []
        rows: RowSource | None = None
        uuids: Sequence[str] = found.domains if found is not None else ()
        if known is not None:
            domains = await _follow_domains(consensus, objects, clock, rand, known[0], stack)
            uuids = [domain.domain_uuid for domain in domains]
            await _compare_with_bucket(objects, rand, findings, known[0], domains, found)
        elif found is not None:
            findings.add(
                "consensus",
                f"cluster {found.cluster_uuid}",
                "consensus has no cluster, but the bucket has one",
                FIX_RESTORE,
            )
            rows = await _open_bucket_rows(objects, clock, rand, findings, stack)
        for uuid in filter(None, uuids):
            await check_domain_files(objects, rand, uuid, findings, deep=True)
        walk, references, checker = Findings(progress), References(), None
        try:
            if known is not None:
                walk, references, checker = await _walk_current_rows(domains, known[0].incarnation, progress)
                if checker is not None:
                    await check_logs(consensus, objects, checker.topics.values(), walk)
            elif rows is not None and found is not None:
                checker = await check_rows(rows, walk, references, found.incarnation)
        except (MissingError, CorruptError, InvalidError) as error:
            _add_unreadable(walk, error)
        findings.include(walk)
        gathered_ms = checker.gathered_ms if checker is not None else 0
        await references.check(objects, findings, clock.now_ms())
        if contents:
            topics = checker.topics.values() if checker is not None else ()
            await check_contents(objects, findings, consensus if known is not None else None, rows, topics)
    cluster = known[0] if known is not None else None
    return DeepCheckResult(
        findings,
        cluster.uuid if cluster is not None else found.cluster_uuid if found is not None else "",
        cluster.incarnation if cluster is not None else found.incarnation if found is not None else 0,
        known is not None,
        clock.now_ms() - gathered_ms if gathered_ms else None,
    )


async def _newest_cluster_manifest(objects: ObjectStore, findings: Findings) -> ClusterManifest | None:
    """Return the newest readable cluster manifest. Each unreadable one is a finding."""
    newest: ClusterManifest | None = None
    keys = [found.key async for found in objects.list(cluster_manifest.CLUSTER_PREFIX)]
    for key in keys:
        try:
            newest = (await cluster_manifest.load_manifest(objects, key)).manifest
            findings.walked["cluster manifests"] += 1
        except MissingError:
            continue
        except (CorruptError, InvalidError) as error:
            findings.add("bucket", key, error.message.rstrip("."), error.fix)
    return newest


async def _follow_domains(
    consensus: Consensus, objects: ObjectStore, clock: Clock, rand: Rand, cluster: Cluster, stack: AsyncExitStack
) -> list[Domain]:
    domains: list[Domain] = []
    for index in range(cluster.domains):
        domain = await Domain.open(
            DomainContext(
                consensus, objects, domain_name(index), holder="doctor", clock=clock, rand=rand, settings=FOLLOW
            )
        )
        stack.push_async_callback(domain.aclose)
        domains.append(domain)
    return domains


async def _compare_with_bucket(
    objects: ObjectStore,
    rand: Rand,
    findings: Findings,
    cluster: Cluster,
    domains: Sequence[Domain],
    found: ClusterManifest | None,
) -> None:
    """Compare the cluster in consensus with the cluster in the bucket."""
    subject = f"cluster {cluster.uuid}"
    if cluster.restoring:
        findings.add(subject, cluster.label, "its restore has not finished", "Run the same `tidemill restore` again.")
    fix = "The leader of domain 0 writes it: start a node."
    uuids = tuple(domain.domain_uuid for domain in domains)
    if found is None:
        if any(domain.state.manifest is not None for domain in domains):
            findings.add(
                subject, cluster_manifest.CLUSTER_PREFIX, "the bucket has no cluster manifest to restore it from", fix
            )
    elif found.incarnation > cluster.incarnation:
        problem = f"the bucket was restored as incarnation {found.incarnation} of cluster {found.cluster_uuid}"
        findings.add(subject, cluster_manifest.CLUSTER_PREFIX, problem, "Stop this cluster; it has been replaced.")
    elif (found.cluster_uuid, found.domains) != (cluster.uuid, uuids):
        problem = (
            f"the bucket's manifest belongs to cluster {found.cluster_uuid} with domains {','.join(found.domains)}"
        )
        findings.add(subject, cluster_manifest.CLUSTER_PREFIX, problem, fix)
    for domain in domains:
        persisted = domain.state.manifest
        if persisted is None:
            continue
        manifest = decode_manifest(persisted.data, f"log of domain {domain.name}")
        bucket = BucketManifests(objects, prefix_of(domain.domain_uuid), rand)
        names = {(name.epoch, name.number) async for name in bucket.list()}
        if (manifest.epoch, manifest.number) not in names:
            target = f"manifest {manifest.epoch}-{manifest.number}"
            problem = "its replicated manifest is not in the bucket"
            findings.add(
                f"domain {domain.name}", target, problem, "Write any record: the next flush uploads a new manifest."
            )


async def _walk_current_rows(
    domains: Sequence[Domain], incarnation: int, progress: Callable[[str, int, int], None]
) -> tuple[Findings, References, Checker | None]:
    """Walk the current rows; start again when a leader collected a file during the walk.

    There is no checker when not all rows can be read, which is then a finding.
    """
    while True:
        async with AsyncExitStack() as stack:
            rows = await _open_snapshots(domains, stack)
            manifests = [domain.state.manifest for domain in domains]
            findings, references = Findings(progress), References()
            try:
                return findings, references, await check_rows(rows, findings, references, incarnation)
            except (MissingError, CorruptError, InvalidError) as error:
                for domain in domains:
                    await domain.sync()
                if isinstance(error, MissingError) and [domain.state.manifest for domain in domains] != manifests:
                    continue
                _add_unreadable(findings, error)
                return findings, references, None


def _add_unreadable(findings: Findings, error: TidemillError) -> None:
    findings.add("rows", "", f"not all rows can be read: {error.message.rstrip('.')}", error.fix or FIX_RESTORE)


class _SnapshotRows:
    """Current rows of the domains as a `findings.RowSource`."""

    def __init__(self, snapshots: Sequence[Snapshot | None]) -> None:
        self._snapshots = snapshots

    async def prefix(self, prefix: bytes) -> AsyncIterator[Chunk]:
        chosen = self._snapshots
        if names_entity(prefix):
            chosen = [chosen[domain_of(prefix, len(chosen))]]
        async for chunk in merge_scans([snapshot.prefix(prefix) for snapshot in chosen if snapshot is not None]):
            yield chunk


async def _open_snapshots(domains: Sequence[Domain], stack: AsyncExitStack) -> _SnapshotRows:
    snapshots: list[Snapshot | None] = []
    for domain in domains:
        await domain.sync()
        try:
            snapshot = await domain.snapshot()
        except UnavailableError:  # no process has led it yet: it has no rows
            snapshots.append(None)
            continue
        stack.callback(snapshot.close)
        snapshots.append(snapshot)
    return _SnapshotRows(snapshots)


async def _open_bucket_rows(
    objects: ObjectStore, clock: Clock, rand: Rand, findings: Findings, stack: AsyncExitStack
) -> RowSource | None:
    try:
        rows = await BucketRows.open(objects, await find_source(objects, rand), clock, rand)
    except (CorruptError, InvalidError, MissingError) as error:
        findings.add("bucket", "", f"its rows cannot be read: {error.message.rstrip('.')}", error.fix)
        return None
    stack.push_async_callback(rows.aclose)
    return rows
