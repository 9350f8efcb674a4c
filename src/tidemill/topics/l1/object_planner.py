"""What the reconciler decides: which batches go into the next object of a topic, and when to look again. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tidemill.topics.api import BatchRef
from tidemill.topics.partition.state import PartitionState

SPEED_UP, SLOW_DOWN = 0.75, 0.25
"""How far the interval moves towards what would have filled an object: large objects are in memory while made."""

PIECES = 3_000
"""Partitions of one object: what it changes is one commit, of some rows each (METASTORE_BATCH_ROWS)."""

PIECE_BATCHES = 65_536
"""Of one partition in one object: what is held of a topic of tiny batches."""

ROUND_BATCHES = 1_024
"""Of one partition, since the last round: whoever reads it from elsewhere asks for as many objects of L0 in the worst
case, and its next leader replays what tells of them. Small ones would fill an L1 object in an hour."""


class Piece(msgspec.Struct, frozen=True):
    """Offsets [start, end) of a partition, and the batches that lie in them. `terms`: (term, its first offset here)."""

    partition: int
    start: int
    end: int
    refs: list[BatchRef]
    terms: tuple[tuple[int, int], ...]

    @property
    def size_bytes(self) -> int:
        return sum(ref.size_bytes for ref in self.refs)


def cut(
    state: PartitionState, partition: int, start: int, end: int, room_bytes: int, *, at_least_one: bool
) -> Piece | None:
    """Whole batches of the hot state from `start` on that end by `end` and fit; the first one regardless if asked.

    `start`: not below where the hot state starts. None when nothing fits or is there.
    """
    index = state.first_batch(start)
    refs: list[BatchRef] = []
    at = start
    while index < len(state) and len(refs) < PIECE_BATCHES:
        following = state.next_base(index)
        if following > end or (state.sizes[index] > room_bytes and (refs or not at_least_one)):
            break
        refs.append(state.ref(index))
        room_bytes -= state.sizes[index]
        at = following
        index += 1
    return Piece(partition, start, at, refs, terms_of(state.terms, start, at)) if refs else None


def terms_of(terms: Sequence[tuple[int, int]], start: int, end: int) -> tuple[tuple[int, int], ...]:
    """Of the leader epochs of a log those that placed [start, end), the first as if it began at `start`; 0 where the
    log does not know it."""
    before = [term for term, first in terms if first <= start]
    inside = [(term, first) for term, first in terms if start < first < end]
    return ((before[-1] if before else 0, start), *inside)


def part_moved(size_bytes: int, target_bytes: int, batches: int) -> float:
    """How much of what one round should move it moved: 1 when it filled an object, or moved ROUND_BATCHES of a
    partition."""
    return max(size_bytes / target_bytes, batches / ROUND_BATCHES)


def next_interval_s(
    interval_s: float, part: float, least_s: float, most_s: float, *, full: bool, took_s: float
) -> float:
    """After a round that moved `part` of what it should after `interval_s` and took `took_s`.

    `full`: more was there than one object takes. The next one follows when it has rested for as long as it worked,
    however soon that is: whatever is written, it is caught up with, for half of the time at most. Where nothing moved,
    something stood in the way: it is looked at a little later each time.
    """
    if full:
        return min(took_s, most_s)
    wanted_s = interval_s / part if part else 2 * interval_s
    wanted_s = min(max(wanted_s, least_s), most_s)
    blend = SPEED_UP if wanted_s < interval_s else SLOW_DOWN
    return max(interval_s + blend * (wanted_s - interval_s), least_s)
