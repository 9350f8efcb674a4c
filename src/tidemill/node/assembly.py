"""Assembly of one node: one function per room, in the order in which the rooms start.

    consensus → statuses → bucket → metastore → membership, topics → Kafka → joining → shapes, HTTP → captures,
    maintenance

All parts are built before the first of them starts, because they refer to each other. A part is registered on the
node's stack before it starts, so that a start that fails closes it. The stack closes the parts in reverse order.

Invariant: a node can read the catalogue before it joins. Other nodes would otherwise count on it, and assign partitions
that it cannot serve.

Invariant: a node joins only after its Kafka endpoint listens. From then on partitions belong to this node, and no other
node serves them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec
import structlog

from tidemill.base.config.config import is_authorization_on
from tidemill.base.errors import ConflictError, InvalidError
from tidemill.base.runtime import file_descriptors
from tidemill.base.runtime.loop_lag import LoopLagMonitor
from tidemill.base.runtime.tasks import open_with_retry
from tidemill.consensus.api import Consensus
from tidemill.consensus.client_base import ConsensusClientBase
from tidemill.consensus.factory import open_consensus
from tidemill.consensus.status.board import StatusBoard
from tidemill.kafka.net.listeners import Listener
from tidemill.kafka.server.server import BrokerServices, KafkaServer
from tidemill.kafka.settings import KafkaSettings
from tidemill.lake.catalogue import StorageAccess, catalogue_routes, storage_access
from tidemill.lake.format.schema import oldest_versions
from tidemill.lake.publish.stored import LakeStores
from tidemill.lake.published import LakeTables
from tidemill.lake.publisher import LakePublisher
from tidemill.lake.settings import lake_settings
from tidemill.lake.vectors.part_columns import CACHE_BYTES
from tidemill.maintenance.checkpoint.restore_horizon import RestoreHorizon
from tidemill.maintenance.checkpoint.stages import build_checkpointer
from tidemill.maintenance.checkpoint_service import CheckpointService, check_bucket
from tidemill.maintenance.job_list import build_jobs
from tidemill.maintenance.scheduler import JobContext, JobRunner, Retention
from tidemill.maintenance.topics.pipeline_holds import PipelineHolds
from tidemill.metastore.bucket_claim import BucketOwnership
from tidemill.metastore.catalogue import CaptureRow, Catalogue, PipelineRow, TopicRow
from tidemill.metastore.cluster import Cluster
from tidemill.metastore.cluster_manifest import Presence
from tidemill.metastore.factory import NODE, create_metastore, open_bucket
from tidemill.metastore.lsm.compaction.executor import open_executor
from tidemill.node.capture_runner import CaptureRunner
from tidemill.node.captures.balancer import CaptureBalancer
from tidemill.node.descriptor_reserve import DescriptorReserve
from tidemill.node.http.auth import AuthDependencies
from tidemill.node.http.server import SwitchableApp, build_application
from tidemill.node.node_context import STARTING, NodeContext, Storage
from tidemill.node.partition_assignment import CaptureAssignment
from tidemill.node.settings_from_config import (
    build_authenticator,
    kafka_listeners,
    shape_settings,
    shapes_directory,
    topic_settings,
)
from tidemill.node.shape_routing import ShapeRouting
from tidemill.node.silent_peers import SilentPeers
from tidemill.node.status_publisher import StatusPublisher
from tidemill.node.topic_binder import TopicBinder
from tidemill.objects.retrying import RetryingObjects
from tidemill.registry.http import registry_routes
from tidemill.registry.registry import LocalSchemaRegistrar, Registry
from tidemill.security.acl_cache import AclCache
from tidemill.security.sasl import Authenticator
from tidemill.security.users import Users
from tidemill.shapes.http import shape_routes
from tidemill.shapes.log.stale_files import remove_periodically
from tidemill.shapes.service import ShapeService
from tidemill.shards.api import Shard, run_on_pool
from tidemill.shards.registry import open_remap, open_shard
from tidemill.topics.local_topics import LocalTopics
from tidemill.topics.membership import Membership, NodeInfo
from tidemill.topics.partition_reader import LogPartitionReader

log = structlog.get_logger()

START_BUDGET_MS = 60_000
"""Time after which a node that hangs in its assembly counts as stuck. Next to a starting JVM on two cores the
assembly takes some seconds."""


class Security(msgspec.Struct, frozen=True):
    """Authentication and authorization of Kafka and HTTP clients. `listeners`: the Kafka listeners; the first one is
    the node's own address."""

    authenticator: Authenticator
    rulebook: AclCache
    listeners: Sequence[Listener]


class Lake(msgspec.Struct, frozen=True):
    """Tables for other engines: those of the catalogue, settings for clients of the bucket, and their publisher."""

    tables: LakeTables
    access: StorageAccess
    publisher: LakePublisher


class ClusterMember(msgspec.Struct, frozen=True):
    """Place of this node in its cluster, and the partitions that it leads there."""

    membership: Membership
    assignment: CaptureAssignment


async def assemble(node: NodeContext, app: SwitchableApp) -> None:
    """Build and start all rooms. Afterwards `app` serves them, and the node is ready."""
    await node.resolve_addresses()
    consensus = await _open_consensus(node)
    await _start_reporting(node, consensus)
    objects = await _open_bucket(node, consensus)
    storage = _build_metastore(node, consensus, objects)
    security = _build_security(node, storage)
    member = _build_membership(node, storage, security)
    topics = _build_topics(node, storage, member)
    shapes = _build_shapes(node, storage)
    registry = _build_registry(node, storage)
    lake = _build_lake(node, storage)
    routes = [
        *shape_routes(shapes, node.grants),
        *node.console_routes(),
        *(registry_routes(registry) if registry is not None else ()),
        *(catalogue_routes(lake.tables, lake.access) if lake is not None else ()),
    ]
    kafka = _build_kafka(node, storage, security, member, topics)
    binder = _build_binder(node, storage, member, topics)
    checkpoints, jobs = _build_maintenance(node, storage)
    await _start_metastore(node, storage, checkpoints)
    await _start_topics(node, member, topics)
    await _start_kafka(node, kafka, member)
    await _join_cluster(node, member)
    node.stack.push_async_callback(shapes.aclose)
    secret = shapes.settings.secret
    app.app = routing = ShapeRouting(
        build_application(routes), storage.catalogue, storage.consensus, node.instance, node.clock, node.grants, secret
    )
    shapes.set_leaders(routing.is_led_elsewhere)
    await _start_authentication(node, security, routing)
    binder.start()
    node.stack.push_async_callback(binder.aclose)
    _start_captures(node, storage, member, topics, shapes, registry)
    _start_maintenance(node, checkpoints, jobs)
    _start_lake(node, lake)
    node.waiting = ""
    node.tracker.set(node.process, 1, 1, now_ms=node.clock.now_ms())
    settings = node.config.node
    log.info("node serves", node=settings.name, http=settings.http, kafka=settings.kafka)


# stores -------------------------------------------------------------------------------------------
async def _open_consensus(node: NodeContext) -> Consensus:
    consensus = await open_with_retry(
        lambda: open_consensus(node.config.consensus_url, node.clock, node.rand),
        node.clock,
        waiting=partial(node.record_wait, "consensus"),
    )
    node.stack.push_async_callback(consensus.aclose)
    return consensus


async def _start_reporting(node: NodeContext, consensus: Consensus) -> None:
    """Publish the stage statuses of this node from now on, first of all that it starts."""
    board = node.board = StatusBoard(consensus, node.rand)
    reporting = node.published = StatusPublisher(node.process, board, node.tracker, node.budget, node.clock)
    reporting.troubles["consensus"] = consensus.trouble
    await reporting.adopt_previous_report()
    publishing = reporting.run(lambda: node.membership.superseded if node.membership is not None else None)
    node.tracker.set(node.process, 0, 1, now_ms=node.clock.now_ms(), reason=STARTING, budget_ms=START_BUDGET_MS)
    node.tasks.spawn(publishing, name="publish-marks")
    reporting.facts["descriptors"] = file_descriptors.descriptor_facts
    reserve = DescriptorReserve()
    reporting.troubles["descriptors"] = reserve.trouble
    node.tasks.spawn(reserve.run(), name="spare-descriptors")


async def _open_bucket(node: NodeContext, consensus: Consensus) -> RetryingObjects:
    objects = await open_with_retry(
        lambda: open_bucket(consensus, node.config.objects_url, node.clock, node.rand),
        node.clock,
        waiting=partial(node.record_wait, "objects"),
    )
    node.stack.push_async_callback(objects.aclose)
    node.reporting.troubles["objects"] = objects.trouble
    node.reporting.notices["objects"] = objects.recent_fault
    node.tasks.spawn(objects.probe_while_suspected(), name="prove-objects")
    await node.start_part("the bucket check", lambda: check_bucket(consensus, objects))
    return objects


# metastore ----------------------------------------------------------------------------------------
def _build_metastore(node: NodeContext, consensus: Consensus, objects: RetryingObjects) -> Storage:
    config, clock, rand = node.config, node.clock, node.rand
    settings = msgspec.structs.replace(NODE, persist_interval_s=config.metastore.persist_interval_s)
    merger = open_executor(objects, config.objects_url, settings.options, clock)
    metastore = create_metastore(
        consensus,
        objects,
        clock,
        rand,
        domains=config.metastore.domains,
        settings=settings,
        holder=node.instance,
        tracker=node.tracker,
        merger=merger,
    )
    return Storage(consensus, objects, metastore, Catalogue(metastore, clock, rand), merger)


async def _start_metastore(node: NodeContext, storage: Storage, checkpoints: CheckpointService) -> None:
    metastore, catalogue = storage.metastore, storage.catalogue
    node.stack.push_async_callback(storage.merger.aclose)
    node.stack.push_async_callback(metastore.aclose)
    node.stack.push_async_callback(checkpoints.withdraw_presence)
    await node.start_part("the metastore", metastore.start)
    _claim_ownership(node, storage, await metastore.cluster())
    node.reporting.troubles["metastore"] = metastore.trouble
    await node.start_part("the catalogue", lambda: catalogue.list(TopicRow))
    node.stores = storage
    await node.start_part("the configured topics", lambda: _create_topics(node, catalogue))


def _claim_ownership(node: NodeContext, storage: Storage, cluster: Cluster) -> None:
    """Ensure that from here on this node acknowledges and deletes only what its cluster may (see `claim`)."""
    objects, consensus = storage.objects, storage.consensus
    owner = BucketOwnership(objects, node.clock, cluster, interval_s=node.config.metastore.alive_interval_s)
    node.reporting.troubles["objects"] = lambda: objects.trouble() or owner.trouble()
    node.tasks.spawn(owner.run(), name="ownership")
    objects.may_delete = owner.check_may_delete
    if isinstance(consensus, ConsensusClientBase):
        consensus.owner = owner


async def _create_topics(node: NodeContext, catalogue: Catalogue) -> None:
    """Create the configured topics that do not exist."""
    for name, section in node.config.topics.items():
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


# cluster and topics -------------------------------------------------------------------------------
def _build_membership(node: NodeContext, storage: Storage, security: Security) -> ClusterMember:
    config, clock = node.config, node.clock
    listener, *more_listeners = security.listeners
    named = {each.name: (each.advertised_host, each.advertised_port) for each in more_listeners}
    info = NodeInfo(listener.advertised_host, listener.advertised_port, node.url, named, tuple(config.capture))
    membership = node.membership = Membership(
        storage.consensus, config.node.name, info, clock, node.rand, tracker=node.tracker
    )
    assignment = CaptureAssignment(membership, storage.consensus, storage.catalogue, node.tracker, clock)
    return ClusterMember(membership, assignment)


async def _join_cluster(node: NodeContext, member: ClusterMember) -> None:
    await node.start_part("joining the cluster", member.membership.join)
    assert node.board is not None
    peers = node.peers = SilentPeers(member.membership, node.board, node.clock)
    node.tasks.spawn(peers.run(), name="peers")


def _build_topics(node: NodeContext, storage: Storage, member: ClusterMember) -> LocalTopics:
    clock, rand, budget = node.clock, node.rand, node.budget
    topics = LocalTopics(
        storage.consensus, storage.objects, storage.catalogue, clock=clock, rand=rand, assignment=member.assignment,
        settings=topic_settings(node.config.storage), tracker=node.tracker, metastore=storage.metastore,
    )  # fmt: skip
    reconciliation = topics.reconciliation
    node.reporting.facts["l1"] = reconciliation.figures if reconciliation is not None else dict
    horizon = RestoreHorizon(storage.metastore)
    topics.retainer.holds = PipelineHolds(storage.consensus, storage.catalogue, horizon, clock, rand)
    memory = topics.memory
    budget.register_share("topics cache", memory.cache[1], lambda: memory.cache[0])
    budget.register_share("topics read-ahead", memory.read_ahead[1], lambda: memory.read_ahead[0])
    budget.register_share("topics partitions", 0, lambda: memory.partitions_bytes)
    budget.register_share("topics uploads", memory.staged[1], lambda: memory.staged[0])
    return topics


async def _start_topics(node: NodeContext, member: ClusterMember, topics: LocalTopics) -> None:
    """Start the membership without joining, the partition assignment, and the topics."""
    membership, assignment = member.membership, member.assignment
    node.stack.push_async_callback(membership.aclose)
    await node.start_part("membership", lambda: membership.start(join=False))
    node.stack.push_async_callback(assignment.aclose)
    await node.start_part("the partition assignment", assignment.start)
    node.stack.push_async_callback(topics.aclose)
    await node.start_part("the topics", topics.start)


def _build_binder(node: NodeContext, storage: Storage, member: ClusterMember, topics: LocalTopics) -> TopicBinder:
    binder = TopicBinder(
        topics,
        lambda: LogPartitionReader(storage.consensus, storage.objects),
        lambda name: open_remap(storage.consensus, node.clock, node.rand, name),
        node.clock,
        node.tracker,
    )
    member.assignment.on_change(binder.recheck_all_topics)
    return binder


# Kafka and security -------------------------------------------------------------------------------
def _build_security(node: NodeContext, storage: Storage) -> Security:
    authenticator = build_authenticator(node.config, Users(storage.metastore, node.clock), node.clock, node.rand)
    rulebook = AclCache(storage.metastore, node.clock, node.config.security.super_users)
    return Security(authenticator, rulebook, kafka_listeners(node.config, authenticator, node.advertised))


def _build_kafka(
    node: NodeContext, storage: Storage, security: Security, member: ClusterMember, topics: LocalTopics
) -> KafkaServer:
    return KafkaServer(
        BrokerServices(
            topics=topics,
            catalogue=storage.catalogue,
            consensus=storage.consensus,
            nodes=member.membership,
            clock=node.clock,
            rand=node.rand,
            name=node.config.node.name,
        ),
        security.listeners,
        rulebook=security.rulebook if is_authorization_on(node.config) else None,
        settings=KafkaSettings(node.config.kafka),
        tracker=node.tracker,
        memory=node.budget,
    )


async def _start_kafka(node: NodeContext, kafka: KafkaServer, member: ClusterMember) -> None:
    node.stack.push_async_callback(kafka.aclose)
    await node.start_part("Kafka", lambda: kafka.start(member.membership.node_id))


async def _start_authentication(node: NodeContext, security: Security, routing: ShapeRouting) -> None:
    """Let HTTP requests in with the users and rules of the cluster, if they have to authenticate."""
    if node.guard is None:
        return

    async def prepare() -> None:
        if security.authenticator.tokens is not None:
            await security.authenticator.tokens.start()
        await security.rulebook.refresh()

    await node.start_part("HTTP authentication", prepare)
    if not is_authorization_on(node.config):
        node.spawn_supervised("http:rules", security.rulebook.run)
    section = node.config.security
    node.guard.parties = AuthDependencies(
        security.authenticator,
        security.rulebook if section.authorize is not False else None,
        routing.topics_of,
        section.oauth.principal_claim,
    )


# shapes and registry ------------------------------------------------------------------------------
def _build_shapes(node: NodeContext, storage: Storage) -> ShapeService:
    config = node.config
    shapes = ShapeService(node.clock, node.rand, node.tracker, shape_settings(config.shapes, shapes_directory(config)))
    node.reporting.facts["shapes"] = shapes.facts
    node.budget.register_share("shapes", shapes.budget.limit_bytes, lambda: shapes.budget.used_bytes)
    pool = ThreadPoolExecutor(1, thread_name_prefix="shape-shards")  # decodes and sums shard contents for shapes
    node.stack.callback(pool.shutdown, wait=False, cancel_futures=True)

    async def open_named_shard(name: str) -> Shard:
        return await open_shard(storage.consensus, storage.objects, node.clock, node.rand, name, cpu=run_on_pool(pool))

    async def cluster_uuid() -> str:
        return (await storage.metastore.cluster()).uuid

    shapes.add_shards(open_named_shard, cluster_uuid)
    return shapes


def _build_registry(node: NodeContext, storage: Storage) -> Registry | None:
    """Return the schema registry, or None if it is not enabled."""
    section = node.config.registry
    if not section.enabled:
        return None
    pool = ThreadPoolExecutor(1, thread_name_prefix="registry")  # parses and compares schemas
    node.stack.callback(pool.shutdown, wait=False, cancel_futures=True)
    registry = Registry(storage.metastore, node.clock, node.rand, run_on_pool(pool), section)
    node.reporting.facts["registry"] = registry.facts
    return registry


# lake ---------------------------------------------------------------------------------------------
def _build_lake(node: NodeContext, storage: Storage) -> Lake | None:
    """Return the tables for other engines, or None if they are not published."""
    section = node.config.lake
    if not section.enabled:
        return None
    settings = lake_settings(section, node.config.objects_url)
    pool = ThreadPoolExecutor(1, thread_name_prefix="lake")  # decodes parts and encodes manifests
    node.stack.callback(pool.shutdown, wait=False, cancel_futures=True)
    stores = LakeStores(storage.consensus, storage.objects, node.clock, node.rand, settings, run_on_pool(pool))
    keys = {"access_key_id": section.access_key_id, "secret_access_key": section.secret_access_key}
    given = keys if section.credentials == "static-read" else {}
    access = storage_access(node.config.objects_url, os.environ, settings.base, **given)

    async def pipelines() -> Sequence[PipelineRow]:
        return await storage.catalogue.list(PipelineRow)

    publisher = LakePublisher(stores, pipelines, node.tracker, holder=node.instance)
    tables = LakeTables(stores, pipelines)
    node.budget.register_share("lake", 2 * CACHE_BYTES, lambda: publisher.memory_bytes + tables.memory_bytes)
    return Lake(tables, access, publisher)


def _start_lake(node: NodeContext, lake: Lake | None) -> None:
    if lake is not None:
        node.reporting.facts["lake"] = lake.publisher.facts
        node.spawn_supervised("lake", lake.publisher.run)


# captures -----------------------------------------------------------------------------------------
def _start_captures(
    node: NodeContext, storage: Storage, member: ClusterMember, topics: LocalTopics, shapes: ShapeService,
    registry: Registry | None,
) -> None:  # fmt: skip
    """Run the configured captures whenever it is this node's turn."""
    configured = node.config.capture

    def withhold(captures: Collection[str]) -> None:
        member.membership.set_captures(tuple(name for name in configured if name not in captures))

    balancer = CaptureBalancer(node.instance, member.assignment.wait_for_next_poll, node.clock, withhold)
    node.reporting.facts["spread"] = balancer.facts
    if shapes.settings.directory is not None:

        async def tap_names(capture: str) -> Collection[str]:
            row = await storage.catalogue.get(CaptureRow, capture)
            return row.taps if row is not None else ()

        node.spawn_supervised("shapes:files", partial(remove_periodically, shapes.settings.directory, tap_names))
    schemas = LocalSchemaRegistrar(registry) if registry is not None else None
    captures = CaptureRunner(node, storage, topics, shapes, schemas, balancer)
    for name, section in configured.items():
        body = captures.capture_body(name, section)
        node.spawn_supervised(f"capture:{name}", partial(captures.run_while_elected, name, body))


# maintenance --------------------------------------------------------------------------------------
def _build_maintenance(node: NodeContext, storage: Storage) -> tuple[CheckpointService, JobRunner]:
    config, clock, rand = node.config, node.clock, node.rand
    alive_interval_s = config.metastore.alive_interval_s
    checkpoints = CheckpointService(
        storage.metastore,
        Presence(storage.objects, clock, rand, config.node.name, interval_s=alive_interval_s),
        build_checkpointer(
            storage.consensus, storage.objects, storage.metastore, clock, holder=node.instance,
            interval_s=config.metastore.checkpoint_interval_s, tracker=node.tracker,
        ),
        alive_interval_s=alive_interval_s,
    )  # fmt: skip
    retention = Retention(**config.retention.model_dump(exclude={"dead_letters_s"}))
    pool = ThreadPoolExecutor(1, thread_name_prefix="keeper")
    node.stack.callback(pool.shutdown, wait=False)
    oldest = oldest_versions(config.lake)
    context = JobContext(
        storage.consensus, storage.objects, storage.metastore, clock, rand, retention, run_on_pool(pool), oldest
    )
    jobs = build_jobs(context, node.tracker)
    return checkpoints, JobRunner(jobs, storage.consensus, clock, holder=node.instance, tracker=node.tracker)


def _start_maintenance(node: NodeContext, checkpoints: CheckpointService, jobs: JobRunner) -> None:
    facts = node.reporting.facts
    facts["checkpoint"] = checkpoints.facts
    node.spawn_supervised("keeper", checkpoints.run)
    facts["keeper"] = jobs.facts
    node.tasks.spawn(jobs.run(), name="keeper-jobs")
    loop_lag = LoopLagMonitor(node.clock)
    facts["loop"] = loop_lag.facts
    node.tasks.spawn(loop_lag.run(), name="loop-watch")
