"""PartitionReaderImpl: planning from the log alone, reading from the bucket alone. Implements `front.PartitionReader`.

For other processes: a Spark driver plans and its executors read. Nothing here talks to a server or fences anyone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tidemill.base.errors import Invalid, TidemillError
from tidemill.consensus.api import Consensus
from tidemill.objects.store import ObjectStore
from tidemill.topics.fetch import read_batches
from tidemill.topics.front import BatchRef, OffsetOutOfRange
from tidemill.topics.partition.replay import catch_up, partition_log
from tidemill.topics.partition.state import PartitionState


class PartitionReaderImpl:
    """Follows each partition it is asked about, reading only what the log gained since. `consensus` may be None
    in a process that only reads batches (an executor)."""

    def __init__(self, consensus: Consensus | None, objects: ObjectStore) -> None:
        self._consensus = consensus
        self._objects = objects
        self._states: dict[str, PartitionState] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def high_watermark(self, topic_id: str, partition: int) -> int:
        """The offset after the newest durable record, as of a read of the log during this call."""
        return (await self._follow(topic_id, partition)).high_watermark

    async def log_start(self, topic_id: str, partition: int) -> int:
        return (await self._follow(topic_id, partition)).log_start

    async def plan(self, topic_id: str, partition: int, start: int, end: int) -> list[BatchRef]:
        """See front.PartitionReader. Of what retention took nothing is planned: a reader that began before it, and
        was held by nobody, begins where the log starts."""
        known = self._states.get(partition_log(topic_id, partition))
        state = known if known is not None and end <= known.high_watermark else await self._follow(topic_id, partition)
        if end > state.high_watermark:
            raise OffsetOutOfRange(
                f"the range passes the log: end={end} high_watermark={state.high_watermark} "
                f"partition={topic_id}/{partition}."
            )
        start = max(start, state.log_start)
        if start >= end:
            return []
        return [state.ref(index) for index in range(state.first_batch(start), state.end_batch(end))]

    async def read(self, refs: Sequence[BatchRef]) -> list[bytes]:
        (found,) = await read_batches(self._objects, [refs])
        if isinstance(found, TidemillError):
            raise found
        return [bytes(batch) for batch in found]

    async def _follow(self, topic_id: str, partition: int) -> PartitionState:
        if self._consensus is None:
            raise Invalid("this reader has no consensus.", fix="Plan on the driver; executors only read.")
        log = partition_log(topic_id, partition)
        # One replay at a time per partition: the state has one owner.
        async with self._locks.setdefault(log, asyncio.Lock()):
            state = self._states.get(log)
            if state is None:
                state = PartitionState()
            self._states[log], _ = await catch_up(self._consensus, self._objects, log, state)
            return self._states[log]
