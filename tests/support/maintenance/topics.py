"""A topic whose upkeep a test runs in steps."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from tidemill.base.clock import ManualClock, Rand
from tidemill.consensus.api import LogHead
from tidemill.consensus.memory import MemoryConsensus, MemoryState
from tidemill.maintenance.scheduler import JobContext, Retention, StepBudget
from tidemill.maintenance.topics.l0_garbage import L0GarbageCollector
from tidemill.maintenance.topics.rollups import RollupCollector
from tidemill.metastore.catalogue import Catalogue, TopicRow
from tidemill.metastore.factory import NODE, create_metastore
from tidemill.objects.memory import MemoryObjects
from tidemill.topics.batch import Record, encode_batch
from tidemill.topics.config.settings import TopicSettings
from tidemill.topics.local_topics import LocalTopics
from tidemill.topics.membership import SingleNodeAssignment
from tidemill.topics.partition.state_machine.codec import decode_command
from tidemill.topics.partition.state_machine.commands import Rollup

T = TypeVar("T")


class World:
    def __init__(self) -> None:
        self.clock = ManualClock(1_700_000_000_000)
        self.rand = Rand(3)
        self.objects = MemoryObjects(self.clock)
        self.consensus = MemoryConsensus(self.clock, MemoryState())
        settings = NODE.__class__(lead=True, persist_interval_s=0.01)
        self.metastore = create_metastore(
            self.consensus, self.objects, self.clock, self.rand, settings=settings, holder="n/1"
        )
        self.catalogue = Catalogue(self.metastore, self.clock, self.rand)
        context = JobContext(
            self.consensus, self.objects, self.metastore, self.clock, self.rand, Retention(collect_after_s=60)
        )
        self.collector = L0GarbageCollector(context, quiet_s=0)
        self.rollups = RollupCollector(context)
        self.nodes: list[LocalTopics] = []

    def node(self, **settings: Any) -> LocalTopics:
        node = LocalTopics(
            self.consensus,
            self.objects,
            self.catalogue,
            clock=self.clock,
            rand=self.rand,
            assignment=SingleNodeAssignment(f"n{len(self.nodes)}", len(self.nodes)),
            settings=TopicSettings(**settings),
        )
        self.nodes.append(node)
        return node

    async def send(self, node: LocalTopics, row: TopicRow, *partitions: int, **producer: int) -> None:
        """One batch into each of the partitions, in one object."""
        data = [bytearray(encode_batch([Record(None, b"v" * 50, timestamp_ms=1000)], **producer)) for _ in partitions]
        sent = [node.produce_nowait(row.topic_id, p, d) for p, d in zip(partitions, data, strict=True)]
        while not all(future.done() for future in sent):
            self.clock.advance(1)  # by this clock the writer waits for clients that it answered a moment ago
            await asyncio.sleep(0.001)
        await asyncio.gather(*sent)

    async def forget(self, node: LocalTopics, row: TopicRow, partition: int) -> None:
        led = node._led[row.topic_id, partition]
        led.advance_log_start(led.state.high_watermark)
        while led.state.log_start < led.state.high_watermark:
            await asyncio.sleep(0)

    async def keep(self, seconds: int = 200) -> None:
        for _ in range(seconds // 10):
            self.clock.advance(10_000)
            await self.metastore.flush()
            await self.collector.run(StepBudget(self.clock, 1))
            await self.rollups.run(StepBudget(self.clock, 1))

    async def truncated(self, log: str, start: int) -> LogHead:
        """Rollups run concurrently with the commits: wait for one."""
        while (head := await self.consensus.log_head(log)).start <= start:
            await asyncio.sleep(0.001)
        return head

    async def newest_rollup(self, log: str) -> str:
        """The object that the last roll-up in the log names."""
        found = await self.consensus.read(log, (await self.consensus.log_head(log)).start)
        commands = [decode_command(record.data) for record in found.records]
        return [command.object_key for command in commands if isinstance(command, Rollup)][-1]

    def stored(self, prefix: str = "l0/") -> set[str]:
        return {key for key in self.objects._objects if key.startswith(prefix)}

    async def aclose(self) -> None:
        for node in self.nodes:
            await node.aclose()
        await self.metastore.aclose()
