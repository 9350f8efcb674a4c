"""Decide which batches go into the next object of a topic, and when the next round starts. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tidemill.topics.api import BatchRef
from tidemill.topics.partition.state_machine.state import PartitionState

SPEED_UP, SLOW_DOWN = 0.75, 0.25
"""Weights with which the interval moves towards the one that would have filled an object. A fast speed-up limits the
memory that large objects take while they are built."""

OBJECT_PARTITIONS_MAX = 3_000
"""Limit of partitions per object: an object is one commit, of several rows per partition (METASTORE_BATCH_ROWS)."""

PIECE_BATCHES_MAX = 65_536
"""Limit of batches of one partition in one object: bounds the memory for a topic of tiny batches."""

ROUND_BATCHES_TARGET = 1_024
"""Target of batches of one partition per round. In the worst case a reader on another node requests as many L0 objects,
and the next leader replays their log records. Tiny batches would otherwise take an hour to fill an L1 object."""


class PartitionPiece(msgspec.Struct, frozen=True):
    """Offsets [start, end) of a partition and their batches. `terms`: (term, its first offset here)."""

    partition: int
    start: int
    end: int
    refs: list[BatchRef]
    terms: tuple[tuple[int, int], ...]

    @property
    def size_bytes(self) -> int:
        return sum(ref.size_bytes for ref in self.refs)


def cut_piece(
    state: PartitionState, partition: int, start: int, end: int, room_bytes: int, *, at_least_one: bool
) -> PartitionPiece | None:
    """Cut a piece from the hot state: whole batches from `start` that end by `end` and fit in `room_bytes`.

    With `at_least_one`, the first batch is included even if it is larger. `start` must not be below the start of the
    hot state. Returns None if no batch fits or exists.
    """
    index = state.batch_index(start)
    refs: list[BatchRef] = []
    at = start
    while index < len(state) and len(refs) < PIECE_BATCHES_MAX:
        following = state.next_base(index)
        if following > end or (state.sizes[index] > room_bytes and (refs or not at_least_one)):
            break
        refs.append(state.batch_ref(index))
        room_bytes -= state.sizes[index]
        at = following
        index += 1
    return PartitionPiece(partition, start, at, refs, select_terms(state.terms, start, at)) if refs else None


def select_terms(terms: Sequence[tuple[int, int]], start: int, end: int) -> tuple[tuple[int, int], ...]:
    """Select the leader epochs that placed [start, end), the first one cut to begin at `start`.

    Its term is 0 if the log no longer has it.
    """
    before = [term for term, first in terms if first <= start]
    inside = [(term, first) for term, first in terms if start < first < end]
    return ((before[-1] if before else 0, start), *inside)


def moved_share(size_bytes: int, target_bytes: int, batches: int) -> float:
    """Return the moved part of a round's target: 1 if it filled an object, or moved ROUND_BATCHES_TARGET of a
    partition."""
    return max(size_bytes / target_bytes, batches / ROUND_BATCHES_TARGET)


def next_interval_s(
    interval_s: float, part: float, least_s: float, most_s: float, *, full: bool, took_s: float
) -> float:
    """Return the pause after a round that moved `part` of its target after `interval_s` and took `took_s`.

    `full`: there was more than one object could take. The next round then follows after a rest as long as the work, so
    that reconciling keeps up with any load, but takes at most half of the time. If nothing moved, something blocked the
    round: the interval doubles.
    """
    if full:
        return min(took_s, most_s)
    wanted_s = interval_s / part if part else 2 * interval_s
    wanted_s = min(max(wanted_s, least_s), most_s)
    blend = SPEED_UP if wanted_s < interval_s else SLOW_DOWN
    return max(interval_s + blend * (wanted_s - interval_s), least_s)
