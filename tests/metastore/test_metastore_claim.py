"""Ownership of the bucket: the claim of an incarnation, and the limits of a process whose last check is too old."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest

from tidemill.base.clock import Clock, ManualClock, Rand, SystemClock
from tidemill.base.errors import ClusterReplacedError, InvalidError, StoreRolledBackError, UnavailableError
from tidemill.consensus.api import Versioned
from tidemill.consensus.memory import MemoryConsensus, MemoryState
from tidemill.maintenance.checkpoint_service import check_bucket
from tidemill.metastore.bucket_claim import (
    REGISTER,
    BucketOwnership,
    check_unclaimed,
    claim_bucket,
    claim_key,
    greatest_claim,
)
from tidemill.metastore.cluster import Cluster
from tidemill.metastore.cluster_manifest import ClusterManifest, encode, read_struct, upload_manifest
from tidemill.metastore.factory import NODE, TOOL, create_metastore
from tidemill.objects.memory import MemoryObjects
from tidemill.objects.retrying import RetryingObjects
from tidemill.objects.store import ObjectMeta, ObjectStore

CLOCK = SystemClock()


def cluster(name: str, incarnation: int = 1) -> Cluster:
    return Cluster(name, 1, 0, incarnation=incarnation)


async def claim(
    objects: ObjectStore,
    of: Cluster,
    clock: Clock = CLOCK,
    *,
    consensus: MemoryConsensus | None = None,
    has_begun: Callable[[], Awaitable[bool]] | None = None,
) -> None:
    """Claim as a process of the cluster; by default its consensus knows nothing of the bucket."""
    await claim_bucket(consensus or MemoryConsensus(CLOCK), objects, clock, Rand(), of, has_begun=has_begun)


class Away(MemoryObjects):
    away = False

    async def head(self, key: str) -> ObjectMeta | None:
        if self.away:
            raise UnavailableError("planted")
        return await super().head(key)


async def test_of_many_clusters_that_claim_an_empty_bucket_at_once_one_has_it_and_keeps_it() -> None:
    objects = MemoryObjects(CLOCK)
    names = [f"c{i}" for i in range(16)]
    outcomes = await asyncio.gather(*(claim(objects, cluster(name)) for name in names), return_exceptions=True)
    [winner] = [name for name, outcome in zip(names, outcomes, strict=True) if outcome is None]
    assert all(isinstance(outcome, ClusterReplacedError) for outcome in outcomes if outcome is not None)
    assert f"bucket_cluster={winner}" in str(next(outcome for outcome in outcomes if outcome is not None))
    await claim(objects, cluster(winner))  # at every start of each of its nodes
    with pytest.raises(ClusterReplacedError):
        await claim(objects, cluster("a later one"))


async def test_of_nodes_of_a_new_cluster_that_start_at_once_on_different_buckets_those_of_one_bucket_start() -> None:
    for _ in range(20):
        state, buckets = MemoryState(), [MemoryObjects(CLOCK) for _ in range(2)]
        nodes = [
            create_metastore(MemoryConsensus(CLOCK, state), bucket, CLOCK, Rand(), settings=NODE)
            for bucket in (*buckets, *buckets)
        ]
        outcomes = await asyncio.gather(*(node.start() for node in nodes), return_exceptions=True)
        started = [outcome is None for outcome in outcomes]
        assert started[:2] == started[2:] and sorted(started[:2]) == [False, True], outcomes
        for outcome in outcomes:
            assert outcome is None or (isinstance(outcome, InvalidError) and "not that of the cluster" in str(outcome))
        for bucket, owned in zip(buckets, started, strict=False):
            again = create_metastore(MemoryConsensus(CLOCK, state), bucket, CLOCK, Rand())
            with contextlib.nullcontext() if owned else pytest.raises(InvalidError, match="not that of the cluster"):
                await again.start()
            await again.aclose()
        for node in nodes:
            await node.aclose()


class Crash(Exception):
    pass


class CrashesBeforeTheRecord(MemoryConsensus):
    async def cas(self, key: str, expected_seq: int, data: bytes, nonce: str) -> Versioned:
        if key == REGISTER:
            raise Crash
        return await super().cas(key, expected_seq, data, nonce)


async def test_a_process_that_died_between_the_claim_and_its_record_has_claimed_the_bucket() -> None:
    state, objects = MemoryState(), MemoryObjects(CLOCK)
    with pytest.raises(Crash):
        await claim(objects, cluster("one"), consensus=CrashesBeforeTheRecord(CLOCK, state))
    consensus = MemoryConsensus(CLOCK, state)
    await claim(objects, cluster("one"), consensus=consensus)
    await claim(objects, cluster("one"), consensus=consensus)
    other = MemoryObjects(CLOCK)
    with pytest.raises(InvalidError, match="not that of the cluster"):
        await claim(other, cluster("one"), consensus=consensus)
    assert [meta.key async for meta in other.list("")] == []


async def test_a_claim_of_a_former_version_is_recorded_and_one_that_was_removed_is_renewed() -> None:
    async def has_begun() -> bool:
        return True

    class FormerClaim(msgspec.Struct):
        cluster_uuid: str
        incarnation: int
        at_ms: int

    consensus, objects = MemoryConsensus(CLOCK), MemoryObjects(CLOCK)
    await objects.put(claim_key(1), encode(FormerClaim("one", 1, 1234)))
    for _ in range(2):
        await claim(objects, cluster("one"), consensus=consensus, has_begun=has_begun)
    await upload_manifest(objects, Rand(), ClusterManifest("one", "", 1, ("d",), 0), 1)
    await objects.delete(claim_key(1))
    for _ in range(2):
        await claim(objects, cluster("one"), consensus=consensus, has_begun=has_begun)
    found = await read_struct(objects, claim_key(1), FormerClaim)
    assert found.cluster_uuid == "one", "a process of the former version reads the claim, too"
    with pytest.raises(InvalidError, match="not that of the cluster"):
        await claim(MemoryObjects(CLOCK), cluster("one"), consensus=consensus)


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

    async def list(self, prefix: str, start_after: str = "") -> AsyncIterator[ObjectMeta]:
        peer, self.peer = self.peer, None
        if peer is not None:
            await peer()
        async for found in super().list(prefix, start_after):
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
    await claim(objects, cluster("old"))
    await claim(objects, cluster("new", 2))
    with pytest.raises(
        ClusterReplacedError, match=r"cluster=old incarnation=1 bucket_cluster=new bucket_incarnation=2"
    ):
        await claim(objects, cluster("old"))
    await objects.delete(claim_key(2))
    await objects.put(claim_key(2), b"not a claim")
    with pytest.raises(ClusterReplacedError, match="bucket_cluster=unreadable"):
        await claim(objects, cluster("old"))


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
        await claim(objects, cluster("one"))
        return True

    await claim(objects, cluster("one"), has_begun=peer_claims_and_begins)
    assert await greatest_claim(objects) == 1


async def test_a_bucket_with_the_manifest_of_the_cluster_is_its_own_although_the_claim_is_gone() -> None:
    async def has_begun() -> bool:
        return True

    for name, owned in (("one", True), ("other", False)):
        objects = MemoryObjects(CLOCK)
        await upload_manifest(objects, Rand(), ClusterManifest(name, "", 1, ("d",), 0), 1)
        if owned:
            await claim(objects, cluster("one"), has_begun=has_begun)
        else:
            with pytest.raises(InvalidError, match="not that of the cluster"):
                await claim(objects, cluster("one"), has_begun=has_begun)
        assert await greatest_claim(objects) == owned


async def test_a_process_that_has_not_asked_for_three_intervals_asks_before_it_acknowledges_or_deletes() -> None:
    clock, inner = ManualClock(), Away(CLOCK)
    objects = RetryingObjects(inner, CLOCK, Rand(), store="memory", budget_s=0.0)
    consensus = MemoryConsensus(CLOCK)
    await claim(objects, cluster("old"), clock)
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
    await claim(objects, cluster("new", 2), clock)
    with pytest.raises(ClusterReplacedError):
        await consensus.append("log", 0, 2, [b"3"], "n3")
    with pytest.raises(ClusterReplacedError):
        await objects.delete("l0/1")
    with pytest.raises(ClusterReplacedError):
        await consensus.cas("register", 0, b"1", "r1")
    assert "belongs to another cluster" in owner.trouble()
    assert await objects.get("l0/1") == b"x"
    assert not isinstance(owner.replaced, StoreRolledBackError)
