"""A world whose topics are reconciled at the times that a test chooses."""

from __future__ import annotations

from typing import Any

from support.topics.world import World, batch
from tidemill.base.clock import Rand
from tidemill.metastore.rows import L1_OBJECTS
from tidemill.metastore.rows.l1 import L1ExtentRow, L1ObjectRow
from tidemill.topics.batch_reads import RangeReader
from tidemill.topics.l1.extent_store import ExtentStore
from tidemill.topics.l1.reader import L1Reader
from tidemill.topics.l1.reconciler import Reconciler, RoundResult
from tidemill.topics.lifecycle.checkpoint import PartitionsStage
from tidemill.topics.local_topics import LocalTopics
from tidemill.topics.membership import Assignment
from tidemill.topics.partition.state_machine.state import PartitionState
from tidemill.topics.partition_reader import LogPartitionReader


class L1World(World):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.rows = ExtentStore(self.metastore, self.clock, Rand(3))
        self.l1 = L1Reader(self.rows, self.objects)
        self.reader = LogPartitionReader(self.consensus, self.objects, self.l1)

    def node(self, assignment: Assignment | None = None, **settings: Any) -> LocalTopics:
        node = super().node(assignment, **settings)
        node._l1 = node._lookup._l1 = self.l1
        node.retainer._l1 = self.rows
        return node

    def reconciling(self) -> LocalTopics:
        """Return a node that reconciles periodically once it is started."""
        node = LocalTopics(
            self.consensus, self.objects, self.catalogue, clock=self.clock, rand=self.rand,
            settings=self.settings, tracker=self.tracker, metastore=self.metastore,
        )  # fmt: skip
        self.nodes.append(node)
        return node

    def reconciler(self, node: LocalTopics, l0: RangeReader | None = None) -> Reconciler:
        """`l0`: where it reads batches, else what the node's consumers share."""
        return Reconciler(self.rows, node._around, l0 or node._shared, node._cache, node._led)

    async def checkpoint(self) -> None:
        """The rows follow the logs."""
        stage = PartitionsStage(self.consensus, self.objects, self.metastore, self.clock)
        await stage.load()
        for unit in (await stage.gather()).values():
            for group in unit:
                await self.metastore.commit(group)

    async def round(self, node: LocalTopics, topic_id: str, l0: RangeReader | None = None) -> RoundResult:
        return await self.reconciler(node, l0).run_round(topic_id, range(2))

    async def move(self, node: LocalTopics, topic_id: str, l0: RangeReader | None = None) -> RoundResult:
        """Run a checkpoint and a round, until the logs have applied it."""
        await self.checkpoint()
        done = await self.round(node, topic_id, l0)
        await node._commits.drain(30.0)
        return done

    def state(self, node: LocalTopics, topic_id: str, partition: int = 0) -> PartitionState:
        return node._led[topic_id, partition].state

    async def extents(self, topic_id: str, partition: int = 0) -> list[tuple[int, int]]:
        return [(e.base_offset, e.last_offset) for e in await self.extent_rows(topic_id, partition)]

    async def extent_rows(self, topic_id: str, partition: int = 0) -> list[L1ExtentRow]:
        return [extent async for extent in self.rows.extents(topic_id, partition)]

    async def object_rows(self, topic_id: str) -> list[L1ObjectRow]:
        return await self.metastore.rows(L1_OBJECTS, topic_id)

    async def keys(self, prefix: str) -> list[str]:
        return [meta.key async for meta in self.objects.list(prefix)]

    async def forget_l0(self, node: LocalTopics) -> None:
        """Delete what no hot state names, as collection would."""
        named = set[str]().union(*(led.state.live_objects() for led in node._led.values()))
        for key in await self.keys("l0/"):
            if key not in named:
                await self.objects.delete(key)


async def produced(node: LocalTopics, topic_id: str, *names: str, partition: int = 0, at_ms: int = 1000) -> None:
    """Produce a batch of two records for each name, one millisecond apart, each in a separate object."""
    for number, name in enumerate(names):
        data = batch(f"{name}a", f"{name}b", timestamp_ms=at_ms + number)
        await node.produce_nowait(topic_id, partition, data)
