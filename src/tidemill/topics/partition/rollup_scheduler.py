"""When a partition rolls up: beside the work of its leader, never in the way of an acknowledgement.

    due ─► copy of the state at position p ─► upload, while commits go on ─► Rollup(key, tail) at position q ≥ p
           └───────────── commands placed at p … q−1 are kept as the tail ─────────────┘
    ─► records before q are forgotten, the previous object deleted

U1  The state at q is the object's plus the tail: whoever opens the log there needs nothing before it.
U2  A roll-up that fails, or whose tail grows too large, changes nothing but when the next one is tried.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from tidemill.base.clock import Rand
from tidemill.base.runtime.tasks import Tasks, is_fault, sentence
from tidemill.consensus.api import Consensus
from tidemill.objects.store import ObjectStore
from tidemill.topics.partition.commands import Advance, PlaceBatches, Rollup
from tidemill.topics.partition.rollup import copy_of, forget_before, write_rollup
from tidemill.topics.partition.state import PartitionState

RETRY_RECORDS = 256
AFTER_RETENTION = 1024
"""Records after which a log is rolled up that tells mostly of what retention took."""

TAIL_BYTES = 1 << 20
"""Of the commands beside one roll-up, an eighth of what a log record holds: some thousand batches."""

_log = structlog.get_logger()


class RollUps:
    """One led partition's. `ready` is called when `take` has something."""

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
        """While a roll-up is under way: what was placed since its copy of the state."""
        self._tail_bytes = 0
        self._written: Rollup | None = None

    def placed(self, command: PlaceBatches | Advance, size_bytes: int) -> None:
        """`command` stands in the log now."""
        if self._tail is not None:
            self._tail.append(command)
            self._tail_bytes += size_bytes

    def consider(self, state: PartitionState) -> None:
        """Begin one when it is due. Plain call, between two commands."""
        least = self._rollup_records
        if state.settled.position > state.rollup_position and len(state) < state.applied - state.rollup_position:
            # Most of what the log says has been forgotten by retention.
            least = min(least, AFTER_RETENTION)
        due = state.rollup_position + max(least, len(state) // 4)
        if self._tail is not None or state.applied < max(due, self._from):
            return
        self._tail, self._tail_bytes = [], 0
        self._retry_from = state.applied + RETRY_RECORDS
        self._tasks.spawn(self._write(copy_of(state)), name=f"rollup {self._log_name}")

    def take(self) -> Rollup | None:
        """The command to propose next, if one is ready."""
        written, tail = self._written, self._tail
        if written is None or tail is None:
            return None
        self._written = self._tail = None
        if self._tail_bytes > TAIL_BYTES:
            self._from = self._retry_from
            _log.warning("rollup given up: too much was placed beside it", log=self._log_name, bytes=self._tail_bytes)
            return None
        return Rollup(written.object_key, written.size_bytes, tuple(tail))

    def named(self, position: int, previous_key: str) -> None:
        """The roll-up stands at `position`: what it replaces goes, in its own time."""
        forgetting = forget_before(self._consensus, self._objects, self._log_name, position, previous_key)
        self._tasks.spawn(forgetting, name=f"forget {self._log_name}")

    async def _write(self, copy: PartitionState) -> None:
        written: Rollup | None = None
        try:
            written = await write_rollup(self._objects, copy, self._topic_id, self._partition, self._rand.nonce())
        except BaseException as error:
            if not is_fault(error):
                raise
            _log.error("rollup not written", log=self._log_name, error=sentence(error), exc_info=error)
        if written is None:
            self._tail, self._from = None, self._retry_from
            return
        self._written = written
        self._ready()
