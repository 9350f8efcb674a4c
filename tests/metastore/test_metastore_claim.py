"""Ownership of the bucket: the claim of an incarnation, and the limits of a process whose last check is too old."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tidemill.base.clock import ManualClock, Rand, SystemClock
from tidemill.base.errors import ClusterReplacedError, InvalidError, StoreRolledBackError, UnavailableError
from tidemill.consensus.memory import MemoryConsensus
from tidemill.maintenance.checkpoint_service import check_bucket
from tidemill.metastore.bucket_claim import BucketOwnership, check_unclaimed, claim_bucket, claim_key, greatest_claim
from tidemill.metastore.cluster import Cluster
from tidemill.metastore.cluster_manifest import ClusterManifest, upload_manifest
from tidemill.metastore.factory import NODE, TOOL, create_metastore
from tidemill.objects.memory import MemoryObjects
from tidemill.objects.retrying import RetryingObjects
from tidemill.objects.store import ObjectMeta

CLOCK = SystemClock()


def cluster(name: str, incarnation: int = 1) -> Cluster:
    return Cluster(name, 1, 0, incarnation=incarnation)


class Away(MemoryObjects):
    away = False

    async def head(self, key: str) -> ObjectMeta | None:
        if self.away:
            raise UnavailableError("planted")
        return await super().head(key)


async def test_of_many_clusters_that_claim_an_empty_bucket_at_once_one_has_it_and_keeps_it() -> None:
    objects = MemoryObjects(CLOCK)
    names = [f"c{i}" for i in range(16)]
    outcomes = await asyncio.gather(
        *(claim_bucket(objects, CLOCK, cluster(name)) for name in names), return_exceptions=True
    )
    [winner] = [name for name, outcome in zip(names, outcomes, strict=True) if outcome is None]
    assert all(isinstance(outcome, ClusterReplacedError) for outcome in outcomes if outcome is not None)
    assert f"bucket_cluster={winner}" in str(next(outcome for outcome in outcomes if outcome is not None))
    await claim_bucket(objects, CLOCK, cluster(winner))  # at every start of each of its nodes
    with pytest.raises(ClusterReplacedError):
        await claim_bucket(objects, CLOCK, cluster("a later one"))


async def test_a_first_start_that_lost_leaves_its_consensus_as_empty_as_it_was() -> None:
    objects = MemoryObjects(CLOCK)
    first = create_metastore(MemoryConsensus(CLOCK), objects, CLOCK, Rand())
    await first.start()
    await first.aclose()
    assert await greatest_claim(objects) == 1
    consensus = MemoryConsensus(CLOCK)
    with pytest.raises(InvalidError, match="has claimed the bucket"):
        await create_metastore(consensus, objects, CLOCK, Rand()).start()
    assert await consensus.scan("") == []
    with pytest.raises(InvalidError):
        await check_unclaimed(objects)


class Overtaken(MemoryObjects):
    """A bucket that a peer on the same consensus claims, after this node has read that there is no cluster."""

    peer: Callable[[], Awaitable[None]] | None = None

    async def list(self, prefix: str) -> AsyncIterator[ObjectMeta]:  # type: ignore[override]
        peer, self.peer = self.peer, None
        if peer is not None:
            await peer()
        async for found in super().list(prefix):
            yield found


async def test_nodes_of_one_cluster_that_start_together_create_it_once_and_none_is_rejected() -> None:
    objects, consensus = Overtaken(CLOCK), MemoryConsensus(CLOCK)
    first, second = (create_metastore(consensus, objects, CLOCK, Rand()) for _ in range(2))
    objects.peer = first.start
    await second.start()
    assert objects.peer is None and (await first.cluster()).uuid == (await second.cluster()).uuid
    for each in (first, second):
        await each.aclose()

    objects, consensus = Overtaken(CLOCK), MemoryConsensus(CLOCK)
    first = create_metastore(consensus, objects, CLOCK, Rand())
    objects.peer = first.start
    await check_bucket(consensus, objects)
    assert objects.peer is None
    await first.aclose()
    with pytest.raises(InvalidError, match="consensus has no cluster"):
        await check_bucket(MemoryConsensus(CLOCK), objects)


async def test_a_cluster_whose_bucket_was_claimed_by_a_restore_is_told_by_whom_however_damaged_the_claim_is() -> None:
    objects = MemoryObjects(CLOCK)
    await claim_bucket(objects, CLOCK, cluster("old"))
    await claim_bucket(objects, CLOCK, cluster("new", 2))
    with pytest.raises(
        ClusterReplacedError, match=r"cluster=old incarnation=1 bucket_cluster=new bucket_incarnation=2"
    ):
        await claim_bucket(objects, CLOCK, cluster("old"))
    await objects.delete(claim_key(2))
    await objects.put(claim_key(2), b"not a claim")
    with pytest.raises(ClusterReplacedError, match="bucket_cluster=unreadable"):
        await claim_bucket(objects, CLOCK, cluster("old"))


async def test_f524_a_cluster_that_has_begun_claims_no_other_bucket_and_writes_nothing_there() -> None:
    consensus, objects = MemoryConsensus(CLOCK), MemoryObjects(CLOCK)
    first = create_metastore(consensus, objects, CLOCK, Rand(), settings=NODE)
    await first.start()
    [domain] = await first.domains()
    await domain.flush()  # a leader has begun; there is no row yet
    await first.aclose()
    before = await consensus.scan("")
    for settings in (TOOL, NODE):
        other = MemoryObjects(CLOCK)
        elsewhere = create_metastore(consensus, other, CLOCK, Rand(), settings=settings)
        with pytest.raises(InvalidError, match="this bucket is not that of the cluster") as raised:
            await elsewhere.start()
        await elsewhere.aclose()
        assert "objects.url" in raised.value.fix
        assert [meta.key async for meta in other.list("")] == []
    assert await consensus.scan("") == before
    again = create_metastore(consensus, objects, CLOCK, Rand())
    await again.start()
    await again.aclose()


async def test_a_peer_that_claims_and_begins_at_the_same_time_is_no_other_cluster() -> None:
    objects = MemoryObjects(CLOCK)

    async def peer_claims_and_begins() -> bool:
        await claim_bucket(objects, CLOCK, cluster("one"))
        return True

    await claim_bucket(objects, CLOCK, cluster("one"), has_begun=peer_claims_and_begins)
    assert await greatest_claim(objects) == 1


async def test_a_bucket_with_the_manifest_of_the_cluster_is_its_own_although_the_claim_is_gone() -> None:
    async def has_begun() -> bool:
        return True

    for name, owned in (("one", True), ("other", False)):
        objects = MemoryObjects(CLOCK)
        await upload_manifest(objects, Rand(), ClusterManifest(name, "", 1, ("d",), 0), 1)
        if owned:
            await claim_bucket(objects, CLOCK, cluster("one"), has_begun=has_begun)
        else:
            with pytest.raises(InvalidError, match="not that of the cluster"):
                await claim_bucket(objects, CLOCK, cluster("one"), has_begun=has_begun)
        assert await greatest_claim(objects) == owned


async def test_a_process_that_has_not_asked_for_three_intervals_asks_before_it_acknowledges_or_deletes() -> None:
    clock, inner = ManualClock(), Away(CLOCK)
    objects = RetryingObjects(inner, CLOCK, Rand(), store="memory", budget_s=0.0)
    consensus = MemoryConsensus(CLOCK)
    await claim_bucket(objects, clock, cluster("old"))
    await objects.put("l0/1", b"x")
    owner = BucketOwnership(objects, clock, cluster("old"), interval_s=10.0)
    consensus.owner, objects.may_delete = owner, owner.check_may_delete

    clock.advance(31_000)
    assert "has not been checked recently" in owner.trouble()
    await consensus.append("log", 0, 0, [b"1"], "n1")
    assert owner.trouble() == ""

    # The bucket is unreachable: operations without objects continue, deletes fail.
    inner.away = True
    clock.advance(31_000)
    await consensus.append("log", 0, 1, [b"2"], "n2")
    with pytest.raises(UnavailableError, match="does not answer"):
        await objects.delete("l0/1")
    assert owner.trouble()

    inner.away = False
    clock.advance(31_000)
    await claim_bucket(objects, clock, cluster("new", 2))
    with pytest.raises(ClusterReplacedError):
        await consensus.append("log", 0, 2, [b"3"], "n3")
    with pytest.raises(ClusterReplacedError):
        await objects.delete("l0/1")
    with pytest.raises(ClusterReplacedError):
        await consensus.cas("register", 0, b"1", "r1")
    assert "belongs to another cluster" in owner.trouble()
    assert await objects.get("l0/1") == b"x"
    assert not isinstance(owner.replaced, StoreRolledBackError)
