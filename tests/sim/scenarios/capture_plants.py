"""Faults planted into a session: each replaces one of its parts, for the worlds of one fault."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

from msgspec.structs import replace

from sim.scenarios import capture_shapes
from sim.world import World, swapped
from tidemill.base.lsn import ChangePosition
from tidemill.capture.changes import Fragment
from tidemill.capture.decode.row_blocks import ChangePart
from tidemill.capture.decode.transaction_builder import TransactionBuilder
from tidemill.capture.delivery.collector import Collector
from tidemill.capture.delivery.deferrable_keys import DeferrableKeys
from tidemill.capture.delivery.flush_alignment import FlushAlignment
from tidemill.capture.delivery.flush_tracker import FlushTracker
from tidemill.capture.postgres.standby_status import ReplicationStatus
from tidemill.capture.session import session
from tidemill.capture.topics import topic_writer
from tidemill.capture.topics.binder import Binder, CommitBoundary
from tidemill.capture.topics.topic_writer import TopicWriter
from tidemill.shapes.live_shape import LiveShape

FAULTS = (
    "seed002",
    "early-keepalive",
    "early-register",
    "no-hold-back",
    "late-publication",
    "late-consumer",
    "early-confirm",
    "early-boundary",
    "lost-notice",
    "late-tombstone",
    "torn-binding",
    "early-wake",
)


class RawNotices(FlushAlignment):
    """Planted fault `seed002`: a durable position inside a transaction is reported immediately, not at the commit."""

    def record_flush(self, position: ChangePosition) -> ChangePosition:
        return self.align_to_boundary(position)


class EqualityTracker(FlushTracker):
    """Planted fault near-miss (electric #4744): only exactly the position that was sent completes, none above it."""

    def record_flush(self, consumer: str, position: ChangePosition, now_ms: int) -> int | None:
        entry = self._pending.get(consumer)
        if entry is None or position <= entry.sent:
            return super().record_flush(consumer, position, now_ms)
        entry.flushed = position
        self._push_position(consumer, position)
        return self._advance()


class LastOnlyTracker(FlushTracker):
    """Planted fault early-batch: a batch is registered as its last transaction, so the ones before it count as flushed
    before their rows are durable."""

    def commit(self, fragment: Fragment, consumers: Iterable[str], now_ms: int) -> int | None:
        return super().commit(replace(fragment, batch=None), consumers, now_ms)


class StaleStatus(ReplicationStatus):
    """Planted fault early-keepalive (electric #4731): a commit does not change whether everything is confirmed."""

    def record_commit(self, commit_lsn: int) -> None:
        up_to_date = self.up_to_date
        super().record_commit(commit_lsn)
        self.up_to_date = up_to_date


class FullFragments(TransactionBuilder):
    """Planted fault no-hold-back (electric #3726): a full buffer is emitted with its newest change."""

    def _hold_back_newest(self) -> list[ChangePart]:
        self._newest_bytes = 0
        return []


class EagerWriter(TopicWriter):
    """Planted fault early-boundary: a commit's boundary goes to the binder at its delivery, before it is durable."""

    def _queue_boundary(self, stamp: Any, end: ChangePosition, *rest: Any) -> None:
        super()._queue_boundary(stamp, end, *rest)
        self._pass_on_boundaries(end)


class TornWriter(TopicWriter):
    """Planted fault torn-binding: the boundary of a batch is before the last row of its last transaction."""

    def _queue_boundary(
        self, stamp: Any, end: ChangePosition, written: ChangePosition | None, offsets: Any, *tags: Any
    ) -> None:
        if self._batch is not None:
            offsets = {writer: offset - 1 for writer, offset in offsets.items()}
        super()._queue_boundary(stamp, end, written, offsets, *tags)


class EagerShape(LiveShape):
    """Planted fault early-wake: readers are woken before the items of the transactions are visible."""

    def publish(self, last_seen: int, *, mark: bool = False) -> None:
        self._wake()
        asyncio.get_running_loop().call_later(0.05, lambda: super(EagerShape, self).publish(last_seen, mark=mark))


class EagerBinder(Binder):
    """Planted fault early-confirm: a durable boundary is reported as flushed before a binding covers it."""

    def add_durable(self, boundaries: Sequence[CommitBoundary]) -> None:
        super().add_durable(boundaries)
        for boundary in boundaries:
            self._on_bound(boundary.last)
            self._on_stored(boundary.lsn)


class EagerCollector(Collector):
    """Planted fault early-register: a commit is registered before its delivery, for the sinks that received a part of
    it, not for those that received the commit."""

    async def _process_fragment(self, fragment: Fragment) -> None:
        if fragment.commits:
            self._register_commit(fragment, self._touched)
        await super()._process_fragment(fragment)


class BlindRivals(DeferrableKeys):
    """Planted fault late-tombstone: a row that leaves a key writes a tombstone even if another row has the key."""

    async def resolve_fragment(self, fragment: Fragment) -> list[Fragment]:
        return [fragment]


def _forgetful(world: World) -> Callable[..., Binder]:
    """Plant the fault lost-notice: some notices that a commit is bound are dropped."""

    def make(remap: Any, clock: Any, on_bound: Callable[[ChangePosition], None], **options: Any) -> Binder:
        def reported(position: ChangePosition) -> None:
            if world.source.random() >= 0.3:
                on_bound(position)

        return Binder(remap, clock, reported, **options)

    return make


@contextlib.contextmanager
def planted(world: World, fault: str) -> Iterator[None]:
    """Plant one of the faults that replace a part of the session."""
    places: dict[str, tuple[ModuleType, str, object]] = {
        "seed002": (topic_writer, "FlushAlignment", RawNotices),
        "early-keepalive": (session, "ReplicationStatus", StaleStatus),
        "early-register": (session, "Collector", EagerCollector),
        "no-hold-back": (session, "TransactionBuilder", FullFragments),
        "early-confirm": (session, "Binder", EagerBinder),
        "early-boundary": (session, "TopicWriter", EagerWriter),
        "torn-binding": (session, "TopicWriter", TornWriter),
        "early-wake": (capture_shapes, "LiveShape", EagerShape),
        "lost-notice": (session, "Binder", _forgetful(world)),
        "late-tombstone": (session, "DeferrableKeys", BlindRivals),
    }
    if fault not in places:
        yield
        return
    with swapped(*places[fault]):
        yield
