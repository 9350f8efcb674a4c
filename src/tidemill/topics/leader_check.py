"""Detect that this node was deposed as leader, from the heads of the partitions' logs.

A leader notices that it was deposed when it writes. This module informs leaders that have nothing to write:

    A opens the partition ─► B, whose view is old, takes it over, writes, sees the new view, and stops leading
    A leads again in every view, including its own; only the log's head shows that it lacks B's records

Without this check, readers there would wait until the next produced record. A node whose lease ran out, by its own
clock, checks before it answers any request: it may have been suspended while others led.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import structlog

from tidemill.base.errors import TidemillError
from tidemill.consensus.api import Consensus, read_all_changes
from tidemill.topics.partition.leader import PartitionLeader
from tidemill.topics.partition.recovery import LOG_PREFIX, parse_log_name
from tidemill.topics.partition_supervisor import PartitionKey

CONFIRM_TIMEOUT_S = 1.0
"""Time that reads wait, once, for consensus to report the leaders. While consensus is unavailable they are answered
from the known state, as Kafka's brokers do without their controller."""

_log = structlog.get_logger()


class LeaderCheck:
    """Leader check for one process's partitions. `lapses`: see `membership.Assignment`."""

    def __init__(
        self, consensus: Consensus, led: Mapping[PartitionKey, PartitionLeader], lapses: Callable[[], int] = lambda: 0
    ) -> None:
        self._consensus = consensus
        self._led = led
        self._lapses = lapses
        self._sure_of = 0
        self._asking = asyncio.Lock()
        self._token = ""

    async def confirm_leadership(self) -> None:
        """Wait until every partition that was deposed while this node's lease had run out is closed."""
        while (lapses := self._lapses()) != self._sure_of:
            async with self._asking:
                if lapses == self._sure_of:
                    continue
                try:
                    async with asyncio.timeout(CONFIRM_TIMEOUT_S):
                        await self.check_heads()
                except (TimeoutError, TidemillError) as error:
                    _log.warning("leaders not confirmed after a lease ran out", cause=repr(error))
                self._sure_of = lapses

    async def check_heads(self) -> None:
        """Pass the head of every changed log to its partition in this process. Raises UnavailableError."""
        if not self._led:
            return
        heads, self._token = await read_all_changes(self._consensus, LOG_PREFIX, self._token)
        for name, head in heads.items():
            led = self._led.get(parse_log_name(name.removeprefix(LOG_PREFIX)))
            if led is not None:
                led.observe_head(head)
