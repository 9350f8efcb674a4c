"""A leader learns that it was deposed when it writes; one that has nothing to write is told by the logs' heads.

    A opens the partition ─► B, whose view is old, takes it over, writes, sees the new view, and lets go of it
    A leads again by every view, and by its own word: nobody but the log's head says that it lacks what B wrote

Without this whoever reads there waits for the next record of a producer. A node whose lease ran out, by its own clock,
looks before it answers anything: it may have stood still while others led.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import structlog

from tidemill.base.errors import TidemillError
from tidemill.consensus.api import Consensus, changes
from tidemill.topics.partition.leader import PartitionLeader
from tidemill.topics.partition.recovery import LOG_PREFIX, place_of
from tidemill.topics.partition_supervisor import PartitionKey

SURE_S = 1.0
"""So long reads wait, once, for consensus to say who leads. While it is away they are answered with what is known, as
Kafka's brokers do without their controller."""

_log = structlog.get_logger()


class LeaderCheck:
    """Of one process's partitions. `lapses`: see `membership.Assignment`."""

    def __init__(
        self, consensus: Consensus, led: Mapping[PartitionKey, PartitionLeader], lapses: Callable[[], int] = lambda: 0
    ) -> None:
        self._consensus = consensus
        self._led = led
        self._lapses = lapses
        self._sure_of = 0
        self._asking = asyncio.Lock()
        self._token = ""

    async def sure(self) -> None:
        """Return when each partition that was deposed while this node's lease had run out knows it."""
        while (lapses := self._lapses()) != self._sure_of:
            async with self._asking:
                if lapses == self._sure_of:
                    continue
                try:
                    async with asyncio.timeout(SURE_S):
                        await self.look()
                except (TimeoutError, TidemillError) as error:
                    _log.warning("nobody says who leads after a lease ran out", cause=repr(error))
                self._sure_of = lapses

    async def look(self) -> None:
        """Tell each partition of this process whose log has changed the log's head. Raises Unavailable."""
        if not self._led:
            return
        heads, self._token = await changes(self._consensus, LOG_PREFIX, self._token)
        for name, head in heads.items():
            led = self._led.get(place_of(name.removeprefix(LOG_PREFIX)))
            if led is not None:
                led.told_head(head)
