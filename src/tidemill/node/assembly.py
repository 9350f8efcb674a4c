"""One node, assembled from a configuration.

Start order: stores → metastore → membership and topics → Kafka → shapes and HTTP → captures and binders. A client
that can connect is served; what is not there yet answers "retry". Stop order is the reverse.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import msgspec
import structlog
from starlette.applications import Starlette
from starlette.routing import BaseRoute

from tidemill.base.clock import Clock, Rand, SystemClock
from tidemill.base.errors import Conflict, Invalid, Unavailable, Unknown
from tidemill.base.limits import MARK_PUBLISH_INTERVAL_S
from tidemill.base.marks import Tracker
from tidemill.base.tasks import Tasks
from tidemill.capture.config import CaptureConfig
from tidemill.consensus.api import Consensus, Lease
from tidemill.consensus.board import Board
from tidemill.consensus.leading import Body, lead
from tidemill.consensus.open import open_consensus
from tidemill.kafka.server import KafkaServer
from tidemill.kafka.settings import KafkaSettings
from tidemill.metastore.catalogue import Catalogue, TopicRow
from tidemill.metastore.lsm.compaction.open import open_merger
from tidemill.metastore.open import NODE, metastore_on
from tidemill.node.assignment import CaptureFirst
from tidemill.node.binder import Binder
from tidemill.node.config import CaptureSection, Config
from tidemill.node.http import HttpServer
from tidemill.node.keeping import Keeping, check_bucket
from tidemill.node.shape_routing import ShapeRouting
from tidemill.node.tending import tended
from tidemill.objects.open import open_objects
from tidemill.objects.store import ObjectStore
from tidemill.shapes.http import shape_routes
from tidemill.shapes.service import ShapeService
from tidemill.shards.front import Shard
from tidemill.shards.open import open_remap, open_shard
from tidemill.topics.leadership import Membership, NodeInfo
from tidemill.topics.log import LocalTopics
from tidemill.topics.reader import PartitionReaderImpl

log = structlog.get_logger()


MoreRoutes = Callable[[Board, Callable[[], bool], Clock], Sequence[BaseRoute]]
"""(board of marks, is the node ready?, clock) → routes to serve beside the shapes."""


class Node:
    def __init__(
        self, config: Config, more_routes: MoreRoutes, clock: Clock | None = None, rand: Rand | None = None
    ) -> None:
        self._config = config
        self._more_routes = more_routes
        self._clock = clock or SystemClock()
        self._rand = rand or Rand()
        self._marks = Tracker()
        self._facts: dict[str, Callable[[], dict[str, object]]] = {}
        """mark name → what its owner says beside it (retained WAL, snapshot rows), published with the marks"""
        self._tasks = Tasks(self._task_failed)
        self._failed: asyncio.Future[None] | None = None
        self._ready = False
        self._process = f"node:{config.node.name}"
        self._instance = f"{config.node.name}/{os.getpid()}/{self._rand.nonce()[:8]}"

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set or a part fails for good. Raises what failed."""
        self._failed = asyncio.get_running_loop().create_future()
        config = self._config
        objects = await open_objects(config.objects_url, self._clock, self._rand)
        consensus = await open_consensus(config.consensus_url, self._clock, self._rand)
        try:
            await self._serve(objects, consensus, stop)
        finally:
            await self._tasks.aclose()
            await consensus.aclose()
            await objects.aclose()

    async def _serve(self, objects: ObjectStore, consensus: Consensus, stop: asyncio.Event) -> None:
        config, clock, rand = self._config, self._clock, self._rand
        await check_bucket(consensus, objects)
        settings = msgspec.structs.replace(NODE, persist_interval_s=config.metastore.persist_interval_s)
        merger = open_merger(objects, config.objects_url, settings.options, clock)
        metastore = metastore_on(
            consensus,
            objects,
            clock,
            rand,
            domains=config.metastore.domains,
            settings=settings,
            holder=self._instance,
            tracker=self._marks,
            merger=merger,
        )
        catalogue = Catalogue(metastore, clock, rand)
        reader = PartitionReaderImpl(consensus, objects)
        host, _, kafka_port = config.node.kafka.rpartition(":")
        advertised = config.node.advertised_host or host
        http_host, _, http_port = config.node.http.rpartition(":")
        url = f"http://{config.node.advertised_host or http_host}:{http_port}"
        info = NodeInfo(advertised, int(kafka_port), url)
        membership = Membership(consensus, config.node.name, info, clock, rand)
        assignment = CaptureFirst(membership, consensus, catalogue)
        topics = LocalTopics(
            consensus, objects, catalogue, clock=clock, rand=rand, assignment=assignment, tracker=self._marks
        )
        shapes = ShapeService(clock, rand, self._marks)

        async def shard(name: str) -> Shard:
            return await open_shard(consensus, objects, clock, rand, name)

        shapes.add_shards(shard)
        board = Board(consensus, rand)
        app = Starlette(routes=[*shape_routes(shapes), *self._more_routes(board, lambda: self._ready, clock)])
        routed = ShapeRouting(app, catalogue, consensus, self._instance, clock)
        http = HttpServer(routed, http_host, int(http_port))
        kafka = KafkaServer(
            topics=topics,
            catalogue=catalogue,
            consensus=consensus,
            nodes=membership,
            clock=clock,
            rand=rand,
            name=config.node.name,
            node_id=0,
            host=host,
            port=int(kafka_port),
            advertised_host=advertised,
            settings=KafkaSettings(
                auto_create_topics=config.kafka.auto_create_topics, default_partitions=config.kafka.default_partitions
            ),
        )
        binder = Binder(catalogue, reader, lambda name: open_remap(consensus, clock, rand, name), clock)
        keeping = Keeping(
            consensus,
            objects,
            metastore,
            clock,
            rand,
            node=config.node.name,
            holder=self._instance,
            tracker=self._marks,
            checkpoint_interval_s=config.metastore.checkpoint_interval_s,
            alive_interval_s=config.metastore.alive_interval_s,
        )
        async with AsyncExitStack() as stack:
            stack.push_async_callback(merger.aclose)
            stack.push_async_callback(metastore.aclose)
            stack.push_async_callback(keeping.leave)
            await metastore.start()
            await membership.start()
            stack.push_async_callback(membership.aclose)
            await assignment.start()
            stack.push_async_callback(assignment.aclose)
            await self._create_topics(catalogue)
            await topics.start()
            stack.push_async_callback(topics.aclose)
            await kafka.start()
            stack.push_async_callback(kafka.aclose)
            await http.start()
            stack.push_async_callback(http.aclose)
            stack.push_async_callback(shapes.aclose)
            binder.start()
            stack.push_async_callback(binder.aclose)
            for name, section in config.capture.items():
                make = self._capture_maker(name, section, topics, catalogue, consensus, reader, shapes)
                leading = lead(
                    consensus,
                    f"capture/{name}",
                    self._instance,
                    url.encode(),
                    make,
                    own_earlier_life=lambda holder: holder.startswith(f"{config.node.name}/"),
                )
                self._tasks.spawn(leading, name=f"capture-{name}")
            self._facts["checkpoint"] = keeping.facts
            self._tasks.spawn(keeping.run(), name="keeping")
            self._tasks.spawn(self._publish(board, membership), name="publish-marks")
            self._ready = True
            log.info("node serves", node=config.node.name, http=config.node.http, kafka=config.node.kafka)
            await self._until(stop)
            stack.push_async_callback(self._tasks.aclose)

    def _capture_maker(
        self,
        name: str,
        section: CaptureSection,
        topics: LocalTopics,
        catalogue: Catalogue,
        consensus: Consensus,
        reader: PartitionReaderImpl,
        shapes: ShapeService,
    ) -> Body:
        from tidemill.capture.machine import Capture  # psycopg is loaded only where something is captured

        settings = CaptureConfig(
            name, section.dsn, tuple(section.tables), binding_interval_ms=section.binding_interval_ms
        )

        async def run() -> None:
            remap = await open_remap(consensus, self._clock, self._rand, settings.remap)
            capture = Capture(
                settings, topics=topics, catalogue=catalogue, remap=remap, reader=reader,
                clock=self._clock, rand=self._rand, tracker=self._marks,
            )  # fmt: skip
            self._facts[f"capture:{name}"] = capture.facts
            capture.add_sink(shapes.add_database(name, section.dsn, capture.relations))
            try:
                await capture.run()
            finally:
                del self._facts[f"capture:{name}"]
                await capture.aclose()
                shapes.suspend_database(name)  # another node may capture on: what is served here would stand still

        async def led(_: Lease) -> None:
            await tended(run, self._marks, settings.mark, self._clock)

        return led

    async def _create_topics(self, catalogue: Catalogue) -> None:
        for name, section in self._config.topics.items():
            try:
                await catalogue.create_topic(name, section.partitions)
            except Conflict as conflict:
                current = conflict.current
                if isinstance(current, TopicRow) and current.partitions != section.partitions:
                    raise Invalid(
                        f"topic exists with another count: topics.{name}.partitions={section.partitions}"
                        f" existing={current.partitions}.",
                        fix=f"Set topics.{name}.partitions = {current.partitions}.",
                    ) from conflict

    async def _publish(self, board: Board, membership: Membership) -> None:
        while True:
            if membership.superseded is not None:
                # Two processes under one node name would serve nobody: the older one ends and says why.
                raise membership.superseded
            facts = {name: read() for name, read in self._facts.items()}
            report = self._marks.report(self._process, self._clock.now_ms(), facts)
            try:
                await board.publish(report)
            except (Unavailable, Unknown) as error:
                log.warning("marks not published", error=str(error))
            await asyncio.sleep(MARK_PUBLISH_INTERVAL_S)

    async def _until(self, stop: asyncio.Event) -> None:
        assert self._failed is not None
        async with Tasks(lambda *_: None) as tasks:
            stopping = tasks.spawn(stop.wait(), name="until-stop")
            await asyncio.wait([stopping, self._failed], return_when=asyncio.FIRST_COMPLETED)
        if self._failed.done():
            self._failed.result()

    def _task_failed(self, name: str, error: BaseException) -> None:
        log.error("part of the node failed", part=name, error=str(error))
        if self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)
