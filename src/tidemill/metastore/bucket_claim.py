"""Ownership of the bucket: one claim object per incarnation of the cluster, created once and never deleted.

    metastore/claim/<incarnation, 20 digits>     encoded as in `cluster_manifest`
    register  metastore/owned-bucket             the nonce of this cluster's claim

    no such object            the incarnation has not begun; the cluster that creates the object owns the bucket
    <own incarnation + 1>     the bucket was restored into another consensus; this cluster stops

- Invariant (one owner): of clusters that begin on one empty bucket, and of restores that begin from one bucket, exactly
  one creates the object. The others are rejected: a create that finds the key changes nothing.
- Invariant (one bucket): of processes of one cluster that begin on different buckets, exactly those of one bucket
  continue. The nonce of a claim is recorded in consensus, once, before its process reads or writes anything else.
- Invariant (own bucket): a cluster whose claim is recorded, or that has begun, claims no bucket: without its claim, a
  bucket is another one.
- Invariant (claim first): a restore claims the bucket before it writes anything else there. So the remains of the old
  cluster, and a restore that lost the race, write nothing after it.
- Invariant (recent check): a process acknowledges an append or deletes an object only if a check less than `young_s`
  ago showed that no later claim existed; otherwise it checks first. A restore watches the bucket for `young_s` before
  it claims it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import (
    ClusterReplacedError,
    ConflictError,
    CorruptError,
    InvalidError,
    MissingError,
    TidemillError,
    UnavailableError,
)
from tidemill.base.limits import CLUSTER_ALIVE_INTERVAL_S
from tidemill.consensus.api import Consensus
from tidemill.metastore import cluster_manifest
from tidemill.metastore.cluster import Cluster, write_register
from tidemill.metastore.cluster_manifest import REPLACED_FIX, encode, read_struct
from tidemill.objects.store import ObjectStore

CLAIM_PREFIX = "metastore/claim/"
REGISTER = "metastore/owned-bucket"
RETRY_PAUSE_S = 1.0
CHECK_TIMEOUT_S = 5.0
"""Limit of the time that an acknowledgement waits for the check when the bucket does not answer."""

_log = structlog.get_logger()


class BucketClaim(msgspec.Struct, frozen=True):
    cluster_uuid: str
    incarnation: int
    at_ms: int
    nonce: str = ""

    @property
    def identity(self) -> str:
        """Return the text that distinguishes the claim from those in other buckets. A former version wrote no nonce."""
        return self.nonce or str(self.at_ms)


def claim_key(incarnation: int) -> str:
    return f"{CLAIM_PREFIX}{incarnation:020d}"


async def greatest_claim(objects: ObjectStore) -> int:
    """Return the greatest claimed incarnation; 0 for none. Raises UnavailableError."""
    greatest = 0
    async for found in objects.list(CLAIM_PREFIX):
        number = found.key.removeprefix(CLAIM_PREFIX)
        greatest = max(greatest, int(number) if number.isdecimal() else 0)
    return greatest


async def check_unclaimed(objects: ObjectStore) -> None:
    """Check the bucket before a cluster is created in empty consensus (`cluster_manifest`). Raises InvalidError if the
    bucket has a cluster."""
    await cluster_manifest.check_unclaimed(objects)
    greatest = await greatest_claim(objects)
    if greatest:
        raise InvalidError(
            f"consensus has no cluster, but a cluster has claimed the bucket: object={claim_key(greatest)}.",
            fix="Start that cluster with its own consensus, or choose another objects.url.",
        )


async def has_claimed(objects: ObjectStore, cluster: Cluster) -> bool:
    """Return whether the cluster has already claimed the bucket. Raises CorruptError, UnavailableError."""
    found = await _read(objects, claim_key(cluster.incarnation))
    return found is not None and found.cluster_uuid == cluster.uuid


async def claim_bucket(
    consensus: Consensus,
    objects: ObjectStore,
    clock: Clock,
    rand: Rand,
    cluster: Cluster,
    *,
    has_begun: Callable[[], Awaitable[bool]] | None = None,
) -> None:
    """Claim the bucket for the cluster, and record the claim in consensus. Idempotent.

    `has_begun` returns whether the cluster may have objects: then its bucket has its claim already, and one without it
    is another bucket. Raises InvalidError for that one, ClusterReplacedError if the bucket is another cluster's,
    CorruptError, UnavailableError, UnknownOutcomeError.
    """
    key = claim_key(cluster.incarnation)
    recorded = await consensus.head(REGISTER)  # read before the claim, which is created before it is recorded
    claim = await _read(objects, key)
    if claim is None and (recorded is not None or (has_begun is not None and await has_begun())):
        claim = await _read(objects, key)  # another process may have claimed it and begun since
        if claim is None and not await _describes(objects, cluster):
            raise _other_bucket_error(cluster, f"missing={key}")
    if claim is None:
        nonce = rand.nonce() if recorded is None else recorded.data.decode()
        claim = BucketClaim(cluster.uuid, cluster.incarnation, clock.now_ms(), nonce)
        try:
            await objects.put(key, encode(claim))
        except ConflictError:
            claim = await read_struct(objects, key, BucketClaim)
    if claim.cluster_uuid != cluster.uuid:
        raise _replaced_error(cluster, claim.cluster_uuid, claim.incarnation)
    await check_claim(objects, cluster)
    if recorded is None:
        stored = await write_register(consensus, rand, REGISTER, claim.identity.encode(), 0)
    else:
        stored = recorded.data
    if stored != claim.identity.encode():
        raise _other_bucket_error(cluster, f"claim={key}, which is not the claim that consensus has recorded")


async def _describes(objects: ObjectStore, cluster: Cluster) -> bool:
    """Return whether the bucket has the manifest of this cluster: it is its bucket, although the claim was removed."""
    found = await cluster_manifest.newest_manifest(objects)
    return found is not None and found.manifest.cluster_uuid == cluster.uuid


async def check_claim(objects: ObjectStore, cluster: Cluster) -> None:
    """Check with one request that no later incarnation claimed the bucket. Raises ClusterReplacedError if it was
    restored into another consensus, UnavailableError."""
    key = claim_key(cluster.incarnation + 1)
    if await objects.head(key) is None:
        return
    try:
        found = await _read(objects, key)
    except CorruptError:
        found = None  # the existence of the object is enough
    raise _replaced_error(cluster, found.cluster_uuid if found is not None else "unreadable", cluster.incarnation + 1)


class BucketOwnership:
    """Knowledge of one process that its cluster owns the bucket. `run` must run as long as the process does."""

    def __init__(
        self, objects: ObjectStore, clock: Clock, cluster: Cluster, *, interval_s: float = CLUSTER_ALIVE_INTERVAL_S
    ) -> None:
        """Create it directly after `claim_bucket`, which counts as the first check."""
        self.replaced: ClusterReplacedError | None = None
        self._objects = objects
        self._clock = clock
        self._cluster = cluster
        self._interval_s = interval_s
        self._known_s = clock.monotonic_s()
        self._asked_s = float("-inf")
        self._asking = asyncio.Lock()

    @property
    def is_stale(self) -> bool:
        """True if the last successful check is too long ago, for example because the process was frozen. No I/O."""
        return self._clock.monotonic_s() - self._known_s > 3 * self._interval_s or self.replaced is not None

    async def assert_owned(self, *, strictly: bool = False) -> None:
        """Check now if the last check is stale, unless another caller just did. Raises ClusterReplacedError; with
        `strictly` also UnavailableError if the bucket does not answer.

        Without `strictly` an unavailable bucket is tolerated: a restore needs the bucket too, so none can have begun
        while it was away, and operations that need no object continue.
        """
        cause: BaseException | None = None
        async with self._asking:
            if self.is_stale and self._clock.monotonic_s() - self._asked_s > RETRY_PAUSE_S:
                try:
                    async with asyncio.timeout(CHECK_TIMEOUT_S):
                        await self.check_now()
                except (TidemillError, TimeoutError) as error:
                    cause = error
                self._asked_s = self._clock.monotonic_s()
        if self.replaced is not None:
            raise self.replaced
        if strictly and self.is_stale:
            raise UnavailableError(
                "the bucket does not answer whether this cluster still owns it.", fix="Retry."
            ) from cause

    async def check_may_delete(self) -> None:
        """Check before a deletion. Raises ClusterReplacedError; UnavailableError if the bucket does not answer."""
        if self.is_stale:
            await self.assert_owned(strictly=True)

    async def check_now(self) -> None:
        """Check the claim with a request. Raises ClusterReplacedError, UnavailableError."""
        began_s = self._clock.monotonic_s()
        try:
            await check_claim(self._objects, self._cluster)
        except ClusterReplacedError as error:
            self.replaced = error
            raise
        self._known_s = max(self._known_s, began_s)

    async def run(self) -> None:
        """Check at intervals. Raises ClusterReplacedError."""
        while True:
            pause_s = self._interval_s
            try:
                await self.check_now()
            except ClusterReplacedError:
                raise
            except TidemillError as error:
                _log.warning("cannot check who owns the bucket, retrying", cause=str(error))
                pause_s = min(pause_s, RETRY_PAUSE_S)
            await asyncio.sleep(pause_s)

    def trouble(self) -> str:
        """Return one sentence while this process may not acknowledge anything, else "". Never waits."""
        if self.replaced is not None:
            return self.replaced.message
        if not self.is_stale:
            return ""
        since_s = self._clock.monotonic_s() - self._known_s
        return f"The bucket's owner has not been checked recently: since_s={since_s:.0f}."


async def _read(objects: ObjectStore, key: str) -> BucketClaim | None:
    try:
        return await read_struct(objects, key, BucketClaim)
    except MissingError:
        return None


def _replaced_error(cluster: Cluster, other: str, incarnation: int) -> ClusterReplacedError:
    return ClusterReplacedError(
        f"the bucket belongs to another cluster: cluster={cluster.uuid} incarnation={cluster.incarnation}"
        f" bucket_cluster={other} bucket_incarnation={incarnation}.",
        fix=REPLACED_FIX,
    )


def _other_bucket_error(cluster: Cluster, detail: str) -> InvalidError:
    return InvalidError(
        f"this bucket is not that of the cluster: cluster={cluster.uuid} {detail}.",
        fix="Check objects.url, and that a local directory is mounted.",
    )
