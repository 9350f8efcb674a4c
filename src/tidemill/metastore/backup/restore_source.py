"""Source of a restore, read from the bucket alone: manifests, signs of life, rows."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

import msgspec

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import CorruptError, InvalidError, MissingError
from tidemill.metastore import cluster_manifest
from tidemill.metastore.api import Chunk
from tidemill.metastore.bucket_claim import greatest_claim
from tidemill.metastore.cluster import domain_of
from tidemill.metastore.cluster_manifest import ClusterManifest, FoundManifest, SignOfLife
from tidemill.metastore.domain.settings import prefix_of
from tidemill.metastore.lsm.database import Database, DatabaseContext
from tidemill.metastore.lsm.file_store import SstFiles
from tidemill.metastore.lsm.manifest import Manifest
from tidemill.metastore.lsm.manifest_store import BucketManifests
from tidemill.metastore.lsm.options import Options
from tidemill.metastore.metastore import merge_scans
from tidemill.metastore.rows.key_encoding import Part, names_entity
from tidemill.metastore.rows.row_family import Family
from tidemill.objects.store import ObjectStore

_ANY_EPOCH = 10**20 - 1
_MANIFEST_KEY = re.compile(r"metastore/([^/]+)/manifest/[^/]+")
POLL_INTERVAL_S = 1.0
"""Interval at which the bucket is checked for new signs of life."""
R = TypeVar("R", bound=msgspec.Struct)


class DomainSource(msgspec.Struct, frozen=True):
    """Manifest of one domain to continue from; `key` "" and None if the domain never persisted anything."""

    uuid: str
    key: str
    manifest: Manifest | None


class RestoreSource(msgspec.Struct, frozen=True):
    """Everything that a restore starts from."""

    found: FoundManifest
    domains: tuple[DomainSource, ...]
    signs: tuple[SignOfLife, ...]
    """Signs of life of the newest incarnation, oldest first."""
    claimed: int
    """Greatest incarnation known in the bucket: that of the manifest, or of a restore that began."""

    @property
    def cluster(self) -> ClusterManifest:
        return self.found.manifest

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(domain.key for domain in self.domains)


async def find_source(
    objects: ObjectStore, rand: Rand, chosen: Sequence[str] = (), cluster_key: str = ""
) -> RestoreSource:
    """Find the source of a restore. `chosen`: keys of manifests to use instead of the newest of their domains;
    `cluster_key`: likewise.

    Raises MissingError (no cluster in the bucket, or a chosen object does not exist), CorruptError naming the damaged
    object, InvalidError (a newer format, or a chosen key that is not a manifest of this cluster), UnavailableError.
    """
    found = await (
        cluster_manifest.load_manifest(objects, cluster_key)
        if cluster_key
        else cluster_manifest.newest_manifest(objects)
    )
    if found is None:
        raise MissingError(
            "the bucket contains no cluster.",
            fix="Check objects.url, including its prefix.",
        )
    by_domain: dict[str, str] = {}
    for key in chosen:
        parts = _MANIFEST_KEY.fullmatch(key)
        if parts is None or parts[1] not in found.manifest.domains:
            raise InvalidError(
                f"not a manifest of this cluster: manifest={key} domains={','.join(found.manifest.domains)}.",
                fix="Use a key that `restore --dry-run` or a bucket listing shows: metastore/<domain>/manifest/….",
            )
        by_domain[parts[1]] = key
    domains = [await _domain_source(objects, rand, uuid, by_domain.get(uuid)) for uuid in found.manifest.domains]
    signs = [sign async for sign, _ in cluster_manifest.signs_of_life(objects)]
    newest = max((sign.incarnation for sign in signs), default=0)
    claimed = max(found.manifest.incarnation, await greatest_claim(objects))
    return RestoreSource(found, tuple(domains), tuple(sign for sign in signs if sign.incarnation == newest), claimed)


async def _domain_source(objects: ObjectStore, rand: Rand, uuid: str, chosen: str | None) -> DomainSource:
    bucket = BucketManifests(objects, prefix_of(uuid), rand)
    if chosen is None:
        newest = await bucket.newest(_ANY_EPOCH)
        chosen = newest.key if newest is not None else ""
    if not chosen:
        return DomainSource(uuid, "", None)
    try:
        manifest = await bucket.load(chosen)
    except CorruptError as error:
        raise CorruptError(
            f"the newest manifest of a domain is damaged: manifest={chosen} domain={uuid} cause={error.message}",
            fix="Choose an older one with --manifest; `restore --dry-run --manifest …` shows its age.",
        ) from error
    if manifest.domain_uuid != uuid:
        raise CorruptError(f"the manifest is of another domain: manifest={chosen} uuid={manifest.domain_uuid}.")
    return DomainSource(uuid, chosen, manifest)


async def check_not_alive(
    objects: ObjectStore,
    source: RestoreSource,
    clock: Clock,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> None:
    """Raise InvalidError while the cluster may be alive: two clusters on one bucket would destroy each other's data.

    A live cluster writes a new sign within a third of its signs' `young_s`. So the bucket is watched for the longest
    `young_s`, measured by this machine's monotonic clock: clocks of two machines are never compared. Without signs of
    life, after a clean shutdown, there is no wait.
    """
    if not source.signs:
        return
    sign = source.signs[-1]
    watch_s = max(each.young_s for each in source.signs)
    before = {key async for key in _signs_of(objects, sign.incarnation)}
    began_s = clock.monotonic_s()
    while (passed_s := clock.monotonic_s() - began_s) < watch_s:
        progress("signs of life", int(passed_s), max(1, int(watch_s)))
        await asyncio.sleep(min(POLL_INTERVAL_S, watch_s / 10))
        if new := [key async for key in _signs_of(objects, sign.incarnation) if key not in before]:
            raise InvalidError(
                "the bucket's cluster is alive, it wrote a sign of life while this command watched:"
                f" cluster={sign.cluster_uuid} node={sign.node} watched_s={clock.monotonic_s() - began_s:.0f}"
                f" object={new[0]}.",
                fix="Stop all its nodes and try again.",
            )
    progress("signs of life", max(1, int(watch_s)), max(1, int(watch_s)))


async def _signs_of(objects: ObjectStore, incarnation: int) -> AsyncIterator[str]:
    async for sign, key in cluster_manifest.signs_of_life(objects):
        if sign.incarnation >= incarnation:
            yield key


class BucketRows:
    """Rows of a source, read from the bucket.

    Reads raise MissingError, CorruptError, InvalidError, UnavailableError.
    """

    def __init__(self, databases: Sequence[Database]) -> None:
        self._databases = list(databases)

    @classmethod
    async def open(cls, objects: ObjectStore, source: RestoreSource, clock: Clock, rand: Rand) -> BucketRows:
        databases = []
        for domain in source.domains:
            database = await Database.open(
                SstFiles(objects, prefix_of(domain.uuid)),
                _FixedManifest(domain.manifest),
                DatabaseContext(
                    domain_uuid=domain.uuid,
                    epoch=_ANY_EPOCH,
                    options=Options(),
                    clock=clock,
                    rand=rand,
                    read_only=True,
                ),
            )
            databases.append(database)
        return cls(databases)

    async def prefix(self, prefix: bytes) -> AsyncIterator[Chunk]:
        """Yield live rows whose key begins with `prefix`, in key order over all domains."""
        databases = self._databases
        if names_entity(prefix):
            databases = [databases[domain_of(prefix, len(databases))]]
        async for chunk in merge_scans([database.prefix(prefix) for database in databases]):
            yield chunk

    async def iterate(self, family: Family[R], *leading: Part) -> AsyncIterator[R]:
        """Yield the rows of a family that begin with these columns, in key order."""
        async for keys, values in self.prefix(family.prefix(*leading)):
            for key, value in zip(keys, values, strict=True):
                yield family.decode(key, value)

    async def rows(self, family: Family[R], *leading: Part) -> list[R]:
        return [row async for row in self.iterate(family, *leading)]

    async def aclose(self) -> None:
        for database in self._databases:
            await database.aclose()


class _FixedManifest:
    """Read-only manifest store with one fixed manifest."""

    def __init__(self, manifest: Manifest | None) -> None:
        self._manifest = manifest

    async def read(self, max_epoch: int) -> Manifest | None:
        return self._manifest

    async def write(self, manifest: Manifest) -> None:
        raise InvalidError("the manifest of a restore source is read-only.")
