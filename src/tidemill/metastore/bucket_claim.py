"""Whose bucket it is: one object for each incarnation of the cluster, created once and never deleted.

    metastore/claim/<incarnation, 20 digits>     encoded as `cluster_manifest` has it

    no such object            the incarnation has not begun; whoever creates it has the bucket
    <own incarnation + 1>     the bucket was restored into another consensus; this cluster stops

CL2  Of clusters that begin on one empty bucket, and of restores that begin from one, exactly one creates the object.
     The others are refused: a create that finds the key changes nothing (O3).
CL3  A claim comes before anything that a restore writes into the bucket, so that what is left of the old cluster, and
     a restore that lost, write nothing after it.
CL4  A process acknowledges an append and deletes an object only while it knows that no later claim was there less than
     `young_s` ago; else it asks first. A restore watches the bucket for so long before it claims it.
"""

from __future__ import annotations

import asyncio

import msgspec
import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import (
    ClusterReplacedError,
    ConflictError,
    CorruptError,
    InvalidError,
    MissingError,
    TidemillError,
    UnavailableError,
)
from tidemill.metastore import cluster_manifest
from tidemill.metastore.cluster import Cluster
from tidemill.metastore.cluster_manifest import ALIVE_INTERVAL_S, REPLACED_FIX, encode, read_struct
from tidemill.objects.store import ObjectStore

CLAIM_PREFIX = "metastore/claim/"
RETRY_PAUSE_S = 1.0
ASK_S = 5.0
"""An acknowledgement waits at most so long for a bucket that does not say whose it is."""

_log = structlog.get_logger()


class Claim(msgspec.Struct, frozen=True):
    cluster_uuid: str
    incarnation: int
    at_ms: int


def claim_key(incarnation: int) -> str:
    return f"{CLAIM_PREFIX}{incarnation:020d}"


async def greatest_claim(objects: ObjectStore) -> int:
    """The greatest incarnation that was claimed; 0 for none. Raises UnavailableError."""
    greatest = 0
    async for found in objects.list(CLAIM_PREFIX):
        number = found.key.removeprefix(CLAIM_PREFIX)
        greatest = max(greatest, int(number) if number.isdecimal() else 0)
    return greatest


async def check_unclaimed(objects: ObjectStore) -> None:
    """Before a cluster is created in empty consensus (`cluster_manifest` P2). Raises InvalidError when the bucket has
    one."""
    await cluster_manifest.check_unclaimed(objects)
    greatest = await greatest_claim(objects)
    if greatest:
        raise InvalidError(
            f"Consensus knows no cluster, but the bucket is claimed by one: object={claim_key(greatest)}.",
            fix="Start it with its own consensus, or choose another objects.url.",
        )


async def claimed_by(objects: ObjectStore, cluster: Cluster) -> bool:
    """Has the cluster the bucket already? Raises CorruptError, UnavailableError."""
    found = await _read(objects, claim_key(cluster.incarnation))
    return found is not None and found.cluster_uuid == cluster.uuid


async def claim(objects: ObjectStore, clock: Clock, cluster: Cluster) -> None:
    """CL2. Idempotent. Raises ClusterReplacedError when the bucket is another cluster's, CorruptError,
    UnavailableError, Unknown."""
    key = claim_key(cluster.incarnation)
    found = await _read(objects, key)
    if found is None:
        try:
            await objects.put(key, encode(Claim(cluster.uuid, cluster.incarnation, clock.now_ms())))
        except ConflictError:
            found = await _read(objects, key)
    if found is not None and found.cluster_uuid != cluster.uuid:
        raise _replaced(cluster, found.cluster_uuid, found.incarnation)
    await check_claim(objects, cluster)


async def check_claim(objects: ObjectStore, cluster: Cluster) -> None:
    """One request. Raises ClusterReplacedError when the bucket was restored into another consensus,
    UnavailableError."""
    key = claim_key(cluster.incarnation + 1)
    if await objects.head(key) is None:
        return
    try:
        found = await _read(objects, key)
    except CorruptError:
        found = None  # it is there: that is enough
    raise _replaced(cluster, found.cluster_uuid if found is not None else "unreadable", cluster.incarnation + 1)


class Ownership:
    """One process's knowledge that the bucket is its cluster's (CL4). `run` beside everything else of the process."""

    def __init__(
        self, objects: ObjectStore, clock: Clock, cluster: Cluster, *, interval_s: float = ALIVE_INTERVAL_S
    ) -> None:
        """Just after `claim`."""
        self.replaced: ClusterReplacedError | None = None
        self._objects = objects
        self._clock = clock
        self._cluster = cluster
        self._interval_s = interval_s
        self._known_s = clock.monotonic_s()
        self._asked_s = float("-inf")
        self._asking = asyncio.Lock()

    @property
    def stale(self) -> bool:
        """Is it too long ago that the bucket was seen to be ours? Also after a process was frozen. Costs nothing."""
        return self._clock.monotonic_s() - self._known_s > 3 * self._interval_s or self.replaced is not None

    async def assure(self, *, strictly: bool = False) -> None:
        """Ask now, unless somebody just did. Raises ClusterReplacedError; with `strictly` also Unavailable when the
        bucket does not say.

        Not so otherwise: while the bucket is away nobody can have restored from it since it was asked last without
        asking it, and what needs no object goes on.
        """
        cause: BaseException | None = None
        async with self._asking:
            if self.stale and self._clock.monotonic_s() - self._asked_s > RETRY_PAUSE_S:
                try:
                    async with asyncio.timeout(ASK_S):
                        await self.look()
                except (TidemillError, TimeoutError) as error:
                    cause = error
                self._asked_s = self._clock.monotonic_s()
        if self.replaced is not None:
            raise self.replaced
        if strictly and self.stale:
            raise UnavailableError(
                "The bucket does not say whether it is still this cluster's.", fix="Retry."
            ) from cause

    async def may_delete(self) -> None:
        """Raises ClusterReplacedError; Unavailable when the bucket does not say."""
        if self.stale:
            await self.assure(strictly=True)

    async def look(self) -> None:
        """Raises ClusterReplacedError, UnavailableError."""
        began_s = self._clock.monotonic_s()
        try:
            await check_claim(self._objects, self._cluster)
        except ClusterReplacedError as error:
            self.replaced = error
            raise
        self._known_s = max(self._known_s, began_s)

    async def run(self) -> None:
        """Look at intervals. Raises ClusterReplacedError."""
        while True:
            pause_s = self._interval_s
            try:
                await self.look()
            except ClusterReplacedError:
                raise
            except TidemillError as error:
                _log.warning("the bucket does not say whose it is, asking again", cause=str(error))
                pause_s = min(pause_s, RETRY_PAUSE_S)
            await asyncio.sleep(pause_s)

    def trouble(self) -> str:
        """One sentence while this process may acknowledge nothing. Never waits."""
        if self.replaced is not None:
            return self.replaced.message
        if not self.stale:
            return ""
        since_s = self._clock.monotonic_s() - self._known_s
        return f"The bucket has not been seen to be this cluster's for a while: since_s={since_s:.0f}."


async def _read(objects: ObjectStore, key: str) -> Claim | None:
    try:
        return await read_struct(objects, key, Claim)
    except MissingError:
        return None


def _replaced(cluster: Cluster, other: str, incarnation: int) -> ClusterReplacedError:
    return ClusterReplacedError(
        f"The bucket belongs to another cluster: cluster={cluster.uuid} incarnation={cluster.incarnation}"
        f" bucket_cluster={other} bucket_incarnation={incarnation}.",
        fix=REPLACED_FIX,
    )
