"""Captures of this node: each runs while this node holds its lease, and reports its facts, stages and health.

The balancer (`captures`) decides when it is this node's turn; the lease decides which node captures. Shapes of the
database are served where it is captured, and released with it.
"""

from __future__ import annotations

from functools import partial

from tidemill.base.config.sections import CaptureSection
from tidemill.base.runtime.tasks import run_unit
from tidemill.capture.config import CaptureConfig
from tidemill.consensus.api import Lease
from tidemill.consensus.leader_election import Body, LeaseRequest, run_while_leading
from tidemill.node.captures.balancer import CaptureBalancer, node_of
from tidemill.node.node_context import NodeContext, Storage
from tidemill.registry.registry import LocalSchemaRegistrar
from tidemill.shapes.service import ShapeService
from tidemill.shards.registry import open_remap
from tidemill.topics.local_topics import LocalTopics


class CaptureRunner:
    """Runner of the configured captures of one node."""

    def __init__(
        self,
        node: NodeContext,
        storage: Storage,
        topics: LocalTopics,
        shapes: ShapeService,
        schemas: LocalSchemaRegistrar | None,
        balancer: CaptureBalancer,
    ) -> None:
        self._node = node
        self._storage = storage
        self._topics = topics
        self._shapes = shapes
        self._schemas = schemas
        self._balancer = balancer

    async def run_while_elected(self, capture: str, body: Body) -> None:
        """Capture whenever it is this node's turn, until another node should."""
        node = self._node
        while True:
            await self._balancer.wait_for_turn(capture)
            tries = iter((True, True))  # one more try if an earlier process of this node left the lease behind
            await run_while_leading(
                self._storage.consensus, LeaseRequest(f"capture/{capture}", node.instance, node.url.encode()),
                self._balancer.with_handover(capture, body),
                own_earlier_life=lambda holder: node_of(holder) == node_of(node.instance),
                wanted=partial(next, tries, False),
            )  # fmt: skip

    def capture_body(self, name: str, section: CaptureSection) -> Body:
        """Return the work of the leader of this capture: it runs the capture, and restarts it after a failure."""
        from tidemill.capture.session.capture import Capture  # psycopg is loaded only where something is captured

        node = self._node
        settings = CaptureConfig(
            name, section.dsn, tuple(section.tables), linger_ms=section.linger_ms,
            binding_interval_ms=section.binding_interval_ms,
            identity=section.identity, manual=section.manual,
            failover=section.failover, envelope=section.envelope, cleanup=section.cleanup,
            copy_again=section.copy_again, copy_again_pause_s=section.copy_again_pause_s,
            copy_again_max_mb=section.copy_again_max_mb,
            copy_connections=section.copy_connections, copy_rows_per_s=section.copy_rows_per_s,
            copy_aside_after_s=section.copy_aside_after_s, copy_aside_max_mb=section.copy_aside_max_mb,
        )  # fmt: skip

        async def run() -> None:
            remap = await open_remap(self._storage.consensus, node.clock, node.rand, settings.remap_name)
            capture = Capture(
                settings, topics=self._topics, catalogue=self._storage.catalogue, remap=remap,
                clock=node.clock, rand=node.rand, tracker=node.tracker, schemas=self._schemas,
            )  # fmt: skip
            node.reporting.facts[f"capture:{name}"] = capture.facts
            node.reporting.stages[settings.remap_name] = capture.stages
            self._balancer.health[name] = capture.health
            capture.add_tap(self._shapes.add_database(name, section.dsn, capture.relations, capture))
            try:
                await capture.run()
            finally:
                del node.reporting.facts[f"capture:{name}"]
                del node.reporting.stages[settings.remap_name]
                del self._balancer.health[name]
                await capture.aclose()
                # Another node may continue the capture, and the shapes served here would get no more changes.
                await self._shapes.release_database(name)

        async def led(_: Lease) -> None:
            await run_unit(settings.mark, run, tracker=node.tracker, clock=node.clock)

        return led
