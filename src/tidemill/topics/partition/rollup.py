"""Rollups: the whole state in an object, named by a log record, so that the records before it may be forgotten.

    key    rollup/topic/<topic id>/<partition>/<log position, 20 digits>-<nonce>

The object is durable before the record names it; the log is truncated, and the previous object deleted, only
after the record is durable. Whoever reads an object that goes under it starts again at the log's new start.
"""

from __future__ import annotations

import structlog

from tidemill.base.errors import TidemillError
from tidemill.consensus.api import Consensus
from tidemill.objects.store import ObjectStore
from tidemill.topics.partition.codec import encode_state
from tidemill.topics.partition.commands import Rollup
from tidemill.topics.partition.state import PartitionState

_log = structlog.get_logger()


async def write_rollup(
    objects: ObjectStore, state: PartitionState, topic_id: str, partition: int, nonce: str
) -> Rollup | None:
    """The command that names the object, to be appended at `state.applied`; None when the store refused."""
    key = f"rollup/topic/{topic_id}/{partition}/{state.applied:020d}-{nonce}"
    data = encode_state(state)
    try:
        await objects.put(key, data)
    except TidemillError as error:
        _log.warning("rollup not written", key=key, cause=str(error))
        return None
    return Rollup(key, len(data))


async def forget_before(consensus: Consensus, objects: ObjectStore, log: str, position: int, previous_key: str) -> None:
    """Truncate before the rollup at `position`. A failure is only logged: the next rollup truncates further, and an
    object left over is named by no live record."""
    try:
        await consensus.truncate(log, position)
        if previous_key:
            await objects.delete(previous_key)
    except TidemillError as error:
        _log.warning("log not truncated after a rollup", log=log, cause=str(error))
