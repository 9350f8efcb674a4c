"""Slices of offsets: the offsets of a topic in an interval of time, and the time of each, by the bindings of remap.

A record gets the smallest time whose binding passes its offset. For [lower, upper) there is one slice per partition:

    base      the binding in force at lower - 1: the offsets covered before
    bindings  those with lower ≤ time < upper, oldest first, contiguous
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tidemill.shards.api import Binding
from tidemill.topics.api import BatchRef


class Slice(msgspec.Struct, frozen=True):
    """Offsets [start, end) of one partition; an offset below ends[i] (and not below ends[i-1]) has times[i].

    Both tuples increase strictly; ends[-1] == end. `begins_ms`: the time of the first binding that knows this topic, if
    it is in the interval: the table's contents before that time come from an earlier topic. Else -1.
    """

    topic: str
    topic_id: str
    partition: int
    start: int
    end: int
    ends: tuple[int, ...]
    times: tuple[int, ...]
    begins_ms: int = -1

    def times_of(self, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        at = np.searchsorted(np.array(self.ends, dtype=np.int64), offsets, side="right")
        return np.array(self.times, dtype=np.int64)[at]


class SliceDescriptor(msgspec.Struct, frozen=True):
    """A slice and the positions of its record batches: all that an executor needs apart from the bucket."""

    slice: Slice
    refs: tuple[BatchRef, ...]


def cut_slices(
    base: Binding | None, bindings: Sequence[Binding], topic: str, topic_id: str, *, begins_first: bool = True
) -> list[Slice]:
    """Return the non-empty slices of a topic, by partition; a topic that begins here without records has one empty
    slice.

    `begins_first`: the topic begins here even if no topic was bound before it. For a stream that is false: the contents
    of its table before that time do not come from an earlier topic but were written into it, and stay.
    """
    if not bindings:
        return []
    before = base.offsets.get(topic_id, ()) if base is not None else ()
    known = [b.time_ms for b in bindings if topic_id in b.offsets]
    begins_ms = known[0] if known and not before else -1
    if not begins_first and not any(b.offsets for b in (base, *bindings) if b is not None and b.time_ms < begins_ms):
        begins_ms = -1
    count = max(len(b.offsets.get(topic_id, ())) for b in bindings)
    out = []
    for partition in range(count):
        start = at = before[partition] if partition < len(before) else 0
        ends: list[int] = []
        times: list[int] = []
        for binding in bindings:
            offsets = binding.offsets.get(topic_id, ())
            end = offsets[partition] if partition < len(offsets) else at
            if end > at:
                ends.append(end)
                times.append(binding.time_ms)
                at = end
        if ends:
            out.append(Slice(topic, topic_id, partition, start, at, tuple(ends), tuple(times), begins_ms))
    if begins_ms >= 0 and not out:
        out.append(Slice(topic, topic_id, 0, 0, 0, (0,), (begins_ms,), begins_ms))
    return out


def record_count(slices: Sequence[Slice]) -> int:
    """Return an upper bound of the number of records (compacted topics have gaps)."""
    return sum(s.end - s.start for s in slices)
