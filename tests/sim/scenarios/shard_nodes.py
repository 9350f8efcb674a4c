"""Shared parts of the scenarios of the shards room: one shard, processes with a handle on it, and its maintenance."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import pyarrow as pa

from sim.oracles.shards import DEFAULT_N, Attempt, Frontiers, Model, Row, Update
from sim.world import Actor, Down, World
from tidemill.base.clock import Rand
from tidemill.base.errors import ConflictError, FencedError, MissingError, UnavailableError, UnknownOutcomeError
from tidemill.maintenance.scheduler import JobContext, Retention, StepBudget
from tidemill.maintenance.shards.orphans import OrphanCollector
from tidemill.maintenance.shards.upkeep import collect_garbage
from tidemill.shards.api import DIFF, TIME, Column, ShardSchema
from tidemill.shards.compaction.compaction import compact_once
from tidemill.shards.handle import LogShard
from tidemill.shards.parts.schema import contents_schema, update_schema
from tidemill.shards.parts.schema_evolution import SchemaChanges
from tidemill.shards.registry import open_shard

SCHEMA = ShardSchema((Column("k", "string"), Column("v", "string")), ("k",))
N = Column("n", "int32", str(DEFAULT_N))
"""Column that is added to the shard in some worlds."""
NAME = "t"
OWNER = "keeper"


class Shared:
    """State of the scenario outside of all actors: attempts, reads, and the durable progress of the listener.

    The two subclasses define the writers and the expected contents of the shard.
    """

    def __init__(self, world: World, fault: str) -> None:
        self.world = world
        self.fault = fault
        self.attempts: dict[str, Attempt] = {}
        self.reads: list[tuple[int, Counter[Row]]] = []
        self.frontiers = Frontiers()
        self.heard: Counter[Update] = Counter()
        self.heard_to = 0
        """Frontier of the listener."""
        self.numbers = 0

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def token(self) -> str:
        return f"token-{self.number()}"

    def cast(self) -> list[Actor[Node]]:
        """Return the writers, not yet started."""
        raise NotImplementedError

    def other_work(self) -> list[tuple[Actor[Node], Callable[[Any, Node], Awaitable[None]]]]:
        """Return further actors and the work that they do until the end."""
        return []

    async def feed(self) -> None:
        """Run the events outside of all actors, until nothing more is left to write."""

    async def write(self, node: Node) -> None:
        """Do a writer's work until it is done. It begins again in each life."""
        raise NotImplementedError

    async def model(self, stands: Sequence[Attempt]) -> Model:
        """Return the expected contents of the shard; `stands` are the attempts that landed, in order."""
        raise NotImplementedError


class Node:
    """Process with a handle on the shard, under the schema that it found."""

    def __init__(self, actor: Actor[Any], shard: LogShard, rand: Rand, objects: Any, consensus: Any) -> None:
        self.actor = actor
        self.shard = shard
        self.rand = rand
        self.objects = objects
        self.consensus = consensus

    async def reopen(self) -> None:
        """Open the handle again after Evolved. Raises UnavailableError, UnknownOutcomeError; then use it again."""
        writer = self.shard.writer
        self.shard = await open_shard(self.consensus, self.objects, self.actor.clock, self.rand, NAME)
        self.shard.writer = writer
        self.actor.world.trace(f"{self.actor.life} goes on under version {self.shard.schema.version}")


async def build(actor: Actor[Node]) -> Node:
    consensus, objects, rand = actor.consensus(), actor.objects(), actor.world.rand()
    try:
        shard = await open_shard(consensus, objects, actor.clock, rand, NAME)
    except MissingError:
        shard = await open_shard(consensus, objects, actor.clock, rand, NAME, SCHEMA)
    shard.writer = str(actor.life).replace("#", ".")
    return Node(actor, shard, rand, objects, consensus)


async def evolve(shared: Shared, node: Node) -> None:
    """Add a column, and later widen it. Several actors may do so, again after each death, and end in one schema."""
    source = shared.world.source
    for changes in (SchemaChanges(add=(N,)), SchemaChanges(widen=(Column("n", "int64"),))):
        await asyncio.sleep(source.uniform(0, 1.5))
        while True:
            try:
                await node.shard.evolve(changes)
                break
            except (UnavailableError, UnknownOutcomeError):
                await asyncio.sleep(0.05)


async def oracle_handle(world: World) -> LogShard:
    """Return a handle without faults."""
    return await open_shard(world.consensus, world.objects, world.clock, Rand(0), NAME)


async def keep(
    shared: Shared, actor: Actor[Node], work: Callable[[Any, Node], Awaitable[None]], stop: asyncio.Future[None]
) -> None:
    """Run `work` in the actor, and again after every death, until it ends or the scenario stops."""
    while not stop.done():
        if not actor.up:
            await actor.start()
            continue
        working = actor.enter(lambda node: work(shared, node))
        await asyncio.wait([working, stop], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return
        try:
            working.result()
            return
        except Down:
            await asyncio.sleep(shared.world.source.choice((0.0, 0.1, 1.0)))


async def keep_up(shared: Shared, node: Node) -> None:
    """Advance since up to the listener, merge runs, collect replaced objects, sweep orphans.

    Of two such processes the one with the newer epoch owns the critical hold; both merge, collect and sweep.
    """
    source, epoch = shared.world.source, node.actor.life.number
    metastore: Any = None  # there is no other shard, and no restore
    retention = Retention(orphans_after_s=source.choice((0.1, 1.0)))
    orphans = OrphanCollector(
        JobContext(node.consensus, node.objects, metastore, node.actor.clock, node.rand, retention)
    )
    while True:
        await asyncio.sleep(source.uniform(0, 0.3))
        try:
            if shared.heard_to > 1 and source.random() < 0.5:
                since = source.randrange(shared.heard_to)
                with contextlib.suppress(FencedError):
                    await node.shard.downgrade_since(OWNER, epoch, min(since, shared.heard_to - 1))
            await compact_once(node.shard, node.objects, node.rand)
            if source.random() < 0.7:
                await collect_garbage(
                    node.shard, node.objects, node.actor.clock, after_ms=source.choice((-1, 100)), persisted=1 << 60
                )
            if source.random() < 0.2:
                await orphans.run(StepBudget(node.actor.clock, epoch))
        except (UnavailableError, UnknownOutcomeError, ConflictError):
            continue


def table(schema: ShardSchema, updates: Iterable[Update]) -> pa.Table:
    listed = list(updates)
    columns = [pa.array([u[i] for u in listed], field.type) for i, field in enumerate(contents_schema(schema))]
    columns += [pa.array([u[i] for u in listed], pa.int64()) for i in (3, 4)]
    return pa.Table.from_arrays(columns, schema=update_schema(schema))


def updates_of(found: pa.Table) -> list[Update]:
    return list(zip(*_rows(found), *(found.column(name).to_pylist() for name in (TIME, DIFF)), strict=True))


def rows_of(found: pa.Table) -> Counter[Row]:
    return Counter(zip(*_rows(found), strict=True))


def _rows(found: pa.Table) -> list[list[Any]]:
    """Return rows (k, v, n). A read without the column `n` sees only rows with its default."""
    n = found.column("n").to_pylist() if "n" in found.column_names else [DEFAULT_N] * found.num_rows
    return [found.column("k").to_pylist(), found.column("v").to_pylist(), n]
