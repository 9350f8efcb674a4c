"""A topic of two partitions whose extents are made one by one, and the jobs that tend L1."""

from __future__ import annotations

from tidemill.base.clock import Rand, SystemClock
from tidemill.consensus.memory import MemoryConsensus
from tidemill.maintenance.check.rows import check_rows
from tidemill.maintenance.scheduler import JobContext, Retention, StepBudget
from tidemill.maintenance.topics.l1_garbage import L1GarbageCollector
from tidemill.maintenance.topics.l1_merge import L1Merger
from tidemill.metastore.catalogue import Catalogue, TopicRow
from tidemill.metastore.check.findings import Findings
from tidemill.metastore.check.objects import References
from tidemill.metastore.factory import NODE, create_metastore
from tidemill.objects.memory import MemoryObjects
from tidemill.topics.batch import Record, decode_columns, encode_batch
from tidemill.topics.l1.extent_store import ExtentStore
from tidemill.topics.l1.reader import L1Reader
from tidemill.topics.l1.reconciler import Reconciler
from tidemill.topics.lifecycle.checkpoint import PartitionsStage
from tidemill.topics.local_topics import LocalTopics
from tidemill.topics.partition_reader import LogPartitionReader


class L1World:
    def __init__(self) -> None:
        self.clock, self.rand = SystemClock(), Rand()
        self.objects = MemoryObjects(self.clock)
        self.consensus = MemoryConsensus(self.clock)
        settings = NODE.__class__(lead=True, persist_interval_s=0.01)
        self.metastore = create_metastore(
            self.consensus, self.objects, self.clock, self.rand, settings=settings, holder="n/1"
        )
        self.catalogue = Catalogue(self.metastore, self.clock, self.rand)
        self.topics = LocalTopics(
            self.consensus, self.objects, self.catalogue, clock=self.clock, rand=self.rand, metastore=self.metastore
        )
        self.rows = ExtentStore(self.metastore, self.clock, self.rand)
        self.reconciler = Reconciler(
            self.rows, self.topics._around, self.topics._shared, self.topics._cache, self.topics._led
        )
        context = JobContext(
            self.consensus, self.objects, self.metastore, self.clock, self.rand, Retention(collect_after_s=0)
        )
        self.levels, self.other_levels = L1Merger(context), L1Merger(context)
        self.collecting = L1GarbageCollector(context, registered_s=0)
        self.topic: TopicRow

    async def __aenter__(self) -> L1World:
        self.topic = await self.catalogue.create_topic("t", 2)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.topics.aclose()
        await self.metastore.aclose()

    async def fill(self, count: int) -> None:
        """Add `count` extents of two records to each partition."""
        for number in range(count):
            for partition in (0, 1):
                data = encode_batch([Record(None, b"%d.%d" % (number, i), timestamp_ms=1000) for i in range(2)])
                await self.topics.produce_nowait(self.topic.topic_id, partition, bytearray(data))
            stage = PartitionsStage(self.consensus, self.objects, self.metastore, self.clock)
            await stage.load()
            for unit in (await stage.gather()).values():
                for group in unit:
                    await self.metastore.commit(group)
            done = await self.reconciler.run_round(self.topic.topic_id, range(2))
            assert done.failed is None and done.size_bytes
            await self.topics._commits.drain(30)

    async def everything(self) -> list[list[tuple[int, bytes | None]]]:
        reader = LogPartitionReader(self.consensus, self.objects, L1Reader(self.rows, self.objects))
        found = []
        for partition in (0, 1):
            end = await reader.high_watermark(self.topic.topic_id, partition)
            each: list[tuple[int, bytes | None]] = []
            for data in await reader.read(await reader.plan(self.topic.topic_id, partition, 0, end)):
                _, columns = decode_columns(data)
                each += zip(columns.offsets.tolist(), columns.values, strict=True)
            found.append(each)
        return found

    async def problems(self) -> list[str]:
        """Return the findings of the deep check in the rows and the objects that they name."""
        findings, references = Findings(), References()
        await check_rows(self.metastore, findings, references, incarnation=1)
        await references.check(self.objects, findings, self.clock.now_ms())
        return [str(finding) for finding in findings.broken]

    async def collect(self) -> None:
        for _ in range(3):
            await self.metastore.flush(30)
            await self.collecting.run(StepBudget(self.clock, 1))

    async def stored(self) -> list[str]:
        return [meta.key.rpartition("/")[2] async for meta in self.objects.list("l1/")]
