"""Captures of this node: each runs while this node holds its lease, and reports its facts, stages and health.

The balancer (`captures`) decides when it is this node's turn; the lease decides which node captures. Shapes of the
database are served where it is captured, and released with it.
"""

from __future__ import annotations

from functools import partial

from tidemill.base.clock import Clock, Rand
from tidemill.base.config.sections import CaptureSection
from tidemill.base.runtime.tasks import run_unit
from tidemill.base.status.status import StatusTracker
from tidemill.capture.config import CaptureConfig
from tidemill.consensus.api import Consensus, Lease
from tidemill.consensus.leader_election import Body, run_while_leading
from tidemill.metastore.catalogue import Catalogue
from tidemill.node.captures.balancer import CaptureBalancer, node_of
from tidemill.node.status_publisher import StatusPublisher
from tidemill.registry.registry import LocalSchemaRegistrar
from tidemill.shapes.service import ShapeService
from tidemill.shards.registry import open_remap
from tidemill.topics.local_topics import LocalTopics


class CaptureRunner:
    """Runner of the configured captures of one node. `instance` names this process in leases; `url` is the address of
    its shapes."""

    def __init__(
        self,
        spread: CaptureBalancer,
        topics: LocalTopics,
        catalogue: Catalogue,
        consensus: Consensus,
        shapes: ShapeService,
        schemas: LocalSchemaRegistrar | None,
        reporting: StatusPublisher,
        tracker: StatusTracker,
        clock: Clock,
        rand: Rand,
        *,
        instance: str,
        url: str,
    ) -> None:
        self._spread = spread
        self._topics = topics
        self._catalogue = catalogue
        self._consensus = consensus
        self._shapes = shapes
        self._schemas = schemas
        self._reporting = reporting
        self._marks = tracker
        self._clock = clock
        self._rand = rand
        self._instance = instance
        self._url = url

    async def run_while_elected(self, capture: str, body: Body) -> None:
        """Capture whenever it is this node's turn, until another node should."""
        while True:
            await self._spread.wait_for_turn(capture)
            tries = iter((True, True))  # one more try if an earlier process of this node left the lease behind
            await run_while_leading(
                self._consensus, f"capture/{capture}", self._instance, self._url.encode(),
                self._spread.with_handover(capture, body),
                own_earlier_life=lambda holder: node_of(holder) == node_of(self._instance),
                wanted=partial(next, tries, False),
            )  # fmt: skip

    def capture_body(self, name: str, section: CaptureSection) -> Body:
        """Return the work of the leader of this capture: it runs the capture, and restarts it after a failure."""
        from tidemill.capture.session.capture import Capture  # psycopg is loaded only where something is captured

        settings = CaptureConfig(
            name, section.dsn, tuple(section.tables), binding_interval_ms=section.binding_interval_ms,
            identity=section.identity, manual=section.manual,
            failover=section.failover, envelope=section.envelope, cleanup=section.cleanup,
            copy_again=section.copy_again, copy_again_pause_s=section.copy_again_pause_s,
            copy_again_max_mb=section.copy_again_max_mb,
            copy_connections=section.copy_connections, copy_rows_per_s=section.copy_rows_per_s,
            copy_aside_after_s=section.copy_aside_after_s, copy_aside_max_mb=section.copy_aside_max_mb,
        )  # fmt: skip

        async def run() -> None:
            remap = await open_remap(self._consensus, self._clock, self._rand, settings.remap_name)
            capture = Capture(
                settings, topics=self._topics, catalogue=self._catalogue, remap=remap,
                clock=self._clock, rand=self._rand, tracker=self._marks, schemas=self._schemas,
            )  # fmt: skip
            self._reporting.facts[f"capture:{name}"] = capture.facts
            self._reporting.stages[settings.remap_name] = capture.stages
            self._spread.health[name] = capture.health
            capture.add_tap(self._shapes.add_database(name, section.dsn, capture.relations, capture))
            try:
                await capture.run()
            finally:
                del self._reporting.facts[f"capture:{name}"]
                del self._reporting.stages[settings.remap_name]
                del self._spread.health[name]
                await capture.aclose()
                # Another node may continue the capture, and the shapes served here would get no more changes.
                await self._shapes.release_database(name)

        async def led(_: Lease) -> None:
            await run_unit(settings.mark, run, tracker=self._marks, clock=self._clock)

        return led
