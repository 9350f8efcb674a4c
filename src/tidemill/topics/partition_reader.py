"""LogPartitionReader: plans from logs and L1's rows, reads from the bucket. Implements `api.PartitionReader`.

Used by other processes: a Spark driver plans and its executors read. It does not talk to a server and fences no leader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from math import inf

from tidemill.base.errors import CorruptError, InvalidError, TidemillError
from tidemill.consensus.api import Consensus
from tidemill.objects.store import ObjectStore
from tidemill.topics.api import BatchRef, OffsetOutOfRangeError
from tidemill.topics.batch.columns_trailer import without_trailer
from tidemill.topics.batch_reads import read_batches
from tidemill.topics.l1.reader import L1Reader
from tidemill.topics.partition.recovery import catch_up, partition_log
from tidemill.topics.partition.state_machine.state import PartitionState

RECENT_S = 20.0
"""Age up to which a followed state names only existing objects: garbage is deleted after a longer delay
(`collect_after_s`)."""


class LogPartitionReader:
    """Follows each requested partition, reading only what was appended to its log since.

    `consensus` may be None in a process that only reads batches (an executor). `l1` may be None in a process that plans
    nothing below the hot state.
    """

    def __init__(self, consensus: Consensus | None, objects: ObjectStore, l1: L1Reader | None = None) -> None:
        self._consensus = consensus
        self._objects = objects
        self._l1 = l1
        self._states: dict[str, PartitionState] = {}
        self._followed_s: dict[str, float] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def high_watermark(self, topic_id: str, partition: int) -> int:
        """Return the offset after the newest durable record, as of a read of the log during this call."""
        return (await self._catch_up(topic_id, partition)).high_watermark

    async def last_stable(self, topic_id: str, partition: int) -> int:
        """Return the last stable offset as of a read of the log during this call; see `api.PartitionReader`."""
        return (await self._catch_up(topic_id, partition)).last_stable

    async def log_start(self, topic_id: str, partition: int) -> int:
        return (await self._catch_up(topic_id, partition)).log_start

    async def plan(self, topic_id: str, partition: int, start: int, end: int) -> list[BatchRef]:
        """Plan batches; see `api.PartitionReader`.

        Offsets that retention deleted are skipped: a reader without a hold that starts below the log start continues
        there.
        """
        known = self._states.get(partition_log(topic_id, partition))
        recent = self._followed_s.get(partition_log(topic_id, partition), -inf) > _now_s() - RECENT_S
        if known is not None and recent and end <= known.last_stable:
            state = known
        else:
            state = await self._catch_up(topic_id, partition)
        try:
            return await self._plan(topic_id, partition, state, start, end)
        except CorruptError:
            # Retention may have deleted extents since. The log shows how far; all others must exist.
            return await self._plan(topic_id, partition, await self._catch_up(topic_id, partition), start, end)

    async def _plan(self, topic_id: str, partition: int, state: PartitionState, start: int, end: int) -> list[BatchRef]:
        if end > state.last_stable:
            raise OffsetOutOfRangeError(
                f"the range ends above the last stable offset: end={end} last_stable={state.last_stable} "
                f"high_watermark={state.high_watermark} partition={topic_id}/{partition}."
            )
        start, boundary = max(start, state.log_start), min(end, state.reconciled)
        # Read the whole state before the first await: other calls advance it.
        hot: list[BatchRef] = []
        if end > max(start, boundary):
            first = state.batch_index(max(start, boundary))
            hot = [state.committed_batch_ref(index) for index in range(first, state.batch_end_index(end))]
        if start >= boundary:
            return hot
        if self._l1 is None:
            raise InvalidError(f"this reader cannot read L1: partition={topic_id}/{partition}.")
        aborted = state.aborted.copy()
        past = await self._l1.plan(topic_id, partition, start, boundary)
        return [aborted.with_aborted(ref) for ref in past] + hot

    async def read(self, refs: Sequence[BatchRef]) -> list[bytes]:
        (found,) = await read_batches(self._objects, [refs])
        if isinstance(found, TidemillError):
            raise found
        return [bytes(without_trailer(batch)) for batch in found]

    async def _catch_up(self, topic_id: str, partition: int) -> PartitionState:
        if self._consensus is None:
            raise InvalidError("this reader has no consensus.", fix="Plan on the driver; executors only read.")
        log = partition_log(topic_id, partition)
        # One replay at a time per partition: the state has one owner.
        async with self._locks.setdefault(log, asyncio.Lock()):
            state = self._states.get(log)
            if state is None:
                state = PartitionState()
            followed_s = _now_s()
            self._states[log], _ = await catch_up(self._consensus, self._objects, log, state)
            self._followed_s[log] = followed_s
            return self._states[log]


def _now_s() -> float:
    return asyncio.get_running_loop().time()
