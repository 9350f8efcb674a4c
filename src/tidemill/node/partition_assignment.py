"""Assignment of partitions to leaders: topics of a capture follow the capture, all others the membership.

Capture writes its topics in process, so the node that holds `capture/<name>` leads every partition of them. The rule
only decides which node tries; the partition's fenced log decides which one succeeds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import UnavailableError
from tidemill.base.runtime.tasks import Tasks, run_unit
from tidemill.base.status.status import StatusTracker
from tidemill.consensus.api import Consensus
from tidemill.metastore.catalogue import CaptureTableRow, Catalogue, TopicRow
from tidemill.node.captures.balancer import LeaseView, node_of
from tidemill.topics.membership import Membership

POLL_S = 1.0
LEASE_PREFIX = "capture/"

log = structlog.get_logger()


class CaptureAssignment:
    """Implementation of `topics.membership.Assignment` from capture leases and the membership."""

    def __init__(
        self, membership: Membership, consensus: Consensus, catalogue: Catalogue, tracker: StatusTracker, clock: Clock
    ) -> None:
        self.node = membership.node
        self._membership = membership
        self._consensus = consensus
        self._catalogue = catalogue
        self._leaders: dict[str, str] = {}
        """Topic id of a captured table → node that captures it; "" while no node does."""
        self._rows: Sequence[TopicRow] = ()
        self._tables: Sequence[CaptureTableRow] = ()
        self._holders: dict[str, str] = {}
        """Inputs from which the leaders were last computed."""
        self._callbacks: list[Callable[[], None]] = []
        self._tracker = tracker
        self._clock = clock
        self._tasks = Tasks(self._reraise)
        self._wake = asyncio.Event()
        self._looked = asyncio.Event()
        self._seen: LeaseView = ({}, {})

    async def start(self) -> None:
        await self._poll()
        self._tasks.spawn(
            run_unit("assignment", self._poll_forever, tracker=self._tracker, clock=self._clock), name="assignment"
        )

    async def aclose(self) -> None:
        await self._tasks.aclose()

    async def wait_for_next_poll(self) -> LeaseView:
        await self._looked.wait()
        return self._seen

    def leader_of(self, topic_id: str, partition: int) -> str:
        captured = self._leaders.get(topic_id)
        return self._membership.leader_of(topic_id, partition) if captured is None else captured

    def epoch(self) -> int:
        return self._membership.epoch()

    def lease_lapses(self) -> int:
        return self._membership.lease_lapses()

    def request_refresh(self) -> None:
        self._wake.set()
        self._membership.request_refresh()

    def on_change(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)
        self._membership.on_change(callback)

    def _reraise(self, name: str, error: BaseException) -> None:
        """Re-raise what `keep` lets through: it ends the process."""
        raise error

    async def _poll_forever(self) -> None:
        while True:
            self._wake.clear()
            try:
                async with asyncio.timeout(POLL_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            try:
                await self._poll()
            except UnavailableError as error:
                log.warning("captures could not be read", error=str(error))

    async def _poll(self) -> None:
        leases = await self._consensus.leases(LEASE_PREFIX)
        holders = {lease.name.removeprefix(LEASE_PREFIX): lease.holder for lease in leases if lease.live}
        self._seen = holders, {member.name: member.captures for member in self._membership.members()}
        looked, self._looked = self._looked, asyncio.Event()
        looked.set()
        rows, tables = await self._catalogue.list(TopicRow), await self._catalogue.all_tables(fresh=False)
        # The leaders depend only on the tables and the holders.
        if rows is self._rows and tables is self._tables and holders == self._holders:
            return
        self._rows, self._tables, self._holders = rows, tables, holders
        topics = {row.name: row.topic_id for row in rows if row.kind == "capture"}
        leaders: dict[str, str] = {}
        for table in tables:
            if table.topic in topics:
                leaders[topics[table.topic]] = node_of(holders.get(table.capture, ""))
            if table.side_topic is not None:  # the process that captures also writes the side topic
                leaders[table.side_topic.topic_id] = node_of(holders.get(table.capture, ""))
        self._set_leaders(leaders)

    def _set_leaders(self, leaders: dict[str, str]) -> None:
        if leaders == self._leaders:
            return
        self._leaders = leaders
        for callback in self._callbacks:
            callback()
