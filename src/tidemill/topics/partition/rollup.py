"""Write rollups: the whole state in an object, named by a log record, so that earlier records may be truncated.

    key    rollup/topic/<topic id>/<partition>/<log position, 20 digits>-<nonce>

The object is durable before the record names it. The log is truncated, and the previous object deleted, only after the
record is durable. A reader whose object is deleted during the read starts again at the new start of the log.
"""

from __future__ import annotations

import asyncio

import structlog

from tidemill.base.errors import TidemillError
from tidemill.consensus.api import Consensus
from tidemill.objects.store import ObjectStore
from tidemill.topics.partition.codec import encode_state
from tidemill.topics.partition.commands import Rollup
from tidemill.topics.partition.state import PartitionState

INLINE_BATCHES = 20_000
"""Largest state that is encoded on the event loop: about 1 ms."""

_log = structlog.get_logger()


def copy_state(state: PartitionState) -> PartitionState:
    """Copy the parts of the state that `write_rollup` reads: a few ms for a million batches."""
    copy = PartitionState()
    copy.applied, copy.log_start = state.applied, state.log_start
    copy.high_watermark, copy.last_at_ms = state.high_watermark, state.last_at_ms
    copy.settled, copy.reconciled, copy.aborted_start = state.settled, state.reconciled, state.aborted_start
    copy.transactions, copy.aborted = dict(state.transactions), state.aborted.copy()
    copy.terms, copy.producers = list(state.terms), dict(state.producers)
    copy.object_keys = list(state.object_keys)
    copy.bases, copy.objects, copy.first_bytes = state.bases[:], state.objects[:], state.first_bytes[:]
    copy.sizes, copy.max_timestamps = state.sizes[:], state.max_timestamps[:]
    return copy


async def write_rollup(
    objects: ObjectStore, state: PartitionState, topic_id: str, partition: int, nonce: str
) -> Rollup | None:
    """Write the object and return the command that names it, without a tail, or None if the store failed.

    `state` must not change during the call: see `copy_state`. A large state is encoded in a thread.
    """
    key = f"rollup/topic/{topic_id}/{partition}/{state.applied:020d}-{nonce}"
    data = await asyncio.to_thread(encode_state, state) if len(state) > INLINE_BATCHES else encode_state(state)
    try:
        await objects.put(key, data)
    except TidemillError as error:
        _log.warning("rollup not written", key=key, cause=str(error))
        return None
    return Rollup(key, len(data))


async def truncate_before_rollup(
    consensus: Consensus, objects: ObjectStore, log: str, position: int, previous_key: str
) -> None:
    """Truncate the log before the rollup at `position` and delete the previous object.

    A failure is only logged: the next rollup truncates further, and no live record names the remaining object.
    """
    try:
        await consensus.truncate(log, position)
        if previous_key:
            await objects.delete(previous_key)
    except TidemillError as error:
        _log.warning("log not truncated after a rollup", log=log, cause=str(error))
