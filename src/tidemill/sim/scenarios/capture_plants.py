"""Faults planted into a session: each takes the place of one of its parts, for the worlds of one fault."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from tidemill.base.lsn import ChangePosition
from tidemill.capture.changes import Fragment
from tidemill.capture.decode.transaction_builder import TransactionBuilder
from tidemill.capture.delivery.collector import Collector
from tidemill.capture.delivery.deferrable_keys import DeferrableKeys
from tidemill.capture.delivery.flush_alignment import FlushAlignment
from tidemill.capture.postgres.standby_status import ReplicationStatus
from tidemill.capture.session import session
from tidemill.capture.topics.binder import Binder
from tidemill.capture.topics.commit_boundaries import CommitBoundary
from tidemill.capture.topics.topic_writer import TopicWriter
from tidemill.sim.world import World, swapped

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
    """Plants seed002: what is durable in the middle of a transaction is reported as it is, not at its commit."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._consumer = FlushAlignment(defer=False)


class EagerWriter(TopicWriter):
    """Plants early-boundary: a commit's boundary goes to the binder when it was handed over, not when it is durable."""

    def _add_boundary(self, fragment: Fragment, written: ChangePosition | None) -> None:
        super()._add_boundary(fragment, written)
        self._pass_on_boundaries(fragment.last)


class EagerBinder(Binder):
    """Plants early-confirm: a boundary is reported flushed when it is durable, before a binding covers it."""

    def add_durable(self, boundaries: Sequence[CommitBoundary]) -> None:
        super().add_durable(boundaries)
        for boundary in boundaries:
            self._on_bound(boundary.last)


class EagerCollector(Collector):
    """Plants early-register: a commit is registered for those who had something of it before it is delivered, not for
    those to whom it was."""

    async def _process_fragment(self, fragment: Fragment) -> None:
        if fragment.commits:
            self._register_commit(fragment, self._touched)
        await super()._process_fragment(fragment)


class BlindRivals(DeferrableKeys):
    """Plants late-tombstone: who leaves a key leaves a tombstone, whoever has taken it."""

    async def resolve_fragment(self, fragment: Fragment) -> list[Fragment]:
        return [fragment]


def _forgetful(world: World) -> Callable[..., Binder]:
    """Plants lost-notice: now and then nobody is told that a commit is bound."""

    def make(remap: Any, clock: Any, on_bound: Callable[[ChangePosition], None], **options: Any) -> Binder:
        def told(position: ChangePosition) -> None:
            if world.source.random() >= 0.3:
                on_bound(position)

        return Binder(remap, clock, told, **options)

    return make


@contextlib.contextmanager
def planted(world: World, fault: str) -> Iterator[None]:
    """Of the faults that are not planted by who takes part in the world itself."""
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
