"""Batches of one leader that have no result yet: each ends exactly once, and then releases its queue slot.

join_twin, add ─► succeed  in the log: its producer's next batches are judged with it
                  reject   permanently: its successors are judged without it
                  fail     not, or perhaps not, in the log: its producer must send it again before later ones
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tidemill.base.clock import Clock
from tidemill.base.errors import TidemillError
from tidemill.topics.api import ProduceResult
from tidemill.topics.l0.writer import L0Writer
from tidemill.topics.partition.pending_batch import PendingBatch
from tidemill.topics.partition.sequence_gaps import SequenceGaps
from tidemill.topics.produce import ProducerQueue


class LiveBatches:
    """Batches without a result, in reservation order. `changed`: a plain call after each addition and removal."""

    def __init__(self, holes: SequenceGaps, writer: L0Writer, clock: Clock, changed: Callable[[], None]) -> None:
        self.places = ProducerQueue()
        self.reserved_records = 0
        self._holes = holes
        self._writer = writer
        self._clock = clock
        self._changed = changed
        self._live: dict[PendingBatch, None] = {}
        self._by_identity: dict[tuple[int, int, int, int], PendingBatch] = {}

    def __iter__(self) -> Iterator[PendingBatch]:
        return iter(self._live)

    def __contains__(self, pending: PendingBatch) -> bool:
        return pending in self._live

    def join_twin(self, pending: PendingBatch) -> bool:
        """Return whether a retry shares the result of the same batch, which is still without one."""
        twin = self._by_identity.setdefault(pending.identity, pending)
        if twin is not pending:
            twin.futures += pending.futures
        return twin is not pending

    def add(self, pending: PendingBatch) -> None:
        self._live[pending] = None
        self.reserved_records += pending.header.record_count
        self._changed()

    def _remove(self, pending: PendingBatch) -> None:
        if pending in self._live:
            del self._live[pending]
            self.reserved_records -= pending.header.record_count
            self._changed()
            self._writer.batch_answered(pending)
            if self._by_identity.get(pending.identity) is pending:
                del self._by_identity[pending.identity]

    def succeed(self, pending: PendingBatch, result: ProduceResult) -> None:
        self._remove(pending)
        if pending.is_idempotent:
            header = pending.header
            self._holes.record_appended(
                header.producer_id, header.producer_epoch, header.base_sequence, header.record_count
            )
        pending.succeed(result)
        self._release(pending)

    def reject(self, pending: PendingBatch, error: TidemillError) -> None:
        """Reject a batch permanently: it leaves the queue, and its successors are judged without it."""
        self._remove(pending)
        pending.fail(error)
        self._release(pending)

    def fail(self, pending: PendingBatch, error: TidemillError) -> None:
        """Fail a batch that is not, or may not be, in the log. Its producer must send it again before later ones."""
        if pending.is_idempotent:
            header, now_s = pending.header, self._clock.monotonic_s()
            self._holes.failed(header.producer_id, header.producer_epoch, header.base_sequence, now_s)
        self._remove(pending)
        pending.fail(error)
        if pending.ticket is not None:
            self.places.abandon(pending.ticket)

    def _release(self, pending: PendingBatch) -> None:
        if pending.ticket is not None:
            self.places.release(pending.ticket)
