"""Faults planted into a session: each replaces one of its parts, for the worlds of one fault."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from sim.world import World, swapped
from tidemill.base.lsn import ChangePosition
from tidemill.capture.changes import Fragment
from tidemill.capture.decode.transaction_builder import TransactionBuilder
from tidemill.capture.delivery.collector import Collector
from tidemill.capture.delivery.deferrable_keys import DeferrableKeys
from tidemill.capture.delivery.flush_alignment import FlushAlignment
from tidemill.capture.postgres.standby_status import ReplicationStatus
from tidemill.capture.session import session
from tidemill.capture.topics.binder import Binder, CommitBoundary
from tidemill.capture.topics.topic_writer import TopicWriter

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
)


class RawWriter(TopicWriter):
    """Planted fault `seed002`: a durable position inside a transaction is reported immediately, not at the commit."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._consumer = FlushAlignment(defer=False)


class EagerWriter(TopicWriter):
    """Planted fault early-boundary: a commit's boundary goes to the binder at its delivery, before it is durable."""

    def _add_boundary(self, fragment: Fragment, written: ChangePosition | None) -> None:
        super()._add_boundary(fragment, written)
        self._pass_on_boundaries(fragment.last)


class EagerBinder(Binder):
    """Planted fault early-confirm: a durable boundary is reported as flushed before a binding covers it."""

    def add_durable(self, boundaries: Sequence[CommitBoundary]) -> None:
        super().add_durable(boundaries)
        for boundary in boundaries:
            self._on_bound(boundary.last)


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
        def told(position: ChangePosition) -> None:
            if world.source.random() >= 0.3:
                on_bound(position)

        return Binder(remap, clock, told, **options)

    return make


@contextlib.contextmanager
def planted(world: World, fault: str) -> Iterator[None]:
    """Plant one of the faults that replace a part of the session."""
    places: dict[str, tuple[str, object]] = {
        "seed002": ("TopicWriter", RawWriter),
        "early-keepalive": ("ReplicationStatus", partial(ReplicationStatus, recompute_at_commit=False)),
        "early-register": ("Collector", EagerCollector),
        "no-hold-back": ("TransactionBuilder", partial(TransactionBuilder, hold_back=False)),
        "early-confirm": ("Binder", EagerBinder),
        "early-boundary": ("TopicWriter", EagerWriter),
        "lost-notice": ("Binder", _forgetful(world)),
        "late-tombstone": ("DeferrableKeys", BlindRivals),
    }
    if fault not in places:
        yield
        return
    name, value = places[fault]
    with swapped(session, name, value):
        yield
