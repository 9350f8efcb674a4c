"""One node, assembled from a configuration.

Start order: HTTP (health and status) → consensus → stage statuses → bucket → metastore → membership and topics → Kafka
→ shapes → captures and binders. HTTP comes first, so that a node whose stores are unavailable can report it. A client
that can connect gets an answer; parts that are not ready answer "retry". Stop order is the reverse.

Units of failure: each capture and each housekeeping task is restarted by `base.tasks.run_unit`. The node itself ends
only when HTTP or its assembly cannot continue, or when another process took its name.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial

import msgspec
import structlog
from starlette.routing import BaseRoute

from tidemill.base.address import Address, strip_brackets
from tidemill.base.clock import Clock, Rand, SystemClock
from tidemill.base.config.config import Config, is_authorization_on
from tidemill.base.errors import ClusterReplacedError, ConflictError, InvalidError, UnavailableError
from tidemill.base.runtime import file_descriptors
from tidemill.base.runtime.loop_lag import LoopLagMonitor
from tidemill.base.runtime.memory_budget import MemoryBudget
from tidemill.base.runtime.tasks import Tasks, error_sentence, open_with_retry, run_unit
from tidemill.base.status.status import StatusReport, StatusTracker
from tidemill.consensus.api import Consensus
from tidemill.consensus.client_base import ConsensusClientBase
from tidemill.consensus.factory import open_consensus
from tidemill.consensus.status.board import StatusBoard
from tidemill.kafka.server.server import KafkaServer
from tidemill.maintenance.checkpoint.restore_horizon import RestoreHorizon
from tidemill.maintenance.checkpoint_service import CheckpointService, check_bucket
from tidemill.maintenance.job_list import build_jobs
from tidemill.maintenance.scheduler import JobContext, JobRunner, Retention
from tidemill.maintenance.topics.pipeline_holds import PipelineHolds
from tidemill.metastore.bucket_claim import BucketOwnership
from tidemill.metastore.catalogue import CaptureRow, Catalogue, TopicRow
from tidemill.metastore.cluster import Cluster
from tidemill.metastore.factory import NODE, create_metastore
from tidemill.metastore.lsm.compaction.executor import open_executor
from tidemill.node.capture_runner import CaptureRunner
from tidemill.node.captures.balancer import CaptureBalancer
from tidemill.node.descriptor_reserve import DescriptorReserve
from tidemill.node.http.auth import AuthDependencies, AuthMiddleware
from tidemill.node.http.server import HttpServer, SwitchableApp, build_application, starting_routes
from tidemill.node.partition_assignment import CaptureAssignment
from tidemill.node.settings_from_config import (
    build_authenticator,
    build_grants,
    http_limits,
    kafka_listeners,
    kafka_settings,
    registry_settings,
    shape_settings,
    shapes_directory,
    tls_settings,
    topic_settings,
)
from tidemill.node.shape_routing import ShapeRouting
from tidemill.node.silent_peers import SilentPeers
from tidemill.node.status_publisher import LEAVE_S, StatusPublisher
from tidemill.node.topic_binder import TopicBinder
from tidemill.objects.factory import open_objects
from tidemill.objects.retrying import RetryingObjects
from tidemill.registry.http import registry_routes
from tidemill.registry.registry import LocalSchemaRegistrar, Registry
from tidemill.security.acl_cache import AclCache
from tidemill.security.sasl import Authenticator
from tidemill.security.users import Users
from tidemill.shapes.http import shape_routes
from tidemill.shapes.log.stale_files import remove_periodically as watch_left
from tidemill.shapes.service import ShapeService
from tidemill.shards.api import Shard, run_on_pool
from tidemill.shards.registry import open_remap, open_shard
from tidemill.topics.local_topics import LocalTopics
from tidemill.topics.membership import Membership, NodeInfo
from tidemill.topics.partition_reader import LogPartitionReader

log = structlog.get_logger()


Reports = Callable[[], Awaitable[Sequence[StatusReport]]]
MoreRoutes = Callable[[Reports, Callable[[], str], Callable[[], Sequence[str]], Clock], Sequence[BaseRoute]]
"""Factory of routes to serve next to the shapes, from (function that reads all reports, function that returns why
the node is not ready or "", function that returns problems of a ready node, clock)."""

STARTING = "the node is starting."
HTTP_CERTIFICATES = "http:certificates"
START_BUDGET_MS = 60_000
"""Time after which a node that hangs in its assembly counts as stuck. Next to a starting JVM on two cores the
assembly takes some seconds."""


class Node:
    """Node of one process: its parts, their start order, and their end."""

    def __init__(
        self, config: Config, more_routes: MoreRoutes, clock: Clock | None = None, rand: Rand | None = None
    ) -> None:
        self._config = config
        self._more_routes = more_routes
        self._clock = clock or SystemClock()
        self._rand = rand or Rand()
        self._marks = StatusTracker(int(config.freshness.budget_s * 1000))
        self._budget = MemoryBudget()
        self._board: StatusBoard | None = None
        self._reporting: StatusPublisher | None = None
        self._waiting = STARTING
        self._tasks = Tasks(self._task_failed)
        self._failed: asyncio.Future[None] | None = None
        self._guard: AuthMiddleware | None = None
        self._grants = build_grants(config, self._clock)
        self._schemas: LocalSchemaRegistrar | None = None
        self._membership: Membership | None = None
        self._peers: SilentPeers | None = None
        self._process = f"node:{config.node.name}"
        self._instance = f"{config.node.name}/{os.getpid()}/{self._rand.nonce()[:8]}"

    def not_ready_reason(self) -> str:
        """Return why this node is not ready, in a sentence, or ""."""
        asked = self._reporting.troubles.values() if self._reporting is not None else ()
        return self._waiting or next((found for ask in asked if (found := ask())), "")

    def current_problems(self) -> Sequence[str]:
        """Return the problems of this process although it is ready, and which other nodes are silent: a sentence
        each."""
        own = self._reporting.current_problems() if self._reporting is not None else []
        return [*own, *self._peers.silent_peer_lines()] if self._peers is not None else own

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set or the node as a whole fails. Raises the error that failed."""
        self._failed = asyncio.get_running_loop().create_future()
        file_descriptors.raise_limit()
        early = build_application(
            [
                *self._more_routes(self._read_reports, self.not_ready_reason, self.current_problems, self._clock),
                *starting_routes(STARTING),
            ]
        )
        door = SwitchableApp(early)
        host, port = Address.parse(self._config.node.http)
        section = self._config.http
        if section.authenticate:
            self._guard = AuthMiddleware(
                door,
                self._clock,
                within_tls=section.tls,
                grants=self._grants,
            )
        http = HttpServer(
            self._guard or door,
            host,
            port,
            on_failure=self._task_failed,
            limits=http_limits(section),
            tls=tls_settings(self._config) if section.tls else None,
            origins=self._config.shapes.allowed_origins,
        )
        async with AsyncExitStack() as stack:
            await http.start()
            stack.push_async_callback(http.aclose)
            if section.tls:
                heal = partial(self._marks.clear_failure, HTTP_CERTIFICATES)
                self._spawn_kept(HTTP_CERTIFICATES, partial(http.watch_certificates, heal))
            self._tasks.spawn(self._assemble(stack, door), name="assembly")
            try:
                await self._wait_until_stopped(stop)
            except ClusterReplacedError as error:
                if self._reporting is not None:  # no supervisor restarts this node: its last report gives the reason
                    await self._reporting.end(error_sentence(error))
                raise
            finally:
                door.app = early
                await self._leave_membership()
                await self._tasks.aclose()
            if self._reporting is not None:
                await self._reporting.publish_leaving_report()

    def _console_routes(self) -> Sequence[BaseRoute]:
        return self._more_routes(self._read_reports, self.not_ready_reason, self.current_problems, self._clock)

    async def _leave_membership(self) -> None:
        """Leave the membership before the rest of this node ends, so that other nodes already serve its partitions."""
        if self._membership is not None:
            try:
                async with asyncio.timeout(LEAVE_S):
                    await self._membership.leave_cluster()
            except TimeoutError:
                log.info("leave not announced to other nodes: consensus does not answer")

    async def _read_reports(self) -> Sequence[StatusReport]:
        if self._board is None:
            raise UnavailableError(self._waiting or STARTING)
        return await self._board.reports_or_raise(self.not_ready_reason)

    def _record_wait(self, what: str, sentence: str) -> None:
        """Record what the node waits for. `what` is a stage of this process: the status of its store, as shown in
        the reports and by /readyz."""
        self._waiting = f"waiting for {what}: {sentence}" if sentence else STARTING
        self._marks.set_foundation(what, sentence, now_ms=self._clock.now_ms())

    async def _start_part(self, part: str, start: Callable[[], Awaitable[object]]) -> None:
        """Start one part. If a store becomes unavailable, wait for it, as at the start of the node: every `start`
        may be called again after UnavailableError or UnknownOutcomeError."""
        await open_with_retry(start, self._clock, waiting=partial(self._record_start_failure, part))

    def _record_start_failure(self, part: str, sentence: str) -> None:
        """Record why a part cannot start under the node's own stage, blocked by the store that reports a problem, if
        there is one."""
        assert self._reporting is not None
        self._waiting = f"{part} cannot start: {sentence}" if sentence else STARTING
        if not sentence:
            self._marks.clear_failure(self._process)
            return
        store = next((name for name, ask in self._reporting.troubles.items() if ask()), "")
        holder = f"{store}@{self._process}" if store else ""
        self._marks.fail(self._process, self._waiting, now_ms=self._clock.now_ms(), held_by=holder)

    async def _assemble(self, stack: AsyncExitStack, door: SwitchableApp) -> None:
        config, clock, rand = self._config, self._clock, self._rand
        consensus = await open_with_retry(
            lambda: open_consensus(config.consensus_url, clock, rand),
            clock,
            waiting=partial(self._record_wait, "consensus"),
        )
        stack.push_async_callback(consensus.aclose)
        board = self._board = StatusBoard(consensus, rand)
        reporting = self._reporting = StatusPublisher(self._process, board, self._marks, self._budget, clock)
        reporting.troubles["consensus"] = consensus.trouble
        await reporting.adopt_previous_report()
        membership_of: list[Membership] = []
        telling = reporting.run(lambda: membership_of[0].superseded if membership_of else None)
        self._marks.set(self._process, 0, 1, now_ms=clock.now_ms(), reason=STARTING, budget_ms=START_BUDGET_MS)
        self._tasks.spawn(telling, name="publish-marks")
        reporting.facts["descriptors"] = file_descriptors.descriptor_facts
        spare = DescriptorReserve()
        reporting.troubles["descriptors"] = spare.trouble
        self._tasks.spawn(spare.run(), name="spare-descriptors")
        objects = await open_with_retry(
            lambda: open_objects(config.objects_url, clock, rand), clock, waiting=partial(self._record_wait, "objects")
        )
        stack.push_async_callback(objects.aclose)
        reporting.troubles["objects"] = objects.trouble
        reporting.notices["objects"] = objects.recent_fault
        self._tasks.spawn(objects.probe_while_suspected(), name="prove-objects")
        await self._start_part("the bucket check", lambda: check_bucket(consensus, objects))
        settings = msgspec.structs.replace(NODE, persist_interval_s=config.metastore.persist_interval_s)
        merger = open_executor(objects, config.objects_url, settings.options, clock)
        metastore = create_metastore(
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
        authenticator = build_authenticator(config, Users(metastore, clock), clock, rand)
        listener, *more_listeners = kafka_listeners(config, authenticator)
        http = Address.parse(config.node.http)
        scheme = "https" if config.http.tls else "http"
        url = f"{scheme}://{Address(strip_brackets(config.node.advertised_host) or http.host, http.port)}"
        told = {each.name: (each.advertised_host, each.advertised_port) for each in more_listeners}
        info = NodeInfo(listener.advertised_host, listener.advertised_port, url, told, tuple(config.capture))
        membership = Membership(consensus, config.node.name, info, clock, rand, tracker=self._marks)
        membership_of.append(membership)
        self._membership = membership
        assignment = CaptureAssignment(membership, consensus, catalogue, self._marks, clock)
        topics = LocalTopics(
            consensus, objects, catalogue, clock=clock, rand=rand, assignment=assignment,
            settings=topic_settings(config.storage), tracker=self._marks, metastore=metastore,
        )  # fmt: skip
        reporting.facts["l1"] = topics.l1_figures
        topics.set_retention_holds(PipelineHolds(consensus, catalogue, RestoreHorizon(metastore), clock, rand))
        shapes = ShapeService(clock, rand, self._marks, shape_settings(config.shapes, shapes_directory(config)))
        reporting.facts["shapes"] = shapes.facts
        self._budget.register_share("shapes", shapes.budget.limit_bytes, lambda: shapes.budget.used_bytes)
        self._budget.register_share("topics cache", topics.cache_usage[1], lambda: topics.cache_usage[0])
        self._budget.register_share("topics read-ahead", topics.read_ahead_usage[1], lambda: topics.read_ahead_usage[0])
        self._budget.register_share("topics partitions", 0, lambda: topics.partitions_bytes)
        self._budget.register_share("topics uploads", topics.staged_usage[1], lambda: topics.staged_usage[0])
        pool = ThreadPoolExecutor(1, thread_name_prefix="shape-shards")  # decodes and sums shard contents for shapes
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)

        async def shard(name: str) -> Shard:
            return await open_shard(consensus, objects, clock, rand, name, cpu=run_on_pool(pool))

        async def cluster() -> str:
            return (await metastore.cluster()).uuid

        shapes.add_shards(shard, cluster)
        routes = [
            *shape_routes(shapes, self._grants),
            *self._more_routes(self._read_reports, self.not_ready_reason, self.current_problems, clock),
        ]
        if config.registry.enabled:
            reading = ThreadPoolExecutor(1, thread_name_prefix="registry")  # parses and compares schemas
            stack.callback(reading.shutdown, wait=False, cancel_futures=True)
            registry = Registry(metastore, clock, rand, run_on_pool(reading), registry_settings(config.registry))
            reporting.facts["registry"] = registry.facts
            routes += registry_routes(registry)
            self._schemas = LocalSchemaRegistrar(registry)
        app = build_application(routes)
        rulebook = AclCache(metastore, clock, config.security.super_users)
        kafka = KafkaServer(
            topics=topics,
            catalogue=catalogue,
            consensus=consensus,
            nodes=membership,
            clock=clock,
            rand=rand,
            name=config.node.name,
            node_id=0,
            host=listener.host,
            port=listener.port,
            advertised_host=listener.advertised_host,
            advertised_port=listener.advertised_port,
            gate=listener.gate,
            rulebook=rulebook if is_authorization_on(config) else None,
            listeners=more_listeners,
            settings=kafka_settings(config),
            tracker=self._marks,
            memory=self._budget,
        )
        binder = TopicBinder(
            topics,
            lambda: LogPartitionReader(consensus, objects),
            lambda name: open_remap(consensus, clock, rand, name),
            clock,
            self._marks,
        )
        assignment.on_change(binder.recheck_all_topics)
        keeping = CheckpointService(
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
        retention = Retention(**config.retention.model_dump())
        merging = ThreadPoolExecutor(1, thread_name_prefix="keeper")
        stack.callback(merging.shutdown, wait=False)
        grounds = JobContext(consensus, objects, metastore, clock, rand, retention, run_on_pool(merging))
        upkeep = JobRunner(
            build_jobs(grounds, self._marks), consensus, clock, holder=self._instance, tracker=self._marks
        )  # fmt: skip
        stack.push_async_callback(merger.aclose)
        stack.push_async_callback(metastore.aclose)
        stack.push_async_callback(keeping.withdraw_presence)
        await self._start_part("the metastore", metastore.start)
        self._claim_ownership(consensus, objects, await metastore.cluster())
        reporting.troubles["metastore"] = metastore.trouble
        # Invariant: a node can read the catalogue before it joins. Other nodes would otherwise count on it, and assign
        # partitions that it cannot serve.
        await self._start_part("the catalogue", lambda: catalogue.list(TopicRow))
        await self._start_part("the configured topics", lambda: self._create_topics(catalogue))
        stack.push_async_callback(membership.aclose)
        await self._start_part("membership", lambda: membership.start(join=False))
        stack.push_async_callback(assignment.aclose)
        await self._start_part("the partition assignment", assignment.start)
        stack.push_async_callback(topics.aclose)
        await self._start_part("the topics", topics.start)
        stack.push_async_callback(kafka.aclose)
        await self._start_part("Kafka", lambda: kafka.start(membership.node_id))
        # Invariant: a node joins only after its Kafka endpoint listens. From now on partitions belong to this node, and
        # no other node serves them.
        await self._start_part("joining the cluster", membership.join)
        self._peers = SilentPeers(membership, board, clock)
        self._tasks.spawn(self._peers.run(), name="peers")
        stack.push_async_callback(shapes.aclose)
        door.app = routing = ShapeRouting(app, catalogue, consensus, self._instance, clock, self._grants)
        if self._guard is not None:
            await self._start_part("HTTP authentication", partial(_prepare_authentication, authenticator, rulebook))
            if not is_authorization_on(config):
                self._spawn_kept("http:rules", rulebook.run)
            asked = config.security.authorize is not False
            self._guard.parties = AuthDependencies(
                authenticator,
                rulebook if asked else None,
                routing.topics_of,
                config.security.oauth.principal_claim,
            )
        binder.start()
        stack.push_async_callback(binder.aclose)

        def withhold(captures: Collection[str]) -> None:
            membership.set_captures(tuple(name for name in config.capture if name not in captures))

        spread = CaptureBalancer(self._instance, assignment.wait_for_next_poll, clock, withhold)
        reporting.facts["spread"] = spread.facts
        if shapes.settings.directory is not None:

            async def named(capture: str) -> Collection[str]:
                row = await catalogue.get(CaptureRow, capture)
                return row.taps if row is not None else ()

            self._spawn_kept("shapes:files", partial(watch_left, shapes.settings.directory, named))
        captures = CaptureRunner(
            spread, topics, catalogue, consensus, shapes, self._schemas, reporting, self._marks, clock, rand,
            instance=self._instance, url=url,
        )  # fmt: skip
        for name, section in config.capture.items():
            body = captures.capture_body(name, section)
            self._spawn_kept(f"capture:{name}", partial(captures.run_while_elected, name, body))
        reporting.facts["checkpoint"] = keeping.facts
        self._spawn_kept("keeper", keeping.run)
        reporting.facts["keeper"] = upkeep.facts
        self._tasks.spawn(upkeep.run(), name="keeper-jobs")
        watch = LoopLagMonitor(clock)
        reporting.facts["loop"] = watch.facts
        self._tasks.spawn(watch.run(), name="loop-watch")
        self._waiting = ""
        self._marks.set(self._process, 1, 1, now_ms=clock.now_ms())
        log.info("node serves", node=config.node.name, http=config.node.http, kafka=config.node.kafka)

    def _claim_ownership(self, consensus: Consensus, objects: RetryingObjects, cluster: Cluster) -> None:
        """Ensure that from here on this node acknowledges and deletes only what its cluster may (see `claim`)."""
        assert self._reporting is not None
        owner = BucketOwnership(objects, self._clock, cluster, interval_s=self._config.metastore.alive_interval_s)
        self._reporting.troubles["objects"] = lambda: objects.trouble() or owner.trouble()
        self._tasks.spawn(owner.run(), name="ownership")
        objects.may_delete = owner.check_may_delete
        if isinstance(consensus, ConsensusClientBase):
            consensus.owner = owner

    def _spawn_kept(self, mark: str, body: Callable[[], Awaitable[None]]) -> None:
        self._tasks.spawn(run_unit(mark, body, tracker=self._marks, clock=self._clock), name=mark)

    async def _create_topics(self, catalogue: Catalogue) -> None:
        for name, section in self._config.topics.items():
            try:
                await catalogue.create_topic(name, section.partitions, config=section.configs)
            except ConflictError as conflict:
                current = conflict.current
                # A topic with more partitions has grown since.
                if isinstance(current, TopicRow) and current.partitions < section.partitions:
                    raise InvalidError(
                        f"the topic exists with fewer partitions: topics.{name}.partitions={section.partitions}"
                        f" existing={current.partitions}.",
                        fix=f"Set topics.{name}.partitions = {current.partitions}, or add partitions:"
                        f" tidemill topic alter {name} --partitions {section.partitions}",
                    ) from conflict

    async def _wait_until_stopped(self, stop: asyncio.Event) -> None:
        assert self._failed is not None
        async with Tasks(lambda *_: None) as tasks:
            stopping = tasks.spawn(stop.wait(), name="until-stop")  # never fails
            await asyncio.wait([stopping, self._failed], return_when=asyncio.FIRST_COMPLETED)
        if self._failed.done():
            self._failed.result()

    def _task_failed(self, name: str, error: BaseException) -> None:
        log.error("part of the node failed", part=name, error=str(error))
        if self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)


async def _prepare_authentication(authenticator: Authenticator, rulebook: AclCache) -> None:
    if authenticator.tokens is not None:
        await authenticator.tokens.start()
    await rulebook.refresh()
