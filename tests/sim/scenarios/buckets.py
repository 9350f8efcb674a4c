"""One bucket and its claimants: clusters that begin on it concurrently, and a restore while a cluster is frozen.

Faults: every store fault; wall clocks up to ten minutes apart; nodes that are frozen for any time and continue, or die.
Oracle: of clusters that begin concurrently, exactly one serves. A restore is refused while a node lives. After a
restore has claimed the bucket, no node of the old cluster acknowledges an append or begins a delete, and every old node
that continues ends within a moment.
Replay: ./dev sim --room buckets --seed K --trace
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from sim.faults import FaultyConsensus, FaultyObjects, Rates
from sim.world import Actor, Crew, Down, Engine, Violated, World, swapped
from tidemill.base.errors import (
    ClusterReplacedError,
    InvalidError,
    TidemillError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidemill.base.runtime.tasks import Tasks
from tidemill.consensus.leader_election import LeaseRequest, run_while_leading
from tidemill.consensus.memory import MemoryConsensus
from tidemill.metastore.backup import restore_source as source_module
from tidemill.metastore.backup.restore_source import RestoreSource, check_not_alive
from tidemill.metastore.bucket_claim import BucketOwnership, claim_bucket, greatest_claim
from tidemill.metastore.cluster import Cluster, write_cluster
from tidemill.metastore.cluster_manifest import ClusterManifest, FoundManifest, Presence, signs_of_life
from tidemill.objects.retrying import RetryingObjects

INTERVAL_S = 1.0
LEASE_TTL_MS = 600
LOG = "log"
SKEW_MS = 600_000


class Shared:
    def __init__(self, world: World, fault: str) -> None:
        self.world = world
        self.fault = fault
        self.claimed_s = float("inf")
        """Time at which a restore claimed the bucket."""
        self.numbers = 0


class ClusterNode:
    """Part of a node: it claims and owns the bucket, shows signs of life while it leads, and appends and deletes."""

    def __init__(self, shared: Shared, actor: Actor[Any], engine: Engine) -> None:
        world = shared.world
        self.shared = shared
        self.clock = actor.clock
        self.name = str(actor.life)
        self.consensus = FaultyConsensus(engine, world.faults, self.name)
        faulty = FaultyObjects(world.objects, world.faults, self.name)
        self.objects = RetryingObjects(faulty, actor.clock, world.rand(), store="sim", budget_s=1.0)
        self.rand = world.rand()
        self.owner: BucketOwnership | None = None
        self._tasks = Tasks(lambda *_: None)

    async def start(self) -> None:
        fresh = Cluster(self.rand.uuid(), 1, self.clock.now_ms())
        cluster = await write_cluster(self.consensus, self.rand, fresh, 0)
        await claim_bucket(self.consensus, self.objects, self.clock, self.rand, cluster)
        self.owner = BucketOwnership(self.objects, self.clock, cluster, interval_s=INTERVAL_S)
        if self.shared.fault != "still-acknowledges":
            self.objects.may_delete = self.owner.check_may_delete
            self.consensus.owner = self.owner
        self.watching = self._tasks.spawn(self.owner.run(), name="ownership")
        self._tasks.spawn(self._show(ClusterManifest(cluster.uuid, "", 1, ("d",), cluster.created_ms)), name="presence")

    async def _show(self, manifest: ClusterManifest) -> None:
        presence = Presence(self.objects, self.clock, self.rand, self.name, interval_s=INTERVAL_S)

        async def show(_: Any) -> None:
            while True:
                pause_s = INTERVAL_S
                try:
                    await presence.publish(manifest)
                except (UnavailableError, UnknownOutcomeError):
                    pause_s = 0.2
                await asyncio.sleep(pause_s)

        request = LeaseRequest("metastore/0", self.name, ttl_ms=LEASE_TTL_MS)
        while True:
            try:
                await run_while_leading(self.consensus, request, show)
            except ClusterReplacedError:
                return
            except TidemillError:
                await asyncio.sleep(0.1)

    async def produce(self) -> None:
        """Write an object, append its place to the log, then acknowledge."""
        self.shared.numbers += 1
        await self.objects.put(f"l0/{self.shared.numbers}", b"records")
        head = await self.consensus.log_head(LOG)
        await self.consensus.append(LOG, 0, head.next, [b"placeholder"], self.rand.nonce())
        self._must_not("acknowledged an append")

    async def delete(self) -> None:
        began_s = self.shared.world.loop.time()
        await self.objects.delete(f"l0/{self.shared.numbers}")
        if began_s > self.shared.claimed_s:
            self._must_not("deleted an object")

    def _must_not(self, what: str) -> None:
        now_s = self.shared.world.loop.time()
        if now_s > self.shared.claimed_s:
            raise Violated(f"a replaced cluster {what}: node={self.name} after_s={now_s - self.shared.claimed_s:.3f}")


async def run(world: World, fault: str = "") -> None:
    world.faults.rates = Rates(0.02, 0.02, 0.02, 0.01, 0.5, 0.02, 0.01, 0.3)
    shared, source = Shared(world, fault), world.source
    engines = [world.consensus, Engine(world.clock)][: 1 if fault else source.choice((1, 2))]
    actors: list[list[Actor[ClusterNode]]] = []
    for number, engine in enumerate(engines):

        async def build(actor: Actor[ClusterNode], engine: Engine = engine) -> ClusterNode:
            actor.clock.skew_ms = source.randint(-SKEW_MS, SKEW_MS)
            node = ClusterNode(shared, actor, engine)
            try:
                await node.start()
            except ClusterReplacedError as error:
                world.trace(f"{actor.life} refused {error.message}")
            return node

        actors.append([Actor(world, f"cluster-{number}-{i}", build) for i in range(source.randint(1, 3))])
    with swapped(source_module, "POLL_INTERVAL_S", 0.2):
        await asyncio.gather(*(actor.start() for cluster in actors for actor in cluster))
        serving = [cluster for cluster in actors if any(actor.node.owner is not None for actor in cluster)]
        if len(serving) != 1 or any(actor.node.owner is None for actor in serving[0]):
            raise Violated(f"of {len(actors)} clusters that began on one bucket {len(serving)} serve")
        await replace(shared, serving[0])
    for cluster in actors:
        for actor in cluster:
            actor.crash()


async def replace(shared: Shared, nodes: list[Actor[ClusterNode]]) -> None:
    world, source = shared.world, shared.world.source
    stop: asyncio.Future[None] = world.loop.create_future()
    async with Crew() as crew:
        clients = [crew.spawn(client(shared, nodes, stop)) for _ in range(3)]
        while True:
            if [sign async for sign, _ in signs_of_life(world.objects)]:
                break
            await asyncio.sleep(0.1)
        with contextlib.suppress(InvalidError):
            await restore(shared)
            raise Violated("a restore was allowed while a cluster lives")
        frozen_s = [source.choice((0.5, 3.5, 6.0)) * source.uniform(1.0, 1.5) for _ in nodes]
        for actor, for_s in zip(nodes, frozen_s, strict=True):
            if source.random() < 0.2:
                actor.crash()
            else:
                actor.freeze(for_s)
        while shared.claimed_s == float("inf"):
            try:
                await restore(shared)
            except InvalidError:
                # A node continued in time. Freeze all of them again, for longer than the bucket is watched.
                for actor in nodes:
                    actor.freeze(source.uniform(4.0, 6.0))
        await asyncio.sleep(16.0)  # longer than any node is frozen
        for actor in nodes:
            if actor.up and not actor.node.watching.done():
                raise Violated(f"a node of a replaced cluster continues: node={actor.node.name}")
        stop.set_result(None)
        await asyncio.wait(clients)


async def restore(shared: Shared) -> None:
    """Do the steps of a restore that decide who owns the bucket. Raises InvalidError."""
    world = shared.world
    signs = tuple([sign async for sign, _ in signs_of_life(world.objects)])
    manifest = ClusterManifest("old", "", 1, ("d",), 0)
    await check_not_alive(world.objects, RestoreSource(FoundManifest(manifest, "", 1), (), signs, 1), world.clock)
    incarnation = await greatest_claim(world.objects) + 1
    cluster = Cluster("restored", 1, world.clock.now_ms(), incarnation=incarnation)
    await claim_bucket(MemoryConsensus(world.clock), world.objects, world.clock, world.rand(), cluster)
    shared.claimed_s = world.loop.time()
    world.trace("the bucket is claimed by a restore")


async def client(shared: Shared, nodes: list[Actor[ClusterNode]], stop: asyncio.Future[None]) -> None:
    source = shared.world.source
    while not stop.done():
        actor = source.choice(nodes)
        if actor.up:
            deletes = source.random() < 0.3
            with contextlib.suppress(TidemillError, Down):
                await actor.enter(lambda node, deletes=deletes: node.delete() if deletes else node.produce())  # type: ignore[misc]
        await asyncio.sleep(source.uniform(0, 0.3))
