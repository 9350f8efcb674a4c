"""Split the frames of one receive into steps, in order: ranges of rows, and single messages. Pure.

A burst is joined into one buffer, and its row changes are found by columns (row_blocks.py), over all transactions
together. A message that is no row change, is too large to be joined, belongs to a relation with few rows here, or is
irregular in any way, is a separate step and is decoded row by row. So the steps contain every message once, in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tidemill.capture.decode.columnar_tuples import DELETE, INSERT, PAD_BYTES, TUPLE_AT, UPDATE, Bools, Int64s, Walker
from tidemill.capture.decode.row_blocks import Segment
from tidemill.capture.decode.transaction_builder import TransactionBuilder
from tidemill.capture.postgres.replication_stream import Framed, framed
from tidemill.capture.postgres.standby_status import PAYLOAD_START, Keepalive

LEAST_ROWS = 96
"""Fewer rows of a relation are decoded and encoded faster one by one (`./dev bench capture_rows`)."""
LARGE_BYTES = 64 << 10
"""Joining a larger frame costs more than decoding its row."""
_HEAD_BYTES = PAYLOAD_START + TUPLE_AT + 2
_DATA, _RELATION = b"wR"


class Run:
    """Row changes at the places [start, end) of a segment, to be fed as a range."""

    __slots__ = ("_frames", "end", "segment", "start")

    def __init__(self, frames: Sequence[bytes], segment: Segment, start: int, end: int) -> None:
        self._frames = frames
        self.segment = segment
        self.start = start
        self.end = end

    def framed(self, place: int) -> Framed | Keepalive:
        """Return one frame, to be fed separately after all."""
        return framed(self._frames[place])


Step = Framed | Keepalive | Run


def steps(frames: Sequence[bytes], converter: TransactionBuilder, least: int = LEAST_ROWS) -> Iterator[Step]:
    """Yield every frame once, in order. The caller feeds each step to `converter` before it requests the next one,
    because a description of a relation applies to the messages after it. Raises CorruptError for an unknown frame.
    """
    if len(frames) < max(least, 1):
        yield from map(framed, frames)
        return
    walker, starts, ends, joined = _joined(frames)
    kinds = np.where(ends - starts > TUPLE_AT + 1, walker.bytes[starts], 0)
    rows = joined & ((kinds == INSERT) | (kinds == UPDATE) | (kinds == DELETE))
    (described,) = np.nonzero(kinds == _RELATION)
    at = 0
    for end in [*described.tolist(), len(frames)]:
        places = np.nonzero(rows[at:end])[0] + at
        if len(places) >= least:
            segment = Segment(walker, starts, ends, places, converter.relations, converter.carries, least)
            yield from _steps(frames, segment, at, end)
        else:
            yield from map(framed, frames[at:end])
        yield from map(framed, frames[end : end + 1])
        at = end + 1


def _steps(frames: Sequence[bytes], segment: Segment, at: int, end: int) -> Iterator[Step]:
    (alone,) = np.nonzero(~segment.whole[at:end])
    for place in [*(alone + at).tolist(), end]:
        if place > at:
            yield Run(frames, segment, at, place)
        if place < end:
            yield framed(frames[place])
        at = place + 1


def _joined(frames: Sequence[bytes]) -> tuple[Walker, Int64s, Int64s, Bools]:
    """Return all frames in one buffer, the start and end of each message, and which frames are complete: of a large one
    only the head is included. A frame without a message has an empty one.
    """
    sizes = np.fromiter(map(len, frames), np.int64, len(frames))
    whole = sizes <= LARGE_BYTES
    if not whole.all():
        frames = [frame if len(frame) <= LARGE_BYTES else frame[:_HEAD_BYTES] for frame in frames]
        sizes = np.where(whole, sizes, _HEAD_BYTES)
    walker = Walker(b"".join([*frames, bytes(PAD_BYTES)]))
    ends = np.cumsum(sizes)
    starts = ends - sizes
    data = (walker.bytes[starts] == _DATA) & (sizes >= PAYLOAD_START)
    return walker, np.where(data, starts + PAYLOAD_START, ends), ends, whole
