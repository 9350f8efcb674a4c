"""Faults planted into topics: each replaces one part of a node. Unit tests of the parts plant them, too."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import ModuleType
from typing import Any, cast

import msgspec

from sim.world import swapped
from tidemill.base.errors import TidemillError
from tidemill.topics import led_partitions, local_topics
from tidemill.topics.api import Marker, ProduceResult, ProduceTransaction, TransactionSnapshot
from tidemill.topics.batch.header import CONTROL, parse_header
from tidemill.topics.fetch.timestamp_lookup import TimestampLookup
from tidemill.topics.l1 import reconciler
from tidemill.topics.l1.reconciler import Reconciler
from tidemill.topics.leader_check import LeaderCheck
from tidemill.topics.local_topics import LocalTopics
from tidemill.topics.partition import batch_intake, leader
from tidemill.topics.partition.batch_intake import BatchIntake
from tidemill.topics.partition.leader import PartitionLeader
from tidemill.topics.partition.live_batches import LiveBatches
from tidemill.topics.partition.pending_batch import PendingBatch
from tidemill.topics.partition.recovery import partition_log
from tidemill.topics.partition.state_machine.apply import apply
from tidemill.topics.partition.state_machine.codec import encode_command
from tidemill.topics.partition.transaction_verification import TransactionVerification
from tidemill.topics.produce import ProducerQueue


class _NoQueue:
    def reserve(self, line: object) -> None:
        return None


class LateReservation(BatchIntake):
    """Planted fault `seed000`: a producer's place in line is reserved after the upload."""

    def produce_nowait(
        self, buffer: Any, sender: Hashable = None, within: ProduceTransaction | None = None, trailer: bytes = b""
    ) -> asyncio.Future[ProduceResult]:
        queue, self._places = self._places, cast(ProducerQueue, _NoQueue())
        try:
            return super().produce_nowait(buffer, sender, within, trailer)
        finally:
            self._places = queue

    def batch_uploaded(self, pending: PendingBatch) -> None:
        if pending.ticket is None:
            pending.ticket = self._places.reserve(pending.line)
        super().batch_uploaded(pending)


class LateMarker(BatchIntake):
    """Planted fault late-marker: a marker does not say which transaction it ends."""

    def write_marker_nowait(
        self, marker: Marker, here: TransactionSnapshot | None = None
    ) -> asyncio.Future[ProduceResult]:
        return super().write_marker_nowait(marker, None)


class UnorderedConnection(BatchIntake):
    """Planted fault unordered-connection: batches without producer id are in the order of their uploads' ends."""

    def _line_of(self, sender: Hashable) -> Hashable:
        return object()


class FencedFirst(BatchIntake):
    """Planted fault fence-before-redeem: a batch occupies a place in the log while it waits for its turn."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        places, around = self._places, self._around
        redeem = places.redeem

        async def fenced(ticket: Any, then: Callable[[Any], None]) -> None:
            async with around.appends:
                turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                redeem(ticket, lambda _: turn.set_result(None))
                await turn
            then(ticket)

        def spawn(ticket: Any, then: Callable[[Any], None]) -> None:
            around.tasks.spawn(fenced(ticket, then), name=f"fence {partition_log(self.topic_id, self.partition)}")

        places.redeem = spawn  # type: ignore[method-assign]


class ReportedEarly(PartitionLeader):
    """Planted fault `told-early`: readers see a batch while its append is in flight."""

    async def _propose(self, command: Any) -> None:
        position = self.state.applied
        data = encode_command(command)
        apply(self.state, command, position, self._appender.term)
        self.watchers.wake_all()
        await self._appender.append(position, data)


class LastingPermits(TransactionVerification):
    """Planted fault marker-before-data: a permit to begin a transaction outlives the transaction's marker."""

    def revoke(self, producer_id: int, below: int) -> None:
        found = self._permits.get(producer_id)
        super().revoke(producer_id, below)
        if found is not None:
            found.void = False


class ReleasedBatches(LiveBatches):
    """Planted fault release-failed: the successors of a failed batch continue as if it were in the log."""

    def fail(self, pending: PendingBatch, error: TidemillError) -> None:
        self.reject(pending, error)


class EarlyForgetting(Reconciler):
    """Planted fault forget-before-add: logs forget batches that move into L1 before their extents are stored."""

    async def _upload(self, topic_id: str, taken: Sequence[Any]) -> int:
        for piece, _ in taken:
            self._led[topic_id, piece.partition].advance_reconciled(piece.end)
        return await super()._upload(topic_id, taken)


_build = reconciler._build_object


def _build_from_data(topic_id: str, taken: Sequence[Any]) -> Any:
    """Plant the fault first-data-base: an extent begins at its first record, not at the end of the one before it."""
    moved = []
    for piece, batches in taken:
        data = (
            ref.base_offset
            for ref, batch in zip(piece.refs, batches, strict=True)
            if not parse_header(batch).attributes & CONTROL
        )
        moved.append((msgspec.structs.replace(piece, start=max(piece.start, next(data, piece.start))), batches))
    return _build(topic_id, moved)


_first_at = TimestampLookup.first_at


async def _first_in_batch(
    self: TimestampLookup, led: Any, timestamp_ms: int, start: int, *, whole: bool = False
) -> Any:
    """Plant the fault below-start: the first offset of a time is below the log start, which is in its batch."""
    return await _first_at(self, led, timestamp_ms, start, whole=True)


async def _check_nothing(self: LeaderCheck) -> None:
    """Plant the fault untold-leader: a fenced leader learns of it when it writes, not before."""


def _record_nothing(self: LocalTopics, topic_id: str, partition: int, batch: object) -> None:
    """Plant the fault no-handover-gate: a node that becomes leader forgets the batches that it rejected before."""


PLACES: dict[str, tuple[ModuleType | type, str, object]] = {
    "seed000": (leader, "BatchIntake", LateReservation),
    "late-marker": (leader, "BatchIntake", LateMarker),
    "unordered-connection": (leader, "BatchIntake", UnorderedConnection),
    "fence-before-redeem": (leader, "BatchIntake", FencedFirst),
    "told-early": (led_partitions, "PartitionLeader", ReportedEarly),
    "marker-before-data": (batch_intake, "TransactionVerification", LastingPermits),
    "release-failed": (batch_intake, "LiveBatches", ReleasedBatches),
    "forget-before-add": (local_topics, "Reconciler", EarlyForgetting),
    "first-data-base": (reconciler, "_build_object", _build_from_data),
    "below-start": (TimestampLookup, "first_at", _first_in_batch),
    "untold-leader": (LeaderCheck, "check_heads", _check_nothing),
    "no-handover-gate": (LocalTopics, "_record_refused_gap", _record_nothing),
}


@contextlib.contextmanager
def planted(fault: str) -> Iterator[None]:
    """Plant one of the faults that replace a part of a node's topics."""
    with swapped(*PLACES[fault]) if fault in PLACES else contextlib.nullcontext():
        yield
