"""Rollups: the whole state in an object, named by a log record, so that earlier records may be truncated.

    key    rollup/topic/<topic id>/<partition>/<log position, 20 digits>-<nonce>

The object is durable before the record names it. The log is truncated, and the previous object deleted, only after the
record is durable. A reader whose object is deleted during the read starts again at the new start of the log.

They are made concurrently with the leader's work, without delaying acknowledgements:

    due ─► copy of the state at position p ─► upload, while commits continue ─► Rollup(key, tail) at position q ≥ p
           └───────────── commands placed at p … q−1 are retained as the tail ─────────────┘
    ─► records before q are truncated, the previous object deleted

Invariant (complete rollup): the state at q is the object's plus the tail, so a process that opens the log there needs
nothing before it.

Invariant (harmless failure): a rollup that fails, or whose tail grows too large, only delays the next attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from tidemill.base.clock import Rand
from tidemill.base.errors import TidemillError
from tidemill.base.runtime.tasks import Tasks, error_sentence, is_fault
from tidemill.consensus.api import Consensus
from tidemill.objects.store import ObjectStore
from tidemill.topics.partition.state_machine.codec import encode_state
from tidemill.topics.partition.state_machine.commands import Advance, PlaceBatches, Rollup
from tidemill.topics.partition.state_machine.state import PartitionState

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


RETRY_RECORDS = 256
RETENTION_ROLLUP_RECORDS = 1024
"""Records after which a log is rolled up if most of its batches have been deleted by retention."""

TAIL_BYTES = 1 << 20
"""Limit of the commands in one tail: an eighth of a log record's limit, some thousand batches."""


class RollupScheduler:
    """Rollups of one led partition. `ready` is called when `take_ready_rollup` will return a command."""

    def __init__(
        self,
        consensus: Consensus,
        objects: ObjectStore,
        rand: Rand,
        tasks: Tasks,
        place: tuple[str, str, int],
        rollup_records: int,
        ready: Callable[[], None],
    ) -> None:
        self._consensus = consensus
        self._objects = objects
        self._rand = rand
        self._tasks = tasks
        self._log_name, self._topic_id, self._partition = place
        self._rollup_records = rollup_records
        self._ready = ready
        self._from = self._retry_from = 0
        self._tail: list[PlaceBatches | Advance] | None = None
        """Commands placed since the copy of the state; None while no rollup is under way."""
        self._tail_bytes = 0
        self._written: Rollup | None = None

    def add_to_tail(self, command: PlaceBatches | Advance, size_bytes: int) -> None:
        """Add a command that is in the log now to the tail of a running rollup."""
        if self._tail is not None:
            self._tail.append(command)
            self._tail_bytes += size_bytes

    def start_if_due(self, state: PartitionState) -> None:
        """Begin a rollup if it is due. A plain call, between two commands."""
        least = self._rollup_records
        if state.settled.position > state.rollup_position and len(state) < state.applied - state.rollup_position:
            # Retention has removed most of what the log describes.
            least = min(least, RETENTION_ROLLUP_RECORDS)
        due = state.rollup_position + max(least, len(state) // 4)
        if self._tail is not None or state.applied < max(due, self._from):
            return
        self._tail, self._tail_bytes = [], 0
        self._retry_from = state.applied + RETRY_RECORDS
        self._tasks.spawn(self._write(copy_state(state)), name=f"rollup {self._log_name}")

    def take_ready_rollup(self) -> Rollup | None:
        """Return the command to propose next, or None if no rollup is ready."""
        written, tail = self._written, self._tail
        if written is None or tail is None:
            return None
        self._written = self._tail = None
        if self._tail_bytes > TAIL_BYTES:
            self._from = self._retry_from
            _log.warning("rollup abandoned: tail is too large", log=self._log_name, bytes=self._tail_bytes)
            return None
        return Rollup(written.object_key, written.size_bytes, tuple(tail))

    def rollup_appended(self, position: int, previous_key: str) -> None:
        """Start truncating what the rollup at `position` replaces, in the background."""
        forgetting = truncate_before_rollup(self._consensus, self._objects, self._log_name, position, previous_key)
        self._tasks.spawn(forgetting, name=f"forget {self._log_name}")

    async def _write(self, copy: PartitionState) -> None:
        written: Rollup | None = None
        try:
            written = await write_rollup(self._objects, copy, self._topic_id, self._partition, self._rand.nonce())
        except BaseException as error:
            if not is_fault(error):
                raise
            _log.error("rollup not written", log=self._log_name, error=error_sentence(error), exc_info=error)
        if written is None:
            self._tail, self._from = None, self._retry_from
            return
        self._written = written
        self._ready()
