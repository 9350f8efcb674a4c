"""Schedule the rollups of a partition concurrently with its leader's work, without delaying acknowledgements.

    due ─► copy of the state at position p ─► upload, while commits continue ─► Rollup(key, tail) at position q ≥ p
           └───────────── commands placed at p … q−1 are retained as the tail ─────────────┘
    ─► records before q are truncated, the previous object deleted

Invariant (complete rollup): the state at q is the object's plus the tail, so a process that opens the log there needs
nothing before it.

Invariant (harmless failure): a rollup that fails, or whose tail grows too large, only delays the next attempt.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from tidemill.base.clock import Rand
from tidemill.base.runtime.tasks import Tasks, error_sentence, is_fault
from tidemill.consensus.api import Consensus
from tidemill.objects.store import ObjectStore
from tidemill.topics.partition.commands import Advance, PlaceBatches, Rollup
from tidemill.topics.partition.rollup import copy_state, truncate_before_rollup, write_rollup
from tidemill.topics.partition.state import PartitionState

RETRY_RECORDS = 256
RETENTION_ROLLUP_RECORDS = 1024
"""Records after which a log is rolled up if most of its batches have been deleted by retention."""

TAIL_BYTES = 1 << 20
"""Limit of the commands in one tail: an eighth of a log record's limit, some thousand batches."""

_log = structlog.get_logger()


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
